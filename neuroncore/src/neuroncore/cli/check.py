"""`check`: all that lint and runs find in a kernel, as one list: text, JSON and SARIF."""

from __future__ import annotations

import argparse
import json
import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neuroncore.cli.console import KernelError, check_output, one_line, stdout
from neuroncore.cli.lint import add_nki
from neuroncore.cli.parser import add_command
from neuroncore.cli.simulate import add_options, awakened, launch_of

if TYPE_CHECKING:
    from neuroncore.cli.files import FunctionPath
    from neuroncore.cli.findings import KernelFinding
    from neuroncore.cli.runs import LaunchOptions

_DESCRIPTION = """\
Lint a file and, with --arg, run a kernel of it: uninitialised reads, races, indices out of bounds,
PSUM, capacity, dtypes and every other rule, as one list. A refused instruction is left out and the
run goes on; what it finds later may follow from that. Exit code 1 with errors."""
_OPTIONS = (
    *("arg", "target", "lnc", "seed", "schedules", "strict"),
    *("max-instructions", "max-seconds", "max-bytes"),
)


def add(commands: Any) -> None:
    """Add the command to the parser."""
    description = "find what is wrong in a kernel: lint, and a run with --arg"
    example = "kernel.py:scale --arg 'x=bf16[128,512]' --sarif findings.sarif"
    command = add_command(commands, "check", _check, _show, description, example=example)
    command.description = _DESCRIPTION
    command.add_argument(
        "kernel", metavar="FILE.py[:KERNEL]", help="file, and kernel to run; its code runs with it"
    )
    add_options(command, _OPTIONS)
    add_nki(command)
    command.add_argument(
        "--sarif", type=Path, metavar="OUT.sarif", help="write the findings as SARIF 2.1.0"
    )
    command.set_defaults(schedules=3)


def _check(options: argparse.Namespace) -> dict[str, Any]:
    from neuroncore.checks.lint import lint_file
    from neuroncore.checks.lint_rules import RULES
    from neuroncore.cli.files import as_nki, contained, place_of, python_file
    from neuroncore.cli.findings import KernelFinding, once, sarif, shown

    if options.sarif is not None:
        check_output(options.sarif)
    file, colon, name = options.kernel.rpartition(":")
    path = python_file(file if colon else options.kernel)
    place = place_of(_with_kernel(options.kernel, path)) if options.arguments else None
    findings = [
        KernelFinding(shown(e.path), e.line, e.column, e.rule, e.severity,
                f"{e.message}; {RULES[e.rule].remedy}")
        for e in lint_file(str(path), options.nki, name if colon else place.name if place else "")
    ]  # fmt: skip
    ran = None
    if place is not None:
        launch = launch_of(options)
        with contained(is_quiet=options.json), as_nki(), awakened(options.max_seconds):
            more, ran = _run(place, launch)
        findings += more
    findings = once(findings)
    if options.sarif is not None:
        log = json.dumps(sarif(findings, shown(str(path)) + (f":{place.name}" if place else "")))
        options.sarif.write_text(log + "\n", encoding="utf-8")
    failing = ("error", "warning") if options.strict else ("error",)
    options.exit_code = lambda document: int(any(f.severity in failing for f in findings))
    return {
        "kernel": str(place or path.name),
        "nki": options.nki,
        "run": ran,
        "findings": [each.document() for each in findings],
    }


def _with_kernel(text: str, path: Path) -> str:
    """The kernel's place: the only one of the file where none is named."""
    from neuroncore.checks.lint_source import Sources

    kernels = Sources("0.7").read(str(path)).kernels()
    return f"{text}:{kernels[0][1].name}" if text.endswith(".py") and len(kernels) == 1 else text


def _run(place: FunctionPath, launch: LaunchOptions) -> tuple[list[KernelFinding], str]:
    """Findings of a run, and how far it came: "whole", or "stopped" where something ended it."""
    from neuroncore import NkiValidationError, NkiWarning
    from neuroncore import kernel as kernels
    from neuroncore.checks.base import COMMAND
    from neuroncore.checks.hazards import check_banks
    from neuroncore.cli.files import kernel_of, module, reported
    from neuroncore.cli.findings import of_message
    from neuroncore.cli.runs import prepared, with_inputs
    from neuroncore.tolerance import running_on

    refused: list[NkiValidationError] = []
    start, ran = (str(place.path), 1), "whole"
    orders = launch.settings.schedules
    settings = replace(launch.settings, uninitialised="warn", capacity="warn", schedules=0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", NkiWarning)
        try:
            launch = with_inputs(launch)
            with reported(place.path), running_on(refused), module(place.path) as loaded:
                kernel = kernel_of(loaded, place)
                code = kernel.func.__code__
                start = code.co_filename, code.co_firstlineno
                kernel, arguments = prepared(kernel, place, launch)
                done = kernels.run(kernel, (), arguments, settings)
                for times in done.profile.schedule.cores:
                    check_banks(times)
            if not refused and kernel.lnc == 2 and orders:
                again = replace(settings, schedules=orders)
                with reported(place.path), module(place.path) as loaded:
                    kernel, arguments = prepared(kernel_of(loaded, place), place, launch)
                    kernels.run(kernel, (), arguments, again)
        except KernelError as error:
            ran, cause = "stopped", error.__cause__
            ends = re.search(r"\[([^\[\]]+):(\d+)\]$", str(error))
            here = (str(place.path), int(ends[2])) if ends and ends[1] == place.path.name else start
            by_rule = isinstance(cause, NkiValidationError)
            at = cause.place if by_rule and cause.place else here
            results = [of_message(str(error), True, at, "" if by_rule else "python")]
        else:
            results = []
    results += [of_message(str(e), True, e.place or start) for e in refused]
    for each in caught:
        if issubclass(each.category, NkiWarning):
            outside = each.filename.startswith(COMMAND)
            at = start if outside else (each.filename, each.lineno)
            results.append(of_message(str(each.message), False, at))
    return results, ran


def _show(document: dict[str, Any]) -> None:
    for finding in document["findings"]:
        place = "{path}:{line}:{column}: {severity} {rule}".format_map(finding)
        source = f" ({finding['source']})" if finding["source"] else ""
        stdout.print(one_line(f"{place}: {finding['message']}{source}"))
    count = len(document["findings"])
    how = {
        None: "not run: it takes --arg",
        "whole": "run to its end",
        "stopped": "the run was stopped: what comes after was not checked",
    }[document["run"]]
    stdout.print(f"{document['kernel']}: {count or 'no'} finding{'s' * (count != 1)}; {how}")
