"""The launches of a whole decoder model, component by component, on one rank of tensor parallel.

A rank has its part of the heads, of the MLP's inner features and of the vocabulary. `layouts` says
how ranks may divide a low-rank pair; the quickest way is taken.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

from neuroncore import Kernel, NkiValidationError
from neuroncore.hardware import resolve_target
from neuronmm_ops.estimate.attention import plan_attention
from neuronmm_ops.estimate.baselines import elementwise, matmul, neuronmm
from neuronmm_ops.estimate.exchange import Collectives
from neuronmm_ops.estimate.launches import (
    KernelLaunch,
    Tracer,
    Way,
    of_op,
    of_plans,
)
from neuronmm_ops.estimate.layouts import (
    GROUPS,
    LAYOUTS,
    Group,
    Layout,
    exchanged,
    factors,
)
from neuronmm_ops.estimate.linears import DTYPE, HEAD, MLP, QKV, Linear, divided
from neuronmm_ops.estimate.rms_norm import plan_rms_norm
from neuronmm_ops.estimate.rope import plan_rope
from neuronmm_ops.models import ModelShape
from neuronmm_ops.plan import Matrices, Other, mlp_matrices
from neuronmm_ops.plan.launches import TensorShape

Mlp = Literal["ours", "published"]
DIVIDES: tuple[Layout, ...] = ("one", "both", "rows")
"""Layouts with an exchange between the factors, or before the second."""


class Component(NamedTuple):
    """What a component of the model runs, and how often in one pass."""

    component: str
    ways: Sequence[Way]
    times: float


@dataclass(frozen=True)
class Decoder:
    """A model on the ranks of one target.

    Attributes:
        whole: sizes of the model.
        linears: its Linears by name, with the output head; see `linears`.
        target: trn1, trn2 or trn3.
        lnc: NeuronCores of a rank.
        tp: ranks.
        batch: sequences.
        mlp: "ours", or "published": the tutorial's matmul where the MLP is dense, NeuronMM's
            kernels where it is low-rank.
        layouts: that ranks may take.
        least_us: as `Collectives`.
    """

    whole: ModelShape
    linears: Mapping[str, Linear]
    target: str
    lnc: int
    tp: int
    batch: int
    mlp: Mlp = "ours"
    layouts: Collection[Layout] = LAYOUTS
    least_us: float = 0.0

    @cached_property
    def shape(self) -> ModelShape:
        """Sizes of one rank."""
        return divided(self.whole, self.tp)

    @cached_property
    def tracer(self) -> Tracer:
        """What traces the launches."""
        cores = resolve_target(self.target).cores
        return Tracer(self.target, min(cores, self.tp * self.lnc))

    def parts(self, tokens: int, lengths: Mapping[int, float]) -> list[Component]:
        """What one pass runs.

        Args:
            tokens: of each sequence: the prompt's, or 1.
            lengths: tokens in the cache with the pass's own, each with its share of the passes.
        """
        H, layers, M = self.whole.hidden_size, self.whole.layers, self.batch * tokens
        own, machine = self.shape, self._machine
        heads: dict[str, Any] = {"heads": own.heads, "kv_heads": own.kv_heads, **machine}
        heads |= {"head_dim": own.head_dim, "head_norm": own.head_norm, "batch": self.batch}

        def norm(rows: int, residual: bool) -> list[Way]:
            return [Way(of_plans([plan_rms_norm(rows, H, residual=residual, **machine)]))]

        rope = plan_rope(tokens, **heads)
        found = [
            # the first has no residual yet; the last is of each sequence's last token alone
            Component("norm", norm(M, False), 1),
            Component("norm", norm(M, True), 2 * layers - 1),
            Component("norm", norm(self.batch, True), 1),
            Component("qkv", self._qkv(M), layers),
            Component("rope", [Way(of_plans(rope))], layers),
        ]
        for T, share in lengths.items():
            attention = Way(of_plans(plan_attention(tokens, T, **heads)))
            found.append(Component("attention", [attention], layers * share))
        return [
            *found,
            Component("output", self._output(M), layers),
            Component("mlp", self._gated(M), layers),
            Component("lm_head", self._head(), 1),
        ]

    # --- components

    def _qkv(self, M: int) -> list[Way]:
        """Dense: one product with the weights that are stored alike side by side."""
        H = self.whole.hidden_size
        widths: dict[str, int] = {name: self.shape.projections[name][1] for name in QKV}
        ranks = {name: r for name in QKV if (r := self.linears[name].r) is not None}
        dense = [name for name in QKV if name not in ranks]
        beside = Way()
        for stored in dict.fromkeys([self.linears[name].stored for name in dense]):
            same = [widths[name] for name in dense if self.linears[name].stored == stored]
            beside = beside.then(Way(self._op("xw", M, ((H, sum(same)),), stored)))
        if not ranks:
            return self._allowed([beside], "qkv", "dense")
        stored = self.linears[next(iter(ranks))].stored
        pairs = [((H, r), (r, widths[name])) for name, r in ranks.items()]
        apart = [launch for p in pairs for launch in self._op("xuv", M, p, stored)]
        ways = [Way(tuple(apart))]
        if not dense:
            matrices = tuple([factor for pair in pairs for factor in pair])
            ways.append(Way(self._op("svd_qkv", M, matrices, stored)))
        ways = self._allowed(ways, "qkv", "one")
        seconds = [launch for _, v in pairs for launch in self._op("xw", M, (v,), stored)]
        if self.tp > 1:
            firsts = self._firsts(M, "qkv", DIVIDES[1:])
            ways += [first.then(Way(tuple(seconds))) for first in firsts]
        return [beside.then(way) for way in ways]

    def _output(self, M: int) -> list[Way]:
        K, H, r, stored = self.own("o_proj")
        added = self._links.all_reduce(M, H)
        if r is None:
            return self._allowed([Way(self._op("xw", M, ((K, H),), stored), added)], "o", "dense")
        whole = [Way(self._op("xuv", M, ((K, r), (r, H)), stored), added)]
        if self.tp == 1:
            return whole
        first = Way(self._op("xw", M, ((K, r),), stored))
        lasts = self._lasts(M, "o")
        return self._allowed(whole, "o", "sum") + [first.then(last) for last in lasts]

    def _gated(self, M: int) -> list[Way]:
        gate, up, down = [self.own(name) for name in MLP]
        H, I, stored = gate.K, gate.N, gate.stored  # noqa: E741
        if self.mlp == "published":
            return self._published(M, H, gate.r, I)
        whole: list[Way] = []
        if gate.r and up.r and down.r:
            matrices = mlp_matrices(H, (gate.r, up.r, down.r), I, H)
            launches = self._op("svd_mlp", M, matrices, stored)
            added = self._links.all_reduce(M, H)
            whole = self._allowed([Way(launches, added)], "gate_up", "sum", "down")
            if self.tp == 1:
                return whole
        # everything but u of gate and up, and v of down
        weights = (gate.r or H, I), (up.r or H, I), (I, down.r or H)
        x_up = () if gate.r is up.r is None else (("x_up", (-1, weights[1][0]), ""),)
        between = Way(self._op("mlp", M, weights, stored, x_up))
        return whole + [
            first.then(between).then(last)
            for first in self._firsts(M, "gate_up")
            for last in self._lasts(M, "down")
        ]

    def _published(self, M: int, H: int, r: int | None, I: int) -> list[Way]:  # noqa: E741
        """The MLP as NeuronMM's end-to-end runs had it, on one core."""

        def shapes(*sizes: tuple[int, int]) -> tuple[TensorShape, ...]:
            return tuple([TensorShape(size, DTYPE) for size in sizes])

        if r is None:
            up = KernelLaunch(matmul.tutorial_fitted, shapes((H, M), (H, I)))
            down = KernelLaunch(matmul.tutorial_fitted, shapes((I, M), (I, H)))
            return [Way((up, up, self._product(M, I), down))]
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
    ) -> list[KernelLaunch]:
        """A published kernel in each of its blocks that fits; NkiValidationError if none does."""
        launches = [
            KernelLaunch(kernel, operands, {"blocks": choice}) for choice in dict.fromkeys(blocks)
        ]
        refused = [self._refusal(launch) for launch in launches]
        found = [launch for launch, error in zip(launches, refused, strict=True) if error is None]
        if not found and refused[0] is not None:
            raise refused[0]
        return found

    def _refusal(self, launch: KernelLaunch) -> NkiValidationError | None:
        """Why a launch does not run on the target."""
        try:
            self.tracer.launch(launch)
        except NkiValidationError as error:
            return error
        return None

    def _head(self) -> list[Way]:
        """Each rank finds the greatest of its words; ranks exchange an id and a logit a row."""
        H, words = self.whole.hidden_size, self.shape.vocab_size
        stored = self.linears[HEAD].stored
        launches = self._op("lm_head", self.batch, ((H, words),), stored)
        return [Way(launches, self._links.all_gather(self.batch, 2 * self.tp, itemsize=4))]

    # --- layouts of tensor parallel

    def _firsts(self, M: int, group: Group, layouts: Sequence[Layout] = DIVIDES) -> list[Way]:
        """x [M, K] and the first factors of a group that is cut by columns, side by side."""
        own = [each for name in GROUPS[group] if (each := self.own(name)).r is not None]
        if not own:
            return self._allowed([Way()], group, "dense")
        K, R = own[0].K, sum([each.r or 0 for each in own])
        ways: list[Way] = []
        for layout in layouts[: 1 if self.tp == 1 else None]:
            shapes = [factors(group, layout, each, self.tp)[0] for each in own]
            beside = (shapes[0][0], sum([columns for _, columns in shapes]))
            launches = self._op("xw", M, (beside,), own[0].stored)
            if layout == "rows":
                launches = (self._own_columns(M, K), *launches)
            sent = exchanged(self._links, group, layout, M, R, 0)
            ways += self._allowed([Way(launches, sent)], group, layout)
        return ways

    def _lasts(self, M: int, group: Group) -> list[Way]:
        """The sum over the ranks, and the second factor of a pair that is cut by rows."""
        (name,) = GROUPS[group]
        own = self.own(name)
        r, N = own.r, own.N
        if r is None:
            return self._allowed([Way((), self._links.all_reduce(M, N))], group, "dense")
        ways: list[Way] = []
        for layout in DIVIDES[: 1 if self.tp == 1 else None]:
            _, second = factors(group, layout, own, self.tp)
            launches = self._op("xw", M, (second,), own.stored)
            sent = exchanged(self._links, group, layout, M, r, N)
            ways += self._allowed([Way(launches, sent)], group, layout)
        return ways

    def _allowed(
        self, ways: Iterable[Way], group: Group, layout: Layout, *more: Group
    ) -> list[Way]:
        """The ways with their layout, if ranks may take it; one rank has none."""
        if self.tp == 1:
            return list(ways)
        named = tuple([(each, layout) for each in (group, *more)])
        return [way._replace(layouts=named) for way in ways if layout in self.layouts]

    def own(self, name: str) -> Linear:
        """A Linear of a layer with the rank's part of K or N."""
        K, N = self.shape.projections[name]
        return self.linears[name]._replace(K=K, N=N)

    # --- launches and collectives

    @cached_property
    def _machine(self) -> dict[str, Any]:
        return {"dtype": DTYPE, "target": self.target, "lnc": self.lnc}

    @cached_property
    def _links(self) -> Collectives:
        return Collectives(self.target, self.lnc, self.tp, self.least_us)

    def _op(
        self, op: str, M: int, matrices: Matrices, stored: str, others: tuple[Other, ...] = ()
    ) -> tuple[KernelLaunch, ...]:
        return of_op(op, M, matrices, DTYPE, self.target, self.lnc, stored, others)

    def _product(self, M: int, I: int) -> KernelLaunch:  # noqa: E741
        side = TensorShape((M, I), DTYPE)
        return KernelLaunch(self._on_cores(elementwise.gated_product), (side, side))

    def _own_columns(self, M: int, K: int) -> KernelLaunch:
        kernel = self._on_cores(elementwise.own_columns)
        return KernelLaunch(kernel, (TensorShape((M, K), DTYPE),), {"parts": self.tp})

    def _on_cores(self, kernel: Kernel) -> Kernel:
        return kernel if self.lnc == 1 else kernel[self.lnc]
