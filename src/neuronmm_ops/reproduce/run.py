"""`run`: do the cells of a reproduction that are not done, and write its tables."""

import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from neuronmm_ops import hf
from neuronmm_ops.checkpoint import read_config
from neuronmm_ops.errors import CheckpointError
from neuronmm_ops.eval.tasks import manager_of
from neuronmm_ops.hf.computing import check_device
from neuronmm_ops.hf.loading import local_directory
from neuronmm_ops.manifest import tensor_hashes, weights_sha256
from neuronmm_ops.progress import Update
from neuronmm_ops.reproduce import measure
from neuronmm_ops.reproduce.cells import Cell, Store, check_output, open_store
from neuronmm_ops.reproduce.config import Reproduction, check_files
from neuronmm_ops.reproduce.plan import Study, Variant, plan
from neuronmm_ops.reproduce.render import write_tables
from neuronmm_ops.reproduce.table import document_of

_Work = Callable[[], dict[str, Any]]


def run(
    asked: Reproduction,
    output: Path,
    progress: Update | None = None,
    tell: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Do what is not done yet, and write `results.json`, `table.md` and `report.html` in OUT.

    A killed run loses at most the cell in work; the next goes on. A cell that fails is told in one
    line, the others go on, and the next run tries it again.

    Args:
        asked: what to do.
        output: the directory OUT, made where it does not exist. `cells/` holds a file a result,
            `models/` the compressed checkpoints.
        progress: called with ("cells", done, in all, name of the next), and by the work in them.
        tell: called with a line for each failure.

    Returns:
        What `results.json` holds, see `table.document_of`.

    Raises:
        CheckpointError: the dense model is not there.
        OSError: OUT cannot be written, is of something else, or another run works in it.
        ValueError: a text, a task or the device is not to be had.
    """
    check_output(output)
    check_files(asked)
    check_device(asked.model.device)
    read_config(local_directory(asked.model.id))
    planned, known = plan(asked), Store(output)
    tasks = {cell.subject for cell in planned.cells if cell.kind == "task" and not known.read(cell)}
    measure.check_methods(asked)
    if tasks:
        manager_of(sorted(tasks), asked.evaluate.include)
    with open_store(output) as store:
        return _Run(asked, planned, store, progress, tell).all()


class _Run:
    def __init__(
        self,
        asked: Reproduction,
        planned: Study,
        store: Store,
        progress: Update | None,
        tell: Callable[[str], None] | None,
    ) -> None:
        self.asked, self.plan, self.store = asked, planned, store
        self.progress = progress or (lambda stage, done, total, note="": None)
        self.tell = tell or (lambda line: None)
        self.results: dict[str, dict[str, Any]] = {}
        self.failed: dict[str, str] = {}
        self.not_run: set[str] = set()
        self.reused: set[str] = set()
        self.verified: set[str] = set()  # steps whose checkpoint is the one that was written
        self.loaded: tuple[Path | str, Any] | None = None
        for cell in planned.cells:
            result = store.read(cell)
            if result is not None:
                self.results[cell.key] = result
                self.reused.add(cell.key)
            elif store.path(cell).exists():
                file = store.path(cell)
                self.tell(f"warning: {file} is not what was written; {cell.name} is done again")

    def all(self) -> dict[str, Any]:
        """Do every variant; return the document."""
        document = self._written()
        for index, variant in enumerate(self.plan.variants):
            self._variant(variant)
            document = self._written()
            following = self.plan.variants[index + 1 : index + 2]
            if not any(other.recovered for other in following):
                self._drop(variant)
        self.progress("cells", len(self.plan.cells), len(self.plan.cells))
        return document

    def _variant(self, variant: Variant) -> None:
        if any(step.key not in self.results for step in variant.steps):
            self._checkpoint(variant, variant.steps)
        for cell in variant.cells:
            if cell.key in self.results or cell.key in self.failed:
                continue
            if cell.kind == "modelled":
                assert variant.config is not None
                work = partial(measure.modelled, self.asked, variant.config, self.progress)
                self._attempt(cell, work)
                continue
            directory = self._checkpoint(variant, variant.steps)
            if directory is None:
                self.not_run.add(cell.key)
            else:
                self._attempt(cell, partial(self._measured, cell, directory))
        self.loaded = None

    def _checkpoint(self, variant: Variant, steps: tuple[Cell, ...]) -> Path | str | None:
        """Return the directory of a variant's model, made by its steps; None where one failed."""
        if not steps:
            return self.asked.model.id
        *earlier, step = steps
        target = self.store.models / step.stem
        if step.key in self.results and self._is_whole(step, target):
            return target
        if step.key in self.failed:
            return None
        base = self._checkpoint(variant, tuple(earlier))
        if base is None:
            self.not_run.add(step.key)
            return None
        self.loaded, before = None, self.results.get(step.key)  # room for the work
        if not self._attempt(step, self._making(variant, step, base, target)):
            return None
        if before and before["weights_sha256"] != self.results[step.key]["weights_sha256"]:
            self.tell(
                f"warning: {step.name} was made again and has other weights; what was measured of "
                "the former is kept"
            )
        return target

    def _is_whole(self, step: Cell, target: Path) -> bool:
        """Say whether a checkpoint is there with the weights that were written, hashed once."""
        if not target.is_dir():
            return False
        if step.key not in self.verified:
            try:
                written = weights_sha256(tensor_hashes(target))
            except CheckpointError:
                written = ""
            if written != self.results[step.key]["weights_sha256"]:
                self.tell(f"warning: {target} is not what was written; {step.name} is done again")
                return False
            self.verified.add(step.key)
        return True

    def _attempt(self, cell: Cell, work: _Work) -> bool:
        """Do the work and write its result; note a failure, and say whether there was none."""
        done = len(self.results) + len(self.failed) + len(self.not_run)
        self.progress("cells", done, len(self.plan.cells), cell.name)
        start = time.perf_counter()
        try:
            result = work()
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            self.failed[cell.key] = reason
            self.tell(f"{cell.name} failed: {reason}")
            return False
        # Where a result cannot be written, none can: that ends the run.
        self.store.write(cell, result, time.perf_counter() - start)
        self.results[cell.key] = result
        self.reused.discard(cell.key)
        self.verified.add(cell.key)
        return True

    def _making(self, variant: Variant, step: Cell, base: Path | str, target: Path) -> _Work:
        written = target, self.progress
        if step.kind == "recover":
            assert self.plan.recovery is not None
            return partial(measure.recover, self.asked, Path(base), self.plan.recovery, *written)
        assert variant.config is not None
        text = self.plan.calibration
        return partial(measure.compress, self.asked, variant.config, text, *written)

    def _measured(self, cell: Cell, directory: Path | str) -> dict[str, Any]:
        options = self.asked.model
        if cell.kind == "measured":
            dense = hf.load_computing(options.id, options.dtype, options.device)
            return measure.measured(self.asked, dense, self._model(directory), self.progress)
        take = measure.perplexity if cell.kind == "perplexity" else measure.task
        model = self._model(directory)
        return take(self.asked, model, directory, cell.subject, self.progress)

    def _model(self, directory: Path | str) -> Any:
        """Return the model, loaded once for all cells of a variant."""
        if self.loaded is None or self.loaded[0] != directory:
            self.loaded = None
            options = self.asked.model
            model = hf.load_computing(directory, options.dtype, options.device)
            self.loaded = directory, model
        return self.loaded[1]

    def _drop(self, variant: Variant) -> None:
        """Remove the variant's checkpoints, if they are not to be kept and all is measured."""
        siblings = [v for v in self.plan.variants if v.steps[:1] == variant.steps[:1]]
        is_done = all(c.key in self.results for v in siblings for c in (*v.steps, *v.cells))
        if is_done and not self.asked.compress.keep:
            for step in variant.steps:
                shutil.rmtree(self.store.models / step.stem, ignore_errors=True)

    def _written(self) -> dict[str, Any]:
        document = document_of(
            self.asked, self.plan, self.results, self.reused, self.failed, self.not_run
        )
        write_tables(document, self.store)
        return document
