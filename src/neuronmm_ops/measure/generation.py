"""One generation of a Transformers model with a static cache: checked, timed, or alone."""

import time
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import (
    CompileConfig,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StaticCache,
)
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

from neuronmm_ops.compress.batches import check_ids
from neuronmm_ops.errors import NonFiniteError
from neuronmm_ops.hf.computing import AUTO, load_packed
from neuronmm_ops.hf.generate import FiniteLogits, check_length
from neuronmm_ops.nn.decode_cache import cache_of

STATUS = Path("/proc/self/status")
MAX_REASON = 200


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one generation.

    Attributes:
        ttft_ms: until the first new token is on the host.
        token_ms: of each further token of a sequence, the mean.
        end_to_end_ms: of the whole generation.
    """

    ttft_ms: float
    token_ms: float
    end_to_end_ms: float


@dataclass(frozen=True)
class Alone:
    """What a model that is alone in its process takes.

    Attributes:
        peak_memory_bytes: resident memory of the process, or what torch allocated on the device;
            None where the system does not tell.
        compile_s: seconds that the first compiled generation takes longer than the next.
        failed: why `torch.compile` cannot be measured, in one line.
        dtype: it computes in.
    """

    peak_memory_bytes: int | None
    compile_s: float | None
    failed: str | None
    dtype: torch.dtype


class CompileError(RuntimeError):
    """`torch.compile` fails for a model, or leaves it as it is."""


class _Clock(BaseStreamer):
    """Takes the time at every token that `generate` hands out, first of all at the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        """Take the time: the token is on the host, so the device has done its work."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Do nothing: the last token came before."""


def timed(model: PreTrainedModel, ids: Tensor, new: int, is_compiled: bool) -> Timing:
    """Generate once and take the times.

    Args:
        model: has been through `checked` in the same way.
        ids: the prompts, `[B, T]`.
        new: tokens of a sequence, at least 2.
        is_compiled: whether `torch.compile` runs the tokens after the first.
    """
    clock = _Clock()
    if ids.device.type != "cpu":
        torch.accelerator.synchronize(ids.device)
    start = time.perf_counter()
    _generate(model, ids, new, is_compiled, streamer=clock)
    _, first, *_, last = clock.times
    return Timing(1e3 * (first - start), 1e3 * (last - first) / (new - 1), 1e3 * (last - start))


def checked(
    model: PreTrainedModel, name: str, ids: Tensor, new: int, is_compiled: bool = False
) -> None:
    """Generate once, as `timed` does afterwards, and refuse what is no measurement.

    Args:
        model: a causal LM.
        name: the model, for errors.
        ids: the prompts, `[B, T]`.
        new: tokens of a sequence.
        is_compiled: as in `timed`.

    Raises:
        ValueError: the prompt does not fit the model, it ends its text at once, or it cannot
            generate with a static cache.
        NonFiniteError: logits are NaN or Inf.
        CompileError: `torch.compile` fails, or Transformers does not compile this model.
    """
    check_ids(model, ids, f"{name}: prompt")
    length = ids.shape[1]
    check_length(model, length, new, f"{name}: ")
    finite = LogitsProcessorList([FiniteLogits()])
    options: dict[str, Any] = {"logits_processor": finite, "return_dict_in_generate": True}
    try:
        output = _generate(model, ids, new, is_compiled, **options)
    except NonFiniteError as error:
        raise NonFiniteError(f"{name}: {error}") from None
    except (MemoryError, torch.OutOfMemoryError):  # one line says so elsewhere
        raise
    except Exception as error:  # models and compilers raise anything
        if is_compiled:
            raise CompileError(_reason(error)) from error
        raise ValueError(
            f"{name}: {type(model).__name__} cannot generate with a static cache: {_reason(error)}"
        ) from error
    if not isinstance(cache_of(output), StaticCache):
        raise ValueError(f"{name}: {type(model).__name__} takes no static cache")
    if is_compiled and not hasattr(model, "_compiled_call"):
        raise CompileError(f"Transformers does not compile {type(model).__name__}")
    ends = set(_token_ids(model.generation_config and model.generation_config.eos_token_id))
    first = set(output.sequences[:, length].tolist())
    if first <= ends:
        raise ValueError(
            f"{name} generates nothing: the first token after a prompt of {length} is the end of "
            f"text, {first.pop()}; give a prompt of another length"
        )


def alone(
    directory: str | Path,
    ids: Tensor,
    new: int,
    is_compiled: bool,
    device: torch.device,
    dtype: torch.dtype | None,
    threads: int,
) -> Alone:
    """Load a model and generate, in a process that does nothing else.

    Args:
        directory: of the model.
        ids: the prompts, `[B, T]`.
        new: tokens of a sequence.
        is_compiled: as in `timed`.
        device: to compute on.
        dtype: to compute in; None for what `auto` is for this model.
        threads: of torch.

    Raises:
        ValueError, NonFiniteError: as `checked` says.
        CheckpointError: the model cannot be loaded.
    """
    torch.set_num_threads(threads)
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model = load_packed(directory, dtype or AUTO, device)
    dtype = model.dtype
    ids = ids.to(device)
    start = time.perf_counter()
    try:
        checked(model, str(directory), ids, new, is_compiled)
    except CompileError as error:
        return Alone(None, None, str(error), dtype)
    first_s = time.perf_counter() - start
    if not is_compiled:
        return Alone(_peak_memory_bytes(device), None, None, dtype)
    if not counters["stats"]["unique_graphs"]:
        return Alone(None, None, "torch.compile finds no graph to compile", dtype)
    compile_s = first_s - timed(model, ids, new, is_compiled).end_to_end_ms / 1e3
    return Alone(_peak_memory_bytes(device), compile_s, None, dtype)


def _generate(
    model: PreTrainedModel, ids: Tensor, new: int, is_compiled: bool, **options: Any
) -> Any:
    """Generate `new` tokens greedily, whatever the model's own config says of sampling and ends."""
    config = GenerationConfig(
        max_new_tokens=new,
        do_sample=False,
        pad_token_id=0,
        cache_implementation="static",
        disable_compile=not is_compiled,
    )
    if is_compiled:
        compiler: Any = CompileConfig()
        compiler._compile_all_devices = True  # a CPU, too; its only way in
        config.compile_config = compiler
    mask = torch.ones_like(ids)
    with patch.object(model, "generation_config", config):
        return model.generate(ids, attention_mask=mask, **options)  # pyright: ignore  (untyped)


def _token_ids(value: int | Iterable[int] | None) -> Iterable[int]:
    return () if value is None else (value,) if isinstance(value, int) else value


def _peak_memory_bytes(device: torch.device) -> int | None:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if not STATUS.is_file():
        return None
    # getrusage's maximum is the parent's where that was larger: it outlives exec.
    fields = dict(line.split(":", 1) for line in STATUS.read_text().splitlines() if ":" in line)
    return 1024 * int(fields["VmHWM"].split()[0])


def _reason(error: Exception) -> str:
    """The beginning of an error that may be pages long, in one line."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    text = text.partition(" Set TORCHDYNAMO_VERBOSE")[0]  # advice to debug torch follows
    return text if len(text) <= MAX_REASON else f"{text[:MAX_REASON]} ..."
