"""Sections of docs/results.md of what is modelled: whole models and kernels."""

from collections.abc import Callable

from measured import excess, ratio_label
from plots import image
from selection import (
    Row,
    document,
    gain_as_served,
    model_name,
    models,
    one_launch_as_served,
    setting,
    tradeoffs,
    variant,
)
from sources import PAPER_RUN, SHOWN, TARGET, WHOLE, read, whole_command
from writing import number, ranged, span, table

from benchmarks import stored
from benchmarks.course import inside, summary
from benchmarks.nkibench import FITTED, score
from benchmarks.published import scores
from neuroncore.hardware import DMA_MODELS
from neuronmm_ops.estimate.ends import compared, ratios_of
from neuronmm_ops.estimate.served import FURTHER_US, LAUNCH_US, TOKEN_US
from neuronmm_ops.models import SHAPES

PHASES = ("prefill", "decode")
SHOWN_RATIO = 0.2
_NOT_KNOWN = "../neuroncore/docs/modelled.md#what-is-modelled"
"""Of the table of all models."""


def pareto() -> list[str]:
    """Tokens per second against quality."""
    points = tradeoffs()
    if not points:
        return []
    return [
        "## Tokens per second against quality",
        f"**Two models**: tokens/s are {SHOWN}'s, modelled on one {TARGET} core (MLPs compressed, "
        "NeuronMM's ranks); the quality is the demo model's at the same ratio and storage, "
        "measured. The loss of the large model is unknown.",
        image("results-pareto.svg", "modelled tokens per second against measured quality"),
        table(
            ["ratio", "storage", f"{SHOWN}, tokens/s, modelled", "demo, excess, measured"],
            [
                [
                    ratio_label(point.ratio),
                    point.storage,
                    number(point.tokens_per_s),
                    excess(point.excess),
                ]
                for point in points
            ],
        ),
    ]


def whole_models() -> list[str]:
    """Low rank against dense, a row per model and setting."""
    documents = [one for name in SHAPES for one in models(name)]
    if not documents:
        return []
    first = documents[0]
    return [
        "## Whole models",
        f"Modelled: one {first['target']} core per rank, batch {first['batch']}, a prompt of "
        f"{first['prompt']} tokens, then {first['new']} more; every launch traced on the simulated "
        "core. Speed-ups are over our best dense bf16 kernels (diamonds: dense in the storage), "
        f"with the range of [all that is not known]({_NOT_KNOWN}). *Storage* is "
        "dense in one byte, *rank* low rank over that, both in decode; *as served* is decode "
        "[with the cost of launches](whole-model.md#bounds). [The gallery](gallery/index.md) has "
        "ratio 0.5.",
        image("results-models.svg", "speed-up of decode and prefill, by model and setting"),
        setting_rows([one for one in documents if one["ratio"] == SHOWN_RATIO]),
        *_published(models(SHOWN)),
        *_components(),
    ]


def setting_rows(documents: list[Row]) -> str:
    """A table of modelled documents, low rank against dense, a row each."""
    head = (
        *("model", "compressed", "prefill ms", "speed-up"),
        *("ms/token", "speed-up", "storage", "rank", "as served"),
    )
    return table(head, [_model_row(one) for one in documents])


def _model_row(one: Row) -> list[str]:
    own = variant(one, "low_rank")["phases"]
    cells = [model_name(one), setting(one)]
    for phase in PHASES:
        cells += [number(own[phase]["time_ms"]), ranged(one["speedups"]["ours"][phase])]
    split = [one["speedups"].get(kind, {}).get("decode") for kind in ("storage", "rank")]
    return [*cells, *[ranged(each) if each else "" for each in split], gain_as_served(one)]


def _published(documents: list[Row]) -> list[str]:
    """The same against NeuronMM's kernels, for the settings that they can run."""
    compared = [one for one in documents if "published" in one["speedups"]]
    if not compared:
        return []
    names = {"published": "theirs over theirs", "ours_over_published": "ours over theirs, dense"}
    return [
        f"{SHOWN} against NeuronMM's kernels and its tutorial baseline, traced in the same run: "
        "*theirs over theirs* is the paper's claim, *ours over theirs, dense* adds our kernels.",
        table(
            ["compressed", "speed-up, with what is not known", *PHASES],
            [
                [
                    *(setting(one), label),
                    *(ranged(one["speedups"][key][phase]) for phase in PHASES),
                ]
                for one in compared
                for key, label in names.items()
            ],
        ),
    ]


def whole() -> str:
    """`SHOWN` on two cores, a setting a row."""
    first = document("whole")
    if first is None:
        return ""
    dense = variant(first, "dense")["phases"]
    one_dense = number(dense["decode"]["one_launch"]["time_ms"])
    rows = [["nothing (`dense`)", *(number(dense[p]["time_ms"]) for p in PHASES), *[""] * 5]]
    rows[0] += [one_dense, *[""] * 4]
    for ratio, targets, is_one_byte in WHOLE:
        one = document("whole", whole_command(ratio, targets, is_one_byte))
        own = variant(one, "low_rank")["phases"]
        kinds = ("storage", "rank") if is_one_byte else ()
        rows.append(
            [
                f"{_TARGETS[targets]}, ratio {ratio:g}, "
                + ("layers in fp8" if is_one_byte else "bf16"),
                *(number(own[p]["time_ms"]) for p in PHASES),
                *(ranged(one["speedups"]["ours"][p]) for p in PHASES),
                gain_as_served(one),
                *([ranged(one["speedups"][kind]["decode"]) for kind in kinds] or ["", ""]),
                number(own["decode"]["one_launch"]["time_ms"]),
                ranged(one["speedups"]["ours"]["decode"]["one_launch"]),
                one_launch_as_served(one),
                ranged(one["speedups"]["width"]["decode"]),
                ranged(one["speedups"]["width"]["decode"]["one_launch"]),
            ]
        )
    head = ["compressed", "prefill ms", "decode ms", "prefill", "decode", "as served"]
    head += ["one byte alone", "rank at equal storage"]
    head += ["one launch, ms", "decode", "as served", "narrower MLPs: decode", "one launch"]
    return table(head, rows)


_TARGETS = {
    "mlp": "MLPs",
    "all-linear": "all",
}


def paper_run() -> str:
    """The run of NeuronMM's README, end to end."""
    one = document("whole", PAPER_RUN)
    if one is None:
        return ""
    names = ("published", "ours_over_published", "ours")
    return table(
        ["speed-up", "with what is not known"],
        [[f"`{name}`", ranged(one["speedups"][name]["end_to_end"])] for name in names],
    )


def published() -> str:
    """The score of each group, and the figures that were held out."""
    rows = document("published")
    if rows is None:
        return ""
    models = [f"`{model}`" for model in DMA_MODELS]
    scored = table(
        ["group", "DMA model", "figures", "facts", "mean error", "worst"],
        [
            [
                score.group,
                f"`{score.model}`",
                str(score.figures),
                str(score.facts),
                f"{score.mean:.1%}",
                f"{score.worst:+.0%}",
            ]
            for score in scores(rows)
        ],
    )
    held_out: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row["group"] == "held out" and row["error"] is not None:
            held_out.setdefault((row["fact"], row["target"]), []).append(row)
    held = table(
        ["held out", "of", "published", "modelled", "range", *models],
        [
            [
                f"{fact} ({target})",
                *map("<br>".join, zip(*map(_published_row, of_fact), strict=True)),
            ]
            for (fact, target), of_fact in held_out.items()
        ],
    )
    return f"{scored}\n\n{held}"


def held_out() -> str:
    """The score of the figures that nobody fitted, in one sentence."""
    rows = document("published")
    if rows is None:
        return ""
    of_group = [score for score in scores(rows) if score.group == "held out"]
    whole = [row for row in rows if row["range_ms"]]
    inside = [r for r in whole if r["range_ms"][0] <= r["published_ms"] <= r["range_ms"][1]]
    ends = " and ".join(
        f"{score.mean:.0%} (worst {score.worst:+.0%}) under `{score.model}`" for score in of_group
    )
    return (
        f"On {of_group[0].figures} published times of {of_group[0].facts} kernels and their "
        f"engines, which no constant was fitted to, the mean error is {ends}. Of the "
        f"{len(whole)} times of whole kernels {len(inside)} lie in the range of all that is not "
        f"known.{_of_aws()}{_of_others()}"
    )


def _of_aws() -> str:
    rows = document("stored")
    if not rows:
        return ""
    summed = stored.summary(rows)
    return (
        f" On {summed['launches']} launches of nki-library's kernels that AWS timed on trn2, a "
        f"launch's constant cost aside, it is {summed['mean_error']:.0%} "
        f"({summed['whole_error']:.0%} with it, "
        f"worst {summed['worst']:+.0%}), and {summed['inside']} of {summed['ranged']} lie in "
        "their range."
    )


def _of_others() -> str:
    timed = document("nkibench")
    if not timed:
        return ""
    scored = score(timed["kernels"])
    return (
        f" On {scored['kernels']} kernels that others wrote and timed on trn2 it is "
        f"{scored['mean_error']:.0%} (worst {scored['worst']:+.0%}), as far as their medians are "
        f"half a run's.{_of_students()}"
    )


def _of_students() -> str:
    rows = document("course")
    if not rows:
        return ""
    summed = summary(rows)
    return (
        f" On {summed['kernels']} times that others measured on trn1, trn2 and trn3, with a "
        f"launch, the median error is {summed['median_error']:.0%}, "
        f"the mean {summed['mean_error']:.0%} "
        f"(worst {summed['worst']:+.0%}), and {summed['inside']} lie in their range; "
        f"between both orders of instructions the mean is {summed['mean_error_between']:.0%}."
    )


def stored_times() -> str:
    """Times that nki-library's tests store, by kernel and cores, next to modelled ones."""
    rows = document("stored")
    if rows is None:
        return ""
    summed = stored.summary(rows)
    cost, error = stored.exchange_cost(rows)
    by_kind = table(
        ["kernel", "cores", "times", "us", "launch us", "mean error", "worst", "in range"],
        [
            [
                *(kernel, lnc, len(some)),
                "{:,.0f}-{:,.0f}".format(*(end(row["us"] for row in some) for end in (min, max))),
                *stored.score_cells(some),
            ]
            for (kernel, lnc), some in stored.by_kind(rows).items()
        ],
    )
    return (
        f"{by_kind}\n\nThe mean of these means is {summed['mean_error']:.1%}, with launches "
        f"{summed['whole_error']:.0%}. An exchange of two "
        f"cores takes {cost:.1f} ± {error:.1f} us more than here."
    )


def course() -> str:
    """Kernels that others timed next to modelled times, all with a launch; a row for a series."""
    series: dict[str, list[Row]] = {}
    for row in document("course") or []:
        title = f"`{row['title']}` {row['dtype']}, {row['target']}, {row['author']}"
        series.setdefault(title, []).append(row)

    def size(row: Row) -> str:
        if row["at"] and row["constant"] is None:
            return row["at"]
        of = f"{row['at']} of " if row["at"] else ""
        return of + "x".join(map(str, row["shapes"][0]))

    def reordered(row: Row) -> str:
        us = row["assumed_us"]["instruction-order"]
        return f"{us:,.0f}" if us < row["modelled_us"] else ""

    def listed(rows: list[Row], cell: Callable[[Row], str]) -> str:
        return "<br>".join(map(cell, rows))

    return table(
        ["kernel, by", "of", "us", "modelled", "range", "error", "reordered", "in range"],
        [
            [
                title,
                listed(rows, size),
                listed(rows, lambda row: f"{row['us']:,g}"),
                listed(rows, lambda row: f"{row['modelled_us']:,.0f}"),
                listed(rows, lambda row: "{:,.0f}-{:,.0f}".format(*row["range_us"])),
                listed(rows, lambda row: f"{row['error']:+.0%}"),
                listed(rows, reordered) if any(map(reordered, rows)) else "",
                f"{sum(map(inside, rows))}/{len(rows)}",
            ]
            for title, rows in series.items()
        ],
    )


def aws() -> str:
    """AWS's dense kernels next to ours, for one token."""
    return table(
        ["what", "model", "ranks", "cores", "nki-library ms", "ours, dense, ms", "at 0.2 ms"],
        [
            [
                *(row[name] for name in ("what", "model", "tp", "lnc")),
                *(f"{row[name]:.4f}" for name in ("aws_ms", "dense_ms")),
                "" if row["low_rank_ms"] is None else f"{row['low_rank_ms']:.4f}",
            ]
            for row in document("aws") or []
        ],
    )


def nkibench() -> str:
    """Kernels that others timed on a device: modelled time, order and bytes next to theirs."""
    timed = document("nkibench")
    if not timed:
        return ""
    rows, kernels = timed["operators"], timed["kernels"]
    pairs, in_order = (sum(row[key] for row in rows) for key in ("pairs", "in_order"))
    told = [k for k in kernels if k["why"] is None and k["measured_mb"]]
    moved = [k["modelled_mb"] / k["measured_mb"] for k in told]
    alike = sum(abs(quotient - 1) < 0.03 for quotient in moved)
    scored = score(kernels)
    stopped = sum(row["not_run"] for row in rows)
    shown = table(
        ["operator", "sure", "modelled over measured", "in order", "others, if halved", "bytes"],
        [
            [
                *(row["op"], f"{row['halved']} of {row['kernels']}"),
                ""
                if row["quotient"] is None
                else f"{row['quotient']:.2f} "
                f"({row['quotient_low']:.2f}-{row['quotient_high']:.2f})",
                f"{row['in_order']} of {row['pairs']}" if row["pairs"] else "",
                "" if row["open_quotient"] is None else f"{row['open_quotient']:.2f}",
                "" if row["moved"] is None else f"{row['moved']:.2f}x",
            ]
            for row in rows
        ],
    )
    fitted = " and ".join(f"`{op}`" for op in FITTED)
    return (
        f"{shown}\n\nOf the {scored['kernels']} sure kernels of operators other than {fitted} the "
        f"mean error is {scored['mean_error']:.0%} (worst {scored['worst']:+.0%}). **{in_order} of "
        f"{pairs} pairs of sure kernels are in the measured order**; of {len(moved)} kernels whose "
        f"bytes are told, {alike} move the same here within 3 %. {stopped} kernels do not run."
    )


def served() -> str:
    """Published times of whole models next to ours, and the launch that would explain the rest."""
    rows = [row for row in document("published") or [] if row["measure"] == "bound"]
    if not rows:
        return ""
    of: dict[str, dict[str, list[Row]]] = {}
    for row in rows:
        name, phase = row["name"].rsplit(": ", 1)
        model = name.rsplit(", ", 1)[0]
        of.setdefault(model, {}).setdefault(phase, []).append(row)
    shown = table(
        ["model, instance, ranks", "settings", "decode", "rest by launch, us", "prefill"],
        [
            [
                model,
                str(len(phases["decode"])),
                _shares(phases["decode"]),
                _between([row["launch_us"] for row in phases["decode"]]),
                _shares(phases.get("prefill", [])),
            ]
            for model, phases in of.items()
        ],
    )
    return (
        f"{shown}\n\nIn decode {LAUNCH_US.low} to {LAUNCH_US.high} us a launch would explain the "
        f"rest, or {TOKEN_US.middle / 1e3:g} ms a token and {FURTHER_US.middle} us a launch, at "
        f"most {TOKEN_US.high / 1e3:g} ms and {FURTHER_US.high} us."
    )


def _shares(rows: list[Row]) -> str:
    """Our time over the published one."""
    return _between([100 * row["modelled_ms"] / row["published_ms"] for row in rows], "%")


def _between(values: list[float], unit: str = "") -> str:
    return (
        "-".join(dict.fromkeys(f"{end:.0f}{unit}" for end in (min(values), max(values))))
        if values
        else ""
    )


def _published_row(row: Row) -> list[str]:
    """A figure of a fact: which, its values and the errors."""
    which = row["name"].removeprefix(row["fact"]).removeprefix(" bf16").strip(": ") or "time"
    of, by = (row[f"{kind}_ms"] for kind in ("published", "modelled"))
    ends = [f"{row['errors'][model]:+.1%}" for model in DMA_MODELS]
    if row["published_share"] is not None:
        values = [f"{row[f'{kind}_share']:.1%}" for kind in ("published", "modelled")]
    else:
        values = [f"{ms * 1e3:.3g} us" if of < 0.1 else f"{ms:.4g}" for ms in (of, by)]
    ends.insert(0, span(*row["range_ms"], unit="") if row["range_ms"] else "")
    return [which, *values, *ends]


def _components() -> list[str]:
    """What a token of the shown model waits for."""
    documents = models(SHOWN)
    if not documents:
        return []
    dense = variant(documents[0], "dense")["phases"]["decode"]
    columns = [("dense", dense)]
    columns += [(setting(one), variant(one, "low_rank")["phases"]["decode"]) for one in documents]
    names = [each["component"] for each in dense["components"] if each["launches"]]
    of = [{each["component"]: each for each in phase["components"]} for _, phase in columns]
    return [
        f"Time of one token of {SHOWN} by component, in ms (modelled):",
        table(
            ["component", *(label for label, _ in columns)],
            [
                *([name, *(number(each[name]["time_ms"]) for each in of)] for name in names),
                ["all", *(number(phase["time_ms"]) for _, phase in columns)],
            ],
        ),
        _binding(*columns[-1]),
    ]


def _binding(label: str, phase: Row) -> str:
    """The two components that a setting's token waits for longest."""
    whole = phase["time_ms"]
    longest = sorted(phase["components"], key=lambda each: -each["time_ms"])[:2]
    shares = [f"`{each['component']}` {each['time_ms'] / whole:.0%}" for each in longest]
    return f"At {label}, {' and '.join(shares)} of the time bind."


def figure1() -> list[str]:
    """Time and traffic of X U V."""
    rows: list[Row] = document("figure1") or []
    if not rows:
        return []
    kernels = list(dict.fromkeys(row["kernel"] for row in rows))
    tokens = list(dict.fromkeys(row["M"] for row in rows))
    of = {(row["kernel"], row["M"]): row for row in rows}
    return [
        "## The paper's Figure 1",
        "X U V at the paper's shape on one trn1 core: lines are modelled, markers are what "
        "[NeuronMM](https://arxiv.org/abs/2510.25977) published.",
        image("results-figure1.svg", "time and HBM traffic against tokens"),
        "Time in ms, modelled; the paper's measurements in brackets:",
        table(
            ["kernel", *(f"{M // 1024}K" for M in tokens)],
            [
                [f"`{kernel}`", *(_with_published(of.get((kernel, M))) for M in tokens)]
                for kernel in kernels
            ],
        ),
    ]


def _with_published(row: Row | None) -> str:
    if row is None or row["time_ms"] is None:
        return ""
    published = row["published_ms"]
    return number(row["time_ms"]) + (f" ({number(published)})" if published else "")


def clock() -> list[str]:
    """Speed-ups of kernels under each DMA model."""
    data = read("clock")
    if data is None:
        return []
    rows: list[Row] = [row for run in data["runs"] for row in run["document"]]
    published = {"xuv": "neuronmm_published", "svd_mlp": "neuronmm_published_mlp"}
    of = {(row["target"], row["kernel"], row["M"], row["K"]): row for row in rows}
    lines: list[list[str]] = []
    for (target, kernel, M, K), row in of.items():
        theirs = of.get((target, published.get(kernel, ""), M, K))
        if theirs is None or theirs["times_ms"] is None:
            continue
        data = compared(row["times_ms"], theirs["times_ms"])
        ratios = ratios_of(row["times_ms"], theirs["times_ms"])
        lines.append(
            [
                f"`{kernel}` [{M}, {K}], {target}",
                ranged(data),
                *(f"{ratios[model]:.2f}" for model in DMA_MODELS),
                span(row["time_low_ms"], row["time_high_ms"], 4, ""),
            ]
        )
    return [
        "## How far the clock may be wrong",
        "Modelled: our kernels against NeuronMM's published ones at "
        f"{SHOWN}'s shape, ratio 0.2: between both [DMA models and orders]"
        f"({_NOT_KNOWN}), with the range of all that is not known.",
        table(
            [
                *("op [M, K], target", "speed-up, with what is not known"),
                *(f"`{model}`" for model in DMA_MODELS),
                "our ms",
            ],
            lines,
        ),
    ]
