"""SVDConfig: what to compress, how far, and by which method."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self, cast

from neuroncore.hardware import resolve_target
from neuronmm_ops.compress.methods import METHODS
from neuronmm_ops.compress.patterns import takes_for_ever
from neuronmm_ops.plan.exchange import Collectives
from neuronmm_ops.rank import STEP, aligned_rank
from neuronmm_ops.storages import STORAGES as ONE_BYTE

FORMAT_VERSION = 2
ALLOCATIONS = ("greedy", "uniform")
IMPORTANCES = ("gradient", "error", "perplexity")
BUDGETS = ("parameters", "bytes", "time")
AUTO = "auto"
STORAGES = ("bf16", *ONE_BYTE, AUTO)
# Of one layer: its ratio, or the smallest and the largest that it may get.
LayerRatio = float | tuple[float, float]
# Of a launch: how many, or the weight of each of several numbers of them.
Tokens = int | Mapping[int, float] | tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class SVDConfig:
    """How to compress a model. Frozen; `to_dict` and `from_dict` are its versioned JSON.

    Args:
        ratio: nominal compression ratio, the fraction of the replaced matrices' parameters that is
            *removed*, in (0, 1); 0 keeps all matrices dense, to store them in a `storage`.
        block: ranks are multiples of it; itself a multiple of 8. 128 is the kernels' tile.
        alpha: rounding threshold of the rank rule, in [0, 1]; 0.5 rounds to nearest.
        targets: which Linears: a preset (`mlp`, `attention`, `all-linear`), module names (whole
            or last component), or regular expressions for the whole name; one or several.
        method: `plain` (SVD of the weight), `whiten` (SVD-LLM), `swift` (the same optimum as
            `whiten` from eigenvectors of the output covariance; needs no inverse), `kfac` (output
            errors weighed by the loss's gradient), `drift` (regression towards the dense outputs
            from the inputs that compressed layers produce), `kfac-drift` (that by kfac's weights;
            where layers cannot be run one by one, with a warning, `kfac`), `zero-sum` (ZS-SVD).
        allocation: `greedy`, one budget for all matrices, spent where it avoids most loss; or
            `uniform`, the paper's rule for each matrix. With `zero-sum`, `greedy` is that method's
            own order.
        importance: what makes losses of matrices comparable: `gradient` (the mean square of the
            loss's gradient with respect to the output), `error` (each output's relative error), or
            `perplexity` (measured with one matrix compressed at a time). None is `gradient`, for
            `plain`, which needs no calibration, `error`. `uniform` and `zero-sum` take none.
        budget: what `ratio` is a fraction of: `parameters`, `bytes`, or `time`, which is modelled
            for `tokens` tokens on a `target`.
        target: `trn1`, `trn2` or `trn3`, for budget `time`.
        tokens: M, for budget `time` alone; 1 is decoding. Or several, each with the weight of a
            launch of so many in the sum that is the cost: `{1: 0.8, 2048: 0.2}`.
        lnc: NeuronCores of a launch, for budget `time` alone: 1, or 2 on trn2 and trn3.
        tp: ranks of tensor parallel, for budget `time` alone, with what they exchange.
        layer_ratios: target (as in `targets`) to a ratio of its own for every layer it selects,
            which then takes no part in the common budget (0 keeps it dense); or to the smallest and
            largest ratio it may get. The first that selects a layer holds.
        storage: of the targets' matrices, factors and those that stay dense: `fp8` (e4m3 up to
            240) or `int8`, one byte a number and a scale a column; `bf16`, which the replaced
            Linears must have; None for their dtype, whatever it is; `auto` for what the budget, of
            bytes or time, buys best for each matrix, dense ones too.
        prune_share: of what is removed, the share that narrower MLPs have, see `prune_`; pairs
            take the rest. In [0, 1]; all targets must share one budget. With 1 all stay dense.
        head_storage: of the output head, `fp8` or `int8`, which stays dense and is rounded to
            nearest; None leaves it as it is.

    Raises:
        ValueError: a value is outside its range.
        TypeError: a value has the wrong type.
    """

    ratio: float = 0.2
    block: int = 128
    alpha: float = 0.5
    targets: str | tuple[str, ...] = "mlp"
    method: str = "kfac-drift"
    allocation: str = "greedy"
    importance: str | None = None
    budget: str = "parameters"
    target: str | None = None
    tokens: Tokens = 1
    lnc: int = 1
    tp: int = 1
    layer_ratios: Mapping[str, LayerRatio] | tuple[tuple[str, LayerRatio], ...] = ()
    storage: str | None = None
    prune_share: float = 0.0
    head_storage: str | None = None

    def __post_init__(self) -> None:
        """Check every field; one bare target and a tuple of it are the same config."""
        for name in ("ratio", "alpha", "prune_share"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or isinstance(value, bool):
                raise TypeError(f"{name} must be a number, got {value!r}")
        keeps_dense = self.storage in ONE_BYTE or self.prune_share
        if not 0 <= self.ratio < 1 or (self.ratio == 0 and not keeps_dense):
            raise ValueError(
                "ratio must be in (0, 1), the fraction of parameters removed, or 0 with storage "
                f"{' or '.join(ONE_BYTE)}; got {self.ratio}"
            )
        for name in ("block", "lnc", "tp"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"{name} must be an integer, got {value!r}")
        if self.block < STEP or self.block % STEP:
            raise ValueError(f"block must be a positive multiple of {STEP}, got {self.block}")
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha must be in [0, 1], got {self.alpha}")
        for name, allowed in (
            ("method", tuple(METHODS)),
            ("allocation", ALLOCATIONS),
            ("importance", (None, *IMPORTANCES)),
            ("budget", BUDGETS),
            ("storage", (None, *STORAGES)),
            ("head_storage", (None, *ONE_BYTE)),
        ):
            value = getattr(self, name)
            if value not in allowed:
                choices = ", ".join(str(choice) for choice in allowed if choice)
                raise ValueError(f"{name} must be one of {choices}; got {value!r}")
        object.__setattr__(self, "tokens", _checked_tokens(self.tokens))
        if (self.budget == "time") != (self.target is not None):
            raise ValueError(
                "budget time needs a target (trn1, trn2 or trn3), and no other budget has one; "
                f"got budget {self.budget} and target {self.target}"
            )
        if self.tp < 1:
            raise ValueError(f"tp must be at least 1 rank, got {self.tp}")
        for name in ("tokens", "lnc", "tp"):
            value = getattr(self, name)
            if self.budget != "time" and value != 1:
                raise ValueError(f"budget time alone has {name}, got {value} and {self.budget}")
        if self.budget != "parameters" and self.allocation == "uniform":
            raise ValueError(f"allocation uniform knows no budget in {self.budget}; use greedy")
        if self.is_mixed and (self.budget == "parameters" or self.method in ("plain", "zero-sum")):
            raise ValueError(
                "storage auto compares measured losses for each byte or microsecond: use budget "
                "bytes or time, and a method other than plain and zero-sum; got "
                f"{self.budget} and {self.method}"
            )
        is_split = self.layer_ratios or self.allocation == "uniform"
        if not 0 <= self.prune_share <= 1 or (self.prune_share and is_split):
            raise ValueError(
                "prune_share must be in [0, 1], and 0 with allocation uniform or layer ratios; got "
                f"{self.prune_share}"
            )
        if self.importance and not self._compares_losses:
            raise ValueError(
                "importance compares losses of matrices, which method zero-sum, allocation "
                "uniform and storage auto do not; leave it out, or use another: got "
                f"{self.importance!r}, {self.method} and {self.allocation}"
            )
        if self.target is not None:
            hardware = resolve_target(self.target)
            hardware.check_lnc(self.lnc)
            Collectives(hardware.target, self.lnc, self.tp)  # refuses ranks that nothing connects
            object.__setattr__(self, "target", hardware.target)
        object.__setattr__(self, "targets", _checked_targets(self.targets))
        object.__setattr__(self, "layer_ratios", _checked_ratios(self.layer_ratios))

    @property
    def target_list(self) -> tuple[str, ...]:
        """The targets as a tuple."""
        return (self.targets,) if isinstance(self.targets, str) else self.targets

    @property
    def ratio_list(self) -> tuple[tuple[str, LayerRatio], ...]:
        """The layer ratios as pairs."""
        assert isinstance(self.layer_ratios, tuple)
        return self.layer_ratios

    @property
    def token_weights(self) -> tuple[tuple[int, float], ...]:
        """The numbers of tokens of a launch, each with its weight."""
        assert not isinstance(self.tokens, Mapping)
        return ((self.tokens, 1.0),) if isinstance(self.tokens, int) else self.tokens

    @property
    def one_byte(self) -> str | None:
        """The storage where it takes one byte a number and scales, else None."""
        return self.storage if self.storage in ONE_BYTE else None

    @property
    def is_mixed(self) -> bool:
        """Whether the budget chooses the storage of each matrix."""
        return self.storage == AUTO

    @property
    def weighs_by(self) -> str | None:
        """The importance in effect; None where losses need no weight."""
        if not self._compares_losses:
            return None
        method = METHODS[self.method]
        if self.importance is None:
            return None if method.is_loss else "gradient" if method.side else "error"
        return None if method.is_loss and self.importance == "gradient" else self.importance

    @property
    def _compares_losses(self) -> bool:
        is_greedy = self.allocation == "greedy" and not METHODS[self.method].by_scores
        return is_greedy and not self.is_mixed

    @property
    def needs_calibration(self) -> bool:
        """Whether anything looks at activations."""
        return self.calibrated_by is not None

    @property
    def calibrated_by(self) -> str | None:
        """What looks at activations, for messages; None where nothing does."""
        if METHODS[self.method].side is not None:
            return f"method {self.method}"
        if self.prune_share:
            return "prune_share"
        needs = self.weighs_by in ("gradient", "perplexity")
        return f"importance {self.weighs_by}" if needs else None

    def rank(self, K: int, N: int, bounds: tuple[float, float] = (0.0, 1.0)) -> int | None:
        """Return the uniform rule's rank of a `[K, N]` matrix, None where it stays dense.

        Args:
            K: rows.
            N: columns.
            bounds: the smallest and largest ratio that the matrix may get.
        """
        ratio = min(max(self.ratio, bounds[0]), bounds[1])
        return aligned_rank(K, N, ratio, self.block, self.alpha) if ratio > 0 else None

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-compatible dict with a format version."""
        return {
            "version": FORMAT_VERSION,
            **asdict(self),
            "targets": list(self.target_list),
            "layer_ratios": dict(self.ratio_list),
            "tokens": self.tokens
            if isinstance(self.tokens, int)
            else {str(count): weight for count, weight in self.token_weights},
        }

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Self:
        """Read what `to_dict` wrote.

        Raises:
            ValueError: the version is not supported, or a field is unknown or out of range.
        """
        values = dict(fields)
        version = values.pop("version", None)
        if version != FORMAT_VERSION:
            raise ValueError(
                f"SVDConfig version must be {FORMAT_VERSION}, got {version!r}; "
                "the file was written by another version of neuronmm-ops"
            )
        unknown = sorted(set(values) - set(cls.__dataclass_fields__))
        if unknown:
            raise ValueError(
                f"SVDConfig has no field {unknown[0]!r}; "
                f"its fields are {', '.join(cls.__dataclass_fields__)}"
            )
        return cls(**values)


def _checked_targets(targets: str | Iterable[str]) -> tuple[str, ...]:
    checked = (targets,) if isinstance(targets, str) else tuple(targets)
    if not checked:
        raise ValueError("targets must name at least one preset, module or pattern")
    for target in checked:
        if not isinstance(target, str) or not target:
            raise TypeError(f"targets must be non-empty strings, got {target!r}")
        try:
            re.compile(target)
        except re.error as error:
            raise ValueError(f"target {target!r} is no regular expression: {error}") from None
        if takes_for_ever(target):
            raise ValueError(
                f"target {target!r:.60} repeats what varies, or varies in too many places, and may "
                "take for ever to match; use at most four of * + ? and none within another"
            )
    return checked


def _checked_ratios(
    ratios: Mapping[str, LayerRatio] | tuple[tuple[str, LayerRatio], ...],
) -> tuple[tuple[str, LayerRatio], ...]:
    pairs = tuple(ratios.items()) if isinstance(ratios, Mapping) else ratios
    for name, _ in pairs:
        _checked_targets(name)
    return tuple((name, _checked_ratio(name, ratio)) for name, ratio in pairs)


def _checked_ratio(name: str, ratio: Any) -> LayerRatio:
    is_pair = isinstance(ratio, (list, tuple)) and len(cast(Sequence[Any], ratio)) == 2
    ends: list[Any] = list(ratio) if is_pair else [ratio, ratio]
    numbers = all(isinstance(end, (int, float)) and not isinstance(end, bool) for end in ends)
    if not numbers or not 0 <= ends[0] <= ends[1] < 1:
        raise ValueError(
            f"the layer ratio of {name} must be a number in [0, 1), or two such in order; "
            f"got {ratio!r}"
        )
    low, high = map(float, ends)
    return (low, high) if is_pair else low


def _checked_tokens(tokens: Any) -> Tokens:
    """Return a count, or pairs of counts and weights, of which a JSON document has text and all."""
    if not isinstance(tokens, (Mapping, tuple)):
        return _checked_count(tokens, tokens)
    pairs = cast(Iterable[Any], tokens.items() if isinstance(tokens, Mapping) else tokens)
    checked: dict[int, float] = {}
    for count, weight in pairs:
        is_text = isinstance(count, str) and count.isdecimal()
        number = _checked_count(int(count) if is_text else count, tokens)
        is_number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
        if not is_number or not 0 < weight < math.inf or number in checked:
            raise ValueError(
                f"tokens must be counts that differ, each with a positive weight; got {tokens!r}"
            )
        checked[number] = float(weight)
    if not checked:
        raise ValueError("tokens must have at least one count, got none")
    return tuple(checked.items())


def _checked_count(count: Any, tokens: Any) -> int:
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ValueError(f"tokens must be a positive integer, got {tokens!r}")
    return count
