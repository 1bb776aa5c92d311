"""`published`, `predictions` and `kernels`: the simulated core, our kernels on it, and others'."""

import argparse
import os
from pathlib import Path
from typing import Any

from neuroncore.cli.console import check_output, show_fields, show_rows, show_table, stdout
from neuronmm_ops.cli.parser import add_command, add_shape, add_tokens, tokens_of
from neuronmm_ops.progress import progress_bars


def add(commands: Any) -> None:
    """Add the commands to the parser."""
    description = "published times of NKI kernels compared with the simulated core's"
    add_command(commands, "published", _published, _show_published, description)

    description = "predict what neuronmm device-check runs, before anybody measures it"
    add_command(commands, "predictions", _predictions, show_fields, description)

    description = (
        "NeuronMM's figures of block sizes, naive fusion and traffic next to modelled ones"
    )
    add_command(commands, "paper", _paper, _show_paper, description)

    description = (
        "a decoder layer of one token in one launch next to separate ones; time is modelled"
    )
    add_command(commands, "layer", _layer, _show_layer, description)

    description = "how quick neuroncore is on this machine: CPU seconds, next to NumPy; memory"
    add_command(commands, "simulator", _simulator, _show_simulator, description)

    description = "AWS's dense MLP and layer for one token next to ours; time is modelled"
    command = add_command(commands, "aws", _aws, show_rows, description)
    command.add_argument("clone", type=Path, metavar="CLONE", help="of aws-neuron/nki-library")

    description = "kernels that others timed on trn2: in which order the simulated core puts them"
    command = add_command(commands, "nkibench", _nkibench, _show_nkibench, description)
    command.add_argument("variants", type=Path, metavar="KDA", help="Jerry2423/kda-for-trainium")
    command.add_argument("nkibench", type=Path, metavar="ACCELOPT", help="zhang677/AccelOpt")

    description = "kernels that students timed on devices, next to modelled times"
    command = add_command(commands, "course", _course, _show_course, description)
    command.add_argument(
        "clones", type=Path, metavar="CLONES", help="the clones, by owner; nki-moe-megakernel"
    )

    description = "times that nki-library's own tests store, next to modelled ones"
    command = add_command(commands, "stored", _stored, _show_stored, description)
    command.add_argument("clone", type=Path, metavar="CLONE", help="of aws-neuron/nki-library")

    description = "files of nki-samples in the Beta dialect: migrated, values before and after"
    command = add_command(commands, "migrate", _migrate, _show_migrate, description)
    command.add_argument("sources", type=Path, metavar="SOURCES", help="a clone of nki-samples")
    command.add_argument("--kernel", nargs="+", help="these kernels only (default: all)")

    description = "our NKI kernels compared with NeuronMM's on the simulated core; time is modelled"
    example = "--model Llama-3.2-1B --tokens 1 --target trn2"
    command = add_command(
        commands, "kernels", _kernels, _show_kernels, description, "--lnc", example=example
    )
    command.add_argument(
        "--target",
        help="trn1, trn2 or trn3 (default: this machine's or trn2; with --figure1 trn1, on which "
        "the paper measured)",
    )
    command.add_argument("--figure1", action="store_true", help="at the paper's shape, M 1K to 32K")
    add_shape(command, "; or paper (default: all names, and paper)", nargs="+", default=[])
    add_tokens(command, [], "each kernel's own")
    command.add_argument(
        "--storage", nargs="+", default=[], help="also model our kernels on factors in fp8 or int8"
    )
    command.add_argument(
        "--plot", type=Path, metavar="OUT.png", help="draw the paper's Figure 1 (matplotlib)"
    )


def _nkibench(options: argparse.Namespace) -> dict[str, Any]:
    from benchmarks import nkibench

    with progress_bars() as progress:
        operators, kernels = nkibench.run(options.variants, options.nkibench, progress)
    return {"operators": operators, "kernels": kernels}


def _show_nkibench(document: dict[str, Any]) -> None:
    rows = document["operators"]

    def cell(value: float | None) -> str:
        return "" if value is None else f"{value:.2f}"

    cells = [
        [
            row["op"],
            f"{row['halved']} of {row['kernels']}",
            cell(row["quotient"]),
            f"{cell(row['quotient_low'])} {cell(row['quotient_high'])}",
            f"{row['in_order']} of {row['pairs']}" if row["pairs"] else "",
            cell(row["open_quotient"]),
            cell(row["moved"]),
        ]
        for row in rows
    ]
    columns = ["op", "sure", "time", "least most", "in order", "others", "moved"]
    show_table(columns, cells, left=["op"])
    keys = ("pairs", "in_order", "not_run")
    pairs, in_order, stopped = (sum(row[key] for row in rows) for key in keys)
    stdout.print(
        "Sure: kernels that ran for twice their p50; modelled over that time, and the others' if "
        f"they did, too. {in_order} of {pairs} pairs in the measured order, {stopped} kernels did "
        "not run."
    )


def _course(options: argparse.Namespace) -> list[dict[str, Any]]:
    from benchmarks import course

    with progress_bars() as progress:
        return course.run(options.clones, progress)


def _show_course(rows: list[dict[str, Any]]) -> None:
    cells = [
        [
            row["title"],
            row["at"] or row["dtype"],
            row["target"],
            f"{row['us']:g}",
            "{:.0f} {:.0f}".format(*row["range_us"]),
            f"{row['error']:+.0%}",
        ]
        for row in rows
    ]
    columns = ["kernel", "of", "target", "us", "range", "error"]
    show_table(columns, cells, left=["kernel", "of", "target"])


def _stored(options: argparse.Namespace) -> list[dict[str, Any]]:
    from benchmarks import stored

    with progress_bars() as progress:
        return stored.run(options.clone, progress)


def _show_stored(rows: list[dict[str, Any]]) -> None:
    from benchmarks import stored

    cells = [
        [kernel, str(lnc), str(len(some)), *stored.score_cells(some)]
        for (kernel, lnc), some in stored.by_kind(rows).items()
    ]
    columns = ["kernel", "cores", "times", "launch us", "mean error", "worst", "in range"]
    show_table(columns, cells, left=["kernel"])


def _aws(options: argparse.Namespace) -> list[dict[str, Any]]:
    from benchmarks import aws

    with progress_bars() as progress:
        return aws.run(options.clone, progress)


def _migrate(options: argparse.Namespace) -> list[dict[str, Any]]:
    from benchmarks import migrations

    return list(migrations.run_all(options.sources.resolve(), options.kernel))


def _show_migrate(rows: list[dict[str, Any]]) -> None:
    from benchmarks import migrations

    def cell(value: Any) -> str:
        return f"{value:.2g}" if isinstance(value, float) else str(value or "")

    columns = list(rows[0])
    left = ["file", "kernel", "result", "left_by_hand"]
    show_table(columns, [[cell(row[c]) for c in columns] for row in rows], left=left)
    stdout.print(migrations.summary(rows))


def _published(options: argparse.Namespace) -> list[dict[str, Any]]:
    from benchmarks import published

    with progress_bars() as progress:
        return published.run(progress, workers=min(2, os.cpu_count() or 1))


def _show_published(rows: list[dict[str, Any]]) -> None:
    from benchmarks import published
    from neuroncore.hardware import DMA_MODELS

    cells = [_published_cells(row) for row in rows]
    columns = ["figure", "group", "target", "published", "modelled", *DMA_MODELS]
    show_table(columns, cells, left=["figure", "group"])
    stdout.print(
        f"Times in ms, modelled under {DMA_MODELS[0]}; its error, and that of the other DMA model. "
        "Whole models are bounds, which no published system beats: the share, and what is missing "
        "by launch."
    )
    columns = ["group", "DMA model", "figures", "facts", "mean error", "worst"]
    scored = [
        [*each[:2], str(each.figures), str(each.facts), f"{each.mean:.1%}", f"{each.worst:+.0%}"]
        for each in published.scores(rows)
    ]
    show_table(columns, scored, left=["group", "DMA model"])


def _simulator(options: argparse.Namespace) -> dict[str, Any]:
    from benchmarks import simulator

    with progress_bars() as progress:
        return simulator.run(progress)


def _show_simulator(document: dict[str, Any]) -> None:
    stdout.print(f"{document['machine']}, Python {document['python']}; CPU seconds of one core.")
    columns = ["kernel", "instructions", "DMAs a matmul", "s", "a second", "scheduled a second"]
    fields = ("dmas_per_matmul", "cpu_s", "per_second", "scheduled_per_second")
    cells = [
        [row["name"], f"{row['instructions']:,}", *[_number(row[f], 1, ",.4g") for f in fields]]
        for row in document["traces"]
    ]
    show_table(columns, cells, left=["kernel"], title="Trace and schedule")
    columns = ["kernel", "executed s", "NumPy s", "over NumPy", "without its trace"]
    fields = ("execute_s", "numpy_s", "ratio", "ratio_without_trace")
    cells = [
        [row["name"], *[_number(row[f], 1, ".3g") for f in fields]] for row in document["values"]
    ]
    show_table(columns, cells, left=["kernel"], title="Values")
    for row in document["memory"]:
        stdout.print(
            f"{row['streamed_bytes'] / 1e6:,.0f} MB through SBUF: a peak of "
            f"{row['peak_bytes'] / 1e6:.1f} MB, {row['live_bytes'] / 1e6:.1f} MB live at once."
        )
    for row in document["long"]:
        stdout.print(
            f"A kernel of {row['time_ms']:.1f} ms (modelled), {row['instructions']:,} "
            f"instructions: {row['cpu_s']:.1f} s in mode {row['mode']}."
        )


def _predictions(options: argparse.Namespace) -> dict[str, Any]:
    from benchmarks import predictions

    with progress_bars() as progress:
        return predictions.run(progress)


def _published_cells(row: dict[str, Any]) -> list[str]:
    name = row["name"].replace("@", " @ ")  # where a narrow column may end
    if row["refused"]:
        return [f"{name}: refused, {row['refused']}", row["group"], row["target"]]
    if row["published_share"] is not None:
        values = [f"{row['published_share']:.1%}", f"{row['modelled_share']:.1%}"]
    else:
        values = [_number(row["published_ms"]), _number(row["modelled_ms"])]
    errors = [f"{error:+.1%}" for error in (row["errors"] or {}).values()]
    if row["measure"] == "bound":
        share, missing = row["modelled_ms"] / row["published_ms"], _number(row["launch_us"])
        errors = [f"{share:.1%}", f"{missing} us"]
    return [name, row["group"], row["target"], *values, *errors]


def _number(value: float | None, unit: int = 1, spec: str = ".4g") -> str:
    """A number in a unit; nothing for None."""
    return "" if value is None else format(value / unit, spec)


def _layer(options: argparse.Namespace) -> list[dict[str, Any]]:
    from benchmarks import layer

    with progress_bars() as progress:
        return layer.run(progress)


def _show_layer(rows: list[dict[str, Any]]) -> None:
    def cell(row: dict[str, Any], name: str) -> str:
        low, high = row[f"{name}_range_ms"]
        return f"{1e3 * row[f'{name}_ms']:.1f} ({1e3 * low:.0f}-{1e3 * high:.0f})"

    cells = [
        [
            row["model"],
            row["stored"] or "bfloat16",
            str(row["ratio"]),
            str(row["lnc"]),
            cell(row, "separate"),
            cell(row, "one"),
            cell(row, "more"),
            f"{1e3 * row['bound_ms']:.1f}",
        ]
        for row in rows
    ]
    columns = ["model", "weights", "ratio", "lnc", "separate", "one launch", "another", "bytes"]
    show_table(columns, cells, left=["model", "weights"])
    stdout.print(
        f"Modelled us of a layer on {rows[0]['target']}, {rows[0]['tokens']} tokens of cache: "
        "separate launches, all in one, what another layer adds to that launch, and all bytes at "
        "the DMA peak. Ratio 0 is dense."
    )


def _paper(options: argparse.Namespace) -> list[dict[str, Any]]:
    from benchmarks import paper

    with progress_bars() as progress:
        return paper.run(progress)


def _show_paper(rows: list[dict[str, Any]]) -> None:
    from neuroncore.hardware import DMA_MODELS

    stdout.print(
        f"bfloat16, one core of {rows[0]['target']}. Modelled: ms under each DMA model, GiB, share "
        "of SBUF, and ratios over the case in the title; in brackets what was published."
    )
    for section in dict.fromkeys([row["section"] for row in rows]):
        own = [row for row in rows if row["section"] == section]
        told = [n for n, (key, *_) in _PAPER.items() if any(r[f"published_{key}"] for r in own)]
        cells: list[list[str]] = []
        for row in own:
            refused = f": refused, {row['refused']}" if row["refused"] else ""
            times = [_number((row["times_ms"] or {}).get(model)) for model in DMA_MODELS]
            times[0] += _bracketed(row["published_time_ms"])
            values = [_paper_cell(row, *_PAPER[name]) for name in told]
            cells.append([row["name"] + refused, *times, *values])
        of, *sizes = [
            " or ".join(dict.fromkeys([str(row[field]) for row in own if row[field]]))
            for field in ("against", "M", "K", "r", "N")
        ]
        title = f"{section}: M, K, r, N {', '.join(sizes)}; over {of}"
        show_table(["case", *DMA_MODELS, *told], cells, ["case"], title)
        stdout.print(f"{own[0]['note']} Source: {own[0]['source']}.\n")


_PAPER = {
    "time": ("time_ratio", 1, ".2f"),
    "DMA time": ("dma_ratio", 1, ".2f"),
    "GiB": ("hbm_bytes", 2**30, ".3g"),
    "traffic": ("hbm_ratio", 1, ".2f"),
    "SBUF": ("sbuf_share", 1, ".0%"),
    "spilled MB": ("spill_bytes", 10**6, ".0f"),
}
"""Columns of `paper` where anything was published: the field, its unit and its format."""


def _paper_cell(row: dict[str, Any], field: str, unit: int, spec: str) -> str:
    """What is modelled, over the DMA models where they differ, and what was published."""
    values: list[float | None] = [row.get(field)]
    if field == "time_ratio" and row["time_ratios"]:
        values = sorted(row["time_ratios"].values())
    shown = "-".join(dict.fromkeys([_number(value, unit, spec) for value in values]))
    return shown + _bracketed(row[f"published_{field}"], unit, spec)


def _bracketed(published: float | None, unit: int = 1, spec: str = ".4g") -> str:
    return "" if published is None else f" ({_number(published, unit, spec)})"


def _kernels(options: argparse.Namespace) -> list[dict[str, Any]]:
    from benchmarks import figure1_plot, kernels

    if options.plot is not None:
        if not options.figure1:
            raise ValueError("--plot draws the paper's Figure 1: it needs --figure1")
        check_output(options.plot)
        figure1_plot.check_format(options.plot)
    with progress_bars() as progress:
        rows = kernels.run(
            options.model,
            tokens_of(options),
            target=options.target,
            lnc=options.lnc,
            figure1=options.figure1,
            storage=options.storage,
            workers=min(2, os.cpu_count() or 1),
            progress=progress,
        )
    if options.plot is not None:
        figure1_plot.save(rows, options.plot)
    return rows


def _show_kernels(rows: list[dict[str, Any]]) -> None:
    first = rows[0]
    cores = f", {first['lnc']} NeuronCores a launch" if first["lnc"] > 1 else ""
    stdout.print(f"{first['dtype']} on {first['target']}{cores}. All times are modelled.")
    for model in dict.fromkeys(row["model"] for row in rows):
        _show_model(model, [row for row in rows if row["model"] == model])
    _show_shares(rows)
    _show_speedups(rows)


def _show_model(model: str, rows: list[dict[str, Any]]) -> None:
    """The rows of one model; with what was published for its shape, if anything was."""
    shapes = list(dict.fromkeys(f"{row['K']}x{row['N']}" for row in rows))
    published = any(row["published_bytes"] is not None for row in rows)
    rank = next(row["r"] for row in rows if row["r"])
    stdout.print(
        f"\n{model}, " + (f"K x N {shapes[0]}, " if len(shapes) == 1 else "") + f"r={rank}"
    )
    columns = ["M", "kernel", "ms", "of limit", "bound"]
    columns += ["GiB", "publ. ms", "GiB"] if published else ["MiB"]
    if len(shapes) > 1:
        columns.insert(1, "K x N")
    cells: list[list[object] | None] = []
    tokens = rows[0]["M"]
    for row in rows:
        if row["M"] != tokens:
            cells.append(None)
            tokens = row["M"]
        sizes = [row["M"], f"{row['K']}x{row['N']}"][: min(2, len(shapes))]
        measured = _modelled_cells(row, 2**30 if published else 2**20)
        pair = [_number(row["published_ms"]), _number(row["published_bytes"], 2**30, ".3g")]
        cells.append([*sizes, row["kernel"], *measured, *(pair if published else [])])
    show_table(columns, cells, left=["kernel"])
    if published:
        stdout.print("Published times and traffic: NeuronMM's Figure 1.")


def _modelled_cells(row: dict[str, Any], unit: int) -> list[str]:
    if row["time_ms"] is None:
        return ["no room", "", "", ""]
    share, moved = f"{row['limit_share']:.0%}", _number(row["hbm_bytes"], unit, ".3g")
    return [_number(row["time_ms"]), share, row["bound"], moved]


def _show_shares(rows: list[dict[str, Any]]) -> None:
    from benchmarks import kernels

    worst = kernels.worst_shares(rows)
    regimes = [regime for regime in kernels.REGIMES if any(r == regime for _, r in worst)]
    stdout.print("\nSmallest share of the modelled limit, by tokens:")
    cells: list[list[str]] = []
    for kernel in dict.fromkeys(row["kernel"] for row in rows):
        shares = [worst.get((kernel, regime)) for regime in regimes]
        cells.append(
            [kernel, *("" if r is None else f"{r['limit_share_low']:.0%}" for r in shares)]
        )
    show_table(["kernel", *regimes], cells, left=["kernel"])


def _show_speedups(rows: list[dict[str, Any]]) -> None:
    """Speed-ups over other kernels, each with its range and its least."""
    from benchmarks import kernels
    from neuroncore.hardware import DMA_MODELS
    from neuronmm_ops.estimate.ends import middle, spread

    compared = [(*names, kernels.speedup(rows, *names)) for names in kernels.COMPARED]
    shown = [(*names, ratios) for *names, ratios in compared if ratios]
    if shown:
        stdout.print(
            "Modelled speed-ups, geometric means: the middle of both DMA models and orders, "
            "and the range of all that is not known:"
        )
    for ours, theirs, regime, ratios in shown:
        low, high = spread([*ratios.values()])
        models = ", ".join([f"{model} {ratios[model]:.2f}x" for model in DMA_MODELS])
        least = kernels.least_speedup(rows, ours, theirs, regime)
        stdout.print(
            f"{ours} over {theirs}, {regime}: {middle(ratios):.2f}x, {low:.2f}x to {high:.2f}x "
            f"({models}), least {least:.2f}x"
        )
