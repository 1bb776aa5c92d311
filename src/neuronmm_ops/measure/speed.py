"""Tokens per second of a dense and a compressed model, prefill and decode, timed in turn."""

import inspect
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from neuronmm_ops.compress.calibrate import Progress
from neuronmm_ops.measure.timing import PairedTimes, in_turn
from neuronmm_ops.nn.decode_cache import cache_name, cache_of

TimedPhase = Literal["prefill", "decode", "end_to_end"]
DECODE_PROMPT = 64


@dataclass(frozen=True)
class PairedSpeed:
    """The speed of models `dense` and `compressed`, batch 1.

    Attributes:
        times: of each phase, all rounds; `end_to_end` is prefill and decode of the same round.
        tokens: of one run of each phase.
    """

    times: Mapping[TimedPhase, PairedTimes]
    tokens: Mapping[TimedPhase, int]

    def tokens_per_s(self, model: Literal["dense", "compressed"], phase: TimedPhase) -> float:
        """Return the median speed of a model."""
        return 1e3 * self.tokens[phase] / self.times[phase].median_ms(model)

    def speedup(self, phase: TimedPhase) -> float:
        """Return the median over rounds of the dense model's time over the compressed one's.

        It is steadier than the medians' ratio.
        """
        return self.times[phase].speedup("compressed", "dense")


@torch.inference_mode()
def paired_speed(
    dense: Any,
    compressed: Any,
    tokens: Tensor,
    *,
    decode_tokens: int,
    rounds: int,
    limit_s: float = 60.0,
    progress: Progress | None = None,
) -> PairedSpeed:
    """Time prefill of all of `tokens` and greedy decode after the first few of them.

    Args:
        dense: a Transformers causal LM.
        compressed: another, on the same device.
        tokens: `[T]`; at most `DECODE_PROMPT` of them come before the decoded ones, fewer where
            T leaves no room for these.
        decode_tokens: decoded in a run.
        rounds: in each of which both models run both phases.
        limit_s: as `in_turn` takes it.
        progress: called with ("speed", rounds done, rounds in all).

    Raises:
        ValueError: a model has no cache of keys and values to decode with.
    """
    tokens = tokens.to(dense.device)[None]
    prompt = tokens[:, : max(1, min(DECODE_PROMPT, tokens.shape[1] - decode_tokens))]
    models = {"dense": dense, "compressed": compressed}
    for model in models.values():  # warm-up: weight packing and allocator growth are paid once
        _prefill_ms(model, tokens)
        _decode_ms(model, prompt, min(4, decode_tokens))
    prefill: dict[str, list[float]] = {name: [] for name in models}
    decode: dict[str, list[float]] = {name: [] for name in models}
    # The order alternates, so that neither model always runs on caches that the other filled.
    for index, order in in_turn(list(models), rounds, limit_s):
        for name in order:
            prefill[name].append(_prefill_ms(models[name], tokens))
        for name in order:
            decode[name].append(_decode_ms(models[name], prompt, decode_tokens))
        if progress:
            progress("speed", index + 1, rounds)
    both = {n: [a + b for a, b in zip(prefill[n], decode[n], strict=True)] for n in models}
    times: dict[TimedPhase, dict[str, list[float]]]
    times = {"prefill": prefill, "decode": decode, "end_to_end": both}
    counts: dict[TimedPhase, int] = {"prefill": tokens.shape[1], "decode": decode_tokens}
    counts["end_to_end"] = tokens.shape[1] + decode_tokens
    return PairedSpeed(
        {
            p: PairedTimes({n: tuple(t) for n, t in times_of_phase.items()})
            for p, times_of_phase in times.items()
        },
        counts,
    )


def _prefill_ms(model: Any, tokens: Tensor) -> float:
    start = _now(tokens)
    _run(model, tokens, None)
    return 1e3 * (_now(tokens) - start)


def _decode_ms(model: Any, prompt: Tensor, new_tokens: int) -> float:
    output = _run(model, prompt, None)
    start = _now(prompt)
    for _ in range(new_tokens):
        cache = cache_of(output)
        if cache is None:
            raise ValueError(f"{type(model).__name__} gives no cache: its decode cannot be timed")
        output = _run(model, output.logits[:, -1:].argmax(-1), cache)
    return 1e3 * (_now(prompt) - start)


def _run(model: Any, ids: Tensor, cache: Any) -> Any:
    # Only the last token's logits, as when generating: the head is not what is compressed.
    takes = inspect.signature(model.forward).parameters
    options = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}
    return model(input_ids=ids, use_cache=True, **{cache_name(model): cache}, **options)


def _now(tensor: Tensor) -> float:
    """Return the time in seconds once the tensor's device has done all work that it was given."""
    if tensor.device.type != "cpu":
        torch.accelerator.synchronize(tensor.device)
    return time.perf_counter()
