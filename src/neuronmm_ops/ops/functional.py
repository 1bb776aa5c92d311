"""Typed public wrappers: `neuronmm_ops.xuv(...)` and its siblings."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from neuronmm_ops.ops import register as register  # registers the ops
from neuronmm_ops.ops.backends.xla import CHANGING

# Bound once: looking an overload up costs more than calling it.
_XUV = torch.ops.neuronmm.xuv.default
_XW = torch.ops.neuronmm.xw.default
_MLP = torch.ops.neuronmm.mlp.default
_SVD_MLP = torch.ops.neuronmm.svd_mlp.default
_SVD_QKV = torch.ops.neuronmm.svd_qkv.default
_ATTENTION = torch.ops.neuronmm.attention.default
_DECODER_LAYER = torch.ops.neuronmm.decoder_layer.default


def _call(op: Callable[..., Any], *args: Any) -> Any:
    """Call `op`, past its autograd kernel when nothing can want a gradient.

    Under `no_grad` a registered autograd formula still costs a second trip through Python (4 us);
    `inference_mode` skips it by itself, and a compiler must see the op as it is.
    """
    if torch.compiler.is_compiling():  # first: a compiler cannot trace the other questions
        return op(*args)
    try:
        if (
            torch.is_grad_enabled()
            or torch.is_inference_mode_enabled()
            or forward_ad._current_level >= 0
        ):
            return op(*args)
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args)
    except NotImplementedError:
        _refuse_nested(args)
        raise


def _call_changing(op: Any, *args: Any) -> Any:
    """Call an op with a state, whose first argument is a tensor."""
    if args[0].device.type == "xla" and not torch.compiler.is_compiling():
        return CHANGING[op._schema.name.partition("::")[2]](*args)
    return _call(op, *args)


def _refuse_nested(args: tuple[Any, ...]) -> None:
    """Raise for a nested tensor, of whatever layout: its rows are no `[..., K]`."""
    for argument in args:
        if isinstance(argument, Tensor) and argument.is_nested:
            raise TypeError(
                f"neuronmm ops take no nested tensor, got one of layout {argument.layout}; "
                "unbind() it, or pad it with to_padded_tensor(0.0)"
            )


def xuv(
    x: Tensor,
    u: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    u_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    compute: str = "x",
) -> Tensor:
    """Low-rank matmul `(x @ u) @ v + bias` as one op, `neuronmm::xuv`.

    With factors of one byte an element it is `((x @ u) * u_scale) @ v * v_scale + bias`.

    Args:
        x: `[..., K]`, any leading dimensions (none, or empty, allowed); bf16, fp16 or fp32
            (fp64 on CPU).
        u: `[K, r]`, device of x; dtype of x, float8_e4m3fn or int8.
        v: `[r, N]`, dtype and device of u.
        bias: `[N]`, dtype of x, or None.
        u_scale: `[r]`, fp32, with factors of one byte; for others None.
        v_scale: `[N]`, as u_scale.
        compute: `x`, or `fp8`: with factors in fp8 the activations may be rounded to fp8, too,
            each token scaled by a power of two (NeuronCores from trn2 on do in prefill).

    Returns:
        `[..., N]`, contiguous, dtype of x. Accumulated in fp32; `x @ u` is rounded once to x's
        dtype, after its scale. Values of fp8 factors must be finite and at most 240.

    Raises:
        ValueError: shapes do not fit, scales are missing or given for other factors.
        TypeError: dtypes or devices differ, or the dtype is not supported.
    """
    if u_scale is None and v_scale is None and compute == "x":
        return _call(_XUV, x, u, v, bias)
    return _call(_XUV, x, u, v, bias, u_scale, v_scale, compute)


def xw(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    w_scale: Tensor | None = None,
    compute: str = "x",
) -> Tensor:
    """Dense matmul `x @ w + bias` through the same machinery, `neuronmm::xw`: the baseline.

    Args:
        x: `[..., K]`; bf16, fp16 or fp32 (fp64 on CPU).
        w: `[K, N]`, device of x (`nn.Linear`'s weight is its transpose); dtype of x,
            float8_e4m3fn or int8.
        bias: `[N]`, dtype of x, or None.
        w_scale: `[N]`, fp32, with a w of one byte, whose product it multiplies; else None.
        compute: as in `xuv`.

    Returns:
        `[..., N]`, contiguous, dtype of x.

    Raises:
        ValueError: shapes do not fit, a scale is missing or given for another w.
        TypeError: dtypes or devices differ, or the dtype is not supported.
    """
    if w_scale is None and compute == "x":
        return _call(_XW, x, w, bias)
    return _call(_XW, x, w, bias, w_scale, compute)


def mlp(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    x_up: Tensor | None = None,
    activation: str = "silu",
    w_gate_scale: Tensor | None = None,
    w_up_scale: Tensor | None = None,
    w_down_scale: Tensor | None = None,
    compute: str = "x",
) -> Tensor:
    """Gated MLP `(act(x @ w_gate) * (x_up @ w_up)) @ w_down` as one op, `neuronmm::mlp`.

    Without an `x_up`, x takes its place: the dense gated MLP. With one it is the middle of a
    low-rank MLP whose ranks are divided among devices: x and x_up are the gathered products with
    u_gate and u_up, the weights a device's columns of v_gate and v_up and its rows of u_down.

    Args:
        x: `[..., K]`; bf16, fp16 or fp32 (fp64 on CPU).
        w_gate: `[K, I]`, device of x, as all weights; dtype of x, or all float8_e4m3fn or all int8.
        w_up: `[K_up, I]`.
        w_down: `[I, N]`.
        x_up: `[..., K_up]`, leading dimensions, dtype and device of x; None where it is x.
        activation: `silu`, `gelu`, `gelu_tanh` or `relu`.
        w_gate_scale: `[I]`, fp32, with weights of one byte, as all scales; else None.
        w_up_scale: `[I]`.
        w_down_scale: `[N]`.
        compute: as in `xuv`; this op's kernels do not round activations.

    Returns:
        `[..., N]`, contiguous, dtype of x. Accumulated in fp32.

    Raises:
        ValueError: shapes do not fit, the activation is unknown, scales are missing or given for
            other weights.
        TypeError: dtypes or devices differ, or the dtype is not supported.
    """
    scales = (w_gate_scale, w_up_scale, w_down_scale)
    return _call(_MLP, x, w_gate, w_up, w_down, x_up, activation, *scales, compute)


def svd_mlp(
    x: Tensor,
    u_gate: Tensor,
    v_gate: Tensor,
    u_up: Tensor,
    v_up: Tensor,
    u_down: Tensor,
    v_down: Tensor,
    activation: str = "silu",
    u_gate_scale: Tensor | None = None,
    v_gate_scale: Tensor | None = None,
    u_up_scale: Tensor | None = None,
    v_up_scale: Tensor | None = None,
    u_down_scale: Tensor | None = None,
    v_down_scale: Tensor | None = None,
    compute: str = "x",
) -> Tensor:
    """Gated MLP `down(act(gate(x)) * up(x))` with low-rank projections, `neuronmm::svd_mlp`.

    Args:
        x: `[..., K]`; bf16, fp16 or fp32 (fp64 on CPU).
        u_gate: `[K, r_gate]`.
        v_gate: `[r_gate, I]`.
        u_up: `[K, r_up]`.
        v_up: `[r_up, I]`.
        u_down: `[I, r_down]`.
        v_down: `[r_down, N]`.
        activation: `silu`, `gelu`, `gelu_tanh` or `relu`.
        u_gate_scale: `[r_gate]`, fp32, with factors of one byte, as all scales; else None.
        v_gate_scale: `[I]`.
        u_up_scale: `[r_up]`.
        v_up_scale: `[I]`.
        u_down_scale: `[r_down]`.
        v_down_scale: `[N]`.
        compute: as in `xuv`.

    Returns:
        `[..., N]`, contiguous, dtype of x.

    Raises:
        ValueError: shapes do not fit, the activation is unknown, scales are missing or given for
            other factors.
        TypeError: dtypes or devices differ, or the dtype is not supported.
    """
    factors = (u_gate, v_gate, u_up, v_up, u_down, v_down)
    scales = (u_gate_scale, v_gate_scale, u_up_scale, v_up_scale, u_down_scale, v_down_scale)
    return _call(_SVD_MLP, x, *factors, activation, *scales, compute)


def svd_qkv(
    x: Tensor,
    u_query: Tensor,
    v_query: Tensor,
    u_key: Tensor,
    v_key: Tensor,
    u_value: Tensor,
    v_value: Tensor,
    bias_query: Tensor | None = None,
    bias_key: Tensor | None = None,
    bias_value: Tensor | None = None,
    u_query_scale: Tensor | None = None,
    v_query_scale: Tensor | None = None,
    u_key_scale: Tensor | None = None,
    v_key_scale: Tensor | None = None,
    u_value_scale: Tensor | None = None,
    v_value_scale: Tensor | None = None,
    compute: str = "x",
) -> Tensor:
    """Low-rank projections of x to query, key and value as one op, `neuronmm::svd_qkv`.

    One launch for three `xuv`, and x is read and transposed once. `torch.split` takes the result
    apart without a copy: `query, key, value = y.split([N_query, N_key, N_value], dim=-1)`.

    Args:
        x: `[..., K]`; bf16, fp16 or fp32 (fp64 on CPU).
        u_query: `[K, r_query]`, device of x, as all factors; dtype of x, or all float8_e4m3fn or
            all int8.
        v_query: `[r_query, N_query]`.
        u_key: `[K, r_key]`.
        v_key: `[r_key, N_key]`.
        u_value: `[K, r_value]`.
        v_value: `[r_value, N_value]`.
        bias_query: `[N_query]`, dtype of x, or None, as the other biases.
        bias_key: `[N_key]`.
        bias_value: `[N_value]`.
        u_query_scale: `[r_query]`, fp32, with factors of one byte, as all scales; else None.
        v_query_scale: `[N_query]`.
        u_key_scale: `[r_key]`.
        v_key_scale: `[N_key]`.
        u_value_scale: `[r_value]`.
        v_value_scale: `[N_value]`.
        compute: as in `xuv`.

    Returns:
        `[..., N_query + N_key + N_value]`, contiguous, dtype of x. Accumulated in fp32; each
        `x @ u` is rounded once to x's dtype, after its scale.

    Raises:
        ValueError: shapes do not fit, scales are missing or given for other factors.
        TypeError: dtypes or devices differ, or the dtype is not supported.
    """
    return _call(
        *(_SVD_QKV, x, u_query, v_query, u_key, v_key, u_value, v_value),
        *(bias_query, bias_key, bias_value),
        *(u_query_scale, v_query_scale, u_key_scale, v_key_scale, u_value_scale, v_value_scale),
        compute,
    )


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    positions: Tensor,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    eps: float = 1e-6,
    window: int = 0,
) -> Tensor:
    """Causal attention of a chunk of a prompt, with the cache of what is before it, as one op.

    `neuronmm::attention` is one launch for the norms of heads, RoPE, attention to the cache and to
    the chunk itself, and the writes of its keys and values to the cache. Chunks one after the other
    are the prompt at once. For inference: there is no gradient.

    Args:
        query: `[B, M, heads * head_dim]`, before RoPE; bf16, fp16 or fp32 (fp64 on CPU).
        key: `[B, M, kv_heads * head_dim]`, before RoPE.
        value: as `key`.
        cos: of RoPE, `[B, M, head_dim]`, dtype of query.
        sin: as `cos`.
        key_cache: `[B, kv_heads, head_dim, T]`, keys after RoPE, finite; changed in place.
        value_cache: `[B, kv_heads, T, head_dim]`, values; as key_cache. A NeuronCore keeps
            T + M tokens of a head in SBUF: about 32,000 of 128 features in 16 bits.
        positions: int32 `[B]`, where the first token of each sequence's chunk is written: tokens
            of the cache before it are seen.
        query_norm: `[head_dim]`, of an RMSNorm of query heads before RoPE; None for none.
        key_norm: of key heads; both or none.
        eps: of the norms.
        window: tokens that a query sees, its own included; 0 for all.

    Returns:
        `[B, M, heads * head_dim]`, dtype of query. Scores and sums are accumulated in fp32.

    Raises:
        ValueError: shapes do not fit, a token's place is outside a cache (checked where positions
            are on a CPU).
        TypeError: dtypes or devices differ, or the dtype is not supported.
    """
    caches = key_cache, value_cache
    norms = query_norm, key_norm
    args = (query, key, value, cos, sin, *caches, positions, *norms, eps, window)
    return _call_changing(_ATTENTION, *args)


def decoder_layer(
    x: Tensor,
    residual: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    norms: Sequence[Tensor | None],
    caches: Sequence[Tensor],
    matrices: Sequence[Tensor | None],
    biases: Sequence[Tensor | None] = (),
    scales: Sequence[Tensor | None] = (),
    activation: str = "silu",
    eps: float = 1e-6,
    window: int = 0,
) -> tuple[Tensor, Tensor]:
    """Pre-norm layers of a decoder for M new tokens a sequence as one op.

    `neuronmm::decoder_layer` is one launch for norms, query, key and value, RoPE, attention,
    output, residuals and the gated MLP of all layers that are given. A list has what one layer has
    after what the layer before it has.
    For inference: there is no gradient, and autocast leaves it as it is.

    Args:
        x: `[B, M, H]`, what the layer before adds to the stream; bf16, fp16 or fp32 (fp64 on CPU).
            A NeuronCore takes 1 to 8 tokens of each of up to 128 in all.
        residual: `[B, M, H]`, the stream before that; None where x is all of it.
        cos: of RoPE, `[B, M, head_dim]`, dtype of x.
        sin: as `cos`.
        positions: int32 `[B]`, where the first new token of each sequence is written.
        norms: of a layer `[H]` before attention, `[H]` before the MLP, and `[head_dim]` of query
            and of key heads, or None.
        caches: of a layer keys `[B, kv_heads, head_dim, T]` and values
            `[B, kv_heads, T, head_dim]`, finite; changed in place.
        matrices: of a layer u and v of query, key, value, output, gate, up and down, as in `xuv`;
            of a dense one None and the weight `[in, out]`. Kernels are quickest where query, key
            and value, and gate, up and down, are of one kind.
        biases: of a layer those of query, key and value, `[out]` or None; or none at all.
        scales: of a layer those of `matrices` in one byte, as in `xuv`; or none at all.
        activation: "silu", "gelu", "gelu_tanh" or "relu".
        eps: of all norms.
        window: tokens that a query sees, its own included; 0 for all.

    Returns:
        What the last MLP adds to the stream and the stream before that, each `[B, M, H]`, dtype of
        x: `x` and `residual` of the next layer. Products, norms and scores are accumulated in fp32.

    Raises:
        ValueError: shapes do not fit, a token's place is outside a cache (checked where positions
            are on a CPU).
        TypeError: dtypes or devices differ, or the dtype is not supported.
    """
    lists = [list(each) for each in (norms, caches, matrices, biases, scales)]
    args = (x, residual, cos, sin, positions, *lists, activation, eps, window)
    return _call_changing(_DECODER_LAYER, *args)
