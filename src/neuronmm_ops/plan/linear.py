"""A Linear of a decoder layer as it is stored, dense or a pair."""

from __future__ import annotations

from typing import NamedTuple

from neuronmm_ops.storages import matrix_bytes

ITEMSIZE = 2
QKV = ("q_proj", "k_proj", "v_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


class Linear(NamedTuple):
    """A Linear as it is stored, whole.

    Attributes:
        K: input features.
        N: output features.
        r: the rank of a pair; None where it is dense.
        stored: dtype of its weights in one byte; empty where they are of the model's dtype.
    """

    K: int
    N: int
    r: int | None = None
    stored: str = ""

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """Of its matrix, or of both factors."""
        if self.r is None:
            return ((self.K, self.N),)
        return (self.K, self.r), (self.r, self.N)

    @property
    def bytes(self) -> int:
        """Of the weights and their scales."""
        return sum([matrix_bytes(shape, ITEMSIZE, self.stored) for shape in self.shapes])
