"""The launches of the Linears of a layer, on one rank of tensor parallel.

A rank has its part of the heads and of the MLP's inner features. `layouts` says how ranks may
divide a low-rank pair; the quickest way is taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Literal

from neuroncore import Kernel, NkiValidationError
from neuronmm_ops.estimate.baselines import elementwise, matmul, neuronmm
from neuronmm_ops.estimate.launches import Way
from neuronmm_ops.estimate.linears import DTYPE
from neuronmm_ops.estimate.ranks import Ranks
from neuronmm_ops.plan import mlp_matrices
from neuronmm_ops.plan.launches import PlannedKernel, TensorShape
from neuronmm_ops.plan.layouts import GROUPS, Group, Layout, exchanged, factors
from neuronmm_ops.plan.linear import MLP, QKV, Linear

Mlp = Literal["ours", "published"]
DIVIDES: tuple[Layout, ...] = ("one", "both", "rows")
"""Layouts with an exchange between the factors, or before the second."""
PARTS = MappingProxyType[str, tuple[Group, ...]](
    {"qkv": ("qkv",), "output": ("o",), "mlp": ("gate_up", "down")}
)
"""The components of a layer that are Linears, and their groups."""


@dataclass(frozen=True)
class Part:
    """A component of a layer, in all layers that have its Linears so.

    Attributes:
        component: a key of `PARTS`.
        linears: the component's Linears by name, whole.
        layers: that have them so.
        on: the ranks.
        mlp: "ours", or "published": the tutorial's matmul where the MLP is dense, NeuronMM's
            kernels where it is low-rank.
    """

    component: str
    linears: tuple[tuple[str, Linear], ...]
    layers: int
    on: Ranks
    mlp: Mlp = "ours"

    def ways(self, M: int) -> list[Way]:
        """Every way to run M tokens."""
        return {"qkv": self._qkv, "output": self._output, "mlp": self._gated}[self.component](M)

    def own(self, name: str) -> Linear:
        """A Linear with the rank's part of K or N."""
        K, N = self.on.shape.projections[name]
        return self._named[name]._replace(K=K, N=N)

    @cached_property
    def _named(self) -> dict[str, Linear]:
        return dict(self.linears)

    # --- components

    def _qkv(self, M: int) -> list[Way]:
        """Dense: one product with the weights that are stored alike side by side."""
        every = [self.own(name) for name in QKV]
        low, dense = _split(every)
        joined = Way(self._side_by_side(M, dense))
        if not low:
            return self._allowed([joined], "qkv", "dense")
        ways = [Way(tuple([launch for linear in low for launch in self._linear(M, linear)]))]
        if not dense and _alike(low):
            matrices = tuple([factor for linear in low for factor in linear.shapes])
            ways.append(Way(self.on.op("svd_qkv", M, matrices, low[0].stored)))
        ways = self._allowed(ways, "qkv", "one")
        if self.on.tp > 1:
            seconds = [launch for linear in low for launch in self._second(M, linear)]
            firsts = self._firsts(M, "qkv", DIVIDES[1:])
            ways += [first.then(Way(tuple(seconds))) for first in firsts]
        return [joined.then(way) for way in ways]

    def _output(self, M: int) -> list[Way]:
        linear = self.own("o_proj")
        whole = [Way(self._linear(M, linear), self.on.links.all_reduce(M, linear.N))]
        if linear.r is None:
            return self._allowed(whole, "o", "dense")
        if self.on.tp == 1:
            return whole
        first = Way(self.on.op("xw", M, linear.shapes[:1], linear.stored))
        lasts = self._lasts(M, "o")
        return self._allowed(whole, "o", "sum") + [first.then(last) for last in lasts]

    def _gated(self, M: int) -> list[Way]:
        gate, up, down = every = [self.own(name) for name in MLP]
        H, I = gate.K, gate.N  # noqa: E741
        if self.mlp == "published":
            return self._published(M, H, gate.r, I)
        whole: list[Way] = []
        added = self.on.links.all_reduce(M, H)
        if gate.r and up.r and down.r:
            launches = self._fused(M, (gate.r, up.r, down.r)) if _alike(every) else self._apart(M)
            whole = self._allowed([Way(launches, added)], "gate_up", "sum", "down")
        elif self.on.tp == 1 and not _alike(every):
            whole = [Way(self._apart(M))]
        if whole and self.on.tp == 1:
            return whole
        between = Way(self._between(M))
        return whole + [
            first.then(between).then(last)
            for first in self._firsts(M, "gate_up")
            for last in self._lasts(M, "down")
        ]

    def _fused(self, M: int, ranks: tuple[int, int, int]) -> tuple[PlannedKernel, ...]:
        """A low-rank MLP in one launch."""
        gate = self.own("gate_proj")
        return self.on.op("svd_mlp", M, mlp_matrices(gate.K, ranks, gate.N, gate.K), gate.stored)

    def _apart(self, M: int) -> tuple[PlannedKernel, ...]:
        """gate, up, their product, and down, each stored as it is."""
        gate, up, down = [self._linear(M, self.own(name)) for name in MLP]
        return (*gate, *up, self._product(M), *down)

    def _between(self, M: int) -> tuple[PlannedKernel, ...]:
        """The MLP without u of gate and up, and without v of down."""
        gate, up, down = every = [self.own(name) for name in MLP]
        if not _alike(every):
            first = self.on.op("xw", M, down.shapes[:1], down.stored)
            return (*self._second(M, gate), *self._second(M, up), self._product(M), *first)
        weights = gate.shapes[-1], up.shapes[-1], down.shapes[0]
        x_up = () if gate.r is up.r is None else (("x_up", (-1, weights[1][0]), ""),)
        return self.on.op("mlp", M, weights, gate.stored, x_up)

    def _published(self, M: int, H: int, r: int | None, I: int) -> list[Way]:  # noqa: E741
        """The MLP as NeuronMM's end-to-end runs had it, on one core."""

        def shapes(*sizes: tuple[int, int]) -> tuple[TensorShape, ...]:
            return tuple([TensorShape(size, DTYPE) for size in sizes])

        if r is None:
            up = PlannedKernel(matmul.tutorial_fitted, shapes((H, M), (H, I)))
            down = PlannedKernel(matmul.tutorial_fitted, shapes((I, M), (I, H)))
            return [Way((up, up, self._product(M), down))]
        up, down = shapes((M, H), (H, r), (r, I), (H, r), (r, I)), shapes((I, M), (I, r), (r, H))
        ups = self._fitting(
            neuronmm.neuronmm_mlp_up, up, (neuronmm.up_blocks(M), neuronmm.UP_DEFAULTS)
        )
        downs = self._fitting(
            neuronmm.neuronmm_mlp_down, down, (neuronmm.down_blocks(M), neuronmm.DOWN_DEFAULTS)
        )
        return [Way((first, second)) for first in ups for second in downs]

    def _fitting(
        self, kernel: Kernel, operands: tuple[TensorShape, ...], blocks: Sequence[neuronmm.Blocks]
    ) -> list[PlannedKernel]:
        """A published kernel in each of its blocks that fits; NkiValidationError if none does."""
        launches = [
            PlannedKernel(kernel, operands, {"blocks": choice}) for choice in dict.fromkeys(blocks)
        ]
        refused = [self._refusal(launch) for launch in launches]
        fitting = [launch for launch, error in zip(launches, refused, strict=True) if error is None]
        if not fitting and refused[0] is not None:
            raise refused[0]
        return fitting

    def _refusal(self, launch: PlannedKernel) -> NkiValidationError | None:
        """Why a launch does not run on the target."""
        try:
            self.on.tracer.launch(launch)
        except NkiValidationError as error:
            return error
        return None

    # --- layouts of tensor parallel

    def _firsts(self, M: int, group: Group, layouts: Sequence[Layout] = DIVIDES) -> list[Way]:
        """x [M, K] and the first factors of a group that is cut by columns, side by side."""
        pairs, _ = _split([self.own(name) for name in GROUPS[group]])
        if not pairs:
            return self._allowed([Way()], group, "dense")
        K, R = pairs[0].K, sum([each.r or 0 for each in pairs])
        ways: list[Way] = []
        for layout in layouts[: 1 if self.on.tp == 1 else None]:
            shapes = [factors(group, layout, each, self.on.tp)[0] for each in pairs]
            firsts = [Linear(*s, None, each.stored) for s, each in zip(shapes, pairs, strict=True)]
            launches = self._side_by_side(M, firsts)
            if layout == "rows":
                launches = (self._own_columns(M, K), *launches)
            sent = exchanged(self.on.links, group, layout, M, R, 0)
            ways += self._allowed([Way(launches, sent)], group, layout)
        return ways

    def _lasts(self, M: int, group: Group) -> list[Way]:
        """The sum over the ranks, and the second factor of a pair that is cut by rows."""
        (name,) = GROUPS[group]
        linear = self.own(name)
        r, N = linear.r, linear.N
        if r is None:
            return self._allowed([Way((), self.on.links.all_reduce(M, N))], group, "dense")
        ways: list[Way] = []
        for layout in DIVIDES[: 1 if self.on.tp == 1 else None]:
            _, second = factors(group, layout, linear, self.on.tp)
            launches = self.on.op("xw", M, (second,), linear.stored)
            sent = exchanged(self.on.links, group, layout, M, r, N)
            ways += self._allowed([Way(launches, sent)], group, layout)
        return ways

    def _allowed(
        self, ways: Iterable[Way], group: Group, layout: Layout, *more: Group
    ) -> list[Way]:
        """The ways with their layout, if ranks may take it; one rank has none."""
        if self.on.tp == 1:
            return list(ways)
        named = tuple([(each, layout) for each in (group, *more)])
        return [way._replace(layouts=named) for way in ways if layout in self.on.layouts]

    # --- launches

    def _linear(self, M: int, linear: Linear) -> tuple[PlannedKernel, ...]:
        """A Linear by itself."""
        return self.on.op("xw" if linear.r is None else "xuv", M, linear.shapes, linear.stored)

    def _second(self, M: int, linear: Linear) -> tuple[PlannedKernel, ...]:
        """A Linear without the first factor of its pair."""
        return self.on.op("xw", M, linear.shapes[-1:], linear.stored)

    def _side_by_side(self, M: int, dense: Sequence[Linear]) -> tuple[PlannedKernel, ...]:
        """One product with the matrices that are stored alike side by side."""
        launches: list[PlannedKernel] = []
        for stored in dict.fromkeys([each.stored for each in dense]):
            same = [each for each in dense if each.stored == stored]
            matrix = same[0].K, sum([each.N for each in same])
            launches += self.on.op("xw", M, (matrix,), stored)
        return tuple(launches)

    def _product(self, M: int) -> PlannedKernel:
        side = TensorShape((M, self.own("gate_proj").N), DTYPE)
        return PlannedKernel(self.on.on_cores(elementwise.gated_product), (side, side))

    def _own_columns(self, M: int, K: int) -> PlannedKernel:
        kernel = self.on.on_cores(elementwise.own_columns)
        return PlannedKernel(kernel, (TensorShape((M, K), DTYPE),), {"parts": self.on.tp})


def _split(linears: Iterable[Linear]) -> tuple[list[Linear], list[Linear]]:
    """The pairs and the dense ones."""
    every = list(linears)
    return [each for each in every if each.r], [each for each in every if not each.r]


def _alike(linears: Iterable[Linear]) -> bool:
    """Whether one launch can have the weights: they are stored alike."""
    return len({each.stored for each in linears}) == 1
