"""Tables of `bench model` on tensor parallel: numbers of ranks, and what they exchange."""

from typing import Any

from neuroncore.cli.console import show_table, stdout
from neuronmm_ops.estimate.ends import compared

PHASES = {"prefill": "Prefill", "decode": "Decode"}
VARIANTS = {
    "dense": "dense",
    "low_rank": "low rank",
    "dense_one_byte": "dense, stored",
    "pruned": "narrower",
    "published_dense": "publ. dense",
    "published_low_rank": "publ. low rank",
}
_SPOKEN = {
    "gate_up": "gate and up",
    "all_reduce": "sum",
    "all_gather": "gather",
    "reduce_scatter": "scattered sum",
}


def show_ranks(documents: list[dict[str, Any]]) -> None:
    """Print what each tp takes, dense and low-rank."""
    columns = ["tp", "", "prefill", "", "decode", "", "tokens/s", "links", "weights, GB"]
    cells: list[list[object] | None] = []
    for document in documents:
        for variant in document["variants"]:
            times: list[object] = []
            for phase in PHASES:
                cost = variant["phases"][phase]
                dense = document["variants"][0]["phases"][phase]
                times += [f"{cost['time_ms']:.4g}"]
                times += ["" if cost is dense else as_range(_speedup(dense, cost))]
            decode = variant["phases"]["decode"]
            links = [row for row in decode["components"] if row["component"] == "collectives"]
            cells.append(
                [
                    *(document["tp"], VARIANTS[variant["name"]], *times),
                    f"{variant['tokens_per_s']:.4g}",
                    f"{links[0]['time_ms'] / decode['time_ms']:.1%}",
                    f"{variant['memory']['weight_bytes'] / 1e9:.3g}",
                ]
            )
        cells.append(None)
    show_table(columns, cells[:-1], left=[""])
    stdout.print("Speed-ups are over dense at the same tp; links is their share of decode.")


def show_layouts(document: dict[str, Any]) -> None:
    """Print what ranks exchange for a layer in each layout of its weights, and what is taken."""
    variants = {variant["name"]: variant for variant in document["variants"]}
    dense, low = variants["dense"], variants["low_rank"]
    columns = ["", "", "exchanged", "wire KB", "links us", "launches us", "us", "MB a rank"]
    for phase, title in PHASES.items():
        layouts = _shown(low["phases"][phase]["layouts"])
        of_dense = {row["component"]: row for row in dense["phases"][phase]["layouts"]}
        cells: list[list[object] | None] = []
        for component in dict.fromkeys([row["component"] for row in layouts]):
            rows = [row for row in layouts if row["component"] == component]
            shown = [row for row in rows if row["taken"] or len(_names(row)) == 1]
            cells += [_layout(row) for row in (of_dense[component], *shown)]
            cells.append(None)
        if cells:
            title = f"{title}, tp {document['tp']}: a layer's weights in each layout (* taken)"
            show_table(columns, cells[:-1], left=["", "exchanged"], title=title)
    least = dense["phases"]["decode"].get("published_collectives", {}).get("least_us")
    ratios = [f"{phase} {as_range(_speedup(*_published(dense, low, phase)))}" for phase in PHASES]
    stdout.print(
        f"With no collective under {least:g} us, the least that nccom-test's published examples "
        f"show for 32 ranks, low rank over dense is: {', '.join(ratios)}."
    )
    weights = [f"{n} {b / 1e9:.3g}" for n, b in low["weight_bytes_by_layout"].items()]
    stdout.print(
        f"Weights of a rank, GB: dense {dense['memory']['weight_bytes'] / 1e9:.3g}; low rank with "
        f"every pair in one layout: {', '.join(weights)}; as taken, of both phases: "
        f"{low['memory']['weight_bytes'] / 1e9:.3g}."
    )
    decode = _speedup(dense["phases"]["decode"], low["phases"]["decode"])
    if decode["middle"] < 1:
        on = " ".join([f"--{name} {document[name]}" for name in ("target", "lnc", "tp")])
        stdout.print(
            f"These pairs decode at {as_range(decode)} of dense on {document['tp']} ranks; "
            f"neuronmm compress --budget time {on} buys ranks that pay there, neuronmm prune "
            "narrows MLPs without exchanges."
        )


def as_range(speedup: dict[str, float]) -> str:
    """A speed-up, with its range where both ends differ in print."""
    shown, low, high = (f"{speedup[end]:.2f}" for end in ("middle", "low", "high"))
    return f"{shown}x" if low == high else f"{shown}x ({low} to {high}x)"


def _speedup(dense: dict[str, Any], cost: dict[str, Any]) -> dict[str, float]:
    """The dense time over the own."""
    return compared(cost["times_ms"], dense["times_ms"])


def _published(*variants_and_phase: Any) -> list[dict[str, Any]]:
    """What variants take in a phase where collectives are no quicker than published ones."""
    *variants, phase = variants_and_phase
    return [variant["phases"][phase]["published_collectives"] for variant in variants]


def _shown(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of pairs; of a component those of the kind that most layers have."""
    pairs = [row for row in rows if "dense" not in _names(row)]
    most = {row["component"]: row for row in sorted(pairs, key=lambda row: row["layers"])}
    return [row for row in pairs if row["part"] == most[row["component"]]["part"]]


def _names(row: dict[str, Any]) -> set[str]:
    """The layouts of a row."""
    return set(row["layouts"].values())


def _layout(row: dict[str, Any]) -> list[object]:
    layouts: dict[str, str] = row["layouts"]
    name = next(iter(_names(row)))
    if len(_names(row)) > 1:
        name = ", ".join([f"{_SPOKEN.get(g, g)}: {each}" for g, each in layouts.items()])
    exchanged = [f"{_SPOKEN[each['kind']]} [M, {each['N']}]" for each in row["collectives"]]
    return [
        row["component"],
        f"{name} *" if row["taken"] else name,
        ", ".join(exchanged) or "nothing",
        f"{row['wire_bytes'] / 1e3:.4g}",
        f"{row['collectives_ms'] * 1e3:.3g}",
        f"{row['launches_ms'] * 1e3:.4g}",
        f"{row['time_ms'] * 1e3:.4g}",
        f"{row['weight_bytes'] / 1e6:.3g}",
    ]
