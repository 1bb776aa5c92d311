"""topk: the largest of each 16 partitions' snake, in both readings of where they go."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from instruction_runs import Out, bf16, call, refused, seeds, wide

import neuroncore as nc
from neuroncore import isa as nisa
from neuroncore import language as nl


def largest(x: np.ndarray, n: int, k: int) -> list[tuple[list[float], list[int]]]:
    """(values, numbers), ascending, of each 16 partitions; of equal values the lowest numbers."""
    found = []
    for g in range(0, len(x), 16):
        snake = [float(x[g + i % 16, i // 16]) for i in range(n)]
        taken = sorted(range(n), key=lambda i: (-snake[i], i))[:k]
        taken.sort(key=lambda i: (snake[i], i))
        found.append(([snake[i] for i in taken], taken))
    return found


def run(x, n, k, **options):
    @nc.jit
    def kernel(x):
        p = x.shape[0]
        src, val = nl.ndarray(x.shape, x.dtype), nl.ndarray((p, k), nl.bfloat16)
        idx = nl.ndarray((p, k), nl.uint32)
        nisa.dma_copy(src, x)
        nisa.memset(val, -1)
        nisa.memset(idx, 77)
        nisa.topk(val_dst=val, idx_dst=idx, src=src, n=n)
        outs = [nl.ndarray(t.shape, t.dtype, buffer=nl.shared_hbm) for t in (val, idx)]
        for out, t in zip(outs, (val, idx), strict=True):
            nisa.dma_copy(out, t)
        return tuple(outs)

    return nc.simulate(kernel, x, target="trn2", **options)


@settings(max_examples=30, deadline=None)
@given(
    groups=st.sampled_from([1, 2, 8]),
    columns=st.integers(1, 6),
    ties=st.booleans(),
    shares=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    seed=seeds,
)
def test_topk_in_both_readings(groups, columns, ties, shares, seed):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((16 * groups, columns))
    x = (np.round(x) if ties else x).astype(bf16)
    n = 8 + int(shares[0] * (16 * columns - 8))
    k = 1 + int(shares[1] * (n - 1))
    expected = largest(x, n, k)
    val, idx = run(x, n, k).outputs
    for g, (values, numbers) in enumerate(expected):
        for p in range(16 * g, 16 * g + 16):
            assert wide(val[p]).tolist() == values
            assert idx[p].tolist() == numbers
    val, idx = run(x, n, k, follow="kernels").outputs
    for g, (values, numbers) in enumerate(expected):
        for j, (value, number) in enumerate(zip(values, numbers, strict=True)):
            place = 16 * g + j % 16, j // 16
            assert (float(val[place]), int(idx[place])) == (value, number)
        assert (wide(val[16 * g : 16 * g + 16]) == -1).sum() >= 15 * k - values.count(-1)
        assert (idx[16 * g : 16 * g + 16] == 77).sum() >= 15 * k


def test_the_documented_example_and_its_cost():
    x = np.arange(48, dtype=np.float32).reshape(3, 16).T.astype(bf16)
    done = run(x, 42, 8)
    assert done.outputs[1][5].tolist() == list(range(34, 42))  # 42 of the 48 count
    (template,) = [
        r[0] for r in done.profile.launch.cores[0].trace.records if r[0].opcode == "topk"
    ]
    assert (template.engine.name, template.cycles) == ("GPSIMD", 4 * 42 + 8)


def issue(n=16, k=4, p=16, columns=2, src=nl.bfloat16, val=nl.bfloat16, idx=nl.uint32, extra=0):
    def body(dsts, srcs):
        source = nl.ndarray((p, columns), src)
        nisa.memset(source, 0)
        nisa.topk(nl.ndarray((p, k), val), nl.ndarray((p, k + extra), idx), source, n)
        nisa.memset(dsts[0], 0)

    return body


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"src": nl.float32}, "src must be bfloat16"),
        ({"val": nl.float32}, "val_dst must be bfloat16"),
        ({"idx": nl.int32}, "idx_dst must be uint32"),
        ({"extra": 1}, "elements per partition differ"),
        ({"p": 24}, "partitions must be a multiple of 16"),
        ({"n": 7}, "n must be 8 to 65535"),
        ({"n": 33}, "at most the 32 values of 16 partitions"),
        ({"n": 65536, "columns": 5000}, "n must be 8 to 65535"),
        ({"n": 8.0}, "got 8.0"),
        ({"k": 17}, "must be 1 to n=16; got 17"),
    ],
)
def test_topk_refuses(options, text):
    with refused(text):
        call(issue(**options), np.zeros((1, 1), np.float32), outs=[Out((1, 1))])
