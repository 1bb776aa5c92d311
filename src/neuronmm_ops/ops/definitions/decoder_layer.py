"""`neuronmm::decoder_layer`: pre-norm layers of a decoder for a few new tokens, caches included."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from neuronmm_ops.ops.definitions.attention import (
    RopeAndPlaces,
    attended,
    inverse_root,
    problem_of_heads,
    problem_of_places,
    step_of,
)
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
    layers: list[LayerOperands] = []
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
        layers.append(LayerOperands(own_norms, keys, values, linears))
    return layers


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
    step = step_of(x, cos, sin, positions, eps, window)
    added, stream = x, residual
    for layer in layers:
        stream = added if stream is None else added + stream
        stream = stream + _attention(layer, _normed(stream, layer.norms[0], eps), step)
        added = _mlp(layer, _normed(stream, layer.norms[1], eps), activation)
    assert stream is not None  # there is a layer
    return added, stream


def _attention(layer: LayerOperands, x: Tensor, step: RopeAndPlaces) -> Tensor:
    """What attention adds for normed tokens x [B, M, H]; their keys and values join the caches."""
    linears, norms, d = layer.linears, layer.norms, layer.keys.shape[2]
    heads = [linears[name](x).unflatten(-1, (-1, d)) for name in LINEARS[:3]]
    mixed = attended(heads, (norms[2], norms[3]), (layer.keys, layer.values), step)
    return linears["output"](mixed)


def _mlp(layer: LayerOperands, x: Tensor, activation: str) -> Tensor:
    """What the MLP adds for normed tokens x [B, M, H]."""
    gate, up, down = [layer.linears[name] for name in LINEARS[4:]]
    rows = flat(x, gate.v if gate.u is None else gate.u)
    sides = (gate.low(rows), gate.v, gate.v_scale), (up.low(rows), up.v, up.v_scale)
    hidden = gated(*sides, ACTIVATIONS[activation], "x")
    return batched(affine(down.low(hidden), down.v, None, down.v_scale), x)


def _normed(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """RMSNorm of x [..., H], which is rounded before and after it is multiplied by the weight."""
    assert weight is not None  # checked
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * inverse_root(wide, eps)).to(x.dtype) * weight


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
    layers, (B, M, H) = layers_of(norms, caches, matrices, biases, scales), x.shape
    for number, layer in enumerate(layers):
        _check_layer(f"layer {number}: ", layer, H)
    room = min(layer.keys.shape[3] for layer in layers)
    if why := problem_of_places(positions, B, M, room, window):
        raise _refused(why)


def _check_layer(where: str, layer: LayerOperands, H: int) -> None:
    """Refuse heads that do not fit caches, and Linears that do not fit each other."""
    (_, kv, d, _), linears = layer.keys.shape, layer.linears
    width, inner = linears["query"].features[1], linears["gate"].features[1]
    if why := problem_of_heads(width, kv, d, (layer.norms[2], layer.norms[3])):
        raise _refused(f"{where}{why}")
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
