"""What must hold of a layer's matrices and their scales."""

import torch
from torch import Tensor

from neuronmm_ops.ops.backends.cpu import name_of
from neuronmm_ops.ops.spec import FLOAT_DTYPES
from neuronmm_ops.storages import STORAGES, WeightStorage, size_of, storage_of


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


def check_matrix(w: Tensor, w_scale: Tensor | None, name: str = "") -> str:
    """Check a matrix in a storage and its scales; return the storage.

    Args:
        w: `[K, N]`, of a dtype that some storage has.
        w_scale: `[N]`, or as the storage says.
        name: of the layer, for the messages.

    Raises:
        ValueError: what must hold does not; says what was found, and the remedy.
    """
    where = f"{name}: " if name else ""
    storage = storage_of(w.dtype)
    if storage is None or w.dim() != 2:
        raise ValueError(
            f"{where}w must be [K, N] in {_names()}, got {list(w.shape)} in {name_of(w.dtype)}"
        )
    check_stored(w, w_scale, where + "w")
    return storage.name


def check_stored(factor: Tensor, scale: Tensor | None, key: str) -> None:
    """Check one matrix, or a rank's part of it, and its scales.

    Args:
        factor: `[K, N]`, of a dtype that some storage has.
        scale: in the shape that this storage says.
        key: the matrix's name, for the messages.

    Raises:
        ValueError: what must hold does not; says what was found, and the remedy.
    """
    storage = storage_of(factor.dtype)
    assert storage is not None
    _check_scale(f"{key}_scale", scale, storage.shapes(*size_of(factor))[1], storage)
    problem = None if factor.is_meta else storage.why_not(factor)
    if problem:
        raise ValueError(f"{key} {problem}; quantize the matrix again")


def _check_scale(
    key: str, scale: Tensor | None, shape: tuple[int, ...], storage: WeightStorage
) -> None:
    rule = f"{key} must be {list(shape)} in float32, positive and finite"
    if scale is None:
        raise ValueError(f"{rule}, got none; numbers in {storage.dtype} need scales")
    if scale.shape != shape or scale.dtype != torch.float32:
        raise ValueError(f"{rule}; got {list(scale.shape)} in {name_of(scale.dtype)}")
    if scale.is_meta:
        return
    bad = ~(torch.isfinite(scale) & (scale > 0)).flatten()
    if bad.any():
        index = int(bad.nonzero()[0])
        value = float(scale.flatten()[index])
        raise ValueError(f"{rule}; got {value} at {index}; quantize the matrix again")


def _names() -> str:
    return " or ".join(name_of(storage.torch_dtype) for storage in STORAGES.values())
