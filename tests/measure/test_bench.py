"""Rows have the documented fields and sane values; nothing here depends on the machine's speed."""

import pytest
import torch

from neuronmm_ops.measure import cpu, timing
from neuronmm_ops.models import SHAPES, ModelShape
from neuronmm_ops.ops.backends.cpu import multiplies_fast

CPU_FIELDS = (
    *("op", "pass", "M", "K", "N", "r", "dtype", "compute_dtype", "threads", "dense_ms"),
    *("two_gemm_ms", "op_ms", "speedup", "speedup_quartiles", "ideal_speedup"),
    *("packed_dense_ms", "packed_op_ms", "packed_speedup", "packed_speedup_quartiles"),
    *("storage", "stored_ms", "stored_speedup", "gbps", "gflops"),
)
TINY = ModelShape("Tiny", 32, 64, 2, 2, 1, 16, 600, tied=True)


@pytest.fixture
def _tiny_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "Tiny", TINY)


def test_paired_timing_alternates_and_rotates():
    calls: list[tuple[str, int]] = []
    times = timing.time_paired(
        {name: lambda index, name=name: calls.append((name, index)) for name in "ab"},
        rounds=2,
        warmup=1,
    )
    assert calls == [("b", -1), ("a", -1), ("a", 0), ("b", 0), ("b", 1), ("a", 1)]
    assert len(times.rounds_ms["a"]) == len(times.rounds_ms["b"]) == 2


def test_paired_speedup_is_the_median_of_the_rounds_ratios():
    times = timing.PairedTimes({"base": (2.0, 40.0, 6.0), "op": (1.0, 10.0, 2.0)})
    assert times.speedup("op", "base") == 3.0
    low, middle, high = times.speedup_quartiles("op", "base")
    assert low <= middle == 3.0 <= high
    assert times.median_ms("base") == 6.0


def test_paired_timing_runs_in_its_mode():
    seen: list[bool] = []
    for mode in ({}, {"mode": torch.no_grad}):
        timing.time_paired(
            {"a": lambda _: seen.append(torch.is_inference_mode_enabled())}, 1, 0, **mode
        )
    assert seen == [True, False]


@pytest.mark.parametrize(("weights", "copies"), [(10, 10), (30, 4), (1000, 1)])
def test_copies_leave_the_cache(weights, copies):
    assert timing.copies_for(weights, cold_bytes=100) == copies


@pytest.mark.usefixtures("_tiny_shape")
@pytest.mark.parametrize("storage", ["fp8", "int8"])
def test_cpu_rows_of_factors_in_one_byte(storage, monkeypatch):
    monkeypatch.setattr(cpu, "copies_for", lambda _: 2)
    chosen = {"tokens": (1,), "ratios": (0.2,), "rounds": 3, "block": 8}
    for row in cpu.run(cpu.CpuOptions("Tiny", **chosen, storage=storage)):
        assert row["storage"] == storage
        assert min(row["stored_ms"], row["stored_speedup"]) > 0
    with pytest.raises(ValueError, match=r"^factors in one byte have no gradients; leave out"):
        cpu.run(cpu.CpuOptions("Tiny", **chosen, storage=storage, backward=True))
    with pytest.raises(ValueError, match=r"^storage must be fp8 or int8 or int4, got 'bf16'$"):
        cpu.run(cpu.CpuOptions("Tiny", **chosen, storage="bf16"))


@pytest.mark.usefixtures("_tiny_shape")
def test_cpu_rows(monkeypatch):
    monkeypatch.setattr(timing, "COLD_BYTES", 1)
    monkeypatch.setattr(cpu, "copies_for", lambda _: 2)
    rows = cpu.run(cpu.CpuOptions("Tiny", ratios=(0.5,), tokens=(1, 3), rounds=2, block=8))
    assert [(row["op"], row["M"]) for row in rows] == [
        ("xuv", 1),
        ("xuv", 3),
        ("svd_mlp", 1),
        ("svd_mlp", 3),
    ]
    for row in rows:
        assert tuple(row) == CPU_FIELDS
        assert (row["K"], row["N"], row["r"], row["threads"]) == (
            *(32, 64, 8),
            torch.get_num_threads(),
        )
        assert row["dtype"] == "bfloat16"
        assert row["ideal_speedup"] == pytest.approx(32 * 64 / (8 * 96))
        assert min(row[k] for k in CPU_FIELDS if k.endswith("_ms") and k != "stored_ms") > 0
        assert row["storage"] is row["stored_ms"] is row["stored_speedup"] is None
        matrices = 1 if row["op"] == "xuv" else 3
        assert row["gbps"] * row["op_ms"] == pytest.approx(matrices * 8 * 96 * 2 / 1e6)
        assert row["gflops"] == pytest.approx(row["gbps"] * row["M"])
        assert row["compute_dtype"] == (
            "bfloat16" if multiplies_fast(torch.bfloat16) else "float32"
        )


@pytest.mark.usefixtures("_tiny_shape")
def test_cpu_rows_of_both_passes(monkeypatch):
    monkeypatch.setattr(cpu, "copies_for", lambda _: 2)
    options = cpu.CpuOptions(
        "Tiny", ratios=(0.5,), tokens=(3,), dtype=torch.float32, rounds=2, block=8, backward=True
    )
    rows = cpu.run(options)
    assert [(row["op"], row["pass"]) for row in rows] == [
        (op, name) for op in cpu.OPS for name in ("forward", "forward+backward")
    ]
    for row in rows:
        is_packed = row["pass"] == cpu.FORWARD
        assert all(is_packed or row[name] is None for name in CPU_FIELDS if "packed" in name)
        assert row["dtype"] == row["compute_dtype"] == "float32"
        products = 3 if "backward" in row["pass"] else 1
        assert row["gflops"] == pytest.approx(products * row["gbps"] * row["M"] / 2)


def test_a_slow_round_ends_the_measurement_after_three():
    times = timing.time_paired({"a": lambda _: None}, rounds=9, limit_s=0)
    assert len(times.rounds_ms["a"]) == timing.MIN_ROUNDS


@pytest.mark.usefixtures("_tiny_shape")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ops": ["conv"]}, "op must be one of xuv, svd_mlp; got 'conv'"),
        ({"tokens": [1, 0]}, "tokens must be at least 1, got 0"),
        ({}, r"no rank that is a multiple of 128 is smaller than \[32, 64\]"),
    ],
)
def test_cpu_refuses_what_it_does_not_know(options, message):
    with pytest.raises(ValueError, match=message):
        cpu.run(cpu.CpuOptions("Tiny", **options))
