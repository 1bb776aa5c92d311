"""`bench`: what the ops and models take here, and what a whole model would take on Trainium."""

import argparse
from typing import Any

from neuroncore.cli.console import show_rows
from neuronmm_ops.cli import bench_generate, bench_model
from neuronmm_ops.cli.parser import add_command, add_group, add_shape, add_tokens, tokens_of
from neuronmm_ops.progress import progress_bars


def add(commands: Any) -> None:
    """Add the command and its benchmarks to the parser."""
    description = "measure ops and models here; model a whole model's time on Trainium"
    example = "cpu --model Llama-3.2-1B --tokens 1,64"
    benchmarks = add_group(commands, "bench", "benchmark", description, example)
    bench_model.add(benchmarks)
    bench_generate.add(benchmarks)

    example = "--model Llama-3.2-1B --tokens 1,64"
    description = "ops compared with dense layers"
    command = add_command(
        benchmarks, "cpu", _cpu, _show_cpu, description, "--dtype", example=example
    )
    add_shape(command, " (default Llama-3.2-1B)", default="Llama-3.2-1B")
    add_tokens(command, [1, 8, 64, 512])
    command.add_argument("--backward", action="store_true", help="also time forward and backward")
    command.add_argument("--storage", help="also time the op on factors in fp8, int8 or int4")


def _cpu(options: argparse.Namespace) -> list[dict[str, Any]]:
    import torch

    from neuronmm_ops.measure import cpu
    from neuronmm_ops.ops.backends.cpu import compute_dtype

    is_auto = options.dtype == "auto"
    dtype = compute_dtype(torch.bfloat16) if is_auto else getattr(torch, options.dtype)
    timed = cpu.CpuOptions(
        options.model,
        tokens=tokens_of(options),
        dtype=dtype,
        backward=options.backward,
        storage=options.storage,
    )
    with progress_bars() as progress:
        return cpu.run(timed, progress)


def _show_cpu(rows: list[dict[str, Any]]) -> None:
    quartiles = ("speedup_quartiles", "packed_speedup_quartiles")
    json_only = ("two_gemm_ms", "gbps", "gflops", *quartiles)
    show_rows([{k: v for k, v in row.items() if k not in json_only} for row in rows])
