"""What a reader of the table must know: one line for each thing that a column depends on."""

from collections.abc import Iterator, Mapping
from typing import Any

from neuronmm_ops.estimate.served import FURTHER_US, TOKEN_US

GAMMA = (
    "gamma: drop of the mean accuracy / (speed-up - 1), in %, lower is better; undefined where the "
    "speed-up is at most 1. This is our reading: the paper defines gamma in words alone, and no "
    "source confirms the formula."
)


def notes(document: Mapping[str, Any]) -> list[str]:
    """Return the lines for a document, see `table.document_of`."""
    settings, rows = document["settings"], document["rows"]
    lines = [*_compression(settings), *_accuracy(settings["evaluate"])]
    if settings["modelled"]:
        lines += _modelled(settings["modelled"], rows)
    if settings["measured"]:
        at = settings["measured"]
        lines.append(
            f"Measured: on {settings['model']['device']}, {at['prompt']} prompt and {at['new']} "
            f"new tokens, batch 1, {at['rounds']} rounds in turn with the dense model."
        )
    if settings["evaluate"]["tasks"] and (settings["modelled"] or settings["measured"]):
        lines.append(GAMMA)
    return lines + [f"Left out: {line}." for line in document["left_out"]]


def _compression(settings: Mapping[str, Any]) -> Iterator[str]:
    yield (
        "ratio: share of the targeted parameters that was to be removed; effective: what ranks in "
        "whole blocks removed; bytes: of the targeted matrices, over the dense model's."
    )
    for name, config in settings["methods"].items():
        targets = ", ".join(config["targets"])
        yield (
            f"{name}: method {config['method']}, allocation {config['allocation']}, ranks in "
            f"blocks of {config['block']}, targets {targets}."
        )
    compress = settings["compress"]
    if compress["calibration"] is not None:
        length = compress["seqlen"] or "as many tokens as the model takes, at most 2048"
        yield (
            f"Calibrated on {compress['calibration']}: {compress['samples']} blocks of {length}, "
            f"order {compress['order']}."
        )
    if settings["recovery"]:
        how = settings["recovery"]
        length = f"{how['steps']} steps" if how["steps"] else f"{how['minutes']:g} minutes"
        yield f"recovered: factors trained by {how['method']} on {how['data']}, {length}."


def _accuracy(evaluate: Mapping[str, Any]) -> Iterator[str]:
    if evaluate["texts"]:
        yield (
            "PPL: token perplexity, lower is better; of data sets by the protocol "
            f"{evaluate['protocol']}, of files over blocks that do not overlap."
        )
    if evaluate["tasks"]:
        shots, limit = evaluate["num_fewshot"], evaluate["limit"]
        few = "as many examples as the task says" if shots is None else f"{shots} examples"
        first = "" if limit is None else f", the first {limit} questions"
        yield f"%: accuracy (acc) by lm-eval, {few}{first}."


def _modelled(at: Mapping[str, Any], rows: list[dict[str, Any]]) -> Iterator[str]:
    yield (
        f"Modelled: {at['prompt']} prompt and {at['new']} new tokens, batch {at['batch']}, on "
        f"{at['target']} with lnc {at['lnc']} and tp {at['tp']}, from kernels traced on the "
        "simulated core, with the paper's uniform ranks for the ratio, whatever the method's. "
        "Speed-up: over our own best dense kernels, its range over all that is not known; "
        "published setting: NeuronMM's kernels over the tutorial matmul that they were compared "
        "with. As served: tokens/s, and the speed-up of decode, where a token costs "
        f"{TOKEN_US.middle:g} us more ({TOKEN_US.low:g} to {TOKEN_US.high:g}), and each launch "
        f"or collective of it {FURTHER_US.middle:g} ({FURTHER_US.low:g} to {FURTHER_US.high:g}), "
        "which published times per token have beyond our models."
    )
    named = {part for row in rows for part in (row["modelled"] or {}).get("left_out", ())}
    yield from (f"Modelled times leave out {part}." for part in sorted(named))
