"""Low-rank query, key and value projections of attention, run as one op.

Transformers' attention keeps its forward, and the projections their names. A hook before it makes
all three by one `neuronmm::svd_qkv` and leaves each with its `QKVProjection`, which returns it when
it is called with those very hidden states, and computes by itself when it is called with others.
What was not called for is dropped after the forward, or when that raises.
"""

from collections.abc import Mapping
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from neuronmm_ops.nn.bare import is_bare
from neuronmm_ops.nn.svd_linear import SVDLinear
from neuronmm_ops.ops import svd_qkv
from neuronmm_ops.ops.backends.neuron import DEVICE
from neuronmm_ops.ops.backends.simulated import active_impl

# Transformers' attention classes whose forward projects its hidden states, as they are given, by
# q_proj, k_proj and v_proj, each once. Of others a projection would be computed in vain.
ATTENTIONS = frozenset(
    {
        "CohereAttention",
        "Cohere2Attention",
        "Ernie4_5Attention",
        "Exaone4Attention",
        "Gemma2Attention",
        "Gemma3Attention",
        "GemmaAttention",
        "Glm4Attention",
        "GlmAttention",
        "GptOssAttention",
        "GraniteAttention",
        "HeliumAttention",
        "LlamaAttention",
        "Ministral3Attention",
        "MinistralAttention",
        "MistralAttention",
        "MixtralAttention",
        "Olmo2Attention",
        "Olmo3Attention",
        "OlmoAttention",
        "OlmoeAttention",
        "Qwen2Attention",
        "Qwen2MoeAttention",
        "Qwen3Attention",
        "Qwen3MoeAttention",
        "SmolLM3Attention",
        "StableLmAttention",
        "Starcoder2Attention",
    }
)
PROJECTIONS = ("q_proj", "k_proj", "v_proj")


class QKVProjection(SVDLinear):
    """A projection whose result its attention may have made with the others'; made of an SVDLinear.

    Attributes:
        made: an x and the result for it, which the next call takes; else None.
    """

    made: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Map x `[..., K]` to `[..., N]`."""
        made = self.made
        if made is not None:
            self.made = None
            if made[0] is x:
                return made[1]
        return super().forward(x)


def fuse_projections_(attention: nn.Module) -> bool:
    """Let an attention module make its three projections by one op; say whether it will.

    It does where its class is one of `ATTENTIONS` and all three are `SVDLinear`. Whether a call is
    fused is decided at that call: on XLA and Neuron devices and in graphs that are compiled or
    exported, unless a projection has been wrapped, hooked into or replaced since, or is stored or
    computed in another way than the others.
    """
    kind = type(attention)
    if kind.__name__ not in ATTENTIONS or not kind.__module__.startswith("transformers."):
        return False
    projections = [attention._modules.get(name) for name in PROJECTIONS]
    if not all(isinstance(projection, SVDLinear) for projection in projections):
        return False
    for projection in projections:
        if type(projection) is SVDLinear:
            projection.__class__ = QKVProjection
    if _project not in attention._forward_pre_hooks.values():
        attention.register_forward_pre_hook(_project, with_kwargs=True)
        attention.register_forward_hook(_drop, always_call=True)
    return True


def _project(attention: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Make the projections of the hidden states, for the forward that follows."""
    x = args[0] if args else kwargs.get("hidden_states")
    if not isinstance(x, Tensor) or not _pays(x):
        return
    children = attention._modules
    q, k, v = children["q_proj"], children["k_proj"], children["v_proj"]
    if not (
        _is_fusible(q)
        and _is_fusible(k)
        and _is_fusible(v)
        and q.precision == k.precision == v.precision
        and len(attention._forward_pre_hooks) == 1  # another might write to the hidden states
        and "forward" not in attention.__dict__
    ):
        return
    factors = (q.u, q.v, k.u, k.v, v.u, v.v)
    biases = (q.bias, k.bias, v.bias)
    scales = (q.u_scale, q.v_scale, k.u_scale, k.v_scale, v.u_scale, v.v_scale)
    y = svd_qkv(x, *factors, *biases, *scales, q.compute)
    parts = y.split((q.out_features, k.out_features, v.out_features), -1)
    for projection, part in zip((q, k, v), parts, strict=True):
        projection.made = (x, part)


def _pays(x: Tensor) -> bool:
    """Say whether one op may be quicker than three: where it is one kernel, or nothing is eager.

    On other devices the op is the same matmuls, and the rest of the hook costs what it saves.
    """
    if x.is_cpu:
        return active_impl() == "simulated" or torch.compiler.is_compiling()
    return x.device.type in ("xla", DEVICE) or torch.compiler.is_compiling()


def _drop(attention: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Keep no projection that the forward did not call for."""
    del args, output
    for name in PROJECTIONS:
        projection = attention._modules[name]
        if isinstance(projection, QKVProjection) and projection.made is not None:
            projection.made = None


def _is_fusible(projection: nn.Module | None) -> TypeGuard[QKVProjection]:
    """Say whether calling the op instead of the module leaves out nothing the user asked for."""
    return type(projection) is QKVProjection and is_bare(projection)
