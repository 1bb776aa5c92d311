"""A swapped Transformers model is one graph: every pair one node, no breaks, dynamic sizes."""

from copy import deepcopy

import pytest
import torch
from quantized import quantize_
from small import compressed
from tiny import tiny_ids
from tolerances import assert_close_to_oracle
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

from neuronmm_ops.storages import STORAGES


def _ops(graph: torch.fx.GraphModule) -> list[str]:
    return [str(node.target) for node in graph.graph.nodes if "neuronmm" in str(node.target)]


MLP = "neuronmm.svd_mlp.default"
ATTENTION = ["neuronmm.svd_qkv.default", "neuronmm.xuv.default"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("targets", "storage", "expected"),
    [
        ("mlp", None, [MLP]),
        ("all-linear", None, [*ATTENTION, MLP]),
        *(("mlp", storage, [MLP]) for storage in STORAGES),
    ],
)
def test_one_node_for_each_op_and_no_graph_break(targets, storage, expected):
    torch._dynamo.reset()
    counters.clear()
    model = compressed(targets=targets)[0]
    if storage:
        quantize_(model, storage)
    double = deepcopy(model).double()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
    with torch.no_grad():
        for length in (12, 31):
            ids = tiny_ids(2, length)
            logits, oracle, eager = (
                module(ids, use_cache=False).logits for module in (compiled, double, model)
            )
            assert_close_to_oracle(logits, oracle, eager)
    assert counter.frame_count == 1
    assert not counters["graph_break"]
    assert _ops(counter.graphs[0]) == expected * 2


@pytest.mark.slow
def test_training_step_compiles_without_breaks():
    torch._dynamo.reset()
    model, _ = compressed(targets="all-linear")
    eager, double = deepcopy(model), deepcopy(model).double()
    ids = tiny_ids(2, 16)
    for module in (torch.compile(model, fullgraph=True, backend="aot_eager"), double, eager):
        module(ids, labels=ids, use_cache=False).loss.backward()
    for name, parameter in model.named_parameters():
        grads = (module.get_parameter(name).grad for module in (double, eager))
        assert_close_to_oracle(parameter.grad, *grads)
