"""What the clock says of the programme, kept in `predictions.json` before anybody measures.

`python benchmarks predictions` writes the file. A row has the kernel and its arguments, too: a
device runs what was predicted, whatever a search would find there. All times are modelled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from neuronmm_ops.plan.cache import fingerprint

FILE = Path(__file__).with_name("predictions.json")


@dataclass(frozen=True)
class Prediction:
    """Of one row, in us.

    Attributes:
        time_us: modelled.
        range_us: over everything that is not known.
        decides: each uncertainty that the row speaks of, with the time at its other end.
        kernel: name of the kernel of an op; empty where the row is none of an op.
        arguments: its compile-time arguments.
    """

    time_us: float
    range_us: tuple[float, float]
    decides: Mapping[str, float]
    kernel: str = ""
    arguments: Mapping[str, Any] | None = None

    def times(self, count: int) -> Prediction:
        """The prediction of so many launches, one after the other."""
        low, high = self.range_us
        decides = {name: count * us for name, us in self.decides.items()}
        return Prediction(count * self.time_us, (count * low, count * high), decides)


@dataclass(frozen=True)
class Frozen:
    """The file: the source that its times follow from, and rows by target and name."""

    source: str
    commit: str
    rows: Mapping[str, Mapping[str, Prediction]]

    @property
    def is_current(self) -> bool:
        """Whether this package's kernels and clock are those that the times follow from."""
        return self.source == fingerprint()


@cache
def frozen() -> Frozen:
    """The shipped predictions."""
    document = json.loads(FILE.read_bytes())
    rows = {
        target: {
            name: Prediction(
                range_us=tuple(row.pop("range_us")),
                arguments=_arguments(row.pop("arguments")),
                **row,
            )
            for name, row in of_target.items()
        }
        for target, of_target in document["targets"].items()
    }
    return Frozen(document["source"], document["commit"], rows)


def _arguments(written: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """A kernel's arguments, which are hashable: JSON has lists."""
    if written is None:
        return None
    return {name: tuple(v) if isinstance(v, list) else v for name, v in written.items()}
