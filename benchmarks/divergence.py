"""How far a method moves a model from itself, at equal kept parameters; one dense byte next to it.

Everything is computed in float32 and every model predicts the same tokens, so that nothing but the
weights differs. KL has no first-order part: of small losses it is the better measure.
"""

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.methods import BASELINE, DEFAULT
from neuronmm_ops.compress import SVDConfig, compare, compress_
from neuronmm_ops.compress.calibrate import Progress
from neuronmm_ops.compress.targets import select_targets
from neuronmm_ops.compress.width import SHARES, shares
from neuronmm_ops.eval import block_length, encode_documents
from neuronmm_ops.nn.dense_linear import DenseLinear
from neuronmm_ops.storages import STORAGES, dtype_name, matrix_bytes

ROOT = Path(__file__).parents[1]
_DEMO, _CONVERGED = ROOT / "src" / "neuronmm_ops" / "demo", ROOT / "benchmarks" / "converged"


class Trial(NamedTuple):
    """A trained model, the text that it is calibrated on, and texts that it is evaluated on."""

    model: Path
    calibration: Path
    texts: tuple[Path, ...]


TRIALS = {
    "demo": Trial(
        _DEMO / "model",
        _DEMO / "calibration.txt",
        (_DEMO / "held_out.txt", _DEMO / "LICENSE-PYTHON.txt"),
    ),
    "converged": Trial(
        _CONVERGED / "model", _CONVERGED / "calibration.txt", (_CONVERGED / "held_out.txt",)
    ),
    "converged, half seen": Trial(
        _CONVERGED / "model", _CONVERGED / "people.txt", (_CONVERGED / "roads.txt",)
    ),
}
"""The demo's model is trained for minutes on more than it can hold; the other holds all it read."""
CHARACTERS = 40_000
"""Of each text: some 10,000 tokens."""
RATIOS = (0.05, 0.1, 0.2, 0.4, 0.6, 0.8)
TARGETS = "all-linear"
ONE_BYTE = ("fp8", "int8")
CANDIDATES = (
    BASELINE,
    DEFAULT,
    SVDConfig(method="whiten"),
    SVDConfig(method="drift"),
    SVDConfig(method="drift", allocation="uniform"),
    SVDConfig(method="kfac"),
    SVDConfig(method="swift", importance="perplexity"),
    SVDConfig(method="zero-sum"),
)
"""The baseline is the first: those with one budget remove no less than it does."""
COMPARED = "compared"
"""What `compress --compare` takes of the default, with narrower MLPs and without, and others."""


class Evaluated(NamedTuple):
    """Blocks of tokens, and the dense model's log-probabilities `[T - 1, V]` of each."""

    blocks: list[Tensor]
    expected: list[Tensor]


def run(progress: Progress | None = None) -> list[dict[str, Any]]:
    """Return the rows of `measure` of every trial, with its name as `trial` before them."""
    return [
        {"trial": name, **row}
        for name, trial in TRIALS.items()
        for row in measure(
            trial.model,
            {path.stem: path.read_text(encoding="utf-8")[:CHARACTERS] for path in trial.texts},
            trial.calibration.read_text(encoding="utf-8"),
            progress=progress,
        )
    ]


def measure(
    directory: str | Path,
    texts: Mapping[str, str],
    calibration: str,
    ratios: Sequence[float] = RATIOS,
    candidates: Sequence[SVDConfig] = CANDIDATES,
    tokens: int = 16_384,
    block: int = 8,
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """Compress all Linears of a trained model's layers by each candidate and compare predictions.

    Args:
        directory: a Transformers checkpoint with its tokenizer, or a hub id.
        texts: name to the text to evaluate on.
        calibration: to calibrate on; other text than `texts`.
        ratios: nominal, of uniform ranks; what these remove is the ratio of one common budget.
        candidates: what to compare, `BASELINE` first.
        tokens: to calibrate on, in whole blocks.
        block: ranks are multiples of it.
        progress: told `("divergence", models done, models in all)`.

    Returns:
        For dense one byte, rounded to nearest with a scale an output, then each ratio and
        candidate, MLPs narrowed by `prune_`, alone and before the default, and what `--compare`
        takes, and each text: `method` (`dense int8`, `pruned`, `compared`, ...), `allocation`,
        `importance`, `prune_share` (of what narrower MLPs have of what is removed), `ratio`,
        `effective_ratio`, `bytes` of the targeted matrices, relative to bfloat16, `text`, `tokens`,
        `dense_ce`, `ce` (nats a token), `ce_error` (the standard error of its growth), `kl` (the
        mean divergence from the dense model's predictions, in nats), `kl_error`, and
        `kl_quotient`, by the baseline's.

    Raises:
        ValueError: the calibration text is shorter than one block, a text than two tokens.
        CheckpointError: the directory cannot be loaded.
    """
    from neuronmm_ops import hf

    tokenizer = hf.load_tokenizer(directory)
    dense = hf.load_computing(directory, "float32").eval()
    seqlen = block_length(dense, None)
    known = {
        name: evaluated(dense, encode_documents(tokenizer, [t]), seqlen)
        for name, t in texts.items()
    }
    batches = hf.calibration_batches(tokenizer, calibration, tokens // seqlen, seqlen)
    rows: list[dict[str, Any]] = []
    configs = [replace(config, block=block, targets=TARGETS) for config in candidates]
    total = len(ONE_BYTE) + len(ratios) * (len(candidates) + len(SHARES) + 1)  # at most
    for done, (labels, model) in enumerate(_models(dense, ratios, configs, batches), start=1):
        rows += [{**labels, "text": name, **measured(model, text)} for name, text in known.items()]
        if progress:
            progress("divergence", done, total)
    baseline = {
        (row["ratio"], row["text"]): row["kl"]
        for row in rows
        if (row["method"], row["allocation"]) == (BASELINE.method, BASELINE.allocation)
    }
    for row in rows:
        kl = baseline.get((row["ratio"], row["text"]), 0.0)
        row["kl_quotient"] = row["kl"] / kl if kl > 0 else None
    return rows


def _models(
    dense: nn.Module,
    ratios: Sequence[float],
    candidates: Sequence[SVDConfig],
    batches: Sequence[Tensor],
) -> Iterator[tuple[dict[str, Any], nn.Module]]:
    """Yield labels and a model: dense ones in each storage, then the compressed ones."""
    for storage in ONE_BYTE:
        model, share = _rounded(dense, storage)
        labels = {"method": f"dense {storage}", "allocation": None, "importance": None}
        labels |= {"prune_share": 0.0, "ratio": 0.0, "effective_ratio": 0.0, "bytes": share}
        yield labels, model
    for ratio in ratios:
        removed = ratio
        for config in candidates:
            budget = ratio if config.allocation == "uniform" else removed
            model = copy.deepcopy(dense)
            report = compress_(model, replace(config, ratio=budget), batches)
            if config is candidates[0]:
                removed = report.effective_ratio
            yield _labels(config.method, config, ratio, report.effective_ratio), model
        default = replace(DEFAULT, ratio=removed, block=candidates[0].block, targets=TARGETS)
        narrower = {_name(each): each for each in shares(dense, default, {}, SHARES)}
        taken, _ = compare.nearest(dense, compare.candidates(dense, default, {}), batches)
        for name, config in (narrower | {COMPARED: taken}).items():
            model = copy.deepcopy(dense)
            report = compress_(model, config, batches)
            yield _labels(name, config, ratio, report.effective_ratio), model


def _name(config: SVDConfig) -> str:
    is_all = config.prune_share == 1
    return "pruned" if is_all else f"pruned {config.prune_share:g}, then {config.method}"


def _labels(method: str, config: SVDConfig, ratio: float, effective: float) -> dict[str, Any]:
    is_candidate = method == config.method
    return {
        "method": method,
        "allocation": config.allocation if is_candidate else None,
        "importance": config.weighs_by if is_candidate else None,
        "prune_share": config.prune_share,
        "ratio": ratio,
        "effective_ratio": effective,
        "bytes": 1 - effective,
    }


@torch.no_grad()
def _rounded(dense: nn.Module, storage: str) -> tuple[nn.Module, float]:
    """Return the model with its Linears rounded to nearest, and their share of bfloat16's bytes."""
    model = copy.deepcopy(dense)
    stored, linears = STORAGES[storage], select_targets(model, SVDConfig(targets=TARGETS)).linears
    for linear in linears.values():
        matrix = linear.weight.t()
        scale = stored.magnitudes(matrix) / stored.full
        matrix.copy_(stored.nearest(matrix / scale) * scale)
    sizes = [_size(linear) for linear in linears.values()]
    name = dtype_name(storage)
    return model, sum(matrix_bytes(s, 2, name) for s in sizes) / sum(
        matrix_bytes(s, 2) for s in sizes
    )


def _size(linear: DenseLinear) -> tuple[int, int]:
    return linear.in_features, linear.out_features


@torch.inference_mode()
def _log_probabilities(model: nn.Module, block: Tensor) -> Tensor:
    return F.log_softmax(model(block[None]).logits[0, :-1], -1)


def evaluated(dense: nn.Module, ids: Tensor, seqlen: int) -> Evaluated:
    """Return what the dense model predicts of a text; ValueError where it has no two tokens."""
    blocks = [block for block in ids.split(seqlen) if len(block) >= 2]
    if not blocks:
        raise ValueError(f"a text must have at least 2 tokens, got {len(ids)}; use a longer text")
    return Evaluated(blocks, [_log_probabilities(dense, block) for block in blocks])


def measured(model: nn.Module, text: Evaluated) -> dict[str, Any]:
    """Compare a model with the dense one, token by token: the fields of `measure` from `tokens`."""
    losses, grown, apart = list[Tensor](), list[Tensor](), list[Tensor]()
    for block, expected in zip(text.blocks, text.expected, strict=True):
        log_probs = _log_probabilities(model.eval(), block)
        dense, own = (
            F.nll_loss(x, block[1:], reduction="none").double() for x in (expected, log_probs)
        )
        losses.append(dense)
        grown.append(own - dense)
        apart.append((expected.exp() * (expected - log_probs)).double().sum(-1))
    before = float(torch.cat(losses).mean())
    growth, kl = torch.cat(grown), torch.cat(apart)
    root = math.sqrt(len(kl))
    return {
        "tokens": len(kl),
        "dense_ce": before,
        "ce": before + float(growth.mean()),
        "ce_error": float(growth.std()) / root,
        "kl": float(kl.mean()),
        "kl_error": float(kl.std()) / root,
    }
