"""AWS's dense gated MLP for one token, from nki-library's public source, next to ours: modelled."""

import io
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path
from shutil import copytree
from typing import Any

import ml_dtypes
import numpy as np

import neuroncore
from benchmarks.library import mend
from neuronmm_ops.compress.calibrate import Progress
from neuronmm_ops.kernels.problem import Problem
from neuronmm_ops.kernels.problems import mlp_matrices
from neuronmm_ops.models import SHAPES
from neuronmm_ops.plan import plan_problem
from neuronmm_ops.rank import aligned_rank

TARGET, RATIO = "trn2", 0.2
RANKS = {"Llama-3.2-1B": 1, "Llama-3.1-8B": 8, "Llama-3.1-70B": 32}
"""Ranks that divide each model's inner features."""


def run(clone: Path, progress: Progress | None = None) -> list[dict[str, Any]]:
    """Trace nki-library's `mlp` and our plans for one bf16 token, on one and on two cores.

    Args:
        clone: of aws-neuron/nki-library; a copy of its source is imported.
        progress: called with ("trace", done, in all).

    Returns:
        A row for each model and number of cores: `model`, `tp`, `lnc`, `H`, `I` of one rank,
        `aws_ms`, `dense_ms` (our `mlp`), and `low_rank_ms` (`svd_mlp` at ratio .2; None where
        ranks share the model).

    Raises:
        ValueError: there is no such source.
    """
    source = clone / "src/nkilib_src"
    if not source.is_dir():
        raise ValueError(f"{clone} must be a clone of aws-neuron/nki-library; it has no {source}")
    neuroncore.install()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        copytree(source, Path(folder, "nkilib_src"))
        mend(Path(folder, "nkilib_src/nkilib/core/mlp/mlp.py"))
        sys.path.insert(0, folder)
        for model, tp in RANKS.items():
            for lnc in (1, 2):
                rows.append(_row(model, tp, lnc))
                if progress is not None:
                    progress("trace", len(rows), 2 * len(RANKS))
        sys.path.remove(folder)
    return rows


def _row(model: str, tp: int, lnc: int) -> dict[str, Any]:
    H, inner = SHAPES[model].hidden_size, SHAPES[model].intermediate_size
    I = inner // tp  # noqa: E741 - the shape letter
    dense = Problem("mlp", 1, ((H, I), (H, I), (I, H)), target=TARGET, lnc=lnc)
    low_rank = None
    if tp == 1:
        r = aligned_rank(H, I, RATIO)
        assert r is not None
        matrices = mlp_matrices(H, (r, r, r), I, H)
        low_rank = plan_problem(Problem("svd_mlp", 1, matrices, target=TARGET, lnc=lnc)).time_ms
    return {
        "model": model,
        "tp": tp,
        "lnc": lnc,
        "H": H,
        "I": I,
        "aws_ms": _aws(H, I, lnc),
        "dense_ms": plan_problem(dense).time_ms,
        "low_rank_ms": low_rank,
    }


def _aws(H: int, I: int, lnc: int) -> float:  # noqa: E741
    """Milliseconds of nki-library's kernel, which chooses its form for few tokens itself."""
    from nkilib_src.nkilib.core.mlp.mlp import mlp  # pyright: ignore

    shapes = (1, 1, H), (H, I), (H, I), (I, H)
    operands = [np.zeros(shape, ml_dtypes.bfloat16) for shape in shapes]
    with redirect_stdout(io.StringIO()):  # it reports its memory
        done = neuroncore.simulate(mlp[lnc], *operands, target=TARGET, mode="trace")
    return done.profile.time_ms
