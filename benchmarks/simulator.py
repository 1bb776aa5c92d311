"""How quick neuroncore is on this machine: traces and schedules, values next to NumPy, memory.

CPU seconds of one core, the least of some repeats, for noise only ever adds time.
"""

from __future__ import annotations

import gc
import platform
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from threadpoolctl import threadpool_limits

import neuroncore as nc
from neuroncore import isa as nisa
from neuroncore import language as nl
from neuroncore.collector import no_collection
from neuroncore.hardware import PARTITIONS, PSUM_BANK_BYTES
from neuroncore.kernel import observers
from neuroncore.timing.schedule import schedule
from neuronmm_ops.compress.calibrate import Progress
from neuronmm_ops.plan import Plan, plan_svd_mlp, plan_xuv
from neuronmm_ops.plan.tracing import traced

TARGET = "trn2"
TILED = {
    "tiled, 1e4": (128, 2048, 64 * 1024),
    "tiled, 1e5": (128, 4096, 320 * 1024),
    "tiled, 4e5": (128, 10240, 500 * 1024),
    "contraction 2048": (2048, 4096, 64 * 512),
}
"""K, M, N of `tiled`: with K = 128 it has three DMAs a matmul."""
VALUES = {"tiled": (128, 2048, 8192), "contraction 2048": (2048, 1024, 2048)}
LONG = (2048, 4096, 235 * 512)
"""Of `tiled`: a modelled time of 100 ms."""
STREAMED = 2 << 30
PLANNED = {
    "xuv": lambda: plan_xuv(4096, 2048, 768, 2048, target=TARGET),
    "svd_mlp": lambda: plan_svd_mlp(128, 2048, (1280, 1280, 1280), 8192, 2048, target=TARGET),
}
"""Plans of our kernels."""


@nc.jit
def tiled(xt: Any, w: Any) -> Any:
    """y[M, N] = xt[K, M].T @ w[K, N], each operand loaded for each matmul."""
    K, M = xt.shape
    N = w.shape[1]
    y = nl.ndarray((M, N), dtype=xt.dtype, buffer=nl.shared_hbm)
    for m in range(0, M, 128):
        for n in range(0, N, 512):
            acc = nl.ndarray((128, 512), dtype=nl.float32, buffer=nl.psum)
            for k in range(0, K, 128):
                a = nl.ndarray((128, 128), dtype=xt.dtype)
                b = nl.ndarray((128, 512), dtype=w.dtype)
                nisa.dma_copy(a, xt[k : k + 128, m : m + 128])
                nisa.dma_copy(b, w[k : k + 128, n : n + 512])
                nisa.nc_matmul(acc, a, b, accumulate=(k > 0))
            out = nl.ndarray((128, 512), dtype=y.dtype)
            nisa.tensor_copy(out, acc)
            nisa.dma_copy(y[m : m + 128, n : n + 512], out)
    return y


def tiled_numpy(xt: np.ndarray, w: np.ndarray) -> np.ndarray:
    """The same tiles in NumPy: each is copied, widened, summed in fp32, narrowed and stored."""
    K, M = xt.shape
    N = w.shape[1]
    y = np.empty((M, N), xt.dtype)
    for m in range(0, M, 128):
        for n in range(0, N, 512):
            acc = np.empty((128, 512), np.float32)
            for k in range(0, K, 128):
                a = xt[k : k + 128, m : m + 128].copy()
                b = w[k : k + 128, n : n + 512].copy()
                product = a.astype(np.float32).T @ b.astype(np.float32)
                acc = acc + product if k else product
            y[m : m + 128, n : n + 512] = acc.astype(xt.dtype)
    return y


@nc.jit
def streams(x: Any, rounds: int) -> Any:
    """Sum of x's tiles of 128 rows, loaded `rounds` times."""
    rows, columns = x.shape
    total = nl.zeros((128, columns), nl.float32)
    for _ in range(rounds):
        for row in range(0, rows, 128):
            tile = nl.ndarray((128, columns), x.dtype)
            nisa.dma_copy(tile, x[row : row + 128])
            nisa.tensor_tensor(total, total, tile, nl.add)
    y = nl.ndarray((128, columns), nl.float32, buffer=nl.shared_hbm)
    nisa.dma_copy(y, total)
    return y


def run(progress: Progress | None = None, repeats: int = 3) -> dict[str, Any]:
    """Measure all; a few minutes on one core.

    Args:
        progress: called with ("measurements", done, in all).
        repeats: of each; the least counts.

    Returns:
        `machine` and `python`; `traces`: instructions per CPU second of trace and schedule, and of
        a second schedule; `values`: CPU seconds of execute mode, of NumPy and of a trace, and the
        quotient of the first two; `memory`: peak of a kernel that streams 2 GB through SBUF,
        and what its tensors take that are live at once; `long`: CPU seconds of kernels whose
        modelled time is 100 ms.
    """
    parts: list[tuple[str, Callable[[], dict[str, Any]]]] = []
    for name, sizes in TILED.items():
        parts.append(("traces", lambda n=name, s=sizes: traced_rate(n, *s, repeats)))
    for find in PLANNED.values():
        parts.append(("traces", lambda f=find: planned_rate(f(), repeats)))
    for name, sizes in VALUES.items():
        parts.append(("values", lambda n=name, s=sizes: values_ratio(n, *s, repeats)))
    parts.append(("memory", lambda: streamed(STREAMED)))
    parts.append(("long", lambda: long("trace", *LONG)))
    parts.append(("long", lambda: long("execute", *LONG)))
    document: dict[str, Any] = {"machine": machine(), "python": platform.python_version()}
    for done, (part, measure) in enumerate(parts):
        if progress is not None:
            progress("measurements", done, len(parts))
        document.setdefault(part, []).append(measure())
    return document


def machine() -> str:
    """The processor's name, as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((x.partition(": ")[2] for x in lines if x.startswith("model name")), "")


def cpu_seconds(work: Callable[[], object]) -> float:
    """Of one run, without the garbage of those before it."""
    gc.collect()
    begin = time.process_time()
    work()
    return time.process_time() - begin


def _spec(*shape: int) -> nc.TensorSpec:
    return nc.TensorSpec(shape, nl.bfloat16)


def _traced(K: int, M: int, N: int) -> nc.Profile:
    return nc.simulate(tiled, _spec(K, M), _spec(K, N), target=TARGET, mode="trace").profile


def traced_rate(name: str, K: int, M: int, N: int, repeats: int) -> dict[str, Any]:
    """Instructions per CPU second of `tiled`."""
    whole = [cpu_seconds(lambda: _traced(K, M, N)) for _ in range(repeats)]
    profile = _traced(K, M, N)
    with no_collection():
        again = [cpu_seconds(lambda: schedule(profile.launch)) for _ in range(repeats)]
    return {
        "name": name,
        "instructions": profile.instructions,
        "dmas_per_matmul": profile.dma_count / profile.opcodes["nc_matmul"],
        "time_ms": profile.time_ms,
        "cpu_s": min(whole),
        "per_second": profile.instructions / min(whole),
        "scheduled_per_second": profile.instructions / min(again),
    }


def planned_rate(plan: Plan, repeats: int) -> dict[str, Any]:
    """Instructions per CPU second of one of our kernels, as a search runs it: timed twice."""
    seen: list[nc.Profile] = []
    observers.append(seen.append)
    try:
        seconds: list[float] = []
        for _ in range(repeats):
            seen.clear()
            seconds.append(cpu_seconds(lambda: traced(plan.problem, plan.kernel, plan.arguments)))
    finally:
        observers.remove(seen.append)
    instructions = sum(profile.instructions for profile in seen)
    matmuls = sum(profile.opcodes.get("nc_matmul", 0) for profile in seen)
    return {
        "name": f"{plan.kernel}, timed under both DMA models",
        "instructions": instructions,
        "dmas_per_matmul": sum(profile.dma_count for profile in seen) / matmuls,
        "time_ms": sum(profile.time_ms for profile in seen),
        "cpu_s": min(seconds),
        "per_second": instructions / min(seconds),
        "scheduled_per_second": None,
    }


def _arrays(K: int, M: int, N: int) -> list[np.ndarray]:
    draw = np.random.default_rng(0)
    return [
        draw.standard_normal((K, columns), np.float32).astype(ml_dtypes.bfloat16)
        for columns in (M, N)
    ]


def values_ratio(name: str, K: int, M: int, N: int, repeats: int) -> dict[str, Any]:
    """CPU seconds of `tiled` in execute mode and of `tiled_numpy`, in pairs, each on one thread."""
    xt, w = _arrays(K, M, N)
    outputs = nc.simulate(tiled, xt, w, target=TARGET).outputs
    same = bool((outputs == tiled_numpy(xt, w)).all())
    times: list[tuple[float, ...]] = []
    for _ in range(repeats):
        pair = (
            lambda: nc.simulate(tiled, xt, w, target=TARGET),
            lambda: tiled_numpy(xt, w),
            lambda: _traced(K, M, N),
        )
        with threadpool_limits(1, "blas"):  # as a simulation has it
            times.append(tuple([cpu_seconds(work) for work in pair]))
    executed, plain, trace = [min(column) for column in zip(*times, strict=True)]
    return {
        "name": name, "same_values": same, "execute_s": executed, "numpy_s": plain,
        "trace_s": trace, "ratio": executed / plain,
        "ratio_without_trace": (executed - trace) / plain,
    }  # fmt: skip


def streamed(size: int, rows: int = 4096, columns: int = 4096) -> dict[str, Any]:
    """Peak of Python's memory while `size` bytes pass through SBUF, and what is live at once."""
    x = np.ones((rows, columns), ml_dtypes.bfloat16)
    rounds = max(1, size // x.nbytes)
    tracemalloc.start()
    try:
        done = nc.simulate(streams, x, rounds, target=TARGET)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (done.outputs == rounds * rows // PARTITIONS).all()
    profile = done.profile
    on_chip = PARTITIONS * (profile.sbuf_peak_bytes + profile.psum_peak_banks * PSUM_BANK_BYTES)
    return {
        "streamed_bytes": profile.dma_bytes,
        "instructions": profile.instructions,
        "peak_bytes": peak,
        "live_bytes": on_chip + done.outputs.nbytes,
        "peak_per_instruction_bytes": (peak - on_chip) / profile.instructions,
    }


def long(mode: str, K: int, M: int, N: int) -> dict[str, Any]:
    """CPU seconds of `tiled` at a size whose modelled time is 100 ms."""
    operands = _arrays(K, M, N) if mode == "execute" else [_spec(K, M), _spec(K, N)]
    profiles: list[nc.Profile] = []

    def work() -> None:
        done = nc.simulate(tiled, *operands, target=TARGET, mode=mode)  # pyright: ignore
        profiles.append(done.profile)

    seconds = cpu_seconds(work)
    profile = profiles[0]
    return {
        "mode": mode,
        "instructions": profile.instructions,
        "flops": profile.flops,
        "time_ms": profile.time_ms,
        "cpu_s": seconds,
    }
