"""The program of docs/trainium.md, on a tiny checkpoint."""

import re
import warnings
from pathlib import Path

import programs
import pytest
import torch
from tiny import tiny_ids, tiny_model, tiny_tokenizer
from torch._dynamo.utils import counters

from neuronmm_ops import CalibrationWarning, SVDConfig, compress_, hf

GUIDE = Path(__file__).parents[2] / "docs" / "trainium.md"
PROMPTS = ("Once upon", "A", "There was a core")


@pytest.fixture
def program():
    """The guide's program in float32, without its last line, in buckets of a tiny model."""
    found = re.search(r'^```py title="run\.py"\n(.*?)^```', GUIDE.read_text(), re.M | re.S)
    program = found[1]
    for written, wanted in (
        ("BUCKET, LIMIT = 128, 512", "BUCKET, LIMIT = 16, 32"),
        ("dtype=torch.bfloat16", "dtype=torch.float32"),
        ('print(generate("Once upon", 20))\n', ""),
    ):
        assert program.count(written) == 1
        program = program.replace(written, wanted)
    return program


@pytest.fixture
def checkpoint(tmp_path, monkeypatch):
    """The directory `small` of the guide, in the working directory."""
    model, tokenizer = tiny_model(), tiny_tokenizer()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CalibrationWarning)
        config = SVDConfig(ratio=0.3, block=8, method="swift", allocation="uniform")
        report = compress_(model, config, [tiny_ids()])
    hf.save(model, tmp_path / "small", report, tokenizer)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "small"


def test_its_answers_are_those_of_the_cpu_in_two_graphs(program, checkpoint, handler):
    model, tokenizer = hf.load(checkpoint, dtype=torch.float32), hf.load_tokenizer(checkpoint)
    counters.clear()
    Path("run.py").write_text(program)
    guide = programs.load(Path("run.py"))
    before = handler.count
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        expected = model.generate(**ids, max_new_tokens=6, do_sample=False)
        answer = guide.generate(prompt, 6)
        assert answer == tokenizer.decode(expected[0, ids.input_ids.shape[1] :])
    assert handler.count - before == len(PROMPTS) * 6 * 2
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 2
