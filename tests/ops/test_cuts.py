"""How ranks divide an op: the parts of the operands give the whole result."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from operands import OPS, PLAIN, generators, make, with_x_for
from quantized import nearest
from tolerances import assert_same_in_fp64
from torch import Tensor

from neuronmm_ops.ops.definitions import SPECS
from neuronmm_ops.ops.spec import Operand, OpSpec
from neuronmm_ops.storages import dequantized

CUTS = [(op, name) for op in OPS for name in SPECS[op].cuts]
ALL_CUTS = {
    "xuv": ("N", "K", "r"),
    "xw": ("N", "K"),
    "mlp": ("I", "N"),
    "svd_mlp": ("I", "r_down", "N"),
    "svd_qkv": ("N", "K"),
}


def parts(tensor: Tensor | None, dim: int | None, tp: int) -> list[Tensor | None]:
    """A tensor's part for each rank; the last ones are narrower where tp does not divide it."""
    if tensor is None or dim is None:
        return [tensor] * tp
    bounds = [tensor.shape[dim] * rank // tp for rank in range(tp + 1)]
    widths = [end - start for start, end in pairwise(bounds)]
    return list(tensor.split(widths, dim))


def on_ranks(op: str, name: str, tp: int, tensors: list[Any], options: tuple[str, ...]) -> Tensor:
    """Call the op for each rank on its part of the operands, and put the results together."""
    spec = SPECS[op]
    cut = spec.cut(name)
    per_tensor = [parts(t, dim, tp) for t, dim in zip(tensors, cut.dims, strict=True)]
    results: list[Tensor] = []
    widths: list[list[int]] = []
    for rank in range(tp):
        own = [each[rank] for each in per_tensor]
        if cut.is_partial and rank:
            own = [
                None if operand.role == "bias" else tensor
                for operand, tensor in zip(spec.tensors, own, strict=True)
            ]
        results.append(spec.reference(*spec.joined(tuple(own), options)))
        widths.append(spec.widths(own))
    if cut.is_partial:
        return torch.stack(results).sum(0)
    of_outputs = [result.split(w, -1) for result, w in zip(results, widths, strict=True)]
    return torch.cat([t for output in zip(*of_outputs, strict=True) for t in output], -1)


@pytest.mark.parametrize(("op", "name"), CUTS)
@given(st.data())
def test_the_parts_give_the_whole(op, name, data):
    spec = SPECS[op]
    tp = data.draw(st.integers(1, 4), "tp")
    generator = data.draw(generators)
    sizes = {size: data.draw(st.integers(tp, 12)) for t in spec.operands for size in t.sizes}
    missing = [n for n, o in enumerate(spec.operands) if o.optional and data.draw(st.booleans())]
    sizes = with_x_for(op, sizes, [n for n in missing if n in spec.activations])
    tensors: list[Tensor | None] = [
        None if n in missing else make(shape, torch.float64)
        for n, shape in enumerate(spec.shapes(sizes, (2, 3)))
    ]
    for tensor in tensors:
        if tensor is not None:
            tensor.normal_(generator=generator)
    options = tuple(data.draw(st.sampled_from(values)) for values in spec.choices.values())
    whole = PLAIN[op](*tensors, *options)

    storage = data.draw(st.sampled_from([None, "fp8", "int8"]))
    scales: list[Tensor | None] = [None] * len(spec.scales)
    if storage is not None:
        wide = list(tensors)
        for n, place in enumerate(spec.factors):
            tensors[place], scales[n] = nearest(tensors[place], storage)
            wide[place] = dequantized(tensors[place], scales[n], torch.float64)
        whole = PLAIN[op](*wide, *options)
    actual = on_ranks(op, name, tp, [*tensors, *scales], (*options, "x"))
    assert_same_in_fp64(actual, whole)


@pytest.mark.parametrize("op", OPS)
def test_every_op_says_what_ranks_may_divide(op):
    assert SPECS[op].cuts == ALL_CUTS.get(op, SPECS[op].cuts) != ()
    assert set(SPECS[op].cuts) <= {"N", *(n for t in SPECS[op].operands for n in t.sizes)}


def test_a_cut_names_the_dimensions_of_every_tensor():
    names = [operand.name for operand in SPECS["xuv"].tensors]
    assert names == ["x", "u", "v", "bias", "u_scale", "v_scale"]
    assert SPECS["xuv"].cut("N") == ((None, None, -1, -1, None, -1), False)
    assert SPECS["xuv"].cut("K") == ((-1, -2, None, None, None, None), True)
    assert SPECS["xuv"].cut("r") == ((None, -1, -2, None, -1, None), True)


def test_another_cut_is_refused():
    with pytest.raises(ValueError, match=r"^svd_mlp: ranks may divide I or r_down or N, got 'K'$"):
        SPECS["svd_mlp"].cut("K")
    spec = OpSpec("op", (Operand("x", "... K", "activation"),), torch.relu, lambda: ())
    with pytest.raises(ValueError, match=r"^op: ranks may divide nothing, got 'N'$"):
        spec.cut("N")
