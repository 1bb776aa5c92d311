"""What is used of vLLM-Neuron and of vLLM: every import of them by models is in this file.

Names and signatures are those of "How to onboard a model to vLLM Neuron" (Neuron SDK 2.32), and of
the public source of its releases.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from torch import Tensor, nn

from neuronmm_ops.ops.backends.environment import wrapper

GroupCoordinator = Any
"""The tensor-parallel ranks: vLLM's `GroupCoordinator`."""
Slice = Any
"""A tensor in a safetensors file, of which parts can be read."""
_HOP = "vllm_neuron.nki.nki_hop"
"""Where release 0.21 has what later ones divide between two modules."""
Transform = Callable[[list[Slice], int], Tensor]
"""From a parameter's tensors in the checkpoint, and the rank, to the rank's parameter."""


def factories() -> Mapping[str, Any]:
    """The engine's own factories, by the architecture's name."""
    from vllm_neuron.model.registry import get_models  # pyright: ignore

    return dict(get_models())


def tp_group() -> GroupCoordinator:
    """The ranks of this process's model."""
    from vllm.distributed.parallel_state import get_tp_group  # pyright: ignore

    return get_tp_group()


def model_path() -> str:
    """The model that the server was asked to load."""
    from vllm.config import get_current_vllm_config  # pyright: ignore

    return get_current_vllm_config().model_config.model  # pyright: ignore


def kernel_test() -> Callable[[Tensor | str], bool]:
    """The engine's answer to whether its own functions run a kernel on a tensor or device.

    Raises:
        ImportError: the installed release has it in no module where one had it.
    """
    modules = ("vllm_neuron.utils.neuron_utils", _HOP)
    test = _member("can_run_kernel", *modules)
    if test is None:
        raise ImportError(
            f"can_run_kernel must be in {' or '.join(modules)}, the installed vllm-neuron has it "
            "in neither; install a release that docs/vllm-neuron.md names"
        )
    return test


def kernel_wrapper() -> Any:
    """`wrap_nki`: of the package that brings the device, or the engine's own; None without."""
    return wrapper("wrap_nki") or _member("wrap_nki", _HOP)


def _member(name: str, *modules: str) -> Any:
    """A name of the first module that has it; None where no installed one does."""
    for module in modules:
        try:
            member = getattr(import_module(module), name, None)
        except ModuleNotFoundError as error:
            if not module.startswith(str(error.name)):
                raise
            continue
        if member is not None:
            return member
    return None


def set_loader(parameter: nn.Parameter, transform: Transform) -> None:
    """Say how a parameter is made of the checkpoint."""
    from vllm_neuron.utils.weight_loader import (  # pyright: ignore
        SafetensorsWeightLoader,
        set_weight_loader,
    )

    set_weight_loader(parameter, SafetensorsWeightLoader(transform=transform))
