"""`neuronmm::decoder_layer`: pre-norm layers of a decoder for a few new tokens, caches included."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from neuronmm_ops.ops.gating import ACTIVATIONS, gated
from neuronmm_ops.ops.products import affine, batched, flat
from neuronmm_ops.ops.spec import FLOAT_DTYPES
from neuronmm_ops.storages import STORAGES, size_of, storage_of

LINEARS = ("query", "key", "value", "output", "gate", "up", "down")
"""Order of the Linears among the operands."""
STAGES = (LINEARS[:3], LINEARS[3:4], LINEARS[4:])
"""Linears that are of one kind: all of them pairs, or all dense, and stored alike."""

_PER_LAYER = {"norms": 4, "caches": 2, "matrices": 14, "biases": 3, "scales": 14}
_MAY_BE_EMPTY = ("biases", "scales")

Tensors = Sequence[Tensor | None]
Expected = tuple[str, tuple[int, ...], Tensor | None]


class LinearOperands(NamedTuple):
    """A pair of factors, or a dense weight `v` without a `u`, with scales where it is stored."""

    name: str
    u: Tensor | None
    v: Tensor
    u_scale: Tensor | None
    v_scale: Tensor | None
    bias: Tensor | None

    @property
    def features(self) -> tuple[int, int]:
        """Features that it takes and gives."""
        K, N = size_of(self.v)
        return (K if self.u is None else size_of(self.u)[0]), N

    def low(self, x: Tensor) -> Tensor:
        """What `v` multiplies, for x [M, K] or [K]."""
        return x if self.u is None else affine(x, self.u, None, self.u_scale)

    def __call__(self, x: Tensor) -> Tensor:
        """Map x [..., K] to [..., N]."""
        low = self.low(flat(x, self.v if self.u is None else self.u))
        return batched(affine(low, self.v, self.bias, self.v_scale), x)


class LayerOperands(NamedTuple):
    """The operands of one layer: norms as the op takes them, caches, and Linears by name."""

    norms: Tensors
    keys: Tensor
    values: Tensor
    linears: dict[str, LinearOperands]


class RopeAndPlaces(NamedTuple):
    """What all layers share: RoPE's tables [B, M, 1, d], the tokens' places [B, M], and options."""

    cos: Tensor
    sin: Tensor
    places: Tensor
    eps: float
    window: int


def layers_of(
    norms: Tensors, caches: Sequence[Tensor], matrices: Tensors, biases: Tensors, scales: Tensors
) -> list[LayerOperands]:
    """The operands of each layer, from the lists that hold those of all.

    Raises:
        ValueError: lists are of other lengths, or a dense weight, a norm or a cache is missing.
    """
    given = {"norms": norms, "caches": caches, "matrices": matrices}
    given |= {"biases": biases, "scales": scales}
    count = max(1, len(matrices) // _PER_LAYER["matrices"])
    for name, size in _PER_LAYER.items():
        may_be_empty = name in _MAY_BE_EMPTY
        if len(given[name]) != count * size and not (may_be_empty and not given[name]):
            of_none = ", or none" if may_be_empty else ""
            raise _refused(
                f"{name} must hold {size} a layer{of_none}, {count * size} for {count} layers; "
                f"got {len(given[name])}"
            )

    def own(name: str, number: int) -> Tensors:
        size = _PER_LAYER[name]
        return given[name][number * size : (number + 1) * size] or (None,) * size

    found: list[LayerOperands] = []
    for number in range(count):
        pairs, pair_scales = own("matrices", number), own("scales", number)
        linears: dict[str, LinearOperands] = {}
        for n, name in enumerate(LINEARS):
            v = pairs[2 * n + 1]
            if v is None:
                raise _refused(f"layer {number}: {name} has no weight; pass v, or [in, out] itself")
            bias = own("biases", number)[n] if n < _PER_LAYER["biases"] else None
            u, u_scale, v_scale = pairs[2 * n], pair_scales[2 * n], pair_scales[2 * n + 1]
            linears[name] = LinearOperands(name, u, v, u_scale, v_scale, bias)
        keys, values = own("caches", number)
        if keys is None or values is None:
            raise _refused(f"layer {number}: caches must be keys and values, got None; pass both")
        found.append(LayerOperands(own("norms", number), keys, values, linears))
    return found


def reference(
    x: Tensor,
    residual: Tensor | None,
    rotary: Sequence[Tensor],
    positions: Tensor,
    norms: Tensors,
    caches: Sequence[Tensor],
    matrices: Tensors,
    biases: Tensors = (),
    activation: str = "silu",
    eps: float = 1e-6,
    window: int = 0,
    scales: Tensors = (),
) -> tuple[Tensor, Tensor]:
    """Return what the last MLP adds to the stream [B, M, H], and the stream before that.

    Query, key and value are RoPE's in fp32, rounded once; scores and their softmax are fp32, the
    probabilities rounded to the caches' dtype; new keys and values are written to the caches.
    """
    layers = layers_of(norms, caches, matrices, biases, scales)
    check(x, residual, rotary, positions, layers, activation, window)
    wide = torch.promote_types(x.dtype, torch.float32)
    cos, sin = [table.to(wide).unsqueeze(2) for table in rotary]
    places = positions.unsqueeze(1) + torch.arange(x.shape[1], device=x.device)
    step = RopeAndPlaces(cos, sin, places, eps, window)
    added, stream = x, residual
    for layer in layers:
        stream = added if stream is None else added + stream
        stream = stream + _attention(layer, _normed(stream, layer.norms[0], eps), step)
        added = _mlp(layer, _normed(stream, layer.norms[1], eps), activation)
    assert stream is not None  # there is a layer
    return added, stream


def _attention(layer: LayerOperands, x: Tensor, step: RopeAndPlaces) -> Tensor:
    """What attention adds for normed tokens x [B, M, H]; their keys and values join the caches."""
    (B, kv, d, T), M, dtype = layer.keys.shape, x.shape[1], x.dtype
    linears, norms = layer.linears, layer.norms
    query, key, value = [linears[name](x).unflatten(-1, (-1, d)) for name in LINEARS[:3]]
    query, key = _rotated(query, norms[2], step), _rotated(key, norms[3], step)
    sequences = torch.arange(B, device=x.device).unsqueeze(1)
    layer.keys.permute(0, 3, 1, 2).index_put_((sequences, step.places), key)
    layer.values.transpose(1, 2).index_put_((sequences, step.places), value)

    wide = step.cos.dtype
    grouped = query.unflatten(2, (kv, -1)).permute(0, 2, 3, 1, 4)  # [B, kv, group, M, d]
    scores = grouped.flatten(2, 3).to(wide) @ layer.keys.to(wide) * d**-0.5
    token, last = torch.arange(T, device=x.device), step.places.unsqueeze(-1)
    hidden = token > last
    if step.window:
        hidden = hidden | (token <= last - step.window)
    scores = scores.unflatten(2, (-1, M)).masked_fill(hidden[:, None, None], -torch.inf)
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    total = weights.sum(-1, keepdim=True)
    mixed = weights.flatten(2, 3).to(dtype).to(wide) @ layer.values.to(wide)
    mixed = (mixed.unflatten(2, (-1, M)) / total).to(dtype)
    return linears["output"](mixed.permute(0, 3, 1, 2, 4).flatten(2))


def _mlp(layer: LayerOperands, x: Tensor, activation: str) -> Tensor:
    """What the MLP adds for normed tokens x [B, M, H]."""
    gate, up, down = [layer.linears[name] for name in LINEARS[4:]]
    rows = flat(x, gate.v if gate.u is None else gate.u)
    sides = (gate.low(rows), gate.v, gate.v_scale), (up.low(rows), up.v, up.v_scale)
    hidden = gated(*sides, ACTIVATIONS[activation], "x")
    return batched(affine(down.low(hidden), down.v, None, down.v_scale), x)


def _inverse(wide: Tensor, eps: float) -> Tensor:
    """1 / the root mean square of the last dimension."""
    return torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)


def _normed(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """RMSNorm of x [..., H], which is rounded before and after it is multiplied by the weight."""
    assert weight is not None  # checked
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * _inverse(wide, eps)).to(x.dtype) * weight


def _rotated(heads: Tensor, weight: Tensor | None, step: RopeAndPlaces) -> Tensor:
    """RMSNorm, if any, and RoPE of heads [B, M, heads, d], rounded once."""
    wide = heads.to(step.cos.dtype)
    if weight is not None:
        wide = wide * _inverse(wide, step.eps) * weight.to(wide.dtype)
    first, second = wide.chunk(2, -1)
    return (wide * step.cos + torch.cat([-second, first], -1) * step.sin).to(heads.dtype)


# --- checks --------------------------------------------------------------------------------------


def check(
    x: Tensor,
    residual: Tensor | None,
    rotary: Sequence[Tensor],
    positions: Tensor,
    layers: Sequence[LayerOperands],
    activation: str,
    window: int,
) -> None:
    """Check the arguments of a call; positions where they are on a CPU and have values.

    Raises:
        ValueError: shapes or values do not fit, or Linears of a stage are of several kinds.
        TypeError: dtypes or devices differ, or the dtype is not supported.
    """
    if x.dtype not in FLOAT_DTYPES:
        raise _refused(f"dtype must be a float of 16 to 64 bits, got {x.dtype}; cast x", TypeError)
    if x.dim() != 3:
        raise _refused(f"x must have shape [B, M, H], got {list(x.shape)}; reshape it")
    if activation not in ACTIVATIONS:
        raise _refused(f"activation must be one of {', '.join(ACTIVATIONS)}; got {activation!r}")
    if window < 0:
        raise _refused(f"window must be 0, for all tokens, or more; got {window}")
    if len(rotary) != 2:
        raise _refused(f"rotary must be cos and sin, got {len(rotary)} tensors; pass both")
    B, M, H = x.shape
    for number, layer in enumerate(layers):
        where = f"layer {number}: "
        for name, shape, tensor in _expected(x, layer):
            _check_tensor(where + name, shape, tensor, x)
        heads, kv = [layer.linears[name].features[1] // layer.keys.shape[2] for name in LINEARS[:2]]
        if kv < 1 or heads % kv:
            raise _refused(f"{where}query heads must be a multiple of kv heads, got {heads}, {kv}")
        if (layer.norms[2] is None) != (layer.norms[3] is None):
            raise _refused(f"{where}norms of query and key heads come together; pass both, or None")
        for names in STAGES:
            _check_stage(where, [layer.linears[name] for name in names], x)
    d = layers[0].keys.shape[2]
    _check_tensor("residual", (B, M, H), residual, x)
    for name, table in zip(("cos", "sin"), rotary, strict=True):
        _check_tensor(name, (B, M, d), table, x)
    if positions.dtype != torch.int32 or positions.device != x.device:
        got = f"{positions.dtype} on {positions.device}"
        raise _refused(f"positions must be torch.int32 on {x.device}, got {got}", TypeError)
    if tuple(positions.shape) != (B,):
        got = f"{list(positions.shape)} for a batch of {B}"
        raise _refused(f"positions must have one place a sequence, [B]; got {got}")
    room = min(layer.keys.shape[3] for layer in layers)
    if room < M:
        raise _refused(f"caches must have room for {M} new tokens, got T = {room}; make T larger")
    if has_values(positions):
        places = positions.tolist()
        if places and not (min(places) >= 0 and max(places) <= room - M):
            raise _refused(
                f"positions must be in 0..T - M = {room - M}, got {places}; make the caches larger"
            )


def has_values(tensor: Tensor) -> bool:
    """Say whether a tensor's values can be read at once: on a CPU, not in a trace."""
    return tensor.is_cpu and type(tensor) is Tensor and not torch.compiler.is_compiling()


def _expected(
    x: Tensor, layer: LayerOperands
) -> Iterator[tuple[str, tuple[int, ...], Tensor | None]]:
    """Name, shape and tensor, or None, of what has the dtype of x."""
    if layer.keys.dim() != 4:
        raise _refused(f"keys must be [B, kv_heads, d, T], got {list(layer.keys.shape)}")
    (B, _, H), (_, kv, d, T) = x.shape, layer.keys.shape
    yield "keys", (B, kv, d, T), layer.keys
    yield "values", (B, kv, T, d), layer.values
    for place, norm in enumerate(layer.norms[:2]):
        if norm is None:
            when = ("attention", "the MLP")[place]
            raise _refused(f"the norm before {when} must be a tensor [H], got None; pass it")
        yield "a norm of the stream", (H,), norm
    for norm in layer.norms[2:]:
        yield "a norm of heads", (d,), norm
    inner = layer.linears["gate"].features[1]
    heads = layer.linears["query"].features[1] // d * d
    sizes = (H, heads), (H, kv * d), (H, kv * d), (heads, H), (H, inner), (H, inner), (inner, H)
    for linear, size in zip(layer.linears.values(), sizes, strict=True):
        if linear.features != size:
            raise _refused(f"{linear.name} must be {list(size)}, got {list(linear.features)}")
        yield f"bias of {linear.name}", size[1:], linear.bias


def _check_tensor(name: str, shape: tuple[int, ...], tensor: Tensor | None, x: Tensor) -> None:
    """Refuse another shape, or another dtype or device than x's."""
    if tensor is None:
        return
    if tuple(tensor.shape) != shape:
        raise _refused(f"{name} must be {list(shape)}, got {list(tensor.shape)}")
    if tensor.dtype != x.dtype or tensor.device != x.device:
        got = f"{tensor.dtype} on {tensor.device}"
        raise _refused(f"{name} must be {x.dtype} on {x.device}, got {got}; use .to()", TypeError)


def _check_stage(where: str, stage: Sequence[LinearOperands], x: Tensor) -> None:
    """Refuse Linears of several kinds, pairs that are none, and scales that do not fit."""
    names = ", ".join(linear.name for linear in stage)
    kinds = [(linear.u is None, linear.v.dtype, _dtype(linear.u)) for linear in stage]
    if len(set(kinds)) > 1:
        got = ", ".join(f"{'dense' if dense else 'pair'} {dtype}" for dense, dtype, _ in kinds)
        raise _refused(f"{where}{names} must be all pairs or all dense, in one dtype; got {got}")
    for linear in stage:
        K, N = linear.features
        if linear.u is not None:
            r, rows = size_of(linear.u)[1], size_of(linear.v)[0]
            if r != rows:
                raise _refused(f"{where}{linear.name}: u has {r} columns, v {rows} rows")
            if r >= min(K, N):
                raise _refused(
                    f"{where}{linear.name}: a pair's rank must be less than its features, got "
                    f"rank {r} of [{K}, {N}]; make it dense"
                )
        for matrix, scale in ((linear.u, linear.u_scale), (linear.v, linear.v_scale)):
            if matrix is not None:
                _check_scale(where + linear.name, matrix, scale, x)


def _check_scale(name: str, matrix: Tensor, scale: Tensor | None, x: Tensor) -> None:
    """Refuse a matrix of another dtype than x's or a storage's, and scales that do not fit."""
    storage = storage_of(matrix.dtype)
    if (storage is None and matrix.dtype != x.dtype) or matrix.device != x.device:
        got = f"{matrix.dtype} on {matrix.device}"
        wanted = f"{x.dtype}, or {', '.join(STORAGES)}, on {x.device}"
        raise _refused(f"{name} must be {wanted}; got {got}; use .to()", TypeError)
    wanted = None if storage is None else storage.shapes(*size_of(matrix))[1]
    if (scale is None) != (wanted is None):
        raise _refused(f"{name}: stored matrices have scales, others none; got {matrix.dtype}")
    if scale is not None and tuple(scale.shape) != wanted:
        raise _refused(f"{name}: the scale must be {wanted}, got {list(scale.shape)}")
    if scale is not None and (scale.dtype, scale.device) != (torch.float32, x.device):
        got = f"{scale.dtype} on {scale.device}"
        raise _refused(f"{name}: the scale must be torch.float32 on {x.device}; {got}", TypeError)


def _dtype(tensor: Tensor | None) -> torch.dtype | None:
    return None if tensor is None else tensor.dtype


def _refused(why: str, error: Callable[[str], Exception] = ValueError) -> Exception:
    return error(f"decoder_layer: {why}")
