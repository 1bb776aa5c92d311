"""`examples/xla_llama.py`: what it prints, and with its kernels executed."""

import sys
from pathlib import Path

import programs
import pytest
import torch
from graphs import compiled_by
from torch._dynamo.utils import counters

SCRIPT = Path(__file__).parents[2] / "examples" / "xla_llama.py"


@pytest.fixture(scope="module")
def example():
    return programs.load(SCRIPT)


def test_the_table_says_the_form_of_each_pass(example, device, monkeypatch, capsys):
    for variable in ("NEURONMM_XLA", "NEURON_PLATFORM_TARGET_OVERRIDE"):
        monkeypatch.setenv(variable, "")  # main sets them; they are put back
    monkeypatch.setattr(sys, "argv", ["", "--dtype", "bfloat16", "--target", "trn2"])
    example.main()
    first, _, head, prompt, token, *_, last = capsys.readouterr().out.splitlines()
    assert first.startswith("bfloat16, planned for trn2, lnc 2 (target: NEURON_PLATFORM_TARGET")
    assert head.split()[-5:] == ["dots", "kernel", "form", "modelled", "us"]
    assert prompt.split()[:6] == ["prompt", "256", "2", "13", "svd_mlp", "prefill"]
    plan = example.plan_of(example.compressed_llama(torch.bfloat16), 1)
    assert token.split()[:7] == ["next", "token", "1", "2", "13", plan.kernel, plan.phase]
    assert last.startswith("tokens on xla:0: [")


@torch.no_grad()
def test_prefill_and_decode_are_two_graphs_of_two_calls(example, device, handler):
    model = example.compressed_llama(torch.float32)
    prompt = torch.randint(example.CONFIG.vocab_size, (1, example.PROMPT))
    expected = model.generate(prompt, max_new_tokens=example.NEW_TOKENS, do_sample=False)
    counters.clear()
    llama = example.Llama(model, device)
    before = handler.count
    tokens, graphs = compiled_by(lambda: llama.generate(prompt))
    assert tokens == expected[0, example.PROMPT :].tolist()
    assert handler.count - before == 2 * example.NEW_TOKENS
    calls = [[c.config["neuronmm"] for c in graph.calls] for graph in graphs if graph.calls]
    passes = [[(call["M"], call["form"]) for call in of_pass] for of_pass in calls]
    token = (1, example.plan_of(model, 1).phase)
    assert passes == [[(example.PROMPT, "prefill")] * 2, [token] * 2]
    assert [graph.dots for graph in graphs if graph.calls] == [13, 13]
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 2
