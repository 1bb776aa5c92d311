"""A Transformers model divided by torch's parallelize_module."""

import copy
from typing import Any

import pytest
import torch
from parallel.divided import mesh
from ranks import run
from tiny import tiny_ids, tiny_model
from torch import Tensor, nn
from torch.distributed.tensor.parallel import parallelize_module

from neuronmm_ops import SVDMLP, SVDLinear, swap_, use_impl
from neuronmm_ops.nn import svd_qkv
from neuronmm_ops.parallel import ShardedLinear, SVDColumnwise, SVDMLPParallel, SVDRowwise
from neuronmm_ops.parallel.sharding import check_heads

pytestmark = pytest.mark.slow
DENSE = {"model.layers.1.self_attn.k_proj", "model.layers.1.mlp.up_proj"}


def compressed(family: str) -> nn.Module:
    """A model whose Linears are low-rank but for a few."""
    model = tiny_model(family)
    factors = {
        name: (layer.u.detach(), layer.v.detach())
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and "layers" in name and name not in DENSE
        for layer in [SVDLinear.from_linear(module, 10)]
    }
    swap_(model, factors)
    assert isinstance(model.model.layers[0].mlp, SVDMLP)
    return model


def plan_of(divide: Any) -> dict[str, Any]:
    """A style for each layer."""
    columns = {f"model.layers.*.self_attn.{name}_proj": SVDColumnwise(divide) for name in "qkv"}
    return columns | {
        "model.layers.*.self_attn.o_proj": SVDRowwise(divide),
        "model.layers.*.mlp": SVDMLPParallel(divide),
    }


def model_on_ranks(_: int, family: str) -> dict[str, list[int]]:
    """Logits and greedy tokens of a divided model are those of the whole."""
    whole = compressed(family)
    config = whole.config
    check_heads(config.num_attention_heads, config.num_key_value_heads, mesh().size())
    ids = tiny_ids(2, 9)
    found: dict[str, list[int]] = {}
    with torch.no_grad():
        expected = whole(ids).logits
        tokens = whole.generate(ids, max_new_tokens=6, do_sample=False, use_cache=True)
        for divide in ("one", "both"):
            divided = copy.deepcopy(whole)
            parallelize_module(divided, mesh(), plan_of(divide))
            torch.testing.assert_close(divided(ids).logits, expected, rtol=1e-4, atol=1e-4)
            answer = divided.generate(ids, max_new_tokens=6, do_sample=False, use_cache=True)
            found[divide] = answer[0].tolist()
            assert torch.equal(answer, tokens)
        assert isinstance(divided.model.layers[0].self_attn.q_proj, ShardedLinear)
    return found


def hook_stays_out(_: int) -> int:
    """Where the hook before attention would fuse, it leaves divided projections alone."""
    whole = compressed("qwen2")
    attention = whole.model.layers[0].self_attn
    assert svd_qkv._project in attention._forward_pre_hooks.values()
    ids = tiny_ids(1, 5)
    calls: list[Tensor] = []
    real = svd_qkv.svd_qkv

    def counted(*args: Any) -> Tensor:
        calls.append(args[0])
        return real(*args)

    svd_qkv.svd_qkv = counted
    with torch.no_grad(), use_impl("simulated"):
        expected = whole(ids).logits
        fused = len(calls)
        parallelize_module(whole, mesh(), plan_of("both"))
        torch.testing.assert_close(whole(ids).logits, expected, rtol=1e-3, atol=1e-3)
    assert len(calls) == fused
    return fused


def compiled_model(_: int) -> None:
    whole = compressed("llama")
    ids = tiny_ids(1, 5)
    with torch.no_grad():
        expected = whole(ids, use_cache=False).logits
        parallelize_module(whole, mesh(), plan_of("both"))
        fast = torch.compile(whole, backend="aot_eager")
        actual = fast(ids, use_cache=False).logits
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_divided_model_says_the_same(family):
    first, second = run(model_on_ranks, 2, family)
    assert first == second
    assert len(first["both"]) == 9 + 6


def test_attentions_hook_stays_out_of_the_way():
    assert run(hook_stays_out, 2) == [1, 1]


def test_a_compiled_divided_model():
    run(compiled_model, 2, timeout_s=300)
