"""Published times of whole dense models, which our dense decode and prefill must not exceed.

Everything that `bench model` counts is counted: all launches of our kernels one after the other,
with the collectives between them. What a system takes beyond that, divided by its launches, is
what a launch would have to cost where it is served, were nothing else missing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import Any, Literal

from neuronmm_ops.estimate.decoder import Decoder
from neuronmm_ops.estimate.linears import linears
from neuronmm_ops.estimate.passes import lengths, pass_of
from neuronmm_ops.models import SHAPES, ModelShape

CSV = "Neuron SDK, about-neuron/benchmarks, latency_data_decoder.csv (Transformers NeuronX, bf16)"
TUTORIAL = "Neuron SDK, libraries/nxd-inference/tutorials, trn2-llama (NxD Inference, vLLM, bf16)"
Phase = Literal["decode", "prefill"]


@dataclass(frozen=True)
class Served:
    """The median time of one pass of a model, over the ranks of one instance, batch 1.

    Attributes:
        name: of the model and the instance.
        shape: its sizes.
        target: of the cores; the links of inf2.48xlarge are taken to be those of trn1.
        lnc: cores of a rank.
        ranks: of tensor parallel.
        prompt: input tokens.
        new: output tokens.
        phase: "decode" has the time per output token, "prefill" that to the first.
        published_ms: that time.
        source: where it was published.
    """

    name: str
    shape: ModelShape
    target: str
    lnc: int
    ranks: int
    prompt: int
    new: int
    phase: Phase
    published_ms: float
    source: str

    def modelled(self) -> dict[str, Any]:
        """Our dense pass, as `pass_of`: a mean token, or the whole prompt."""
        shape = padded(self.shape, self.ranks)
        ranks: dict[str, Any] = {"target": self.target, "lnc": self.lnc, "tp": self.ranks}
        decoder = Decoder.uniform(shape, linears(shape), **ranks, batch=1)
        if self.phase == "prefill":
            return pass_of(decoder, self.prompt, {self.prompt: 1.0})
        return pass_of(decoder, 1, lengths(self.prompt + 1, self.prompt + self.new - 1))

    @property
    def group(self) -> Literal["predicted", "held out"]:
        """As `cases.published.Evidence`: four rows were known while the model was made."""
        row = self.shape, self.prompt, self.new
        if self.phase == "decode" and row in _KNOWN[self.ranks]:
            return "predicted"
        return "held out"


def padded(shape: ModelShape, ranks: int) -> ModelShape:
    """The shape with as many heads, inner features and words as the ranks divide."""

    def up(size: int) -> int:
        return ranks * ceil(size / ranks)

    return replace(
        shape,
        heads=up(shape.heads),
        kv_heads=up(shape.kv_heads) if shape.kv_heads > ranks else shape.kv_heads,
        intermediate_size=up(shape.intermediate_size),
        vocab_size=up(shape.vocab_size),
    )


_LLAMA_3_70B = SHAPES["Llama-3.1-70B"]
_LLAMA_2_70B = replace(_LLAMA_3_70B, name="Llama-2-70B", vocab_size=32000)
_LLAMA_2_7B = ModelShape("Llama-2-7B", 4096, 11008, 32, 32, 32, 128, 32000, tied=False)
_LLAMA_2_13B = ModelShape("Llama-2-13B", 5120, 13824, 40, 40, 40, 128, 32000, tied=False)
_LLAMA_3_405B = ModelShape("Llama-3.1-405B", 16384, 53248, 126, 128, 8, 128, 128256, tied=False)
_MISTRAL = replace(SHAPES["Mistral-7B-v0.3"], name="Mistral-7B-v0.2", vocab_size=32000)
_TRN1, _INF2 = ("trn1.32xlarge", "trn1", 1, 32), ("inf2.48xlarge", "trn1", 1, 24)
_TRN2 = ("trn2.48xlarge", "trn2", 2, 64)
# model, instance, prompt, new, ms to the first token, ms per token. Left out: rows of int8 weights,
# of CodeLlama, which has Llama-2-13B's shape, and one whose median is above its 99th percentile.
_ROWS: list[tuple[ModelShape, tuple[str, str, int, int], int, int, float | None, float]] = [
    (_LLAMA_3_70B, _TRN1, 128, 1024, 53.2, 24.48),
    (_LLAMA_3_70B, _TRN1, 2048, 2048, 547.0, 26.2),
    (_LLAMA_2_70B, _TRN1, 128, 128, 53.91, 25.18),
    (_LLAMA_2_70B, _TRN1, 256, 256, 81.88, 25.27),
    (_LLAMA_2_70B, _TRN1, 128, 1024, 57.75, 25.45),
    (_LLAMA_2_70B, _TRN1, 1024, 1024, 232.48, 26.04),
    (_LLAMA_2_70B, _TRN1, 1024, 2048, 236.78, 26.62),
    (_LLAMA_2_70B, _TRN1, 2048, 2048, 690.96, 26.85),
    (_LLAMA_2_7B, _TRN1, 128, 8064, 13.32, 6.70),
    (_LLAMA_2_13B, _TRN1, 4096, 4096, 864.14, 9.84),
    (_LLAMA_2_13B, _TRN1, 8192, 8192, 2367.93, 13.41),
    (_MISTRAL, _TRN1, 8192, 8192, 1322.87, 9.89),
    (_LLAMA_3_70B, _INF2, 128, 128, None, 32.2),
    (_LLAMA_2_70B, _INF2, 128, 128, None, 32.9),
    (_LLAMA_3_70B, _TRN2, 10_000, 1500, 575.68, 19.83),
    (_LLAMA_3_405B, _TRN2, 10_000, 1500, 2441.96, 37.93),
]

_KNOWN: dict[int, tuple[tuple[ModelShape, int, int], ...]] = {
    24: ((_LLAMA_3_70B, 128, 128), (_LLAMA_2_70B, 128, 128)),
    32: ((_LLAMA_3_70B, 128, 1024), (_LLAMA_2_70B, 128, 128)),
    64: (),
}
"""Rows that were known, by ranks."""


def served() -> list[Served]:
    """All published times of whole models, those per token first."""
    figures: list[Served] = []
    for shape, (instance, target, lnc, ranks), prompt, new, first_ms, token_ms in _ROWS:
        name = f"{shape.name}, {instance}, {ranks}, {prompt}+{new}"
        source = TUTORIAL if target == "trn2" else CSV
        common = (name, shape, target, lnc, ranks, prompt, new)
        figures.append(Served(*common, "decode", token_ms, source))
        if first_ms is not None:
            figures.append(Served(*common, "prefill", first_ms, source))
    return sorted(figures, key=lambda each: each.phase)
