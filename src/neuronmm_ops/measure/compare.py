"""Compressed checkpoints next to the dense model: perplexity, size, speed, what they trade."""

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from neuronmm_ops.checkpoint import inspect_checkpoint, read_config, weight_files
from neuronmm_ops.compress.batches import position_limit
from neuronmm_ops.compress.calibrate import Progress
from neuronmm_ops.compress.report import CompressionReport
from neuronmm_ops.errors import CheckpointError, NonFiniteError
from neuronmm_ops.eval import block_length, encode_documents, token_perplexity
from neuronmm_ops.hf.computing import load_packed
from neuronmm_ops.hf.loading import load_tokenizer, local_directory
from neuronmm_ops.hf.provenance import RUN_FILE, read_run
from neuronmm_ops.manifest import check_weights, installed_versions
from neuronmm_ops.measure.speed import PairedSpeed, TimedPhase, paired_speed
from neuronmm_ops.ops.backends.cpu import name_of
from neuronmm_ops.progress import in_notebook, named, progress_bars

PREFILL_TOKENS = 512
DECODE_TOKENS = 32
ROUNDS = 7
_PHASES: tuple[TimedPhase, ...] = ("prefill", "decode")


def run(
    directories: Sequence[str | Path],
    texts: Mapping[str, str],
    dense: str | Path | None = None,
    seqlen: int | None = None,
    dtype: str = "auto",
    device: str = "cpu",
    rounds: int = ROUNDS,
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """Measure compressed checkpoints next to the dense model.

    Two models are in memory at a time, the dense one and one checkpoint: their speeds are timed in
    turn, in one process. All compute in the dense model's compute dtype.

    Args:
        directories: compressed checkpoints; their own names must differ.
        texts: by name, to take the perplexity on.
        dense: a directory or a hub id; default the model that the checkpoints record.
        seqlen: tokens of an evaluation block; default the smaller of 2048 and the model's limit.
        dtype: to compute in, see `hf.load_computing`.
        device: to compute on.
        rounds: of timing; fewer where they take more than a minute.
        progress: called with (what, done, total); a notebook's cell shows it where none is given.

    Returns:
        The dense row, then one for each directory: `dir`; `ratio`, `effective_ratio` and
        `model_ratio` (0 for dense); `bytes` of the weights' files; `ppl_token`, `excess_log_ppl`
        (ln of the perplexity less ln of the dense model's) and `tokens` by text; `tokens_per_s`
        and `speedup` by phase, where a checkpoint's tokens/s are the dense model's median times
        the median speed-up of paired rounds; `gamma`, see there; `config`; `recovered`, whether
        the factors were trained afterwards; and what it was measured with: `seqlen`,
        `prefill_tokens`, `decode_tokens`, `dtype` (the checkpoint's), `compute_dtype`, `device`,
        `threads`, `versions`.

    Raises:
        ValueError: two names are the same, a text is too short, or the checkpoints record
            different dense models and none is given.
        CheckpointError: a directory is no compressed checkpoint, the dense model cannot be loaded
            or is not dense, or a checkpoint's tokenizer gives other tokens than the dense model's.
        NonFiniteError: logits are NaN or Inf; names the model.
    """
    paths = [Path(directory) for directory in directories]
    _check_names("directories", [path.resolve().name for path in paths])
    reports = [inspect_checkpoint(path) for path in paths]
    for path in paths:
        check_weights(path, values=True)  # not after minutes of the dense model's evaluation
    dense = dense or _recorded_dense(paths)
    if read_config(local_directory(dense)).get("quantization_config") is not None:
        raise CheckpointError(f"{dense} is compressed or quantized; give the dense model")
    ids = _encoded(texts, dense, paths)

    base: Any = load_packed(dense, dtype, device)
    seqlen = block_length(base, seqlen, least=2)
    with progress_bars() if progress is None and in_notebook() else nullcontext(progress) as tell:
        setting = _Setting(base, ids, seqlen, rounds, tell)
        base_ppl = setting.perplexities(base, dense)
        pairs = zip(paths, reports, strict=True)
        measured = [setting.measured(path, report) for path, report in pairs]
    base_speed: dict[TimedPhase, float] = {
        phase: statistics.median(
            checkpoint.speed.tokens_per_s("dense", phase) for checkpoint in measured
        )
        for phase in _PHASES
    }
    rows = [_dense_row(dense, name_of(base.config.dtype), base_ppl, base_speed)]
    rows += [_row(checkpoint, base_ppl, base_speed) for checkpoint in measured]
    return [{**row, **setting.context()} for row in rows]


def gamma(loss: float | None, speedup: float | None) -> float | None:
    """Return the loss of quality for each unit of speed-up; lower is better.

    NeuronMM (arXiv:2510.25977) defines its gamma in words alone, as the trade-off between inference
    speed and accuracy degradation. This is our reading of it: with the drop of the mean accuracy it
    fits the published range of 3.24 % to 25.27 %, and no source confirms it.

    Args:
        loss: drop of the mean accuracy; or excess log-perplexity, whose values compare with one
            another and not with the paper's.
        speedup: end to end.

    Returns:
        `loss / (speedup - 1)`; None where nothing became faster, or one is not known.
    """
    return None if loss is None or speedup is None or speedup <= 1 else loss / (speedup - 1)


@dataclass(frozen=True)
class _Measured:
    path: Path
    report: CompressionReport
    dtype: str
    ppl: Mapping[str, float]
    speed: PairedSpeed


@dataclass(frozen=True)
class _Setting:
    """What all models are measured with: the dense model, the texts' token ids, how often."""

    base: Any
    ids: Mapping[str, Tensor]
    seqlen: int
    rounds: int
    progress: Progress | None

    @property
    def prefill(self) -> Tensor:
        """The tokens whose prefill is timed."""
        return max(self.ids.values(), key=len)[: min(PREFILL_TOKENS, self.seqlen)]

    @property
    def decode_tokens(self) -> int:
        """How many tokens are decoded after one or more others, within the model's limit."""
        limit = position_limit(self.base) or PREFILL_TOKENS
        return max(1, min(DECODE_TOKENS, limit - 1))

    def measured(self, path: Path, report: CompressionReport) -> _Measured:
        """Load a checkpoint, measure it, and let go of it."""
        model: Any = load_packed(path, self.base.dtype, self.base.device)
        ppl = self.perplexities(model, path)
        speed = paired_speed(
            self.base,
            model,
            self.prefill,
            decode_tokens=self.decode_tokens,
            rounds=self.rounds,
            progress=named(self.progress, path.name),
        )
        return _Measured(path, report, name_of(model.config.dtype), ppl, speed)

    def perplexities(self, model: Any, source: str | Path) -> dict[str, float]:
        """Return the perplexity of every text."""
        ppl: dict[str, float] = {}
        for name, tokens in self.ids.items():
            progress = named(self.progress, f"{Path(source).name} on {Path(name).name}")
            try:
                ppl[name] = token_perplexity(model, tokens, self.seqlen, progress).ppl_token
            except NonFiniteError as error:
                raise NonFiniteError(f"{source} on {name}: {error}") from None
        return ppl

    def context(self) -> dict[str, Any]:
        """Return the fields that all rows share."""
        return {
            "tokens": {name: len(tokens) for name, tokens in self.ids.items()},
            "seqlen": self.seqlen,
            "prefill_tokens": len(self.prefill),
            "decode_tokens": self.decode_tokens,
            "compute_dtype": name_of(self.base.dtype),
            "device": str(self.base.device),
            "threads": torch.get_num_threads(),
            "versions": installed_versions("neuronmm-ops", "torch", "transformers"),
        }


def _dense_row(
    dense: str | Path, dtype: str, ppl: Mapping[str, float], speed: Mapping[TimedPhase, float]
) -> dict[str, Any]:
    return {
        "dir": str(dense),
        **dict.fromkeys(("ratio", "effective_ratio", "model_ratio"), 0.0),
        "bytes": _bytes(local_directory(dense)),
        "ppl_token": ppl,
        "excess_log_ppl": dict.fromkeys(ppl, 0.0),
        "tokens_per_s": speed,
        "speedup": dict.fromkeys((*_PHASES, "end_to_end"), 1.0),
        "gamma": None,
        "config": None,
        "recovered": False,
        "dtype": dtype,
    }


def _row(
    checkpoint: _Measured, base_ppl: Mapping[str, float], base_speed: Mapping[TimedPhase, float]
) -> dict[str, Any]:
    report, speed = checkpoint.report, checkpoint.speed
    excess = {
        name: math.log(ppl) - math.log(base_ppl[name]) for name, ppl in checkpoint.ppl.items()
    }
    speedup = {phase: speed.speedup(phase) for phase in speed.times}
    return {
        "dir": str(checkpoint.path),
        "ratio": report.ratio,
        "effective_ratio": report.effective_ratio,
        "model_ratio": report.model_ratio,
        "bytes": _bytes(checkpoint.path),
        "ppl_token": checkpoint.ppl,
        "excess_log_ppl": excess,
        "tokens_per_s": {phase: base_speed[phase] * speedup[phase] for phase in _PHASES},
        "speedup": speedup,
        "gamma": gamma(statistics.mean(excess.values()), speedup["end_to_end"]),
        "config": None if report.config is None else report.config.to_dict(),
        "recovered": bool(report.provenance.get("recovery")),
        "dtype": checkpoint.dtype,
    }


def _encoded(
    texts: Mapping[str, str], dense: str | Path, paths: Sequence[Path]
) -> dict[str, Tensor]:
    """Return the token ids `[T]` of every text, which must be the same for all models."""
    if not texts:
        raise ValueError("compare needs at least one text")
    tokenizer = load_tokenizer(dense)
    ids = {name: encode_documents(tokenizer, [text]) for name, text in texts.items()}
    for name, expected in ids.items():
        if len(expected) < 2:
            raise ValueError(
                f"text {name} must hold at least 2 tokens, got {len(expected)}; use a longer one"
            )
    for path in paths:
        tokenizer = load_tokenizer(path)
        for name, expected in ids.items():
            if not torch.equal(encode_documents(tokenizer, [texts[name]]), expected):
                raise CheckpointError(
                    f"{path} must have the tokenizer of {dense}, got other tokens for {name}; "
                    "perplexities of different tokens do not compare"
                )
    return ids


def _recorded_dense(paths: Sequence[Path]) -> str:
    """Return the dense model that the checkpoints say they were made of."""
    origins = {path: _origin(path) for path in paths}
    for path, origin in origins.items():
        if not origin:
            raise ValueError(f"{path} does not record its dense model; give --dense DIR")
    (first, dense), *others = origins.items()
    for path, origin in others:
        if origin != dense:
            raise ValueError(
                f"{first} is of {dense} and {path} of {origin}; give --dense DIR, or compare "
                "checkpoints of one model"
            )
    try:
        read_config(local_directory(dense))
    except CheckpointError as error:
        raise CheckpointError(
            f"{dense}, the dense model of {first}, cannot be read ({error}); give --dense DIR"
        ) from None
    return dense


def _origin(path: Path) -> str:
    if (path / RUN_FILE).exists():
        return read_run(path / RUN_FILE).model.path
    named = str(inspect_checkpoint(path).provenance.get("model", ""))
    return str(Path(named).resolve()) if named and Path(named).is_dir() else named


def _check_names(kind: str, names: Sequence[str]) -> None:
    if not names:
        raise ValueError(f"compare needs {kind}; give at least one")
    name, count = Counter(names).most_common(1)[0]
    if count > 1:
        raise ValueError(f"{kind} must have names that differ, got {name} {count} times")


def _bytes(directory: Path) -> int:
    return sum(file.stat().st_size for file in weight_files(directory))
