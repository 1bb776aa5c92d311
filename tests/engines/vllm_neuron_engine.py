"""Stand-ins for the classes of vLLM-Neuron and vLLM that the integration uses.

Signatures are those of AWS's "How to onboard a model to vLLM Neuron": an argument that is missing,
of another name or of another kind raises. `vllm_neuron_decoder` has a small model of the engine's.
"""

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn


class Group:
    """vLLM's GroupCoordinator, on torch's default process group where there is one."""

    def __init__(self) -> None:
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        self.rank_in_group = dist.get_rank() if dist.is_initialized() else 0
        self.sent: list[tuple[str, tuple[int, ...]]] = []

    def all_gather(self, input_: Tensor, dim: int = -1) -> Tensor:
        """Concatenate in a dimension."""
        assert -input_.dim() <= dim < input_.dim()
        self.sent.append(("all_gather", tuple(input_.shape)))
        parts = [torch.empty_like(input_) for _ in range(self.world_size)]
        dist.all_gather(parts, input_.contiguous())
        return torch.cat(parts, dim)

    def all_reduce(self, input_: Tensor) -> Tensor:
        """Add in place, as the engine does."""
        self.sent.append(("all_reduce", tuple(input_.shape)))
        if self.world_size > 1:
            assert input_.is_contiguous()
            dist.all_reduce(input_)
        return input_

    def reduce_scatter(self, input_: Tensor, dim: int = -1) -> Tensor:
        """Add, and keep this rank's part."""
        assert input_.shape[dim] % self.world_size == 0
        self.sent.append(("reduce_scatter", tuple(input_.shape)))
        total = input_.clone()
        dist.all_reduce(total)
        return total.chunk(self.world_size, dim)[self.rank_in_group].contiguous()


# --- weights -------------------------------------------------------------------------------------


@dataclass
class SafetensorsWeightLoader:
    """How a parameter is made of slices of the checkpoint."""

    transform: Callable[[list[Any], int], Tensor] | None = None

    def load(self, slices: list[Any], rank: int) -> Tensor:
        """Make the parameter."""
        if self.transform is None:
            (only,) = slices
            return only[:].contiguous()
        inspect.signature(self.transform).bind(slices, rank)
        return self.transform(slices, rank).contiguous()


def set_weight_loader(param: nn.Parameter, loader: SafetensorsWeightLoader) -> None:
    """Attach a loader."""
    assert type(param) is nn.Parameter
    assert type(loader) is SafetensorsWeightLoader
    param.weight_loader = loader  # pyright: ignore


def sharded(dim: int, tp: int) -> SafetensorsWeightLoader:
    """The engine's loader of a dense matrix that is stored transposed."""

    def transform(slices: list[Any], rank: int) -> Tensor:
        (view,) = slices
        width = view.get_shape()[1 - dim] // tp
        own = slice(rank * width, (rank + 1) * width)
        return (view[own] if dim == 1 else view[:, own]).T

    return SafetensorsWeightLoader(transform)


def fused_qkv(q_size: int, kv_size: int, replicas: int) -> SafetensorsWeightLoader:
    """The engine's loader of the fused queries, keys and values."""

    def transform(slices: list[Any], rank: int) -> Tensor:
        places = ((q_size, rank), (kv_size, rank // replicas), (kv_size, rank // replicas))
        parts = [view[r * n : (r + 1) * n].T for view, (n, r) in zip(slices, places, strict=True)]
        return torch.cat(parts, dim=1)

    return SafetensorsWeightLoader(transform)


def load_sharded(
    path: str, rank: int, model: nn.Module, mappings: dict[str, Any], device: torch.device
) -> dict[str, Tensor]:
    """SafetensorsCheckpoint: every parameter from its keys, cast to its dtype."""
    assert isinstance(path, str)
    files = [safe_open(file, framework="pt") for file in sorted(Path(path).glob("*.safetensors"))]
    where = {name: file for file in files for name in file.keys()}  # noqa: SIM118
    loaded: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        keys = mappings.get(name, name)
        keys = keys if isinstance(keys, list) else [keys]
        missing = [key for key in keys if key not in where]
        if missing:
            raise RuntimeError(f"Checkpoint key(s) not found for parameter '{name}': {missing}.")
        loader = getattr(parameter, "weight_loader", SafetensorsWeightLoader())
        tensor = loader.load([where[key].get_slice(key) for key in keys], rank)
        assert tensor.shape == parameter.shape, (name, tensor.shape, parameter.shape)
        loaded[name] = tensor.to(parameter.dtype).to(device)
    return loaded


@dataclass
class NeuronConfig:
    """The fields that the integration looks at."""

    attention_dp_size: int = 1
    mlp_dp_size: int = 1
    apply_prefill_dcp: bool = False
    quantization: str | None = None


# --- the packages --------------------------------------------------------------------------------


@dataclass
class Engine:
    """What this process's engine was told."""

    model: str = ""
    group: Group = field(default_factory=Group)
    registered: dict[str, Any] = field(default_factory=dict[str, Any])
    runs_kernels: bool = False
    models: tuple[str, ...] = ("LlamaForCausalLM", "Qwen3ForCausalLM")


engine = Engine()


def tp_group() -> Group:
    """vLLM's get_tp_group."""
    return engine.group


def can_run_kernel(device: Tensor | str = "") -> bool:
    """The engine's answer, which tests choose."""
    assert isinstance(device, (Tensor, str))
    return engine.runs_kernels


class ModelRegistry:
    """vLLM's registry of architectures."""

    @staticmethod
    def get_supported_archs() -> set[str]:
        """The names."""
        return set(engine.registered)

    @staticmethod
    def register_model(model_arch: str, model_cls: Any) -> None:
        """Register a class, or where it is."""
        assert isinstance(model_arch, str)
        assert isinstance(model_cls, type) or model_cls.count(":") == 1
        assert model_arch not in engine.registered, "already registered, will be overwritten"
        engine.registered[model_arch] = model_cls


def get_models() -> list[tuple[str, type]]:
    """The engine's registry."""
    from vllm_neuron_decoder import factory

    return [(name, factory(name.startswith("Qwen3"))) for name in engine.models]


def install(model: str | Path = "", wrap_nki: Any = None) -> Engine:
    """Put the packages where imports find them, for a fresh engine.

    Args:
        model: that the server was asked to load.
        wrap_nki: the engine's own, in the module where release 0.21 has it, `can_run_kernel` too;
            None is a later release.
    """
    global engine
    engine = Engine(str(model))
    config = SimpleNamespace(model_config=SimpleNamespace(model=engine.model))
    modules: dict[str, dict[str, Any]] = {
        "vllm": {"ModelRegistry": ModelRegistry},
        "vllm.config": {"get_current_vllm_config": lambda: config},
        "vllm.distributed": {},
        "vllm.distributed.parallel_state": {"get_tp_group": tp_group},
        "vllm_neuron": {},
        "vllm_neuron.model": {},
        "vllm_neuron.model.registry": {"get_models": get_models},
        "vllm_neuron.utils": {},
        "vllm_neuron.utils.neuron_utils": {"can_run_kernel": can_run_kernel},
        "vllm_neuron.utils.weight_loader": {
            "SafetensorsWeightLoader": SafetensorsWeightLoader,
            "set_weight_loader": set_weight_loader,
        },
    }
    if wrap_nki is not None:
        del modules["vllm_neuron.utils.neuron_utils"]
        hop = {"can_run_kernel": can_run_kernel, "wrap_nki": wrap_nki}
        modules |= {"vllm_neuron.nki": {}, "vllm_neuron.nki.nki_hop": hop}
    for name, members in modules.items():
        module = ModuleType(name)
        module.__spec__ = SimpleNamespace(name=name)  # pyright: ignore
        module.__path__ = []
        vars(module).update(members)
        sys.modules[name] = module
    return engine


def uninstall() -> None:
    """Take the packages away."""
    for name in [n for n in sys.modules if n.partition(".")[0] in ("vllm", "vllm_neuron")]:
        del sys.modules[name]
