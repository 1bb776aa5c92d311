"""What NxD Inference's config says of a compressed model, and which of its options cannot serve it.

Plain data: nothing of NxD is imported. `config` is an `InferenceConfig`, loaded from the model's
config.json, with the `NeuronConfig` as `config.neuron_config`.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from neuronmm_ops.compress.record import is_record, report_of
from neuronmm_ops.compress.report import LayerReport
from neuronmm_ops.errors import CheckpointError
from neuronmm_ops.parallel.sharding import DIVIDES, Divide

COLUMNS = {"self_attn": ("q_proj", "k_proj", "v_proj"), "mlp": ("gate_proj", "up_proj")}
ROWS = {"self_attn": "o_proj", "mlp": "down_proj"}
DIVIDE_KEY = "neuronmm_divide"
WINDOW_SEQ_LEN = 512
"""Up to so many positions, graphs with a sliding window end on the device with status 1006."""


class OptionError(ValueError):
    """An option of NxD Inference that a compressed model cannot be served with."""


_NAME = re.compile(r"(?:model\.)?(layers\.\d+\.(?:self_attn\.[qkvo]|mlp\.(?:gate|up|down))_proj)")
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
    "quantized": (False, "quantize the factors instead, with neuronmm compress --storage"),
    "activation_quantization_type": (None, "leave it out"),
    "cp_degree": (1, "use tp_degree alone"),
    "mlp_cp_degree": (1, "use tp_degree alone"),
    "attention_dp_degree": (1, "use tp_degree alone"),
    "is_eagle_draft": (False, "give the draft model dense"),
    "padded_hidden_size": (None, "leave it out"),
}


def low_rank_layers(config: Any) -> dict[str, LayerReport]:
    """Return the low-rank layers by NxD Inference's names, such as `layers.0.mlp.gate_proj`.

    Empty where the model is not compressed.

    Raises:
        CheckpointError: the record cannot be read, is of a newer format, lists a layer that is no
            projection of attention or MLP, or one that is dense in a storage.
    """
    record = getattr(config, "quantization_config", None)
    if not is_record(record):
        return {}
    layers = report_of(record).layers
    stored = next((each for each in layers if each.r is None and each.is_replaced), None)
    if stored is not None:
        raise CheckpointError(
            f"{stored.name} is dense in {stored.storage}, which NxD Inference does not read; "
            "run: neuronmm export nxdi DIR -o OUT"
        )
    return named_layers(layers)


def named_layers(layers: Iterable[LayerReport]) -> dict[str, LayerReport]:
    """Return the low-rank ones of a record's layers by NxD Inference's names.

    Raises:
        CheckpointError: one is no projection of attention or MLP.
    """
    found: dict[str, LayerReport] = {}
    for layer in layers:
        match = _NAME.fullmatch(layer.name)
        if layer.r is not None and match is None:
            raise CheckpointError(
                f"NxD Inference takes low-rank projections of attention and MLP, got {layer.name}; "
                "compress again with --targets all-linear or mlp"
            )
        if layer.r is not None and match is not None:
            found[match[1]] = layer
    return found


def divide_of(config: Any) -> Divide:
    """Return which factors ranks divide: the config's `neuronmm_divide`, `both` by default.

    One rank has nothing to exchange, so there it is `one`.

    Raises:
        ValueError: it is neither `one` nor `both`.
    """
    divide = getattr(config, DIVIDE_KEY, "both")
    if divide not in DIVIDES:
        raise ValueError(f"{DIVIDE_KEY} must be one or both, got {divide!r}; correct config.json")
    return divide if config.neuron_config.tp_degree > 1 else "one"


def check_options(config: Any) -> None:
    """Refuse options of NxD Inference that would read weights which a compressed model has not.

    Raises:
        OptionError: says which option, its value and the remedy.
        CheckpointError: see `low_rank_layers`.
    """
    layers = low_rank_layers(config)
    if not layers:
        return
    options = config.neuron_config
    for block, kernels in _KERNELS.items():
        if any(f".{block}." in name for name in layers):
            for option in kernels:
                if getattr(options, option, False):
                    raise OptionError(
                        f"{option} must be False for low-rank layers of {block}, got True; leave "
                        "it out: their products run in kernels of their own"
                    )
    for option, (allowed, remedy) in _OTHERS.items():
        value = getattr(options, option, allowed)
        if value != allowed:
            raise OptionError(
                f"{option} must be {allowed} for a compressed model, got {value}; {remedy}"
            )
    _check_lora(options, layers)
    if options.fused_qkv:
        _check_fused_qkv(layers)
    if options.sequence_parallel_enabled and divide_of(config) == "both":
        raise OptionError(
            f"sequence_parallel_enabled needs {DIVIDE_KEY} = one, got both; "
            "export again with --divide one, or leave sequence parallelism out"
        )
    if getattr(config, "mlp_bias", False) and config.intermediate_size % options.tp_degree:
        raise OptionError(
            "tp_degree must divide intermediate_size in an MLP with biases, got "
            f"{options.tp_degree} and {config.intermediate_size}; use one that does"
        )
    window = getattr(config, "sliding_window", None)
    if window and options.seq_len <= WINDOW_SEQ_LEN and not getattr(options, "on_cpu", False):
        raise OptionError(
            f"seq_len must be over {WINDOW_SEQ_LEN} for a model with a sliding window, got "
            f"{options.seq_len} and sliding_window {window}; use --seq-len 1024 or more"
        )
    heads = config.num_attention_heads
    check_heads(heads, getattr(config, "num_key_value_heads", heads), options.tp_degree)
    _check_rope(config)


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


def _check_lora(options: Any, layers: Mapping[str, LayerReport]) -> None:
    lora = getattr(options, "lora_config", None)
    targets = getattr(lora, "target_modules", None) or ()
    for target in targets:
        if any(name.endswith(f".{target}") for name in layers):
            raise OptionError(
                f"LoRA adapters cannot adapt a low-rank layer here, got target_modules with "
                f"{target}; merge the adapter before compressing, or leave {target} dense"
            )


def _check_fused_qkv(layers: Mapping[str, LayerReport]) -> None:
    blocks = {name.rpartition(".")[0] for name in layers if ".self_attn." in name}
    for block in sorted(blocks):
        found = [name for name in COLUMNS["self_attn"] if f"{block}.{name}" in layers]
        if 0 < len(found) < len(COLUMNS["self_attn"]):
            raise OptionError(
                f"fused_qkv needs query, key and value all dense or all low-rank, got only "
                f"{', '.join(found)} low-rank in {block}; leave fused_qkv out"
            )


def _check_rope(config: Any) -> None:
    """Refuse a config.json of Transformers 5, whose `rope_parameters` Transformers 4 ignores."""
    parameters = getattr(config, "rope_parameters", None)
    if parameters is None:
        return
    theta = getattr(config, "rope_theta", None)
    if parameters.get("rope_theta") != theta or parameters.get("rope_type") != "default":
        raise OptionError(
            "config.json is of Transformers 5 (rope_parameters), of which NxD Inference's "
            f"Transformers takes other positions, got rope_theta {theta} and {parameters}; "
            "run: neuronmm export nxdi DIR -o OUT"
        )
