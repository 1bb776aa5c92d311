"""AWS's dense kernels, from nki-library's public source, next to ours: modelled."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import neuroncore
from benchmarks.layer import TARGET, TOKENS, ModelledLayer, launch_costs
from benchmarks.library import importable, traced
from neuronmm_ops.compress.calibrate import Progress
from neuronmm_ops.kernels.problem import Problem
from neuronmm_ops.kernels.problems import mlp_matrices
from neuronmm_ops.models import SHAPES, ModelShape
from neuronmm_ops.plan import plan_problem
from neuronmm_ops.rank import aligned_rank

RATIO = 0.2
RANKS = {"Llama-3.2-1B": 1, "Llama-3.1-8B": 8, "Llama-3.1-70B": 32}
"""Ranks that divide each model's inner features."""
PROMPTS = (("Llama-3.1-8B", 8), ("Llama-3.1-70B", 32))
"""Models whose MLPs it takes for a prompt of `TOKENS`."""
LAYERS = (("Llama-3.1-8B", 8), ("Llama-3.1-70B", 8), ("Llama-3.1-70B", 32))
"""Models whose ranks have one key and value head each, as nki-library's transformer asks."""


def run(clone: Path, progress: Progress | None = None) -> list[dict[str, Any]]:
    """Trace nki-library's dense kernels and our plans for one bf16 token, and MLPs of a prompt.

    Args:
        clone: of aws-neuron/nki-library; a copy of its source is imported.
        progress: called with ("trace", done, in all).

    Returns:
        Rows with `what`, `model`, `tp`, `lnc`, `aws_ms`, `dense_ms` and `low_rank_ms`. Of `what`
        "MLP": its `mlp`, our `mlp`, and `svd_mlp` at ratio .2 (None where ranks share the model).
        "prompt's MLP" and "prompt's MLP, fp8": both `mlp` for `TOKENS` tokens, in bf16, and in fp8
        with activations in fp8, too: ours rounds them token by token, AWS's takes rounded ones.
        "layer": what a second layer adds to a launch of its `transformer_tkg`, and a further one
        to ours, dense and with every Linear at ratio .2; 2048 tokens in the cache.

    Raises:
        ValueError: there is no such source.
    """
    neuroncore.install()
    rows: list[dict[str, Any]] = []
    with importable(clone):
        cases = [partial(_mlp, model, tp, lnc) for model, tp in RANKS.items() for lnc in (1, 2)]
        for model, tp in PROMPTS:
            cases += [partial(_prompt, model, tp, 2, in_fp8) for in_fp8 in (False, True)]
        cases += [partial(_layer, model, tp, 2) for model, tp in LAYERS]
        for case in cases:
            rows.append(case())
            if progress is not None:
                progress("trace", len(rows), len(cases))
    return rows


def _mlp(model: str, tp: int, lnc: int) -> dict[str, Any]:
    H, inner = SHAPES[model].hidden_size, SHAPES[model].intermediate_size
    I = inner // tp  # noqa: E741 - the shape letter
    dense = Problem("mlp", 1, ((H, I), (H, I), (I, H)), target=TARGET, lnc=lnc)
    low_rank = None
    if tp == 1:
        r = aligned_rank(H, I, RATIO)
        assert r is not None
        matrices = mlp_matrices(H, (r, r, r), I, H)
        low_rank = plan_problem(Problem("svd_mlp", 1, matrices, target=TARGET, lnc=lnc)).time_ms
    own = {"dense_ms": plan_problem(dense).time_ms, "low_rank_ms": low_rank}
    return _row("MLP", model, tp, lnc) | {"aws_ms": _aws_mlp(H, I, lnc)} | own


def _prompt(model: str, tp: int, lnc: int, in_fp8: bool) -> dict[str, Any]:
    H, I = SHAPES[model].hidden_size, SHAPES[model].intermediate_size // tp  # noqa: E741
    dense = Problem("mlp", TOKENS, ((H, I), (H, I), (I, H)), target=TARGET, lnc=lnc)
    if in_fp8:
        dense = replace(dense, weight_dtype="float8_e4m3fn", compute="fp8")
    own = {"dense_ms": plan_problem(dense).time_ms, "low_rank_ms": None}
    what = "prompt's MLP, fp8" if in_fp8 else "prompt's MLP"
    return _row(what, model, tp, lnc) | {"aws_ms": _aws_mlp(H, I, lnc, TOKENS, in_fp8)} | own


def _layer(model: str, tp: int, lnc: int) -> dict[str, Any]:
    ours = [ModelledLayer(model, "", ratio, lnc) for ratio in (0.0, RATIO)]
    dense, low_rank = [launch_costs(layer, tp)[1].times_ms[0] for layer in ours]
    one, two = [_aws_layers(SHAPES[model], tp, lnc, layers) for layers in (1, 2)]
    own = {"dense_ms": dense, "low_rank_ms": low_rank}
    return _row("layer", model, tp, lnc) | {"aws_ms": two - one} | own


def _row(what: str, model: str, tp: int, lnc: int) -> dict[str, Any]:
    return {"what": what, "model": model, "tp": tp, "lnc": lnc}


def _aws_mlp(H: int, I: int, lnc: int, tokens: int = 1, in_fp8: bool = False) -> float:  # noqa: E741
    """Milliseconds of nki-library's kernel, which chooses its form for few tokens itself."""
    from nkilib_src.nkilib.core.mlp.mlp import mlp  # pyright: ignore

    dtype = ml_dtypes.float8_e4m3 if in_fp8 else ml_dtypes.bfloat16
    operands = [np.zeros(shape, dtype) for shape in ((1, tokens, H), (H, I), (H, I), (I, H))]
    options: dict[str, Any] = {}
    if in_fp8:
        from nkilib_src.nkilib.core.utils.common_types import QuantizationType  # pyright: ignore

        scales = ("gate_w_scale", "up_w_scale", "down_w_scale", "gate_up_in_scale", "down_in_scale")
        options = {name: np.zeros((128, 1), np.float32) for name in scales}
        options |= {
            "quantization_type": QuantizationType.STATIC,
            "output_dtype": neuroncore.language.bfloat16,
        }
    return traced(mlp[lnc], *operands, target=TARGET, **options).time_ms


def _aws_layers(shape: ModelShape, tp: int, lnc: int, layers: int) -> float:
    """Milliseconds of so many layers of nki-library's transformer, activations by way of HBM.

    Its path through SBUF (`sbuf_residual_and_cc`) names a mask that it does not have.
    """
    from nkilib_src.nkilib.experimental.transformer.transformer_tkg import (  # pyright: ignore
        transformer_tkg,
    )

    H, d, heads, T = shape.hidden_size, shape.head_dim, shape.heads // tp, TOKENS
    I = -(-shape.intermediate_size // tp // 128) * 128  # noqa: E741 - it takes multiples of 128
    each = {
        "W_qkvs": (H, (heads + 2) * d),
        "W_outs": (heads * d, H),
        "W_gates": (H, I),
        "W_ups": (H, I),
        "W_downs": (I, H),
        "W_gamma_qkvs": (1, H),
        "W_gamma_mlps": (1, H),
        "K_caches": (1, 1, d, T),
        "V_caches": (1, 1, T, d),
    }
    return traced(
        neuroncore.jit(transformer_tkg)[lnc],
        target=TARGET,
        X=_zeros(1, 1, H),
        **{name: [_zeros(*sizes) for _ in range(layers)] for name, sizes in each.items()},
        RoPE_cos=_zeros(d // 2, 1, 1),
        RoPE_sin=_zeros(d // 2, 1, 1),
        mask_cache=np.ones((T, 1, heads, 1), bool),
        mask_active=None,
        position_ids=np.array([[T - 1]], np.uint32),
        num_layers=layers,
        replica_groups=(tuple(range(tp)),),
        ranks=tp,
        alike_ranks=True,
        follow="kernels",
        uninitialised="warn",
    ).time_ms


def _zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, ml_dtypes.bfloat16)
