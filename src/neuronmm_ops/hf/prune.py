"""`prune`: a dense model in, the same with narrower MLPs out."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from neuronmm_ops.checkpoint import read_config
from neuronmm_ops.compress.calibrate import Progress
from neuronmm_ops.compress.prune import prune_
from neuronmm_ops.hf.calibration import calibration_of
from neuronmm_ops.hf.compress import DEFAULT_SAMPLES
from neuronmm_ops.hf.computing import check_device, load_on
from neuronmm_ops.hf.dense import save_dense
from neuronmm_ops.hf.loading import check_values, load_tokenizer, local_directory
from neuronmm_ops.hf.provenance import ModelSource
from neuronmm_ops.hf.text import read_text
from neuronmm_ops.manifest import Origin
from neuronmm_ops.output import check_target


def prune(
    model: str | Path,
    text: str | Path,
    output: str | Path,
    *,
    ratio: float,
    block: int = 128,
    samples: int = DEFAULT_SAMPLES,
    seqlen: int | None = None,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Leave out inner features of a dense model's MLPs, and write an ordinary checkpoint.

    It has a smaller `intermediate_size`, and loads wherever the dense model does, without this
    package; `compress` takes it as any dense model.

    Args:
        model: dense, a local directory or a hub id.
        text: to calibrate on, or the Path of a file with it.
        output: the directory to write; it must not exist.
        ratio: of the MLPs' parameters to remove, at least.
        block: inner features that stay are a multiple of it.
        samples: calibration blocks, spread over the text.
        seqlen: tokens in a block; default the smaller of 2048 and the model's limit.
        device: to compute on.
        progress: called with (stage, done, total); stages are calibrate and prune.

    Returns:
        `output`; `inner` features of each MLP before and `kept` now; `losses` of the MLPs, as
        `Pruned`; and `bytes` of the weights.

    Raises:
        CheckpointError: the model cannot be loaded.
        FileExistsError: the output exists.
        OSError: it cannot be written.
        ValueError: an argument is out of range, the model is compressed, or `prune_` refuses its
            MLPs.
        NonFiniteError: a weight or an activation is NaN or Inf.
    """
    place, target, source = check_device(device), Path(output), local_directory(model)
    check_target(target, False, source)
    if read_config(source).get("quantization_config") is not None:
        raise ValueError(f"{model} is compressed or quantized already; prune the dense model first")
    text_path = text if isinstance(text, Path) else None
    text = read_text(text) if isinstance(text, Path) else text
    loaded, tokenizer = load_on(model, place), load_tokenizer(model)
    check_target(target, False, source, sum(each.nbytes for each in loaded.parameters()))
    check_values(loaded, "the checkpoint is damaged")
    batches, of = calibration_of(loaded, tokenizer, text, text_path, samples, seqlen, place)
    pruned = prune_(loaded, ratio, batches, block, progress)
    origin = Origin("prune", asdict(ModelSource.of(source)), (of.named,))
    size = save_dense(loaded, source, target, origin)
    return {"output": str(target), **pruned._asdict(), "bytes": size}
