"""Attention's projections by one op: when it runs, what stays as it was, and what is kept."""

import ast
import copy
import functools
import pickle
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from nn.layers import Calls, ops_of, transformers_forwards
from quantized import quantize_
from tiny import tiny_ids, tiny_model
from torch import Tensor, nn

from neuronmm_ops import SVDLinear, hf, swap_, use_impl
from neuronmm_ops.nn import svd_qkv
from neuronmm_ops.nn.svd_qkv import ATTENTIONS, PROJECTIONS, QKVProjection, fuse_projections_

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ONE, THREE = ["svd_qkv", "xuv"], ["xuv"] * 4


@pytest.fixture(autouse=True)
def pays(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Every device is taken for one with a kernel; return what decides without that."""
    decides = svd_qkv._pays
    monkeypatch.setattr(svd_qkv, "_pays", lambda _: True)
    return decides


def compressed(
    family: str = "llama", *, ends: tuple[str, ...] = ATTENTION, **overrides: Any
) -> nn.Module:
    """A tiny model of one layer with random biases, the Linears whose names end so low-rank."""
    model = tiny_model(family, **{"num_hidden_layers": 1, **overrides})
    factors: dict[str, tuple[Tensor, Tensor]] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name.endswith(ends):
            if module.bias is not None:
                nn.init.normal_(module.bias)
            layer = SVDLinear.from_linear(module, 8)
            factors[name] = layer.u.detach(), layer.v.detach()
    swap_(model, factors)
    return model


def attention_of(model: nn.Module) -> Any:
    return model.get_submodule("model.layers.0.self_attn")


def separate(model: nn.Module) -> nn.Module:
    """A copy that calls each projection by itself."""
    model = copy.deepcopy(model)
    attention = attention_of(model)
    attention._forward_pre_hooks.clear()
    attention._forward_hooks.clear()
    return model


IDS = tiny_ids(2, 5)


def logits(model: nn.Module, **options: Any) -> Tensor:
    return model(IDS, **options).logits


def kept(model: nn.Module) -> list[Any]:
    return [m.made for m in model.modules() if isinstance(m, QKVProjection) and m.made is not None]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "gemma2"])
@pytest.mark.parametrize("storage", [None, "int8", "fp8"])
def test_one_op_has_the_values_of_three(family, storage):
    model = compressed(family)
    if storage:
        quantize_(model, storage)
    assert ops_of(model, IDS) == ONE
    assert ops_of(separate(model), IDS) == THREE
    torch.testing.assert_close(logits(model), logits(separate(model)), rtol=1e-5, atol=1e-5)
    assert not kept(model)
    assert set(model.state_dict()) == set(separate(model).state_dict())


@torch.no_grad()
def test_where_it_pays(pays, monkeypatch):
    monkeypatch.setattr(svd_qkv, "_pays", pays)
    model = compressed()
    expected = logits(model)
    assert ops_of(model, IDS) == THREE
    with use_impl("simulated", "trn2"):
        assert ops_of(model, IDS) == ONE
        torch.testing.assert_close(logits(model), expected, rtol=1e-3, atol=1e-4)
    assert pays(SimpleNamespace(is_cpu=False, device=torch.device("xla")))
    assert not pays(SimpleNamespace(is_cpu=False, device=torch.device("cuda")))


def test_generation_with_a_cache():
    model = compressed()
    plain = separate(model)
    ids = tiny_ids(1, 6)
    options = {"max_new_tokens": 6, "do_sample": False, "use_cache": True}
    own = model.generate(ids, **options)
    assert torch.equal(own, plain.generate(ids, **options))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients(checkpointing):
    model = compressed("qwen2")
    plain = separate(model)
    for each in (model, plain):
        each.train()
        if checkpointing:
            # named anew in later Transformers
            enable = getattr(each, "activation_checkpointing_enable", None)
            (enable or each.gradient_checkpointing_enable)({"use_reentrant": False})
        logits(each).square().sum().backward()
    for (name, own), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-4, atol=1e-5, msg=name)
    assert not kept(model)


def store(attention: Any, name: str, storage: str) -> None:
    setattr(attention, name, quantize_(nn.Sequential(getattr(attention, name)), storage)[0])


def compute_one_in_fp8(attention: Any) -> None:
    for name in PROJECTIONS:
        store(attention, name, "fp8")
    attention.q_proj.compute = "fp8"


def write_before(attention: Any) -> None:
    def write(module: nn.Module, args: Any, kwargs: Any) -> None:
        kwargs["hidden_states"].mul_(3)

    attention.register_forward_pre_hook(write, with_kwargs=True)


def offload(attention: Any) -> None:
    pytest.importorskip("accelerate").cpu_offload(attention, torch.device("cpu"))
    assert attention.k_proj.u.is_meta


def replace_forward(module: nn.Module) -> None:
    module.forward = functools.partial(type(module).forward, module)


REFUSALS = {
    "hook": lambda a: a.k_proj.register_forward_hook(lambda module, args, output: 2 * output),
    "storage": lambda a: store(a, "v_proj", "int8"),
    "compute": compute_one_in_fp8,
    "wrapped": lambda a: setattr(a, "v_proj", nn.Sequential(a.v_proj)),
    "forward": lambda a: replace_forward(a.q_proj),
    "own forward": replace_forward,
    "pre-hook": write_before,
    "offloaded": offload,
    "dense": lambda a: setattr(a, "k_proj", a.k_proj.to_linear()),
}


@pytest.mark.parametrize("change", REFUSALS.values(), ids=REFUSALS)
@torch.no_grad()
def test_what_a_user_changed_is_called(change):
    model = compressed()
    change(attention_of(model))
    plain = copy.deepcopy(model)
    fused = next(iter(attention_of(plain)._forward_pre_hooks))
    del attention_of(plain)._forward_pre_hooks[fused]
    assert "svd_qkv" not in ops_of(model, IDS)
    assert torch.equal(logits(model), logits(plain))


@pytest.mark.parametrize("ends", [("q_proj", "k_proj"), ("q_proj", "o_proj"), ("mlp.down_proj",)])
def test_dense_projections_leave_no_hook(ends):
    model = compressed(ends=ends)
    assert not attention_of(model)._forward_pre_hooks
    assert not fuse_projections_(attention_of(model))
    assert "svd_qkv" not in ops_of(model, IDS)


def test_attention_of_another_class_has_no_hook():
    class LlamaAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj = self.k_proj = self.v_proj = SVDLinear(4, 4, 2)

    assert not fuse_projections_(LlamaAttention())


def test_pairs_and_back():
    model = compressed()
    expected = logits(model)
    hf.to_pairs(model)
    assert ops_of(model, IDS) == []
    torch.testing.assert_close(logits(model), expected)
    hf.from_pairs(model)
    assert ops_of(model, IDS) == ONE
    assert len(attention_of(model)._forward_pre_hooks) == 1  # not one more each time
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("factors", [("u",), ("u", "v")])
def test_lora_on_a_projection(factors):
    peft = pytest.importorskip("peft")
    model = compressed()
    config = hf.lora_config(model, ["k_proj"], factors, r=2, lora_alpha=4)
    adapted = peft.get_peft_model(model, config)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter)
    plain = copy.deepcopy(adapted)
    for module in plain.modules():
        if type(module).__name__ == "LlamaAttention":
            module._forward_pre_hooks.clear()
    torch.testing.assert_close(logits(adapted), logits(plain))
    merged = adapted.merge_and_unload()
    assert ops_of(merged, IDS) == ONE
    torch.testing.assert_close(logits(merged), logits(plain), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_projection_called_alone_or_with_another_input():
    model = compressed()
    attention = attention_of(model)
    x, other = torch.randn(2, 3, 64), torch.randn(2, 3, 64)
    layer = attention.k_proj
    expected = layer(x), layer(other)
    assert torch.equal(layer(x), expected[0])
    layer.made = (x, torch.zeros(2, 3, 32))
    assert torch.equal(layer(other), expected[1])
    assert layer.made is None
    layer.made = (x, torch.zeros(2, 3, 32))
    assert not layer(x).any()  # what was made for it, once
    assert torch.equal(layer(x), expected[0])


def run_attention(model: nn.Module, x: Tensor, **options: Any) -> list[str]:
    """Call the attention by itself; with `position_embeddings` of None it raises."""
    length, width = x.shape[1], attention_of(model).head_dim
    options.setdefault("position_embeddings", (torch.ones(1, length, width),) * 2)
    with Calls() as calls:
        attention_of(model)(x, attention_mask=None, **options)
    return calls.names


def test_an_error_keeps_nothing():
    model = compressed()
    with pytest.raises(TypeError):
        run_attention(model, torch.randn(1, 2, 64), position_embeddings=None)
    assert not kept(model)


@torch.no_grad()
def test_activations_are_freed():
    model, x = compressed(), torch.randn(1, 2, 64)
    reference = weakref.ref(x)
    assert run_attention(model, x) == ONE
    del x
    assert reference() is None


@torch.no_grad()
def test_copies_are_their_own():
    model = compressed()
    expected = logits(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301
        attention_of(twin).k_proj.u.mul_(2)
        assert ops_of(twin, IDS) == ONE
        assert not torch.equal(logits(twin), expected)
        assert torch.equal(logits(twin), logits(separate(twin)))
    assert torch.equal(logits(model), expected)


@torch.no_grad()
def test_threads_have_their_own_results():
    model = compressed()
    inputs = [tiny_ids(2, length) for length in (3, 5, 7, 9)]
    expected = [model(ids).logits for ids in inputs]
    wrong: list[int] = []

    def work(n: int) -> None:
        with torch.no_grad():
            for _ in range(30):
                if not torch.allclose(model(inputs[n]).logits, expected[n], atol=1e-5):
                    wrong.append(n)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@torch.no_grad()
def test_compiled_without_a_graph_break(family, pays, monkeypatch):
    monkeypatch.setattr(svd_qkv, "_pays", pays)
    torch._dynamo.reset()
    model = compressed(family)
    expected, graphs = logits(model), list[list[str]]()

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append([str(n.target) for n in graph.graph.nodes if "neuronmm" in str(n.target)])
        return graph

    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for _ in range(2):
        torch.testing.assert_close(logits(compiled), expected)
    assert graphs == [["neuronmm.svd_qkv.default", "neuronmm.xuv.default"]]
    assert not kept(model)


@torch.no_grad()
def test_exported(pays, monkeypatch):
    monkeypatch.setattr(svd_qkv, "_pays", pays)
    model = compressed()
    program = torch.export.export(model, (IDS,), {"use_cache": False})
    targets = [str(node.target) for node in program.graph.nodes]
    assert [t for t in targets if "neuronmm" in t] == [f"neuronmm.{op}.default" for op in ONE]
    exported = program.module()(IDS, use_cache=False).logits
    torch.testing.assert_close(exported, logits(model))


def test_every_listed_class_projects_its_hidden_states():
    found = transformers_forwards(ATTENTIONS)
    assert found.keys() == ATTENTIONS
    for forward in [each for forwards in found.values() for each in forwards]:
        assert forward.args.args[1].arg == "hidden_states"
        nodes = list(ast.walk(forward))
        calls = [
            (node.func.attr, ast.unparse(node.args[0]))
            for node in nodes
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in PROJECTIONS
        ]
        assert sorted(calls) == sorted([(p, "hidden_states") for p in PROJECTIONS])
        names = [node for node in nodes if isinstance(node, ast.Name)]
        assert "hidden_states" not in [n.id for n in names if isinstance(n.ctx, ast.Store)]
        branches = [node for node in nodes if isinstance(node, (ast.If, ast.For))]
        assert not any(p in ast.unparse(node) for node in branches for p in PROJECTIONS)
