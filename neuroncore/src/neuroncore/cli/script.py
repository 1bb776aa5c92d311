"""`run`: a script that imports `nki`, unchanged, with the simulator in its place."""

from __future__ import annotations

import argparse
import runpy
import sys
from typing import TYPE_CHECKING, Any

from neuroncore.cli.console import stderr
from neuroncore.cli.parser import add_command

if TYPE_CHECKING:
    from neuroncore import Profile

_DESCRIPTION = """\
Run a Python script in which `import nki` finds the simulator, as `python FILE.py` would run it, and
print the modelled time of each kernel on stderr. The exit code is the script's."""


def add(commands: Any) -> None:
    """Add the command to the parser."""
    description = "run a script that imports nki; time is modelled"
    command = add_command(commands, "run", _run, _show, description, example="quickstart.py")
    command.description = _DESCRIPTION
    command.add_argument("script", metavar="FILE.py", help="script; its code runs on this machine")
    command.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="ARGS", help="arguments of the script"
    )
    command.set_defaults(exit_code=lambda document: document["exit_code"])


def _run(options: argparse.Namespace) -> dict[str, Any]:
    from neuroncore.cli.files import as_nki, contained, python_file, reported
    from neuroncore.kernel import observers

    path = python_file(options.script)
    launches: list[dict[str, Any]] = []
    code: Any = 0

    def observe(profile: Profile) -> None:
        names = ("target", "lnc", "time_ms", "bound")
        values = {name: getattr(profile, name) for name in names}
        launches.append({"kernel": profile.kernel_name, **values})

    before = sys.argv, list(sys.path)
    observers.append(observe)
    try:
        with contained(is_quiet=options.json), as_nki(), reported(path):
            sys.argv = [options.script, *options.arguments]
            sys.path.insert(0, str(path.parent))
            try:
                runpy.run_path(str(path), run_name="__main__")
            except SystemExit as stop:
                code = stop.code
    finally:
        observers.remove(observe)
        sys.argv, sys.path[:] = before
    if not isinstance(code, int | None):
        stderr.print(str(code))
    exit_code = code if isinstance(code, int) else int(code is not None)
    return {"modelled": True, "exit_code": exit_code, "launches": launches}


def _show(document: dict[str, Any]) -> None:
    line = "{kernel} on {target}: {time_ms:.4f} ms (modelled), bound by {bound}"
    lines = [line.format_map(launch) for launch in document["launches"]]
    for line in dict.fromkeys(lines):
        times = lines.count(line)
        stderr.print(line + f"; {times} times" * (times > 1))
