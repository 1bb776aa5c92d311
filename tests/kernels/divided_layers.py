"""Operands of a decoder layer as the ranks of tensor parallel have them."""

import torch

import neuroncore as nc

OUTPUT, DOWN = 3, 6
"""Dense Linears that are cut by rows, in the order of the operands."""


def part(tensor, dim, rank, tp):
    """A rank's part of a tensor along a dimension; of None there is none."""
    return None if tensor is None else tensor.chunk(tp, dim)[rank].contiguous()


def by_rows(matrices):
    """Whether each matrix is cut by rows: each u and, as Megatron, dense output and down."""
    return [
        n // 2 in (OUTPUT, DOWN) if matrices[n - n % 2] is None else n % 2 == 0
        for n in range(len(matrices))
    ]


def divided(operands, tp):
    """The operands of the kernel for one layer, each of them a rank's where ranks differ.

    The stream before the first layer is whole on every rank, as a dense stage reads it.
    """
    *shared, norms, caches, matrices, biases, scales = operands
    rows = by_rows(matrices)

    def every(cut):
        return nc.PerRank([cut(rank) for rank in range(tp)])

    def norms_of(rank):
        first = [
            norm if matrices[first_u] is None else part(norm, 0, rank, tp)
            for norm, first_u in zip(norms[:2], (0, 8), strict=True)
        ]
        return (*first, *norms[2:])

    def matrices_of(rank):
        each = zip(matrices, rows, strict=True)
        return tuple([part(matrix, 0 if row else 1, rank, tp) for matrix, row in each])

    def scales_of(rank):
        each = zip(scales, rows[: len(scales)], strict=True)
        return tuple([scale if row else part(scale, 0, rank, tp) for scale, row in each])

    return [
        *shared,
        every(norms_of),
        every(lambda rank: tuple([part(cache, 1, rank, tp) for cache in caches])),
        every(matrices_of),
        every(lambda rank: tuple([part(bias, 0, rank, tp) for bias in biases])),
        every(scales_of),
    ]


def joined(outputs, features):
    """The outputs of all ranks as those of one; of the stream each has all features, or a part."""

    def stream(n):
        if outputs[0][n].shape[1] < features:
            return torch.cat([rank[n] for rank in outputs], 1)
        assert all(torch.equal(rank[n], outputs[0][n]) for rank in outputs[1:])
        return outputs[0][n]

    caches = [torch.cat([rank[n] for rank in outputs], 1) for n in (2, 3)]
    return stream(0), stream(1), *caches
