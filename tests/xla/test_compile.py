"""`torch.compile(backend="openxla")`: one graph, one custom call an op, no Python at run time."""

import copy
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch_xla
from commands import run
from graphs import compiled_by
from tiny import tiny_ids, tiny_model
from tolerances import assert_close_to_oracle
from torch import nn
from torch._dynamo.utils import counters
from torch_xla import _XLAC
from torch_xla.debug import metrics

from neuronmm_ops import CalibrationWarning, SVDConfig, compress_
from neuronmm_ops.nn import SVDMLP, SVDLinear
from neuronmm_ops.nn.svd_qkv import fuse_projections_
from neuronmm_ops.ops.backends import xla


def compressed(targets="mlp", **overrides):
    model = tiny_model(**overrides)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CalibrationWarning)
        config = SVDConfig(
            ratio=0.3, block=8, targets=targets, method="swift", allocation="uniform"
        )
        # No gradients: autograd takes no XLA device once it has run without one.
        compress_(model, config, [tiny_ids()])
    return model


def ops_of(model):
    """How many ops one forward pass of the model is."""
    inside = {id(p) for m in model.modules() if isinstance(m, SVDMLP) for p in m.children()}
    # of query, key and value one is the op of all three
    inside |= {id(p) for m in model.modules() if fuse_projections_(m) for p in (m.k_proj, m.v_proj)}
    pairs = [m for m in model.modules() if isinstance(m, SVDLinear) and id(m) not in inside]
    return len(pairs) + sum(isinstance(m, SVDMLP) for m in model.modules())


def compilations():
    return metrics.metric_data("CompileTime")[0]


def test_a_model_is_one_graph_with_one_call_an_op(device, handler):
    model = nn.Sequential(
        SVDLinear(64, 96, 16), nn.ReLU(), nn.Linear(96, 96), SVDLinear(96, 96, 16),
        SVDLinear(96, 96, 16), SVDLinear(96, 96, 16), nn.Linear(96, 10),
    )  # fmt: skip
    x = torch.randn(4, 64)
    with torch.no_grad():
        low, oracle = model(x), copy.deepcopy(model).double()(x.double())
    model.to(device)
    counters.clear()
    compiled = torch.compile(model, backend="openxla", fullgraph=True)
    with torch.no_grad():
        actual, graphs = compiled_by(lambda: compiled(x.to(device)).cpu())
        before = compilations()
        again = compiled(x.to(device)).cpu()
    assert_close_to_oracle(actual, oracle, low)
    assert torch.equal(again, actual)
    (graph,) = [graph for graph in graphs if graph.calls]
    assert (len(graph.calls), graph.dots) == (4, 2)
    assert {call.api_version for call in graph.calls} == {xla.API_HOST}
    assert compilations() == before
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize(
    ("targets", "dtype", "expected"),
    [("mlp", torch.float32, 2), ("attention", torch.float32, 4), ("all-linear", torch.bfloat16, 6)],
)
def test_a_llama_lowers_to_its_ops(targets, dtype, expected, device):
    model = compressed(targets, dtype=dtype)
    ids = tiny_ids(2, 12)
    with torch.no_grad():
        low = model(ids, use_cache=False).logits
        oracle = copy.deepcopy(model).double()(ids, use_cache=False).logits
    count = ops_of(model)
    dense = sum(type(m) is nn.Linear for m in model.modules())
    model.to(device)
    counters.clear()
    compiled = torch.compile(model, backend="openxla", fullgraph=True)
    with torch.no_grad():
        actual, graphs = compiled_by(lambda: compiled(ids.to(device), use_cache=False).logits.cpu())
    assert_close_to_oracle(actual, oracle, low)
    (graph,) = [graph for graph in graphs if graph.calls]
    assert len(graph.calls) == count == expected
    assert graph.dots == dense + 2 * len(model.model.layers)  # two are attention's own
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 1
    fallbacks = _XLAC._get_executed_fallback_ops()
    assert not [op for op in fallbacks if op.startswith("neuronmm")]


def test_greedy_tokens_equal_those_of_the_cpu(device, handler):
    model = compressed("all-linear", num_hidden_layers=1)
    prompt = tiny_ids(1, 7)
    expected = model.generate(prompt, max_new_tokens=3, do_sample=False)
    model.to(device)
    before = handler.count
    actual = model.generate(prompt.to(device), max_new_tokens=3, do_sample=False)
    assert actual.cpu().tolist() == expected.tolist()
    assert handler.count - before >= 3 * ops_of(model)


def test_a_second_call_enters_no_python_kernel(device, monkeypatch):
    entered = []
    compile_call = xla._custom_call
    monkeypatch.setattr(xla, "_custom_call", lambda *a: entered.append(1) or compile_call(*a))
    model = nn.Sequential(SVDLinear(40, 40, 8), SVDLinear(40, 40, 8)).to(device)
    compiled = torch.compile(model, backend="openxla", fullgraph=True)
    with torch.no_grad():
        compiled(torch.randn(3, 40, device=device))
        assert entered
        entered.clear()
        for _ in range(3):
            compiled(torch.randn(3, 40, device=device)).cpu()
    assert entered == []


@torch._dynamo.config.patch(enable_cpp_symbolic_shape_guards=False)  # these need three g++ runs
@pytest.mark.parametrize("dynamic", [False, True])
def test_each_shape_is_a_graph(dynamic, device):
    layer = SVDLinear(40, 24, 8)
    batches = [torch.randn(tokens, 40) for tokens in (3, 5)]
    with torch.no_grad():
        lows = [layer(x) for x in batches]
        double = copy.deepcopy(layer).double()
        layer.to(device)
        compiled = torch.compile(layer, backend="openxla", fullgraph=True, dynamic=dynamic)
        for x, low in zip(batches, lows, strict=True):
            y, graphs = compiled_by(lambda x=x: compiled(x.to(device)).cpu())
            assert_close_to_oracle(y, double(x.double()), low)
            (graph,) = [graph for graph in graphs if graph.calls]
            assert graph.calls[0].config["neuronmm"]["M"] == len(x)


@pytest.fixture(scope="module")
def elsewhere():
    """What a process prints that takes dynamic sizes, and then loses its XLA kernels."""
    script = """
import torch, torch_xla
from graphs import lowered
from neuronmm_ops import xuv, xw
from neuronmm_ops.ops.backends import xla
x, w = torch.randn(6, 8).to("xla"), torch.randn(1, 4).to("xla")
try:
    xw(torch.nonzero(x[:, 0] > 0).float(), w)
except ValueError as error:
    print(error)
tensors = [torch.randn(s).to("xla") for s in ((4, 64), (64, 16), (16, 64))]
with torch.no_grad():
    graph = lowered(xuv(*tensors))
    print(len(graph.calls), graph.dots)
    xla.LIBRARY._destroy()
    graph = lowered(xuv(*tensors))
print(len(graph.calls), graph.dots)
"""
    environment = {"PYTHONPATH": Path(__file__).parent, "OMP_NUM_THREADS": 1}
    environment["XLA_EXPERIMENTAL"] = "nonzero:masked_select"
    return run(sys.executable, "-c", script, **environment).splitlines()


def test_a_dynamic_xla_size_is_refused(elsewhere):
    assert elsewhere[0].startswith("xw: a kernel's shapes must be static, got [<=")


def test_the_kernel_under_the_xla_key_is_what_lowers(elsewhere):
    """Without it, the very checks of this folder fail: the composite would run unnoticed."""
    assert elsewhere[1:] == ["1 0", "0 2"]


def test_leaving_the_device_and_coming_back_keeps_values_and_layout(device):
    layer = SVDLinear(40, 24, 8)
    x = torch.randn(3, 40)
    with torch.no_grad():
        expected = layer(x)
        layer.to(device)
        torch_xla.sync()
        assert torch.equal(layer.cpu()(x), expected)
    assert (layer.u.stride(), layer.v.stride()) == ((8, 1), (24, 1))
