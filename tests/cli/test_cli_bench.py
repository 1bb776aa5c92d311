"""`neuronmm bench`: options, tables and mistakes; what it measures is tested in tests/measure."""

from typing import Any

import pytest
import torch
from outcomes import Run, refused

from neuronmm_ops.measure.cpu import CpuOptions


def test_options_of_cpu(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    rows = [{"op": "xuv", "M": 1, "op_ms": 0.123456}, {"op": "xuv", "M": 8, "op_ms": 12.0}]

    def measure(options: CpuOptions, _: Any) -> list[dict[str, Any]]:
        asked.append((options.shape, options.tokens, options.dtype, options.backward))
        return rows

    monkeypatch.setattr("neuronmm_ops.measure.cpu.run", measure)
    monkeypatch.setattr("neuronmm_ops.ops.backends.cpu.multiplies_fast", lambda dtype: False)
    outcome = run("bench", "cpu")
    assert outcome.out.startswith("op xuv\n")
    assert "0.1235" in outcome.out
    run(
        "bench",
        "cpu",
        "--model",
        "Qwen3-4B",
        "--tokens",
        "1,2",
        "3",
        "--dtype",
        "bfloat16",
        "--backward",
    )
    assert asked == [
        ("Llama-3.2-1B", [1, 8, 64, 512], torch.float32, False),
        ("Qwen3-4B", [1, 2, 3], torch.bfloat16, True),
    ]


def test_mistakes(run: Run) -> None:
    refused(run("bench", "cpu", "--model", "GPT-9"), "GPT-9", "Llama-3.2-1B")
    refused(run("bench", "cpu", "--tokens", "0"), "at least 1")
    refused(run("bench", "cpu", "--tokens", "many"), "at least 1")
    refused(run("bench"), "BENCHMARK")
