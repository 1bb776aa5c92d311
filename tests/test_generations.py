"""Code asks a machine what it can do, not for its generation; a new one is added in hardware.py."""

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import run

ROOT = Path(__file__).parents[1]
HARDWARE = ROOT / "neuroncore" / "src" / "neuroncore" / "hardware.py"
SOURCES = sorted({*ROOT.glob("src/**/*.py"), *ROOT.glob("neuroncore/src/**/*.py")} - {HARDWARE})
NAMES = {"generation", "nc_version", "get_nc_version", "TRN1", "TRN2", "TRN3"}


def of_generation(node: ast.AST) -> bool:
    """Whether an expression names a generation of NeuronCore."""
    for part in ast.walk(node):
        match part:
            case ast.Name(id=name) | ast.Attribute(attr=name) if name in NAMES:
                return True
            case ast.Constant(value=str(text)) if re.fullmatch(r"trn\d|inf2|gen\d", text):
                return True
            case _:
                pass
    return False


def conditions(text: str) -> Iterator[ast.AST]:
    """Comparisons, cases and tables that depend on a generation."""
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Compare() | ast.match_case() if of_generation(
                node.pattern if isinstance(node, ast.match_case) else node
            ):
                yield node
            case ast.Dict(keys=keys) if any(key and of_generation(key) for key in keys):
                yield node
            case _:
                pass


def test_no_condition_depends_on_a_generation():
    places = [
        f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
        for path in SOURCES
        for node in conditions(path.read_text())
    ]
    assert not places, f"ask `hardware.Machine` for what it can do: {places}"


@pytest.mark.parametrize(
    "condition",
    [
        "machine.generation >= 3",
        "2 == generation()",
        "nisa.get_nc_version() != nisa.nc_version.gen4",
        "target == 'trn1'",
        "target in ('trn2', 'trn3')",
        "machine is TRN1",
        "{'trn1': 2, 'trn2': 8}",
        "match target:\n    case 'trn2': pass",
    ],
)
def test_conditions_are_recognised(condition):
    assert len(list(conditions(condition))) == 1


def added(home: Path, *arguments: str) -> str:
    """What a Python prints whose hardware.py has a generation more, trn4."""
    script = Path(__file__).with_name("made_up_generation.py")
    return run(sys.executable, script, *arguments, XDG_CACHE_HOME=home)


@pytest.mark.slow
def test_a_generation_is_added_in_hardware_alone(tmp_path):
    for plans in json.loads(added(tmp_path, "plan")).values():
        assert plans["trn4"] == plans["trn3"]
        assert plans["trn4"]["decode_matmuls"] < plans["trn2"]["decode_matmuls"]


@pytest.mark.slow
def test_a_model_is_timed_on_an_added_generation(tmp_path):
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "vocab_size": 1024}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
    config = {"model_type": "llama", "num_hidden_layers": 2} | sizes | heads
    (tmp_path / "config.json").write_text(json.dumps(config))
    command = ["bench", "model", "--model", str(tmp_path), "--tp", "4", "--lnc", "2", "--json"]
    command += ["--prompt-tokens", "128", "--new-tokens", "2"]
    new, old = [json.loads(added(tmp_path, *command, "--target", t)) for t in ("trn4", "trn3")]
    assert new.pop("target") == "trn4"
    assert old.pop("target") == "trn3"
    assert new == old
