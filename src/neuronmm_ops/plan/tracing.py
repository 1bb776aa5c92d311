"""What a kernel costs: its trace on the simulated NeuronCore, without values."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

from neuroncore import Kernel, NkiValidationError, TensorSpec, simulate
from neuroncore.dtypes import dtype_of
from neuroncore.hardware import DMA_MODELS, PARTITIONS
from neuronmm_ops.kernels.knobs import Arguments, waits_for_serial_groups
from neuronmm_ops.kernels.problem import Problem
from neuronmm_ops.kernels.simulated import simulated_kernel

SHORT, LONG = 4, 8
"""Blocks of tokens that are traced of many: the last four take as long as any four that follow."""


@dataclass(frozen=True)
class Cost:
    """Of one launch; names as `Plan`'s. `instructions` are those that a compiler is given.

    `other_ms` is the first time at the other ends of uncertainties besides the DMA model.
    """

    times_ms: tuple[float, ...]
    hbm_bytes: int
    sbuf_bytes: int
    psum_banks: int
    bound: str
    instructions: int
    other_ms: tuple[float, ...] = ()

    def extended(self, longer: Cost, times: int) -> Cost:
        """What `longer` costs with what it has beyond this one so many times more."""

        def beyond(low_ms: tuple[float, ...], high_ms: tuple[float, ...]) -> tuple[float, ...]:
            both = zip(low_ms, high_ms, strict=True)
            return tuple([high + times * (high - low) for low, high in both])

        return replace(
            longer,
            times_ms=beyond(self.times_ms, longer.times_ms),
            other_ms=beyond(self.other_ms, longer.other_ms),
            hbm_bytes=longer.hbm_bytes + times * (longer.hbm_bytes - self.hbm_bytes),
            instructions=longer.instructions + times * (longer.instructions - self.instructions),
        )


def operands_of(problem: Problem, kernel: Kernel, repeats: int = 1) -> list[Any]:
    """Operands of a kernel in its order: x, `others` by name, weights and scales in turn.

    Or as `operands` in the op's folder has them, of so many in a launch.

    Raises:
        ValueError: the kernel has no parameter of that name.
    """
    own = import_module(f"neuronmm_ops.kernels.{problem.op}")
    if hasattr(own, "operands"):
        return own.operands(problem, repeats)
    x, storage = dtype_of(problem.dtype), problem.storage
    stored = dtype_of(storage.tensor_dtype) if storage else x
    shapes = [storage.shapes(*s) if storage else (s, ()) for s in problem.matrices]
    others = {name: (shape, dtype) for name, shape, dtype in problem.others}
    first = TensorSpec((problem.M, problem.K), x)
    weights = iter([first, *[TensorSpec(shape, stored) for shape, _ in shapes]])
    scales = iter([TensorSpec(shape, dtype_of("float32")) for _, shape in shapes])
    operands: list[Any] = []
    for name, parameter in inspect.signature(kernel.func).parameters.items():
        if name in others:
            shape, dtype = others.pop(name)
            sizes = tuple([problem.M if size < 0 else size for size in shape])
            operands.append(TensorSpec(sizes, dtype_of(dtype) if dtype else x))
        elif parameter.default is parameter.empty:
            operands.append(next(weights))
        elif parameter.default is not None:
            break
        else:
            is_scale = storage and name.endswith("_scale")
            operands.append(next(scales) if is_scale else None)
    if others:
        raise ValueError(f"{kernel.func.__name__} takes no {', '.join(others)}; leave it out")
    return operands


def traced(
    problem: Problem,
    name: str,
    arguments: Arguments,
    otherwise: Sequence[str] = (),
    most_ms: float = math.inf,
    repeats: int = 1,
) -> Cost | None:
    """What a launch of the kernel costs; None where the simulated core refuses it.

    Also where it takes more than `most_ms` by the first DMA model, as far as it is traced.
    `otherwise`: the uncertainties of `Cost.other_ms`; `repeats` as of `Knobs`. Of many
    blocks of tokens some are traced, with what is left of a whole number of them.
    """
    block = int(arguments.get("token_block", 0))
    blocks = problem.core_tokens[-1] // block if block else 0
    times = (blocks - LONG) // (LONG - SHORT)
    if times < 1 or block % PARTITIONS or arguments.get("device_loop"):
        return _traced(problem, name, arguments, otherwise, most_ms, repeats)
    step = problem.lnc * (LONG - SHORT) * block
    longer = replace(problem, M=problem.M - times * step)
    long = _traced(longer, name, arguments, otherwise, most_ms)
    if long is None:
        return None
    short = _traced(replace(longer, M=longer.M - step), name, arguments, otherwise)
    assert short is not None, f"{name} fits with more tokens, but not with fewer"
    return short.extended(long, times)


def _traced(
    problem: Problem,
    name: str,
    arguments: Arguments,
    otherwise: Sequence[str] = (),
    most_ms: float = math.inf,
    repeats: int = 1,
) -> Cost | None:
    kernel = simulated_kernel(problem.op, name, problem.lnc)
    operands = operands_of(problem, kernel, repeats)
    return trace(kernel, operands, problem.target, arguments, otherwise, most_ms)


def weighed(problem: Problem) -> tuple[str, ...]:
    """Uncertainties besides the DMA model that a plan of least regret is over."""
    serial = ("column-groups",) if waits_for_serial_groups(problem) else ()
    return ("matmul-issue", *serial)


def of_least_regret(times_ms: Sequence[tuple[float, ...]]) -> tuple[int, float]:
    """The first number whose worst share over the quickest, of all ends, is least, and it."""
    quickest = [min(times) for times in zip(*times_ms, strict=True)]
    regrets = [
        max([ms / least for ms, least in zip(times, quickest, strict=True)]) - 1
        for times in times_ms
    ]
    return regrets.index(min(regrets)), min(regrets)


def tracing(arguments: Arguments) -> dict[str, Any]:
    """Options of a trace: a kernel's arguments, and the ranks that it has if these say so."""
    tp = arguments.get("tp", 1)
    ranks: dict[str, Any] = {"ranks": tp, "alike_ranks": True} if tp > 1 else {}
    return {**arguments, **ranks, "mode": "trace"}


def trace(
    kernel: Kernel,
    operands: Sequence[Any],
    target: str,
    arguments: Arguments,
    otherwise: Sequence[str] = (),
    most_ms: float = math.inf,
) -> Cost | None:
    """What one launch costs; None as of `traced`, and where it needs the plans' reserve."""
    options: dict[str, Any] = {"target": target, **tracing(arguments)}
    try:
        run = simulate(kernel, *operands, **options)
    except NkiValidationError:
        return None
    profile = run.profile
    machine = profile.machine
    if profile.sbuf_peak_bytes > machine.planned_sbuf_bytes or profile.time_ms > most_ms:
        return None
    busy = {use.engine: use.busy_ms for uses in profile.engines for use in uses}
    dma_ms = max([max(core.dma_busy_ns) for core in profile.schedule.cores]) / 1e6
    return Cost(
        times_ms=tuple([profile.times_ms[model] for model in DMA_MODELS]),
        hbm_bytes=profile.hbm_bytes,
        sbuf_bytes=profile.sbuf_peak_bytes,
        psum_banks=profile.psum_peak_banks,
        bound="PE" if busy["TensorE"] >= dma_ms else "DMA",
        instructions=profile.stream_instructions,
        other_ms=tuple([profile.time_assuming(name) for name in otherwise]),
    )
