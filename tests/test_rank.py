"""The rank rule: the published ranks, and properties of all ranks."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neuronmm_ops import aligned_rank
from neuronmm_ops.rank import largest_block

PUBLISHED = {
    "Llama-3.2-1B": (2048, 8192, (1536, 1536, 1280)),
    "Llama-3.2-3B": (3072, 8192, (2176, 2048, 1792)),
    "Llama-3-8B": (4096, 14336, (3072, 2816, 2560)),
    "Qwen3-1.7B": (2048, 6144, (1408, 1408, 1280)),
    "Qwen3-4B": (2560, 9728, (1920, 1792, 1664)),
    "Qwen3-8B": (4096, 12288, (2944, 2816, 2432)),
}


@pytest.mark.parametrize("model", PUBLISHED)
def test_ranks_of_the_paper_s_models(model):
    K, N, expected = PUBLISHED[model]
    assert tuple(aligned_rank(K, N, ratio) for ratio in (0.05, 0.1, 0.2)) == expected
    assert tuple(aligned_rank(N, K, ratio) for ratio in (0.05, 0.1, 0.2)) == expected


sizes = st.integers(1, 20_000)
ratios = st.floats(0.01, 0.99)
blocks = st.integers(1, 32).map(lambda n: 8 * n)
alphas = st.floats(0, 1)


@given(sizes, sizes, ratios, blocks, alphas)
def test_a_rank_is_whole_blocks_and_none_exactly_where_nothing_is_saved(K, N, ratio, block, alpha):
    exact = K * N * (1 - ratio) / ((K + N) * block)
    rank = max(1, int(exact + alpha)) * block
    expected = None if rank * (K + N) >= K * N else rank
    assert aligned_rank(K, N, ratio, block, alpha) == expected


@given(sizes, sizes, ratios, blocks)
def test_rounding_is_to_nearest_by_default(K, N, ratio, block):
    exact = K * N * (1 - ratio) / (K + N)
    rank = aligned_rank(K, N, ratio, block)
    if rank is not None and rank > block:
        assert abs(rank - exact) <= block / 2 * (1 + 1e-9)


@given(st.lists(st.tuples(sizes, sizes), min_size=1, max_size=3), ratios)
@settings(max_examples=20)
def test_the_largest_block_is_the_largest_that_fits(matrices, ratio):
    def fits(block):
        return [aligned_rank(K, N, ratio, block) is not None for K, N in matrices]

    block = largest_block(matrices, ratio)
    if block is None:
        assert not any(fits(8))
        return
    assert fits(block) == fits(8)
    larger = range(block + 8, min(block + 800, 20_000), 8)
    assert all(fits(other) != fits(8) for other in larger)


def test_the_largest_block_of_small_models():
    assert largest_block([(64, 176)], 0.2) == 40
    assert largest_block([(64, 176), (8, 8)], 0.2) == 40
    assert largest_block([(8, 8)], 0.2) is None
