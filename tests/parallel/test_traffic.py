"""Bytes sent and held by a rank of a divided model, and the page that prints them."""

import os
from pathlib import Path

import pytest
from mktestdocs import grab_code_blocks
from ranks import run
from tiny import tiny_directory

from neuronmm_ops import aligned_rank
from neuronmm_ops.models import SHAPES, ModelShape
from neuronmm_ops.parallel.sharding import wire_bytes
from neuronmm_ops.parallel.traffic import traffic

PAGE = Path(__file__).parents[2] / "docs" / "tensor-parallel.md"
SMALL = ModelShape("small", 8, 12, 2, 4, 2, 2, 100, tied=True)
MLP = {"gate_proj": 3, "up_proj": 4, "down_proj": 5}


def ranks_of(shape: ModelShape, ratio: float = 0.2) -> dict[str, int]:
    ranks = {name: aligned_rank(K, N, ratio) for name, (K, N) in shape.projections.items()}
    return {name: r for name, r in ranks.items() if r is not None}


def test_bytes_of_a_small_model_by_hand():
    """K = 8, q 8, k and v 4, I = 12, two layers; elements of four bytes."""
    dense, one, both = traffic(SMALL, MLP, 2, itemsize=4)
    attention = 8 * (8 + 4 + 4 + 8)
    assert dense.weight_bytes == 2 * 4 * (attention + 3 * 8 * 12) / 2
    assert one.weight_bytes == 2 * 4 * (attention // 2 + 7 * (8 + 6) + 5 * (6 + 8))
    assert both.weight_bytes == 2 * 4 * (attention // 2 + (2 + 2) * 8 + 7 * 6 + 5 * (6 + 4))
    output = wire_bytes("row", 8, None, 2, itemsize=4)
    assert dense.wire_bytes == 2 * 2 * output == 2 * 2 * 8 * 4
    assert one.wire_bytes == 2 * (output + 5 * 4)
    assert both.wire_bytes == 2 * (output + (2 + 2) * 4 + 5 * 4 + 4 * 4)
    assert [row.exchanges for row in (dense, one, both)] == [4, 4, 8]
    assert [row.layout for row in (dense, one, both)] == ["dense", "one", "both"]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=lambda shape: shape.name)
def test_one_rank_sends_nothing_and_holds_everything(shape):
    ranks = ranks_of(shape)
    dense, one, both = traffic(shape, ranks, 1)
    assert dense.wire_bytes == one.wire_bytes == both.wire_bytes == 0
    assert dense.exchanges == one.exchanges == both.exchanges == 0
    assert one.weight_bytes == both.weight_bytes < dense.weight_bytes
    assert dense.weight_bytes == 2 * shape.layers * sum(
        K * N for K, N in shape.projections.values()
    )


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"^tp must divide the heads, got 4 heads and tp = 3"):
        traffic(SMALL, MLP, 3)
    with pytest.raises(ValueError, match=r"^projections are q_proj, .*; got lm_head$"):
        traffic(SMALL, {"lm_head": 4}, 2)


def page(_: int, directory: str) -> None:
    """What `torchrun divide.py` does on a rank, in a process group that is there already."""
    os.chdir(directory)
    exec("\n".join(grab_code_blocks(PAGE.read_text(), lang="python")), {})  # noqa: S102


@pytest.mark.slow
def test_the_page_runs_on_two_ranks(tmp_path):
    tiny_directory(tmp_path / "model")
    run(page, 2, str(tmp_path))
