"""The K largest values of each 16 partitions, on GpSimdE."""

from __future__ import annotations

import numpy as np

from neuroncore import core as running
from neuroncore.checks import operands as check
from neuroncore.checks.base import refuse
from neuroncore.hardware import Engine
from neuroncore.isa.instruction import instruction
from neuroncore.isa.values import flat, raw, read, write, write_bits
from neuroncore.memory.tensor import NkiTensor
from neuroncore.timing.trace import InstructionTemplate

_GROUP = 16


@instruction("val_dst", "idx_dst")
def topk(
    val_dst: NkiTensor, idx_dst: NkiTensor, src: NkiTensor, n: int, name: str | None = None
) -> InstructionTemplate:
    """The K largest of the first n values of each 16 partitions of src, on GpSimdE.

    Value i is in partition i % 16 and column i // 16 of its 16 partitions. Each partition of
    val_dst [P, K] gets the values, ascending, and of idx_dst [P, K] their numbers i; of equal
    values those of the lowest i are taken, the lower i first. With `simulate(follow="kernels")`
    the results are laid out as the values are: result j in partition j % 16, column j // 16, and
    the other columns stay as they are; AWS's kernels read them there. All in SBUF; src and val_dst
    bfloat16, idx_dst uint32, P a multiple of 16.
    """
    opcode, core = "topk", running.active()
    check.in_sbuf(opcode, src=src, val_dst=val_dst, idx_dst=idx_dst)
    check.dtype_in(opcode, "src", src, "bfloat16")
    check.dtype_in(opcode, "val_dst", val_dst, "bfloat16")
    check.dtype_in(opcode, "idx_dst", idx_dst, "uint32")
    check.same_elements(opcode, val_dst=val_dst, idx_dst=idx_dst)
    k = val_dst.geometry.elements
    if src.geometry.partitions % _GROUP:
        refuse(f"{opcode}: partitions must be a multiple of 16; got {src}")
    if not isinstance(n, int) or not 8 <= n < 65536 or n > src.geometry.elements * _GROUP:
        refuse(
            f"{opcode}: n must be 8 to 65535, and at most the {src.geometry.elements * _GROUP} "
            f"values of 16 partitions of {src}; got {n!r}"
        )
    if not 1 <= k < 32768 or k > n:
        refuse(f"{opcode}: K, the elements per partition of val_dst, must be 1 to n={n}; got {k}")
    as_source = core.launch.follow == "kernels"

    def run(val_dst: NkiTensor, idx_dst: NkiTensor, src: NkiTensor) -> None:
        values = flat(read(src))
        groups = len(values) // _GROUP
        rows = values.reshape(groups, _GROUP, -1).transpose(0, 2, 1).reshape(groups, -1)[:, :n]
        # stable from the largest: of equals the lowest number is taken first
        taken = np.argsort(-rows, axis=1, kind="stable")[:, :k]
        best = np.take_along_axis(rows, taken, 1)
        order = np.lexsort((taken, best), axis=1)
        numbers = np.take_along_axis(taken, order, 1)
        best = np.take_along_axis(best, order, 1)
        if not as_source:
            write(val_dst, best.repeat(_GROUP, 0))
            write_bits(idx_dst, numbers.repeat(_GROUP, 0))
            return
        part = np.arange(k) % _GROUP + _GROUP * np.arange(groups)[:, None]
        _place(val_dst, part, best)
        _place(idx_dst, part, numbers)

    # 4 n + K cycles (NKI 0.6 `nki.isa.topk`)
    return InstructionTemplate(Engine.GPSIMD, 4 * n + k, run)


def _place(dst: NkiTensor, partitions: np.ndarray, results: np.ndarray) -> None:
    """Result j of each group to its partition and column j // 16."""
    target = raw(dst)
    values = flat(target).copy()
    values[partitions, np.arange(results.shape[1]) // _GROUP] = results.astype(target.dtype)
    target[...] = values.reshape(target.shape)
