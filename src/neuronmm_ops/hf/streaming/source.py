"""The layers of a checkpoint on disk, as a source for the pipeline."""

import hashlib
import json
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
import transformers
from torch import Tensor, nn

from neuronmm_ops.compress.batches import Batch
from neuronmm_ops.compress.calibrate import Progress, collect_moments
from neuronmm_ops.compress.config import SVDConfig
from neuronmm_ops.compress.factorization import SecondMoment, Side
from neuronmm_ops.compress.factorize import gradient_shape
from neuronmm_ops.compress.gradients import MAX_TOKENS
from neuronmm_ops.compress.methods import METHODS
from neuronmm_ops.compress.pipeline import describe_batches
from neuronmm_ops.compress.prune import MLP, narrow_, narrowed_down, rows_of, text_config
from neuronmm_ops.compress.record import compressed_layers
from neuronmm_ops.compress.report import provenance_of
from neuronmm_ops.compress.side_by_side import SideBySide
from neuronmm_ops.compress.source import LayerSource, Task
from neuronmm_ops.compress.targets import select_targets
from neuronmm_ops.hf.streaming.checkpoint import Checkpoint
from neuronmm_ops.hf.streaming.gradients import sweep_gradients
from neuronmm_ops.hf.streaming.sweep import NamedLayer, Sweep
from neuronmm_ops.hf.streaming.work import Work, working_in
from neuronmm_ops.hf.streaming.writing import CompressedTensors
from neuronmm_ops.nn.dense_linear import as_dense_linear
from neuronmm_ops.ops.backends.cpu import name_of
from neuronmm_ops.rank import pair_bytes
from neuronmm_ops.storages import FACTORS, factor_bytes

# Of each stage the names of a layer's results, and of the hidden states that enter a layer.
_KEPT = {
    "prune": ("narrow", "wide"),
    "factorize": ("layer", "states"),
    "quantize": ("rounded", "again"),
    "drift": ("drift", "paths"),
}


def check_streamable(config: SVDConfig) -> None:
    """Raise ValueError where a config needs the whole model at once."""
    if config.is_mixed:
        raise ValueError(
            "storage auto cannot be streamed: it measures the whole model; use one storage, or "
            "compress without --stream"
        )
    if config.weighs_by == "perplexity":
        raise ValueError(
            "importance perplexity cannot be streamed: each probe runs the whole model; use "
            "importance gradient or error, or compress without --stream"
        )


class LayersOnDisk(LayerSource):
    """A checkpoint's layers, of which one has values at a time.

    Results go into a work directory, from which a killed run of the same goes on. The source is a
    context: at its end the work directory is removed where the block has succeeded.

    Args:
        checkpoint: the dense model.
        dtype: to compute in.
        device: to compute on.
        work: the work directory.
        model_sha256: of the checkpoint.
        progress: called with (stage, done, total); of stages `prune`, `factorize`, `drift` and
            `quantize` with layers, those that a run before has done being left out.
        check_room: as of `LayerSource`; not called where a run goes on.

    Raises:
        ValueError: layers cannot be run one by one.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        work: Path,
        model_sha256: str,
        progress: Progress,
        check_room: Callable[[int], object],
    ) -> None:
        super().__init__(checkpoint.model, progress, check_room)
        self._progress, self._checkpoint, self._dtype = progress, checkpoint, dtype
        self._device, self._directory, self._sha256 = device, work, model_sha256
        self._sweep = Sweep(checkpoint, dtype, device)
        self._context = ExitStack()
        self._results: dict[str, Tensor] = {}
        self._head: Sequence[str] = ()
        self._is_new, self._is_open = not work.exists(), False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)

    def narrow(
        self, config: SVDConfig, batches: Sequence[Batch], mlps: Mapping[str, MLP], kept: int
    ) -> None:
        """Sweep forward; from here on the checkpoint's MLPs are narrower. Raises as `prepare`."""
        for name in select_targets(self.model, config, only_text=True).linears:
            self._sweep.layer_of(name)  # or it says now, not a sweep later, that one is in none
        self._layer_of = {name: self._sweep.layer_of(name) for name in mlps}
        self._batches = [batch for batch in batches if isinstance(batch, Tensor)]
        numbers = kept * sum(mlp.down.out_features for mlp in mlps.values())
        self._open(config, numbers * self._dtype.itemsize + 2 * self._state_bytes)
        for name, weight, moment in self.measured("prune", dict.fromkeys(mlps, "input"), mlps):
            assert moment is not None
            columns, narrow, _ = narrowed_down(name, weight, moment, kept)
            self.keep("prune", name, {"columns": columns, "narrow": narrow})
        names = {module: name for name, module in self.model.named_modules()}
        for name, mlp in mlps.items():
            read = partial(self._work.tensor, f"{_KEPT['prune'][0]}-{self._layer_of[name]}")
            columns, inner = read(f"{name}.columns"), mlp.down.in_features
            for linear in mlp.into:
                rows = rows_of(columns, linear.out_features, inner)
                for leaf, _ in linear.named_parameters():
                    self._checkpoint.change(f"{names[linear]}.{leaf}", lambda w, r=rows: w[r])
            self._checkpoint.change(
                f"{name}.weight", lambda _, n=f"{name}.narrow", read=read: read(n)
            )
            narrow_(mlp, columns.to("meta"), mlp.down.weight[:, :kept])
        text_config(self.model).intermediate_size = kept

    def prepare(self, task: Task) -> None:
        """Read all of the checkpoint once, and open the work directory.

        Raises:
            ValueError: a Linear is in no layer, layers are not given `[B, T, H]`, or the work
                directory is another run's.
            NonFiniteError: a value is NaN or Inf in the dtype to compute in.
            OSError: the disk has too little room, or what is kept is damaged.
            BlockingIOError: another run works in the directory.
        """
        self._task, self._head = task, task.head
        self._layer_of = {
            name: len(self._sweep) if name in task.head else self._sweep.layer_of(name)
            for name in task.replaced
        }
        self._batches = [batch for batch in task.batches if isinstance(batch, Tensor)]
        self._open(task.config, self._work_bytes() - task.bytes_saved())

    def _open(self, config: SVDConfig, needed: int) -> None:
        """Check what a new run needs of the disk; what else is checked is so once."""
        if self._is_new:
            if self._batches and not self._is_open:
                self._sweep.check_states()
            self._check_room(needed)
        if not self._is_open:
            self._checkpoint.check_finite(self._dtype)
            run = self._run(config)
            self._work = self._context.enter_context(working_in(self._directory, run))
            self._is_open = True

    def gradients(self) -> Mapping[str, Tensor]:
        """Sweep forward and backward over the layers."""
        kinds, layer_of = self._task.kinds, self._layer_of
        sweep_gradients(self._sweep, kinds, layer_of, self._batches, self._work, self._progress)
        return _Gradients(self._work, layer_of, self._device)

    def measured(
        self, stage: str, sides: Mapping[str, Side], names: Collection[str]
    ) -> Iterator[tuple[str, Tensor, SecondMoment | None]]:
        """Sweep forward; yield the Linears of the layers that are not done."""
        kept, states = _KEPT[stage]
        if set(names) <= set(self._head):
            yield from self._measured_head(f"{kept}-{len(self._sweep)}", names)
            return
        count = 1 + max((self._layer_of[name] for name in names), default=-1)
        batches = self._batches if sides else ()
        for index in range(count):
            if not self._work.has(f"{kept}-{index}"):
                if batches and index == 0:
                    self._embed(states)
                inside = [name for name in names if self._layer_of[name] == index]
                self._results = {}
                with self._sweep.running(), self._sweep.layer(index) as layer:
                    leaving = f"{states}-{index + 1}" if index + 1 < count else None
                    run = _StreamedLayer(
                        self._sweep, index, layer, self._work, f"{states}-{index}", leaving
                    )
                    of_layer: dict[str, Side] = {n: sides[n] for n in inside if n in sides}
                    for name, moment in _moments(run, of_layer, inside, len(batches)):
                        linear = as_dense_linear(self.model.get_submodule(name))
                        yield name, linear.weight, moment
                # Last: it says that the layer is done.
                self._work.save(f"{kept}-{index}", self._results)
                self._progress(stage, index + 1, count)
            self._work.drop(f"{states}-{index}")
        self._work.drop(states)

    def _measured_head(
        self, kept: str, names: Collection[str]
    ) -> Iterator[tuple[str, Tensor, SecondMoment | None]]:
        """Yield the output head, behind the last layer, if it is not done."""
        if self._work.has(kept):
            return
        self._results = {}
        with self._sweep.with_ends():
            for name in names:
                yield name, as_dense_linear(self.model.get_submodule(name)).weight, None
        self._work.save(kept, self._results)

    def side_by_side(self, names: Collection[str]) -> Generator[SideBySide]:
        """Sweep forward; yield the layers that are not done."""
        kept, paths = _KEPT["drift"]
        sweep, count = self._sweep, self._sweep.stack.depth_of(names)
        for index in range(count):
            if not self._work.has(f"{kept}-{index}"):
                if index == 0:
                    self._embed(paths)
                self._results = {}
                with sweep.running(), sweep.layer(index):
                    if index > 0:
                        sweep.run_once(next(self._paths(index))[1])
                    layer = SideBySide(sweep.stack, index, partial(self._paths, index))
                    yield layer
                    leaving = layer.outputs() if index + 1 < count else ()
                    for number, (dense, after_drift) in enumerate(leaving):
                        both = {"dense": dense, "drifted": after_drift}
                        self._work.save(f"{paths}-{index + 1}-{number}", both)
                # Last: it says that the layer is done.
                self._work.save(f"{kept}-{index}", self._results)
                self._progress("drift", index + 1, count)
            self._work.drop(f"{paths}-{index}")
        self._work.drop(paths)

    def _paths(self, index: int) -> Iterator[tuple[Batch, Tensor, Tensor]]:
        for number in range(len(self._batches)):
            kept = self._work.load(f"{_KEPT['drift'][1]}-{index}-{number}")
            states = self._sweep.states(kept)  # one where both paths begin
            yield self._sweep.inputs(states[0]), states[0], states[-1]

    def keep(self, stage: str, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Keep a Linear's result until its layer is done; float factors in the dtype stored."""
        for leaf, tensor in tensors.items():
            if leaf in FACTORS and (stage == "factorize" or name not in self._task.stored):
                tensor = tensor.to(self._task.dtypes[name])
            self._results[f"{name}.{leaf}"] = tensor

    def kept(self, stage: str) -> dict[str, dict[str, Tensor]]:
        """Return all results; matrices and scales, which may not fit into memory, are on `meta`."""
        results: dict[str, dict[str, Tensor]] = {}
        for index in sorted(set(self._layer_of.values())):
            name = f"{_KEPT[stage][0]}-{index}"
            for key, tensor in (self._work.load(name) if self._work.has(name) else {}).items():
                layer, _, leaf = key.rpartition(".")
                is_small = leaf in ("spectrum", "scores", "loss")
                tensor = tensor.clone() if is_small else torch.empty_like(tensor, device="meta")
                results.setdefault(layer, {})[leaf] = tensor
        return results

    def factors(self, name: str) -> tuple[Tensor, Tensor]:
        """Read u and v of a Linear."""
        kept = f"{_KEPT['factorize'][0]}-{self._layer_of[name]}"
        u, v = (self._work.tensor(kept, f"{name}.{leaf}") for leaf in FACTORS)
        return u.to(self._device), v.to(self._device)

    def values(self) -> CompressedTensors:
        """Return the compressed model's tensors, each read when it is asked for."""
        ranks = {name: layer.rank for name, layer in compressed_layers(self.model).items()}
        sets = {
            name: f"{_KEPT[self._last_stage(name)][0]}-{self._layer_of[name]}" for name in ranks
        }
        layers = [self._sweep.stack[index] for index in range(len(self._sweep))]
        largest = max(sum(p.nbytes for p in layer.parameters()) for layer in layers)
        return CompressedTensors(self._checkpoint, self._work, sets, ranks, largest)

    def _last_stage(self, name: str) -> str:
        """Return the stage whose result takes a Linear's place."""
        if METHODS[self._task.config.method].follows_drift and name not in self._task.head:
            return "drift"
        return "quantize" if name in self._task.stored else "factorize"

    def _embed(self, states: str) -> None:
        """Keep the hidden states that enter the first layer."""
        with self._sweep.with_ends():
            for number, batch in enumerate(self._batches):
                self._work.save(f"{states}-0-{number}", {"states": self._sweep.embed(batch)})

    def _work_bytes(self) -> int:
        """Return the bytes that the work directory takes at most."""
        task, total = self._task, 0
        for name, linear in task.linears.items():
            K, N, rank = linear.in_features, linear.out_features, task.limits[name]
            factors = factor_bytes(K, N, rank, task.dtypes[name].itemsize)
            total += factors + 16 * min(K, N)
            if self._last_stage(name) == "drift" and name not in task.stored:
                total += factors
            if name in task.kinds:
                total += 8 * torch.Size(gradient_shape(task.kinds[name], K, N)).numel()
        for name, storage in task.stored.items():
            linear = task.targets[name]
            size = linear.in_features, linear.out_features
            total += max(pair_bytes(*size, r, 1, storage) for r in (None, task.limits.get(name)))
        paths = 1 + METHODS[task.config.method].follows_drift
        if task.kinds:
            # Of the gradient rows, what enters each layer and its gradient.
            rows = min(self._tokens, MAX_TOKENS)
            total += 2 * (len(self._sweep) + 1) * rows * self._sweep.width * 4
        return total + (2 * paths * self._state_bytes if METHODS[task.config.method].side else 0)

    @property
    def _tokens(self) -> int:
        return sum(batch.numel() for batch in self._batches)

    @property
    def _state_bytes(self) -> int:
        """Of the hidden states that enter a layer."""
        return self._tokens * self._sweep.width * 4

    def _run(self, config: SVDConfig) -> dict[str, Any]:
        """Return all that what is kept depends on, the values of the model's weights too."""
        config_json = (self._checkpoint.directory / "config.json").read_bytes()
        values = {
            "format": 4,
            "model": self._sha256,
            "config.json": hashlib.sha256(config_json).hexdigest(),
            "SVDConfig": config.to_dict(),
            "calibration": describe_batches(self._batches),
            "compute dtype": name_of(self._dtype),
            "versions": {
                **{k: v for k, v in provenance_of(self.model).items() if k != "model"},
                "transformers": transformers.__version__,
            },
        }
        return json.loads(json.dumps(values))


class _Gradients(Mapping[str, Tensor]):
    """The statistics that `sweep_gradients` has kept, each read when it is asked for."""

    def __init__(self, work: Work, layer_of: Mapping[str, int], device: torch.device) -> None:
        self._work, self._layer_of, self._device = work, layer_of, device

    def __getitem__(self, name: str) -> Tensor:
        return self._work.tensor(f"gradients-{self._layer_of[name]}", name).to(self._device)

    def __iter__(self) -> Iterator[str]:
        return iter(self._layer_of)

    def __len__(self) -> int:
        return len(self._layer_of)


class _StreamedLayer(nn.Module):
    """A layer as a model for `collect_moments`, whose batches are numbers of kept hidden states.

    What leaves the layer is kept for the next one.
    """

    def __init__(
        self,
        sweep: Sweep,
        index: int,
        layer: NamedLayer,
        work: Work,
        entering: str,
        leaving: str | None,
    ) -> None:
        super().__init__()
        self.layer = layer
        self._sweep, self._index, self._work = sweep, index, work
        self._entering, self._leaving = entering, leaving

    def get_submodule(self, target: str) -> nn.Module:
        """Return a module by its name in the whole model."""
        return self.layer.get_submodule(target)

    def forward(self, number: int) -> None:
        kept = self._work.load(f"{self._entering}-{number}")
        leaving = self._sweep.run(self._index, *self._sweep.states(kept))
        if self._leaving is not None:
            self._work.save(f"{self._leaving}-{number}", {"states": leaving})


def _moments(
    run: _StreamedLayer, sides: Mapping[str, Side], names: Sequence[str], count: int
) -> Iterator[tuple[str, SecondMoment | None]]:
    """Run a layer over all batches, and yield the moments of its Linears; or None for each."""
    if sides:
        yield from collect_moments(run, sides, [{"number": number} for number in range(count)])
        return
    for number in range(count):
        run(number)
    yield from ((name, None) for name in names)
