"""Numbers that others published, each with its source: `published.json`."""

import json
from importlib.resources import files
from typing import Any


def published() -> list[dict[str, Any]]:
    """Return all numbers, in the file's order.

    Each has `model` (None where the source does not say which), `what`, `method`, `ratio` (of
    parameters removed; None where it is not said), `value`, `unit`, `source` (a key of `sources`,
    resolved to its `title`, `url` and `kind`: `authors`, `second hand` or `users`), and `note`.
    """
    path = files("neuronmm_ops.reproduce") / "published.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    sources = document["sources"]
    return [{**number, "source": sources[number["source"]]} for number in document["numbers"]]


def published_for(model: str | None) -> list[dict[str, Any]]:
    """Return what is published of a model, and of models that a source does not name."""
    if model is None:
        return []
    return [number for number in published() if number["model"] in (model, None)]
