"""`neuronmm::decoder_layer`: pre-norm layers of a decoder for a few new tokens, caches included."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from neuronmm_ops.ops.gating import ACTIVATIONS, gated
from neuronmm_ops.ops.layered import LayeredSpec
from neuronmm_ops.ops.products import affine, batched, flat
from neuronmm_ops.ops.spec import Operand
from neuronmm_ops.storages import COMPUTES, size_of

LINEARS = ("query", "key", "value", "output", "gate", "up", "down")
"""Order of the Linears among the operands."""

Tensors = Sequence[Tensor | None]


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
        ValueError: a dense weight is missing.
    """
    count, pairs = len(caches) // 2, 2 * len(LINEARS)
    biased = list(biases) or [None] * (3 * count)
    scaled = list(scales) or [None] * (pairs * count)
    found: list[LayerOperands] = []
    for number in range(count):
        linears: dict[str, LinearOperands] = {}
        for n, name in enumerate(LINEARS):
            place = pairs * number + 2 * n
            u, v = matrices[place : place + 2]
            u_scale, v_scale = scaled[place : place + 2]
            if v is None:
                raise ValueError(
                    f"decoder_layer: layer {number}: {name} has no weight; pass v, or [in, out] "
                    "itself"
                )
            bias = biased[3 * number + n] if n < 3 else None
            linears[name] = LinearOperands(name, u, v, u_scale, v_scale, bias)
        own_norms = norms[4 * number : 4 * number + 4]
        keys, values = caches[2 * number : 2 * number + 2]
        found.append(LayerOperands(own_norms, keys, values, linears))
    return found


def reference(
    x: Tensor,
    residual: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    norms: Tensors,
    caches: Sequence[Tensor],
    matrices: Tensors,
    biases: Tensors,
    scales: Tensors,
    activation: str = "silu",
    eps: float = 1e-6,
    window: int = 0,
    compute: str = "x",
) -> tuple[Tensor, Tensor]:
    """Return what the last MLP adds to the stream [B, M, H], and the stream before that.

    Query, key and value are RoPE's in fp32, rounded once; scores and their softmax are fp32, the
    probabilities rounded to the caches' dtype; new keys and values are written to the caches.
    """
    tensors = (x, residual, cos, sin, positions, norms, caches, matrices, biases, scales)
    SPEC.check(*tensors, activation, eps, window, compute)
    layers = layers_of(norms, caches, matrices, biases, scales)
    wide = torch.promote_types(x.dtype, torch.float32)
    cos, sin = [table.to(wide).unsqueeze(2) for table in (cos, sin)]
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


def rule(
    x: Tensor,
    residual: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    norms: Tensors,
    caches: Sequence[Tensor],
    matrices: Tensors,
    biases: Tensors,
    scales: Tensors,
    *options: object,
) -> None:
    """What the sizes of operands do not say; of positions where they are on a CPU, with values.

    Raises:
        ValueError: as its message says.
    """
    del residual, cos, sin
    window = options[2]
    assert isinstance(window, int)
    if x.dim() != 3:
        raise _refused(f"x must have shape [B, M, H], got {list(x.shape)}; reshape it")
    if window < 0:
        raise _refused(f"window must be 0, for all tokens, or more; got {window}")
    layers, (B, M, H) = layers_of(norms, caches, matrices, biases, scales), x.shape
    if len(positions) != B:
        got = f"{len(positions)} for a batch of {B}"
        raise _refused(f"positions must have one place a sequence; got {got}")
    for number, layer in enumerate(layers):
        _check_layer(f"layer {number}: ", layer, H)
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


def _check_layer(where: str, layer: LayerOperands, H: int) -> None:
    """Refuse heads that do not fit caches, and Linears that do not fit each other."""
    (_, kv, d, _), linears = layer.keys.shape, layer.linears
    width, inner = linears["query"].features[1], linears["gate"].features[1]
    if width % (kv * d):
        raise _refused(
            f"{where}query heads must be a multiple of kv heads, got {width} features for {kv} kv "
            f"heads of {d}"
        )
    if (layer.norms[2] is None) != (layer.norms[3] is None):
        raise _refused(f"{where}norms of query and key heads come together; pass both, or None")
    sizes = (H, width), (H, kv * d), (H, kv * d), (width, H), (H, inner), (H, inner), (inner, H)
    for linear, size in zip(linears.values(), sizes, strict=True):
        K, N = linear.features
        if size != (K, N):
            raise _refused(f"{where}{linear.name} must be {list(size)}, got {[K, N]}")
        if linear.u is not None and linear.u.dtype != linear.v.dtype:
            raise _refused(
                f"{where}{linear.name}: a pair's factors must be stored alike, got "
                f"{linear.u.dtype} and {linear.v.dtype}"
            )
        if linear.u is not None and size_of(linear.u)[1] >= min(K, N):
            raise _refused(
                f"{where}{linear.name}: a pair's rank must be less than its features, got rank "
                f"{size_of(linear.u)[1]} of {[K, N]}; make it dense"
            )

    for names in (LINEARS[:3], LINEARS[4:]):
        dtypes = [str(linears[name].v.dtype) for name in names]
        if len({*dtypes}) > 1:
            raise _refused(
                f"{where}{', '.join(names)} must be stored alike, got {', '.join(dtypes)}"
            )


def _refused(why: str) -> ValueError:
    return ValueError(f"decoder_layer: {why}")


# --- the op --------------------------------------------------------------------------------------


def _matrices() -> Iterator[Operand]:
    widths = ("H", "A"), ("H", "C"), ("H", "C"), ("A", "H"), ("H", "I"), ("H", "I"), ("I", "H")
    for name, (K, N) in zip(LINEARS, widths, strict=True):
        yield Operand(f"u_{name}", f"{K} r_{name}", optional=True, group="matrices")
        yield Operand(f"v_{name}", f"r_{name} {N}", optional=True, group="matrices")


SPEC = LayeredSpec(
    "decoder_layer",
    operands=(
        Operand("x", "... H", "activation"),
        Operand("residual", "... H", "activation", optional=True),
        Operand("cos", "... D", "activation"),
        Operand("sin", "... D", "activation"),
        Operand("positions", "B", "integer"),
        Operand("input_norm", "H", "vector", group="norms"),
        Operand("mlp_norm", "H", "vector", group="norms"),
        Operand("query_norm", "D", "vector", optional=True, group="norms"),
        Operand("key_norm", "D", "vector", optional=True, group="norms"),
        Operand("key_cache", "B kv D t", "state", group="caches"),
        Operand("value_cache", "B kv t D", "state", group="caches"),
        *_matrices(),
        Operand("bias_query", "A", "bias", optional=True, group="biases"),
        Operand("bias_key", "C", "bias", optional=True, group="biases"),
        Operand("bias_value", "C", "bias", optional=True, group="biases"),
    ),
    reference=reference,
    choices={"activation": tuple(ACTIVATIONS), "eps": 1e-6, "window": 0},
    outputs=("H", "H"),
    is_scaled=True,
    computes=COMPUTES[:1],
    is_mixed=True,
    rule=rule,
)
