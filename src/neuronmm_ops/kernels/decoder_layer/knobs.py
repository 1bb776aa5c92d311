"""What a search may vary of a layer's kernel: its stages' knobs, from those of their plans."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from neuronmm_ops.kernels.decoder_layer.operands import linears_of, stages_of
from neuronmm_ops.kernels.decoder_layer.stage import KNOBS
from neuronmm_ops.kernels.knobs import Arguments, Knobs, balances, core_part, even, inner_blocks

if TYPE_CHECKING:
    from neuronmm_ops.kernels.problem import Problem

OPS = {"qkv": ("svd_qkv", "xw"), "output": ("xuv", "xw"), "mlp": ("svd_mlp", "mlp")}
"""What a stage is by itself where it has pairs alone, and otherwise."""
MOST_TOKENS = 8
"""New tokens of a sequence that attention takes in a launch."""
OTHERWISE = {"k_chunk": 1024, "inner_block": 512, "rank_block": 1024, "block": 1024} | {
    "last_block": 1024, "tile_bytes": 16384,
}  # fmt: skip
"""Of a stage whose own kernel has no such argument."""


def stages(problem: Problem) -> list[Problem]:
    """The stages as problems of their own: query, key and value, output, MLP.

    Raises:
        ValueError: a sequence has more new tokens than a launch takes.
    """
    sequences = next(shape[0] for name, shape, _ in problem.others if name == "positions")
    if MOST_TOKENS * sequences < problem.M:
        raise ValueError(
            f"decoder_layer takes 1 to {MOST_TOKENS} new tokens a sequence, got "
            f"{problem.M // sequences}; run a prompt by the layers themselves"
        )
    problems: list[Problem] = []
    stored = problem.weight_dtypes
    for name, linears in stages_of(linears_of(problem)).items():
        low_rank, dense = OPS[name]
        own, stored = stored[0], stored[sum([len(linear) for linear in linears]) :]
        kept: dict[str, Any] = {"weight_dtype": own, "others": (), "tp": 1}
        if problem.tp == 1 and all(len(linear) == 2 for linear in linears):
            matrices = tuple([matrix for linear in linears for matrix in linear])
            problems.append(replace(problem, op=low_rank, **kept, matrices=matrices))
            continue
        # of some pairs, too, and on ranks, cores share the columns of what follows u
        matrices = tuple([(linear[0][0], linear[-1][1]) for linear in linears])
        if name == "qkv":
            matrices = ((matrices[0][0], sum([columns for _, columns in matrices])),)
        problems.append(replace(problem, op=dense, **kept, matrices=matrices))
    return problems


def decode(problem: Problem, *planned: Arguments) -> list[Knobs]:
    """Knobs of `decoder_layer_decode`, of the arguments that the stages are planned with.

    In one launch the stages share SBUF, and no stage waits for the one before to store its result:
    smaller blocks of a stage fit more of the next one's weights. Nor does a layer wait for the one
    before: what fits more of the next layer's weights pays from the second on.
    """
    names = [f"{name}_knobs" for name in OPS]
    own = {name: packed(arguments) for name, arguments in zip(names, planned, strict=True)}
    ranks: Arguments = {"tp": problem.tp} if problem.tp > 1 else {}
    if not ranks:  # what stays in SBUF is a core's part of the next contraction
        own = {name: changed(values, balance=0) for name, values in own.items()}
    start: Arguments = {**own, **ranks}
    moving = {name: changed(values, stationary=0) for name, values in own.items()} | ranks
    axes: list[Any] = []
    for name, stage in zip(names, stages(problem), strict=True):
        values = [*_axes(stage, bool(ranks)), *(_BLOCKS if ranks else [])]
        axes += [_Axis(name, each) for each in values]
    return [Knobs("decoder_layer_decode", [start, moving], axes, repeats=2)]


def packed(arguments: Arguments) -> tuple[int, ...]:
    """A stage's knobs, from the arguments of its own kernel."""
    named = {**arguments, "fuse": arguments.get("fuse_gate_up", arguments.get("fuse", 0))}
    return tuple([int(named.get(name, OTHERWISE.get(name, 0))) for name in KNOBS])


def changed(values: tuple[int, ...], **knobs: int) -> tuple[int, ...]:
    """A stage's knobs with other values of some."""
    pairs = zip(KNOBS, values, strict=True)
    return tuple([int(knobs.get(name, value)) for name, value in pairs])


_BLOCKS = [
    [
        {"block": size, "last_block": last}
        for size in (512, 1024, 2048, 4096)
        for last in sorted({min(size, 1024), size})
    ]
]
"""On ranks, whose Linears are so small that alone they are planned for other bounds."""


class _Axis:
    """Values of a stage's knobs, as an axis of the layer's."""

    def __init__(self, name: str, values: Iterable[dict[str, int]]) -> None:
        self.name, self.values = name, list(values)

    def __call__(self, arguments: Arguments) -> Sequence[Arguments]:
        own = arguments[self.name]
        return [{self.name: changed(own, **value)} for value in self.values]


def _axes(stage: Problem, on_ranks: bool) -> list[list[dict[str, int]]]:
    """What pays otherwise where a stage is one of several."""
    K = core_part(stage, stage.K)
    chunks = [{"k_chunk": even(K, size)} for size in (1024, 2048, 4096)]
    tiles = [{"tile_bytes": size} for size in (16384, 8192, 4096)]
    grouped = stage.storage is not None and stage.storage.group is not None
    axes = [[{"stationary": value} for value in (0, 1)[: 2 - grouped]], tiles]
    if len(stage.ranks) > 1:
        axes.append([{"fuse": 0}, {"fuse": 1}])
    if stage.inner:
        axes.append([{"inner_block": block} for block in inner_blocks(stage)])
        axes += [balances(stage)] if on_ranks else []
    return axes if stage.op in ("svd_mlp", "mlp") else [*axes, chunks]
