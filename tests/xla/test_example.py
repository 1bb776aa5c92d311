"""`examples/xla_llama.py`: as a script, and with its kernels executed."""

import sys
from pathlib import Path

import programs
import pytest
import torch
from commands import run
from graphs import compiled_by
from torch._dynamo.utils import counters

SCRIPT = Path(__file__).parents[2] / "examples" / "xla_llama.py"


@pytest.fixture(scope="module")
def example():
    return programs.load(SCRIPT)


def test_as_a_script():
    printed = run(sys.executable, SCRIPT)
    assert "prefill, M = 16: 2 custom calls, 13 dots" in printed
    assert "decode, M = 1: 2 custom calls, 13 dots" in printed
    assert printed.count("api_version=API_VERSION_STATUS_RETURNING,") == 4  # Neuron's
    assert printed.count("func_name: svd_mlp") == 4
    assert printed.count('custom_call_target="AwsNeuronCustomNativeKernel"') == 4
    assert "as on the CPU: True" in printed


@torch.no_grad()
def test_prefill_and_decode_are_two_graphs_of_two_calls(example, device, handler):
    model = example.compressed_llama()
    prompt = torch.randint(example.CONFIG.vocab_size, (1, example.PROMPT))
    expected = model.generate(prompt, max_new_tokens=example.NEW_TOKENS, do_sample=False)
    counters.clear()
    llama = example.Llama(model, device)
    before = handler.neuronmm_host_call_count()
    tokens, graphs = compiled_by(lambda: llama.generate(prompt))
    assert tokens == expected[0, example.PROMPT :].tolist()
    assert handler.neuronmm_host_call_count() - before == 2 * example.NEW_TOKENS
    rows = [[c.config["neuronmm"]["M"] for c in graph.calls] for graph in graphs if graph.calls]
    assert rows == [[example.PROMPT] * 2, [1, 1]]
    assert [graph.dots for graph in graphs if graph.calls] == [13, 13]
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 2
