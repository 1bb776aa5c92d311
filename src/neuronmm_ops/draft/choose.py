"""`draft`: compress a model in several ways, and keep what makes the pair with it fastest."""

import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, cast

from torch import Tensor
from transformers import PreTrainedModel

from neuronmm_ops.checkpoint import read_config
from neuronmm_ops.draft.acceptance import Contexts, acceptance, continued
from neuronmm_ops.draft.candidates import STORAGES, DraftConfig, Maker
from neuronmm_ops.draft.speed import measured, modelled
from neuronmm_ops.estimate.speculation import best_ahead
from neuronmm_ops.hf.computing import load_packed
from neuronmm_ops.hf.drafts import MOST_AHEAD, load_draft
from neuronmm_ops.hf.loading import local_directory
from neuronmm_ops.kernels.attention.units import MOST_NEW
from neuronmm_ops.measure.timing import in_turn
from neuronmm_ops.output import check_target
from neuronmm_ops.progress import Update

PROMPTS = 16
"""Held-out blocks whose first half the model continues."""
PAIR_PROMPTS, PAIR_ROUNDS, PAIR_LIMIT_S = 4, 7, 60.0


def draft(
    model: str | Path,
    text: Path,
    output: str | Path,
    *,
    tokens_ahead: int | None = None,
    target: str | None = None,
    steps: int | None = None,
    force: bool = False,
    progress: Update | None = None,
) -> dict[str, Any]:
    """Write the compression of a model that drafts for it fastest, if one pays.

    Candidates have all Linears compressed at `RATIOS`, `PRUNE_SHARE` of that by narrower MLPs where
    they may be, and all, half or a quarter of the layers; the fastest of them is then rounded to
    `STORAGES`. Each is weighed by the expected tokens per second of the pair, by the draft's greedy
    acceptance and the time of the passes.

    Args:
        model: a dense causal LM, a directory or a hub id.
        text: a file to calibrate on; a tenth of it is held out to measure acceptance on.
        output: the directory to write; it must not exist, or `force`.
        tokens_ahead: 1 to 8, to 7 with a target, whose passes take 8 tokens; None: the fastest.
        target: trn1, trn2 or trn3, to model passes on one of its cores; None measures them here.
        steps: to distil each candidate towards the model, on the text and what the model writes.
        force: replace an existing compressed checkpoint.
        progress: called with (stage, done, total); the stage `candidates` is over all others.

    Returns:
        `output`, None where no draft pays, neither as expected nor as measured; `candidates`, each
        with `layers`, `ratio`, `storage`, `acceptance` (greedy), `acceptance_sampled`, `draft_ms`,
        `model_ms`, `tokens_ahead`, `tokens_per_s` and `speedup`, expected; `best`, one of them;
        without a target `measured`: `speedup` as the pair generates in Transformers, `{"median",
        "low", "high"}` over paired rounds.

    Raises:
        CheckpointError: the model cannot be loaded.
        FileExistsError: the target exists and may not be replaced.
        ValueError: tokens ahead are out of range, the text is short, or the model is compressed.
    """
    most = MOST_NEW - 1 if target else MOST_AHEAD
    if tokens_ahead is not None and not 1 <= tokens_ahead <= most:
        raise ValueError(f"tokens ahead must be 1 to {most}, got {tokens_ahead}")
    ahead = range(1, most + 1) if tokens_ahead is None else [tokens_ahead]
    directory, out = local_directory(model), Path(output)
    check_target(out, force, directory)
    if read_config(directory).get("quantization_config") is not None:
        raise ValueError(f"{model} is compressed or quantized already; start from dense")
    verifier = load_packed(model)
    maker = Maker.of(verifier, model, text, steps, progress)
    prompts = maker.held_out[:PROMPTS, : maker.held_out.shape[1] // 2]
    contexts = continued(verifier, prompts, prompts.shape[1])
    rows: list[dict[str, Any]] = []
    with TemporaryDirectory(dir=out.resolve().parent, prefix=f".{out.name}.") as work:
        folder, kept, floats = (Path(work) / name for name in ("candidate", "best", "floats"))

        def fastest(candidates: Sequence[DraftConfig], best: dict[str, Any]) -> dict[str, Any]:
            for candidate in candidates:
                if candidate.storage is None:
                    maker.make(candidate, folder)
                else:
                    maker.round(floats, candidate.storage, folder)
                row = asdict(candidate) | _weighed(verifier, folder, contexts, ahead, target)
                rows.append(row)
                if progress:
                    progress("candidates", len(rows), len(grid) + len(STORAGES))
                if row["speedup"] > best.get("speedup", 0.0):
                    best = row
                    shutil.rmtree(kept, ignore_errors=True)
                    folder.rename(kept)
                else:
                    shutil.rmtree(folder)
            return best

        grid = maker.grid()
        best = fastest(grid, {})
        as_fast = DraftConfig(best["layers"], best["ratio"])
        shutil.copytree(kept, floats)
        best = fastest([replace(as_fast, storage=storage) for storage in STORAGES], best)
        document: dict[str, Any] = {"output": None, "target": target, "best": best}
        document["candidates"] = rows
        speedups = [best["speedup"]]
        if target is None:
            pair = load_draft(kept, verifier, model, best["tokens_ahead"])
            document["measured"] = _generated(verifier, pair, prompts[:PAIR_PROMPTS])
            # Transformers' loop takes its time a round, of which serving engines save most.
            speedups.append(document["measured"]["speedup"]["median"])
        if max(speedups) > 1:
            record = {name: document[name] for name in ("target", "candidates")}
            maker.keep(kept, {"tokens_ahead": best["tokens_ahead"], **record}, out, force)
            document["output"] = str(out)
    return document


def _weighed(
    verifier: PreTrainedModel,
    folder: Path,
    contexts: Contexts,
    ahead: Sequence[int],
    target: str | None,
) -> dict[str, Any]:
    """Return what `draft` tells of a candidate."""
    small = load_packed(folder, verifier.dtype)
    accepted = acceptance(verifier, small, contexts)
    if target:
        costs = modelled(str(verifier.name_or_path), str(folder), ahead, target)
    else:
        costs = measured(verifier, small, ahead)
    count, speed = best_ahead(accepted.greedy, costs, ahead)
    return {
        "acceptance": accepted.greedy,
        "acceptance_sampled": accepted.sampled,
        "draft_ms": costs.draft,
        "model_ms": dict(costs.model),
        "tokens_ahead": count,
        "tokens_per_s": speed,
        "speedup": speed * costs.model[1] / 1e3,
    }


def _generated(model: PreTrainedModel, draft: PreTrainedModel, prompts: Tensor) -> dict[str, Any]:
    """Let a model continue prompts `[B, P]` with a draft and without, in paired rounds."""
    seconds: dict[str, list[float]] = {"draft": [], "alone": []}
    new = prompts.shape[1]
    for _, order in in_turn(["draft", "alone"], PAIR_ROUNDS, PAIR_LIMIT_S, warmup=1):
        for name in order:
            start = time.perf_counter()
            for row in prompts:
                cast(Any, model).generate(
                    row[None],
                    assistant_model=draft if name == "draft" else None,
                    do_sample=False,
                    max_new_tokens=new,
                    pad_token_id=0,
                )
            seconds[name].append(time.perf_counter() - start)
    ratios = [alone / both for both, alone in zip(*(seconds[n][1:] for n in seconds), strict=True)]
    speedup = {"median": median(ratios), "low": min(ratios), "high": max(ratios)}
    return {"rounds": len(ratios), "speedup": speedup}
