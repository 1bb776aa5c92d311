"""The Linears of a model that a config's targets select."""

import re
from collections.abc import Mapping
from typing import NamedTuple

from torch import nn

from neuronmm_ops.compress.config import SVDConfig
from neuronmm_ops.nn.dense_linear import DenseLinear, dense_linears
from neuronmm_ops.nn.swap import is_read_by, shared_weights

ALL_LINEAR = "all-linear"
# Last components of a Linear's name in Transformers' decoders and encoders. Some mean one thing
# in attention and another outside, as c_proj and Wo.
PRESETS: dict[str, frozenset[str]] = {
    "mlp": frozenset(
        {
            *("gate_proj", "up_proj", "down_proj", "gate_up_proj"),  # Llama, Phi3
            *("fc1", "fc2", "fc_in", "fc_out", "c_fc", "c_proj"),  # OPT, GPT-J, GPT-2
            *("dense_h_to_4h", "dense_4h_to_h"),  # GPT-NeoX, Bloom, Falcon
            *("feed_forward.w1", "feed_forward.w2", "feed_forward.w3"),  # LFM2
            *("Wi", "Wo"),  # ModernBERT
            *("intermediate.dense", "output.dense", "ffn.0", "ffn.2"),  # BERT, CTRL
        }
    ),
    "attention": frozenset(
        {
            *("q_proj", "k_proj", "v_proj", "o_proj", "out_proj", "dense"),  # Llama, OPT, Phi
            *("qkv_proj", "query_key_value", "c_attn", "c_proj", "Wqkv", "Wo"),  # Phi3, Bloom, MPT
            *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"),  # DeepSeek
            *("query", "key", "value", "Wq", "Wk", "Wv"),  # BERT, CTRL
            *("in_proj_qkvz", "in_proj_qkv", "in_proj_z"),  # Qwen3-Next
        }
    ),
}
_ATTENTION = re.compile(r"attn|attention", re.IGNORECASE)
_OF_NO_PRESET = re.compile(r"norm|router", re.IGNORECASE)  # have MLPs of their own
# These are of attention also where no parent is named so, as in Nemotron-H.
_IN_ATTENTION_ALONE = frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj"})
_CROSS_ATTENTION = frozenset({"cross_attn", "cross_attention", "crossattention", "encoder_attn"})


class Selection(NamedTuple):
    """The linear layers that a config means.

    Attributes:
        linears: to compress, by name.
        kept: that match a target but must stay as they are, with the reason.
        head: the output head where it has a storage of its own, else none.
        unread: names of the modules that text does not pass, where these are left out.
    """

    linears: dict[str, DenseLinear]
    kept: dict[str, tuple[DenseLinear, str]]
    head: dict[str, DenseLinear]
    unread: frozenset[str]

    def storages(self, config: SVDConfig) -> dict[str, str]:
        """Return the storage of every layer that is to have one, by name."""
        one_byte, head = config.one_byte, config.head_storage
        stored = dict.fromkeys(self.linears, one_byte) if one_byte else {}
        return stored | (dict.fromkeys(self.head, head) if head else {})


def select_targets(model: nn.Module, config: SVDConfig, only_text: bool = False) -> Selection:
    """Find the linear layers that `config.targets` selects.

    The output head is taken only where it is named, and a Linear that shares its weight with
    another module (a tied head) never.

    Args:
        model: dense.
        config: has the targets.
        only_text: leave out what text does not pass, such as a vision tower.

    Raises:
        ValueError: no layer is selected, the model is of a kind that is not supported, or has no
            output head that could be stored by itself.
    """
    if any(type(module).__name__ == "RwkvModel" for module in model.modules()):
        raise ValueError(
            "RWKV models scale their weights in place when they run, which factors would not "
            "follow; they are not supported"
        )
    shared = shared_weights(model)
    head = output_head(model)
    read = text_modules(model) if only_text else set(model.modules())
    unread = frozenset(name for name, module in model.named_modules() if module not in read)
    linears: dict[str, DenseLinear] = {}
    kept: dict[str, tuple[DenseLinear, str]] = {}
    candidates = dense_linears(model)
    for name, linear in candidates.items():
        matched = [target for target in config.target_list if matches(target, name)]
        parent, _, leaf = name.rpartition(".")
        is_named = any(target in (name, leaf) for target in matched)
        if (
            not matched
            or name in unread
            or (linear.module is head and (config.head_storage or not is_named))
        ):
            continue
        if name in shared:
            kept[name] = linear, f"shares its weight with {shared[name]}"
        elif is_read_by(model.get_submodule(parent), leaf):
            kept[name] = linear, "cannot be replaced: the model's code reads its weight"
        else:
            linears[name] = linear
    if not linears:
        raise ValueError(_nothing_matches(model, config, candidates, kept, unread))
    stored = _stored_head(head, candidates, shared) if config.head_storage else {}
    return Selection(linears, kept, stored, unread)


def _stored_head(
    head: nn.Module | None, candidates: Mapping[str, DenseLinear], shared: Mapping[str, str]
) -> dict[str, DenseLinear]:
    heads = {name: linear for name, linear in candidates.items() if linear.module is head}
    if not heads:
        got = "none" if head is None else type(head).__name__
        raise ValueError(
            f"head_storage needs an output head that is an nn.Linear, got {got}; leave it out"
        )
    (name,) = heads
    if name in shared:
        raise ValueError(
            f"head_storage needs a head with a weight of its own, {name} shares it with "
            f"{shared[name]}; leave it out, or save the model with tie_word_embeddings false and a "
            "copy of the weight first"
        )
    return heads


def matches(target: str, name: str) -> bool:
    """Say whether a target, as in `SVDConfig.targets`, selects the module of this name."""
    leaf = name.rpartition(".")[2]
    if target == ALL_LINEAR:
        return True
    if target in PRESETS:
        last_two = ".".join(name.split(".")[-2:])
        return preset_of(name) == target and not PRESETS[target].isdisjoint((leaf, last_two))
    return target in (name, leaf) or re.fullmatch(target, name) is not None


def preset_of(name: str) -> str | None:
    """Return the preset that stands for the module of this name: `attention`, `mlp` or none."""
    parents, _, leaf = name.rpartition(".")
    if _OF_NO_PRESET.search(parents):
        return None
    is_attention = _ATTENTION.search(parents) or leaf in _IN_ATTENTION_ALONE
    return "attention" if is_attention else "mlp"


def names_in(model: nn.Module, name: str) -> tuple[str, str, str]:
    """Return what something that is called `name` in one model may be called in another.

    Either of the two may be the other's base model.
    """
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    return name, prefix + name, name.removeprefix(prefix)


def text_decoder(model: nn.Module) -> nn.Module:
    """Return what reads text: of a model that reads images or sound too its decoder, else all."""
    config = getattr(model, "config", None)
    text_config = getattr(config, "get_text_config", lambda: config)()
    return model if text_config is config else model.get_decoder()  # pyright: ignore


def text_modules(model: nn.Module) -> set[nn.Module]:
    """Return the modules that text may pass: those of the text decoder, and the output head's.

    It does not pass models of other inputs among them, as in Phi-4-multimodal's embedding; nor what
    attends to images, or to an encoder that the model has not: a block's cross-attention, or the
    whole block where that is all its attention, as in Mllama.
    """
    parts = (text_decoder(model), output_head(model))
    read = {module for part in parts if part is not None for module in part.modules()}
    has_encoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    for module in list(read):
        if "text" not in getattr(module, "input_modalities", "text"):
            read -= set(module.modules())
        children = dict(module.named_children())
        crossing = [children.pop(name) for name in children.keys() & _CROSS_ATTENTION]
        attends = any(_ATTENTION.search(n) and not _OF_NO_PRESET.search(n) for n in children)
        if not has_encoder:
            for part in crossing if attends else [module] * len(crossing):
                read -= set(part.modules())
    return read


def output_head(model: nn.Module) -> nn.Module | None:
    """Return Transformers' output embedding, or whatever is called lm_head, or None."""
    find = getattr(model, "get_output_embeddings", None)
    head = find() if callable(find) else getattr(model, "lm_head", None)
    return head if isinstance(head, nn.Module) else None


def _nothing_matches(
    model: nn.Module,
    config: SVDConfig,
    candidates: dict[str, DenseLinear],
    kept: dict[str, tuple[DenseLinear, str]],
    unread: frozenset[str],
) -> str:
    targets = ", ".join(config.target_list)
    for name in candidates:
        if name in unread and any(matches(target, name) for target in config.target_list):
            return f"targets {targets} match only modules that text does not pass, such as {name}"
    if kept:
        name, (_, reason) = next(iter(kept.items()))
        return f"targets {targets} match only layers kept dense: {name} {reason}"
    leaves = sorted({name.rpartition(".")[2] for name in candidates})
    text = (
        f"its nn.Linears are called {', '.join(leaves[:12])}" if leaves else "it has no nn.Linear"
    )
    stacks = sorted({type(m).__name__ for m in model.modules() if _holds_stacks(m)})
    if stacks:
        text += f", and matrices stacked in one parameter, of {', '.join(stacks)}, stay dense"
    return f"targets {targets} match no nn.Linear of the model; {text}"


def _holds_stacks(module: nn.Module) -> bool:
    # A convolution's weight has three dimensions too.
    parameters = module.parameters(recurse=False)
    return not isinstance(module, nn.Conv1d) and any(p.dim() == 3 for p in parameters)
