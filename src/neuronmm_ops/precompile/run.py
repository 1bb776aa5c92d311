"""Compile a model's kernels one after the other, each in a process that can be ended."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neuroncore.hardware import TARGET_VARIABLE
from neuronmm_ops.errors import NkiVersionError
from neuronmm_ops.extras import version_of
from neuronmm_ops.kernels import source_fingerprint
from neuronmm_ops.ops.backends.environment import (
    LNC_VARIABLE,
    is_installed,
    nki_release,
    why_not_compilable,
)
from neuronmm_ops.precompile import driver
from neuronmm_ops.processes import locked

if TYPE_CHECKING:
    from neuronmm_ops.estimate.subject import Options
    from neuronmm_ops.progress import Update

INSTALL = (
    "run: pip install 'nki==0.7.*' 'neuronx-cc==2.28.*' "
    "--extra-index-url https://pip.repos.neuron.amazonaws.com"
)
SUMMARY, LOG = "compile.json", "log.txt"
CODE = re.compile(r"NCC_[A-Z]{4}\d{3}")
REMEDIES = {
    **dict.fromkeys(("EVRF065",), "install nki and neuronx-cc of one SDK"),
    **dict.fromkeys(("EVRF066", "EARG001"), "use --lnc 1, or another --target"),
    **dict.fromkeys(
        ("EVRF051", "EVRF052"),
        "set NEURON_CC_FLAGS=--experimental-unsafe-fp8e4m3fn-as-fp8e4m3, or use --storage int8",
    ),
    **dict.fromkeys(("EVRF007", "EBVF030", "EXTP004"), "use fewer --tokens"),
    **dict.fromkeys(("EOOM001", "EOOM002"), "use a greater --ratio, or --storage fp8"),
    "SIGKILL": "use a machine with more memory: the system ended it",
    "timeout": "use a longer --timeout",
}
"""What to change, by how it ended: codes of the compiler are in docs/troubleshooting.md."""
REPORT = "report it with log.txt of its folder; docs/troubleshooting.md explains codes"
_SIMULATING = ("NKI_SIMULATOR", "NKI_PRECISE_FP")
"""Variables by which NKI would run a kernel on the host instead."""


def run(
    model: str,
    tokens: Sequence[int],
    options: Options,
    output: Path,
    timeout_s: float,
    progress: Update,
) -> dict[str, Any]:
    """Compile every kernel that a model needs by NKI's driver.

    Args:
        model: as `models.resolve_shape` takes it.
        tokens: of a pass; 1 is decode.
        options: as `launches.launches_of`.
        output: directory of the artefacts, a folder a kernel. A kernel that was compiled there, of
            the same source and by the same versions, is not compiled again.
        timeout_s: of one kernel.
        progress: told of kernels.

    Returns:
        One document, also in `compile.json` of `output`. A row of `kernels` has what
        `launches.launches_of` returns, `verdict` (compiled or refused), `seconds`, `file` (the
        NEFF in `output`, None where there is none) and `code`, `message` and `remedy` of a refusal.

    Raises:
        ImportError: nki or neuronx-cc is not installed.
        NkiVersionError: the installed NKI has another driver, or cannot compile the kernels.
        ValueError: as `launches.launches_of`.
        OSError: `output` cannot be written, or another process writes there.
    """
    versions = installed()
    from neuronmm_ops.precompile.launches import launches_of

    rows = launches_of(model, tokens, options)
    output.mkdir(parents=True, exist_ok=True)
    document = {
        "model": model,
        "target": rows[0]["target"],
        "lnc": options.lnc,
        "versions": versions,
        "source": source_fingerprint(),
        "kernels": rows,
    }
    with locked(output):
        for done, row in enumerate(rows, 1):
            row |= _verdict(row, output, versions, timeout_s)
            progress("compile", done, len(rows))
        (output / SUMMARY).write_text(json.dumps(document, indent=2))
    return document


def installed() -> dict[str, str]:
    """Versions of nki and neuronx-cc.

    Raises:
        ImportError: one is not installed, or only the empty placeholder of the default index.
        NkiVersionError: the kernels cannot compile with that nki.
    """
    # the placeholder neuronx-cc 1.0.post1 has no such module
    compiler = version_of("neuronx-cc") if is_installed("neuronxcc") else None
    versions = {"nki": nki_release(), "neuronx-cc": compiler}
    missing = [name for name, version in versions.items() if version is None]
    if missing:
        raise ImportError(
            f"compile needs nki and neuronx-cc; missing: {', '.join(missing)}; {INSTALL}"
        )
    problem = why_not_compilable()
    if problem:
        raise NkiVersionError(problem)
    return {name: str(version) for name, version in versions.items()}


def _verdict(
    request: dict[str, Any], output: Path, versions: dict[str, str], timeout_s: float
) -> dict[str, Any]:
    """What became of one kernel, now or in an earlier run."""
    asked = json.dumps({**request, "versions": versions, "source": source_fingerprint()})
    key = hashlib.sha256(asked.encode()).hexdigest()[:12]
    folder = output.resolve() / f"{request['kernel']}-{key}"
    result = _result(folder)
    if result.get("verdict") != "compiled":
        shutil.rmtree(folder, ignore_errors=True)  # neuronx-cc wants an empty directory
        folder.mkdir()
        (folder / driver.REQUEST).write_text(asked)
        ended = _drive(folder, request, timeout_s)
        result = _result(folder) or {"verdict": "refused", "error": ended, "message": _last(folder)}
    if result["verdict"] == "no driver":
        raise NkiVersionError(
            f"nki {versions['nki']} must have the driver of 0.6 and 0.7: {result['message']}; "
            f"{INSTALL}"
        )
    is_compiled = result["verdict"] == "compiled"
    verdict = {
        "verdict": result["verdict"],
        "seconds": result.get("seconds", timeout_s),
        "file": str(Path(folder.name, driver.NEFF)) if is_compiled else None,
    }
    return verdict if is_compiled else verdict | _refusal(result, folder)


def _drive(folder: Path, request: dict[str, Any], timeout_s: float) -> str:
    """Run the driver, and end all of its processes after the time; how it ended."""
    environment = {name: v for name, v in os.environ.items() if name not in _SIMULATING} | {
        TARGET_VARIABLE: request["target"],
        LNC_VARIABLE: str(request["lnc"]),
        # the programs next to this Python, such as neuronx-cc, and the modules that it finds
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        "PYTHONPATH": os.pathsep.join([str(Path(each).resolve()) for each in sys.path]),
    }
    command = [sys.executable, "-m", driver.__name__, str(folder)]
    with (folder / LOG).open("wb") as log:
        process = subprocess.Popen(  # noqa: S603
            command, cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True
        )
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return "timeout"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _result(folder: Path) -> dict[str, Any]:
    """What the driver wrote; nothing where it came to no end."""
    try:
        return json.loads((folder / driver.RESULT).read_text())
    except (OSError, ValueError):
        return {}


def _last(folder: Path) -> str:
    """The last line of the log."""
    lines = (folder / LOG).read_text(errors="replace").split("\n")
    return next((line for line in reversed(lines) if line.strip()), "it printed nothing")


def _refusal(result: dict[str, Any], folder: Path) -> dict[str, str]:
    texts = (result["message"], (folder / LOG).read_text(errors="replace"))
    match = next(filter(None, map(CODE.search, texts)), None)
    code = match[0] if match else result["error"]
    remedy = REMEDIES.get(code.removeprefix("NCC_"), REPORT)
    return {"code": code, "message": result["message"], "remedy": remedy}
