"""`bench model`: a whole model's time on Trainium, modelled."""

import argparse
from dataclasses import fields
from typing import Any

from neuroncore.cli.console import show_table, stdout
from neuronmm_ops.cli.bench_ranks import PHASES, VARIANTS, show_layouts, show_ranks
from neuronmm_ops.cli.bench_served import show_served
from neuronmm_ops.cli.parser import (
    OWN_RANKS,
    add_command,
    add_numbers,
    add_shape,
    add_storages,
    chosen,
    numbers_of,
)
from neuronmm_ops.estimate.ends import spread
from neuronmm_ops.estimate.served import TOKEN_US
from neuronmm_ops.progress import progress_bars

_DESCRIPTION = (
    "prefill and decode of a whole model, by component, dense and low-rank; modelled, as served"
)
_SPEEDUPS = {
    "ours": "low rank over dense",
    "published": "publ. low rank over publ. dense",
    "ours_over_published": "low rank over publ. dense",
    "storage": "dense, stored: storage alone",
    "rank": "low rank over it: rank alone",
    "over_one_byte": "low rank over dense, stored",
    "width": "narrower, stored: width alone",
}


def add(benchmarks: Any) -> None:
    """Add the benchmark to the parser."""
    options = ("--target", "--lnc", "--ratio")
    example = "--model Llama-3.1-8B --target trn2 --tp 8,32"
    command = add_command(
        benchmarks, "model", _model, show_model, _DESCRIPTION, *options, example=example
    )
    add_shape(command, OWN_RANKS, required=True)
    command.add_argument(
        "--tp",
        default="1",
        metavar="N[,N]",
        help="tensor-parallel ranks; several numbers as 8,32 (default 1)",
    )
    add_numbers(
        command,
        ("--prompt-tokens", "prompt", 2048, "tokens of a prompt"),
        ("--new-tokens", "new", 256, "tokens that follow it"),
        ("--batch-size", "batch", 1, "sequences"),
    )
    add_storages(command)
    command.add_argument(
        "--compute",
        help="fp8: prefill may round activations where weights are in fp8 (default x: it does not)",
    )
    command.add_argument(
        "--draft",
        metavar="DRAFT",
        help="what proposes tokens to the dense model: a directory or a name as --model takes it, "
        "or how many layers of the low-rank variant",
    )


def _model(options: argparse.Namespace) -> dict[str, Any] | list[dict[str, Any]]:
    """One document; a list of them with several values of `--tp`."""
    from neuronmm_ops.estimate import model
    from neuronmm_ops.estimate.subject import Options

    ranks = numbers_of("--tp", options.tp)
    asked = chosen(options, *[field.name for field in fields(Options)])
    asked |= {"tp": ranks[0], "targets": options.targets and tuple(options.targets)}
    with progress_bars() as progress:
        documents = model.run_each(options.model, Options(**asked), ranks, progress)
    return documents if len(documents) > 1 else documents[0]


def show_model(shown: dict[str, Any] | list[dict[str, Any]]) -> None:
    """Print a table a phase, the variants side by side, and the speed-ups as ranges.

    Of several documents, which differ in tp: what each tp takes, and what its ranks exchange.
    """
    documents = shown if isinstance(shown, list) else [shown]
    document, tp = documents[0], ", ".join([str(each["tp"]) for each in documents])
    stdout.print(
        f"{document['model']} on {document['target']}, lnc {document['lnc']}, tp {tp}: "
        f"{document['batch']} x {document['prompt']} tokens, then {document['new']} new ones. "
        "All times are modelled, in ms; decode is a mean token."
    )
    stdout.print(_low_rank(document))
    if len(documents) > 1:
        show_ranks(documents)
    else:
        _show_one(document)
    show_served(documents)
    for each in documents:
        if each.get("draft"):  # recorded documents may be older
            _show_draft(each)
    for each in documents:
        if each["tp"] > 1:
            show_layouts(each)
    stdout.print("Left out: " + "; ".join(document["left_out"]) + ".")


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
        f"{memory['activation_bytes'] / 1e9:.3g} GB."
    )
    cells = [[_SPEEDUPS[name], *_ratios(speedup)] for name, speedup in document["speedups"].items()]
    title = "Speed-ups, modelled: the middle, and the range of all that is not known"
    show_table(["", "prefill", "decode", "as served", "end to end"], cells, left=[""], title=title)


def _show_draft(document: dict[str, Any]) -> None:
    """What a draft wins the dense model, by its acceptance."""
    draft = document["draft"]
    cells = [
        [
            row["acceptance"],
            row["tokens_ahead"],
            f"{row['tokens_per_s']:.4g}",
            _ratio(row["speedup"]),
            f"{row['as_served']['low']:.2f}-{row['as_served']['high']:.2f}x",
        ]
        for row in draft["rows"]
    ]
    title = (
        f"Dense with a draft, tp {document['tp']}: {draft['layers']} layers, "
        f"{draft['draft_ms']:.3g} ms a token; modelled, in one launch where it may"
    )
    columns = ["acceptance", "tokens ahead", "tokens/s", "over dense alone", "as served"]
    show_table(columns, cells, title=title)
    stdout.print(
        f"As served: each pass costs {TOKEN_US.middle:g} us more; at the high end only each round "
        "does, whose passes are one graph (fused speculation)."
    )


def _ratio(ratio: dict[str, float]) -> str:
    return f"{ratio['middle']:.2f}x\n{ratio['low']:.2f}-{ratio['high']:.2f}"


def _ratios(speedup: dict[str, Any]) -> list[str]:
    """A speed-up by phase, over its range."""
    decode = speedup["decode"]
    each = (speedup["prefill"], decode, decode["as_served"], speedup["end_to_end"])
    return [_ratio(ratio) for ratio in each]


def _low_rank(document: dict[str, Any]) -> str:
    """What the low-rank variant is: of the options, or the checkpoint as it exists."""
    dense = f"lm_head {document['storage_lm_head'] or 'bf16'}"
    storage, storage_dense = (document[n] or "bf16" for n in ("storage", "storage_dense"))
    stored = document["checkpoint"]
    # documents that were kept from before the option have no `compute`
    is_rounded = document.get("compute") == "fp8"
    rounded = " Prefill rounds activations to fp8." if is_rounded else ""
    if stored is None:
        return (
            f"Low rank: ratio {document['ratio']:g} of {document['targets']}, {storage}; other "
            f"Linears {storage_dense}, {dense}.{rounded}"
        )
    least, greatest = stored["least_rank"], stored["greatest_rank"]
    ranks = f" of rank {least} to {greatest}" if stored["low_rank"] else ""
    share = stored["matrix_bytes"] / stored["dense_matrix_bytes"]
    size = "" if stored["bytes"] is None else f"; {stored['bytes'] / 1e6:.4g} MB of tensors on disk"
    return (
        f"Low rank: the checkpoint's own {stored['low_rank']} pairs{ranks}, {storage}, and "
        f"{stored['dense']} of its matrices dense, {storage_dense}; together {share:.3f} of their "
        f"dense bytes (ratio {document['ratio']:g} of {document['targets']}); {dense}{size}. "
        f"Dense, stored: all these matrices dense in {stored['rival_storage']}.{rounded}"
    )


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
    names = [VARIANTS[each["name"]].replace(" ", "\n", 1) for each in variants]
    show_table([title, *names], cells, left=[title])


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
