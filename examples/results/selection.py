"""The rows that pages and plots show, picked from the data sets."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from sources import PARETO_RATIOS, SHOWN, STORAGES, model_command, read
from writing import ranged

from benchmarks.methods import BASELINE, DEFAULT
from neuronmm_ops.estimate.served import speedup_as_served

Row = dict[str, Any]


class Quality(NamedTuple):
    """One compressed model of the demo's.

    Attributes:
        label: its method and storage.
        ratio: nominal.
        bytes: of the targeted matrices, as a share of the dense bfloat16 ones.
        excess: the logarithm of the perplexity less that of the dense model's.
    """

    label: str
    ratio: float
    bytes: float
    excess: float


@dataclass(frozen=True)
class Tradeoff:
    """A modelled model next to the measured quality of another one at its ratio and storage.

    Attributes:
        storage: of the factors, or of the dense MLPs.
        ratio: nominal, of both; 0 of dense MLPs.
        tokens_per_s: modelled, of `SHOWN`.
        excess: measured, of the demo's model.
    """

    storage: str
    ratio: float
    tokens_per_s: float
    excess: float


def document(dataset: str, command: str | None = None) -> Any:
    """What a command of a data set printed, the first by default; None where it has not run."""
    data = read(dataset)
    if data is None:
        return None
    runs = {run["command"]: run["document"] for run in data["runs"]}
    return runs[command or next(iter(runs))]


def method_label(row: Row) -> str:
    """The method, with its allocation where it is uniform, or what greedy ranks weigh by."""
    kind = (row["method"], row["allocation"])
    if kind == (BASELINE.method, BASELINE.allocation):
        return "SVD-LLM"
    if kind == (DEFAULT.method, DEFAULT.allocation):
        return "default"
    if row["allocation"] == "uniform":
        return f"{row['method']}, uniform"
    if row["allocation"] is None:  # narrower MLPs have no ranks
        return row["method"]
    return f"{row['method']}, greedy" + (f" by {row['importance']}" if row["importance"] else "")


def methods() -> list[Quality]:
    """Every method at every ratio, factors of the model's dtype."""
    return [
        Quality(method_label(row), row["ratio"], 1 - row["effective_ratio"], row["excess_log_ppl"])
        for row in document("methods") or []
        if row["method"] != "dense"
    ]


def storages() -> list[Quality]:
    """Each storage as `compress` rounds it: dense, at equal ranks and at equal bytes."""
    rows = document("storages") or []
    return [
        Quality(
            _storage_label(row),
            row["ratio"],
            row["bytes"] / row["dense_bytes"],
            row["excess_log_ppl"],
        )
        for row in rows
        if row["rounding"] in ("native", "feedback")
    ]


def _storage_label(row: Row) -> str:
    if row["ratio"] == 0:
        return f"dense, {row['storage']}"
    return row["storage"] + ("" if row["storage"] == "bf16" else f", equal {row['equal']}")


def tradeoffs() -> list[Tradeoff]:
    """Every modelled ratio and storage that has a measured quality, those of dense MLPs first."""
    excess = {(each.label, each.ratio): each.excess for each in storages()}
    excess |= {("dense, bf16", 0.0): 0.0}
    labels = {"bf16": "bf16", "fp8": "fp8, equal ranks"}
    points = dict[tuple[str, float], Tradeoff]()
    for storage, ratio, one in tradeoff_models():
        rival = "dense" if storage == "bf16" else "dense_one_byte"
        for name, own, label in (
            (rival, 0.0, f"dense, {storage}"),
            ("low_rank", ratio, labels[storage]),
        ):
            if (label, own) in excess:
                speed = variant(one, name)["tokens_per_s"]
                points[storage, own] = Tradeoff(storage, own, speed, excess[label, own])
    return sorted(points.values(), key=lambda each: each.ratio > 0)


def tradeoff_models() -> list[tuple[str, float, Row]]:
    """Storage, ratio and the modelled document of each."""
    return [
        (storage, ratio, one)
        for storage in STORAGES
        for ratio in PARETO_RATIOS
        if (one := document("pareto", model_command(SHOWN, ratio, storage, "mlp"))) is not None
    ]


def front(points: list[Tradeoff]) -> list[Tradeoff]:
    """Those that no other one beats in both, by their tokens per second."""
    best, frontier = math.inf, list[Tradeoff]()
    for point in sorted(points, key=lambda each: (-each.tokens_per_s, each.excess)):
        if point.excess < best:
            frontier.append(point)
            best = point.excess
    return frontier[::-1]


def variant(document: Row, name: str) -> Row:
    """One variant of a modelled document."""
    return {row["name"]: row for row in document["variants"]}[name]


def models(name: str) -> list[Row]:
    """The modelled documents of one model."""
    runs = read(f"model_{name}")
    return [run["document"] for run in runs["runs"]] if runs else []


def gain_as_served(one: Row) -> str:
    """Decode's speed-up with what tokens and launches cost where models are served."""
    return ranged(speedup_as_served(*_decodes(one)))


def one_launch_as_served(one: Row) -> str:
    """The same, where layers share a launch."""
    return ranged(speedup_as_served(*[decode["one_launch"] for decode in _decodes(one)]))


def _decodes(one: Row) -> list[Row]:
    return [variant(one, name)["phases"]["decode"] for name in ("low_rank", "dense")]


def setting(document: Row) -> str:
    """What was compressed in a modelled document, and how."""
    return f"{document['targets']}, ratio {document['ratio']:g}, {document['storage'] or 'bf16'}"


def model_name(document: Row) -> str:
    """The model of a modelled document, with its ranks where it takes several."""
    return document["model"] + (f", tp {document['tp']}" if document["tp"] > 1 else "")
