"""What cannot be divided is refused by every rank, in one line."""

from collections.abc import Callable

import pytest
import torch
from parallel.divided import linear, mesh, mlp, values
from ranks import run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from neuronmm_ops.parallel import SVDColumnwise, SVDMLPParallel, SVDRowwise


def refused(rank: int) -> dict[str, str]:
    """The errors of a rank by case."""
    found: dict[str, str] = {}

    def case(name: str, action: Callable[[], object]) -> None:
        try:
            action()
        except (TypeError, ValueError) as error:
            found[name] = f"{type(error).__name__}: {error}"

    def divide(name: str, layer: nn.Module, style: object) -> None:
        case(name, lambda: parallelize_module(layer, mesh(), style))

    dense = mlp(24, 33)
    dense.up_proj = nn.Linear(24, 33, bias=False)
    wrapped = mlp(24, 32)
    wrapped.up_proj = nn.Sequential(wrapped.up_proj)
    divided = parallelize_module(linear(), mesh(), SVDColumnwise())
    whole_mlp = parallelize_module(mlp(), mesh(), SVDMLPParallel())
    divide("embedding", nn.Embedding(4, 4), SVDColumnwise())
    divide("dense N", nn.Linear(4, 5), SVDColumnwise())
    divide("pair", linear().to_pair(), SVDRowwise())
    divide("twice", divided, SVDColumnwise())
    divide("mlp twice", whole_mlp, SVDMLPParallel())
    divide("no mlp", linear(), SVDMLPParallel())
    for name, layer in (("hooked", mlp()), ("hooked up", mlp()), ("hooked layer", linear())):
        target = layer.up_proj if name == "hooked up" else layer
        target.forward = target.forward
        divide(name, layer, SVDColumnwise() if name == "hooked layer" else SVDMLPParallel())
    divide("N", linear(24, 35), SVDColumnwise())
    divide("K", linear(25, 36), SVDRowwise())
    divide("I", dense, SVDMLPParallel())
    divide("wrapped", wrapped, SVDMLPParallel())
    grid = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    case("grid", lambda: parallelize_module(linear(), grid, SVDColumnwise()))
    case("slice", lambda: parallelize_module(linear(), grid["tp"], SVDColumnwise()))
    divide("r", linear(24, 36, 10 + rank), SVDColumnwise())
    divide("type", linear(4, 4, 2) if rank else nn.Linear(4, 4), SVDRowwise())
    divide("bias", linear(bias=bool(rank)), SVDRowwise())
    divide("dtype", linear(dtype=torch.bfloat16 if rank else torch.float32), SVDRowwise())
    divide("storage", linear(storage="fp8" if rank else "int8"), SVDRowwise())
    divide("mlp r", mlp(ranks=(10, 7 + rank, 9)), SVDMLPParallel())
    row = parallelize_module(linear(), mesh(), SVDRowwise())
    case("x", lambda: row(values(3, 24)))
    case("column x", lambda: divided(values(3, 12)))
    case("x dtype", lambda: divided(values(3, 24, dtype=torch.float64)))
    assert wrapped.gate_proj.u.__class__ is nn.Parameter
    return found


ONCE = "; load the same checkpoint on all"
SAME = "ValueError: every rank must have the same layer, got"
REPLACED = (
    "divides what a forward of its own computes, got {} whose forward was replaced, as accelerate "
    "does; remove its hooks first, or load the model on one device"
)
EXPECTED = {
    "embedding": "TypeError: SVDColumnwise divides SVDLinear, StoredLinear and nn.Linear, got "
    "Embedding; unwrap or replace it first",
    "pair": "TypeError: SVDRowwise divides SVDLinear, StoredLinear and nn.Linear, got "
    "LinearPair; SVDLinear.from_pair first",
    "twice": "TypeError: SVDColumnwise divides a layer once, got one that is divided already",
    "mlp twice": "TypeError: SVDMLPParallel divides an SVDMLP once, "
    "got one that is divided already",
    "no mlp": "TypeError: SVDMLPParallel divides an SVDMLP, got SVDLinear; "
    "divide its Linears one by one",
    "hooked": f"TypeError: SVDMLPParallel {REPLACED.format('an MLP')}",
    "hooked up": f"TypeError: SVDMLPParallel {REPLACED.format('up_proj')}",
    "hooked layer": f"TypeError: SVDColumnwise {REPLACED.format('a layer')}",
    "N": "ValueError: tp must divide N, got N = 35 and tp = 2; use a tp that divides 35",
    "dense N": "ValueError: tp must divide N, got N = 5 and tp = 2; use a tp that divides 5",
    "K": "ValueError: tp must divide K, got K = 25 and tp = 2; use a tp that divides 25",
    "I": "ValueError: tp must divide up_proj's I, got up_proj's I = 33 and tp = 2; "
    "use a tp that divides 33",
    "wrapped": "TypeError: SVDMLPParallel divides SVDLinear, StoredLinear and nn.Linear, got "
    "up_proj of type Sequential; unwrap or replace it first",
    "grid": "ValueError: the mesh must have one dimension, got 2 (dp, tp); "
    "give the one of tensor parallelism: mesh['tp']",
    "r": f"{SAME} r 10 on rank 0 and 11 on rank 1{ONCE}",
    "type": f"{SAME} type nn.Linear on rank 0 and SVDLinear on rank 1{ONCE}",
    "bias": f"{SAME} bias none on rank 0 and one on rank 1{ONCE}",
    "dtype": f"{SAME} dtype float32 on rank 0 and bfloat16 on rank 1{ONCE}",
    "storage": f"{SAME} storage int8 on rank 0 and fp8 on rank 1{ONCE}",
    "mlp r": f"{SAME} r 7 on rank 0 and 8 on rank 1{ONCE}",
    "x": "ValueError: x must have 12 columns on rank {rank} of 2, got [3, 24]; "
    "a row layer takes this rank's part",
    "column x": "ValueError: x must have 24 columns on rank {rank} of 2, got [3, 12]; "
    "a column layer takes the whole x",
    "x dtype": "TypeError: x must have the dtype of the layer, got torch.float64 and "
    "torch.float32; cast one of them with .to(dtype)",
}


@pytest.mark.slow
def test_errors_are_one_line_on_every_rank():
    for rank, found in enumerate(run(refused, 2)):
        assert found == {name: text.replace("{rank}", str(rank)) for name, text in EXPECTED.items()}


@pytest.mark.parametrize("style", [SVDColumnwise, SVDRowwise, SVDMLPParallel])
def test_an_unknown_division_is_refused(style):
    with pytest.raises(ValueError, match=r"^divide must be one or both, got 'none'$"):
        style("none")
    assert repr(style("one")) == f"{style.__name__}(divide='one')"
