"""Measured on this machine: what generating takes, a dense model next to compressed ones.

Transformers' `generate` runs with a static cache, with and without `torch.compile`. Times are of
paired rounds in one process, memory of processes of their own.
"""

import platform
import statistics
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._inductor.utils import fresh_cache
from transformers import PreTrainedModel

from neuronmm_ops.checkpoint import read_config, weight_files
from neuronmm_ops.compress.calibrate import Progress
from neuronmm_ops.errors import CheckpointError
from neuronmm_ops.eval import encode_documents
from neuronmm_ops.hf.computing import check_device, load_packed
from neuronmm_ops.hf.loading import check_vocabulary, load_tokenizer, local_directory
from neuronmm_ops.manifest import installed_versions
from neuronmm_ops.measure.generation import Alone, Timing, alone, checked, timed
from neuronmm_ops.measure.runner import in_own_process
from neuronmm_ops.measure.timing import cpu_name, in_turn
from neuronmm_ops.ops.backends.cpu import name_of

PROMPT = 512
NEW = 64
ROUNDS = 7
LIMIT_S = 60.0
"""Seconds after which no further round of two models starts, see `timing.in_turn`."""
TEXT = (
    "A river begins where rain gathers on high ground and finds a way down. It is narrow at first, "
    "quick and clear, and it carries sand and leaves along. Further on the land is flat, the water "
    "slows, and what it carried sinks. People have built towns there, because the soil is good and "
    "boats can land. "
)
"""The prompt, repeated as often as its length needs."""
_CACHES = 64
"""Compiled models that a process may hold; beyond torch's own 8 it would stop compiling."""

Key = tuple[int, bool]
"""A candidate: the number of its model in a round, and whether it is compiled."""


def run(
    directories: Sequence[str | Path],
    *,
    prompt: int = PROMPT,
    new: int = NEW,
    batch: int = 1,
    compile: bool = False,  # noqa: A002
    rounds: int = ROUNDS,
    device: str = "cpu",
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """Measure how fast models generate, the first one next to each of the others.

    Every model first generates once in a process of its own, which gives its memory and the time
    to compile it. Then the first model and one of the others are in memory at a time and generate
    in turn, greedily, every sequence to the same length whatever it says. All compute in the
    first model's compute dtype. With `compile` the tokens after the first come from a graph that
    `torch.compile` made; Transformers leaves the prefill as it is.

    Args:
        directories: Transformers directories or hub ids with one vocabulary; the first one,
            usually the dense model, is what the others are compared with.
        prompt: tokens of a prompt.
        new: tokens that follow it, at least 2.
        batch: sequences.
        compile: also measure with `torch.compile`.
        rounds: of timing; fewer where those of two models take more than `LIMIT_S`.
        device: to compute on, such as `cpu` or `cuda:1`.
        progress: called with (what, done, total).

    Returns:
        For each directory a row, with `compile` two: `dir`, `compiled`; `bytes` of the weights'
        files; medians over the rounds `prefill_tokens_per_s` (prompts' tokens over the time to
        the first token), `ttft_ms` (time to first token), `token_ms` (of each further token of a
        sequence), `tokens_per_s` (of all sequences after the first token) and `end_to_end_ms`;
        `peak_memory_bytes` (of the model's own process, the interpreter and its libraries
        included; on CUDA what torch allocated; None where it cannot be told), `compile_s`;
        `speedup` over the first directory in the same mode, of `prefill`, `decode` and
        `end_to_end` each `{"median", "low", "high"}` over paired rounds, None in its own rows;
        `rounds` timed; `failed`, why there are no times, else None; and what it was measured
        with: `prompt`, `new`, `batch`, `cache`, `compute_dtype`, `device`, `device_name`,
        `threads`, `versions`.

    Raises:
        ValueError: a number is too small, the prompt does not fit a model, a model ends its text
            at once or cannot generate with a static cache.
        CheckpointError: a model cannot be loaded, or has another vocabulary than the first.
        NonFiniteError: logits are NaN or Inf; names the model.
        ChildProcessError: the process that had a model alone was lost.
    """
    for name, value, least in (
        ("prompt", prompt, 1),
        ("new", new, 2),
        ("batch", batch, 1),
        ("rounds", rounds, 1),
    ):
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
    if not directories:
        raise ValueError("generate needs directories; give at least one")
    place = check_device(device)
    ids = _prompts(directories, prompt, batch)
    modes = (False, True)[: 1 + compile]
    with _fresh_compiler() if compile else nullcontext():
        apart = _all_alone(directories, ids, new, modes, place, progress)
        in_pairs = _in_pairs(directories, ids.to(place), new, apart, rounds, progress)
    context = {
        "prompt": prompt,
        "new": new,
        "batch": batch,
        "cache": "static",
        "compute_dtype": name_of(apart[0, False].dtype),
        "device": str(place),
        "device_name": torch.cuda.get_device_name(place) if place.type == "cuda" else cpu_name(),
        "threads": torch.get_num_threads(),
        "versions": {
            "python": platform.python_version(),
            **installed_versions("neuronmm-ops", "torch", "transformers"),
        },
    }
    return [
        _row(directories[key[0]], key[1], in_pairs.get(key), apart[key], prompt, batch) | context
        for key in product(range(len(directories)), modes)
    ]


@contextmanager
def _fresh_compiler() -> Generator[None]:
    """Begin with an empty cache: the first compilation takes what it would take anyone."""
    limits = {"recompile_limit": _CACHES, "fail_on_recompile_limit_hit": True}
    with fresh_cache(), torch._dynamo.config.patch(limits):
        yield


@dataclass(frozen=True)
class _Candidate:
    """The timings of a candidate, and its speed-up by phase; None for the first directory's."""

    timings: Sequence[Timing]
    speedup: Mapping[str, Mapping[str, float]] | None


def _all_alone(
    directories: Sequence[str | Path],
    ids: Tensor,
    new: int,
    modes: Sequence[bool],
    device: torch.device,
    progress: Progress | None,
) -> dict[Key, Alone]:
    """Give every candidate a process of its own."""
    alone_by_key: dict[Key, Alone] = {}
    dtype = None
    keys = list(product(range(len(directories)), modes))
    for done, key in enumerate(keys, start=1):
        index, is_compiled = key
        directory = directories[index]
        arguments = (directory, ids, new, is_compiled, device, dtype, torch.get_num_threads())
        alone_by_key[key] = in_own_process(f"the process of {directory}", alone, *arguments)
        dtype = alone_by_key[key].dtype
        if progress:
            progress("each alone", done, len(keys))
    return alone_by_key


def _in_pairs(
    directories: Sequence[str | Path],
    ids: Tensor,
    new: int,
    apart: Mapping[Key, Alone],
    rounds: int,
    progress: Progress | None,
) -> dict[Key, _Candidate]:
    """Time the first model next to each of the others, two in memory at a time."""
    keys = [key for key, lone in apart.items() if lone.failed is None]
    dtype = apart[0, False].dtype
    first = _ready(directories[0], ids, new, [key for key in keys if key[0] == 0], dtype)
    timings: dict[Key, list[Timing]] = {key: [] for key in keys}
    candidates: dict[Key, _Candidate] = {}
    for index in range(1, len(directories)) if len(directories) > 1 else [0]:
        pair = [key for key in keys if key[0] in (0, index)]
        models = {0: first}
        if index:
            own_keys = [key for key in pair if key[0] == index]
            models[index] = _ready(directories[index], ids, new, own_keys, dtype)
        stage = f"rounds of {Path(directories[index]).name}"
        measured = _interleaved(models, pair, ids, new, rounds, stage, progress)
        for key, times in measured.items():
            timings[key] += times
            base = measured.get((0, key[1]))
            if key[0]:
                candidates[key] = _Candidate(times, _speedup(base, times) if base else None)
    return {key: candidates.get(key, _Candidate(timings[key], None)) for key in keys}


def _ready(
    directory: str | Path, ids: Tensor, new: int, keys: Sequence[Key], dtype: torch.dtype
) -> PreTrainedModel:
    """Load a model and generate once in each of its modes, so that what is paid once is paid."""
    model = load_packed(directory, dtype, ids.device)
    for _, is_compiled in keys:
        checked(model, str(directory), ids, new, is_compiled)
    return model


def _interleaved(
    models: Mapping[int, PreTrainedModel],
    keys: Sequence[Key],
    ids: Tensor,
    new: int,
    rounds: int,
    stage: str,
    progress: Progress | None,
) -> dict[Key, list[Timing]]:
    """Let the candidates generate `in_turn`."""
    times: dict[Key, list[Timing]] = {key: [] for key in keys}
    for index, order in in_turn(keys, rounds, LIMIT_S):
        for key in order:
            times[key].append(timed(models[key[0]], ids, new, key[1]))
        if progress:
            progress(stage, index + 1, rounds)
    return times


def _speedup(base: Sequence[Timing], candidate: Sequence[Timing]) -> dict[str, dict[str, float]]:
    """Return median and range over rounds of the base's time divided by the own, by phase."""
    fields = {"prefill": "ttft_ms", "decode": "token_ms", "end_to_end": "end_to_end_ms"}
    by_phase: dict[str, dict[str, float]] = {}
    for phase, name in fields.items():
        ratios = [getattr(b, name) / getattr(o, name) for b, o in zip(base, candidate, strict=True)]
        median = statistics.median(ratios)
        by_phase[phase] = {"median": median, "low": min(ratios), "high": max(ratios)}
    return by_phase


def _row(
    directory: str | Path,
    is_compiled: bool,
    candidate: _Candidate | None,
    apart: Alone,
    prompt: int,
    batch: int,
) -> dict[str, Any]:
    timings = candidate.timings if candidate else []

    def median(name: str) -> float | None:
        return statistics.median(getattr(timing, name) for timing in timings) if timings else None

    ttft_ms, token_ms = median("ttft_ms"), median("token_ms")
    return {
        "dir": str(directory),
        "compiled": is_compiled,
        "bytes": sum(file.stat().st_size for file in weight_files(local_directory(directory))),
        "prefill_tokens_per_s": ttft_ms and 1e3 * batch * prompt / ttft_ms,
        "ttft_ms": ttft_ms,
        "token_ms": token_ms,
        "tokens_per_s": token_ms and 1e3 * batch / token_ms,
        "end_to_end_ms": median("end_to_end_ms"),
        "peak_memory_bytes": apart.peak_memory_bytes,
        "compile_s": apart.compile_s,
        "speedup": candidate and candidate.speedup,
        "rounds": len(timings),
        "failed": apart.failed,
    }


def _prompts(directories: Sequence[str | Path], length: int, batch: int) -> Tensor:
    """Return prompts `[batch, length]`, each from another place of the text.

    Raises:
        CheckpointError: a directory cannot be read, or has another vocabulary than the first.
    """
    tokenizers: list[Any] = []
    for directory in directories:
        read_config(local_directory(directory))
        tokenizers.append(load_tokenizer(directory))
    check_vocabulary(directories, tokenizers, "times of different tokens do not compare")
    ids = encode_documents(tokenizers[0], [TEXT])
    if not len(ids):
        raise CheckpointError(f"{directories[0]}: the tokenizer makes no tokens of English text")
    return ids[(torch.arange(batch)[:, None] + torch.arange(length)) % len(ids)]
