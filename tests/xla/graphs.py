"""What torch_xla lowered: custom calls, dots and hashes, read from HLO text."""

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from host import decode
from torch import Tensor
from torch_xla import _XLAC

from neuronmm_ops.ops.backends.xla import TARGET

NAME = r"%?([\w.-]+)"
API_VERSIONS = {"API_VERSION_STATUS_RETURNING": 2, "API_VERSION_STATUS_RETURNING_UNIFIED": 3}


@dataclass(frozen=True)
class Call:
    """A custom call of an HLO module."""

    target: str
    api_version: int
    config: dict[str, Any]
    text: str


@dataclass(frozen=True)
class Graph:
    """An HLO module: what its entry executes, called computations included."""

    calls: list[Call]
    dots: int


def graph_of(hlo: str) -> Graph:
    """Read an HLO module's text."""
    computations: dict[str, list[str]] = {}
    entry = name = ""
    for line in hlo.splitlines():
        opened = re.match(rf"(ENTRY )?{NAME} \(.*\{{$", line)
        if opened:
            name = opened[2]
            computations[name] = []
            entry = name if opened[1] else entry
        elif name:
            computations[name].append(line)
    lines = list(executed(computations, entry))
    calls = [call_of(line) for line in lines if " custom-call(" in line]
    return Graph(calls, sum(" dot(" in line for line in lines))


def executed(computations: dict[str, list[str]], name: str) -> Iterator[str]:
    """Yield the lines that a computation runs, once for each time it is called."""
    for line in computations[name]:
        yield line
        called = re.search(rf" call\(.*to_apply={NAME}", line)
        if called:
            yield from executed(computations, called[1])


def call_of(line: str) -> Call:
    fields = dict(re.findall(r'(\w+)="?([^",\s]+)"?', line.partition(" custom-call(")[2]))
    version = API_VERSIONS[fields["api_version"]]
    return Call(fields["custom_call_target"], version, decode(fields["backend_config"]), line)


def lowered(*tensors: Tensor) -> Graph:
    """The graph of pending lazy tensors."""
    graph = graph_of(_XLAC._get_xla_tensors_hlo(list(tensors)))
    assert all(call.target == TARGET for call in graph.calls)
    return graph


def graph_hash(tensor: Tensor) -> str:
    """The hash under which torch_xla caches the program that computes a lazy tensor."""
    return str(_XLAC._get_graph_hash([tensor]))


def compiled_by(function: Callable[[], Any]) -> tuple[Any, list[Graph]]:
    """Run a function; return its result and every graph that torch_xla compiled in it."""
    saved = Path(os.environ["XLA_SAVE_TENSORS_FILE"] + ".0")
    before = len(saved.read_text()) if saved.exists() else 0
    result = function()
    text = saved.read_text()[before:] if saved.exists() else ""
    saved_graphs = re.findall(r"^## BEGIN_GRAPH\n(.*?)^Graph Hash: (\w+)", text, re.M | re.S)
    distinct = {graph_hash: module for module, graph_hash in saved_graphs}
    return result, [graph_of(module) for module in distinct.values()]
