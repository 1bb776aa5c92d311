"""What surrounds a divided layer: dense members, biases, hooks, odd shapes, optimizers, files."""

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from parallel.divided import linear, mesh, mlp, values
from ranks import run
from tolerances import assert_same_in_fp64
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

from neuronmm_ops import SVDMLP, set_compute_, use_impl
from neuronmm_ops.parallel import SVDColumnwise, SVDMLPParallel, SVDRowwise, full_state_dict
from neuronmm_ops.parallel.sharding import DIVIDES, part

pytestmark = pytest.mark.slow
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, **CLOSE)


def with_dense(*dense: str, bias: bool = False) -> SVDMLP:
    """An MLP with I = 32 whose projections of these names are an nn.Linear."""
    layer = mlp(24, 32)
    for name in dense:
        setattr(layer, name, getattr(layer, name).to_linear())
    if bias:
        for projection in (layer.gate_proj, layer.down_proj):
            if not isinstance(projection, nn.Linear):
                projection.bias = nn.Parameter(values(projection.out_features, seed=3))
    return layer


def compositions(_: int) -> int:
    """MLPs that are no single op, local and as DTensors, forward and backward."""
    count = 0
    x = values(2, 5, 24)
    layers = [
        with_dense("gate_proj"),
        with_dense("down_proj"),
        with_dense("gate_proj", "up_proj", "down_proj"),
        with_dense("up_proj", bias=True),
        with_dense(bias=True),
        mlp(24, 30, (10, 7, 9), storage="int8"),
        mlp(8, 30, (5, 7, 9)),  # r_down > N
    ]
    for layer in layers:
        for divide in DIVIDES:
            given = x[..., : layer.gate_proj.in_features].clone().requires_grad_()
            expected = layer(given)
            (dx,) = torch.autograd.grad(expected.square().sum(), given)
            divided = parallelize_module(copy.deepcopy(layer), mesh(), SVDMLPParallel(divide))
            y = divided(given)
            assert_close(y, expected)
            assert_close(torch.autograd.grad(y.square().sum(), given)[0], dx)
            whole = distribute_tensor(given.detach(), mesh(), [Replicate()])
            for placement in (Replicate(), Shard(0), Shard(2)):
                y = divided(whole.redistribute(placements=[placement]))
                assert isinstance(y, DTensor)
                assert_close(y.full_tensor(), expected)
            count += 1
    return count


def odd_shapes(rank: int, tp: int) -> None:
    """No tokens, one, a vector; ranks and I smaller than tp, or with an empty last part."""
    for divide in DIVIDES:
        for inner, ranks in ((5, (2, 1, 3)), (4, (10, 1, 9)), (9, (5, 5, 5)), (3, (1, 1, 1))):
            layer = mlp(8, inner, ranks)
            divided = parallelize_module(copy.deepcopy(layer), mesh(), SVDMLPParallel(divide))
            for shape in ((0, 8), (1, 8), (8,), (2, 1, 8), (2, 0, 8)):
                x = values(*shape)
                for grad in (True, False):
                    with torch.set_grad_enabled(grad):
                        assert_close(divided(x), layer(x))
        layer = linear(8, 12, 2)
        column = parallelize_module(copy.deepcopy(layer), mesh(), SVDColumnwise(divide))
        row = parallelize_module(copy.deepcopy(layer), mesh(), SVDRowwise(divide))
        columns, rows = part(12, rank, tp, "N"), part(8, rank, tp, "K")
        for x in (values(8), values(3, 8), values(2, 8, 3).transpose(1, 2)):
            assert_close(column(x), layer(x)[..., columns])
            assert_close(row(x[..., rows]), layer(x))
            whole = distribute_tensor(x, mesh(), [Replicate()])
            assert_close(column(whole).full_tensor(), layer(x))


def hooks_run(_: int) -> list[tuple[int, ...]]:
    """A hook on a projection is called, also where all three are one op without it."""
    layer = mlp(24, 32)
    x = values(3, 24)
    expected = layer(x)
    parallelize_module(layer, mesh(), SVDMLPParallel())
    seen: list[tuple[int, ...]] = []
    layer.up_proj.register_forward_hook(lambda m, a, y: seen.append(tuple(y.shape)))
    assert_close(layer(x), expected)
    return seen


def train(_: int) -> None:
    """Adam and clipping take the same steps as in one process."""
    for divide in DIVIDES:
        torch.manual_seed(0)
        layer = mlp(24, 30)
        model = nn.Sequential(nn.Linear(24, 24), layer, linear(24, 24, 6)).double()
        divided = copy.deepcopy(model)
        plan = {"1": SVDMLPParallel(divide), "2": SVDColumnwise(divide)}
        parallelize_module(divided, mesh(), plan)
        assert [*divided.state_dict()] == [*model.state_dict()]
        for one in (model, divided):
            optimizer = torch.optim.AdamW(one[1].parameters(), lr=1e-2)
            for step in range(3):
                optimizer.zero_grad()
                y = one(values(4, 24, dtype=torch.float64, seed=step))
                whole = y if one is model else gathered(y)
                whole.square().mean().backward()
                norm = nn.utils.clip_grad_norm_(one[1].parameters(), 1e-3)
                assert float(norm if one is model else norm.full_tensor()) > 1e-3
                optimizer.step()
        for name, tensor in full_state_dict(divided).items():
            assert_same_in_fp64(tensor, model.state_dict()[name])


def gathered(y: Tensor) -> Tensor:
    """The whole of what a column layer gives each rank."""
    return DTensor.from_local(y, mesh(), [Shard(y.dim() - 1)]).full_tensor()


def files(_: int, directory: str) -> None:
    """torch's checkpoints: saved divided, loaded whole and divided in another way, and back."""
    for storage in (None, "fp8", "int8"):
        layer = mlp(24, 30, storage=storage)
        state, x = layer.state_dict(), values(3, 24)
        divided = parallelize_module(copy.deepcopy(layer), mesh(), SVDMLPParallel("both"))
        path = str(Path(directory) / str(storage))
        dcp.save(divided.state_dict(), checkpoint_id=path)

        whole = SVDMLP(24, 30, (10, 7, 9), storage=storage)
        loaded = whole.state_dict()
        dcp.load(loaded, checkpoint_id=path)
        whole.load_state_dict(loaded)
        assert all(torch.equal(t.float(), state[n].float()) for n, t in loaded.items())

        other = SVDMLP(24, 30, (10, 7, 9), storage=storage)
        parallelize_module(other, mesh(), SVDMLPParallel("one"))
        loaded = other.state_dict()
        dcp.load(loaded, checkpoint_id=path)
        other.load_state_dict(loaded)
        with torch.no_grad():
            assert_close(other(x), layer(x))
        whole.load_state_dict(full_state_dict(other))
        assert all(torch.equal(t.float(), state[n].float()) for n, t in whole.state_dict().items())
        if storage == "fp8":
            continue  # gloo sends no fp8, which torch's own functions would
        options = StateDictOptions(full_state_dict=True)
        full = get_model_state_dict(divided, options=options)
        assert all(torch.equal(t.float(), state[n].float()) for n, t in full.items())
        set_model_state_dict(other, {n: t.clone() for n, t in full.items()}, options=options)
        with torch.no_grad():
            assert_close(other(x), layer(x))


def sources(rank: int, directory: str) -> None:
    """Rank 0's values count; without a source each rank's own; parameters may have none yet."""
    x, expected = values(3, 24), mlp(24, 30)(values(3, 24))
    torch.manual_seed(rank)
    other = SVDMLP(24, 30, (10, 7, 9))
    torch.manual_seed(0)
    first = SVDMLP(24, 30, (10, 7, 9))
    parallelize_module(other, mesh(), SVDMLPParallel())
    assert_close(other(x), first(x))

    own = parallelize_module(mlp(24, 30), mesh(), SVDMLPParallel(), src_data_rank=None)
    assert_close(own(x), expected)

    dcp.save(own.state_dict(), checkpoint_id=directory)
    empty = SVDMLP(24, 30, (10, 7, 9), device="meta")
    parallelize_module(empty, mesh(), SVDMLPParallel())
    empty.to_empty(device="cpu")
    state = empty.state_dict()
    dcp.load(state, checkpoint_id=directory)
    empty.load_state_dict(state)
    assert_close(empty(x), expected)


def compiled(rank: int, tp: int) -> None:
    """torch.compile takes a divided layer as one graph."""
    torch._dynamo.config.recompile_limit = 64
    for divide in DIVIDES:
        for dense in ((), ("gate_proj",)):
            layer = with_dense(*dense) if dense else mlp(24, 30)
            x = values(3, 24).requires_grad_()
            expected = layer(x)
            (dx,) = torch.autograd.grad(expected.sum(), x)
            parallelize_module(layer, mesh(), SVDMLPParallel(divide))
            fast = torch.compile(layer, fullgraph=not dense, backend="aot_eager")
            with torch.no_grad():
                assert_close(fast(x), expected)
            y = fast(x)
            assert_close(y, expected)
            assert_close(torch.autograd.grad(y.sum(), x)[0], dx)
        layer = linear(24, 35, 10)
        x = values(3, 24)
        with torch.autocast("cpu", torch.bfloat16):
            rounded = layer(x)
        expected = layer(x)
        parallelize_module(layer, mesh(), SVDRowwise(divide))
        fast = torch.compile(layer, fullgraph=True, backend="aot_eager")
        own = x[:, part(24, rank, tp, "K")]
        with torch.no_grad():
            assert_close(fast(own), expected)
        with torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(layer(own), rounded, rtol=2**-6, atol=2**-6)


def impls(_: int) -> None:
    """Ranks run the kernels on a simulated core; products in fp8 are close."""
    x = values(3, 24)
    layer = mlp(24, 32)
    expected = layer(x)
    eight = mlp(24, 32, storage="fp8")
    exact = eight(x)
    set_compute_(eight, "fp8")
    rounded = (eight(x) - exact).norm()
    parallelize_module(layer, mesh(), SVDMLPParallel())
    parallelize_module(eight, mesh(), SVDMLPParallel())
    with torch.no_grad():
        with use_impl("simulated"):
            torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-4)
        # each rank rounds its part of a token by a scale of its own
        assert 0 < (eight(x) - exact).norm() < 2 * rounded


@pytest.mark.parametrize(
    ("function", "tp", "expected"),
    [
        (compositions, 2, 14),
        (odd_shapes, 2, None),
        (odd_shapes, 4, None),
        (hooks_run, 2, [(3, 16)]),
        (train, 2, None),
        (files, 2, None),
        (sources, 2, None),
        (compiled, 2, None),
        (impls, 2, None),
    ],
)
def test_on_ranks(function, tp, expected, tmp_path):
    given = {odd_shapes: [tp], compiled: [tp], files: [str(tmp_path)], sources: [str(tmp_path)]}
    assert run(function, tp, *given.get(function, ()), timeout_s=300) == [expected] * tp
