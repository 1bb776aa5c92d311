"""The quantization method `neuronmm` of vLLM: which layers are low-rank, by the record."""

# vLLM is not installed where types are checked.
# pyright: reportMissingImports=false, reportUntypedBaseClass=false

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization import (
    QuantizationConfig,
    register_quantization_config,
)
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.models.utils import WeightsMapper

from neuronmm_ops.checkpoint import INDEX, SINGLE, inspect_checkpoint
from neuronmm_ops.compress.record import QUANT_METHOD, report_of
from neuronmm_ops.compress.report import CompressionReport, LayerReport
from neuronmm_ops.engines.vllm.linear import (
    DenseLinearMethod,
    LowRankLinearMethod,
    remember_parent,
)
from neuronmm_ops.manifest import check_weights


class VllmNeuronMMConfig(QuantizationConfig):
    """The record of a compressed checkpoint in the place where vLLM keeps quantization configs.

    Args:
        report: the record.
    """

    # vLLM leaves out tensors that look like scales of its cache, and v's scales would.
    _ignore_unexpected_suffixes = ()

    def __init__(self, report: CompressionReport) -> None:
        super().__init__()
        # By vLLM's names; the layers keep the checkpoint's.
        self.layers = {layer.name: layer for layer in report.layers if layer.is_replaced}
        # Under which prefix vLLM builds the model: "draft_model" for one that drafts.
        self.root: str | None = None

    @classmethod
    def get_name(cls) -> str:
        """Return `neuronmm`."""
        return QUANT_METHOD

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        """Return the dtypes that a model may compute in."""
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """Say that the ops ask nothing of a GPU."""
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        """Say that config.json holds everything."""
        return []

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Read the record.

        Raises:
            CheckpointError: it is of another version, of an unknown storage, or malformed.
        """
        return cls(report_of(config))

    def maybe_update_config(
        self, model_name: str, hf_config: Any = None, revision: str | None = None
    ) -> None:
        """Check the record against the headers of a local checkpoint, before anything is loaded.

        Raises:
            CheckpointError: they are not of the same checkpoint, or the weights are not what
                `manifest.json` says.
        """
        del hf_config, revision
        directory = Path(model_name)
        if any((directory / name).is_file() for name in (SINGLE, INDEX)):
            inspect_checkpoint(directory)
            check_weights(directory, values=True)

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Return how a layer is multiplied by.

        Raises:
            ValueError: it is low-rank, and vLLM's class of it cannot be, or the ranks cannot divide
                the model's MLPs.
        """
        parts = prefix.split(".")
        paths = [".".join(parts[start:]) for start in range(len(parts))]
        if isinstance(layer, LinearBase):
            _check_intermediate_size()
            for depth, path in enumerate(paths):
                names = self._names(path)
                layers = [self.layers.get(name) for name in names]
                if any(layers):
                    self._check_root(".".join(parts[:depth]), prefix, path)
                    return LowRankLinearMethod(_original(names, layers), layers)
            return DenseLinearMethod()
        for name, record in self.layers.items():
            if any(path and f"{name}.".startswith(f"{path}.") for path in paths):
                raise ValueError(
                    f"{record.name}: vLLM's {type(layer).__name__} takes no low-rank factors "
                    "and no storage; compress again with targets, or --head-storage, that leave it "
                    "as it is"
                )
        return None

    def _names(self, path: str) -> list[str]:
        """The names that the members of a layer would have in the record."""
        if path in self.layers:  # one matrix in the checkpoint, too
            return [path]
        parent, dot, leaf = path.rpartition(".")
        return [f"{parent}{dot}{name}" for name in self.packed_modules_mapping.get(leaf, [leaf])]

    def _check_root(self, root: str, prefix: str, path: str) -> None:
        """Refuse a second module of the model for the layers of the record."""
        if self.root is None:
            self.root = root
        if self.root != root:
            raise ValueError(
                f"{prefix}: {path} of config.json must be one layer of the model, vLLM has it "
                f"below {self.root or 'its root'!r} and {root or 'its root'!r}; serve it dense"
            )

    def apply_vllm_mapper(self, hf_to_vllm_mapper: WeightsMapper) -> None:
        """Take over vLLM's names of the layers."""
        self.layers = hf_to_vllm_mapper.apply_dict(self.layers)

    @staticmethod
    def get_cache_scale_mapper() -> WeightsMapper:
        """Rename nothing: `v_scale` is of the factor v, not of values in the cache."""
        return WeightsMapper()


_registered = False


def register_config() -> None:
    """Register the config, and the hook by which layers learn of their MLP, once a process."""
    global _registered
    if not _registered:
        register_quantization_config(QUANT_METHOD)(VllmNeuronMMConfig)
        register_module_module_registration_hook(remember_parent)
        _registered = True


def _check_intermediate_size() -> None:
    """Refuse ranks that do not divide it, before vLLM does without a word."""
    config = get_current_vllm_config()
    size = getattr(config.model_config.hf_text_config, "intermediate_size", None)
    tp = config.parallel_config.tensor_parallel_size
    if isinstance(size, int) and size % tp:
        raise ValueError(
            f"tensor_parallel_size must divide intermediate_size, got {tp} and {size}; "
            f"use one that divides {size}"
        )


def _original(names: list[str], layers: list[LayerReport | None]) -> list[str]:
    """The checkpoint's names of a fused layer's members."""
    known = next(layer for layer in layers if layer is not None)
    parent = known.name.rpartition(".")[0]
    return [f"{parent}.{name.rpartition('.')[2]}".lstrip(".") for name in names]
