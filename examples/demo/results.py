"""What the demo found, as its report shows it."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trainium import OnTrainium

from neuronmm_ops import CompressionReport, LayerReport
from neuronmm_ops.measure.speed import PairedSpeed

BASELINE = "SVD-LLM"
OURS = "greedy"
RECOVERED = "recovered"


@dataclass(frozen=True)
class Point:
    """One compressed model: how it was made and what was measured of it."""

    method: str
    ratio: float
    compression: CompressionReport
    ppl: float
    speed: PairedSpeed
    sample: str


@dataclass(frozen=True)
class Rival:
    """The dense model with its MLPs in a storage: what low rank must beat."""

    storage: str
    bytes: float
    """Of the MLPs, as a share of theirs at two bytes a number."""
    ppl: float


@dataclass(frozen=True)
class Results:
    """All that the report shows."""

    dense_ppl: float
    dense_sample: str
    """What the dense model wrote after `prompt`; each point has its own."""
    rivals: tuple[Rival, ...]
    prompt: str
    block: int
    """Ranks are multiples of it."""
    points: tuple[Point, ...]
    planned: int
    """How many points there will be."""
    prefill_tokens: int
    decode_tokens: int
    trainium: OnTrainium | None
    """None until all points are measured."""
    provenance: dict[str, str]

    def excess(self, point: Point | Rival) -> float:
        """ln of the perplexity less ln of the dense model's."""
        return math.log(point.ppl) - math.log(self.dense_ppl)

    def excess_quotient(self, point: Point) -> float | None:
        """The excess as a multiple of the baseline's at that ratio; None where that is 0.

        Or where the baseline is not measured yet.
        """
        for baseline in self.points:
            if (baseline.method, baseline.ratio) == (BASELINE, point.ratio):
                lost = self.excess(baseline)
                return self.excess(point) / lost if lost > 0 else None
        return None


def told_ratio(points: Sequence[Point]) -> float:
    """The ratio that the report tells of where it tells of one."""
    return min((point.ratio for point in points), key=lambda ratio: abs(ratio - 0.4))


def by_method(points: Sequence[Point]) -> list[tuple[str, list[Point]]]:
    """The points of each method, in the order of the ratios."""
    methods = dict.fromkeys(point.method for point in points)
    return [(method, [p for p in points if p.method == method]) for method in methods]


def layers_of(points: Iterable[Point]) -> list[LayerReport]:
    """The layers of all points."""
    return [layer for point in points for layer in point.compression.layers]
