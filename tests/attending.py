"""Attention and RoPE in plain torch, and operands of their kernels."""

from typing import Any

import torch
from torch import Tensor

EPS = 1e-6


def drawn(*shape: int, dtype: torch.dtype, seed: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).to(dtype)


def angles(tokens: int, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [tokens, head_dim] of any angles, the same in both halves."""
    turned = drawn(tokens, head_dim // 2, dtype=torch.float32, seed=9, scale=3.0).repeat(1, 2)
    return turned.cos().to(dtype), turned.sin().to(dtype)


def norm_weights(head_dim: int, dtype: torch.dtype) -> list[Tensor]:
    return [
        (1 + drawn(head_dim, dtype=torch.float32, seed=seed, scale=0.1)).to(dtype)
        for seed in (7, 8)
    ]


def normalised(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Llama's RoPE of [..., head_dim]."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


def heads_of(
    qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int, weights: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated q [batch, heads, M, head_dim], k and v of qkv [batch * M, ...]."""
    M, d = cos.shape
    split = qkv.reshape(-1, M, heads + 2 * kv_heads, d).transpose(1, 2)
    q, k, v = split.split([heads, kv_heads, kv_heads], 1)
    if weights:
        q, k = normalised(q, weights[0]), normalised(k, weights[1])
    return rotated(q, cos, sin), rotated(k, cos, sin), v


def attended(q: Tensor, k: Tensor, v: Tensor, window: int = 0) -> Tensor:
    """Causal attention of the last M of T tokens: [batch * M, heads * head_dim]."""
    B, H, M, d = q.shape
    kv, T = k.shape[1], k.shape[2]
    scores = q.reshape(B, kv, H // kv, M, d) @ k[:, :, None].transpose(-1, -2) * d**-0.5
    hidden = torch.ones(M, T, dtype=torch.bool).triu(T - M + 1)
    if window:
        hidden |= torch.ones(M, T, dtype=torch.bool).tril(T - M - window)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    mixed = (weights @ v[:, :, None]).reshape(B, H, M, d)
    return mixed.transpose(1, 2).reshape(B * M, H * d)


def decoded(
    qkv: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor,
    positions: list[int], weights: list[Tensor], window: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """What `attention_decode` makes: out [batch * M, heads * head_dim] and the two caches."""
    B, kv, d, _ = k_cache.shape
    M = qkv.shape[0] // B
    heads = qkv.shape[1] // d - 2 * kv
    k_cache, v_cache, rows = k_cache.clone(), v_cache.clone(), []
    for b, position in enumerate(positions):
        own, end = slice(b * M, b * M + M), position + M
        q, k, v = heads_of(qkv[own], cos[own], sin[own], heads, kv, weights)
        k_cache[b, :, :, position:end] = k[0].transpose(1, 2)
        v_cache[b, :, position:end] = v[0]
        keys, values = k_cache[b : b + 1, :, :, :end].transpose(2, 3), v_cache[b : b + 1, :, :end]
        rows.append(attended(q, keys, values, window))
    return torch.cat(rows), k_cache, v_cache


def on(kernel: Any, lnc: int) -> Any:
    return kernel if lnc == 1 else kernel[lnc]
