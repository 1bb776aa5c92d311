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
from neuronmm_ops.storages import FACTORS, SCALES, STORAGES, dequantized, tensor_dtype

ALL = slice(None)


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
        kept = getattr(member, key)
        setattr(member, key, parameter(tuple(kept.shape), kept.dtype, transform(key)))


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
            dtype = next((m.dtype for m in matrices if m.dtype != wanted), None)
            if dtype is not None:
                raise CheckpointError(
                    f"{name} is in {module.storage}, the installed vllm-neuron casts it to "
                    f"{dtype}; compress without --storage"
                )
        return result

    model.load_weights = load_weights


class Files:
    """A checkpoint's tensors, for parameters that the engine maps to another one."""

    def __init__(self, headers: Mapping[str, TensorHeader]) -> None:
        self.headers = headers

    def columns(self, layer: LayerReport, wanted: slice) -> Tensor:
        """Return columns of a layer's matrix `[K, N]` in fp32; of a low-rank one, of u @ v."""
        if layer.r is None:
            return self.matrix(layer, None, columns=wanted)
        return self.matrix(layer, 0) @ self.matrix(layer, 1, columns=wanted)

    def matrix(
        self, layer: LayerReport, factor: int | None, rows: slice = ALL, columns: slice = ALL
    ) -> Tensor:
        """Return a part of the first factor, the second, or a dense `[K, N]` (None), in fp32."""
        if factor is None and layer.storage is None:
            return self._read(f"{layer.name}.weight", (columns, rows)).t().float()
        key, scale = STORED if factor is None else (FACTORS[factor], SCALES[factor])
        name = f"{layer.name}.{key}"
        if layer.storage is None:
            return self._read(name, (rows, columns)).float()
        scales = self._read(f"{layer.name}.{scale}", (ALL,))[..., columns]
        if STORAGES[layer.storage].group is None:
            return dequantized(self._read(name, (rows, columns)), scales, torch.float32)
        # Rows share numbers and scales.
        return dequantized(self._read(name, (ALL, columns)), scales, torch.float32)[rows]

    def _read(self, name: str, index: tuple[slice, ...]) -> Tensor:
        with safe_open(self.headers[name].file, framework="pt") as file:
            return file.get_slice(name)[index]
