"""Cells on disk, what decides their keys, and the texts that they come from."""

import json
from pathlib import Path

import pytest
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from reproductions import WITH_TASK, workplace

import neuronmm_ops
from neuronmm_ops.reproduce.cells import Cell, key_of, open_store
from neuronmm_ops.reproduce.config import load
from neuronmm_ops.reproduce.plan import MODELLED_BY, Study, plan
from neuronmm_ops.reproduce.texts import read_training_text

VALUES = st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5) | st.none())


@given(VALUES, VALUES)
def test_keys_are_of_inputs_whatever_their_order(first, other):
    assert key_of(first) == key_of(dict(reversed(first.items())))
    assert (key_of(first) == key_of(other)) == (first == other)
    cell = Cell("task", "dense", first, "piqa")
    assert cell.key == Cell("task", "other name", first).key
    assert cell.key != Cell("perplexity", "dense", first, "piqa").key


def test_a_store_gives_back_what_is_of_the_same_inputs(tmp_path):
    cell, other = Cell("task", "dense", {"a": 1}), Cell("task", "dense", {"a": 2})
    with open_store(tmp_path / "out") as store:
        assert store.read(cell) is None
        store.write(cell, {"accuracy": 0.5}, 1.23456)
        assert store.read(cell) == {"accuracy": 0.5}
        assert store.read(other) is None
        document = json.loads(store.path(cell).read_text())
        assert document["inputs"] == {"kind": "task", "a": 1}
        assert document["seconds"] == 1.235
        store.path(cell).rename(store.path(other))
        assert store.read(other) is None
        with pytest.raises(ValueError, match="Out of range"):
            store.write(cell, {"accuracy": float("nan")}, 0)
        assert store.read(cell) is None
        assert [path.name for path in store.cells.iterdir()] == [store.path(other).name]


def test_what_a_killed_process_was_writing_is_removed_and_nothing_else(tmp_path):
    ours = [".results.ab_12cd3.json", "cells/.task-0123456789abcdef.ab_12cd3.json"]
    others = [".notes.json", ".results.json", "cells/mine.json", "cells/.keep"]
    (tmp_path / "cells").mkdir()
    for name in (*ours, *others):
        (tmp_path / name).write_text("{")
    with open_store(tmp_path):
        pass
    assert not any((tmp_path / name).exists() for name in ours)
    assert all((tmp_path / name).exists() for name in others)


def planned(paper: Path) -> Study:
    return plan(load(paper))


def test_keys_change_with_what_decides_and_with_nothing_else(tmp_path):
    paper = workplace(tmp_path)
    paper.write_text(paper.read_text() + WITH_TASK.format(root=tmp_path))
    first = planned(paper)
    assert [cell.key for cell in planned(paper).cells] == [cell.key for cell in first.cells]
    # The data that a task file names.
    data = tmp_path / "colours.jsonl"
    data.write_text(data.read_text().replace("Number", "No."))
    second = planned(paper)
    changed = {
        cell.kind for cell, old in zip(second.cells, first.cells, strict=True)
        if cell.key != old.key
    }  # fmt: skip
    assert changed == {"task"}
    # The title is not a part of any.
    paper.write_text(paper.read_text().replace("Tiny", "Small"))
    assert [cell.key for cell in planned(paper).cells] == [cell.key for cell in second.cells]
    # The calibration text is one of `whiten` and of all that is measured of it.
    text = tmp_path / "text.txt"
    (tmp_path / "other.txt").write_text(text.read_text())
    source = paper.read_text().replace(f'texts = ["{text}"]', f'texts = ["{tmp_path}/other.txt"]')
    paper.write_text(source)
    text.write_text(text.read_text() + "more")
    third = planned(paper)
    names = {
        cell.label for cell, old in zip(third.cells, second.cells, strict=True)
        if cell.key != old.key
    }  # fmt: skip
    assert names == {"svd-llm 0.3"}


def test_modelled_times_are_shared_by_methods(tmp_path):
    paper = workplace(tmp_path)
    paper.write_text(paper.read_text() + "[modelled]\nprompt = 64\n")
    found = planned(paper)
    kinds = [cell.kind for cell in found.cells]
    assert kinds.count("modelled") == 1
    assert kinds.count("compress") == 2
    (cell,) = (cell for cell in found.cells if cell.kind == "modelled")
    assert cell.inputs["shape"]["hidden_size"] == 64
    assert cell.inputs["prompt"] == 64


def test_wikitext_and_alpaca_as_svd_llm_reads_them(tmp_path):
    rows = Dataset.from_dict({"text": ["", " = Title = ", "A line."]})
    rows.to_parquet(tmp_path / "wikitext2-train.parquet")
    assert read_training_text("wikitext2-train", tmp_path) == "\n\n = Title = \n\nA line."
    rows = [
        {"instruction": "Add.", "input": "1 and 2", "output": "3"},
        {"instruction": "Greet.", "input": "", "output": "Hello"},
    ]
    (tmp_path / "alpaca_data_cleaned.json").write_text(json.dumps(rows))
    first, second = read_training_text("alpaca", tmp_path).split("\n\nBelow is")
    assert first.startswith("Below is an instruction that describes a task, paired with an input")
    assert first.endswith("### Instruction:\nAdd.\n\n### Input:\n1 and 2\n\n### Response:\n3")
    assert second.endswith("request.\n\n### Instruction:\nGreet.\n\n### Response:\nHello")


@pytest.mark.parametrize("content", ["{", "[]", '[{"text": 3}]'])
def test_a_malformed_data_set_is_one_line(tmp_path, content):
    (tmp_path / "alpaca_data_cleaned.json").write_text(content)
    with pytest.raises(ValueError, match=r"\Aalpaca: .*alpaca_data_cleaned.json .*\Z"):
        read_training_text("alpaca", tmp_path)


def test_a_missing_data_set_names_the_file_to_place(tmp_path):
    with pytest.raises(ValueError, match=r"place one there as .*wikitext2-train\.parquet"):
        read_training_text("wikitext2-train", tmp_path)


def test_the_code_that_modelled_times_follow_from_is_there():
    root = Path(neuronmm_ops.__file__).parent
    assert [name for name in MODELLED_BY if not (root / name).exists()] == []
