"""What the demo's layers would take on Trainium: kernels traced on the simulated NeuronCore.

All times are modelled. One fused kernel also runs there with the demo's real weights and
activations, and its values are held against the CPU's op.
"""

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import neuronmm_ops as nm
from benchmarks.kernels import KernelChoice, measure
from neuroncore import Profile, simulate
from neuronmm_ops.estimate.ends import spread
from neuronmm_ops.kernels import nki_kernel
from neuronmm_ops.models import model_shape
from neuronmm_ops.plan import Problem, mlp_matrices, plan_svd_mlp
from neuronmm_ops.rank import aligned_rank

TARGET = "trn2"
LARGE = "Llama-3.2-1B"
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
FACTORS = ("u_gate", "v_gate", "u_up", "v_up", "u_down", "v_down")
FUSED_TOKENS = 128
# Both round x U, the activation, hidden x U and the result, each by half a step at most; a step of
# either may fall the other way.
ROUNDINGS = 4

Ranks = tuple[int | None, int | None, int | None]
"""Of gate, up and down; None of one that stays dense."""


@dataclass(frozen=True)
class MlpTimes:
    """The MLPs of all layers of a model, dense and compressed, modelled.

    Attributes:
        model: its name.
        layers: how many there are.
        tokens: rows of x; 1 is decode.
        dense_ms: at each of `estimate.ends.ENDS`.
        low_rank_ms: as dense_ms.
        dense_bytes: HBM traffic.
        low_rank_bytes: as dense_bytes.
        bound: by what the compressed one is bound.
    """

    model: str
    layers: int
    tokens: int
    dense_ms: tuple[float, ...]
    low_rank_ms: tuple[float, ...]
    dense_bytes: int
    low_rank_bytes: int
    bound: str

    @property
    def speedups(self) -> tuple[float, float]:
        """The least and the greatest, over all that is not known."""
        return spread([d / c for d, c in zip(self.dense_ms, self.low_rank_ms, strict=True)])


@dataclass(frozen=True)
class FusedRun:
    """One MLP of the demo as one kernel, run on the simulated core with its real weights.

    Attributes:
        layer: the decoder layer's number.
        ranks: of gate, up and down.
        profile: what it moved and took, modelled.
        error: the greatest difference from the CPU's op.
        largest: the greatest magnitude of the CPU's outputs.
        allowed: the greatest difference that roundings explain.
        picture: its timeline and roofline, an SVG.
        page: its timeline to look into, HTML.
        command: makes both.
    """

    layer: int
    ranks: tuple[int, ...]
    profile: Profile
    error: float
    largest: float
    allowed: float
    picture: Path
    page: Path
    command: str


@dataclass(frozen=True)
class OnTrainium:
    """The report's section.

    Attributes:
        ratio: nominal, of the compressed layers.
        times: of either model at one token and at a prompt's.
        fused: None where no MLP of the model has three low-rank projections.
    """

    ratio: float
    times: tuple[MlpTimes, ...]
    fused: FusedRun | None


def on_trainium(
    model: nn.Module, ratio: float, prompt: Tensor, directory: Path, prefill_tokens: int
) -> OnTrainium:
    """Model the MLPs of a compressed demo model, and of a large one at the same ratio.

    Args:
        model: compressed at `ratio`.
        ratio: nominal.
        prompt: `[tokens]` ids whose activations the fused kernel computes on.
        directory: gets the fused kernel's operands, picture and timeline page.
        prefill_tokens: of a prompt.

    Raises:
        RuntimeError: the fused kernel's values differ from the CPU's op by more than roundings.
    """
    layers = cast(Sequence[Any], model.get_submodule("model.layers"))
    width, inner = layers[0].mlp.gate_proj.in_features, layers[0].mlp.gate_proj.out_features
    own = [_ranks(layer.mlp) for layer in layers]
    large = model_shape(LARGE)
    gate, up, down = (aligned_rank(*large.projections[name], ratio) for name in PROJECTIONS)
    times: list[MlpTimes] = []
    for tokens in (1, prefill_tokens):
        times.append(_times("this demo's", tokens, width, inner, own))
        sizes = large.hidden_size, large.intermediate_size
        times.append(_times(LARGE, tokens, *sizes, [(gate, up, down)] * large.layers))
    fused = [n for n, ranks in enumerate(own) if None not in ranks]
    run = _run_fused(model, layers[fused[0]].mlp, fused[0], prompt, directory) if fused else None
    return OnTrainium(ratio, tuple(times), run)


def _ranks(mlp: Any) -> Ranks:
    gate, up, down = (getattr(getattr(mlp, name), "rank", None) for name in PROJECTIONS)
    return gate, up, down


# --- times


class _Cost(NamedTuple):
    """Launches that follow each other: times at each of `ENDS`, and HBM traffic."""

    times_ms: tuple[float, ...]
    hbm_bytes: int
    bound: str = ""


def _times(model: str, tokens: int, width: int, inner: int, ranks: Sequence[Ranks]) -> MlpTimes:
    dense = _dense_mlp(tokens, width, inner)
    of_ranks = {each: _low_rank_mlp(tokens, width, inner, each, dense) for each in set(ranks)}
    low_rank = _sum([of_ranks[each] for each in ranks])
    dense = _sum([dense] * len(ranks))
    return MlpTimes(
        *(model, len(ranks), tokens, dense.times_ms, low_rank.times_ms),
        *(dense.hbm_bytes, low_rank.hbm_bytes, low_rank.bound),
    )


def _sum(costs: Sequence[_Cost]) -> _Cost:
    """Of all; bound by what the longest is bound by."""
    times = zip(*[cost.times_ms for cost in costs], strict=True)
    longest = max(costs, key=lambda cost: cost.times_ms)
    return _Cost(tuple(map(sum, times)), sum(cost.hbm_bytes for cost in costs), longest.bound)


def _dense_mlp(tokens: int, width: int, inner: int) -> _Cost:
    """The quicker of our dense MLP in one launch, and a launch a projection."""
    shapes = ((width, inner), (width, inner), (inner, width))
    together = _measured(Problem("mlp", tokens, shapes, target=TARGET))
    ways = [[together], [_dense(tokens, *shape) for shape in shapes]]
    return min(map(_sum, ways), key=lambda cost: max(cost.times_ms))


def _low_rank_mlp(tokens: int, width: int, inner: int, ranks: Ranks, dense: _Cost) -> _Cost:
    """One launch where all three projections are low-rank, otherwise one each."""
    gate, up, down = ranks
    if gate is not None and up is not None and down is not None:
        matrices = mlp_matrices(width, (gate, up, down), inner, width)
        return _measured(Problem("svd_mlp", tokens, matrices, target=TARGET))
    if ranks == (None, None, None):
        return dense
    shapes = ((width, inner), (width, inner), (inner, width))
    return _sum(
        [
            _dense(tokens, K, N)
            if r is None
            else _measured(Problem("xuv", tokens, ((K, r), (r, N)), target=TARGET))
            for (K, N), r in zip(shapes, ranks, strict=True)
        ]
    )


def _dense(tokens: int, K: int, N: int) -> _Cost:
    return _measured(Problem("xw", tokens, ((K, N),), target=TARGET))


def _measured(problem: Problem) -> _Cost:
    times = measure(KernelChoice(problem))
    assert times is not None, f"the planned kernel of {problem} fits"
    return _Cost(times.times_ms, times.hbm_bytes, times.bound)


# --- values


def _run_fused(model: nn.Module, mlp: Any, layer: int, prompt: Tensor, directory: Path) -> FusedRun:
    """Run one MLP on the simulated core in bfloat16, on the activations of a prompt."""
    x = _inputs(model, mlp, prompt[:FUSED_TOKENS])
    tensors = [x]
    for name in PROJECTIONS:
        projection = getattr(mlp, name)
        tensors += [projection.u.detach(), projection.v.detach()]
    tensors = [tensor.bfloat16().contiguous() for tensor in tensors]
    ranks = tuple(tensor.shape[1] for tensor in tensors[1::2])
    gate, up, down = ranks
    (tokens, width), inner = x.shape, tensors[2].shape[1]
    plan = plan_svd_mlp(tokens, width, (gate, up, down), inner, width, target=TARGET)
    kernel = nki_kernel(plan)
    arguments: dict[str, Any] = {**plan.arguments, "activation": mlp.activation}
    done = simulate(kernel, *tensors, target=TARGET, **arguments)
    with torch.inference_mode():
        expected = nm.svd_mlp(*tensors, activation=mlp.activation).float()
    error, largest = (
        float((done.outputs.float() - expected).abs().max()),
        float(expected.abs().max()),
    )
    allowed = ROUNDINGS * torch.finfo(torch.bfloat16).eps * largest
    if not error <= allowed:  # NaN is more than anything
        raise RuntimeError(
            f"svd_mlp of layer {layer} on the simulated core differs from the CPU's op by {error}, "
            f"more than the {allowed} that roundings explain"
        )
    operands = directory / "svd_mlp.safetensors"
    names = ("x", *FACTORS)
    save_file(dict(zip(names, tensors, strict=True)), operands)
    picture, page = operands.with_suffix(".svg"), operands.with_suffix(".html")
    done.profile.plot(picture)
    done.profile.save_timeline(page)
    source = Path(kernel.func.__code__.co_filename)
    given = [f"{name}={_near(operands)}:{name}" for name in names]
    given += [f"{name}={_value(value)}" for name, value in arguments.items()]
    words = ["neuronmm", "simulate", f"{_near(source)}:{kernel.func.__name__}"]
    words += [word for argument in given for word in ("--arg", argument)]
    words += ["--target", TARGET, "--timeline", _near(page), "--plot", _near(picture)]
    return FusedRun(
        *(layer, ranks, done.profile, error, largest, allowed, picture, page),
        command=shlex.join(words),
    )


def _inputs(model: nn.Module, mlp: nn.Module, ids: Tensor) -> Tensor:
    """What an MLP gets from a prompt, `[tokens, K]`."""
    seen: list[Tensor] = []
    hook = mlp.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    try:
        with torch.inference_mode():
            model(ids[None])
    finally:
        hook.remove()
    return seen[0].flatten(0, -2).clone()


def _value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _near(path: Path) -> str:
    """A path from the working directory, where it lies below it."""
    return os.path.relpath(path) if path.resolve().is_relative_to(Path.cwd()) else str(path)
