"""Points on disk: what a killed run has measured, the next of the same inputs takes as it is."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from results import Point

import neuronmm_ops
from neuroncore.files import replacing
from neuronmm_ops import CompressionReport
from neuronmm_ops.measure.speed import PairedSpeed
from neuronmm_ops.measure.timing import PairedTimes


class KeptPoints:
    """A directory with a file a point, named after a hash of what decides its numbers.

    Args:
        directory: is made where it is missing.
        inputs: whatever decides the numbers besides method, ratio and the package's sources, as
            JSON; of text, weights and so on a hash.
    """

    def __init__(self, directory: Path, inputs: Mapping[str, Any]) -> None:
        self.directory = directory
        self._inputs = json.dumps([inputs, _sources()], sort_keys=True)
        directory.mkdir(parents=True, exist_ok=True)

    def read(self, method: str, ratio: float) -> Point | None:
        """The point of an earlier run; None where there is none, or its file is damaged."""
        try:
            values = json.loads(self._path(method, ratio).read_text(encoding="utf-8"))
            compression = CompressionReport.from_dict(values["compression"])
            times = {p: PairedTimes(rounds) for p, rounds in values["times"].items()}
            speed = PairedSpeed(times, values["tokens"])
            return Point(method, ratio, compression, values["ppl"], speed, values["sample"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def write(self, point: Point) -> None:
        """Keep a point: its file appears whole or not at all."""
        values = {
            "compression": point.compression.to_dict(),
            "ppl": point.ppl,
            "sample": point.sample,
            "times": {phase: times.rounds_ms for phase, times in point.speed.times.items()},
            "tokens": dict(point.speed.tokens),
        }
        with replacing(self._path(point.method, point.ratio)) as temporary:
            temporary.write_text(json.dumps(values, indent=1), encoding="utf-8")

    def _path(self, method: str, ratio: float) -> Path:
        key = hashlib.sha256(f"{self._inputs} {method} {ratio}".encode()).hexdigest()[:16]
        return self.directory / f"{method}-{ratio:g}-{key}.json"


def _sources() -> str:
    """A hash of the package's and the demo's code: points of other code are measured again."""
    digest = hashlib.sha256()
    for root in (Path(neuronmm_ops.__file__).parent, Path(__file__).parent):
        for path in sorted(root.rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()
