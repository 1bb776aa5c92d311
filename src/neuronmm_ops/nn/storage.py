"""Factors in one byte: their dtypes, what must hold of them and their scales, and their values."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from neuronmm_ops.ops.backends.cpu import name_of
from neuronmm_ops.ops.products import MAX_FP8
from neuronmm_ops.ops.spec import FLOAT_DTYPES

STORAGES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
# e4m3fn up to 240 has the bits of trn1's and trn2's e4m3, which ends there.
LARGEST = {"fp8": int(MAX_FP8), "int8": 127}
# The names of a layer's tensors that are moved but never cast.
FACTORS = ("u", "v")
SCALES = ("u_scale", "v_scale")
_BITS_OF_240 = 0x77


def storage_of(dtype: torch.dtype) -> str | None:
    """Return `fp8` or `int8`; None for a dtype of weights that need no scale."""
    return next((name for name, stored in STORAGES.items() if stored == dtype), None)


def dtype_name(storage: str | None) -> str | None:
    """Return the dtype's name as torch has it, and torchao and compressed-tensors after it."""
    return None if storage is None else name_of(STORAGES[storage])


def storage_named(name: object) -> str:
    """Return the storage whose dtype has that name.

    Raises:
        ValueError: no storage has.
    """
    for storage in STORAGES:
        if dtype_name(storage) == name:
            return storage
    names = " or ".join(str(dtype_name(storage)) for storage in STORAGES)
    raise ValueError(f"storage must be {names}, or null; got {name!r}")


def factor_bytes(K: int, N: int, r: int, itemsize: int, storage: str | None = None) -> int:
    """Return the bytes of `u` `[K, r]` and `v` `[r, N]`, and of their scales where they have some.

    Args:
        K: rows of u.
        N: columns of v.
        r: the rank.
        itemsize: bytes of an element of the model's dtype.
        storage: `fp8`, `int8`, or None for that dtype.
    """
    if storage is None:
        return r * (K + N) * itemsize
    return r * (K + N) + (r + N) * torch.float32.itemsize


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
    if u.dim() != 2 or v.dim() != 2 or u.shape[1] != v.shape[0]:
        raise ValueError(
            f"{where}u must be [K, r] and v [r, N], got {list(u.shape)} and {list(v.shape)}"
        )
    storage = storage_of(u.dtype)
    _check_dtypes(u.dtype, v.dtype, where)
    if storage is None:
        if u_scale is not None or v_scale is not None:
            raise ValueError(
                f"{where}scales belong to factors in float8_e4m3fn or int8, got factors in "
                f"{name_of(u.dtype)}; multiply the scales into them"
            )
        return None
    for key, scale, count in (("u_scale", u_scale, u.shape[1]), ("v_scale", v_scale, v.shape[1])):
        _check_scale(where + key, scale, count, u.dtype)
    for key, factor in (("u", u), ("v", v)):
        _check_values(where + key, factor, storage)
    return storage


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
        if factor is not None and storage_of(factor.dtype) != storage:
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


def _check_dtypes(u: torch.dtype, v: torch.dtype, where: str = "") -> None:
    """Refuse a dtype that factors cannot have, and one-byte factors of two dtypes."""
    for key, dtype in (("u", u), ("v", v)):
        if dtype not in FLOAT_DTYPES and storage_of(dtype) is None:
            raise ValueError(
                f"{where}{key} must be bfloat16, float16, float32, float64, float8_e4m3fn or int8; "
                f"got {name_of(dtype)}"
            )
    if u != v and (storage_of(u) or storage_of(v)):
        raise ValueError(
            f"{where}u and v must have one dtype, got {name_of(u)} and {name_of(v)}; "
            "quantize both to the same"
        )


def _check_scale(key: str, scale: Tensor | None, count: int, dtype: torch.dtype) -> None:
    rule = f"{key} must be [{count}] in float32, positive and finite"
    if scale is None:
        raise ValueError(f"{rule}, got none; factors in {name_of(dtype)} need both scales")
    if scale.shape != (count,) or scale.dtype != torch.float32:
        raise ValueError(f"{rule}; got {list(scale.shape)} in {name_of(scale.dtype)}")
    if scale.is_meta:
        return
    bad = ~(torch.isfinite(scale) & (scale > 0))
    if bad.any():
        index = int(bad.nonzero()[0])
        raise ValueError(f"{rule}; got {float(scale[index])} at {index}; quantize the factor again")


def _check_values(key: str, factor: Tensor, storage: str) -> None:
    if factor.is_meta or not factor.numel():
        return
    if storage == "int8":
        if int(factor.min()) < -LARGEST[storage]:
            raise ValueError(
                f"{key} must be in -127..127 (scales are symmetric), got -128; "
                "quantize the factor again"
            )
        return
    largest = int((factor.view(torch.uint8) & 0x7F).max())
    if largest > _BITS_OF_240:
        magnitude = torch.tensor(largest, dtype=torch.uint8).view(torch.float8_e4m3fn)
        raise ValueError(
            f"{key} must be in -240..240, the range of e4m3 on trn1 and trn2; got a magnitude of "
            f"{float(magnitude):g}; quantize the factor again, for 240"
        )
