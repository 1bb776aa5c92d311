"""The tasks, by rising difficulty. A reference takes fp64 arrays, and integers as they are."""

from __future__ import annotations

from typing import Any

import numpy as np

from neuroncore.judge.task import KernelTask as Task


def _silu(x: Any) -> Any:
    return x / (1 + np.exp(-x))


def _softmax(x: Any) -> Any:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def _rms_norm(x: Any, w: Any) -> Any:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * w


def _layer_norm(x: Any, w: Any, b: Any) -> Any:
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * w + b


def _attention(qt: Any, kt: Any, v: Any, behind: float = np.inf, ahead: float = np.inf) -> Any:
    """Query i sees keys i - behind to i + ahead."""
    scores = np.swapaxes(qt, 1, 2) @ kt / np.sqrt(qt.shape[1])
    distance = np.arange(scores.shape[2]) - np.arange(scores.shape[1])[:, None]
    return _softmax(np.where((distance < -behind) | (distance > ahead), -np.inf, scores)) @ v


def _scan(a: Any, b: Any) -> Any:
    h, states = 0.0, []
    for t in range(a.shape[1]):
        h = a[:, t] * h + b[:, t]
        states.append(h)
    return np.stack(states, 1)


def _rope(x: Any, cos: Any, sin: Any) -> Any:
    first, second = np.split(x, 2, 1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], 1)


def _conv1d(x: Any, w: Any) -> Any:
    padded = np.pad(x, ((0, 0), (3, 0)))
    return sum(padded[:, i : i + x.shape[1]] * w[:, i : i + 1] for i in range(4))


def _conv2d(x: Any, w: Any) -> Any:
    windows = np.lib.stride_tricks.sliding_window_view(x, (3, 3), (1, 2))
    return np.einsum("chwij,cijf->fhw", windows, w.reshape(len(w), 3, 3, -1), optimize=True)


def _mlp(x: Any, wg: Any, wu: Any, wd: Any) -> Any:
    return (_silu(x @ wg) * (x @ wu)) @ wd


TASKS = (
    # elementwise
    Task("scale", 1, "2.5 x, x [M, N]", lambda x: 2.5 * x, {"x": "M N"},
         ("M=128 N=2048 fp32", "M=500 N=3000 bf16", "M=1024 N=1024 fp16")),
    Task("add", 1, "x + y, both [M, N]", np.add, {"x": "M N", "y": "M N"},
         ("M=128 N=2048 fp32", "M=500 N=3000 bf16", "M=1024 N=1024 fp16")),
    Task("silu_mul", 1, "silu(x) * y, both [M, N]", lambda x, y: _silu(x) * y,
         {"x": "M N", "y": "M N"},
         ("M=256 N=1024 fp32", "M=512 N=4096 bf16", "M=200 N=777 bf16")),
    Task("clip_cast", 1, "x [M, N] fp32 clipped to -1 .. 1, as bf16", lambda x: np.clip(x, -1, 1),
         {"x": "M N"}, ("M=128 N=4096 fp32", "M=1000 N=512 fp32"), ("bfloat16",)),
    Task("bias_tanh", 2, "tanh(x + b), x [M, N], b [1, N]", lambda x, b: np.tanh(x + b),
         {"x": "M N", "b": "I N"}, ("M=128 N=1024 I=1 fp32", "M=640 N=2048 I=1 bf16")),
    # reductions
    Task("row_sum", 1, "sum over axis 1 of x [M, N]: [M, 1] fp32",
         lambda x: x.sum(1, keepdims=True), {"x": "M N"},
         ("M=128 N=4096 fp32", "M=1000 N=1024 bf16"), ("float32",)),
    Task("col_sum", 2, "sum over axis 0 of x [M, N]: [1, N] fp32",
         lambda x: x.sum(0, keepdims=True), {"x": "M N"},
         ("M=512 N=1024 fp32", "M=1000 N=2048 bf16"), ("float32",)),
    Task("mean_var", 2, "mean and variance of the rows of x [M, N]: two [M, 1] fp32",
         lambda x: (x.mean(1, keepdims=True), x.var(1, keepdims=True)), {"x": "M N"},
         ("M=128 N=2048 fp32", "M=600 N=1536 bf16"), ("float32", "float32")),
    Task("argmax", 3, "place of the largest value of each row of x [M, N]: [M, 1] uint32",
         lambda x: x.argmax(1)[:, None], {"x": "M N distinct"},
         ("M=128 N=2048 fp32", "M=512 N=256 bf16"), ("uint32",)),
    # layouts
    Task("transpose", 2, "x [M, N] as [N, M]", np.transpose, {"x": "M N"},
         ("M=128 N=512 fp32", "M=512 N=1024 bf16", "M=300 N=200 bf16")),
    Task("permute", 2, "x [A, B, C] as [B, A, C]", lambda x: x.transpose(1, 0, 2),
         {"x": "A B C"}, ("A=16 B=128 C=256 fp32", "A=64 B=96 C=512 bf16")),
    # matmuls
    Task("matmul_t", 2, "xt^T w, xt [K, M], w [K, N]", lambda xt, w: xt.T @ w,
         {"xt": "K M", "w": "K N small"},
         ("K=256 M=128 N=512 fp32", "K=1024 M=256 N=1024 bf16", "K=384 M=100 N=700 bf16")),
    Task("matmul", 3, "x w, x [M, K], w [K, N]", lambda x, w: x @ w,
         {"x": "M K", "w": "K N small"},
         ("M=128 K=256 N=512 fp32", "M=512 K=512 N=1024 bf16", "M=200 K=384 N=600 bf16")),
    Task("matmul_large", 4, "xt^T w, xt [K, M], w [K, N]", lambda xt, w: xt.T @ w,
         {"xt": "K M", "w": "K N small"},
         ("K=2048 M=1024 N=2048 bf16", "K=1024 M=2048 N=1024 bf16")),
    Task("matvec", 3, "xt^T w for a few tokens M, xt [K, M], w [K, N]", lambda xt, w: xt.T @ w,
         {"xt": "K M", "w": "K N small"},
         ("K=2048 M=1 N=2048 bf16", "K=1024 M=8 N=4096 bf16")),
    # norms and softmax
    Task("softmax", 2, "of the rows of x [M, N], some far from 0", _softmax, {"x": "M N wide"},
         ("M=128 N=1024 fp32", "M=512 N=2048 fp32", "M=300 N=1000 fp32")),
    Task("rms_norm", 2, "x / rms(x) * w, x [M, N], w [1, N], 1e-5 in the root", _rms_norm,
         {"x": "M N", "w": "I N"}, ("M=128 N=1024 I=1 fp32", "M=512 N=2048 I=1 bf16")),
    Task("layer_norm", 3, "(x - mean) / std * w + b, x [M, N], w, b [1, N], 1e-5 in the root",
         _layer_norm, {"x": "M N", "w": "I N", "b": "I N"},
         ("M=128 N=1024 I=1 fp32", "M=512 N=2048 I=1 bf16")),
    Task("add_rms_norm", 3, "s = x + y and s / rms(s) * w, x, y [M, N], w [1, N], 1e-5 in the root",
         lambda x, y, w: (x + y, _rms_norm(x + y, w)), {"x": "M N", "y": "M N", "w": "I N"},
         ("M=128 N=1024 I=1 fp32", "M=512 N=2048 I=1 bf16"), ("", "")),
    # attention: scores over sqrt(D)
    Task("attention", 4, "softmax(q k^T) v, qt [H, D, S], kt [H, D, T], v [H, T, D]: [H, S, D]",
         _attention, {"qt": "H D S", "kt": "H D T", "v": "H T D"},
         ("H=2 D=128 S=512 T=512 bf16", "H=1 D=64 S=256 T=1024 bf16")),
    Task("attention_causal", 4, "the same, query i sees keys up to i, qt, kt [H, D, T]",
         lambda qt, kt, v: _attention(qt, kt, v, ahead=0),
         {"qt": "H D T", "kt": "H D T", "v": "H T D"},
         ("H=2 D=128 T=512 bf16", "H=1 D=64 T=1024 bf16")),
    Task("attention_window", 5, "the same, query i sees keys i - 255 to i, qt, kt [H, D, T]",
         lambda qt, kt, v: _attention(qt, kt, v, behind=255, ahead=0),
         {"qt": "H D T", "kt": "H D T", "v": "H T D"},
         ("H=1 D=128 T=1024 bf16", "H=2 D=64 T=768 bf16")),
    Task("attention_decode", 4, "one query a head, Q heads a key head: qt [H, D, Q]: [H, Q, D]",
         _attention, {"qt": "H D Q", "kt": "H D T", "v": "H T D"},
         ("H=4 D=128 Q=4 T=1024 bf16", "H=2 D=64 Q=8 T=2048 bf16")),
    # MLPs and low rank
    Task("mlp", 4, "(silu(x wg) * (x wu)) wd, x [M, K], wg, wu [K, I], wd [I, K]", _mlp,
         {"x": "M K", "wg": "K I small", "wu": "K I small", "wd": "I K small"},
         ("M=128 K=512 I=1024 bf16", "M=512 K=512 I=1024 bf16")),
    Task("low_rank", 3, "(x u) v, x [M, K], u [K, R], v [R, N]", lambda x, u, v: x @ u @ v,
         {"x": "M K", "u": "K R small", "v": "R N small"},
         ("M=128 K=1024 R=256 N=1024 bf16", "M=512 K=1024 R=384 N=2048 bf16")),
    Task("low_rank_mlp", 5, "mlp with wg = gu gv, wu = uu uv, wd = du dv, all of rank R",
         lambda x, gu, gv, uu, uv, du, dv: (_silu(x @ gu @ gv) * (x @ uu @ uv)) @ du @ dv,
         {"x": "M K", "gu": "K R small", "gv": "R I small", "uu": "K R small",
          "uv": "R I small", "du": "I R small", "dv": "R K small"},
         ("M=128 K=512 R=128 I=1024 bf16", "M=512 K=512 R=256 I=1024 bf16")),
    # one byte a weight
    Task("matmul_int8", 3, "xt^T (w s), xt [K, M], w [K, N] int8, s [1, N] fp32",
         lambda xt, w, s: xt.T @ (w * s), {"xt": "K M", "w": "int8: K N bytes",
         "s": "float32: J N uniform"},
         ("K=1024 M=64 N=2048 J=1 bf16", "K=512 M=128 N=1024 J=1 bf16")),
    Task("matmul_fp8", 3, "xt^T (w s), xt [K, M], w [K, N] float8_e4m3, s [1, N] fp32",
         lambda xt, w, s: xt.T @ (w * s), {"xt": "K M", "w": "float8_e4m3: K N",
         "s": "float32: J N uniform"},
         ("K=1024 M=64 N=2048 J=1 bf16", "K=512 M=128 N=1024 J=1 bf16")),
    # scans
    Task("cumsum", 2, "along axis 1 of x [M, N], as fp32", lambda x: x.cumsum(1), {"x": "M N"},
         ("M=128 N=2048 fp32", "M=512 N=1024 bf16"), ("float32",)),
    Task("linear_scan", 3, "h[t] = a[t] h[t-1] + b[t] along axis 1, a, b [M, T]", _scan,
         {"a": "M T uniform", "b": "M T"}, ("M=128 T=1024 fp32", "M=512 T=512 fp32")),
    # gathers and order
    Task("embedding", 2, "rows of table [V, D] by ids [M, 1] int32", lambda ids, t: t[ids[:, 0]],
         {"ids": "int32: M J rows", "table": "V D"},
         ("M=128 J=1 V=1000 D=512 fp32", "M=512 J=1 V=5000 D=1024 bf16")),
    Task("topk", 3, "the 8 largest of each row of x [M, N], falling: [M, 8]",
         lambda x: -np.sort(-x, 1)[:, :8], {"x": "M N"},
         ("M=128 N=1024 fp32", "M=512 N=2048 fp32")),
    Task("rope", 3, "halves a, b of x [T, D] as a cos - b sin, b cos + a sin; cos, sin [T, D/2]",
         _rope, {"x": "T D", "cos": "T E", "sin": "T E"},
         ("T=512 D=128 E=64 fp32", "T=1024 D=128 E=64 bf16")),
    # windows
    Task("conv1d", 3, "causal, of each channel: x [C, T], w [C, 4], 0 before the start", _conv1d,
         {"x": "C T", "w": "C F"}, ("C=128 T=2048 F=4 fp32", "C=512 T=1024 F=4 fp32")),
    Task("max_pool", 2, "2 x 2 of x [C, H, W]", lambda x: np.max(
        [x[:, i::2, j::2] for i in (0, 1) for j in (0, 1)], 0), {"x": "C H W"},
        ("C=128 H=32 W=32 fp32", "C=256 H=64 W=32 bf16")),
    Task("conv2d", 5, "3 x 3 of x [C, H, W], w [C, 9, F], without edges: [F, H-2, W-2]", _conv2d,
         {"x": "C H W", "w": "C J F"}, ("C=128 H=18 W=34 J=9 F=128 bf16",
         "C=64 H=34 W=34 J=9 F=128 bf16")),
    # ranks and cores
    Task("all_reduce", 3, "sum over 4 ranks of x [M, N]", lambda x: [sum(x)] * 4, {"x": "M N"},
         ("M=128 N=1024 fp32", "M=128 N=4096 fp32"), ranks=4),
    Task("row_parallel", 4, "sum over 4 ranks of xt^T w, xt [K, M], w [K, N]",
         lambda xt, w: [sum(a.T @ b for a, b in zip(xt, w, strict=True))] * 4,
         {"xt": "K M", "w": "K N small"},
         ("K=256 M=128 N=1024 bf16", "K=512 M=64 N=2048 bf16"), ranks=4),
    Task("two_cores_silu", 3, "silu(x), x [M, N], on two cores", _silu, {"x": "M N"},
         ("M=512 N=2048 fp32", "M=1024 N=2048 bf16"), lnc=2),
    Task("two_cores_matmul", 4, "xt^T w, xt [K, M], w [K, N], on two cores",
         lambda xt, w: xt.T @ w, {"xt": "K M", "w": "K N small"},
         ("K=1024 M=256 N=1024 bf16", "K=1024 M=128 N=2048 bf16"), lnc=2),
)  # fmt: skip
