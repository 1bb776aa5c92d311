"""Published token times of whole models, which our dense decode must not exceed.

Source: Neuron SDK 2.32, trn1/ and inf2/latency_data_decoder.csv, median time per output token of
Transformers NeuronX at batch 1 in bf16. Everything that `bench model` counts is counted: all
launches of our kernels one after the other, with the collectives between them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil

from neuronmm_ops.estimate.decoder import Decoder
from neuronmm_ops.estimate.linears import linears
from neuronmm_ops.estimate.passes import lengths, pass_of
from neuronmm_ops.models import SHAPES, ModelShape


@dataclass(frozen=True)
class Decoding:
    """The median time per output token of a model over the cores of one instance.

    Attributes:
        name: of the model and the instance.
        shape: its sizes.
        target: of the cores; the links of inf2.48xlarge are taken to be those of trn1.
        cores: ranks of tensor parallel.
        prompt: input tokens.
        new: output tokens.
        published_ms: per token.
    """

    name: str
    shape: ModelShape
    target: str
    cores: int
    prompt: int
    new: int
    published_ms: float

    @cached_property
    def modelled_ms(self) -> float:
        """Our dense decode, a mean token."""
        shape = padded(self.shape, self.cores)
        decoder = Decoder(shape, linears(shape), self.target, 1, self.cores, batch=1)
        shares = lengths(self.prompt + 1, self.prompt + self.new - 1)
        return pass_of(decoder, 1, shares)["time_ms"]


def padded(shape: ModelShape, ranks: int) -> ModelShape:
    """The shape with as many heads, inner features and words as the ranks divide."""

    def up(size: int) -> int:
        return ranks * ceil(size / ranks)

    return replace(
        shape,
        heads=up(shape.heads),
        intermediate_size=up(shape.intermediate_size),
        vocab_size=up(shape.vocab_size),
    )


def decodings() -> list[Decoding]:
    """All published token times of whole models."""
    three = SHAPES["Llama-3.1-70B"]
    two = replace(three, name="Llama-2-70B", vocab_size=32000)
    trn1, inf2 = ("trn1", 32), ("trn1", 24)
    return [
        Decoding("Llama-3-70B, trn1.32xlarge, 32 cores", three, *trn1, 128, 1024, 24.48),
        Decoding("Llama-2-70B, trn1.32xlarge, 32 cores", two, *trn1, 128, 128, 25.18),
        Decoding("Llama-3-70B, inf2.48xlarge, 24 cores", three, *inf2, 128, 128, 32.2),
        Decoding("Llama-2-70B, inf2.48xlarge, 24 cores", two, *inf2, 128, 128, 32.9),
    ]
