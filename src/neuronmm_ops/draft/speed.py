"""Passes of a model and its draft, measured here or modelled."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from neuronmm_ops.estimate.decoder import Decoder
from neuronmm_ops.estimate.ends import ENDS
from neuronmm_ops.estimate.linears import linears
from neuronmm_ops.estimate.recorded import recorded
from neuronmm_ops.estimate.speculation import Costs, pass_times
from neuronmm_ops.measure.timing import time_paired
from neuronmm_ops.models import resolve_shape
from neuronmm_ops.nn.decode_cache import cache_name, cache_of

CACHED = 64
"""Tokens before those of a pass that is measured."""
MODELLED_CACHED = 2048
ROUNDS, LIMIT_S = 30, 20.0


def measured(model: PreTrainedModel, draft: PreTrainedModel, ahead: Sequence[int]) -> Costs:
    """Time passes after `CACHED` tokens on the models' device, in paired rounds."""
    widths = [1, *[k + 1 for k in ahead]]
    passes = {f"model {M}": _pass(model, M) for M in widths} | {"draft": _pass(draft, 1)}
    rounds = time_paired(passes, ROUNDS, limit_s=LIMIT_S).rounds_ms
    # The least: what else runs on the machine only adds.
    return Costs(min(rounds["draft"]), {M: min(rounds[f"model {M}"]) for M in widths})


def _pass(model: PreTrainedModel, tokens: int) -> Callable[[int], Tensor]:
    """What runs a pass of so many tokens, and takes them out of the cache again."""
    ids = torch.zeros(1, CACHED, dtype=torch.long, device=model.device)
    with torch.inference_mode():
        cache = cache_of(model(input_ids=ids, use_cache=True))

    def run(_: int) -> Tensor:
        output = model(input_ids=ids[:, :tokens], **{cache_name(model): cache}, use_cache=True)
        cache.crop(-tokens)
        return output.logits[0, -1, 0].cpu()

    return run


def modelled(model: str, draft: str, ahead: Sequence[int], target: str) -> Costs:
    """Model passes after `MODELLED_CACHED` tokens on one NeuronCore.

    Args:
        model: a directory or what else `models.resolve_shape` takes; dense.
        draft: the directory of a compressed checkpoint.
        ahead: tokens ahead, at most 7: a pass takes 8 tokens.
        target: trn1, trn2 or trn3.

    Raises:
        ValueError: sizes that no kernel is planned for.
    """
    shape, draft_shape = resolve_shape(model), resolve_shape(draft)
    on: dict[str, Any] = {"target": target, "lnc": 1, "tp": 1, "batch": 1}
    record = recorded(draft, draft_shape)
    assert record is not None  # `draft` was written by this package
    dense = Decoder.uniform(shape, linears(shape), **on)
    low_rank = Decoder(whole=draft_shape, **record.own._asdict(), **on)

    def pass_ms(decoder: Decoder, tokens: int) -> float:
        return pass_times(decoder, tokens, MODELLED_CACHED)[ENDS[0]]

    return Costs(pass_ms(low_rank, 1), {M: pass_ms(dense, M) for M in (1, *[k + 1 for k in ahead])})
