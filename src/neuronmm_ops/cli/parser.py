"""What the parsers of all commands have in common."""

import argparse
from collections.abc import Callable
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """argparse with one line per mistake."""

    def error(self, message: str) -> NoReturn:
        """Print the line and exit with 2."""
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def add_command(
    commands: Any,
    name: str,
    run: Callable[[argparse.Namespace], Any],
    show: Callable[[Any], None],
    description: str,
) -> argparse.ArgumentParser:
    """Add a command with the options that all have.

    `run` makes its document of the parsed options, and `show` prints that for people.
    """
    command = commands.add_parser(name, help=description, description=description)
    command.add_argument("--json", action="store_true", help="print one JSON document")
    command.add_argument("--debug", action="store_true", help="show the traceback of an error")
    command.set_defaults(run=run, show=show)
    return command
