"""A draft for the model that verifies its tokens: assisted generation, lossless.

Every token is the model's own: greedily its argmax, sampled its distribution, by the rejection
rule of Leviathan et al. (arXiv 2211.17192), which Transformers' assisted generation follows.
"""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from neuronmm_ops.compress.record import attached_report
from neuronmm_ops.errors import CheckpointError
from neuronmm_ops.hf.computing import load_packed
from neuronmm_ops.hf.loading import check_vocabulary, load_tokenizer, local_directory
from neuronmm_ops.manifest import read_manifest

RECORD = "draft"
"""Key of a report's provenance under which a draft's record is."""
MADE_OF_DENSE = ("compress", "draft")
DEFAULT_AHEAD, MOST_AHEAD = 3, 8


def load_draft(
    draft: str | Path,
    model: PreTrainedModel,
    directory: str | Path,
    tokens_ahead: int | None = None,
) -> PreTrainedModel:
    """Load what drafts for a model, onto its device and in its dtype, as `load_packed` does.

    Args:
        draft: a Transformers directory, dense or compressed, or a hub id.
        model: that verifies, loaded from `directory`.
        directory: of the model, or a hub id.
        tokens_ahead: drafted for each of the model's passes, 1 to 8; None takes what the draft's
            record says, else 3.

    Raises:
        ValueError: tokens_ahead is out of range.
        CheckpointError: the draft cannot be loaded, has another vocabulary, or model and draft
            are compressions of different models.
    """
    if tokens_ahead is not None and not 1 <= tokens_ahead <= MOST_AHEAD:
        raise ValueError(f"tokens ahead must be 1 to {MOST_AHEAD}, got {tokens_ahead}")
    tokenizers = load_tokenizer(directory), load_tokenizer(draft)
    check_vocabulary((directory, draft), tokenizers, "its tokens mean others")
    _check_base(directory, draft)
    draft_model = load_packed(draft, model.dtype, model.device)
    models: list[Any] = [model, draft_model]
    rows = [len(each.get_input_embeddings().weight) for each in models]
    if rows[0] != rows[1]:
        raise CheckpointError(
            f"{draft} must have the {rows[0]} rows of {directory}'s embedding, got {rows[1]}; "
            "give a draft that was made of this model"
        )
    ahead_set_(draft_model, tokens_ahead or recorded_ahead(draft_model))
    return draft_model


def ahead_set_(draft: PreTrainedModel, tokens_ahead: int) -> None:
    """Let a draft propose so many tokens at a time, whatever its confidence."""
    config: Any = draft.generation_config
    config.num_assistant_tokens = tokens_ahead
    config.num_assistant_tokens_schedule = "constant"
    config.assistant_confidence_threshold = 0.0


def recorded_ahead(draft: PreTrainedModel) -> int:
    """Return the tokens ahead of a draft's record, `DEFAULT_AHEAD` without a valid one."""
    report = attached_report(draft)
    record = report.provenance.get(RECORD) if report else None
    ahead = record.get("tokens_ahead") if isinstance(record, dict) else None
    if isinstance(ahead, int) and 1 <= ahead <= MOST_AHEAD:
        return ahead
    return DEFAULT_AHEAD


@contextmanager
def passes_counted(*models: PreTrainedModel) -> Generator[list[int]]:
    """Count the forward passes of each model in a block."""
    counts = [0] * len(models)

    def counting(number: int) -> Any:
        def hook(*_: object) -> None:
            counts[number] += 1

        return hook

    hooks = [each.register_forward_hook(counting(n)) for n, each in enumerate(models)]
    try:
        yield counts
    finally:
        for hook in hooks:
            hook.remove()


def _check_base(model: str | Path, draft: str | Path) -> None:
    """Refuse two compressions whose manifests name other dense models."""
    bases = [_base(local_directory(each)) for each in (model, draft)]
    if None not in bases and bases[0] != bases[1]:
        raise CheckpointError(
            f"{draft} must be made of the model that {model} is a compression of, of SHA-256 "
            f"{bases[0]}, got {bases[1]}; give a draft of that model"
        )


def _base(directory: Path) -> str | None:
    """The SHA-256 of the dense model, where a manifest names it."""
    manifest = read_manifest(directory) or {}
    source = manifest.get("source")
    if manifest.get("made_by") not in MADE_OF_DENSE or not isinstance(source, dict):
        return None
    return source.get("sha256")
