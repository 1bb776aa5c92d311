"""The kernel of a chunk of a prompt: nothing in it varies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from neuronmm_ops.kernels.knobs import Knobs
from neuronmm_ops.kernels.stages.tiling import PARTITIONS, tiles_in

if TYPE_CHECKING:
    from neuronmm_ops.kernels.problem import Problem


def prefill(problem: Problem) -> list[Knobs]:
    """Knobs of `attention_chunk`; none where a head's keys and values are too many for SBUF."""
    _, _, d, T = next(shape for name, shape, _ in problem.others if name == "key_cache")
    if held_bytes(T, d, problem.itemsize) > problem.machine.planned_sbuf_bytes:
        return []
    return [Knobs("attention_chunk", [{}], [])]


def held_bytes(tokens: int, head_dim: int, itemsize: int) -> int:
    """Bytes of a partition that the keys and values of a head take in prefill."""
    return (tokens + tiles_in(tokens, PARTITIONS) * (head_dim + 1)) * itemsize
