"""Compressed checkpoints beside their dense model: perplexity, size, speed, and what they trade."""

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from neuronmm_ops.bench.speed import PairedSpeed, Phase, paired_speed
from neuronmm_ops.checkpoint import inspect_checkpoint, read_config, weight_files
from neuronmm_ops.compress.batches import position_limit
from neuronmm_ops.compress.calibrate import Progress
from neuronmm_ops.compress.report import CompressionReport
from neuronmm_ops.errors import CheckpointError, NonFiniteError
from neuronmm_ops.eval import block_length, encode_documents, token_perplexity
from neuronmm_ops.hf.computing import load_computing
from neuronmm_ops.hf.loading import load_tokenizer, local_directory
from neuronmm_ops.hf.provenance import RUN_FILE, read_run
from neuronmm_ops.ops.backends.cpu import name_of

PREFILL_TOKENS = 512
DECODE_TOKENS = 32
ROUNDS = 7
_PHASES: tuple[Phase, ...] = ("prefill", "decode")


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
    """Measure compressed checkpoints beside the dense model.

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
        progress: called with (what, done, total).

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
    dense = dense or _recorded_dense(paths)
    if read_config(local_directory(dense)).get("quantization_config") is not None:
        raise CheckpointError(f"{dense} is compressed or quantized; give the dense model")
    ids = _encoded(texts, dense, paths)

    base: Any = load_computing(dense, dtype, device)
    seqlen = block_length(base, seqlen, least=2)
    tokens = max(ids.values(), key=len)[: min(PREFILL_TOKENS, seqlen)]
    limit = position_limit(base) or PREFILL_TOKENS
    decode_tokens = max(1, min(DECODE_TOKENS, limit - 1))
    base_ppl = _perplexities(base, dense, ids, seqlen, progress)
    base_dtype = name_of(base.config.dtype)

    def measured(path: Path, report: CompressionReport) -> _Measured:
        model: Any = load_computing(path, name_of(base.dtype), device)
        ppl = _perplexities(model, path, ids, seqlen, progress)
        speed = paired_speed(
            base,
            model,
            tokens,
            decode_tokens=decode_tokens,
            rounds=rounds,
            progress=_named(progress, path.name),
        )
        return _Measured(path, report, name_of(model.config.dtype), ppl, speed)

    found = [measured(path, report) for path, report in zip(paths, reports, strict=True)]
    base_speed: dict[Phase, float] = {
        phase: statistics.median(each.speed.tokens_per_s("dense", phase) for each in found)
        for phase in _PHASES
    }
    context = {
        "tokens": {name: len(each) for name, each in ids.items()},
        "seqlen": seqlen,
        "prefill_tokens": len(tokens),
        "decode_tokens": decode_tokens,
        "compute_dtype": name_of(base.dtype),
        "device": str(base.device),
        "threads": torch.get_num_threads(),
        "versions": {name: version(name) for name in ("neuronmm-ops", "torch", "transformers")},
    }
    first = {
        "dir": str(dense),
        **dict.fromkeys(("ratio", "effective_ratio", "model_ratio"), 0.0),
        "bytes": _bytes(local_directory(dense)),
        "ppl_token": base_ppl,
        "excess_log_ppl": dict.fromkeys(base_ppl, 0.0),
        "tokens_per_s": base_speed,
        "speedup": dict.fromkeys((*_PHASES, "end_to_end"), 1.0),
        "gamma": None,
        "config": None,
        "recovered": False,
        "dtype": base_dtype,
    }
    return [{**row, **context} for row in (first, *(_row(e, base_ppl, base_speed) for e in found))]


def gamma(excess_log_ppl: float, speedup: float) -> float | None:
    """Return the loss of quality for each unit of speed-up; lower is better.

    NeuronMM (arXiv:2510.25977) defines its gamma in words alone, as the trade-off between inference
    speed and accuracy degradation, lower being better; its published values fit drop of the mean
    accuracy / (speed-up - 1). This is that reconstruction with perplexity in the place of accuracy,
    so its values compare with one another and not with the paper's.

    Args:
        excess_log_ppl: of the compressed model over the dense one, nats a token, mean over texts.
        speedup: end to end.

    Returns:
        `excess_log_ppl / (speedup - 1)`; None where nothing became faster.
    """
    return excess_log_ppl / (speedup - 1) if speedup > 1 else None


@dataclass(frozen=True)
class _Measured:
    path: Path
    report: CompressionReport
    dtype: str
    ppl: Mapping[str, float]
    speed: PairedSpeed


def _row(
    each: _Measured, base_ppl: Mapping[str, float], base_speed: Mapping[Phase, float]
) -> dict[str, Any]:
    report, speed = each.report, each.speed
    excess = {name: math.log(ppl) - math.log(base_ppl[name]) for name, ppl in each.ppl.items()}
    speedup = {phase: speed.speedup(phase) for phase in speed.times}
    return {
        "dir": str(each.path),
        "ratio": report.ratio,
        "effective_ratio": report.effective_ratio,
        "model_ratio": report.model_ratio,
        "bytes": _bytes(each.path),
        "ppl_token": each.ppl,
        "excess_log_ppl": excess,
        "tokens_per_s": {phase: base_speed[phase] * speedup[phase] for phase in _PHASES},
        "speedup": speedup,
        "gamma": gamma(statistics.mean(excess.values()), speedup["end_to_end"]),
        "config": None if report.config is None else report.config.to_dict(),
        "recovered": bool(report.provenance.get("recovery")),
        "dtype": each.dtype,
    }


def _perplexities(
    model: Any,
    source: str | Path,
    ids: Mapping[str, Tensor],
    seqlen: int,
    progress: Progress | None,
) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, tokens in ids.items():
        try:
            result = token_perplexity(
                model, tokens, seqlen, _named(progress, f"{Path(source).name} on {Path(name).name}")
            )
        except NonFiniteError as error:
            raise NonFiniteError(f"{source} on {name}: {error}") from None
        found[name] = result.ppl_token
    return found


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
    found = {path: _origin(path) for path in paths}
    for path, origin in found.items():
        if not origin:
            raise ValueError(f"{path} does not record its dense model; give --dense DIR")
    (first, dense), *others = found.items()
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


def _named(progress: Progress | None, name: str) -> Progress | None:
    if progress is None:
        return None
    return lambda stage, done, total: progress(f"{stage} {name}", done, total)


def _bytes(directory: Path) -> int:
    return sum(file.stat().st_size for file in weight_files(directory))
