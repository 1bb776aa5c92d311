"""Calibration batches: checks, masks, number of tokens and fingerprint; rows of activations.

A batch is one tensor, the model's first argument (token ids `[B, T]` for a language model), or a
mapping of the model's keyword arguments, such as a tokenizer returns.
"""

import hashlib
import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Batch = Tensor | Mapping[str, Any]

_MASKS = {"input_ids": "attention_mask", "decoder_input_ids": "decoder_attention_mask"}


def check_batches(model: nn.Module, batches: Sequence[Batch]) -> None:
    """Check the batches, as `collect_moments` says, before any of them is run."""
    if not batches:
        raise ValueError("calibration has no batches; give at least one")
    limit = position_limit(model)
    for index, batch in enumerate(batches):
        if not isinstance(batch, (Tensor, Mapping)):
            raise TypeError(
                "a calibration batch must be a tensor or a mapping of the model's arguments, got "
                f"{type(batch).__name__}"
            )
        _check_kind(model, batch, f"calibration batch {index}")
        for ids in _token_ids(batch).values():
            if limit is not None and ids.shape[-1] > limit:
                raise ValueError(
                    f"calibration batch {index} has {ids.shape[-1]} positions, the model has "
                    f"{limit}; use shorter blocks"
                )
            check_ids(model, ids, f"calibration batch {index}")


def _check_kind(model: nn.Module, batch: Batch, source: str) -> None:
    """Refuse what stands for token ids and cannot be such: floats, or no batch of rows."""
    takes_ids = getattr(model, "main_input_name", None) == "input_ids"
    ids = batch if isinstance(batch, Tensor) and takes_ids else None
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else ids
    if isinstance(ids, Tensor) and (ids.dtype not in (torch.int64, torch.int32) or ids.dim() != 2):
        raise ValueError(
            f"{source} must hold token ids [B, T] in int64 or int32, got {list(ids.shape)} in "
            f"{str(ids.dtype).removeprefix('torch.')}; use what the model's tokenizer returns"
        )


def position_limit(model: nn.Module) -> int | None:
    """Return the longest input in tokens that the model's config allows, None for no limit."""
    config = getattr(model, "config", None)
    text_config = getattr(config, "get_text_config", lambda: config)()
    limit = getattr(text_config, "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None


def check_ids(model: nn.Module, ids: Tensor, source: str) -> None:
    """Refuse token ids, of any shape, for which the model's embedding has no row."""
    find = getattr(model, "get_input_embeddings", None)
    try:
        embedding = find() if callable(find) else None
    except NotImplementedError:  # raised by Transformers' models without token ids
        return
    rows = getattr(embedding, "num_embeddings", None)
    if not isinstance(rows, int) or ids.numel() == 0:
        return
    low, high = (int(end) for end in ids.aminmax())
    if low < 0 or high >= rows:
        raise ValueError(
            f"{source} has token id {high if low >= 0 else low}, the model's embedding has {rows} "
            "rows; use the model's own tokenizer"
        )


def call_model(model: nn.Module, batch: Batch) -> Any:
    """Call the model on a batch; an encoder-decoder that lacks decoder inputs says so."""
    if isinstance(batch, Mapping):
        return model(**batch)
    try:
        return model(batch)
    except ValueError as error:
        if not _is_encoder_decoder(model):
            raise
        raise ValueError(
            "an encoder-decoder needs decoder inputs too; give calibration batches as dicts, "
            "such as {'input_ids': ..., 'decoder_input_ids': ...}"
        ) from error


def takes(module: nn.Module, batches: Iterable[Batch]) -> bool:
    """Say whether the module's forward names every argument that the batches bring."""
    named = inspect.signature(module.forward).parameters
    return all(isinstance(batch, Tensor) or set(batch) <= set(named) for batch in batches)


def single_rows(batches: Sequence[Batch], max_tokens: int) -> list[tuple[int, Batch]]:
    """Return rows of the batches, each with its number, evenly chosen up to `max_tokens` tokens.

    A batch whose tensors have no common first dimension is one row.
    """
    rows = [row for batch in batches for row in _rows(batch)]
    size = max(1, max(count_tokens(row) for row in rows))
    count = min(len(rows), max(1, max_tokens // size))
    return [(index, rows[index]) for index in (i * len(rows) // count for i in range(count))]


def _rows(batch: Batch) -> list[Batch]:
    if isinstance(batch, Tensor):
        return list(batch.split(1)) if batch.dim() > 1 else [batch]
    sizes = {len(v) for v in batch.values() if isinstance(v, Tensor) and v.dim() > 0}
    if len(sizes) != 1:
        return [batch]
    return [
        {
            name: v[i : i + 1] if isinstance(v, Tensor) and v.dim() else v
            for name, v in batch.items()
        }
        for i in range(sizes.pop())
    ]


def row_mask(model: nn.Module, batch: Batch) -> Tensor | None:
    """Return the positions `[B, T]` that count; None where all do.

    All positions of an encoder-decoder count: whether an activation is the encoder's or the
    decoder's is not known.
    """
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if not isinstance(mask, Tensor) or mask.dim() != 2 or _is_encoder_decoder(model):
        return None
    return None if bool(mask.all()) else mask.bool()


def unmasked(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return those of the activations that count, `[B, T, K]` to `[M, K]` by a mask `[B, T]`.

    Activations of other shapes, such as those of an image's patches, are returned as they are.
    """
    return x[mask] if mask is not None and x.dim() > 2 and x.shape[:2] == mask.shape else x


def wide_rows(x: Tensor) -> Tensor:
    """Return `[..., K]` as rows `[M, K]` in fp32, or in its own dtype where that is wider."""
    return wide(x).reshape(-1, x.shape[-1])


def wide(x: Tensor) -> Tensor:
    """Return the tensor in fp32, or in its own dtype where that is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def count_tokens(batch: Batch) -> int:
    """Count the token ids that are not masked; in a batch without ids the rows of features.

    These are the rows of `[..., K]`, of a mapping's first tensor.
    """
    ids = _token_ids(batch)
    if ids:
        masks = {} if isinstance(batch, Tensor) else batch
        return sum(_count_unmasked(ids[name], masks.get(_MASKS.get(name, ""))) for name in ids)
    values = [batch] if isinstance(batch, Tensor) else batch.values()
    features = next((value for value in values if isinstance(value, Tensor)), None)
    if features is None:
        return 0
    return features.numel() // features.shape[-1] if features.dim() > 0 else 1


def fingerprint(batches: Iterable[Batch]) -> str:
    """Return the SHA-256 of the batches' names, values and shapes, in order."""
    digest = hashlib.sha256()
    for batch in batches:
        named = {"": batch} if isinstance(batch, Tensor) else batch
        for name in sorted(named):
            digest.update(f"{name}=".encode() if name else b"")
            value = named[name]
            if not isinstance(value, Tensor):
                digest.update(f"{value!r};".encode())
                continue
            digest.update(f"{list(value.shape)} {value.dtype};".encode())
            data = value.detach().cpu().contiguous().flatten()
            digest.update(data.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _token_ids(batch: Batch) -> dict[str, Tensor]:
    """The batch's tensors of token ids, by argument name; "" for a batch that is one."""
    tensors = {"": batch} if isinstance(batch, Tensor) else batch
    named = {name: tensors[name] for name in ("", *_MASKS) if name in tensors}
    return {
        name: value
        for name, value in named.items()
        if isinstance(value, Tensor) and value.dim() > 0 and not value.is_floating_point()
    }


def _count_unmasked(ids: Tensor, mask: object) -> int:
    if isinstance(mask, Tensor) and mask.shape == ids.shape:
        return int(mask.bool().sum())
    return ids.numel()


def _is_encoder_decoder(model: nn.Module) -> bool:
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
