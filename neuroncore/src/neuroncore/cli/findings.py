"""What `check` finds: rules with stable names, findings of them, and the same as SARIF."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import quote

from neuroncore import __version__
from neuroncore.checks.lint import RULES as LINT_RULES

Severity = Literal["error", "warning", "note"]


class RunRule(NamedTuple):
    """A rule that a run checks: what breaks it, its source, and the words of its messages.

    `severity` is that of every finding; None: an error where the run was refused, else a warning.
    """

    what: str
    source: str
    words: str
    severity: Severity | None = None


RUN_RULES = {
    "budget": RunRule("more instructions, time or memory than it may use", "neuroncore.Budget",
        r"was stopped; |bytes of this machine's memory", "error"),
    "core-race": RunRule("two cores use a tensor, one writes, no barrier between",
        "nki.isa.core_barrier", r"which comes first is undefined|: a race; |^a race: ", "error"),
    "engine-race": RunRule("memory that the compiler sees as two, or rows in no order",
        "NKI language guide, sequential programming model; nki.isa.dma_compute, unique_indices",
        r"which nothing orders|moved in no order|in no order; make indices unique|occurs twice",
        "error"),
    "psum-shared-bank": RunRule("VectorE and ScalarE meet in a bank",
        "Trainium2 architecture guide", r"shares a bank of", "note"),
    "core-meeting": RunRule("cores that wait for each other do not meet",
        "nki.isa.core_barrier, nki.isa.sendrecv",
        r"waits but core|of core \d+ meets|ranks must match|both cores must allocate"),
    "uninitialised-read": RunRule("a read of what nothing has written", "nki.language.ndarray",
        r"no element was ever", "error"),
    "partly-uninitialised-read": RunRule("a read of a tile that is partly unwritten",
        "nki.language.ndarray", r"some elements were never"),
    "migration": RunRule("what an earlier NKI took and a later one refuses", "NKI migration guide",
        r"NKI 0\.\d|NKI release notes|legal and unknown|has no effect"),
    "unwritten-output": RunRule("an output that the kernel has not written",
        "NKI migration guide, kernel outputs",
        r"none of it was ever|was never written; store", "error"),
    "kernel-output": RunRule("an output not in shared HBM, or partly unwritten",
        "NKI migration guide, kernel outputs", r"^kernel output "),
    "psum-accumulate": RunRule("a matmul adds to what no matmul began",
        "nki.isa.nc_matmul, accumulation mode",
        r"which no matmul wrote|accumulate=None overwrites"),
    "psum-overwritten": RunRule("a matmul overwrites a sum that nothing has read",
        "nki.isa.nc_matmul, accumulation mode", r"accumulate=False overwrites"),
    "psum-reopened": RunRule("a matmul goes on with a sum already read",
        "nki.isa.nc_matmul, accumulation mode", r"accumulate=None adds to"),
    "psum-bank": RunRule("a result crosses a bank, or begins where none can",
        "Trainium architecture guide, PSUM",
        r"crosses a 2048-byte PSUM bank|PSUM is written from|PSUM address starts"),
    "capacity": RunRule("more is live than SBUF or PSUM holds", "Trainium architecture guides",
        r"does not fit: |bytes per partition exceed", "error"),
    "address-overlap": RunRule("live tensors share an address, or leave the memory",
        "nki.language.ndarray, address", r"addresses of live tensors overlap|: address \("),
    "out-of-bounds": RunRule("an index or access pattern leaves its tensor",
        "NKI language guide, indexing; access patterns",
        r"out of bounds|reaches elements|over the end of a partition|indices run from"
        r"|dynamic index runs out|or runs out of"),
    "memory": RunRule("an operand is where the engine does not reach",
        "nki.isa; architecture guides",
        r"must be in |must be a tensor in |does not reach PSUM|both inputs are in PSUM"),
    "generation": RunRule("the target lacks what the kernel uses",
        "nki.isa; Trainium architecture guides", r"needs? NeuronCore-v"),
    "dtype": RunRule("an operand's dtype is not one that is taken",
        "nki.isa, the instruction's parameters; NCC_EVRF051",
        r"dtype|float type|float32|float8|integer tiles|element size|does not cast|must be int"
        r"|ind(ex|ices) must be integers|; t is \w*(float|int|bool)"),
    "partition": RunRule("partitions begin or end where no engine addresses them",
        "Trainium architecture guide, partitions",
        r"starts at partition|partition counts differ|partitions exceed 128|\d partitions"
        r"|-th partition|is the partition|partition size|the partition'?s? "),
    "shape": RunRule("sizes do not fit together, or are too large",
        "nki.isa, the instruction's parameters",
        r"elements per partition|one shape|free size|dimensions|dst must be \[|elements and src"),
    "loop": RunRule("a loop of the device does what it cannot",
        "nki.language.fori_loop, while_loop", r"loop|iteration|register"),
    "python": RunRule("an exception of Python", "", r"(?!)", "error"),
    "instruction": RunRule("another rule of an instruction or function", "nki.isa", r""),
}  # fmt: skip
"""By name; the first whose words a message has."""

_TENSOR = re.compile(r"\w+ \[[\d, ]*\] \w+ in \w+")
"""A tensor in a message, whose dtype is no word of the rule."""


@dataclass(frozen=True, order=True)
class KernelFinding:
    """One broken rule, a name of `RUN_RULES` or of lint's. Lines and columns count from 1."""

    path: str
    line: int
    column: int
    rule: str
    severity: Severity
    message: str

    def document(self) -> dict[str, Any]:
        """As plain types, with the rule's source."""
        return {**asdict(self), "source": source_of(self.rule)}


def of_message(
    message: str, refused: bool = True, place: tuple[str, int] = ("", 1), rule: str = ""
) -> KernelFinding:
    """The finding that an error or a warning of a run is; a place at its end is left out."""
    message = re.sub(r" \[[^\[\]]+\.py:\d+\]$", "", message)
    words = _TENSOR.sub("t", message)
    name = rule or next(n for n, each in RUN_RULES.items() if re.search(each.words, words))
    severity = RUN_RULES[name].severity or ("error" if refused else "warning")
    return KernelFinding(shown(place[0]), place[1], 1, name, severity, message)


def once(findings: Iterable[KernelFinding]) -> list[KernelFinding]:
    """In order of files and lines; of those that differ by numbers alone the first: a loop's."""
    first: dict[object, KernelFinding] = {}
    for finding in findings:
        key = finding.path, finding.line, finding.rule, re.sub(r"\d+", "", finding.message)
        first.setdefault(key, finding)
    return sorted(first.values())


def shown(path: str) -> str:
    """A path below this directory, or as it is."""
    resolved = os.path.realpath(path)
    inside = Path(resolved).is_relative_to(os.path.realpath("."))
    return os.path.relpath(resolved, os.path.realpath(".")) if inside else path


def source_of(rule: str) -> str:
    """Where the rule stands, in AWS's documentation if it is theirs."""
    line = "" if rule in RUN_RULES else LINT_RULES[rule].line
    if rule in RUN_RULES:
        return RUN_RULES[rule].source
    return f"NKI {line} language guide" if line else "NKI language and migration guides"


def sarif(findings: Iterable[KernelFinding], kernel: str) -> dict[str, Any]:
    """A SARIF 2.1.0 log of one run, as GitHub's code scanning takes it: a category a kernel."""
    findings = list(findings)
    names = sorted({finding.rule for finding in findings})
    rules = [
        {
            "id": name,
            "shortDescription": {"text": (RUN_RULES.get(name) or LINT_RULES[name]).what},
            "help": {"text": source_of(name) or "no source: a rule of Python or of this simulator"},
        }
        for name in names
    ]
    results = [
        {
            "ruleId": finding.rule,
            "ruleIndex": names.index(finding.rule),
            "level": finding.severity,
            "message": {"text": finding.message},
            "locations": [
                {
                    "physicalLocation": {
                        "artifactLocation": {"uri": _uri(finding.path)},
                        "region": {"startLine": finding.line, "startColumn": finding.column},
                    }
                }
            ],
        }
        for finding in findings
    ]
    driver = {
        "name": "neuroncore",
        "version": __version__,
        "informationUri": "https://github.com/neuronmm-ops/neuronmm-ops/tree/main/neuroncore",
        "rules": rules,
    }
    run = {
        "tool": {"driver": driver},
        "automationDetails": {"id": f"neuroncore/{kernel}/"},
        "columnKind": "unicodeCodePoints",
        "results": results,
    }
    schema = "https://json.schemastore.org/sarif-2.1.0.json"
    return {"$schema": schema, "version": "2.1.0", "runs": [run]}


def _uri(path: str) -> str:
    return Path(path).as_uri() if os.path.isabs(path) else quote(Path(path).as_posix())
