"""The ops take DTensors, divided as the cuts of their specs say."""

import subprocess
import sys

import pytest
import torch
from operands import OPS, SIZES, make
from parallel.divided import Sent, mesh
from quantized import nearest
from ranks import run
from tolerances import assert_same_in_fp64
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import neuronmm_ops.parallel as parallel
from neuronmm_ops.ops.definitions import SPECS

pytestmark = pytest.mark.slow


def divided(tensor: Tensor | None, dim: int | None) -> DTensor | None:
    if tensor is None:
        return None
    placement = Replicate() if dim is None else Shard(tensor.dim() + dim)
    # Without a source nothing is sent: gloo sends no fp8.
    result = distribute_tensor(tensor.detach(), mesh(), [placement], src_data_rank=None)
    return result.requires_grad_(tensor.dtype == torch.float64)


def every_cut(_: int) -> list[str]:
    """Call each op for each of its cuts, and once with only the leading dimension cut."""
    seen: list[str] = []
    for op in OPS:
        spec = SPECS[op]
        one_result = [name for name in spec.cuts if name != "N" or len(spec.sides[0]) == 1]
        for name in [*one_result, None]:
            shapes = spec.shapes(SIZES, (4, 3))
            tensors = [make(shape, torch.float64).requires_grad_() for shape in shapes]
            whole = spec.reference(*tensors)
            grad = make(whole.shape, torch.float64)
            expected = torch.autograd.grad(whole, tensors, grad)

            if name is None:
                dims = [-3 if t.role == "activation" else None for t in spec.operands]
                placement = Shard(0)
            else:
                cut = spec.cut(name)
                dims = cut.dims[: len(tensors)]
                placement = Partial() if cut.is_partial else Shard(2)
            given = [divided(t, dim) for t, dim in zip(tensors, dims, strict=True)]
            with Sent() as sent:
                y = getattr(torch.ops.neuronmm, op)(*given)
            assert y.placements == (placement,), (op, name, y.placements)
            assert not sent.collectives, (op, name)
            assert_same_in_fp64(y.full_tensor(), whole)
            y.backward(distribute_tensor(grad, mesh(), [Replicate()]))
            for t, found in zip(given, expected, strict=True):
                assert_same_in_fp64(t.grad.full_tensor(), found)
            seen.append(f"{op} {name}")
    return seen


def scaled(_: int) -> None:
    """Factors of one byte and their scales are cut, too, and x has its gradient."""
    x = make((4, 6), torch.float64).requires_grad_()
    for storage in ("fp8", "int8"):
        u, u_scale = nearest(make((6, 4)), storage)
        v, v_scale = nearest(make((4, 8)), storage)
        whole = torch.ops.neuronmm.xuv(x, u, v, None, u_scale, v_scale)
        (expected,) = torch.autograd.grad(whole.sum(), x)
        tensors = (x.detach(), u, v, None, u_scale, v_scale)
        for cut in map(SPECS["xuv"].cut, SPECS["xuv"].cuts):
            given = [divided(t, dim) for t, dim in zip(tensors, cut.dims, strict=True)]
            y = torch.ops.neuronmm.xuv(*given)
            assert_same_in_fp64(y.full_tensor(), whole)
            y.backward(distribute_tensor(torch.ones_like(whole), mesh(), [Replicate()]))
            assert_same_in_fp64(given[0].grad.full_tensor(), expected)


def test_ops_take_dtensors():
    seen = run(every_cut, 2)
    assert seen[0] == seen[1]
    assert {"xuv N", "xuv K", "xuv r", "xw K", "mlp I", "svd_mlp r_down", "svd_qkv K"} <= set(
        seen[0]
    )
    run(scaled, 2)


def test_the_package_registers_them_and_the_core_does_not():
    script = """
import sys
import neuronmm_ops
assert "neuronmm_ops.parallel" not in sys.modules
assert "torch.distributed.tensor" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
    assert set(parallel.__all__) >= {"SVDColumnwise", "SVDRowwise", "SVDMLPParallel"}
