"""Shapes of public models by name, and of any model by its config.json."""

import difflib
import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from neuronmm_ops.files import read_document


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder-only Transformer with gated MLPs.

    Attributes:
        name: as on the Hugging Face Hub, without the organization.
        hidden_size: width of the residual stream.
        intermediate_size: width inside the MLP.
        layers: number of decoder layers.
        heads: query heads.
        kv_heads: key and value heads.
        head_dim: width of a head.
        vocab_size: rows of the embedding.
        tied: whether the output head is the embedding.
        head_norm: whether each head of queries and keys is normed, as Qwen3 does.
        is_fused: whether the op `decoder_layer` computes its layers, as `fuse_decoder_` asks.
    """

    name: str
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool
    head_norm: bool = False
    is_fused: bool = True

    @property
    def projections(self) -> dict[str, tuple[int, int]]:
        """`(K, N)` of each Linear of a decoder layer, by Transformers' name."""
        width, inner = self.hidden_size, self.intermediate_size
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "q_proj": (width, queries),
            "k_proj": (width, keys),
            "v_proj": (width, keys),
            "o_proj": (queries, width),
            "gate_proj": (width, inner),
            "up_proj": (width, inner),
            "down_proj": (inner, width),
        }


HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_LARGEST_SIZE = 2**24
DEFAULTS: dict[str, dict[str, int]] = {
    "gemma3_text": {
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262208,
    },
    "llama": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 32000,
    },
}
"""Sizes that Gemma 3's and LLaVA's config.json leave to Transformers' class, by `model_type`."""
_HEAD_NORMS = ("exaone4", "gemma3_text", "hunyuan_v1_dense", "qwen3", "qwen3_vl_text")
"""Values of `model_type` in the config.json of models that norm each head."""
_FUSED = ("exaone", "internlm3", "iquestcoder", "llama", "mistral", "phi3", "qwen2", "qwen3")
"""The same of models whose layers `decoder_layer` computes."""
_TIED = ("cohere", "cohere2", "ernie4_5", "gemma", "gemma2", "gemma3_text", "smollm3", "vaultgemma")
"""The same of models whose head is the embedding where config.json does not say."""
_ATTENTIONS = {"full_attention", "sliding_attention", "chunked_attention"}
"""Kinds of layers whose attention is one of queries, keys and values."""
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
"""Keys of the number of a layer's experts."""
DESCRIBED = (
    *("cohere", "cohere2", "cwm", "ernie4_5", "exaone", "exaone4", "gemma", "gemma2"),
    *("gemma3_text", "glm", "glm4", "glm4v_text", "granite", "helium", "hunyuan_v1_dense"),
    *("hyperclovax", "internlm3", "iquestcoder", "llama", "ministral", "ministral3", "mistral"),
    *("olmo", "olmo2", "olmo3", "phi3", "qwen2", "qwen2_5_vl", "qwen2_5_vl_text", "qwen2_vl"),
    *("qwen2_vl_text", "qwen3", "qwen3_vl_text", "seed_oss", "smollm3", "stablelm", "vaultgemma"),
)
"""Values of `model_type` of models whose layers `ModelShape` describes."""
SHAPES: dict[str, ModelShape] = {
    shape.name: shape
    for shape in (
        ModelShape("Llama-3.2-1B", 2048, 8192, 16, 32, 8, 64, 128256, tied=True),
        ModelShape("Llama-3.2-3B", 3072, 8192, 28, 24, 8, 128, 128256, tied=True),
        ModelShape("Llama-3.1-8B", 4096, 14336, 32, 32, 8, 128, 128256, tied=False),
        ModelShape("Llama-3.1-70B", 8192, 28672, 80, 64, 8, 128, 128256, tied=False),
        ModelShape("Qwen3-0.6B", 1024, 3072, 28, 16, 8, 128, 151936, tied=True, head_norm=True),
        ModelShape("Qwen3-1.7B", 2048, 6144, 28, 16, 8, 128, 151936, tied=True, head_norm=True),
        ModelShape("Qwen3-4B", 2560, 9728, 36, 32, 8, 128, 151936, tied=True, head_norm=True),
        ModelShape("Qwen3-8B", 4096, 12288, 36, 32, 8, 128, 151936, tied=False, head_norm=True),
        ModelShape("Qwen3-32B", 5120, 25600, 64, 64, 8, 128, 151936, tied=False, head_norm=True),
        ModelShape("Mistral-7B-v0.3", 4096, 14336, 32, 32, 8, 128, 32768, tied=False),
    )
}


def resolve_shape(model: str) -> ModelShape:
    """Return the shape of a model: a directory, a config.json, or a name as `model_shape` takes it.

    Of another ORG/NAME the config.json of the Hub's cache is read, or the Hub's.

    Raises:
        OSError: a config.json that cannot be read.
        ValueError: an unknown name, or a config.json without the sizes.
    """
    path = Path(model)
    if path.exists():
        return shape_from_config(path)
    try:
        return model_shape(model)
    except ValueError as unknown:
        if not HUB_ID.fullmatch(model):
            raise
        config = _hub_config(model, str(unknown))
    return replace(shape_from_config(config), name=model.rpartition("/")[2])


def _hub_config(model: str, unknown: str) -> Path:
    try:
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(model, "config.json"))
    except Exception as error:  # networks and proxies raise anything
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{unknown}, whose config.json is not to be had ({why})") from error


def model_shape(name: str) -> ModelShape:
    """Return the shape of a registered name, whatever the case, or of the Hub's ORG/NAME.

    The only name that begins so is meant, too.

    Raises:
        ValueError: the registry has no such name, or several begin so.
    """
    known = {each.lower(): shape for each, shape in SHAPES.items()}
    organization, _, lower = name.lower().rpartition("/")
    if lower in known:
        return known[lower]
    close = [each for each in known if lower and each.startswith(lower)]
    if len(close) == 1 and not organization:
        return known[close[0]]
    close = close or difflib.get_close_matches(lower, known, cutoff=0.5) or list(known)
    raise ValueError(
        "model must be a directory, a config.json or a known name, such as "
        f"{', '.join([known[each].name for each in close])}; got {name!r}"
    )


def shape_from_config(path: Path) -> ModelShape:
    """Return the shape that a config.json, or the one in a directory, describes.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not JSON, lacks a size, or its MLPs are no gate, up and down projection.
    """
    path = path / "config.json" if path.is_dir() else path
    try:
        config: Any = json.loads(read_document(path))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} must hold one JSON object, as Transformers saves it")
    tied = config.get("tie_word_embeddings")
    if isinstance(text_config := config.get("text_config"), dict):  # it reads images or sound too
        stated = {key: value for key, value in text_config.items() if value is not None}
        config = DEFAULTS.get(str(stated.get("model_type")), {}) | stated
    if tied is None:
        tied = config.get("tie_word_embeddings", config.get("model_type") in _TIED)
    _check_layers(config, path)
    heads = _size(config, "num_attention_heads", path)
    width = _size(config, "hidden_size", path)
    return ModelShape(
        name=path.parent.resolve().name,
        hidden_size=width,
        intermediate_size=_size(config, "intermediate_size", path),
        layers=_size(config, "num_hidden_layers", path),
        heads=heads,
        kv_heads=_size(config, "num_key_value_heads", path, heads),
        head_dim=_size(config, "head_dim", path, max(1, width // heads)),
        vocab_size=_size(config, "vocab_size", path),
        tied=tied is True,
        head_norm=config.get("model_type") in _HEAD_NORMS,
        is_fused=config.get("model_type", "llama") in _FUSED and not _is_partly_rotated(config),
    )


def _is_partly_rotated(config: dict[str, Any]) -> bool:
    """Whether RoPE rotates a part of each head."""
    rope = config.get("rope_parameters")
    factors = [
        each.get("partial_rotary_factor") for each in (config, rope) if isinstance(each, dict)
    ]
    return any(factor not in (None, 1) for factor in factors)


def _check_layers(config: dict[str, Any], path: Path) -> None:
    """Refuse what this shape would describe wrongly."""
    experts = {key: config[key] for key in _EXPERTS if config.get(key) not in (None, 0, 1)}
    kind = config.get("model_type")
    unsupported = [f"{key} {value!r}" for key, value in experts.items()]
    crossing = config.get("cross_attention_layers")
    unsupported += [f"cross_attention_layers {crossing!r}"] if crossing else []
    layer_types = config.get("layer_types")
    others = {*map(str, layer_types if isinstance(layer_types, list) else ())} - _ATTENTIONS
    unsupported += [f"layer_types {other!r}" for other in sorted(others)]
    if not unsupported and kind not in (None, *DESCRIBED):
        unsupported = [f"model_type {kind!r}"]
    if unsupported:
        raise ValueError(
            f"{path}: a layer has an attention and one MLP of gate, up and down projection; got "
            f"{', '.join(unsupported)}; give a config.json with such layers, of model_type llama, "
            "for an estimate"
        )


def _size(config: dict[str, Any], key: str, path: Path, default: int | None = None) -> int:
    """A size; the default where the key is absent or null."""
    value = config.get(key)
    if value is None and default is not None:
        return default
    if type(value) is not int or not 1 <= value <= _LARGEST_SIZE:
        raise ValueError(
            f"{path}: {key} must be an integer from 1 to {_LARGEST_SIZE}, got {value!r}"
        )
    return value
