"""Tokens per second of a model that verifies what a draft proposes; modelled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from neuronmm_ops.estimate import one_launch
from neuronmm_ops.estimate.ends import ENDS, compared
from neuronmm_ops.estimate.passes import pass_of
from neuronmm_ops.estimate.served import TOKEN_US

if TYPE_CHECKING:
    from neuronmm_ops.estimate.decoder import Decoder

AHEAD = (1, 3, 5, 7)
"""Tokens that a draft proposes: a pass takes up to 8."""
ACCEPTANCES = (0.5, 0.6, 0.7, 0.8, 0.9)


class Costs(NamedTuple):
    """Milliseconds of one pass.

    Attributes:
        draft: of the draft, one token.
        model: of the model, by its number of tokens.
    """

    draft: float
    model: Mapping[int, float]

    def round_ms(self, ahead: int) -> float:
        """Of so many drafted tokens, and the pass that verifies them."""
        return ahead * self.draft + self.model[ahead + 1]


def expected_tokens(acceptance: float, ahead: int) -> float:
    """Return the mean tokens of a round of `ahead` drafted ones and a pass that verifies them.

    `(1 - a^(k+1)) / (1 - a)`, Leviathan et al. (arXiv 2211.17192), Eq. 1: each token is accepted
    with probability a, and the pass itself yields one.
    """
    return sum([acceptance**n for n in range(ahead + 1)])


def best_ahead(acceptance: float, costs: Costs, ahead: Sequence[int]) -> tuple[int, float]:
    """Return how many tokens to draft for the most tokens per second, and these."""

    def speed(k: int) -> float:
        return 1e3 * expected_tokens(acceptance, k) / costs.round_ms(k)

    best = max(ahead, key=speed)
    return best, speed(best)


def speculated(model: Decoder, draft: Decoder, cached: int) -> dict[str, Any]:
    """What a draft wins over the model alone, by its acceptance.

    Args:
        model: what verifies.
        draft: what proposes, on the same ranks.
        cached: tokens in both caches before the new ones.

    Returns:
        `layers` of the draft; `draft_ms`, `model_ms` by the tokens of a pass; `rows`: for each of
        `ACCEPTANCES` the quickest `tokens_ahead`, `tokens_per_s` of all sequences, and `speedup`
        with its middle and range. `as_served` has the speed-up, with tokens ahead of its own, where
        `TOKEN_US` is the cost of every pass (`low`), and where it is that of a round, whose passes
        are one graph (`high`), at the first end.

    Raises:
        ValueError: sizes that no kernel is planned for.
    """
    alone = pass_times(model, 1, cached)
    drafts = pass_times(draft, 1, cached)
    passes = {1: alone} | {k + 1: pass_times(model, k + 1, cached) for k in AHEAD}
    ends = {end: Costs(drafts[end], {M: times[end] for M, times in passes.items()}) for end in ENDS}
    costs = ends[ENDS[0]]
    rows: list[dict[str, Any]] = []
    for acceptance in ACCEPTANCES:
        ahead, speed = best_ahead(acceptance, costs, AHEAD)
        tokens = expected_tokens(acceptance, ahead)
        of = {end: each.round_ms(ahead) / tokens for end, each in ends.items()}
        rows.append(
            {"acceptance": acceptance, "tokens_ahead": ahead}
            | {"tokens_per_s": speed * model.batch, "speedup": compared(of, alone)}
            | {"as_served": _as_served(acceptance, costs)}
        )
    return {
        "layers": draft.whole.layers,
        "draft_ms": costs.draft,
        "model_ms": dict(costs.model),
        "rows": rows,
    }


def _as_served(acceptance: float, costs: Costs) -> dict[str, float]:
    token_ms = TOKEN_US.middle / 1e3
    model = {tokens: ms + token_ms for tokens, ms in costs.model.items()}
    drafts = {"low": costs.draft + token_ms, "high": costs.draft}
    return {
        end: best_ahead(acceptance, Costs(draft, model), AHEAD)[1] * model[1] / 1e3
        for end, draft in drafts.items()
    }


def pass_times(decoder: Decoder, tokens: int, cached: int) -> dict[str, float]:
    """Model a pass of each sequence's new tokens, each of which gets logits.

    Layers share launches where they may.

    Args:
        decoder: the model.
        tokens: new ones, 1 to 8.
        cached: tokens before them.

    Returns:
        Milliseconds at each of `ENDS`.

    Raises:
        ValueError: sizes that no kernel is planned for.
    """
    lengths = {cached + tokens: 1.0}
    if one_launch.refusal(decoder) is None:
        times_ms = one_launch.pass_cost(decoder, lengths, tokens)[0].times_ms
        return dict(zip(ENDS, times_ms, strict=True))
    rows = replace(decoder, batch=decoder.batch * tokens)
    every, last = [one_launch.ending_cost(each)[0].times_ms for each in (rows, decoder)]
    times = pass_of(decoder, tokens, lengths)["times_ms"]
    more = zip(ENDS, every, last, strict=True)
    return {end: times[end] + whole - part for end, whole, part in more}
