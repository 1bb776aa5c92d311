"""`bench model`: a whole model's time on Trainium, modelled."""

import argparse
from typing import Any

from neuronmm_ops.cli.console import show_table, stdout
from neuronmm_ops.cli.parser import add_command, add_shape
from neuronmm_ops.progress import progress_bars

_DESCRIPTION = "prefill and decode of a whole model, by component, dense and low-rank; modelled"
_PHASES = {"prefill": "Prefill", "decode": "Decode"}
_COMPARED = (*_PHASES, "end_to_end")
_VARIANTS = {
    "dense": "dense",
    "low_rank": "low rank",
    "dense_one_byte": "dense, 1 byte",
    "published_dense": "publ. dense",
    "published_low_rank": "publ. low rank",
}
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
    command = add_command(benchmarks, "model", _model, show_model, _DESCRIPTION, *options)
    add_shape(command, required=True, help="a shape by name, or the path of a config.json")
    command.add_argument("--tp", type=int, default=1, help="ranks of tensor parallel (default 1)")
    command.add_argument("--prompt", type=int, default=2048, help="tokens (default 2048)")
    command.add_argument("--new", type=int, default=256, help="tokens generated (default 256)")
    command.add_argument("--batch", type=int, default=1, help="sequences (default 1)")
    command.add_argument(
        "--targets",
        nargs="+",
        default=["mlp"],
        help="the Linears that are low-rank: mlp (default), attention, all-linear, names",
    )
    command.add_argument("--storage", help="of the targets: fp8 or int8 (default bfloat16)")
    command.add_argument(
        "--storage-dense", help="of the layers' other Linears: fp8 or int8 (default bfloat16)"
    )
    command.add_argument(
        "--storage-lm-head", help="of the output head: fp8 or int8 (default bfloat16)"
    )


def _model(options: argparse.Namespace) -> dict[str, Any]:
    from neuronmm_ops.bench import model

    with progress_bars() as progress:
        return model.run(
            options.model,
            target=options.target,
            lnc=options.lnc,
            tp=options.tp,
            prompt=options.prompt,
            new=options.new,
            batch=options.batch,
            ratio=options.ratio,
            storage=options.storage,
            storage_dense=options.storage_dense,
            storage_lm_head=options.storage_lm_head,
            targets=tuple(options.targets),
            progress=progress,
        )


def show_model(document: dict[str, Any]) -> None:
    """Print a table a phase, the variants side by side, and the speed-ups as ranges."""
    stdout.print(
        f"{document['model']} on {document['target']}, lnc {document['lnc']}, tp {document['tp']}: "
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
    variants = document["variants"]
    for phase, title in _PHASES.items():
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
    stdout.print("Modelled speed-ups, by what small DMAs are taken to cost:")
    for name, found in document["speedups"].items():
        phases = [f"{phase.replace('_', ' ')} {_range(found[phase])}" for phase in _COMPARED]
        stdout.print(f"  {_SPEEDUPS[name]}: {', '.join(phases)}", soft_wrap=True)
    stdout.print("Left out: " + "; ".join(document["left_out"]) + ".", soft_wrap=True)


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
    show_table([title, *[_VARIANTS[each["name"]] for each in variants]], cells, left=[title])


def _summary(variant: dict[str, Any]) -> list[str]:
    times = [variant["phases"][phase] for phase in _PHASES]
    ends = [ms / 1e3 for ms in variant["end_to_end_times_ms"].values()]
    return [
        _VARIANTS[variant["name"]],
        *[_span(each["time_low_ms"], each["time_high_ms"]) for each in times],
        _span(min(ends), max(ends)),
        f"{variant['tokens_per_s']:.4g}",
        f"{variant['memory']['weight_bytes'] / 1e9:.3g}",
    ]


def _span(low: float, high: float) -> str:
    """A time, or its range where both ends differ in print."""
    first, last = f"{low:.3g}", f"{high:.3g}"
    return first if first == last else f"{first}-{last}"


def _range(speedup: dict[str, float]) -> str:
    low, high = f"{speedup['low']:.2f}", f"{speedup['high']:.2f}"
    return f"{low}x" if low == high else f"{low}x to {high}x"
