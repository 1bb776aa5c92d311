"""Saving a compressed model whole, or not at all."""

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import PreTrainedModel

from neuronmm_ops.compress.checkpoint import record_of
from neuronmm_ops.compress.report import CompressionReport
from neuronmm_ops.hf.quantizer import NeuronMMConfig
from neuronmm_ops.nn.svd_linear import SVDLinear


def save(
    model: PreTrainedModel,
    directory: str | Path,
    report: CompressionReport | None = None,
    tokenizer: Any = None,
    force: bool = False,
    max_shard_size: int | str = "50GB",
) -> None:
    """Write a model that `compress_` changed as a Transformers directory.

    Everything is written to a sibling directory that is renamed at the end: a killed or failed
    run leaves the target as it was. Load it with `import neuronmm_ops.hf` and
    `AutoModelForCausalLM.from_pretrained(directory)`.

    Args:
        model: the compressed model.
        directory: the target; its parent is created.
        report: what `compress_` returned; may be left out for a model loaded from a compressed
            checkpoint.
        tokenizer: saved along with the model.
        force: replace an existing target.
        max_shard_size: of one file of weights, in bytes or as `5GB`.

    Raises:
        FileExistsError: the target exists, and force is not given.
        ValueError: there is no report, or it is not that of the model.
        OSError: the target cannot be written; says how much room it needs.
    """
    target = Path(directory)
    check_target(target, force)
    config = getattr(model.config, "quantization_config", None)
    if report is not None:
        config = NeuronMMConfig(**record_of(report))
    if not isinstance(config, NeuronMMConfig):
        raise ValueError("report must be given: the model was not loaded from a compressed one")
    _check_covers(config.report, model)
    model.config.quantization_config = config

    target.parent.mkdir(parents=True, exist_ok=True)
    needed = sum(parameter.nbytes for parameter in model.parameters())
    free = shutil.disk_usage(target.parent).free
    if free < needed:
        raise OSError(_no_room(target, needed, free))
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent))
    try:
        os.chmod(temporary, 0o755)  # noqa: S103  (mkdtemp's 0700 would hide the model from others)
        model.save_pretrained(temporary, max_shard_size=max_shard_size)
        if tokenizer is not None:
            tokenizer.save_pretrained(temporary)
        _put_in_place(temporary, target)
    except (OSError, SafetensorError) as error:
        free = shutil.disk_usage(target.parent).free
        raise OSError(f"{error}; {_no_room(target, needed, free)}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def check_target(
    target: Path, force: bool, source: Path | None = None, needed_bytes: int = 0
) -> None:
    """Refuse an existing target unless force is given.

    Raises:
        FileExistsError: the target exists, or is a file.
    """
    if target.exists() and not (force and target.is_dir()):
        remedy = "it is no directory" if not target.is_dir() else "use --force to replace it"
        raise FileExistsError(f"output {target} exists; {remedy}")


def _check_covers(report: CompressionReport, model: PreTrainedModel) -> None:
    """Refuse a report that would make a checkpoint which cannot be loaded."""
    reported = {layer.name for layer in report.layers if layer.r is not None}
    present = {name for name, module in model.named_modules() if isinstance(module, SVDLinear)}
    if reported != present:
        name = sorted(reported ^ present)[0]
        raise ValueError(
            f"report must list exactly the model's SVDLinears, see {name}; "
            "compress a dense model once, with all targets"
        )


def _put_in_place(temporary: Path, target: Path) -> None:
    """Rename, keeping an existing target until the new one is there."""
    if not target.exists():
        temporary.rename(target)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".old", dir=target.parent))
    target.rename(old / target.name)
    try:
        temporary.rename(target)
    except BaseException:
        (old / target.name).rename(target)
        old.rmdir()
        raise
    shutil.rmtree(old)


def _no_room(target: Path, needed: int, free: int) -> str:
    return (
        f"writing {target} needs {needed / 1e9:.3f} GB and the disk has {free / 1e9:.3f} GB free; "
        "free some, or choose another place"
    )
