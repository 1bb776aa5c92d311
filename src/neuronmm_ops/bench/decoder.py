"""The launches of a whole decoder model, component by component, on one rank of tensor parallel.

A rank has its part of the heads, of the MLP's inner features and of the vocabulary. Of a low-rank
pair that is cut by columns every rank has all of u and its columns of v, of one that is cut by rows
its rows of u and all of v; what ranks then add is [M, N], or [M, r] between u and v. Instead the
rank itself may be cut, which divides all factors but exchanges more. The quickest is taken.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from typing import Any, Literal, NamedTuple

from neuronmm_ops.bench.baselines import elementwise, matmul, neuronmm
from neuronmm_ops.bench.launches import (
    Launch,
    Tracer,
    Way,
    of_op,
    of_plans,
)
from neuronmm_ops.compress.rank import aligned_rank, parameter_count
from neuronmm_ops.compress.targets import matches
from neuronmm_ops.hardware import resolve_target
from neuronmm_ops.kernels.attention.plan import plan_attention
from neuronmm_ops.kernels.lm_head.plan import plan_lm_head
from neuronmm_ops.kernels.mlp.plan import plan_mlp
from neuronmm_ops.kernels.planned import TensorShape
from neuronmm_ops.kernels.planner.problem import (
    SCALE_BYTES,
    Matrices,
    mlp_matrices,
)
from neuronmm_ops.kernels.rms_norm.plan import plan_rms_norm
from neuronmm_ops.kernels.rope.plan import plan_rope
from neuronmm_ops.models import ModelShape
from neuronmm_ops.neuroncore import Kernel, NkiValidationError
from neuronmm_ops.neuroncore.collectives.links import Group

DTYPE = "bfloat16"
ITEMSIZE = 2
QKV = ("q_proj", "k_proj", "v_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
HEAD = "lm_head"
Mlp = Literal["ours", "published"]


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
    def bytes(self) -> int:
        """Of the weights and their scales."""
        elements = parameter_count(self.K, self.N, self.r)
        if not self.stored:
            return ITEMSIZE * elements
        return elements + SCALE_BYTES * (self.N + (self.r or 0))


def selection(shape: ModelShape, targets: Sequence[str]) -> set[str]:
    """The Linears of a layer that targets select, as `SVDConfig.targets`.

    Raises:
        ValueError: a target selects none.
    """
    parents = {name: "mlp" if name in MLP else "self_attn" for name in shape.projections}
    found: set[str] = set()
    for target in targets:
        of_target = {n for n, parent in parents.items() if matches(target, f"layer.{parent}.{n}")}
        if not of_target:
            raise ValueError(
                f"targets must select Linears of a layer ({', '.join(parents)}); {target!r} "
                "selects none"
            )
        found |= of_target
    return found


def linears(
    shape: ModelShape,
    selected: Collection[str] = (),
    stored: str = "",
    stored_dense: str = "",
    stored_head: str = "",
    *,
    ratio: float | None = None,
) -> dict[str, Linear]:
    """The Linears of a layer by name, and the output head.

    Args:
        shape: of the model.
        selected: names of those that `ratio` and `stored` are for.
        stored: dtype of the selected ones where that is in one byte.
        stored_dense: the same of the layers' other Linears, and of those without a rank that pays.
        stored_head: the same of the output head.
        ratio: of parameters removed; None leaves all dense.
    """
    found: dict[str, Linear] = {}
    for name, (K, N) in shape.projections.items():
        is_selected = name in selected
        r = aligned_rank(K, N, ratio) if ratio is not None and is_selected else None
        is_kept = not is_selected or (ratio is not None and r is None)
        found[name] = Linear(K, N, r, stored_dense if is_kept else stored)
    found[HEAD] = Linear(shape.hidden_size, shape.vocab_size, None, stored_head)
    return found


def divided(shape: ModelShape, tp: int) -> ModelShape:
    """The sizes of one rank; key and value heads are repeated where ranks outnumber them.

    Raises:
        ValueError: the ranks do not divide the sizes.
    """
    if not _divides(shape, tp):
        most = max(shape.heads, 1)
        fitting = ", ".join([str(n) for n in range(1, most + 1) if _divides(shape, n)])
        raise ValueError(
            f"tp must divide {shape.name}'s {shape.heads} heads, {shape.intermediate_size} inner "
            f"features and {shape.vocab_size} words, and its {shape.kv_heads} key and value heads "
            f"or be a multiple of them; got {tp}, use one of {fitting}"
        )
    return replace(
        shape,
        heads=shape.heads // tp,
        kv_heads=max(1, shape.kv_heads // tp),
        intermediate_size=shape.intermediate_size // tp,
        vocab_size=shape.vocab_size // tp,
    )


def _divides(shape: ModelShape, tp: int) -> bool:
    if tp < 1 or (shape.kv_heads % tp and tp % shape.kv_heads):
        return False
    return not any(size % tp for size in (shape.heads, shape.intermediate_size, shape.vocab_size))


class Part(NamedTuple):
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
    """

    whole: ModelShape
    linears: Mapping[str, Linear]
    target: str
    lnc: int
    tp: int
    batch: int
    mlp: Mlp = "ours"

    @cached_property
    def shape(self) -> ModelShape:
        """Sizes of one rank."""
        return divided(self.whole, self.tp)

    @cached_property
    def tracer(self) -> Tracer:
        """What traces the launches."""
        cores = resolve_target(self.target).cores
        return Tracer(self.target, min(cores, self.tp * self.lnc))

    def parts(self, tokens: int, lengths: Mapping[int, float]) -> list[Part]:
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
            Part("norm", norm(M, False), 1),
            Part("norm", norm(M, True), 2 * layers - 1),
            Part("norm", norm(self.batch, True), 1),
            Part("qkv", self._qkv(M), layers),
            Part("rope", [Way(of_plans(rope))], layers),
        ]
        for T, share in lengths.items():
            attention = Way(of_plans(plan_attention(tokens, T, **heads)))
            found.append(Part("attention", [attention], layers * share))
        return [
            *found,
            Part("output", self._output(M), layers),
            Part("mlp", self._gated(M), layers),
            Part("lm_head", self._head(), 1),
        ]

    # --- components

    def _qkv(self, M: int) -> list[Way]:
        """Dense: one product with the three weights side by side."""
        H, stored = self.whole.hidden_size, self.linears["q_proj"].stored
        widths: dict[str, int] = {name: self.shape.projections[name][1] for name in QKV}
        ranks = {name: r for name in QKV if (r := self.linears[name].r) is not None}
        dense = [name for name in QKV if name not in ranks]
        launches: tuple[Launch, ...] = ()
        if dense:
            beside = sum([widths[name] for name in dense])
            launches += self._op("xw", M, ((H, beside),), self.linears[dense[0]].stored)
        for name, r in ranks.items():
            matrices = ((H, r), (r, widths[name]))
            launches += self._op("xuv", M, matrices, self.linears[name].stored)
        if dense:
            return [Way(launches)]
        pairs = [((H, r), (r, widths[name])) for name, r in ranks.items()]
        whole = self._op("svd_qkv", M, tuple([side for pair in pairs for side in pair]), stored)
        ways = [Way(launches), Way(whole)]
        if self.tp > 1:
            low = sum(ranks.values())
            cut = self._op("xw", M, ((H, ceil(low / self.tp)),), stored)
            for _, (r, width) in pairs:
                cut += self._op("xw", M, ((r, width),), stored)
            ways.append(Way(cut, self._gathered(M, low)))
        return ways

    def _output(self, M: int) -> list[Way]:
        K, H = self.shape.heads * self.shape.head_dim, self.whole.hidden_size
        _, _, r, stored = self.linears["o_proj"]
        if r is None:
            return [Way(self._op("xw", M, ((K, H),), stored), self._summed(M, H))]
        ways = [Way(self._op("xuv", M, ((K, r), (r, H)), stored), self._summed(M, H))]
        return ways if self.tp == 1 else [*ways, *self._between(M, K, r, H, stored)]

    def _between(self, M: int, K: int, r: int, H: int, stored: str) -> list[Way]:
        """Rows of u on each rank, and sums of [M, r]: v whole on each rank, or cut by columns."""
        u, part = self._op("xw", M, ((K, r),), stored), ceil(H / self.tp)
        whole, columns = (self._op("xw", M, ((r, N),), stored) for N in (H, part))
        sums = self._summed(M, r)
        return [Way(u + whole, sums), Way(u + columns, sums + self._gathered(M, H))]

    def _gated(self, M: int) -> list[Way]:
        gate, _, down = (self.linears[name] for name in MLP)
        H, I, r, stored = gate.K, self.shape.intermediate_size, gate.r, gate.stored  # noqa: E741
        # Eq. 5 gives a matrix and its transpose one rank
        assert r == down.r, (gate, down)
        if self.mlp == "published":
            return self._published(M, H, r, I)
        if r is None:
            plans = plan_mlp(M, H, I, weight_dtype=stored, **self._machine)
            return [Way(of_plans(plans), self._summed(M, H))]
        matrices = mlp_matrices(H, (r, r, r), I, H)
        ways = [Way(self._op("svd_mlp", M, matrices, stored), self._summed(M, H))]
        if self.tp == 1:
            return ways
        pair = self._op("xuv", M, ((H, r), (r, I)), stored)
        low = self._op("xw", M, ((H, ceil(2 * r / self.tp)),), stored)
        high = self._op("xw", M, ((r, I),), stored)
        product = (self._product(M, I),)
        replicated, cut = self._between(M, I, r, H, stored)
        for first, exchanged, second in (
            (pair * 2, (), replicated),
            (pair * 2, (), cut),
            (low + high * 2, self._gathered(M, 2 * r), cut),
        ):
            launches = first + product + second.launches
            ways.append(Way(launches, exchanged + second.collectives_ms))
        return ways

    def _published(self, M: int, H: int, r: int | None, I: int) -> list[Way]:  # noqa: E741
        """The MLP as NeuronMM's end-to-end runs had it, on one core."""

        def shapes(*sizes: tuple[int, int]) -> tuple[TensorShape, ...]:
            return tuple([TensorShape(size, DTYPE) for size in sizes])

        if r is None:
            up = Launch(matmul.tutorial_fitted, shapes((H, M), (H, I)))
            down = Launch(matmul.tutorial_fitted, shapes((I, M), (I, H)))
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
    ) -> list[Launch]:
        """A published kernel in each of its blocks that fits; NkiValidationError if none does."""
        launches = [
            Launch(kernel, operands, {"blocks": choice}) for choice in dict.fromkeys(blocks)
        ]
        refused = [self._refusal(launch) for launch in launches]
        found = [launch for launch, error in zip(launches, refused, strict=True) if error is None]
        if not found and refused[0] is not None:
            raise refused[0]
        return found

    def _refusal(self, launch: Launch) -> NkiValidationError | None:
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
        plan = plan_lm_head(self.batch, H, words, weight_dtype=stored, **self._machine)
        exchanged = () if self.tp == 1 else (self._group.gather_ns(8 * self.batch) / 1e6,)
        return [Way(of_plans([plan]), exchanged)]

    # --- launches and collectives

    @cached_property
    def _machine(self) -> dict[str, Any]:
        return {"dtype": DTYPE, "target": self.target, "lnc": self.lnc}

    @cached_property
    def _group(self) -> Group:
        return Group("tp", resolve_target(self.target), self.lnc, tuple(range(self.tp)))

    def _op(self, op: str, M: int, matrices: Matrices, stored: str) -> tuple[Launch, ...]:
        return of_op(op, M, matrices, DTYPE, self.target, self.lnc, stored)

    def _product(self, M: int, I: int) -> Launch:  # noqa: E741
        side = TensorShape((M, I), DTYPE)
        kernel = elementwise.gated_product
        return Launch(kernel if self.lnc == 1 else kernel[self.lnc], (side, side))

    def _summed(self, M: int, N: int) -> tuple[float, ...]:
        """All-reduce of [M, N]."""
        return () if self.tp == 1 else (self._group.reduce_ns(ITEMSIZE * M * N) / 1e6,)

    def _gathered(self, M: int, N: int) -> tuple[float, ...]:
        """All-gather of [M, N], whose columns the ranks have."""
        chunk = ITEMSIZE * M * N / self.tp
        return () if self.tp == 1 else (self._group.gather_ns(chunk) / 1e6,)
