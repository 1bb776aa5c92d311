"""vLLM's gated MLPs as one op, where all three projections are low-rank."""

from typing import Any

from torch import Tensor, nn

from neuronmm_ops.engines.products import can_be_whole, middle, whole_mlp
from neuronmm_ops.nn.bare import is_bare

# vLLM's MLP classes whose forward is down_proj(act_fn(gate_up_proj(x))) and nothing else.
GATED_MLPS = frozenset(
    {
        "CohereMLP",
        "Exaone4GatedMLP",
        "Gemma2MLP",
        "Gemma3MLP",
        "GemmaMLP",
        "GraniteMLP",
        "LlamaMLP",
        "MistralMLP",
        "Qwen2MLP",
        "SolarMLP",
        "StablelmMLP",
    }
)
_ACTIVATIONS = {"SiluAndMul": "silu", "none": "gelu", "tanh": "gelu_tanh"}
_FUSED: dict[type[nn.Module], type[nn.Module]] = {}


def fuse_(module: Any) -> bool:
    """Let an MLP of vLLM run as one op from now on; say whether it will.

    It does where its class is one of `GATED_MLPS`, and its three projections are pairs without bias
    of one storage, none of them packed. Otherwise each projection is called by itself, as before.
    """
    kind = type(module)
    if kind.__name__ not in GATED_MLPS or not kind.__module__.startswith("vllm."):
        return False
    activation = activation_of(module.get_submodule("act_fn"))
    projections = [module.get_submodule(name) for name in ("gate_up_proj", "down_proj")]
    members = [m for projection in projections for m in getattr(projection, "members", ())]
    if activation is None or len(members) != 3 or not can_be_whole(members):
        return False
    if any(projection.bias is not None or not is_bare(projection) for projection in projections):
        return False
    if any(member.packed for member in members):
        return False
    if kind not in _FUSED:
        _FUSED[kind] = type(f"LowRank{kind.__name__}", (kind,), {"forward": _forward})  # pyright: ignore
    module.__class__ = _FUSED[kind]
    module.activation = activation
    return True


def activation_of(act: nn.Module) -> str | None:
    """Return the ops' name for one of vLLM's gated activations, None where they have none."""
    kind = type(act).__name__
    if kind == "GeluAndMul":
        kind = str(getattr(act, "approximate", None))
    return _ACTIVATIONS.get(kind)


def _forward(self: Any, x: Tensor) -> Tensor:
    """Map x `[..., K]` to `[..., K]`."""
    gate, up = self.gate_up_proj.members
    (down,) = self.down_proj.members
    if down.place.kind is None:  # one rank
        return whole_mlp(x, gate, up, down, self.activation)
    method = self.down_proj.quant_method
    return method.finished(middle(x, gate, up, down, method.ranks, self.activation), None)
