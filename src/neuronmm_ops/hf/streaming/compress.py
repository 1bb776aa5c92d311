"""`compress_stream`: a checkpoint in, its compressed form out, one decoder layer in memory."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from neuronmm_ops.compress.allocate import Rank
from neuronmm_ops.compress.batches import check_batches
from neuronmm_ops.compress.calibrate import Progress
from neuronmm_ops.compress.config import SVDConfig
from neuronmm_ops.compress.coverage import warn_of_coverage
from neuronmm_ops.compress.factorization import Gradient
from neuronmm_ops.compress.factorize import gradient_shape
from neuronmm_ops.compress.gradients import MAX_TOKENS
from neuronmm_ops.compress.importance import weights_of
from neuronmm_ops.compress.methods import METHODS
from neuronmm_ops.compress.nested import gradient_kinds
from neuronmm_ops.compress.pipeline import (
    check_budget,
    check_storage,
    choose_ranks,
    describe_batches,
    rank_limits,
    report_of_layers,
)
from neuronmm_ops.compress.quantize import empty_pair
from neuronmm_ops.compress.record import attach
from neuronmm_ops.compress.report import CompressionReport, provenance_of
from neuronmm_ops.compress.targets import Selection, select_targets
from neuronmm_ops.hf.provenance import CompressionRun, write_run
from neuronmm_ops.hf.saving import write_checkpoint
from neuronmm_ops.hf.streaming.checkpoint import Checkpoint
from neuronmm_ops.hf.streaming.factors import read_losses, sweep_factors, sweep_rounded
from neuronmm_ops.hf.streaming.gradients import sweep_gradients
from neuronmm_ops.hf.streaming.sweep import Sweep
from neuronmm_ops.hf.streaming.work import working_in
from neuronmm_ops.hf.streaming.writing import CompressedTensors, write_weights
from neuronmm_ops.manifest import Origin
from neuronmm_ops.nn.storage import factor_bytes
from neuronmm_ops.nn.swap import Factors, swap_modules_
from neuronmm_ops.ops.backends.cpu import name_of
from neuronmm_ops.output import check_target, work_directory


def check_streamable(config: SVDConfig) -> None:
    """Raise ValueError where a config needs the whole model at once."""
    if METHODS[config.method].follows_drift:
        raise ValueError(
            f"method {config.method} cannot be streamed: it runs dense and compressed layers side "
            "by side; use another method, or compress without --stream"
        )
    if config.weighs_by == "perplexity":
        raise ValueError(
            "importance perplexity cannot be streamed: each probe runs the whole model; use "
            "importance gradient or error, or compress without --stream"
        )


def compress_stream(
    checkpoint: Checkpoint,
    config: SVDConfig,
    batches: Sequence[Tensor],
    target: Path,
    *,
    calibration: Mapping[str, Any],
    tokenizer: Any,
    run: CompressionRun,
    compute: torch.dtype,
    device: torch.device,
    force: bool,
    max_shard_size: int,
    progress: Progress,
) -> CompressionReport:
    """Compress a checkpoint as `hf.compress` does, with one layer's values in memory at a time.

    What is done is kept beside the target, in `.NAME.stream`, until the target is complete: the
    same call goes on at the layer after the last that is done.

    Args:
        checkpoint: the dense model.
        config: which `check_streamable` has passed.
        batches: token ids `[B, T]`; none where the config needs no calibration.
        target: the directory to write.
        calibration: what the report says of the calibration besides.
        tokenizer: saved along.
        run: written beside the weights.
        compute: the dtype to compute in.
        device: to compute on.
        force: replace an existing compressed checkpoint.
        max_shard_size: of one file of weights in bytes; one layer's size, where that is less.
        progress: called with (stage, done, total).

    Raises:
        CheckpointError: a file of the checkpoint is gone; what was done is kept.
        ValueError: layers cannot be run one by one, a targeted Linear is in none, or no allocation
            meets the budget.
        NonFiniteError: a weight, an activation, a gradient or a factor is NaN or Inf.
        OSError: the disk has too little room, or the target cannot be written.
    """
    model = checkpoint.model
    selection = select_targets(model, config)
    dtypes = {name: linear.weight.dtype for name, linear in selection.linears.items()}
    check_storage(config, selection.linears, dtypes)
    limits = rank_limits(config, selection.linears, dtypes)
    warn_of_coverage(model, config, selection, limits, stacklevel=3)
    check_budget(config, selection.linears, limits, dtypes)
    sweep = Sweep(checkpoint, compute, device)
    plan = _Plan(sweep, config, selection, limits, batches)
    output = sum(parameter.nbytes for parameter in model.parameters())
    directory = work_directory(target)
    if not directory.exists():
        check_target(target, force, checkpoint.directory, output + plan.work_bytes())
    if batches:
        check_batches(model, batches)

    checkpoint.check_finite()
    with working_in(directory, _inputs(checkpoint, config, batches, compute, run)) as work:
        if plan.kinds:
            sweep_gradients(sweep, plan.kinds, batches, work, progress)
        if plan.ranks:
            sweep_factors(sweep, config, plan.ranks, batches, work, progress)
        read = {name: read_losses(work, *plan.places[name]) for name in plan.places}
        found = {name: nested for name, (nested, _) in read.items()}
        scales = {name: scale for name, (_, scale) in read.items() if scale is not None}
        weights = weights_of(model, config, selection.linears, found, scales, batches)
        ranks = dict(limits) | choose_ranks(config, selection.linears, found, weights, dtypes)
        low_rank = {name: rank for name, rank in ranks.items() if rank is not None}

        losses = {name: found[name].relative_loss(rank) for name, rank in low_rank.items()}
        report = report_of_layers(model, config, selection, limits, ranks, losses, batches)
        report = report.with_run(calibration, name_of(compute))
        pairs = {name: found[name].truncate(rank) for name, rank in low_rank.items()}
        factors: Mapping[str, Factors] = pairs
        if config.one_byte and low_rank:
            sweep_rounded(sweep, config, plan.chosen(low_rank), batches, work, progress)
            factors = {n: empty_pair(u, v, config.one_byte) for n, (u, v) in pairs.items()}
        swap_modules_(model, factors)
        attach(model, report)
        kept = "rounded" if config.one_byte else "layer"
        places = {name: (f"{kept}-{i}", inside) for name, (i, inside) in plan.places.items()}
        tensors = CompressedTensors(checkpoint, work, places, low_rank)
        size = min(max_shard_size, plan.layer_bytes())
        progress("save", 0, 1)

        def write(temporary: Path) -> None:
            write_weights(model, tensors, temporary, size)

        def describe(temporary: Path, weights: str) -> Origin:
            write_run(temporary, run, weights)
            return run.origin

        write_checkpoint(
            model,
            target,
            write,
            describe,
            tokenizer,
            force,
            output,
            tensors,
        )
        progress("save", 1, 1)
    return report


class _Plan:
    """What is to be done in which layer.

    Attributes:
        places: name of each Linear that may get a rank to its layer, and its name in that.
        ranks: layer to name in it to the largest rank.
        kinds: layer to name in it to the gradient statistic that it needs.
    """

    def __init__(
        self,
        sweep: Sweep,
        config: SVDConfig,
        selection: Selection,
        limits: Mapping[str, Rank],
        batches: Sequence[Tensor],
    ) -> None:
        self._sweep, self._batches, self._linears = sweep, batches, selection.linears
        self._one_byte = config.one_byte
        self._follows_states = METHODS[config.method].side is not None
        self.places: dict[str, tuple[int, str]] = {}
        self.ranks: dict[int, dict[str, int]] = {}
        self.kinds: dict[int, dict[str, Gradient]] = {}
        linears = {n: m for n, m in selection.linears.items() if limits[n] is not None}
        kinds = gradient_kinds(config, linears)
        for name in linears:
            rank = limits[name]
            assert rank is not None
            index, inside = self.places[name] = _place(sweep, name)
            self.ranks.setdefault(index, {})[inside] = rank
            if name in kinds:
                self.kinds.setdefault(index, {})[inside] = kinds[name]

    def chosen(self, low_rank: Mapping[str, int]) -> dict[int, dict[str, int]]:
        """Return layer to name in it to rank, of the Linears that have been given one."""
        ranks: dict[int, dict[str, int]] = {}
        for name, rank in low_rank.items():
            index, inside = self.places[name]
            ranks.setdefault(index, {})[inside] = rank
        return ranks

    def layer_bytes(self) -> int:
        """Return the bytes of the largest layer."""
        stack = self._sweep.stack
        return max(
            sum(parameter.nbytes for parameter in stack[index].parameters())
            for index in range(len(stack))
        )

    def work_bytes(self) -> int:
        """Return the bytes that the work directory takes at most."""
        total = 0
        for name, (index, inside) in self.places.items():
            linear, rank = self._linears[name], self.ranks[index][inside]
            K, N = linear.in_features, linear.out_features
            total += rank * (K + N) * linear.weight.element_size() + 16 * min(K, N)
            if self._one_byte:
                total += factor_bytes(K, N, rank, 1, self._one_byte)
            if index in self.kinds:
                shape = gradient_shape(self.kinds[index][inside], K, N)
                total += 8 * torch.Size(shape).numel()
        tokens = sum(batch.numel() for batch in self._batches)
        hidden = self._sweep.width * 4
        if self.kinds:
            # Of the gradient rows, what enters each layer and its gradient.
            total += 2 * (len(self._sweep) + 1) * min(tokens, MAX_TOKENS) * hidden
        return total + (2 * tokens * hidden if self._follows_states else 0)


def _place(sweep: Sweep, name: str) -> tuple[int, str]:
    """Return the layer that a Linear is in, and its name there."""
    prefix = f"{sweep.stack.name}."
    index, _, inside = name.removeprefix(prefix).partition(".")
    if not name.startswith(prefix):
        raise ValueError(
            f"{name} is in none of {sweep.stack.name}, which are all that is streamed; leave it "
            "out of the targets, or compress without --stream"
        )
    return int(index), inside


def _inputs(
    checkpoint: Checkpoint,
    config: SVDConfig,
    batches: Sequence[Tensor],
    compute: torch.dtype,
    run: CompressionRun,
) -> dict[str, Any]:
    """Return all that what is kept depends on, the values of the model's weights too."""
    config_json = (checkpoint.directory / "config.json").read_bytes()
    values = {
        "format": 2,
        "model": run.model.sha256,
        "config.json": hashlib.sha256(config_json).hexdigest(),
        "SVDConfig": config.to_dict(),
        "calibration": describe_batches(batches),
        "compute dtype": name_of(compute),
        "versions": {
            **{k: v for k, v in provenance_of(checkpoint.model).items() if k != "model"},
            "transformers": transformers.__version__,
        },
    }
    return json.loads(json.dumps(values))
