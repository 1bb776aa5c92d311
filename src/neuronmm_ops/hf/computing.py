"""The dtype in which a model computes, which is not always its checkpoint's, and the device."""

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PreTrainedModel

from neuronmm_ops.hf.loading import load
from neuronmm_ops.nn import CompressedLinear, pack_, relayout_
from neuronmm_ops.ops.backends.cpu import compute_dtype

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
AUTO = "auto"


def load_computing(
    model: str | Path,
    dtype: str | torch.dtype = AUTO,
    device: torch.device | str = "cpu",
    tp: int = 1,
) -> PreTrainedModel:
    """Load a causal LM onto a device, in the dtype that it is to compute in; for reading only.

    Its weights are compared with `manifest.json`, see `load`.

    Args:
        model: a local directory, or a hub id.
        dtype: torch's, or `float32`, `bfloat16`, `float16`, or `auto`: the model's own where the
            device multiplies that fast and otherwise float32.
        device: of torch, such as `cpu` or `cuda:1`.
        tp: processes that divide the model, see `load`.

    Returns:
        The model; its `config.dtype` is still that of the checkpoint.

    Raises:
        CheckpointError: the model cannot be loaded.
        ValueError: the dtype or the device is not to be had.
        WorkerLostError: another of these processes has ended.
    """
    place = check_device(device)
    if tp > 1:
        _check_place(place)
    loaded: PreTrainedModel = load(model, tp=tp, verify=True).to(place)  # pyright: ignore
    cast_(loaded, dtype_of(dtype, loaded))
    if tp == 1 and place.type == "cpu":
        relayout_(loaded)  # after the cast: the quicker order is the dtype's
    return loaded


def load_packed(
    model: str | Path,
    dtype: str | torch.dtype = AUTO,
    device: torch.device | str = "cpu",
    tp: int = 1,
) -> PreTrainedModel:
    """Do what `load_computing` does; on the CPU of one process pack the model, see `nn.pack_`."""
    loaded = load_computing(model, dtype, device, tp)
    return pack_(loaded) if loaded.device.type == "cpu" and tp == 1 else loaded


def load_on(model: str | Path, device: torch.device) -> PreTrainedModel:
    """Load a causal LM in its own dtype, as `load` does, verified, onto a device.

    On a CPU its factors are in the order that is faster for a few tokens.
    """
    loaded: PreTrainedModel = load(model, verify=True).to(device)  # pyright: ignore
    return relayout_(loaded) if device.type == "cpu" else loaded


def check_device(device: torch.device | str) -> torch.device:
    """Return the device; raise ValueError where torch does not know it or cannot use it here."""
    try:
        checked = torch.device(device)
    except RuntimeError:
        raise ValueError(
            f"device must be cpu, cuda or another of torch's, such as cuda:1; got {device!r}"
        ) from None
    if checked.type == "cpu":
        return checked
    backend: Any = getattr(torch, checked.type, None)
    if not getattr(backend, "is_available", bool)():
        raise ValueError(
            f"device {checked.type} is not available here (neuronmm doctor says why); use cpu"
        )
    if checked.index is not None and checked.index >= backend.device_count():
        raise ValueError(
            f"device {checked} is not available: there are {backend.device_count()} of its type"
        )
    return checked


def _check_place(device: torch.device) -> None:
    """Refuse a device other than that on which Transformers divides a model."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    kind = "cpu" if accelerator is None else accelerator.type
    if device.type != kind:
        raise ValueError(
            f"many processes divide a model on this machine's {kind}, got device {device.type}; "
            f"give --device {kind}"
        )


def dtype_of(
    dtype: str | torch.dtype, model: nn.Module, device: torch.device | None = None
) -> torch.dtype:
    """Return the dtype of a name; of `auto` for a model in its own, on its or another device."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == AUTO:
        weight = next(p for p in model.parameters() if p.is_floating_point())
        return compute_dtype(weight.dtype, device or weight.device)
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join((AUTO, *DTYPES))}; got {dtype!r}")
    return DTYPES[dtype]


def cast_(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast parameters and saved buffers in place; others, such as RoPE's angles, keep theirs.

    Matrices in one byte and their scales stay as they are.
    """
    for _, tensor in _floating(model):
        if is_traceable_wrapper_subclass(tensor):  # a DTensor, whose data cannot be set
            cast = nn.Parameter(tensor.detach().to(dtype), tensor.requires_grad)
            torch.utils.swap_tensors(tensor, cast)
        else:
            tensor.data = tensor.data.to(dtype)


@contextmanager
def computing_in(model: nn.Module, dtype: torch.dtype) -> Generator[None, None, None]:
    """Hold the model in `dtype` for a block, and afterwards in the dtypes that it had.

    What the block leaves alone comes back bit for bit. Factors `u` and `v` that it puts in the
    place of a `weight` get the weight's dtype.
    """
    # The dtype of a tensor that casting back restores exactly, the values of any other.
    before: dict[str, torch.dtype | Tensor] = {}
    for name, tensor in _floating(model):
        is_exact = torch.promote_types(tensor.dtype, dtype) == dtype
        before[name] = tensor.dtype if is_exact else tensor.data
        tensor.data = tensor.data.to(dtype)
    try:
        yield
    finally:
        for name, tensor in _floating(model):
            replaced = f"{name.rpartition('.')[0]}.weight"
            known = before[name] if name in before else before[replaced]
            # A factor's placeholder has the name of the weight that it stands for.
            if name in before and isinstance(known, Tensor) and known.shape == tensor.shape:
                tensor.data = known
            else:
                tensor.data = tensor.data.to(known.dtype if isinstance(known, Tensor) else known)


def _floating(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the floating-point parameters and saved buffers that a cast is to reach, each once."""
    left = {
        id(tensor)
        for module in model.modules()
        for tensor in (
            *(module.one_byte_tensors() if isinstance(module, CompressedLinear) else ()),
            *(module._buffers[name] for name in module._non_persistent_buffers_set),
        )
    }
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if tensor.is_floating_point() and id(tensor) not in left:
            yield name, tensor
