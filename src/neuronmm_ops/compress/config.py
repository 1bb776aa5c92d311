"""SVDConfig: what to compress, how far, and by which method."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from neuronmm_ops.compress.methods import METHODS
from neuronmm_ops.compress.rank import STEP, aligned_rank

FORMAT_VERSION = 1


@dataclass(frozen=True)
class SVDConfig:
    """How to compress a model. Frozen; serializes to versioned JSON.

    Args:
        ratio: nominal compression ratio, the fraction of the replaced matrices' parameters that is
            *removed*, in (0, 1).
        block: ranks are multiples of it; itself a multiple of 8. 128 is the kernels' tile.
        alpha: rounding threshold of the rank rule, in [0, 1]; 0.5 rounds to nearest.
        targets: which Linears: a preset (`mlp`, `attention`, `all-linear`), module names (whole
            or last component), or regular expressions for the whole name; one or several.
        method: `plain` (SVD of the weight), `whiten` (SVD-LLM), `swift` (the same optimum as
            `whiten` from eigenvectors of the output covariance; needs no inverse).

    Raises:
        ValueError: a value is outside its range.
        TypeError: a value has the wrong type.
    """

    ratio: float = 0.2
    block: int = 128
    alpha: float = 0.5
    targets: str | tuple[str, ...] = "mlp"
    method: str = "swift"

    def __post_init__(self) -> None:
        """Check every field; one bare target and a tuple of it are the same config."""
        for name in ("ratio", "alpha"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or isinstance(value, bool):
                raise TypeError(f"{name} must be a number, got {value!r}")
        if not 0 < self.ratio < 1:
            raise ValueError(
                f"ratio must be in (0, 1), the fraction of parameters removed; got {self.ratio}"
            )
        if not isinstance(self.block, int) or isinstance(self.block, bool):
            raise TypeError(f"block must be an integer, got {self.block!r}")
        if self.block < STEP or self.block % STEP:
            raise ValueError(f"block must be a positive multiple of {STEP}, got {self.block}")
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha must be in [0, 1], got {self.alpha}")
        if self.method not in tuple(METHODS):
            raise ValueError(f"method must be one of {', '.join(METHODS)}; got {self.method!r}")
        object.__setattr__(self, "targets", _checked_targets(self.targets))

    @property
    def target_list(self) -> tuple[str, ...]:
        """The targets as a tuple."""
        return (self.targets,) if isinstance(self.targets, str) else self.targets

    @property
    def needs_calibration(self) -> bool:
        """Whether the method looks at activations."""
        return METHODS[self.method].side is not None

    def rank(self, K: int, N: int) -> int | None:
        """Return the rank of a `[K, N]` matrix, None where it stays dense."""
        return aligned_rank(K, N, self.ratio, self.block, self.alpha)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-compatible dict with a format version."""
        return {"version": FORMAT_VERSION, **asdict(self), "targets": list(self.target_list)}

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

    def to_json(self) -> str:
        """Return the config as a JSON document."""
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` wrote.

        Raises:
            ValueError: the text is no such document.
        """
        fields = json.loads(text)
        if not isinstance(fields, dict):
            raise ValueError(f"SVDConfig must be a JSON object, got {type(fields).__name__}")
        return cls.from_dict(fields)


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
    return checked
