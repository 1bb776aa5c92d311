"""Lists of the arguments of our commands and of `python benchmarks`, from their parsers."""

import argparse
from collections.abc import Callable, Iterator

from benchmarks.cli import parser as benchmarks
from neuroncore.cli import parser as simulators
from neuronmm_ops.cli import parser

_EVERYWHERE = {"help", "json", "debug"}
"""What every command takes; the page says it once."""


def argument_lists() -> dict[str, Callable[[], str]]:
    """A list for each command that has arguments of its own, by a name such as `bench-cpu`."""
    simulator = dict(_lists(simulators(), "neuroncore"))
    # what else it has, neuronmm has, too
    own = ("neuroncore-run", "neuroncore-compare", "neuroncore-calibrate")
    every = (*_lists(parser(), ""), *_lists(benchmarks(), "benchmarks"))
    return {**dict(every), **{name: simulator[name] for name in own}}


def _lists(command: argparse.ArgumentParser, name: str) -> Iterator[tuple[str, Callable[[], str]]]:
    # argparse has no public list of a parser's arguments.
    actions = command._actions  # pyright: ignore[reportPrivateUsage]
    for action in actions:
        if isinstance(action.choices, dict):
            for each, of in action.choices.items():
                yield from _lists(of, f"{name}-{each}".strip("-"))
            return
    arguments = [action for action in actions if action.dest not in _EVERYWHERE]
    arguments.sort(key=lambda action: bool(action.option_strings))  # those without a name first
    if arguments:
        yield name, lambda: "\n".join(f"- {_name(each)}: {_help(each)}" for each in arguments)


def _name(action: argparse.Action) -> str:
    if isinstance(action.metavar, str):
        value = action.metavar
    elif action.choices is not None:
        value = "|".join(map(str, action.choices))
    else:
        value = action.dest.upper()
    if action.nargs in ("+", "*"):
        value += " ..."
    *short, last = action.option_strings or [""]
    shown = last if action.nargs == 0 else f"{last} {value}".strip()
    return ", ".join(f"`{each}`" for each in (*short, shown))


def _help(action: argparse.Action) -> str:
    return " ".join((action.help or "").split())
