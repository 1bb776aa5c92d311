"""Factors of a layer: what must hold of them and their scales, and what no cast may reach."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from neuronmm_ops.ops.backends.cpu import name_of
from neuronmm_ops.ops.spec import FLOAT_DTYPES
from neuronmm_ops.storages import FACTORS, SCALES, STORAGES, WeightStorage, size_of, storage_of


def check_factors(
    u: Tensor,
    v: Tensor,
    u_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    name: str = "",
) -> str | None:
    """Check factors and scales; return the storage. Values on the meta device are not looked at.

    Args:
        u: `[K, r]`.
        v: `[r, N]`.
        u_scale: `[r]`, of one-byte factors only.
        v_scale: `[N]`, of one-byte factors only.
        name: of the layer, for the messages.

    Raises:
        ValueError: what must hold does not; says what was found, and the remedy.
    """
    where = f"{name}: " if name else ""
    if u.dim() != 2 or v.dim() != 2 or u.shape[1] != size_of(v)[0]:
        raise ValueError(
            f"{where}u must be [K, r] and v [r, N], got {list(u.shape)} and {list(v.shape)}"
        )
    for key, factor in (("u", u), ("v", v)):
        if factor.dtype not in FLOAT_DTYPES and storage_of(factor.dtype) is None:
            raise ValueError(
                f"{where}{key} must be bfloat16, float16, float32, float64, {_names()}; "
                f"got {name_of(factor.dtype)}"
            )
    storage = storage_of(u.dtype)
    if u.dtype != v.dtype and (storage or storage_of(v.dtype)):
        raise ValueError(
            f"{where}u and v must have one dtype, got {name_of(u.dtype)} and {name_of(v.dtype)}; "
            "quantize both to the same"
        )
    if storage is None:
        if u_scale is not None or v_scale is not None:
            raise ValueError(
                f"{where}scales belong to factors in {_names()}, got factors in "
                f"{name_of(u.dtype)}; multiply the scales into them"
            )
        return None
    check_stored(u, u_scale, where + "u")
    check_stored(v, v_scale, where + "v")
    return storage.name


def check_stored(factor: Tensor, scale: Tensor | None, key: str) -> None:
    """Check one factor, or a rank's part of it, and its scales.

    Args:
        factor: `[K, N]`, of a dtype that some storage has.
        scale: in the shape that this storage says.
        key: the factor's name, for the messages.

    Raises:
        ValueError: what must hold does not; says what was found, and the remedy.
    """
    storage = storage_of(factor.dtype)
    assert storage is not None
    _check_scale(f"{key}_scale", scale, storage.shapes(*size_of(factor))[1], storage)
    problem = None if factor.is_meta else storage.why_not(factor)
    if problem:
        raise ValueError(f"{key} {problem}; quantize the factor again")


def one_byte_tensors(module: nn.Module) -> list[Tensor]:
    """Return a layer's factors in one byte and their scales, which no cast may reach."""
    if getattr(module, "storage", None) not in STORAGES:
        return []
    tensors = (getattr(module, name, None) for name in (*FACTORS, *SCALES))
    return [tensor for tensor in tensors if isinstance(tensor, Tensor)]


def without_cast(fn: Callable[[Tensor], Tensor], module: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return `fn`, which moves and may cast, such that it only moves the layer's one-byte tensors.

    Args:
        fn: as `nn.Module._apply` takes it.
        module: the layer.
    """
    kept = {id(tensor) for tensor in one_byte_tensors(module)}

    def move(tensor: Tensor) -> Tensor:
        result = fn(tensor)
        is_cast = id(tensor) in kept and result.dtype != tensor.dtype
        return tensor.to(result.device) if is_cast else result

    return move if kept else fn


def why_not_loadable(module: nn.Module, state: Mapping[str, Any], prefix: str) -> str | None:
    """Say why a layer cannot load its factors of a state dict: copying would cast in silence.

    Args:
        module: with a `storage`, and the attributes of `FACTORS` and `SCALES`.
        state: the state dict.
        prefix: of the layer's names in it.

    Returns:
        None where it can, or where torch will say what is missing or has another shape.
    """
    storage: str | None = getattr(module, "storage", None)
    loaded: dict[str, Any] = {name: state.get(prefix + name) for name in (*FACTORS, *SCALES)}
    for name in FACTORS:
        factor, current = loaded[name], getattr(module, name)
        if factor is not None and storage_of(factor.dtype) != STORAGES.get(storage or ""):
            return (
                f"{prefix}{name} must be {name_of(current.dtype)}, got {name_of(factor.dtype)}; "
                "give the layer the storage of the state dict (SVDLinear(..., storage=))"
            )
    if storage is None or any(
        tensor is None or tensor.shape != getattr(module, name).shape
        for name, tensor in loaded.items()
    ):
        return None
    try:
        check_factors(*loaded.values(), name=prefix.removesuffix("."))
    except ValueError as error:
        return str(error)
    return None


def _check_scale(
    key: str, scale: Tensor | None, shape: tuple[int, ...], storage: WeightStorage
) -> None:
    rule = f"{key} must be {list(shape)} in float32, positive and finite"
    if scale is None:
        raise ValueError(f"{rule}, got none; factors in {storage.dtype} need both scales")
    if scale.shape != shape or scale.dtype != torch.float32:
        raise ValueError(f"{rule}; got {list(scale.shape)} in {name_of(scale.dtype)}")
    if scale.is_meta:
        return
    bad = ~(torch.isfinite(scale) & (scale > 0)).flatten()
    if bad.any():
        index = int(bad.nonzero()[0])
        found = float(scale.flatten()[index])
        raise ValueError(f"{rule}; got {found} at {index}; quantize the factor again")


def _names() -> str:
    return " or ".join(name_of(storage.torch_dtype) for storage in STORAGES.values())
