"""`migrate`: kernels of `neuronxcc.nki`, the Beta dialect, rewritten in the current one."""

import argparse
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from neuroncore.cli.console import check_output, one_line, stderr
from neuroncore.cli.parser import add_command

_DESCRIPTION = """\
Rewrite a file of the Beta dialect, which imports neuronxcc.nki, in the dialect of NKI 0.6 and 0.7,
and print it. What has no single meaning there is left, with a comment that names the rule, and
listed on stderr; exit code 1. Runs nothing, unless --verify."""


def add(commands: Any) -> None:
    """Add the command to the parser."""
    command = add_command(
        *(commands, "migrate", _migrate, _show, "rewrite kernels of neuronxcc.nki"),
        example="old.py -o new.py --verify scale --arg 'x=bf16[128,512]'",
    )
    command.description = _DESCRIPTION
    command.add_argument("file", metavar="FILE.py", help="file of the Beta dialect")
    to = command.add_mutually_exclusive_group()
    to.add_argument("-o", "--output", type=Path, metavar="OUT.py", help="write it to this file")
    to.add_argument("--check", action="store_true", help="only list what would be left by hand")
    command.add_argument(
        "--verify",
        metavar="KERNEL",
        help="run this kernel before and after on the simulated core; values must agree",
    )
    command.add_argument(
        "--arg",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        dest="arguments",
        help="a parameter of that kernel, as of `simulate`; may be given more than once",
    )
    command.set_defaults(exit_code=lambda document: int(bool(document["left"])))


def _migrate(options: argparse.Namespace) -> dict[str, Any]:
    from neuroncore.migrate import migrate, read

    path = Path(options.file)
    if options.arguments and options.verify is None:
        raise ValueError("--arg is for --verify KERNEL; name the kernel")
    if options.output is not None:
        check_output(options.output)
    text, left = migrate(read(path), options.file)
    document = {
        "file": options.file,
        "left": [asdict(one) for one in left],
        "verified": _verified(options, path, text) if options.verify is not None else [],
        "text": None if options.check else text,
    }
    if options.output is not None:
        from neuroncore.files import replacing

        with replacing(options.output) as temporary:
            temporary.write_text(text, encoding="utf-8")
        document |= {"text": None, "output": str(options.output)}
    return document


def _verified(options: argparse.Namespace, path: Path, text: str) -> list[dict[str, Any]]:
    """How far the new kernel's outputs are from the old one's. Raises KernelError: too far."""
    import numpy as np

    from neuroncore.boundary import as_arrays
    from neuroncore.cli import files, reference, runs
    from neuroncore.cli.arguments import read_arguments
    from neuroncore.kernel import RunSettings

    arguments = dict(pair for argument in options.arguments for pair in read_arguments(argument))
    launch = runs.LaunchOptions(arguments, RunSettings(capacity="warn"), None, None)
    old = files.place_of(f"{options.file}:{options.verify}")
    with (
        tempfile.TemporaryDirectory() as folder,
        files.contained(is_quiet=True),
        files.as_nki(),
    ):
        new = old._replace(path=Path(folder).resolve() / f"migrated_{path.name}")
        new.path.write_text(text, encoding="utf-8")
        sys.path.insert(0, str(old.path.parent))
        try:
            before = as_arrays(runs.run(old, launch).outputs)
            after = runs.run(new, replace(launch)).outputs
        finally:
            sys.path.remove(str(old.path.parent))
    values = [[a.astype(t) for a in before] for t in (np.float64, np.float32)]
    agreements = reference.agreements(after, reference.Expected(str(old), *values))
    reference.check_agreement(agreements, old)
    return [entry.document() for entry in agreements]


def _show(document: dict[str, Any]) -> None:
    if document["text"] is not None:
        print(document["text"], end="")
    place = document.get("output") or document["file"]
    for left in document["left"]:
        stderr.print(one_line(f"{place}:{left['line']}: {left['rule']}; {left['remedy']}"))
    for entry in document["verified"]:
        stderr.print(
            f"output {entry['output']}: as before within {entry['max_error']:.3g}, of values up to "
            f"{entry['largest']:.3g}"
        )
    count = len(document["left"])
    stderr.print(f"{count or 'nothing'} left by hand")
