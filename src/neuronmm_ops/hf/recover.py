"""`recover`: load a compressed model, train what was truncated, verify and save it."""

import hashlib
import json
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from neuronmm_ops.compress.batches import check_ids, fingerprint
from neuronmm_ops.compress.record import attached_report, compressed_layers, low_rank_layers
from neuronmm_ops.compress.report import CompressionReport
from neuronmm_ops.errors import CheckpointError, NonFiniteError
from neuronmm_ops.eval import block_length, encode_documents
from neuronmm_ops.extras import import_extra
from neuronmm_ops.hf.computing import check_device, load_on
from neuronmm_ops.hf.dense import load_dense
from neuronmm_ops.hf.loading import load_tokenizer, local_directory
from neuronmm_ops.hf.provenance import ModelSource
from neuronmm_ops.hf.saving import save
from neuronmm_ops.hf.train import Trained, train_factors, trainable
from neuronmm_ops.manifest import Origin
from neuronmm_ops.output import check_target
from neuronmm_ops.processes import locked
from neuronmm_ops.progress import Update
from neuronmm_ops.recover.config import RecoverConfig
from neuronmm_ops.recover.data import hold_out
from neuronmm_ops.recover.state import StateFile
from neuronmm_ops.storages import dtype_name

DEFAULT_SEQLEN = 512


def recover(
    model: str | Path,
    text: str,
    output: str | Path,
    config: RecoverConfig | None = None,
    *,
    dense: str | Path | None = None,
    device: torch.device | str = "cpu",
    force: bool = False,
    progress: Update | None = None,
) -> CompressionReport:
    """Train a compressed model's factors and write it as a directory of the same kind.

    Factors in a storage are rounded to it at each step, and stay in it. Dense layers are frozen,
    but for those of MLPs that were narrowed.

    A share of the text is held out; the checkpoint with the lowest loss on it is what is written,
    at worst the start. The state lies in the directory `OUTPUT.recovery` until the output is
    written: after a kill the same call goes on from there.

    Args:
        model: a compressed checkpoint, a local directory or a hub id.
        text: to train on, see `read_text`.
        output: the directory to write; it must not exist, or `force`.
        config: what to do; None is `RecoverConfig()`.
        dense: the model that `model` was compressed from, for `distill`; None takes the one that
            the checkpoint names.
        device: to train on.
        force: replace an existing compressed checkpoint.
        progress: called with ("recover", done, total, note), in seconds, or in steps where
            the config gives their number.

    Returns:
        The checkpoint's report; the last entry of `provenance["recovery"]` is this run's.

    Raises:
        CheckpointError: a model cannot be loaded, is not compressed, is not the dense one, or the
            state on disk is of another run.
        FileExistsError: the target exists and may not be replaced.
        OSError: the target cannot be written.
        ValueError: an argument is out of range, the text is too short, or adapters are to be merged
            into factors in a storage.
        NonFiniteError: a factor, the loss or a gradient is NaN or Inf. What was best until then
            is written first, if it is better than the start.
    """
    config = config or RecoverConfig()
    if config.method == "lora":
        import_extra("peft", "recover")
        if dense is not None:
            raise ValueError("method lora learns from the text alone; leave out the dense model")
    place, target = check_device(device), Path(output)
    source = local_directory(model)
    check_target(target, force, source)
    student, tokenizer = load_on(model, place), load_tokenizer(model)
    report = attached_report(student)
    is_lora = config.method == "lora"
    if report is None or not (low_rank_layers if is_lora else trainable)(student):
        raise CheckpointError(
            f"{model} is not compressed: it has no low-rank layer to train; "
            f"make one with: neuronmm compress {model} -o OUT"
        )
    if is_lora:
        _check_mergeable(model, student)
    needed = sum(parameter.nbytes for parameter in student.parameters())
    check_target(target, force, source, needed)
    seqlen = block_length(student, config.seqlen, least=2)
    if config.seqlen is None:
        seqlen = min(seqlen, DEFAULT_SEQLEN)
    ids = encode_documents(tokenizer, [text])
    check_ids(student, ids, "text")
    rest, held_out = hold_out(ids, seqlen)
    teacher = None
    if config.method == "distill":
        named = report.provenance.get("model", "") if dense is None else dense
        teacher = load_dense(named, student, tokenizer, place)

    work = target.resolve().with_name(f"{target.resolve().name}.recovery")
    run = _fingerprint(student, teacher, ids, config)
    with _working_in(work):
        state = StateFile(work, run)
        trained = train_factors(student, teacher, rest, held_out, config, state, progress)
        report = _extended(report, trained, config, text, seqlen)
        failure = trained.outcome.failure
        if failure is None or trained.improved:
            data = {"path": None, "sha256": hashlib.sha256(text.encode()).hexdigest()}
            origin = Origin("recover", asdict(ModelSource.of(source)), (data,))
            save(student, target, report, tokenizer, force, origin=origin)
        state.remove()
    if failure is not None:
        raise NonFiniteError(f"{failure}; {_kept(trained, target)}; use a lower learning rate")
    return report


def _check_mergeable(model: str | Path, student: PreTrainedModel) -> None:
    """Refuse layers in a storage: what an adapter adds to them would be rounded anew."""
    for name, layer in compressed_layers(student).items():
        if layer.storage is not None:
            raise ValueError(
                f"method lora merges adapters into factors, those of {model} are rounded ({name}: "
                f"{dtype_name(layer.storage)}); use method distill, or train an adapter on top of "
                "them, see hf.lora_config"
            )


def _extended(
    report: CompressionReport, trained: Trained, config: RecoverConfig, text: str, seqlen: int
) -> CompressionReport:
    """Return the report with the entry of this run, after those of earlier ones."""
    used = {"learning_rate": config.peak_rate, "seqlen": seqlen}
    entry = {
        "config": {**config.to_dict(), **used},
        "data_sha256": hashlib.sha256(text.encode()).hexdigest(),
        **trained.to_dict(),
    }
    earlier: list[Any] = report.provenance.get("recovery", [])
    return replace(report, provenance={**report.provenance, "recovery": [*earlier, entry]})


def _kept(trained: Trained, target: Path) -> str:
    if trained.improved:
        step = trained.outcome.position.best_step
        return f"{target} holds the checkpoint after step {step}, the best until then"
    return "nothing was better than the start until then, so nothing is written"


def _fingerprint(
    student: PreTrainedModel, teacher: PreTrainedModel | None, ids: Tensor, config: RecoverConfig
) -> str:
    """Return what decides a run, hashed: the values of both models, the text, the config."""
    models = [model.state_dict() for model in (student, teacher) if model is not None]
    options = json.dumps(config.to_dict(), sort_keys=True)
    return f"{fingerprint(models)} {fingerprint([ids])} {options}"


@contextmanager
def _working_in(directory: Path) -> Generator[None]:
    """Hold the directory's lock; remove the directory where nothing is left in it."""
    if directory.exists() and not directory.is_dir():
        raise FileExistsError(
            f"{directory} is to hold the run's state, and is a file; move it away"
        )
    directory.mkdir(parents=True, exist_ok=True)
    with locked(directory):
        try:
            yield
        finally:
            with suppress(OSError):  # it holds something
                directory.rmdir()
