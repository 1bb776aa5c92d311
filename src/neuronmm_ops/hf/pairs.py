"""Low-rank layers as pairs of `nn.Linear`, and LoRA on the factors: for peft and its kind."""

import re
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from torch import nn
from torch.distributed.tensor import DTensor

from neuronmm_ops.compress.record import compressed_layers, rewrite_record
from neuronmm_ops.compress.report import LayerReport
from neuronmm_ops.extras import import_extra
from neuronmm_ops.nn.compressed_linear import CompressedLinear
from neuronmm_ops.nn.pair import LinearPair
from neuronmm_ops.nn.stored_linear import StoredLinear
from neuronmm_ops.nn.svd_linear import SVDLinear
from neuronmm_ops.nn.swap import replace_

ALL_LINEAR = "all-linear"
M = TypeVar("M", bound=nn.Module)


def to_pairs(model: M) -> M:
    """Put a `LinearPair` in the place of every `SVDLinear`, in place; return the model.

    A `StoredLinear` becomes an `nn.Linear`.

    The logits are the same within rounding. The children `u` and `v` are ordinary `nn.Linear`,
    which peft, torchao, bitsandbytes and pruning know. The factors' memory is shared with no
    copy. `save_pretrained` writes the same checkpoint as before while both are plain Linears.

    Numbers in one byte are multiplied by their scales and rounded to the model's dtype, which takes
    memory; they stay in that, and the model's config says so.

    Raises:
        ValueError: the model has no compressed layer, or is divided among ranks.
    """
    layers = compressed_layers(model)
    if not layers:
        raise ValueError("the model has no SVDLinear; compress it first, see compress_")
    if any(isinstance(matrix, DTensor) for m in layers.values() for matrix, _ in m.scaled()):
        raise ValueError("the model is divided among ranks; load it in one process for pairs")
    plain = {name: _plain(layer) for name, layer in layers.items()}
    replace_(model, plain)
    if any(layer.storage is not None for layer in layers.values()):
        rewrite_record(model, LayerReport.dequantized)
    return model


def from_pairs(model: M) -> M:
    """Put an `SVDLinear` in the place of every `LinearPair`, in place; return the model.

    Raises:
        ValueError: the model has no pair, or one holds something else than two plain Linears, as
            with an adapter that was not merged. Nothing is replaced then.
    """
    pairs = {name: m for name, m in model.named_modules() if isinstance(m, LinearPair)}
    if not pairs:
        raise ValueError("the model has no LinearPair; see to_pairs")
    for name, pair in pairs.items():
        problem = pair.why_not_plain()
        if problem is not None:
            raise ValueError(f"{name} must hold two plain nn.Linear: {problem}")
    replace_(model, {name: SVDLinear.from_pair(pair) for name, pair in pairs.items()})
    return model


def _plain(layer: CompressedLinear) -> nn.Module:
    if isinstance(layer, SVDLinear):
        return layer.to_pair()
    assert isinstance(layer, StoredLinear)
    return layer.to_linear()


def lora_config(
    model: nn.Module,
    target_modules: str | Sequence[str] = ALL_LINEAR,
    factors: Iterable[str] = ("u", "v"),
    **options: Any,
) -> Any:
    """Return a `peft.LoraConfig` that adapts the factors of low-rank layers, and Linears.

    peft adapts parameters by `target_parameters`: that is where the factors are named. Merging
    leaves the `SVDLinear`s as they were, each one op. peft allows no dropout there.

    Layers in one byte stay as they are: the adapter is added to the whole layer, and cannot be
    merged. peft's file of such an adapter does not say how to load it; give this config again:
    `PeftModel.from_pretrained(model, directory, config=hf.lora_config(model, ...))`.

    Args:
        model: with compressed layers.
        target_modules: as peft takes it: `all-linear`, a regular expression for the whole name,
            or names or last components of names; of compressed layers, Linears or both.
        factors: which ones: `u`, `v` or both; of no meaning for those in one byte.
        options: of `LoraConfig`, such as `r` and `lora_alpha`.

    Raises:
        ImportError: peft is not installed.
        ValueError: no module is meant by `target_modules`, or a factor is neither `u` nor `v`.
    """
    factors = tuple(factors)
    if not factors or not set(factors) <= {"u", "v"}:
        raise ValueError(f"factors must be u, v or both, got {', '.join(factors) or 'none'}")
    head = getattr(model, "get_output_embeddings", lambda: None)()
    modules = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, (CompressedLinear, nn.Linear))
        and _is_meant(name, target_modules, is_head=module is head)
    }
    compressed = {n: m for n, m in modules.items() if isinstance(m, CompressedLinear)}
    if not compressed:
        raise ValueError(f"target_modules {target_modules!r} names no SVDLinear of the model")
    low_rank = [name for name, layer in compressed.items() if layer.storage is None]
    parameters = [f"{name}.{factor}" for name in low_rank for factor in factors]
    config = import_extra("peft", "recover").LoraConfig(
        target_modules=sorted(modules.keys() - set(low_rank)),
        target_parameters=parameters or None,
        **options,
    )
    if len(low_rank) < len(compressed):
        from neuronmm_ops.hf.lora import LoraBeside

        config._register_custom_module({CompressedLinear: LoraBeside})
    return config


def _is_meant(name: str, wanted: str | Sequence[str], is_head: bool) -> bool:
    """Say whether peft would take the module, were it an `nn.Linear`."""
    if wanted == ALL_LINEAR:
        return not is_head
    if isinstance(wanted, str):
        return re.fullmatch(wanted, name) is not None
    return any(name == one or name.endswith(f".{one}") for one in wanted)
