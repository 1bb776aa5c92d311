"""`compress`: load a model, calibrate, compress, verify and save it."""

import re
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from neuronmm_ops.checkpoint import read_config
from neuronmm_ops.compress import CompressionReport, SVDConfig, workers
from neuronmm_ops.compress.calibrate import Progress
from neuronmm_ops.compress.compare import candidates, described, nearest
from neuronmm_ops.compress.pipeline import compress_layers
from neuronmm_ops.compress.source import LayersInMemory
from neuronmm_ops.hf.calibration import calibration_of
from neuronmm_ops.hf.computing import AUTO, check_device, computing_in, dtype_of, load_on
from neuronmm_ops.hf.loading import load_tokenizer, local_directory
from neuronmm_ops.hf.provenance import CalibrationSource, CompressionRun, ModelSource
from neuronmm_ops.hf.saving import save
from neuronmm_ops.hf.streaming.checkpoint import Checkpoint
from neuronmm_ops.hf.streaming.source import LayersOnDisk, check_streamable
from neuronmm_ops.hf.text import Order, read_text
from neuronmm_ops.nn import dense_linears
from neuronmm_ops.ops.backends.cpu import name_of
from neuronmm_ops.output import check_target, work_directory

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
    compare: bool = False,
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
            has stopped: what it has done is next to the output, in `.NAME.stream`. Files of weights
            are no larger than a layer.
        compare: try what else costs no more too, see `compare.candidates`, and take what diverges
            least from the dense model on blocks kept apart; the report has the config taken, and
            its provenance every divergence in nats a token as `compared`.
        progress: called with (stage, done, total); stages are load, gradients (where a method or
            its importance needs them), calibrate, factorize, probe (importance `perplexity`),
            measure (storage `auto`, after a second calibrate), drift (method `drift`), quantize (of
            one-byte storage, after one more calibrate), compare and save. Where moments fill
            memory, calibrate and factorize take turns; streamed, factorize and quantize calibrate
            too.

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
    shard_bytes = _shard_bytes(max_shard_size)
    device = check_device(device)
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
    if compare and (stream or not config.needs_calibration):
        raise ValueError(
            "compare holds two models and runs calibration text; leave --stream out, and use a "
            f"method other than plain: got {'--stream' if stream else config.method}"
        )
    tell("load", 0, 1)
    directory = local_directory(model)
    if read_config(directory).get("quantization_config") is not None:
        raise ValueError(f"{model} is compressed or quantized already; start from dense")
    checkpoint = Checkpoint(directory) if stream else None
    loaded = checkpoint.model if checkpoint else load_on(model, device)
    tokenizer = load_tokenizer(model)
    tell("load", 1, 1)
    compute = dtype_of(dtype, loaded, device)
    batches: list[Tensor] | None = None
    calibration: dict[str, Any] = {}
    blocks: CalibrationSource | None = None
    if config.needs_calibration and text is not None:
        asked = (text, text_path, samples, seqlen, device, order)
        batches, blocks = calibration_of(loaded, tokenizer, *asked)
        taken = sum(len(batch) for batch in batches)
        calibration = {"order": order, "samples": taken, "seqlen": blocks.seqlen}

    dtypes = {name: linear.weight.dtype for name, linear in dense_linears(loaded).items()}
    compared: dict[str, str] = {}
    if compare and batches:
        configs = candidates(loaded, config, dtypes)
        with computing_in(loaded, compute):
            config, divergences = nearest(loaded, configs, batches, progress, dtypes)
        compared = {"compared": described(configs, divergences)}

    dense_bytes = sum(parameter.nbytes for parameter in loaded.parameters())

    def check_room(added: int) -> None:
        needed = dense_bytes + added
        workers.only_first(lambda: check_target(target, force, source, needed))

    # Its hash reads every file of the model, and worker 0 alone writes it.
    run = None
    if workers.index() == 0:
        run = CompressionRun(
            model=ModelSource.of(model),
            config=config,
            calibration=blocks,
            dtype=dtype,
            compute_dtype=name_of(compute),
            device=str(device),
            max_shard_size=max_shard_size,
        )
    with ExitStack() as stack:
        if checkpoint and run:
            work, sha256 = work_directory(target), run.model.sha256
            layers = LayersOnDisk(checkpoint, compute, device, work, sha256, tell, check_room)
            stack.enter_context(layers)
            computing = nullcontext()
        else:
            layers = LayersInMemory(loaded, progress, dtypes, check_room)
            computing = computing_in(loaded, compute)
        with computing:
            report = compress_layers(layers, config, batches, only_text=True)
        run = run and replace(run, config=report.config or config)
        report = report.with_run(calibration, name_of(compute), compared)
        tell("save", 0, 1)
        values = layers.values() if isinstance(layers, LayersOnDisk) else None
        size = shard_bytes if values is None else min(shard_bytes, values.layer_bytes)
        workers.only_first(
            lambda: save(loaded, target, report, tokenizer, force, size, run, values=values)
        )
        tell("save", 1, 1)
    return report


def _shard_bytes(size: int | str) -> int:
    """Return `max_shard_size` in bytes, as Transformers reads it, but before any work is done."""
    if isinstance(size, str) and re.fullmatch(r"\d+(\.\d+)?[KMGT]B", size, re.IGNORECASE):
        value = int(float(size[:-2]) * 1000 ** (1 + "KMGT".index(size[-2].upper())))
    else:
        value = 0 if isinstance(size, str) else size
    if value < 1:
        raise ValueError(f"max_shard_size must be a size such as 5GB, 500MB or 1.5GB; got {size!r}")
    return value
