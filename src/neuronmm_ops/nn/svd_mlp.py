"""SVDMLP: a gated MLP whose three projections are compressed, run as one op."""

from typing import Any, Self

import torch
from torch import Tensor, nn

from neuronmm_ops.nn.bare import is_bare
from neuronmm_ops.nn.compressed_linear import CompressedLinear
from neuronmm_ops.nn.stored_linear import StoredLinear
from neuronmm_ops.nn.svd_linear import SVDLinear
from neuronmm_ops.ops import ACTIVATIONS, mlp, svd_mlp

# Transformers' MLP classes whose forward is exactly down_proj(act_fn(gate_proj(x)) * up_proj(x)).
# Other classes with the same children compute something else (dropout, activation sparsity).
GATED_MLPS = frozenset(
    {
        "Cohere2MLP",
        "CohereMLP",
        "Ernie4_5MLP",
        "Exaone4MLP",
        "Gemma2MLP",
        "Gemma3MLP",
        "GemmaMLP",
        "GraniteMLP",
        "HeliumMLP",
        "LlamaMLP",
        "Ministral3MLP",
        "MinistralMLP",
        "MistralMLP",
        "Olmo2MLP",
        "Olmo3MLP",
        "OlmoMLP",
        "Qwen2MLP",
        "Qwen3MLP",
        "Qwen3_5MLP",
        "SmolLM3MLP",
        "StableLmMLP",
    }
)
_ACTIVATION_CLASSES = {
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "ReLU": "relu",
    "SiLU": "silu",
    "SiLUActivation": "silu",
}


class SVDMLP(nn.Module):
    """Gated MLP `down_proj(act(gate_proj(x)) * up_proj(x))`.

    With three low-rank projections of one storage and no biases it is one `neuronmm::svd_mlp`, with
    three `StoredLinear` one `neuronmm::mlp`. In every other case (one projection is of another kind
    or storage, a bias, a hook on a projection, another way to compute) each projection is called by
    itself. Children have Transformers' names, so checkpoints keep their keys.

    Args:
        hidden_size: K, also the output size.
        intermediate_size: I.
        ranks: of gate, up and down.
        activation: `silu`, `gelu`, `gelu_tanh` or `relu`.
        device: of the parameters.
        dtype: of the parameters.
        storage: of the factors: `fp8` or `int8`; None is `dtype`.

    Raises:
        ValueError: activation or storage is unknown, or a size is smaller than 1.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        ranks: tuple[int, int, int],
        activation: str = "silu",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        storage: str | None = None,
    ) -> None:
        super().__init__()
        _check_activation(activation)
        gate, up, down = ranks
        K, I = hidden_size, intermediate_size  # noqa: E741
        self.gate_proj: nn.Module = SVDLinear(K, I, gate, False, device, dtype, storage)
        self.up_proj: nn.Module = SVDLinear(K, I, up, False, device, dtype, storage)
        self.down_proj: nn.Module = SVDLinear(I, K, down, False, device, dtype, storage)
        self.activation = activation

    @classmethod
    def from_projections(
        cls, gate: nn.Module, up: nn.Module, down: nn.Module, activation: str
    ) -> Self:
        """Build an MLP around existing projections, compressed or `nn.Linear`, without a copy.

        Raises:
            ValueError: the activation is unknown.
        """
        _check_activation(activation)
        mlp = cls.__new__(cls)
        nn.Module.__init__(mlp)
        mlp.gate_proj, mlp.up_proj, mlp.down_proj = gate, up, down
        mlp.activation = activation
        return mlp

    def forward(self, x: Tensor) -> Tensor:
        """Map x `[..., K]` to `[..., K]`."""
        gate: Any = self.gate_proj
        up: Any = self.up_proj
        down: Any = self.down_proj
        if _are_fusible(gate, up, down, SVDLinear):
            return svd_mlp(
                *(x, gate.u, gate.v, up.u, up.v, down.u, down.v, self.activation),
                *(gate.u_scale, gate.v_scale, up.u_scale, up.v_scale, down.u_scale, down.v_scale),
                gate.compute,
            )
        if _are_fusible(gate, up, down, StoredLinear):
            scales = (gate.w_scale, up.w_scale, down.w_scale)
            return mlp(x, gate.w, up.w, down.w, None, self.activation, *scales, gate.compute)
        return down(ACTIVATIONS[self.activation](gate(x)) * up(x))

    def extra_repr(self) -> str:
        """Name the activation for `print(model)`."""
        return f"activation={self.activation}"


def gated_activation(module: nn.Module) -> str | None:
    """Return the activation's name if `module` is a gated MLP that `SVDMLP` computes, else None."""
    kind = type(module)
    if kind.__name__ not in GATED_MLPS or not kind.__module__.startswith("transformers."):
        return None
    return activation_name(getattr(module, "act_fn", None))


def activation_name(module: object) -> str | None:
    """Return what the ops call an activation of Transformers; None where they have it not."""
    return _ACTIVATION_CLASSES.get(type(module).__name__)


def _are_fusible(gate: Any, up: Any, down: Any, kind: type[CompressedLinear]) -> bool:
    """Say whether one op instead of the modules leaves out nothing the user asked for."""
    return (
        all(type(p) is kind and p.bias is None and is_bare(p) for p in (gate, up, down))
        and gate.precision == up.precision == down.precision
    )


def _check_activation(activation: str) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}; got {activation!r}")
