"""What benchmarks share: items measured in order, by one process or several."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

from neuronmm_ops.compress.calibrate import Progress
from neuronmm_ops.measure.runner import follow_parent

Item = TypeVar("Item")
Result = TypeVar("Result")
POOLED_FROM = 24
"""Items; fewer are measured before processes for them would have started."""


def run_all(
    stage: str,
    measure: Callable[[Item], Result],
    items: Sequence[Item],
    progress: Progress | None = None,
    workers: int = 1,
) -> list[Result]:
    """Measure every item and return the results in order.

    Args:
        stage: name of the benchmark.
        measure: called with one item; a function of a module, if there are several workers.
        items: what is measured.
        progress: called with (stage, items done, items in all) after each item.
        workers: processes; one where there are fewer than `POOLED_FROM` items.
    """
    results: list[Result] = []
    for result in _results(measure, items, workers):
        results.append(result)
        if progress is not None:
            progress(stage, len(results), len(items))
    return results


def _results(
    measure: Callable[[Item], Result], items: Sequence[Item], workers: int
) -> Iterator[Result]:
    if workers == 1 or len(items) < POOLED_FROM:
        yield from map(measure, items)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, initializer=follow_parent) as pool:
        yield from pool.map(measure, items)
