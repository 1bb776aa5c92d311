"""Triton kernels of the products with few tokens: each weight is read once, as it is stored.

A token or 64 leave a GPU waiting for weights, so what counts is that all of its processors load at
once. The first product of a pair has few columns and is cut along its contraction, too. Sums are
fp32 in a fixed order: results are the same at each call.
"""

# A kernel's language has no types that Python's checkers know.
# pyright: basic, reportConstantRedefinition=false

import triton
import triton.language as tl

from neuronmm_ops.storages.int4 import GROUP, ZERO

_ZERO = tl.constexpr(ZERO)
# Rows of a weight that a step of the loop multiplies: a group of int4.
_STEP = tl.constexpr(GROUP)


@triton.jit
def _of_e4m3(bits, DTYPE: tl.constexpr):
    # In float16's place the bits are the value times 2^-8; the scale makes up for it.
    return ((bits.to(tl.int16) << 7) & -16385).to(tl.float16, bitcast=True).to(DTYPE)


@triton.jit
def _of_half_bytes(half, DTYPE: tl.constexpr):
    # Integers below 16 are the last bits of 128 in bfloat16, and of 1024 in float16.
    if DTYPE == tl.bfloat16:  # noqa: SIM300
        numbers = (half | 0x4300).to(tl.bfloat16, bitcast=True) - (128 + _ZERO)
    else:
        numbers = (half | 0x6400).to(tl.float16, bitcast=True) - (1024 + _ZERO)
    return numbers


@triton.jit
def _rows(x, m, k, M, K, row):
    return tl.load(x + m[:, None] * row + k[None, :], (m[:, None] < M) & (k[None, :] < K), 0)


@triton.jit
def _product(
    x, w, scale, m, n, M, N, K, first, x_row, w_row, w_column,
    STEPS: tl.constexpr, STORED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Return rows m and columns n of x @ w over STEPS steps of the contraction from `first` on."""
    DTYPE: tl.constexpr = x.dtype.element_ty
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(STEPS):
        start = first + step * _STEP
        if STORED == "int4":
            half = start // 2 + tl.arange(0, _STEP // 2)
            inside = (half[:, None] < K // 2) & (n[None, :] < N)
            byte = tl.load(w + half[:, None] * w_row + n[None, :] * w_column, inside, 0)
            byte = byte.to(tl.int16)
            x_tile = _rows(x, m, start + tl.arange(0, _STEP), M, K, x_row)
            even, odd = tl.split(x_tile.reshape(BLOCK_M, _STEP // 2, 2))
            of_group = tl.dot(even, _of_half_bytes(byte & 15, DTYPE))
            of_group = tl.dot(odd, _of_half_bytes(byte >> 4, DTYPE), of_group)
            # A scalar in & would make an integer of the mask, which Triton 3.9 refuses.
            own = tl.load(scale + start // _STEP * N + n, n < tl.where(start < K, N, 0), 0)
            sums += of_group * own[None, :]
        else:
            k = start + tl.arange(0, _STEP)
            inside = (k[:, None] < K) & (n[None, :] < N)
            tile = tl.load(w + k[:, None] * w_row + n[None, :] * w_column, inside, 0)
            tile = _of_e4m3(tile, DTYPE) if STORED == "fp8" else tile.to(DTYPE)
            sums = tl.dot(_rows(x, m, k, M, K, x_row), tile, sums)
    if STORED == "fp8":
        sums *= (tl.load(scale + n, n < N, 0) * 256)[None, :]
    if STORED == "int8":
        sums *= tl.load(scale + n, n < N, 0)[None, :]
    return sums


@triton.jit
def low_kernel(
    x, y, M, K, x_row, y_part,
    w0, scale0, N0, w0_row, w0_column,
    w1, scale1, N1, w1_row, w1_column,
    STEPS: tl.constexpr, STORED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write the product with each of two matrices over a part of the contraction.

    Part p of y holds `x @ w0` [M, N0] and behind it `x @ w1` [M, N1].
    """
    w, scale, N, w_row, w_column = w0, scale0, N0, w0_row, w0_column
    part = tl.program_id(1)
    y += part * y_part
    if tl.program_id(2) == 1:
        w, scale, N, w_row, w_column = w1, scale1, N1, w1_row, w1_column
        y += M * N0
    m = tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    sums = _product(
        x, w, scale, m, n, M, N, K, part * STEPS * _STEP, x_row, w_row, w_column,
        STEPS, STORED, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    at = y + m[:, None] * N + n[None, :]
    tl.store(at, sums.to(y.dtype.element_ty), (m[:, None] < M) & (n[None, :] < N))


@triton.jit
def sum_kernel(parts, y, size, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Write the sum of PARTS vectors of a size that lie one behind another."""
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(parts + n, n < size, 0)
    for part in tl.static_range(1, PARTS):  # pyright: ignore[reportGeneralTypeIssues]
        total += tl.load(parts + part * size + n, n < size, 0)
    tl.store(y + n, total.to(y.dtype.element_ty), n < size)


@triton.jit
def _activated(gate, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        return gate / (1 + tl.exp(-gate))
    if ACTIVATION == "gelu":
        return 0.5 * gate * (1 + tl.erf(gate * 0.7071067811865476))
    if ACTIVATION == "gelu_tanh":
        # 0.5 (1 + tanh z) = 1 / (1 + exp(-2 z))
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        return gate / (1 + tl.exp(-2 * inner))
    return tl.maximum(gate, 0)


@triton.jit
def high_kernel(
    y, bias, M, N,
    x0, w0, scale0, K0, w0_row, w0_column,
    x1, w1, scale1, K1, w1_row, w1_column,
    STEPS0: tl.constexpr, STEPS1: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    STORED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write `x0 @ w0 + bias`, or `act(x0 @ w0) * (x1 @ w1)`, for x0 [M, K0] and x1 [M, K1]."""
    m = tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    sums = _product(
        x0, w0, scale0, m, n, M, N, K0, 0, K0, w0_row, w0_column,
        STEPS0, STORED, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    if ACTIVATION != "":
        sums = _activated(sums, ACTIVATION) * _product(
            x1, w1, scale1, m, n, M, N, K1, 0, K1, w1_row, w1_column,
            STEPS1, STORED, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    if HAS_BIAS:
        sums += tl.load(bias + n, n < N, 0).to(tl.float32)[None, :]
    at = y + m[:, None] * N + n[None, :]
    tl.store(at, sums.to(y.dtype.element_ty), (m[:, None] < M) & (n[None, :] < N))
