"""What the parsers of all commands have in common."""

import argparse
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from neuroncore.cli.parser import EXAMPLE
from neuroncore.cli.parser import add_command as add_without_options

OPTIONS: dict[str, dict[str, Any]] = {
    "model": {
        "metavar": "MODEL",
        "help": "a Transformers directory, or a hub id ORG/NAME",
    },
    "--text": {"type": Path, "required": True, "metavar": "FILE"},
    "--force": {"action": "store_true", "help": "replace OUT if it is a compressed checkpoint"},
    "--seqlen": {
        "type": int,
        "help": "tokens in a block (default: 2048, or the model's limit)",
    },
    "--ratio": {
        "type": float,
        "default": 0.2,
        "help": "fraction of parameters to remove (default 0.2)",
    },
    "--dtype": {
        "choices": ("auto", "float32", "bfloat16", "float16"),
        "default": "auto",
        "help": "auto (default): the checkpoint's if fast, else float32",
    },
    "--device": {"default": "cpu", "help": "cpu (default), cuda, cuda:1, ..."},
    "--target": {"help": "trn1, trn2 or trn3 (default: this machine's or trn2)"},
    "--lnc": {
        "type": int,
        "choices": (1, 2),
        "default": 1,
        "help": "NeuronCores of a launch (default 1; 2 on trn2 and trn3)",
    },
}
"""Arguments that mean the same in several commands."""
LARGEST = 2**20
"""Of tokens or ranks in an option: to plan for more takes minutes, or for ever."""
OWN_RANKS = "; a compressed directory is taken as it is"
"""Of `--model`, where ranks and storages can be given."""


def add_command(
    commands: Any,
    name: str,
    run: Callable[[argparse.Namespace], Any],
    show: Callable[[Any], None],
    description: str,
    *options: str,
    example: str = "",
) -> argparse.ArgumentParser:
    """Add a command as `neuroncore.cli.parser.add_command` does, with the options of `OPTIONS`."""
    command = add_without_options(commands, name, run, show, description, example)
    for option in options:
        command.add_argument(option, **OPTIONS[option])
    return command


def chosen(options: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Return the values of options by their names, as keyword arguments of what is run."""
    return {name: getattr(options, name) for name in names}


def add_group(commands: Any, name: str, dest: str, description: str, example: str) -> Any:
    """Add a command that has commands of its own, and return what they are added to."""
    group = commands.add_parser(
        name, help=description, description=description, epilog=EXAMPLE + example
    )
    return group.add_subparsers(dest=dest, required=True, metavar=dest.upper())


def add_output(command: argparse.ArgumentParser, described: str, required: bool = True) -> None:
    """Add `-o OUT`, a path to write."""
    command.add_argument(
        "-o", "--output", type=Path, required=required, metavar="OUT", help=described
    )


def add_numbers(command: argparse.ArgumentParser, *options: tuple[str, str, int, str]) -> None:
    """Add options of one number each: name, attribute, default, and what it counts."""
    for name, dest, default, described in options:
        described += f" (default {default})"
        command.add_argument(
            name, dest=dest, type=int, default=default, metavar="N", help=described
        )


def add_shape(command: argparse.ArgumentParser, note: str = "", **options: Any) -> None:
    """Add `--model MODEL`: sizes to work with, no weights; `models.resolve_shape` reads it."""
    described = "sizes: a name such as Llama-3.2-1B, ORG/NAME, a directory or a config.json"
    command.add_argument("--model", metavar="MODEL", help=described + note, **options)


def add_storages(command: argparse.ArgumentParser) -> None:
    """Add which Linears of a model are low-rank, and how its weights are stored.

    None of them, nor `--ratio`, has a value where it is not given: a checkpoint has its own.
    """
    command.set_defaults(ratio=None)
    command.add_argument(
        "--targets",
        nargs="+",
        help="low-rank Linears: mlp (default), attention, all-linear, names",
    )
    command.add_argument("--storage", help="their storage: fp8, int8 or int4 (default bfloat16)")
    command.add_argument(
        "--storage-dense",
        help="that of the layers' other Linears",
    )
    command.add_argument("--storage-lm-head", help="that of the output head")


def add_tokens(command: argparse.ArgumentParser, default: list[int], shown: str = "") -> None:
    """Add `--tokens M ...`; read it with `tokens_of`."""
    described = shown or " ".join(map(str, default))
    command.add_argument(
        "--tokens",
        nargs="+",
        default=[str(value) for value in default],
        metavar="M",
        help=f"tokens of a launch (default {described})",
    )


def tokens_of(options: argparse.Namespace) -> list[int]:
    """Return the values of `--tokens`.

    Raises:
        ValueError: one is no number, or smaller than 1.
    """
    text = ",".join(options.tokens)
    return numbers_of("--tokens", text, "1,128,4096") if text else []


def numbers_of(option: str, text: str, such_as: str = "8,32") -> list[int]:
    """Return the numbers of an option that are separated by commas.

    Raises:
        ValueError: one is no number, smaller than 1, or larger than `LARGEST`.
    """
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = [0]
    if min(numbers) < 1 or max(numbers) > LARGEST:
        limit = f"at least 1, and at most {LARGEST}" if max(numbers) > LARGEST else "at least 1"
        raise ValueError(f"{option} must be numbers of {limit}, such as {such_as}; got {text!r}")
    return numbers


def add_texts(command: argparse.ArgumentParser) -> None:
    """Add `--text FILE`, once for each text; read it with `texts_of`."""
    command.add_argument(
        "--text",
        type=Path,
        action="append",
        required=True,
        metavar="FILE",
        help="text for the perplexity; repeatable",
    )


def texts_of(options: argparse.Namespace) -> list[Path]:
    """Return the paths of `--text`.

    Raises:
        ValueError: two have the same name, by which tables and plots tell them apart.
    """
    name, count = Counter(path.name for path in options.text).most_common(1)[0]
    if count > 1:
        raise ValueError(f"texts must have names that differ, got {name} {count} times")
    return options.text
