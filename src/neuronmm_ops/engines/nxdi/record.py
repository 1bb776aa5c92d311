"""What an engine's config says of a compressed model, and which options cannot serve it.

Plain data: nothing of NxD is imported. `config` is made of the model's config.json; `options` are
NxD Inference's `NeuronConfig`, which it keeps as `config.neuron_config`, or optimum-neuron's.
"""

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from neuronmm_ops.compress.record import is_record, report_of
from neuronmm_ops.compress.report import LayerReport
from neuronmm_ops.engines.members import MISMATCH, STORED
from neuronmm_ops.engines.places import name_in_model
from neuronmm_ops.errors import CheckpointError
from neuronmm_ops.parallel.sharding import DIVIDES, Divide
from neuronmm_ops.storages import FACTORS, SCALES, STORAGES, dequantized

DIVIDE_KEY = "neuronmm_divide"
WINDOW_SEQ_LEN = 512
"""Up to so many positions, graphs with a sliding window end on the device with status 1006."""
BITS = {1: torch.uint8, 4: torch.int32}
"""By their bytes, the dtypes in which factors and scales pass an engine that casts floats."""


class OptionError(ValueError):
    """An option of NxD Inference that a compressed model cannot be served with."""


# Options of NeuronConfig that read a dense weight of attention or MLP by themselves.
_KERNELS = {
    "self_attn": (
        "qkv_kernel_enabled",
        "qkv_nki_kernel_enabled",
        "qkv_kernel_fuse_residual_add",
        "out_proj_kernel_enabled",
        "attn_block_tkg_nki_kernel_enabled",
    ),
    "mlp": ("mlp_kernel_enabled", "quantized_mlp_kernel_enabled"),
}
# Options whose values do not go with low-rank layers: the value that does, and the remedy.
_OTHERS: dict[str, tuple[object, str]] = {
    "quantized": (False, "compress with --storage instead"),
    "activation_quantization_type": (None, "leave it out"),
    "cp_degree": (1, "use tp_degree alone"),
    "mlp_cp_degree": (1, "use tp_degree alone"),
    "attention_dp_degree": (1, "use tp_degree alone"),
    "is_eagle_draft": (False, "give the draft model dense"),
    "padded_hidden_size": (None, "leave it out"),
}


def served_layers(config: Any, options: Any = None) -> dict[str, LayerReport]:
    """Return the layers to put into the engine's model, by its names: `layers.0.mlp.gate_proj`.

    Empty where the model is not compressed.

    Raises:
        CheckpointError: the record cannot be read, is of a newer format, or lists a low-rank layer
            that is no projection of attention or MLP.
    """
    record = getattr(config, "quantization_config", None)
    if not is_record(record):
        return {}
    return named_layers(report_of(record).layers, _options(config, options).tp_degree)


def named_layers(layers: Iterable[LayerReport], tp: int) -> dict[str, LayerReport]:
    """Return a record's layers as so many ranks have them; the others are multiplied out.

    Those are what is dense in a storage outside of attention and MLP, or in one whose groups of
    rows share scales, which ranks do not divide.

    Raises:
        CheckpointError: a low-rank one is no projection of attention or MLP.
    """
    reports: dict[str, LayerReport] = {}
    for layer in layers:
        name = name_in_model(layer, "NxD")
        if layer.storage is not None and tp > 1 and STORAGES[layer.storage].group is not None:
            layer = replace(layer, storage=None, compute="x")
        if name is not None and layer.is_replaced:
            reports[name] = layer
    return reports


def as_engine_state(state: MutableMapping[str, Tensor], config: Any, options: Any) -> None:
    """Turn a checkpoint's one-byte tensors into what an engine does not cast, in place.

    What ranks keep in one byte becomes integers of the same bits; the rest is multiplied out.

    Args:
        state: by the engine's names, without `model.`.
        config: the model's.
        options: the engine's.

    Raises:
        CheckpointError: a tensor is missing.
    """
    served = served_layers(config, options)
    for layer in report_of(config.quantization_config).layers:
        if not layer.is_replaced:
            continue
        name = layer.name.removeprefix("model.")
        is_kept = name in served and served[name].storage == layer.storage
        pairs = [STORED] if layer.r is None else list(zip(FACTORS, SCALES, strict=True))
        for matrix, scale in pairs:
            keys = [f"{name}.{matrix}", *[f"{name}.{scale}"] * (layer.storage is not None)]
            absent = next((key for key in keys if key not in state), None)
            if absent is not None:
                raise CheckpointError(
                    f"{absent}: config.json asks for it, the file has none; {MISMATCH}"
                )
            if layer.storage is None:
                continue
            if is_kept:
                for key in keys:
                    state[key] = state[key].view(BITS[state[key].itemsize])
                continue
            stored, factors = state.pop(keys[0]), state.pop(keys[1])
            whole = dequantized(stored, factors.float(), options.torch_dtype)
            if layer.r is None:
                state[f"{name}.weight"] = whole.t().contiguous()
            else:
                state[keys[0]] = whole


def divide_of(config: Any, options: Any = None) -> Divide:
    """Return which factors ranks divide: the config's `neuronmm_divide`, `both` by default.

    One rank has nothing to exchange, so there it is `one`.

    Raises:
        ValueError: it is neither `one` nor `both`.
    """
    divide = getattr(config, DIVIDE_KEY, "both")
    if divide not in DIVIDES:
        raise ValueError(f"{DIVIDE_KEY} must be one or both, got {divide!r}; correct config.json")
    return divide if _options(config, options).tp_degree > 1 else "one"


def _options(config: Any, options: Any) -> Any:
    return config.neuron_config if options is None else options


def check_options(config: Any, options: Any = None) -> None:
    """Refuse options of the engine that would read weights which a compressed model has not.

    Raises:
        OptionError: says which option, its value and the remedy.
        CheckpointError: see `served_layers`.
    """
    layers, options = served_layers(config, options), _options(config, options)
    for problem in _problems(config, options, layers) if layers else ():
        raise OptionError(problem)


def _problems(config: Any, options: Any, layers: Mapping[str, LayerReport]) -> Iterator[str]:
    for block, kernels in _KERNELS.items():
        options_of_kernels = kernels if any(f".{block}." in name for name in layers) else ()
        for option in options_of_kernels:
            if getattr(options, option, False):
                yield (
                    f"{option} must be False for low-rank layers of {block}, got True; leave "
                    "it out: their products run in kernels of their own"
                )
    for option, (allowed, remedy) in _OTHERS.items():
        value = getattr(options, option, allowed)
        if value != allowed:
            yield f"{option} must be {allowed} for a compressed model, got {value}; {remedy}"
    lora = getattr(options, "lora_config", None)
    for target in getattr(lora, "target_modules", None) or ():
        if any(name.endswith(f".{target}") for name in layers):
            yield (
                f"LoRA adapters cannot adapt a low-rank layer here, got target_modules with "
                f"{target}; merge the adapter before compressing, or leave {target} dense"
            )
    is_divided = getattr(options, "sequence_parallel_enabled", False)
    if is_divided and divide_of(config, options) == "both":
        yield (
            f"sequence_parallel_enabled needs {DIVIDE_KEY} = one, got both; "
            "export again with --divide one, or leave sequence parallelism out"
        )
    if getattr(config, "mlp_bias", False) and config.intermediate_size % options.tp_degree:
        yield (
            "tp_degree must divide intermediate_size in an MLP with biases, got "
            f"{options.tp_degree} and {config.intermediate_size}; use one that does"
        )
    window = getattr(config, "sliding_window", None)
    seq_len = getattr(options, "seq_len", WINDOW_SEQ_LEN + 1)
    if window and seq_len <= WINDOW_SEQ_LEN and not getattr(options, "on_cpu", False):
        yield (
            f"seq_len must be over {WINDOW_SEQ_LEN} for a model with a sliding window, got "
            f"{seq_len} and sliding_window {window}; use --seq-len 1024 or more"
        )
    heads = config.num_attention_heads
    check_heads(heads, getattr(config, "num_key_value_heads", heads), options.tp_degree)
    # Of Transformers 5, whose `rope_parameters` Transformers 4 ignores.
    rope, theta = getattr(config, "rope_parameters", None), getattr(config, "rope_theta", None)
    if rope and (rope.get("rope_theta") != theta or rope.get("rope_type") != "default"):
        yield (
            "config.json is of Transformers 5 (rope_parameters), of which NxD Inference's "
            f"Transformers takes other positions, got rope_theta {theta} and {rope}; "
            "run: neuronmm export nxdi DIR -o OUT"
        )


def check_draft(draft: Any, config: Any) -> None:
    """Refuse a draft of fused speculation whose tokens are others, or whose options.

    Raises:
        OptionError: says what was found, and the remedy.
    """
    if draft.vocab_size != config.vocab_size:
        raise OptionError(
            f"a draft must have the model's vocabulary, got {draft.vocab_size} and "
            f"{config.vocab_size} tokens; make one with: neuronmm draft MODEL -o DRAFT"
        )
    check_options(draft)


def check_heads(heads: int, kv_heads: int, tp: int) -> None:
    """Refuse heads that NxD Inference can neither divide nor replicate, dense or not.

    Raises:
        OptionError: neither tp nor the key/value heads divide the other.
    """
    if heads != kv_heads and kv_heads % tp and tp % kv_heads:
        raise OptionError(
            f"tp must divide the key/value heads or be a multiple of them, got {kv_heads} and "
            f"tp = {tp}; use another tp"
        )
