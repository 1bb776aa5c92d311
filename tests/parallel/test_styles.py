"""Layers divided by the styles compute what one process computes, forward and backward."""

import copy
import itertools
from typing import Any

import pytest
import torch
from parallel.divided import Sent, linear, mesh, mlp, stored, stored_mlp, values
from ranks import run
from tolerances import assert_close_to_oracle
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from neuronmm_ops import StoredLinear, SVDLinear
from neuronmm_ops.parallel import (
    ShardedMLP,
    SVDColumnwise,
    SVDMLPParallel,
    SVDRowwise,
    full_state_dict,
)
from neuronmm_ops.parallel.sharding import DIVIDES, part
from neuronmm_ops.storages import dequantized

pytestmark = pytest.mark.slow
SHAPE = (2, 5)
KINDS = (
    *((torch.float32, None), (torch.bfloat16, None)),
    *((torch.float32, "fp8"), (torch.bfloat16, "int8")),
)


def trained(layer: nn.Module, x: Tensor, grad: Tensor) -> dict[str, Tensor]:
    """The result of a layer and all gradients, whole."""
    x = x.detach().clone().requires_grad_()
    y = layer(x)
    y.backward(grad)
    found = {"y": y.detach(), "x": x.grad}
    found |= {name: p.grad for name, p in layer.named_parameters() if p.requires_grad}
    return {
        name: t.full_tensor() if isinstance(t, DTensor) else t
        for name, t in found.items()
        if t is not None
    }


def doubled(layer: nn.Module) -> nn.Module:
    """The layer in fp64, factors of one byte multiplied out."""
    layer = copy.deepcopy(layer)
    for name, module in list(layer.named_modules()):
        wide: nn.Module | None = None
        if isinstance(module, SVDLinear) and module.storage:
            wide = SVDLinear.from_pair(module.to_pair())
            for key, (factor, scale) in zip(module.MATRICES, module.scaled(), strict=True):
                getattr(wide, key).data = dequantized(factor, scale, torch.float64)
        elif isinstance(module, StoredLinear):
            wide = module.to_linear()
            wide.weight.data = dequantized(module.w, module.w_scale, torch.float64).t()
            wide.weight.requires_grad_(False)
        if wide is not None:
            if not name:
                return wide.double()
            parent, _, attribute = name.rpartition(".")
            setattr(layer.get_submodule(parent), attribute, wide)
    return layer.double()


def assert_equal_to_one_process(
    layer: nn.Module, style: Any, x: Tensor, grad: Tensor, own: slice | None, own_x: slice | None
) -> list[tuple[str, tuple[int, ...]]]:
    """Hold a divided layer to the whole one; return what was sent forward.

    `x` and `grad`, of the result, are whole; `own` and `own_x` are this rank's columns of the
    result and of x, None for all.
    """
    oracle = trained(doubled(layer), x.double(), grad.double())
    plain = trained(copy.deepcopy(layer), x, grad)
    state = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    parallelize_module(layer, mesh(), style)
    given = x if own_x is None else x[..., own_x]
    with Sent() as sent, torch.no_grad():
        layer(given)
    actual = trained(layer, given, grad if own is None else grad[..., own])
    for name, tensor in actual.items():
        parts = {"y": own, "x": own_x}.get(name) or slice(None)
        each = [t[name][..., parts] for t in (oracle, plain)]
        # Sums are rounded on each rank, and once more when they are added.
        assert_close_to_oracle(tensor, each[0], each[1], 4 * each[0].abs())
    assert actual.keys() == plain.keys()
    gathered = full_state_dict(layer)
    assert list(gathered) == list(state)
    for name, tensor in gathered.items():
        assert not isinstance(tensor, DTensor)
        assert tensor.dtype == state[name].dtype
        assert torch.equal(tensor.float(), state[name].float()), name
    return sent.collectives


def every_layer(rank: int, tp: int) -> None:
    columns, rows = part(36, rank, tp, "N"), part(24, rank, tp, "K")
    for divide, (dtype, storage) in itertools.product(DIVIDES, KINDS):
        kind = {"storage": storage, "dtype": dtype}
        exchanges = {"both": 2, "one": 1}[divide] if tp > 1 else 0
        x = values(*SHAPE, 24, dtype=dtype)

        def sent(layer: nn.Module, style: Any, N: int, *own: Any, x=x, divide=divide) -> int:
            grad = values(*SHAPE, N, dtype=x.dtype, seed=1)
            return len(assert_equal_to_one_process(layer, style(divide), x, grad, *own))

        for bias in (True, False):
            layer = linear(24, 36, 10, bias, **kind)
            assert sent(layer, SVDColumnwise, 36, columns, None) == max(exchanges - 1, 0)
        for N, r in ((35, 10), (9, 11)):
            assert sent(linear(24, N, r, True, **kind), SVDRowwise, N, None, rows) == exchanges
        for activation in ("silu", "gelu_tanh"):
            layer = mlp(24, 30, (10, 7, 9), activation, **kind)
            # gate and up share a gather
            gathers = divide == "both" and tp > 1
            assert sent(layer, SVDMLPParallel, 24, None, None) == exchanges + gathers
            assert isinstance(layer, ShardedMLP)


def every_dense_layer(rank: int, tp: int) -> None:
    """In int4 rows are cut between groups of 128."""
    for dtype, storage in (*KINDS[2:], (torch.float32, "int4"), (torch.bfloat16, "int4")):
        K, N = 256 * tp if storage == "int4" else 24, 36
        columns, rows = part(N, rank, tp, "N"), part(K, rank, tp, "K")
        x, grad = values(*SHAPE, K, dtype=dtype), values(*SHAPE, N, dtype=dtype, seed=1)
        for bias in (True, False):
            for style, own in ((SVDColumnwise(), (columns, None)), (SVDRowwise(), (None, rows))):
                layer = stored(K, N, bias, storage, dtype)
                assert_equal_to_one_process(layer, style, x, grad, *own)
        layer = stored_mlp(K, K if storage == "int4" else 30, storage, dtype)
        assert_equal_to_one_process(layer, SVDMLPParallel(), x, x, None, None)
        if storage == "int4":
            for kind in (SVDColumnwise(), SVDRowwise()):
                own = (columns, None) if isinstance(kind, SVDColumnwise) else (None, rows)
                pair = linear(K, N, 10, True, storage, dtype)
                assert_equal_to_one_process(pair, kind, x, grad, *own)


@pytest.mark.parametrize("tp", [1, 2, 3])
def test_dense_layers_in_a_storage(tp):
    run(every_dense_layer, tp, tp)


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_values_gradients_and_state(tp):
    run(every_layer, tp, tp)
