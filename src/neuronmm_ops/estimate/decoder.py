"""The launches of a whole decoder model, component by component, on one rank of tensor parallel.

A rank has its part of the heads, of the MLP's inner features and of the vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Self

from neuronmm_ops.estimate.attention import plan_attention
from neuronmm_ops.estimate.launches import Way
from neuronmm_ops.estimate.layer import PARTS, Mlp, Part
from neuronmm_ops.estimate.linears import HEAD
from neuronmm_ops.estimate.ranks import Ranks
from neuronmm_ops.estimate.rope import plan_rope
from neuronmm_ops.models import ModelShape
from neuronmm_ops.plan.layouts import GROUPS
from neuronmm_ops.plan.linear import Linear
from neuronmm_ops.plan.rms_norm import plan_rms_norm


class Component(NamedTuple):
    """What a component of the model runs.

    Attributes:
        component: its name.
        ways: to run it.
        times: that it runs in one pass.
        number: of the part of `Decoder.layers` that it is, if it is one.
    """

    component: str
    ways: Sequence[Way]
    times: float
    number: int | None = None


class Kind(NamedTuple):
    """Layers whose Linears are alike.

    Attributes:
        linears: of each of them by name.
        layers: how many there are.
    """

    linears: Mapping[str, Linear]
    layers: int


@dataclass(frozen=True, kw_only=True)
class Decoder(Ranks):
    """A model on the ranks of one target.

    Attributes:
        kinds: its layers; together as many as `whole` has.
        head: the output head.
        batch: sequences.
        mlp: as `Part`.
    """

    kinds: Sequence[Kind]
    head: Linear
    batch: int
    mlp: Mlp = "ours"

    @classmethod
    def uniform(cls, whole: ModelShape, linears: Mapping[str, Linear], **settings: Any) -> Self:
        """A model whose layers are alike.

        Args:
            whole: sizes of the model.
            linears: of each layer by name, with the output head; see `linears.linears`.
            **settings: the other attributes.
        """
        kinds = (Kind(linears, whole.layers),)
        return cls(whole=whole, kinds=kinds, head=linears[HEAD], **settings)

    @cached_property
    def layers(self) -> list[Part]:
        """The Linears of all layers by component; equal ones are one part."""
        counted = Counter[tuple[str, tuple[tuple[str, Linear], ...]]]()
        for linears, layers in self.kinds:
            for component, groups in PARTS.items():
                names = [name for group in groups for name in GROUPS[group]]
                counted[component, tuple([(name, linears[name]) for name in names])] += layers
        return [Part(*key, layers, self, self.mlp) for key, layers in counted.items()]

    def parts(self, tokens: int, lengths: Mapping[int, float]) -> Iterator[Component]:
        """Yield what one pass runs; each is planned when it is its turn.

        Args:
            tokens: of each sequence: the prompt's, or 1.
            lengths: tokens in the cache with the pass's own, each with its share of the passes.
        """
        H, layers, M = self.whole.hidden_size, self.whole.layers, self.batch * tokens
        shape, machine = self.shape, self.machine
        heads: dict[str, Any] = {"heads": shape.heads, "kv_heads": shape.kv_heads, **machine}
        heads |= {"head_dim": shape.head_dim, "head_norm": shape.head_norm, "batch": self.batch}

        def norm(rows: int, residual: bool) -> list[Way]:
            return [Way((plan_rms_norm(rows, H, residual=residual, **machine),))]

        # the first has no residual yet
        yield Component("norm", norm(M, False), 1)
        yield Component("norm", norm(M, True), 2 * layers - 1)
        yield Component("rope", [Way(tuple(plan_rope(tokens, **heads)))], layers)
        for T, share in lengths.items():
            attention = Way(tuple(plan_attention(tokens, T, **heads)))
            yield Component("attention", [attention], layers * share)
        for number, part in enumerate(self.layers):
            yield Component(part.component, part.ways(M), part.layers, number)
        yield from self.ending()

    def ending(self) -> Iterator[Component]:
        """Yield what follows the layers, for each sequence's last token."""
        last = plan_rms_norm(self.batch, self.whole.hidden_size, residual=True, **self.machine)
        yield Component("norm", [Way((last,))], 1)
        yield Component("lm_head", self._head(), 1)

    def _head(self) -> list[Way]:
        """Each rank finds the greatest of its words; ranks exchange an id and a logit a row."""
        first, last = self.head.shapes[:-1], (self.head.shapes[-1][0], self.shape.vocab_size)
        launches = self.op("xw", self.batch, first, self.head.stored) if first else ()
        launches += self.op("lm_head", self.batch, (last,), self.head.stored)
        sent = self.links.all_gather(self.batch, 2 * self.tp, itemsize=4)
        return [Way(launches, sent)]
