"""The parsers of all commands: what they cost, their help texts, their options' names."""

import argparse
import json
import shlex
from collections.abc import Iterator

import pytest
from outcomes import SCRIPT, process

from neuronmm_ops.cli import parser


def parsers(root: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield a parser and all below it."""
    yield root
    for action in root._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                yield from parsers(child)


def is_leaf(command: argparse.ArgumentParser) -> bool:
    return command.get_default("run") is not None


ALL = {command.prog: command for command in parsers(parser())}
LEAVES = {prog: command for prog, command in ALL.items() if is_leaf(command)}

MODULES = """
import json, sys
from neuronmm_ops.cli import main
for arguments in json.loads(sys.argv[1]):
    main(arguments)
    heavy = {"torch", "numpy", "rich", "ml_dtypes", "safetensors"} & set(sys.modules)
    print(arguments, heavy, file=sys.stderr)
"""


def test_help_and_version_import_nothing_heavy():
    lines = [["--version"], *[[*prog.split()[1:], "--help"] for prog in ALL]]
    outcome = process(SCRIPT[0], "-c", MODULES, json.dumps(lines))
    assert outcome.err.splitlines() == [f"{line} set()" for line in lines]
    assert outcome.out.startswith("neuronmm-ops ")


@pytest.mark.parametrize("prog", ALL)
def test_every_help_text_ends_with_an_example_that_parses(prog, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    example = ALL[prog].format_help().splitlines()[-1]
    label, command, *arguments = shlex.split(example)
    assert (label, command) == ("example:", "neuronmm")
    options = parser().parse_args(arguments)
    chosen = [options.command, *(v for k, v in vars(options).items() if k in GROUPS)]
    assert f"neuronmm {' '.join(chosen)}".startswith(prog)


GROUPS = ("benchmark", "engine")


# `compress` takes one launch; `plan` has no checkpoint whose dtype "auto" could be; `bench model`
# takes several numbers of ranks; `simulate` leaves the cores to the kernel.
DIFFER = {
    ("neuronmm compress", "--tokens"),
    ("neuronmm plan", "--dtype"),
    ("neuronmm bench model", "--tp"),
    ("neuronmm simulate", "--lnc"),
}


def test_an_option_is_written_alike_in_every_command():
    known: dict[str, tuple[object, ...]] = {}
    for prog, command in LEAVES.items():
        for action in command._actions:
            name = action.option_strings[-1] if action.option_strings else None
            if name is not None and (prog, name) not in DIFFER:
                own = (action.metavar, action.type, action.choices)
                assert known.setdefault(name, own) == own, f"{prog} {name}"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("neuronmm pl", ["plan "]),
        ("neuronmm plan --tok", ["--tokens "]),
        ("neuronmm bench gen", ["generate "]),
        ("neuronmm generate small --dtype b", ["bfloat16 "]),
    ],
)
def test_a_shell_completes(line, expected, tmp_path):
    """By argcomplete's protocol, as the function that it gives to shells calls the command."""
    found = tmp_path / "found"
    protocol = {
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_STDOUT_FILENAME": found,
        "COMP_LINE": line,
        "COMP_POINT": len(line),
        "COMP_TYPE": 9,
    }
    done = process("env", *(f"{name}={value}" for name, value in protocol.items()), *SCRIPT)
    assert (done.out, done.err) == ("", "")
    assert [text for text in found.read_text().split("\n") if text] == expected
