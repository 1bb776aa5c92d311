"""Q + U V: a coarse matrix and its low-rank correction, next to finer matrices of as many bytes.

Both are found on the same calibration. Q is rounded as `compress` does it, errors fed back by the
inputs' second moment H; `U V` is the best rank-r approximation of what is missing, by `tr(Dᵀ H D)`.
Rounding and approximating by turns, each of what the other leaves, is LQ-LoRA's (arXiv 2311.12023)
and CALDERA's (arXiv 2405.18886) idea; once, Q first, QERA's (arXiv 2410.06040).
"""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from math import prod
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.divergence import TARGETS, TRIALS, Trial, evaluated, measured
from neuronmm_ops.compress import SVDConfig, collect_moments, compress_
from neuronmm_ops.compress.calibrate import Progress
from neuronmm_ops.compress.factorization import SecondMoment
from neuronmm_ops.compress.factorize import factorize
from neuronmm_ops.compress.feedback import rounded
from neuronmm_ops.compress.quantize import pair_loss, quantize_pair
from neuronmm_ops.compress.targets import select_targets
from neuronmm_ops.compress.width import WIDTHS
from neuronmm_ops.eval import block_length, encode_documents
from neuronmm_ops.storages import SCALE_BYTES, STORAGES, WeightStorage, factor_bytes

MODELS = ("demo", "converged")
"""Of `divergence.TRIALS`."""
CHARACTERS = 8_000
"""Of each text: some 2,500 tokens."""
TOKENS = 16_384
"""To calibrate on."""
RANKS = (8, 16, 32, 64)
FACTORS = "int8"
"""What `U V` is rounded to: in bfloat16 it does no better, and takes twice the bytes."""
ROUNDS = (0, 4)
"""How often Q is rounded: 0 is once, of the matrix; others of what a first `U V` leaves."""
RATIOS = (0.2, 0.4, 0.6)
PAIRS = ("int8", "int4")
SHARES = (0.5, 0.33, 0.26, 0.2)
"""Of bfloat16's bytes, for storage `auto`."""


class Grid(WeightStorage):
    """2^bits equidistant numbers, half of them negative, with scales as int4 has them.

    Only rounded to, never stored: no kernel reads it.
    """

    bits: ClassVar[int]
    rows: ClassVar[int]

    def shapes(self, K: int, *N: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the bytes and the scales that a matrix `[K, N]` would take."""
        return (-(-K * self.bits // 8), *N), (-(-K // self.rows), *N)

    def nearest(self, numbers: Tensor) -> Tensor:
        """Round to -0.5, 0.5, 1.5, ..."""
        return ((numbers - 0.5).round() + 0.5).clamp(-self.full, self.full)

    def magnitudes(self, matrix: Tensor) -> Tensor:
        """Return the largest magnitude of each group of rows."""
        return torch.stack([rows.abs().amax(0) for rows in matrix.split(self.rows)])

    def spread(self, scale: Tensor, K: int) -> Tensor:
        """Return a scale for every number."""
        return scale.repeat_interleave(self.rows, 0)[:K]


def grid(bits: int, group: int = 128) -> WeightStorage:
    """Return a grid by its bits and the rows that share a scale."""
    fields = {
        "name": f"int{bits}",
        "bits": bits,
        "group": group,
        "rows": group,
        "full": (2**bits - 1) / 2,
    }
    return type(f"Int{bits}", (Grid,), fields)()


REFERENCE = (grid(2), grid(3), STORAGES["int4"], grid(5), STORAGES["int8"], STORAGES["fp8"])
"""Dense: what others are held against."""
FINER = (grid(3, 64), grid(3, 32), grid(4, 64), grid(4, 32))
"""Dense, with more scales."""
COARSE = (STORAGES["int4"], grid(3), grid(2))
"""What Q is rounded to."""


Found = tuple[Tensor, int]
"""A matrix `[K, N]` as it is then, and the bytes that it takes."""


class RoundedModel(NamedTuple):
    """Labels of a row, the model, and its matrices' bytes relative to bfloat16."""

    labels: dict[str, Any]
    model: nn.Module
    share: float


class Correction(NamedTuple):
    """What Q is rounded to, the rank of `U V`, and how often both are found."""

    q: WeightStorage
    rank: int
    rounds: int


NO_LABELS = dict.fromkeys(("kind", "storage", "group", "rank", "rounds", "ratio", "width"))


def run(progress: Progress | None = None) -> list[dict[str, Any]]:
    """Return the rows of `measure` of every model, with its name as `trial` before them."""
    return [
        {"trial": name, **row}
        for name in MODELS
        for row in measure(TRIALS[name], progress=progress)
    ]


def measure(
    trial: Trial,
    characters: int = CHARACTERS,
    ranks: Sequence[int] = RANKS,
    ratios: Sequence[float] = RATIOS,
    shares: Sequence[float] = SHARES,
    widths: Sequence[float] = WIDTHS,
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """Round all Linears of a trained model's layers in each way and compare predictions.

    Args:
        trial: the model, its calibration text and the texts to evaluate on.
        characters: of each text to evaluate on.
        ranks: of `U V`.
        ratios: of pairs without Q.
        shares: of bfloat16's bytes, budgets of storage `auto`.
        widths: of all parameters, that narrower MLPs remove of those budgets.
        progress: told `("residuals", models done, models in all)`.

    Returns:
        For each way and text: `kind` (`dense`, `residual`, `pair` without Q, or `auto`, the
        product's own choice for each matrix), `storage` (of the matrix, of Q, or of the pair),
        `group` (rows that share a scale, None for all), `rank` and `rounds` (of `U V`; None for
        others), `ratio` (of pairs and the budget), `width` (of a budget, else None), `bytes`
        (relative to bfloat16, scales included), `text`, what `divergence.measured` measures, and
        `quotient`: KL by that of `best_of` the reference.
    """
    from neuronmm_ops import hf

    tokenizer = hf.load_tokenizer(trial.model)
    dense = hf.load_computing(trial.model, "float32").eval()
    seqlen = block_length(dense, None)
    texts = {path.stem: path.read_text(encoding="utf-8")[:characters] for path in trial.texts}
    known = {
        name: evaluated(dense, encode_documents(tokenizer, [text]), seqlen)
        for name, text in texts.items()
    }
    calibration = trial.calibration.read_text(encoding="utf-8")
    batches = hf.calibration_batches(tokenizer, calibration, TOKENS // seqlen, seqlen)
    rows: list[dict[str, Any]] = []
    total = len(REFERENCE) + len(FINER) + len(PAIRS) * len(ratios)
    total += len(COARSE) * len(ranks) * len(ROUNDS) + len(shares) * (1 + len(widths))
    budgets = list(product(shares, (0.0, *widths)))
    for done, candidate in enumerate(_candidates(dense, batches, ranks, ratios, budgets), start=1):
        labels = {**candidate.labels, "bytes": candidate.share}
        rows += [
            {**labels, "text": name, **measured(candidate.model, text)}
            for name, text in known.items()
        ]
        if progress:
            progress("residuals", done, total)
    for name in known:
        own = [row for row in rows if row["text"] == name]
        points = [(row["bytes"], row["kl"]) for row in own[: len(REFERENCE)]]
        for row in own:
            best = best_of(points, row["bytes"])
            row["quotient"] = row["kl"] / best if best else None
    return rows


def best_of(points: Sequence[tuple[float, float]], share: float) -> float | None:
    """Return the KL of the best mixture of dense storages with that share of bytes.

    Args:
        points: bytes and KL of each storage.
        share: bytes.

    Returns:
        Log-linear between storages that are better than all smaller ones; the largest's KL above
        them, None below.
    """
    front: list[tuple[float, float]] = []
    for size, kl in sorted(points):
        if not front or kl < front[-1][1]:
            front.append((size, kl))
    below = [point for point in front if point[0] <= share]
    if not below:
        return None
    if len(below) == len(front):
        return front[-1][1]
    (low, first), (high, second) = below[-1], front[len(below)]
    return first * (second / first) ** ((share - low) / (high - low))


def label(row: dict[str, Any]) -> str:
    """Say what a row is of."""
    if row["kind"] in ("pair", "auto"):
        narrower = f", narrower {row['width']:g}" if row["width"] else ""
        return f"{row['kind']} {row['storage'] or 'storage'}, ratio {row['ratio']:g}{narrower}"
    of_groups = f" g{row['group']}" if row["group"] else ""
    if row["kind"] == "dense":
        return f"dense {row['storage']}{of_groups}"
    alternated = f", {row['rounds']} rounds" if row["rounds"] else ""
    return f"{row['storage']}{of_groups} + rank {row['rank']}{alternated}"


def _candidates(
    dense: nn.Module,
    batches: Sequence[Tensor],
    ranks: Sequence[int],
    ratios: Sequence[float],
    budgets: Sequence[tuple[float, float]],
) -> Iterator[RoundedModel]:
    """Yield every model: `REFERENCE` first."""
    linears = select_targets(dense, SVDConfig(targets=TARGETS)).linears
    layers = {
        name: (linears[name].weight.detach().t().double(), moment)
        for name, moment in collect_moments(dense, dict.fromkeys(linears, "input"), batches)
    }
    size = sum(2 * matrix.numel() for matrix, _ in layers.values())

    def candidate(compress: Callable[[Tensor, SecondMoment], Found], **labels: Any) -> RoundedModel:
        each = {name: compress(*layer) for name, layer in layers.items()}
        model = copy.deepcopy(dense)
        for name, (matrix, _) in each.items():
            model.get_parameter(f"{name}.weight").data.copy_(matrix.t())
        return RoundedModel(
            NO_LABELS | labels, model, sum(share for _, share in each.values()) / size
        )

    for stored in (*REFERENCE, *FINER):
        labels = {"storage": stored.name, "group": stored.group}
        yield candidate(partial(_dense, stored), kind="dense", **labels)
    for stored, rounds, rank in product(COARSE, ROUNDS, ranks):
        corrected = partial(_with_pair, Correction(stored, rank, rounds))
        labels = {"storage": stored.name, "group": stored.group}
        yield candidate(corrected, kind="residual", **labels, rounds=rounds, rank=rank)
    dtypes = dict.fromkeys(linears, torch.bfloat16)
    config_of = partial(SVDConfig, targets=TARGETS, block=8)
    configs: list[tuple[dict[str, Any], SVDConfig]] = [
        ({"kind": "pair", "storage": storage}, config_of(ratio=ratio, storage=storage))
        for storage, ratio in product(PAIRS, ratios)
    ]
    for share, width in budgets:
        config = config_of(ratio=1 - share, storage="auto", budget="bytes")
        labels = {"kind": "auto", "storage": None, "width": width}
        configs.append((labels, replace(config, prune_share=width / config.ratio)))
    for labels, config in configs:
        model = copy.deepcopy(dense)
        report = compress_(model, config, batches, dtypes=dtypes)
        share = sum(layer.bytes for layer in report.layers) / size
        yield RoundedModel(NO_LABELS | labels | {"ratio": config.ratio}, model, share)


def _dense(stored: WeightStorage, matrix: Tensor, moment: SecondMoment) -> Found:
    numbers, scale = rounded(matrix, stored, moment.matrix)
    tensor, scales = stored.shapes(*matrix.shape)
    size = prod(tensor) + SCALE_BYTES * prod(scales)
    return numbers * stored.spread(scale, len(numbers)), size


def _with_pair(asked: Correction, matrix: Tensor, moment: SecondMoment) -> Found:
    """Return the best Q + U V of all rounds; with rounds to come, the first Q is of what U V left.

    Of a matrix that has less than the rank asked for, U V has all.
    """
    K, N = matrix.shape
    rank = min(asked.rank, K, N)

    def approximated(missing: Tensor) -> tuple[Tensor, Tensor]:
        u, v = factorize(missing.t(), "whiten", moment, rank).truncate(rank)
        return quantize_pair(u, v, FACTORS, missing, moment.matrix).widened(torch.float64)

    u, v = approximated(matrix) if asked.rounds else (matrix[:, :1] * 0, matrix[:1] * 0)
    least, best, size = math.inf, matrix, 0
    for _ in range(max(1, asked.rounds)):
        q, size = _dense(asked.q, matrix - u @ v, moment)
        u, v = approximated(matrix - q)
        lost = pair_loss(u, v, matrix - q, moment.matrix, None)
        if lost < least:
            least, best = lost, q + u @ v
    return best, size + factor_bytes(K, N, rank, 2, FACTORS)
