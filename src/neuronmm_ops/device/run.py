"""`device-check`: the programme on a device, step by step, each row in a bounded time."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from neuroncore.boundary import TensorSpec
from neuroncore.calibration import cases as microkernels
from neuroncore.calibration.published import PUBLISHED, published
from neuroncore.hardware import instance_type
from neuronmm_ops.compress.calibrate import Progress
from neuronmm_ops.device import layer, model, page
from neuronmm_ops.device.predictions import Prediction, frozen
from neuronmm_ops.device.programme import KernelCase, kernel_cases
from neuronmm_ops.device.record import PAGE, Finding, Record, Step, resume, save
from neuronmm_ops.device.runners import OpKernel, Runner
from neuronmm_ops.device.values import (
    error_ratio,
    factors,
    op_error_ratio,
    operands,
    product_error_ratio,
)
from neuronmm_ops.device.worker import Worker
from neuronmm_ops.doctor import diagnose
from neuronmm_ops.kernels import source_fingerprint
from neuronmm_ops.ops.backends.launch import PLANNED
from neuronmm_ops.ops.definitions import SPECS
from neuronmm_ops.processes import locked

SHARES: Mapping[Step, float] = {
    "profiled": 0.1,
    "microkernels": 0.35,
    "kernels": 0.3,
    "layers": 0.15,
    "model": 0.1,
}
"""Of the minutes, in order; what a step leaves is the next one's."""
ROW_S = 240.0
"""For a row: compilers take minutes."""
WRONG = 1.2
"""`error_ratio` up to which values are right."""

LAYERS = (1, 2, 4, 16)
LAYER = "svd_mlp of Llama-3.2-1B, M=1, bf16"
"""What follows itself in a graph: the slope is a layer, the intercept what a graph costs."""
MODEL = {
    "prefill": f"prefill of {model.PROMPT} tokens until its logits are on the CPU",
    "decode": f"decode of a token, median of {model.NEW}, until its logits are on the CPU",
}
"""Rows of the demo model."""

SETTINGS = ("NEURON", "NKI_", "XLA_", "PJRT_")
"""Environment variables that the record keeps begin so."""


class Found(NamedTuple):
    """us from one launch to the next, the error ratio where values are compared, and a remark."""

    time_us: float
    error_ratio: float | None = None
    remark: str = ""


@dataclass(frozen=True)
class Item:
    """A row to be: what the worker calls for it, and what was predicted."""

    step: Step
    name: str
    lnc: int
    function: Callable[..., Found]
    arguments: tuple[Any, ...]
    prediction: Prediction | None


def run(
    directory: Path, minutes: float, runner: Runner, progress: Progress | None = None
) -> dict[str, Any]:
    """Run what is missing of the programme, and write the record and the page.

    Args:
        directory: made where it is missing.
        minutes: for this call; a later one goes on.
        runner: the device.
        progress: called with (step, rows done, rows in all).

    Returns:
        `page.summary` of the record, with `output`, and `missing`, how many rows time did not
        suffice for.

    Raises:
        OSError: the directory cannot be written, or another run works in it.
        ValueError: `minutes` is no positive number, or the directory holds another record.
    """
    if not 0 < minutes < math.inf:
        raise ValueError(f"--minutes must be a number above 0, got {minutes:g}")
    directory.mkdir(parents=True, exist_ok=True)
    with locked(directory):
        record = resume(_new(runner), directory)
        save(record, directory)
        items = programme(runner.target)
        for longer in _measured(record, items, minutes, runner, progress):
            record = longer
            save(record, directory)
        summary = page.summary(record)
        missing = len(items) - len(record.rows)
        (directory / PAGE).write_text(page.text(record, summary, missing), encoding="utf-8")
    return {"output": str(directory), **summary, "missing": missing}


def programme(target: str) -> list[Item]:
    """All rows of a target, step by step, those on one core first."""
    rows = frozen().rows[target]
    cases = microkernels.cases(target)
    items = [
        Item("profiled", each.name, each.lnc, measure_profiled, (each.name,), rows[each.name])
        for each in reversed(published(target))  # the shortest first
    ]
    items += [
        Item("microkernels", each.name, each.lnc, measure_small, (each.name,), rows[each.name])
        for each in sorted(cases, key=lambda case: case.lnc)
    ]
    for case in kernel_cases(target):
        prediction = rows[case.name]
        call = measure_kernel, (case, prediction)
        items.append(Item("kernels", case.name, case.problem.lnc, *call, prediction))
    (layer,) = [case for case in kernel_cases(target) if case.name == LAYER]
    for layers in LAYERS:
        prediction = rows[LAYER].times(layers)
        call = measure_layers, (layer, layers)
        items.append(Item("layers", f"{layers} of {LAYER}", 1, *call, prediction))
    for phase, name in MODEL.items():
        items.append(Item("model", name, 1, measure_model, (phase,), None))
    return items


def _new(runner: Runner) -> Record:
    diagnosis = diagnose()
    versions = {name: version for name, version in diagnosis["versions"].items() if version}
    predicted = {"commit": frozen().commit, "source": frozen().source}
    settings = {name: os.environ[name] for name in os.environ if name.startswith(SETTINGS)}
    machine = {**diagnosis, "instance": instance_type(), "variables": settings}
    return Record(runner.target, runner.name, versions, predicted, machine)


def _measured(
    record: Record,
    items: list[Item],
    minutes: float,
    runner: Runner,
    progress: Progress | None,
) -> Iterator[Record]:
    """The record after each row that time suffices for."""
    worker, deadline = Worker(runner), time.monotonic()
    try:
        for step, share in SHARES.items():
            deadline += 60 * minutes * share
            of_step = [item for item in items if item.step == step]
            for done, item in enumerate(of_step, 1):
                if not record.has(step, item.name):
                    row = _row(item, worker, deadline - time.monotonic())
                    if row is None:
                        break
                    record = record.with_row(row)
                    yield record
                if progress is not None:
                    progress(step, done, len(of_step))
    finally:
        worker.end()


def _row(item: Item, worker: Worker, left_s: float) -> Finding | None:
    """The row of an item; None where the time for its step ends before."""
    if left_s <= 0:
        return None

    def failed(status: Any, error: Exception) -> Finding:
        return Finding(item.step, item.name, status, item.prediction, str(error))

    try:
        limit_s = min(ROW_S, left_s)
        time_us, ratio, remark = worker.call(item.lnc, limit_s, item.function, *item.arguments)
    except TimeoutError as error:
        return None if left_s < ROW_S else failed("late", error)
    except ChildProcessError as error:
        return failed("lost", error)
    except RuntimeError as error:
        return failed("refused", error)
    if not (math.isfinite(time_us) and time_us > 0):
        return failed("refused", ValueError(f"a launch took {time_us:g} us by the clock"))
    finding = Finding(item.step, item.name, "measured", item.prediction, remark, time_us, ratio)
    if ratio is None or ratio <= WRONG:
        return finding
    reason = f"values are off by {ratio:.3g} times what their dtype excuses"
    finite = ratio if math.isfinite(ratio) else None
    return replace(finding, status="wrong", reason=reason, error_ratio=finite)


def measure_kernel(runner: Runner, case: KernelCase, prediction: Prediction) -> Found:
    """Launch an op's kernel with the arguments that were predicted."""
    problem = case.problem
    spec = SPECS[problem.op]
    kernel = OpKernel(problem.op, prediction.kernel, problem.lnc)
    choices = zip(spec.options, spec.defaults, strict=True)
    choices_of_op = {name: value for name, value in choices if name not in PLANNED}
    arguments = {
        **(prediction.arguments or {}),
        **choices_of_op,
        "fingerprint": source_fingerprint(),
    }
    if problem.op == layer.OP:
        tensors = layer.operands(problem)
        sample = runner.run(kernel, tensors, arguments)
        return Found(sample.time_us, layer.layer_error_ratio(problem, tensors, sample.outputs))
    tensors = operands(problem)
    sample = runner.run(kernel, tensors, arguments)
    return Found(sample.time_us, op_error_ratio(problem, tensors, sample.outputs[0]))


def measure_layers(runner: Runner, case: KernelCase, layers: int) -> Found:
    """Run an op so many times in a graph, with residuals; all layers read the same weights."""
    x, *weights = operands(case.problem)
    assert x is not None
    tensors = (x / 8, *weights)  # or the sums of many layers would leave bf16's range
    sample = runner.chain(case.problem.op, tensors, layers)
    ratio = op_error_ratio(case.problem, tensors, sample.outputs[0], layers)
    return Found(sample.time_us, ratio)


def measure_model(runner: Runner, phase: str) -> Found:
    """Run the demo model: its logits [passes, V] by the CPU's, its tokens by those in float32."""
    lm, pieces, piece = model.compressed(), model.pieces(), model.PHASES[phase]
    plain = model.reference(lm, pieces)[piece]
    exact = model.reference(deepcopy(lm).float(), pieces)[piece]
    samples = runner.passes(lm, pieces)[piece]
    actual = torch.cat([sample.outputs[0] for sample in samples])
    ratio = error_ratio(actual, exact.double(), plain)
    time_us = median([sample.time_us for sample in samples])
    return Found(time_us, ratio, model.first_other(actual, exact))


def measure_profiled(runner: Runner, name: str) -> Found:
    """Launch a kernel that AWS profiled."""
    case = next(each for each in PUBLISHED if each.name == name)
    tensors = factors(case)
    sample = runner.run(case, tensors, case.arguments)
    return Found(sample.time_us, product_error_ratio(case, tensors, sample.outputs[0]))


def measure_small(runner: Runner, name: str) -> Found:
    """Launch a microkernel, whose values are of no interest."""
    case = next(each for each in microkernels.cases(runner.target) if each.name == name)
    tensors = tuple([_zeros(spec) for spec in case.operands])
    return Found(runner.run(case, tensors, case.arguments).time_us)


def _zeros(spec: TensorSpec) -> torch.Tensor:
    return torch.zeros(spec.shape, dtype=getattr(torch, str(spec.dtype)))
