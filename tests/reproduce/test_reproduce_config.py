"""TOML files: what they become, and that the shipped ones are what they say."""

from pathlib import Path

import pytest

from neuronmm_ops import SVDConfig
from neuronmm_ops.models import SHAPES
from neuronmm_ops.reproduce.config import (
    PAPERS,
    Evaluate,
    Measured,
    Modelled,
    Reproduction,
    load,
    shipped,
)
from neuronmm_ops.reproduce.published import published
from neuronmm_ops.reproduce.schema import read_table

LEAST = """[model]
id = "a"
[compress]
ratios = [0.2]
[methods.svd]
method = "plain"
"""


def loaded(tmp_path: Path, text: str) -> Reproduction:
    path = tmp_path / "paper.toml"
    path.write_text(text)
    return load(path)


def test_the_least_file(tmp_path):
    asked = loaded(tmp_path, LEAST)
    assert asked.title == "paper"
    assert asked.methods == {"svd": SVDConfig(method="plain")}
    assert asked.evaluate == Evaluate()
    assert asked.compress.storages == ("native",)
    assert (asked.recovery, asked.modelled, asked.measured, asked.published) == (None,) * 4


def test_methods_take_what_compress_says_unless_they_say_otherwise(tmp_path):
    text = LEAST.replace("[methods", 'block = 16\ntargets = "all-linear"\n[methods')
    text += 'alpha = 0\n[methods.other]\nmethod = "plain"\nblock = 32\ntargets = ["mlp", "x"]\n'
    methods = loaded(tmp_path, text).methods
    assert (methods["svd"].block, methods["svd"].alpha) == (16, 0)
    assert methods["svd"].target_list == ("all-linear",)
    assert (methods["other"].block, methods["other"].target_list) == (32, ("mlp", "x"))


def test_one_bare_value_is_a_list_of_it():
    assert read_table(Evaluate, {"tasks": "piqa"}, "") == Evaluate(tasks=("piqa",))
    assert read_table(Measured, {"prompt": 3}, "measured") == Measured(prompt=3)


def test_what_is_no_table():
    with pytest.raises(ValueError, match=r"\Aevaluate must be a table, got \[\]\Z"):
        read_table(Evaluate, [], "evaluate")


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ('[modelled]\ntarget = "trn1"\nlnc = 2\n', "modelled.lnc must be 1, or 2 on trn2"),
        ("[modelled]\ntp = 0\n", "modelled.tp must be at least 1"),
        (
            "[methods.kfac-drift]\n",
            "compress.calibration is missing; method kfac-drift needs a text",
        ),
        ("[methods.x]\nratio = 0.3\n", "unknown key of methods.x 'ratio'"),
        ("[recovery]\ndata = 'x'\nstep = 3\n", "unknown key of recovery 'step'"),
        ("[recovery]\ndata = 'x'\nminutes = -1.0\n", "minutes must be a positive number"),
        ("[recovery]\ndata = 'x'\nmethod = 'sft'\n", "must be one of distill, lora; got 'sft'"),
        ("[evaluate]\nnum_fewshot = -1\n", "num_fewshot must not be negative"),
        ("[evaluate]\ntexts = ['a', 'a']\n", "evaluate.texts must not hold a value twice"),
        ("storage = 'int8'\n", "unknown key of methods.svd 'storage'"),
    ],
)
def test_values_that_do_not_go_together(tmp_path, extra, words):
    with pytest.raises(ValueError, match=r"\A.*\Z") as raised:
        loaded(tmp_path, LEAST + extra)
    assert str(raised.value).startswith(str(tmp_path))
    assert words in str(raised.value)


@pytest.mark.parametrize("name", [name for name in shipped() if name != "demo"])
def test_the_papers_models(name):
    asked = load(shipped()[name])
    model = asked.model.id.rpartition("/")[2]
    assert model.lower() == name
    assert model in SHAPES
    assert asked.compress.ratios == (0.05, 0.1, 0.2)
    assert asked.evaluate.texts == ("wikitext2", "ptb", "c4")
    assert asked.evaluate.tasks == (
        *("openbookqa", "winogrande", "piqa", "hellaswag"),
        *("arc_easy", "arc_challenge", "mathqa"),
    )
    assert asked.methods["neuronmm"] == SVDConfig(ratio=0.05, method="whiten", allocation="uniform")
    assert asked.published == model
    assert asked.recovery is not None
    assert asked.recovery.config.method == "lora"
    assert isinstance(asked.modelled, Modelled)
    own = [number for number in published() if number["model"] == model]
    assert own or name == "qwen3-8b"


def test_the_shipped_files_come_with_the_package():
    assert set(shipped()) >= {"demo", "llama-3.2-1b"}
    assert (PAPERS / "tasks" / "demo_ends.yaml").is_file()
