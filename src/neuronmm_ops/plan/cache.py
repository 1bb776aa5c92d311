"""Plans that were found before: those shipped in `plans.json`, and the user's own.

An entry is looked up by the problem and by the source of the kernels and of the simulated core,
whose change may make another plan the best; until `make plans` has run again, a shipped plan of
other source is traced instead of a search. The search is deterministic, so it does not matter which
machine or rank found an entry.
The user's cache is a directory with a file an entry, `$XDG_CACHE_HOME/neuronmm-ops/plans` or
`~/.cache/neuronmm-ops/plans`; what cannot be read or written is as if it were not there.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from dataclasses import asdict, fields
from functools import cache
from pathlib import Path
from typing import Any

import neuroncore
from neuronmm_ops.kernels import source_fingerprint
from neuronmm_ops.kernels.problem import Plan, Problem

SHIPPED = Path(__file__).with_name("plans.json")
_LEFT_OUT = (
    *("calibration", "cli", "collector.py", "documents.py", "dropin.py", "judge", "legacy"),
    *("migrate", "testing.py", "tolerance.py"),
    *("__init__.py", "__main__.py"),
)
"""Parts of the core that no plan follows from."""
_KEPT = [field.name for field in fields(Plan) if field.name not in ("problem", "time_ms")]


@cache
def fingerprint() -> str:
    """16 hexadecimal digits of what plans follow from: kernels, and the core that times them."""
    root = Path(neuroncore.__file__).parent
    files = [path.relative_to(root) for path in sorted(root.rglob("*.py"))]
    core = [(root / path).read_bytes() for path in files if path.parts[0] not in _LEFT_OUT]
    return hashlib.sha256(source_fingerprint().encode() + b"".join(core)).hexdigest()[:16]


def key_of(problem: Problem, max_instructions: int, *, device_loop: bool) -> str:
    """The name of a plan, the same on every machine."""
    values = asdict(problem)
    others, tp = values.pop("others"), values.pop("tp")
    last = [*filter(None, [others, tp > 1 and f"tp {tp}"]), max_instructions, device_loop]
    return json.dumps([*values.values(), problem.inputs, *last])


def load(problem: Problem, key: str) -> Plan | None:
    """The plan that was kept under a key; None where there is none for these kernels."""
    source, plans = shipped()
    if key in plans and source == fingerprint():
        return _plan(problem, plans[key])
    path = _path(key)
    try:
        return _plan(problem, json.loads(path.read_bytes())) if path else None
    except (OSError, ValueError):
        return None


def load_earlier(problem: Problem, key: str) -> Plan | None:
    """The shipped plan, if it is one of other kernels: its arguments may fit these, too."""
    source, plans = shipped()
    return _plan(problem, plans.get(key)) if source != fingerprint() else None


def store(key: str, plan: Plan) -> None:
    """Keep a plan in the user's cache, if that can be written."""
    path = _path(key)
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump(entry_of(plan), file)
        os.replace(file.name, path)  # other ranks read a whole file, or none
    except OSError:
        return


def entry_of(plan: Plan) -> dict[str, Any]:
    """What is kept of a plan."""
    values = {name: getattr(plan, name) for name in _KEPT}
    return {**values, "blocks": plan.arguments}


@cache
def shipped() -> tuple[str, dict[str, dict[str, Any]]]:
    """The fingerprint that `plans.json` was made with, and its entries by key."""
    try:
        document = json.loads(SHIPPED.read_bytes())
    except (OSError, ValueError):
        return "", {}
    return document["source"], document["plans"]


def _plan(problem: Problem, entry: object) -> Plan | None:
    """The plan of an entry; None for what is no entry."""
    if not isinstance(entry, dict) or set(entry) != set(_KEPT):
        return None
    values: dict[str, Any] = {**entry}
    try:
        blocks = [(k, tuple(v) if isinstance(v, list) else v) for k, v in values["blocks"].items()]
        values["blocks"] = tuple(blocks)
        values["times_ms"], values["launches"] = map(
            tuple, (values["times_ms"], values["launches"])
        )
        return Plan(problem, time_ms=values["times_ms"][0], **values)
    except (TypeError, AttributeError, IndexError):
        return None


def _path(key: str) -> Path | None:
    """The file of a key; None where the user has no home."""
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        return None
    name = hashlib.sha256(key.encode()).hexdigest()[:32]
    return Path(base, "neuronmm-ops", "plans", fingerprint(), f"{name}.json")
