"""`compress`: load a model, calibrate, compress, verify and save it."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from neuronmm_ops.compress import CompressionReport, LayerReport, SVDConfig, compress_, workers
from neuronmm_ops.compress.batches import check_ids
from neuronmm_ops.compress.budget import shares_budget
from neuronmm_ops.compress.calibrate import Progress
from neuronmm_ops.compress.pipeline import check_storage, rank_limits
from neuronmm_ops.compress.record import low_rank_layers
from neuronmm_ops.compress.targets import select_targets
from neuronmm_ops.eval import block_length
from neuronmm_ops.hf.computing import AUTO, check_device, computing_in, dtype_of, load_on
from neuronmm_ops.hf.loading import load_tokenizer, local_directory
from neuronmm_ops.hf.provenance import CalibrationSource, CompressionRun, ModelSource
from neuronmm_ops.hf.saving import save
from neuronmm_ops.hf.streaming.checkpoint import Checkpoint
from neuronmm_ops.hf.streaming.compress import check_streamable, compress_stream
from neuronmm_ops.hf.text import Order, calibration_batches, read_text
from neuronmm_ops.nn import dense_linears
from neuronmm_ops.nn.dense_linear import DenseLinear
from neuronmm_ops.nn.storage import factor_bytes
from neuronmm_ops.ops.backends.cpu import name_of
from neuronmm_ops.output import check_target

DEFAULT_SAMPLES = 128
DEFAULT_SHARD_SIZE = "50GB"


def compress(
    model: str | Path,
    config: SVDConfig | None,
    text: str | Path | None,
    output: str | Path,
    *,
    samples: int = DEFAULT_SAMPLES,
    seqlen: int | None = None,
    order: Order = "spread",
    dtype: str = AUTO,
    device: torch.device | str = "cpu",
    force: bool = False,
    max_shard_size: int | str = DEFAULT_SHARD_SIZE,
    stream: bool = False,
    progress: Progress | None = None,
) -> CompressionReport:
    """Compress a model and write it as a Transformers directory that `hf.load` takes.

    Everything that can be checked beforehand is: the target, the room on its disk, the text.
    The checkpoint has the dtype of the model whatever was computed in, and what is not compressed
    is written bit for bit. Its `compression.json` says how to run this again, see `CompressionRun`.
    In a block of `workers.together` the work is shared by many processes, of which the first alone
    looks at the target, writes it and tells of progress.

    Args:
        model: a local directory, or a hub id.
        config: what to do; None is `SVDConfig()`.
        text: to calibrate on, or the Path of a file with it, see `read_text`; not needed by method
            `plain`.
        output: the directory to write; it must not exist, or `force`.
        samples: calibration blocks.
        seqlen: tokens in a block; default the smaller of 2048 and the model's limit.
        order: of the calibration blocks, see `calibration_batches`.
        dtype: to compute in: `float32`, `bfloat16`, `float16`, or `auto`, the model's own where
            the device multiplies that fast and otherwise float32.
        device: to compute on.
        force: replace an existing compressed checkpoint.
        max_shard_size: of one file of weights, in bytes or as `5GB`.
        stream: hold one decoder layer in memory at a time, and go on where a killed run of the same
            has stopped: what it has done is beside the output, in `.NAME.stream`. Files of weights
            are no larger than a layer.
        progress: called with (stage, done, total); stages are load, gradients (where a method or
            its importance needs them), calibrate, factorize, probe (importance `perplexity`), drift
            (method `drift`), quantize (of one-byte storage, after a second calibrate) and save.
            Where moments fill memory, calibrate and factorize take turns; streamed, factorize
            and quantize calibrate too.

    Returns:
        What `compress_` reports, with the calibration's order, samples and seqlen, and the
        compute dtype in the provenance.

    Raises:
        CheckpointError: the model cannot be loaded.
        FileExistsError: the target exists and may not be replaced.
        OSError: the target cannot be written.
        ValueError: an argument is out of range, or the model is of a kind that is not supported.
        NonFiniteError: a weight or an activation is NaN or Inf.
    """
    config = config or SVDConfig()
    if config.needs_calibration and text is None:
        raise ValueError(f"{config.calibrated_by} needs a calibration text; or use method plain")
    text_path = text if isinstance(text, Path) else None
    text = read_text(text) if isinstance(text, Path) else text
    _check_shard_size(max_shard_size)
    place = check_device(device)
    target = Path(output)
    source = Path(model) if Path(model).is_dir() else None
    workers.only_first(lambda: check_target(target, force, source))

    if workers.index() > 0:
        progress = None
    tell = progress or (lambda stage, done, total: None)
    if stream and workers.count() > 1:
        raise ValueError("--stream runs in one process; start it without torchrun")
    if stream:
        check_streamable(config)
    tell("load", 0, 1)
    checkpoint = Checkpoint(local_directory(model)) if stream else None
    loaded = checkpoint.model if checkpoint else load_on(model, place)
    tokenizer = load_tokenizer(model)
    tell("load", 1, 1)
    if getattr(loaded.config, "quantization_config", None) is not None:
        raise ValueError(f"{model} is compressed or quantized already; start from dense")
    compute = dtype_of(dtype, loaded, place)
    if checkpoint is None:
        needed = _bytes_after(loaded, config)
        workers.only_first(lambda: check_target(target, force, source, needed))

    batches: list[Tensor] | None = None
    calibration: dict[str, Any] = {}
    blocks: CalibrationSource | None = None
    if config.needs_calibration and text is not None:
        seqlen = block_length(loaded, seqlen)
        batches = calibration_batches(tokenizer, text, samples, seqlen, order)
        check_ids(loaded, torch.cat(batches), "calibration text")
        batches = [batch.to(place) for batch in batches]
        taken = sum(len(batch) for batch in batches)
        calibration = {"order": order, "samples": taken, "seqlen": seqlen}
        blocks = CalibrationSource.of(text_path, text, samples, seqlen, order)

    def describe() -> CompressionRun:
        return CompressionRun(
            model=ModelSource.of(model),
            config=config,
            calibration=blocks,
            dtype=dtype,
            compute_dtype=name_of(compute),
            device=str(place),
            max_shard_size=max_shard_size,
        )

    if checkpoint:
        return compress_stream(
            checkpoint,
            config,
            batches or [],
            target,
            calibration=calibration,
            tokenizer=tokenizer,
            run=describe(),
            compute=compute,
            device=place,
            force=force,
            max_shard_size=_bytes_of(max_shard_size),
            progress=tell,
        )
    # Its hash reads every file of the model, and worker 0 alone writes it.
    run = describe() if workers.index() == 0 else None
    dtypes = _dtypes(dense_linears(loaded))
    with computing_in(loaded, compute):
        report = compress_(loaded, config, batches, progress, dtypes=dtypes)
    report = _as_stored(report, loaded).with_run(calibration, name_of(compute))

    tell("save", 0, 1)
    workers.only_first(lambda: save(loaded, target, report, tokenizer, force, max_shard_size, run))
    tell("save", 1, 1)
    return report


def _as_stored(report: CompressionReport, model: PreTrainedModel) -> CompressionReport:
    """Return the report with bytes of the dtype that the model is in, not of that computed in."""
    modules = {**dense_linears(model), **low_rank_layers(model)}
    layers = tuple(
        LayerReport.of(layer.name, modules[layer.name], layer.r, layer.loss, layer.reason)
        for layer in report.layers
    )
    return replace(report, layers=layers)


def _bytes_after(model: PreTrainedModel, config: SVDConfig) -> int:
    """Return the most bytes that the allocation may leave; a budget of time limits none."""
    linears = select_targets(model, config).linears
    dtypes = _dtypes(linears)
    check_storage(config, linears, dtypes)
    limits = rank_limits(config, linears, dtypes)
    total = sum(parameter.nbytes for parameter in model.parameters())
    for name, linear in linears.items():
        K, N = linear.in_features, linear.out_features
        dense = linear.weight.nbytes
        limit = limits[name]
        if limit is None:
            continue
        if not shares_budget(config, name):
            total -= dense - factor_bytes(K, N, limit, dense // (K * N), config.one_byte)
        elif config.budget != "time":
            total -= int(config.ratio * dense)
    return total


def _dtypes(linears: Mapping[str, DenseLinear]) -> dict[str, torch.dtype]:
    return {name: linear.weight.dtype for name, linear in linears.items()}


def _check_shard_size(size: int | str) -> None:
    # Transformers reads sizes of this form, and would refuse another only after the compression.
    if isinstance(size, str):
        is_valid = re.fullmatch(r"0*[1-9]\d*(\.\d+)?[KMGT]B", size, re.IGNORECASE) is not None
    else:
        is_valid = size >= 1
    if not is_valid:
        raise ValueError(f"max_shard_size must be a size such as 5GB, 500MB or 1.5GB; got {size!r}")


def _bytes_of(size: int | str) -> int:
    """Return a size in bytes, as Transformers reads it."""
    if isinstance(size, int):
        return size
    return int(float(size[:-2]) * 1000 ** (1 + "KMGT".index(size[-2].upper())))
