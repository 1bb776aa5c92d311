"""Tiny compressed checkpoints of NxD Inference's families, written without Transformers."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from neuronmm_ops.compress.record import record_of
from neuronmm_ops.compress.report import CompressionReport, LayerReport

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 178,  # neither 4 nor 3 divides it
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 260,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "bos_token_id": 256,
    "eos_token_id": 256,
    "pad_token_id": 256,
    "tie_word_embeddings": False,
}
# No two are equal, and none is a multiple of 2, 3 or 4.
RANKS = {
    "q_proj": 29,
    "k_proj": 17,
    "v_proj": 23,
    "o_proj": 31,
    "gate_proj": 37,
    "up_proj": 25,
    "down_proj": 35,
}
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def shapes_of(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Return (K, N) of a layer's projections, by their names in it."""
    H, I, d = config["hidden_size"], config["intermediate_size"], config["head_dim"]  # noqa: E741
    heads, kv_heads = config["num_attention_heads"] * d, config["num_key_value_heads"] * d
    return {
        "self_attn.q_proj": (H, heads),
        "self_attn.k_proj": (H, kv_heads),
        "self_attn.v_proj": (H, kv_heads),
        "self_attn.o_proj": (heads, H),
        "mlp.gate_proj": (H, I),
        "mlp.up_proj": (H, I),
        "mlp.down_proj": (I, H),
    }


def make(
    directory: Path,
    model_type: str = "llama",
    dense: tuple[str, ...] = (),
    storage: str | None = None,
    dtype: torch.dtype = torch.float32,
    **overrides: Any,
) -> Path:
    """Write a seeded compressed checkpoint as Transformers 5 would.

    Args:
        directory: the target.
        model_type: of config.json.
        dense: ends of the names of layers that stay dense.
        storage: of the factors and of these, `fp8`, `int8`, or None for dtype.
        dtype: of the rest.
        overrides: of SIZES, and `attention_bias`, `mlp_bias`.
    """
    config = {**SIZES, **overrides, "model_type": model_type, "dtype": str(dtype)[6:]}
    config["architectures"] = [f"{model_type.capitalize()}ForCausalLM"]
    config.setdefault("rope_parameters", {"rope_theta": 5000.0, "rope_type": "default"})
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(shape, generator=generator)).to(dtype)

    H, d = config["hidden_size"], config["head_dim"]
    tensors = {"model.embed_tokens.weight": random(config["vocab_size"], H)}
    tensors["lm_head.weight"] = random(config["vocab_size"], H, scale=0.2)
    tensors["model.norm.weight"] = 1 + random(H, scale=0.1)
    layers: list[LayerReport] = []
    for index in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{index}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{norm}.weight"] = 1 + random(H, scale=0.1)
        if model_type == "qwen3":
            for norm in ("q_norm", "k_norm"):
                tensors[f"{prefix}.self_attn.{norm}.weight"] = 1 + random(d, scale=0.1)
        for leaf, (K, N) in shapes_of(config).items():
            name, member = f"{prefix}.{leaf}", leaf.partition(".")[2]
            if _has_bias(config, member):
                tensors[f"{name}.bias"] = random(N, scale=0.3)
            if any(name.endswith(end) for end in dense):
                weight = random(N, K, scale=K**-0.5)
                if storage is None:
                    tensors[f"{name}.weight"] = weight
                    continue
                stored = _stored({"w": weight.t()}, storage)
                tensors |= {f"{name}.{key}": t.contiguous() for key, t in stored.items()}
                tensors[f"{name}.weight"] = torch.empty(0, dtype=dtype)
                size = K * N
                layers.append(
                    LayerReport(name, K, N, None, True, None, None, size, size, storage=storage)
                )
                continue
            r = RANKS[member]
            pair = {"u": random(K, r, scale=K**-0.5), "v": random(r, N, scale=r**-0.5)}
            tensors |= {f"{name}.{key}": t for key, t in _stored(pair, storage).items()}
            tensors[f"{name}.weight"] = torch.empty(0, dtype=dtype)
            size = r * (K + N)
            layers.append(
                LayerReport(name, K, N, r, False, None, None, size, K * N, storage=storage)
            )
    config["quantization_config"] = record_of(CompressionReport(None, tuple(layers), None, {}))
    directory.mkdir(parents=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def dense_weights(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a state dict whose pairs, and what is in a storage, are dense weights `[N, K]`."""

    def matrix(name: str) -> Tensor:
        scale = state.get(f"{name}_scale")
        found = state[name].double()
        return found if scale is None else found * scale.double()

    ends = (".u", ".v", ".w", "_scale")
    found = {name: t for name, t in state.items() if not name.endswith(ends)}
    dtype = state["model.norm.weight"].dtype
    for name in {n.rpartition(".")[0] for n in state if n.endswith((".u", ".w"))}:
        is_pair = f"{name}.u" in state
        whole = matrix(f"{name}.u") @ matrix(f"{name}.v") if is_pair else matrix(f"{name}.w")
        found[f"{name}.weight"] = whole.t().to(dtype).contiguous()
    return found


def _has_bias(config: dict[str, Any], member: str) -> bool:
    if member not in ATTENTION:
        return bool(config.get("mlp_bias"))
    is_qwen2 = config["model_type"] == "qwen2" and member != "o_proj"
    return is_qwen2 or bool(config.get("attention_bias"))


def _stored(pair: dict[str, Tensor], storage: str | None) -> dict[str, Tensor]:
    if storage is None:
        return pair
    stored: dict[str, Tensor] = {}
    largest, dtype = {"fp8": (240, torch.float8_e4m3fn), "int8": (127, torch.int8)}[storage]
    for key, factor in pair.items():
        scale = factor.float().abs().amax(0) / largest
        values = factor.float() / scale
        stored[key] = (values.round() if storage == "int8" else values).to(dtype)
        stored[f"{key}_scale"] = scale
    return stored
