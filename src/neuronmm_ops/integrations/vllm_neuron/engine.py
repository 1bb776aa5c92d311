"""What is used of vLLM-Neuron and of vLLM: every import of them by models is in this file.

Names and signatures are those of "How to onboard a model to vLLM Neuron" (Neuron SDK 2.32).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor, nn


class Group(Protocol):
    """The tensor-parallel ranks: vLLM's `GroupCoordinator`."""

    world_size: int

    def all_gather(self, input_: Tensor, dim: int) -> Tensor:
        """Concatenate the ranks' tensors in a dimension."""
        ...

    def all_reduce(self, input_: Tensor) -> Tensor:
        """Add the ranks' tensors."""
        ...

    def reduce_scatter(self, input_: Tensor, dim: int) -> Tensor:
        """Add the ranks' tensors, and keep this rank's part of a dimension."""
        ...


class Slice(Protocol):
    """A tensor in a safetensors file, of which parts can be read."""

    def get_shape(self) -> Sequence[int]:
        """Its sizes."""
        ...

    def __getitem__(self, index: Any) -> Tensor:
        """Read a part."""
        ...


Transform = Callable[[list[Slice], int], Tensor]
"""From a parameter's tensors in the checkpoint, and the rank, to the rank's parameter."""


def factories() -> Mapping[str, Any]:
    """The engine's own factories, by the architecture's name."""
    from vllm_neuron.model.registry import get_models  # pyright: ignore

    return dict(get_models())


def tp_group() -> Group:
    """The ranks of this process's model."""
    from vllm.distributed.parallel_state import get_tp_group  # pyright: ignore

    return get_tp_group()


def model_path() -> str:
    """The model that the server was asked to load."""
    from vllm.config import get_current_vllm_config  # pyright: ignore

    return get_current_vllm_config().model_config.model


def kernel_test() -> Callable[[Tensor | str], bool]:
    """The engine's answer to whether its own functions run a kernel on a tensor or device."""
    from vllm_neuron.utils.neuron_utils import can_run_kernel  # pyright: ignore

    return can_run_kernel


def set_loader(parameter: nn.Parameter, transform: Transform) -> None:
    """Say how a parameter is made of the checkpoint."""
    from vllm_neuron.utils.weight_loader import (  # pyright: ignore
        SafetensorsWeightLoader,
        set_weight_loader,
    )

    set_weight_loader(parameter, SafetensorsWeightLoader(transform=transform))
