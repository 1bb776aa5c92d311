"""A rank's parameters, and how each is read from the checkpoint.

A parameter has the name of its tensor, so that the engine's own `load_weights` finds it; two that
the engine names otherwise, of the fused queries, keys and values and of attention's output, are
read from the files by their loaders. All of a rank's parts have one width, filled up with zeros.
"""

from collections.abc import Mapping
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from neuronmm_ops.checkpoint import TensorHeader
from neuronmm_ops.compress.report import LayerReport
from neuronmm_ops.engines.members import STORED, Member
from neuronmm_ops.engines.vllm_neuron.engine import Slice, Transform, set_loader
from neuronmm_ops.errors import CheckpointError
from neuronmm_ops.storages import FACTORS, SCALES, dequantized, tensor_dtype


def parameter(shape: tuple[int, ...], dtype: torch.dtype, transform: Transform) -> nn.Parameter:
    """Return an empty parameter that the engine fills by a transform."""
    made = nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
    set_loader(made, transform)
    return made


def set_loaders(member: Member) -> None:
    """Have the engine fill a member's parameters with its rank's parts of the tensors."""

    def transform(key: str) -> Transform:
        def read(slices: list[Slice], rank: int) -> Tensor:
            (view,) = slices
            part = member.cut(key, view, rank)
            return part.t() if key == "weight" else part

        return read

    for key in member.shapes:
        own = getattr(member, key)
        setattr(member, key, parameter(tuple(own.shape), own.dtype, transform(key)))


def check_loading_(model: Any) -> None:
    """Have the engine's `load_weights` refuse, with a CheckpointError, to end with cast numbers."""
    load = model.load_weights

    def load_weights(*args: Any, **options: Any) -> Any:
        result = load(*args, **options)
        for name, module in model.named_modules():
            if not isinstance(module, Member) or module.storage is None:
                continue
            wanted = tensor_dtype(module.storage, torch.float32)
            matrices = [getattr(module, key) for key in module.shapes if len(key) == 1]
            found = next((m.dtype for m in matrices if m.dtype != wanted), None)
            if found is not None:
                raise CheckpointError(
                    f"{name} is in {module.storage}, the installed vllm-neuron casts it to "
                    f"{found}; compress without --storage"
                )
        return result

    model.load_weights = load_weights


class Files:
    """A checkpoint's tensors, for parameters that the engine maps to another one."""

    def __init__(self, headers: Mapping[str, TensorHeader]) -> None:
        self.headers = headers

    def columns(self, layer: LayerReport, own: slice) -> Tensor:
        """Return columns of a layer's matrix `[K, N]` in fp32; of a low-rank one, of u @ v."""
        if layer.r is not None:
            return self.matrix(layer, 0, slice(None)) @ self.matrix(layer, 1, own)
        if layer.storage is not None:
            return self._stored(layer.name, *STORED, own)
        return self._read(f"{layer.name}.weight", (own, slice(None))).t().float()

    def matrix(self, layer: LayerReport, index: int, own: slice) -> Tensor:
        """Return columns of the first factor or the second, in fp32."""
        return self._stored(layer.name, FACTORS[index], SCALES[index], own)

    def _stored(self, name: str, key: str, scale: str, own: slice) -> Tensor:
        found = self._read(f"{name}.{key}", (slice(None), own))
        if f"{name}.{scale}" not in self.headers:
            return found.float()
        scales = self._read(f"{name}.{scale}", (slice(None),))[..., own]
        return dequantized(found, scales, torch.float32)

    def _read(self, name: str, index: tuple[slice, ...]) -> Tensor:
        with safe_open(self.headers[name].file, framework="pt") as file:
            return file.get_slice(name)[index]
