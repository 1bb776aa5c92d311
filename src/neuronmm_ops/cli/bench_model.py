"""`bench model`: a whole model's time on Trainium, modelled."""

import argparse
from dataclasses import fields
from typing import Any

from neuroncore.cli.console import show_table, stdout
from neuronmm_ops.cli.bench_ranks import PHASES, VARIANTS, as_range, show_layouts, show_ranks
from neuronmm_ops.cli.bench_served import served_range, show_served
from neuronmm_ops.cli.parser import add_command, add_shape, add_storages, numbers_of
from neuronmm_ops.estimate.ends import spread
from neuronmm_ops.progress import progress_bars

_DESCRIPTION = (
    "prefill and decode of a whole model, by component, dense and low-rank; modelled, as served"
)
_COMPARED = (*PHASES, "end_to_end")
_SPEEDUPS = {
    "ours": "low rank over dense",
    "published": "published low rank over published dense",
    "ours_over_published": "low rank over published dense",
    "storage": "of it, one byte alone",
    "rank": "of it, low rank alone",
}


def add(benchmarks: Any) -> None:
    """Add the benchmark to the parser."""
    options = ("--target", "--lnc", "--ratio")
    example = "--model Llama-3.1-8B --target trn2 --tp 8,32"
    command = add_command(
        benchmarks, "model", _model, show_model, _DESCRIPTION, *options, example=example
    )
    add_shape(command, required=True)
    command.add_argument(
        "--tp",
        default="1",
        metavar="N[,N]",
        help="tensor-parallel ranks; several numbers as 8,32 (default 1)",
    )
    for name, dest, default, described in (
        ("--prompt-tokens", "prompt", 2048, "tokens of a prompt"),
        ("--new-tokens", "new", 256, "tokens that follow it"),
        ("--batch-size", "batch", 1, "sequences"),
    ):
        described += f" (default {default})"
        command.add_argument(
            name, dest=dest, type=int, default=default, metavar="N", help=described
        )
    add_storages(command)


def _model(options: argparse.Namespace) -> dict[str, Any] | list[dict[str, Any]]:
    """One document; a list of them with several values of `--tp`."""
    from neuronmm_ops.estimate import model

    ranks = numbers_of("--tp", options.tp)
    asked = {field.name: getattr(options, field.name) for field in fields(model.Options)}
    asked |= {"tp": ranks[0], "targets": tuple(options.targets)}
    with progress_bars() as progress:
        documents = model.run_each(options.model, model.Options(**asked), ranks, progress)
    return documents if len(documents) > 1 else documents[0]


def show_model(found: dict[str, Any] | list[dict[str, Any]]) -> None:
    """Print a table a phase, the variants side by side, and the speed-ups as ranges.

    Of several documents, which differ in tp: what each tp takes, and what its ranks exchange.
    """
    documents = found if isinstance(found, list) else [found]
    document, tp = documents[0], ", ".join([str(each["tp"]) for each in documents])
    stdout.print(
        f"{document['model']} on {document['target']}, lnc {document['lnc']}, tp {tp}: "
        f"{document['batch']} x {document['prompt']} tokens, then {document['new']} new ones. "
        "All times are modelled, in ms; decode is a mean token.",
        soft_wrap=True,
    )
    stdout.print(
        f"Low rank: ratio {document['ratio']:g} of {document['targets']}, "
        f"{document['storage'] or 'bf16'}; other Linears {document['storage_dense'] or 'bf16'}, "
        f"lm_head {document['storage_lm_head'] or 'bf16'}.",
        soft_wrap=True,
    )
    if len(documents) > 1:
        show_ranks(documents)
    else:
        _show_one(document)
    show_served(documents)
    for each in documents:
        if each["tp"] > 1:
            show_layouts(each)
    stdout.print("Left out: " + "; ".join(document["left_out"]) + ".", soft_wrap=True)


def _show_one(document: dict[str, Any]) -> None:
    variants = document["variants"]
    for phase, title in PHASES.items():
        _show_phase(title, phase, variants)
    columns = ["", "prefill", "decode", "end to end, s", "tokens/s", "weights, GB"]
    show_table(columns, [_summary(variant) for variant in variants], left=[""])
    memory = variants[0]["memory"]
    stdout.print(
        f"Bytes are of one rank, which has {memory['capacity_bytes'] / 2**30:.0f} GiB; besides "
        f"weights a KV cache of {memory['kv_cache_bytes'] / 1e9:.3g} GB and activations of "
        f"{memory['activation_bytes'] / 1e9:.3g} GB.",
        soft_wrap=True,
    )
    stdout.print(
        "Modelled speed-ups, between both DMA models, with the range of all that is not known:",
        soft_wrap=True,
    )
    decodes = {variant["name"]: variant["phases"]["decode"] for variant in variants}
    for name, found in document["speedups"].items():
        phases = [f"{phase.replace('_', ' ')} {as_range(found[phase])}" for phase in _COMPARED]
        phases[1] += f" (as served {served_range(decodes[found['of']], decodes[found['over']])})"
        stdout.print(f"  {_SPEEDUPS[name]}: {', '.join(phases)}", soft_wrap=True)


def _show_phase(title: str, phase: str, variants: list[dict[str, Any]]) -> None:
    phases = [variant["phases"][phase] for variant in variants]
    cells: list[list[object] | None] = []
    for rows in zip(*[each["components"] for each in phases], strict=True):
        if any(row["launches"] for row in rows):
            cells.append([rows[0]["component"], *[f"{row['time_ms']:.4g}" for row in rows]])
    cells.append(None)
    cells.append(["all", *[f"{each['time_ms']:.4g}" for each in phases]])
    cells.append(["GB moved", *[f"{each['hbm_bytes'] / 1e9:.3g}" for each in phases]])
    cells.append(["launches", *[each["launches"] for each in phases]])
    show_table([title, *[VARIANTS[each["name"]] for each in variants]], cells, left=[title])


def _summary(variant: dict[str, Any]) -> list[str]:
    times = [variant["phases"][phase] for phase in PHASES]
    ends = [ms / 1e3 for ms in spread([*variant["end_to_end_times_ms"].values()])]
    return [
        VARIANTS[variant["name"]],
        *[_span(each["time_low_ms"], each["time_high_ms"]) for each in times],
        _span(*ends),
        f"{variant['tokens_per_s']:.4g}",
        f"{variant['memory']['weight_bytes'] / 1e9:.3g}",
    ]


def _span(low: float, high: float) -> str:
    """A time, or its range where both ends differ in print."""
    first, last = f"{low:.3g}", f"{high:.3g}"
    return first if first == last else f"{first}-{last}"
