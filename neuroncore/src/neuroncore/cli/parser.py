"""What the parsers of all commands have in common."""

import argparse
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any, NoReturn

from neuroncore.cli.console import one_line

EXAMPLE = "example: %(prog)s "
"""The beginning of the last line of every help text."""


class Parser(argparse.ArgumentParser):
    """argparse with one line per mistake, and without abbreviations.

    Those mean another option than the user did, or another one in the next release: `--tokens` was
    `--tokens-ahead`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride] - its overloads
        self, args: Any = None, namespace: Any = None
    ) -> Any:
        """Parse all, or say which command does not know what, and what it may have meant."""
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            meant = self._meant(unknown[0].partition("=")[0])
            self.error(f"unrecognized arguments: {' '.join(unknown)}{meant}")
        return parsed, unknown

    def _meant(self, option: str) -> str:
        if not option.startswith("--"):
            return ""
        known = [name for name in self._option_string_actions if name.startswith("--")]
        near = [name for name in known if option[2:] in name]
        if len(near) not in (1, 2):
            near = get_close_matches(option, known, n=2, cutoff=0.7)
        return f"; did you mean {' or '.join(near)}?" if near else ""

    def error(self, message: str) -> NoReturn:
        """Print the line and exit with 2."""
        self.exit(2, f"{self.prog}: {one_line(message)} (see {self.prog} --help)\n")


def add_command(
    commands: Any,
    name: str,
    run: Callable[[argparse.Namespace], Any],
    show: Callable[[Any], None],
    description: str,
    example: str = "",
) -> argparse.ArgumentParser:
    """Add a command with the options that all have.

    `run` makes its document of the parsed options, and `show` prints that for people. A command
    whose document may tell of failures sets `exit_code` to a function of it. `example` is what may
    follow the command's name. Modules of commands import what is heavy in these functions: all of
    them are imported for any help text.
    """
    command = commands.add_parser(
        name, help=description, description=description, epilog=EXAMPLE + example
    )
    command.add_argument("--json", action="store_true", help="print one JSON document")
    command.add_argument("--debug", action="store_true", help="show the traceback of an error")
    command.set_defaults(run=run, show=show, exit_code=lambda document: 0)
    return command
