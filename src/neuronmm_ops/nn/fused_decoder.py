"""Decoder layers of Transformers that decode by calls of `neuronmm::decoder_layer`."""

from collections.abc import Sequence
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from neuronmm_ops.nn.bare import is_bare
from neuronmm_ops.nn.decode_cache import cache_name, decode_cache
from neuronmm_ops.nn.laid_linear import is_laid, lay_, unlay_
from neuronmm_ops.nn.stored_linear import StoredLinear
from neuronmm_ops.nn.svd_linear import SVDLinear
from neuronmm_ops.nn.svd_mlp import SVDMLP, activation_name, gated_activation
from neuronmm_ops.nn.svd_qkv import PROJECTIONS, QKVProjection
from neuronmm_ops.ops import decoder_layer
from neuronmm_ops.ops.definitions.decoder_layer import LINEARS, SPEC, LinearOperands

FAMILIES = ("Llama", "Mistral", "Phi3", "Qwen2", "Qwen3")
"""Whose decoder layers compute what the op does; classes of Transformers begin with these."""
MAX_NEW = 8
"""New tokens of a sequence that one call takes."""

M = TypeVar("M", bound=nn.Module)


class DecoderOperands(NamedTuple):
    """What a decoder layer gives the op, by reference to its parameters."""

    norms: list[Tensor | None]
    linears: list[LinearOperands]
    activation: str
    eps: float
    window: int
    head_dim: int


def arguments(
    layers: Sequence[DecoderOperands],
    x: Tensor,
    tables: tuple[Tensor, Tensor],
    positions: Tensor,
    caches: Sequence[Tensor],
) -> tuple[Any, ...]:
    """Return the op's arguments for x `[B, M, H]` and layers of one `_kind`."""
    cos, sin = [table.expand(len(x), -1, -1) for table in tables]
    linears = [linear for layer in layers for linear in layer.linears]
    scales = [scale for linear in linears for scale in (linear.u_scale, linear.v_scale)]
    first = layers[0]
    return (
        *(x, None, cos, sin, positions),
        [norm for layer in layers for norm in layer.norms],
        caches,
        [matrix for linear in linears for matrix in (linear.u, linear.v)],
        [linear.bias for layer in layers for linear in layer.linears[:3]],
        scales if any(scale is not None for scale in scales) else (),
        *(first.activation, first.eps, first.window if first.window < caches[0].shape[3] else 0),
    )


def fuse_decoder_(model: M, layers: int = 1) -> M:
    """Let decoder layers of a model decode by `neuronmm::decoder_layer`; return the model.

    Layers of Llama, Mistral, Phi-3, Qwen2 and Qwen3 of Transformers, dense or compressed in any
    way. A call with up to 8 new tokens a sequence and a StaticCache, after the prompt, is one op; a
    prompt, or what needs gradients, passes through the modules as before. Parameters are used where
    they are: names, checkpoints and `state_dict` stay. Prompts may be padded on the left. On XLA
    and Neuron devices a dense `nn.Linear` holds its weight as `[in, out]`, but for `state_dict`. A
    cache that the model has begun there, or a padded one, must be continued by it, not by what
    `unfuse_` left.

    Args:
        model: a causal LM, or a module that holds one, where it will run; `generate` needs
            `cache_implementation="static"`.
        layers: consecutive layers of one op, at most: those of an op have one window, and the last
            op has what is left. Layers before an op's last return what they are given; where hidden
            states are asked for, all pass through the modules.

    Raises:
        ValueError: it has no such layer, or one that the op does not compute: an adapter or a hook,
            a bias of the output projection or the MLP, RoPE of a part of each head, or weights in
            several storages; or `layers` is less than 1. The model is as before.
    """
    if layers < 1:
        raise ValueError(f"layers of an op must be 1 or more, got {layers}")
    named = {name: module for name, module in model.named_modules() if _family(module)}
    if not named:
        raise ValueError(
            f"fuse_decoder_ takes models of {', '.join(FAMILIES)}, got {type(model).__name__}; "
            "run it as it is"
        )
    for name in named:
        parent = model.get_submodule(name.rpartition(".")[0])
        others = parent.named_children() if isinstance(parent, nn.ModuleList) else ()
        for other, module in others:
            if not _family(module):
                place = f"{name.rpartition('.')[0]}.{other}".lstrip(".")
                raise ValueError(f"{place} is no decoder layer that fuses: {type(module).__name__}")
        _check([name], [named[name]])
    groups: list[list[str]] = []
    for _, run in groupby(named, lambda name: (name.rpartition(".")[0], _kind(named[name]))):
        of_run = list(run)
        groups += [of_run[start : start + layers] for start in range(0, len(of_run), layers)]
    for names in groups:
        if len(names) > 1:
            _check(names, [named[name] for name in names])
    for names in groups:
        group = tuple([named[name] for name in names])
        for layer in group:
            layer.forward = partial(_forward, layer, group, cache_name(layer))
            for linear in _dense(layer):
                lay_(linear)
    return model


def unfuse_(model: M) -> M:
    """Undo `fuse_decoder_`; return the model."""
    for module in model.modules():
        if is_fused(module):
            del module.__dict__["forward"]
            for linear in _dense(module):
                unlay_(linear)
    return model


def is_fused(layer: nn.Module) -> bool:
    """Say whether a module is a decoder layer that `fuse_decoder_` has changed."""
    return getattr(layer.__dict__.get("forward"), "func", None) is _forward


def _forward(
    layer: Any,
    group: Sequence[Any],
    name: str,
    hidden_states: Tensor,
    attention_mask: Any = None,
    **options: Any,
) -> Tensor:
    """A fused decoder layer's forward, with the arguments of its class; the group's last decodes.

    The caches of a group, given by that name, are alike until then, so that its layers go the same
    way.
    """
    number, cache = layer.self_attn.layer_idx, options.get(name)
    held = None if cache is None else decode_cache(cache, number)
    needs_modules = torch.is_grad_enabled() or any(each.training for each in group)
    if len(group) > 1:
        asked = layer.self_attn.config.output_hidden_states
        needs_modules |= bool(options.get("output_hidden_states", asked))
    new = hidden_states.shape[1]
    if held is not None and not needs_modules and new <= MAX_NEW and held.takes(new):
        if layer is not group[-1]:
            return hidden_states
        return _decoded(group, hidden_states, options["position_embeddings"], cache)
    if held is not None:
        held.restore()
    output = type(layer).forward(layer, hidden_states, attention_mask=attention_mask, **options)
    if held is not None:
        with torch.no_grad():
            held.take(attention_mask)
    return output


def _decoded(group: Sequence[Any], x: Tensor, tables: Any, past: Any) -> Tensor:
    """Return the output of a group's layers for x `[B, M, H]`; their caches get the new tokens."""
    operands = [_operands(layer) for layer in group]
    held: list[Any] = [decode_cache(past, layer.self_attn.layer_idx) for layer in group]
    positions = [each.advance(x.shape[1]) for each in held]
    caches = [tensor for each in held for tensor in each.caches]
    added, stream = decoder_layer(*arguments(operands, x, tables, positions[0], caches))
    return stream + added


# --- what a layer holds --------------------------------------------------------------------------


def _family(module: nn.Module) -> str:
    """Return which of `FAMILIES` a decoder layer is of; empty for another module."""
    kind = type(module)
    name = kind.__name__.removesuffix("DecoderLayer")
    is_ours = kind.__name__ != name and name in FAMILIES
    return name if is_ours and kind.__module__.startswith("transformers.") else ""


def _dense(layer: nn.Module) -> list[nn.Linear]:
    """Return a layer's dense Linears."""
    return [module for module in layer.modules() if type(module) is nn.Linear]


def _kind(layer: Any) -> tuple[Any, ...]:
    """Return what is one for all layers of an op."""
    operands = _operands(layer)
    return operands.activation, operands.eps, operands.window, operands.head_dim


@torch.no_grad()
def _check(names: Sequence[str], group: Sequence[Any]) -> None:
    """Let the op check the operands of one token.

    Raises:
        ValueError: it refuses them; the message names the layers.
    """
    try:
        if any("forward" in vars(layer) and not is_fused(layer) for layer in group):
            raise ValueError("its forward is replaced; remove the hooks, or load it on one device")
        operands, weight = [_operands(layer) for layer in group], group[0].input_layernorm.weight
        caches: list[Tensor] = []
        for each in operands:
            heads, d = each.linears[1].features[1] // each.head_dim, each.head_dim
            caches += [weight.new_empty(1, heads, d, 1), weight.new_empty(1, heads, 1, d)]
        x, table = weight.new_empty(1, 1, len(weight)), weight.new_empty(1, 1, operands[0].head_dim)
        place = torch.zeros(1, dtype=torch.int32, device=weight.device)
        SPEC.check(*arguments(operands, x, (table, table), place, caches))
    except (TypeError, ValueError) as error:
        why = str(error).replace("decoder_layer: ", "")
        if len(group) == 1:
            why = why.replace("layer 0: ", "")
        raise ValueError(
            f"{' to '.join([*names[:1], *names[1:][-1:]])} cannot be fused: {why}"
        ) from None


def _operands(layer: Any) -> DecoderOperands:
    """Return a decoder layer's operands.

    Raises:
        ValueError: the op does not compute what the layer does.
    """
    family, attention = _family(layer), layer.self_attn
    if type(attention).__name__ != f"{family}Attention":
        raise ValueError(f"self_attn is a {type(attention).__name__}, not {family}Attention")
    config, d = attention.config, attention.head_dim
    part = (getattr(config, "rope_parameters", None) or {}).get("partial_rotary_factor", 1.0)
    if part != 1.0:
        raise ValueError(f"RoPE must rotate all of a head, got partial_rotary_factor {part}")
    if attention.scaling != d**-0.5:
        raise ValueError(f"scores must be scaled by head_dim**-0.5, got {attention.scaling}")
    heads = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    norms = [layer.input_layernorm, layer.post_attention_layernorm, *heads]
    for norm in norms:
        if norm is not None and not (type(norm).__name__ == f"{family}RMSNorm" and is_bare(norm)):
            raise ValueError(f"a norm is a {type(norm).__name__}, or has hooks; unwrap it")
    (eps, *others) = {norm.variance_epsilon for norm in norms if norm is not None}
    if others:
        raise ValueError(f"norms must have one eps, got {eps} and {others[0]}")
    activation = _activation(layer.mlp)
    linears = [
        *_projections(attention, d),
        linear_operands(attention, "o_proj"),
        *_gated(layer.mlp),
    ]
    for linear in linears[3:]:
        if linear.bias is not None:
            raise ValueError(f"{linear.name} has a bias; the op has those of query, key and value")
    window = getattr(attention, "sliding_window", getattr(config, "sliding_window", None))
    if family == "Llama":
        window = None
    return DecoderOperands(
        [None if norm is None else norm.weight for norm in norms],
        [linear._replace(name=name) for name, linear in zip(LINEARS, linears, strict=True)],
        activation,
        eps,
        window or 0,
        d,
    )


def _projections(attention: Any, d: int) -> list[LinearOperands]:
    """Query, key and value, apart or cut from one."""
    if not hasattr(attention, "qkv_proj"):
        return [linear_operands(attention, name) for name in PROJECTIONS]
    config = attention.config
    key = config.num_key_value_heads * d
    return _cut(linear_operands(attention, "qkv_proj"), [config.num_attention_heads * d, key, key])


def _gated(mlp: Any) -> list[LinearOperands]:
    """Gate, up and down, the first two apart or cut from one."""
    if not hasattr(mlp, "gate_up_proj"):
        return [linear_operands(mlp, name) for name in ("gate_proj", "up_proj", "down_proj")]
    both = linear_operands(mlp, "gate_up_proj")
    return [*_cut(both, [both.features[1] // 2] * 2), linear_operands(mlp, "down_proj")]


def _cut(linear: LinearOperands, sizes: list[int]) -> list[LinearOperands]:
    """Cut a Linear's outputs; the parts of a pair share its u."""
    v = linear.v.split(sizes, -1)
    scales = [None] * len(v) if linear.v_scale is None else linear.v_scale.split(sizes, -1)
    biases = [None] * len(v) if linear.bias is None else linear.bias.split(sizes)
    return [
        linear._replace(v=part, v_scale=scale, bias=bias)
        for part, scale, bias in zip(v, scales, biases, strict=True)
    ]


def linear_operands(parent: nn.Module, name: str) -> LinearOperands:
    """Return a projection's matrices `[in, out]`, scales and bias."""
    layer: Any = parent.get_submodule(name)
    kind = type(layer)
    known, laid = (nn.Linear, StoredLinear, SVDLinear, QKVProjection), is_laid(layer)
    if kind not in known or not (laid or is_bare(layer)):
        raise ValueError(
            f"{name} is a {kind.__name__}"
            + (", or has hooks or another forward" if isinstance(layer, nn.Linear) else "")
            + "; it must be nn.Linear, StoredLinear or SVDLinear: unwrap it, or load it anew"
        )
    if kind is nn.Linear:
        u, v, u_scale, v_scale = None, layer.weight if laid else layer.weight.t(), None, None
    elif layer.compute != "x":
        raise ValueError(f"{name} computes in {layer.compute}, the op does not; set_compute_ 'x'")
    elif kind is StoredLinear:
        u, v, u_scale, v_scale = None, layer.w, None, layer.w_scale
    else:
        u, v, u_scale, v_scale = layer.u, layer.v, layer.u_scale, layer.v_scale
    for tensor in (u, v):
        if type(tensor) not in (Tensor, nn.Parameter, type(None)):
            raise ValueError(f"{name} holds a {type(tensor).__name__}; fuse an undivided model")
    return LinearOperands(name, u, v, u_scale, v_scale, layer.bias)


def _activation(mlp: Any) -> str:
    """Return the name of a gated MLP's activation."""
    if isinstance(mlp, SVDMLP):
        return mlp.activation
    fused = type(mlp).__name__ == "Phi3MLP"
    name = activation_name(mlp.activation_fn) if fused else gated_activation(mlp)
    if name is None or not is_bare(mlp):
        raise ValueError(f"mlp is a {type(mlp).__name__}, which is no gated MLP that the op has")
    return name
