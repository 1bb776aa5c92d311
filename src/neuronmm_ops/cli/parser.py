"""What the parsers of all commands have in common."""

import argparse
from collections.abc import Callable
from typing import Any, NoReturn

DTYPES = ("auto", "float32", "bfloat16", "float16")


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


def add_model(command: argparse.ArgumentParser) -> None:
    """Add the positional MODEL: weights to work with."""
    command.add_argument(
        "model", metavar="MODEL", help="a Transformers directory, or a hub id such as ORG/NAME"
    )


def add_shape(command: argparse.ArgumentParser, **options: Any) -> None:
    """Add `--model NAME`: sizes to work with, no weights."""
    command.add_argument("--model", metavar="NAME", **options)


def add_tokens(command: argparse.ArgumentParser, default: list[int], shown: str = "") -> None:
    """Add `--tokens M ...`; read it with `tokens_of`."""
    described = shown or " ".join(map(str, default))
    command.add_argument(
        "--tokens",
        nargs="+",
        default=[str(value) for value in default],
        metavar="M",
        help=f"tokens of a launch, separated by spaces or commas (default {described})",
    )


def tokens_of(options: argparse.Namespace) -> list[int]:
    """Return the values of `--tokens`.

    Raises:
        ValueError: one is no number, or smaller than 1.
    """
    text = ",".join(options.tokens)
    try:
        found = [int(part) for part in text.split(",")] if text else []
    except ValueError:
        found = [0]
    if found and min(found) < 1:
        raise ValueError(
            f"--tokens must be numbers of at least 1, such as 1,128,4096; got {text!r}"
        )
    return found


def add_dtype(command: argparse.ArgumentParser, auto: str) -> None:
    """Add `--dtype`; `auto` says what that takes."""
    command.add_argument(
        "--dtype", choices=DTYPES, default="auto", help=f"to compute in (default auto: {auto})"
    )


def add_computing(command: argparse.ArgumentParser) -> None:
    """Add `--dtype` and `--device`."""
    add_dtype(command, "the checkpoint's where the device multiplies it fast, otherwise float32")
    command.add_argument("--device", default="cpu", help="cpu (default), cuda, cuda:1, ...")
