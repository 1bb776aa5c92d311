"""The factors of every layer, by a sweep forward over the calibration set."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from neuronmm_ops.compress.calibrate import Progress, collect_moments
from neuronmm_ops.compress.config import SVDConfig
from neuronmm_ops.compress.factorization import SecondMoment, Side
from neuronmm_ops.compress.methods import METHODS
from neuronmm_ops.compress.nested import Nested, first_method, moment_sides
from neuronmm_ops.compress.pipeline import check_weights, warn_if_few
from neuronmm_ops.compress.rounding import (
    metric_kinds,
    output_metrics,
    round_pair,
    rounding_sides,
)
from neuronmm_ops.hf.streaming.sweep import Sweep
from neuronmm_ops.hf.streaming.work import Work
from neuronmm_ops.nn.dense_linear import DenseLinear, as_dense_linear

# Names of kept hidden states, of the first sweep and of that for rounding.
STATES, AGAIN = "states", "again"
Ranks = Mapping[int, Mapping[str, int]]  # layer to name in the layer to the largest rank


@torch.no_grad()
def sweep_factors(
    sweep: Sweep,
    config: SVDConfig,
    ranks: Ranks,
    batches: Sequence[Tensor],
    work: Work,
    progress: Progress,
) -> None:
    """Write `layer-I` of every layer up to the last in `ranks`, what `read_losses` reads.

    Args:
        sweep: of the model.
        config: whose method factors.
        ranks: the largest that each Linear may get.
        batches: token ids `[B, T]`; none for `plain`.
        work: holds `gradients-I` where the config needs gradients; what is there is not done again.
        progress: told `("factorize", layers done, layers in all)` after each that was not done.

    Raises:
        NonFiniteError: a weight, an activation or a factor is NaN or Inf.
    """
    follows_states = METHODS[first_method(config)].side is not None
    read = batches if follows_states else ()
    for index, passed in _passes(sweep, max(ranks) + 1, "layer", STATES, read, work):
        if passed is not None:
            _factor_layer(sweep, index, passed, ranks.get(index, {}), config, work)
            progress("factorize", index + 1, max(ranks) + 1)
        work.drop(f"gradients-{index}")


@torch.no_grad()
def sweep_rounded(
    sweep: Sweep,
    config: SVDConfig,
    ranks: Ranks,
    batches: Sequence[Tensor],
    work: Work,
    progress: Progress,
) -> None:
    """Write `rounded-I` of every layer in `ranks`: u, v and their scales, by the Linears' names.

    Runs the layers once more over the calibration set, for the moments of their inputs.

    Args:
        sweep: of the model.
        config: with a storage of one byte.
        ranks: of each Linear that gets one.
        batches: token ids `[B, T]`; none for `plain`.
        work: holds `layer-I`; what is there is not done again.
        progress: told `("quantize", layers done, layers in all)` after each that was not done.
    """
    read = batches if rounding_sides(config, {"": None}) else ()
    for index, passed in _passes(sweep, max(ranks) + 1, "rounded", AGAIN, read, work):
        if passed is not None:
            _round_layer(sweep, index, passed, ranks.get(index, {}), config, work)
            progress("quantize", index + 1, max(ranks) + 1)


def _passes(
    sweep: Sweep, count: int, done: str, states: str, batches: Sequence[Tensor], work: Work
) -> Iterator[tuple[int, "_Pass | None"]]:
    """Yield the first `count` layers by number, ready to run; None for what is done already.

    Args:
        sweep: of the model.
        count: how many layers.
        done: name of what says, with a layer's number, that it is done.
        states: name of the hidden states that are kept on the way, and dropped behind it.
        batches: token ids `[B, T]`; none where no layer has to be run over them.
        work: holds both.
    """
    for index in range(count):
        if work.has(f"{done}-{index}"):
            yield index, None
        else:
            if batches and index == 0:
                _embed(sweep, batches, work, states)
            with sweep.running(), sweep.layer(index) as layer:
                passed = _Pass(sweep, index, layer, work, states)
                passed.batches, passed.is_last = len(batches), index == count - 1
                yield index, passed
        work.drop(f"{states}-{index}")
    work.drop(states)


def _round_layer(
    sweep: Sweep,
    index: int,
    passed: "_Pass",
    ranks: Mapping[str, int],
    config: SVDConfig,
    work: Work,
) -> None:
    """Round the factors of a layer's Linears, truncated to their ranks, and keep them."""
    prefix = f"{sweep.stack.name}.{index}."
    linears = {name: as_dense_linear(passed.layer.get_submodule(name)) for name in ranks}
    kept = {name: work.load(f"layer-{index}", of=f"{name}.") for name in ranks}
    gradients = {n: kept[n][f"{n}.metric"] for n in ranks if f"{n}.metric" in kept[n]}
    metrics = output_metrics(config, {n: linears[n] for n in gradients}, gradients)
    found: dict[str, Tensor] = {}
    for name, moment in passed.moments_or_none(rounding_sides(config, linears), linears):
        weight = linears[name].weight
        u, v = kept[name][f"{name}.u"], kept[name][f"{name}.v"]
        pair = u[:, : ranks[name]].to(weight.device), v[: ranks[name]].to(weight.device)
        metric = metrics.get(name)
        metric = None if metric is None else metric.to(weight.device)
        rounded = round_pair(prefix + name, config, pair, weight, moment, metric)
        found |= {f"{name}.{leaf}": tensor for leaf, tensor in rounded._asdict().items()}
    # Last: it says that the layer is done.
    work.save(f"rounded-{index}", found)


def read_losses(work: Work, index: int, name: str) -> tuple[Nested, Tensor | None]:
    """Return what is kept of a Linear by its name in layer `index`, and its gradient's scale.

    The factors are on the meta device: those of all layers together may be larger than memory.
    """
    kept = work.load(f"layer-{index}", of=f"{name}.")
    u, v = (torch.empty_like(kept[f"{name}.{leaf}"], device="meta") for leaf in "uv")
    spectrum, scores, scale = (kept.get(f"{name}.{key}") for key in ("spectrum", "scores", "scale"))
    assert spectrum is not None
    return Nested((u, v), spectrum.clone(), _copy(scores)), _copy(scale)


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone()


class _Pass(nn.Module):
    """A layer as a model for `collect_moments`, whose batches are numbers of kept hidden states.

    What leaves the layer is kept for the next one.

    Attributes:
        batches: how many.
        is_last: whether there is no next one.
    """

    def __init__(
        self, sweep: Sweep, index: int, layer: nn.Module, work: Work, states: str = STATES
    ) -> None:
        super().__init__()
        self.layer = layer
        self._states = states
        self.batches, self.is_last = 0, False
        self._sweep, self._index, self._work = sweep, index, work

    def forward(self, number: int) -> None:
        kept = self._work.load(f"{self._states}-{self._index}-{number}")
        leaving = self._sweep.run(self._index, *self._sweep.states(kept))
        if not self.is_last:
            self._work.save(f"{self._states}-{self._index + 1}-{number}", {"states": leaving})

    def moments(self, sides: Mapping[str, Side]) -> Iterator[tuple[str, SecondMoment]]:
        """Run the layer over all batches and yield the moments of its Linears, by name."""
        if not sides:
            for number in range(self.batches):
                self(number)
            return
        batches = [{"number": number} for number in range(self.batches)]
        inside: dict[str, Side] = {f"layer.{name}": side for name, side in sides.items()}
        for name, moment in collect_moments(self, inside, batches):
            yield name.removeprefix("layer."), moment

    def moments_or_none(
        self, sides: Mapping[str, Side], linears: Mapping[str, DenseLinear]
    ) -> Iterator[tuple[str, SecondMoment | None]]:
        """Run the layer, and yield the moments of its Linears; None of each where no side is."""
        yield from self.moments(sides)
        if not sides:
            yield from ((name, None) for name in linears)


def _factor_layer(
    sweep: Sweep,
    index: int,
    passed: _Pass,
    ranks: Mapping[str, int],
    config: SVDConfig,
    work: Work,
) -> None:
    """Factor the Linears of a layer and keep what is found."""
    prefix = f"{sweep.stack.name}.{index}."
    linears = {name: as_dense_linear(passed.layer.get_submodule(name)) for name in ranks}
    named = {prefix + name: linear for name, linear in linears.items()}
    check_weights(named)
    has_gradients = work.has(f"gradients-{index}")
    gradients = work.load(f"gradients-{index}") if has_gradients else {}
    found: dict[str, Tensor] = {}
    for name, moment in passed.moments_or_none(moment_sides(config, linears), linears):
        if moment and not found and index == 0:
            warn_if_few(moment.tokens, named, stacklevel=6)
        gradient = gradients.get(name)
        if gradient is not None:
            gradient = gradient.to(linears[name].weight.device)
        nested = Nested.of(
            prefix + name, linears[name].weight, config, moment, gradient, ranks[name]
        )
        stored = sweep.stored_dtype(prefix + name)
        assert nested.factors is not None
        u, v = nested.factors
        found |= {f"{name}.u": u.to(stored), f"{name}.v": v.to(stored)}
        found[f"{name}.spectrum"] = nested.spectrum
        if nested.scores is not None:
            found[f"{name}.scores"] = nested.scores
        if gradient is not None and gradient.dim() == 0:
            found[f"{name}.scale"] = gradient
        if gradient is not None and config.one_byte and name in metric_kinds(config, linears):
            found[f"{name}.metric"] = gradient
    # Last: it says that the layer is done.
    work.save(f"layer-{index}", found)


def _embed(sweep: Sweep, batches: Sequence[Tensor], work: Work, states: str = STATES) -> None:
    """Keep the hidden states that enter the first layer."""
    with sweep.with_ends():
        for number, batch in enumerate(batches):
            work.save(f"{states}-0-{number}", {"states": sweep.embed(batch)})
