"""topk: the largest of each 16 partitions' snake, in both readings of where they go."""

import numpy as np
from draws import either, pick, seeds
from hypothesis import given, settings
from hypothesis import strategies as st
from instruction_runs import loaded, new, refusals, refuses, stored, zeros
from samples import bf16, wide

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
    def kernel(x):
        p, src = x.shape[0], loaded(x)
        val, idx = new(p, k, dtype=nl.bfloat16), new(p, k, dtype=nl.uint32)
        nisa.memset(val, -1)
        nisa.memset(idx, 77)
        nisa.topk(val_dst=val, idx_dst=idx, src=src, n=n)
        return stored(val), stored(idx)

    return nc.simulate(kernel, x, target="trn2", **options)


@settings(max_examples=30)
@given(
    groups=pick([1, 2, 8]), columns=st.integers(1, 6), ties=either,
    shares=st.tuples(st.floats(0, 1), st.floats(0, 1)), seed=seeds,
)  # fmt: skip
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
    records = [r[0] for r in done.profile.launch.cores[0].trace.records]
    (template,) = [r for r in records if r.opcode == "topk"]
    assert (template.engine.name, template.cycles) == ("GPSIMD", 4 * 42 + 8)


def issue(n=16, k=4, p=16, columns=2, src=nl.bfloat16, val=nl.bfloat16, idx=nl.uint32, extra=0):
    tiles = new(p, k, dtype=val), new(p, k + extra, dtype=idx), zeros(p, columns, dtype=src)
    nisa.topk(*tiles, n)


@refusals(
    ("src must be bfloat16", lambda: issue(src=nl.float32)),
    ("val_dst must be bfloat16", lambda: issue(val=nl.float32)),
    ("idx_dst must be uint32", lambda: issue(idx=nl.int32)),
    ("elements per partition differ", lambda: issue(extra=1)),
    ("partitions must be a multiple of 16", lambda: issue(p=24)),
    ("n must be 8 to 65535", lambda: issue(7)),
    ("at most the 32 values of 16 partitions", lambda: issue(33)),
    ("n must be 8 to 65535", lambda: issue(65536, columns=5000)),
    ("got 8.0", lambda: issue(8.0)),
    ("must be 1 to n=16; got 17", lambda: issue(k=17)),
)
def test_what_is_refused(text, body, target):
    refuses(text, body, target=target)
