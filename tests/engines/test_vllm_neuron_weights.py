"""How a rank's part of a matrix is read from a file: the parts of all ranks are the whole."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from neuronmm_ops.checkpoint import read_headers
from neuronmm_ops.compress.report import LayerReport
from neuronmm_ops.engines.members import member_of
from neuronmm_ops.engines.places import ColumnSection, Shard
from neuronmm_ops.engines.vllm_neuron.weights import Files
from neuronmm_ops.parallel.sharding import part_width


@settings(max_examples=60, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    kind=st.sampled_from(["column", "row"]),
    tp=st.integers(1, 12),
)
def test_parts_read_from_a_file_are_the_whole_and_zeros(shape, kind, tp):
    (K, N), dim = shape, 1 if kind == "column" else 0
    matrix = torch.arange(1.0, K * N + 1).view(K, N)
    layer = LayerReport("layer", K, N, None, True, None, None, 1, 1)
    member = member_of(layer, Shard(kind, "both", 0, tp), sections(N, kind, tp), torch.float32)
    with TemporaryDirectory() as directory:
        file = Path(directory) / "w.safetensors"
        save_file({"w": matrix.t().contiguous()}, file)
        with safe_open(file, framework="pt") as tensors:
            view = tensors.get_slice("w")
            parts = [member.cut("weight", view, rank).t() for rank in range(tp)]
    assert {part.shape for part in parts} == {member.weight.t().shape}
    whole = torch.cat(parts, dim)
    assert torch.equal(whole.narrow(dim, 0, shape[dim]), matrix)
    assert not whole.narrow(dim, shape[dim], whole.shape[dim] - shape[dim]).any()


def sections(N: int, kind: str, tp: int) -> list[ColumnSection]:
    return [ColumnSection(N, tp if kind == "column" else 1)]


@pytest.mark.parametrize("kind", ["column", "row"])
@pytest.mark.parametrize("r", [None, 5])
@pytest.mark.parametrize("tp", [1, 3, 8])
def test_a_rank_has_its_part_of_every_tensor(kind, r, tp):
    layer = LayerReport("layer", 12, 7, r, r is None, None, None, 1, 1)
    member = member_of(layer, Shard(kind, "both", 0, tp), sections(7, kind, tp), torch.float32)
    found = {name: p.shape for name, p in member.named_parameters()}
    K, N, width = part_width(12, tp), part_width(7, tp), part_width(5, tp)
    expected = {
        ("column", 5): {"u": (12, width), "v": (width * tp, N)},
        ("row", 5): {"u": (K, 5), "v": (5, N)},
        ("column", None): {"weight": (N, 12)},
        ("row", None): {"weight": (7, K)},
    }
    assert found == expected[kind, r]


def test_columns_of_factors_are_their_products_in_fp32(tmp_path):
    u, v = torch.randn(6, 4).bfloat16(), torch.randn(4, 8).bfloat16()
    save_file({"a.u": u, "a.v": v, "b.weight": v.t().contiguous()}, tmp_path / "w.safetensors")
    files = Files(read_headers([tmp_path / "w.safetensors"]))
    pair = LayerReport("a", 6, 8, 4, False, None, None, 1, 1)
    dense = LayerReport("b", 4, 8, None, True, None, None, 1, 1)
    assert torch.equal(files.columns(pair, slice(2, 5)), u.float() @ v.float()[:, 2:5])
    assert torch.equal(files.columns(dense, slice(2, 5)), v.float()[:, 2:5])
