"""docs/results.md, from the data sets alone."""

from collections.abc import Iterable
from typing import Any

from plots import plots
from selection import (
    Row,
    document,
    front,
    method_label,
    model_name,
    models,
    setting,
    storages,
    tradeoffs,
    variant,
)
from sources import SHOWN, TARGET, datasets, model_command, read
from writing import MARK, number, page, span, table

from neuronmm_ops.bench.cpu import FORWARD
from neuronmm_ops.hardware import DMA_MODELS
from neuronmm_ops.models import SHAPES

PHASES = ("prefill", "decode")
README_RATIO = 0.4
"""Of the demo's model, in the README's first number."""
README_SETTING = (0.2, "fp8", "all-linear")
"""Of the large model, in its second."""


def results_page() -> str:
    """The page."""
    return page(
        MARK,
        "# Results",
        "Every number here is read from a file that a command wrote, and says *measured* (on what) "
        "or *modelled* (kernels traced on the simulated core, never run on a device). "
        "[Where the numbers come from](#where-the-numbers-come-from) has the commands. "
        "[Benchmarks](benchmarks.md) says how they measure, and [one page a model]"
        "(gallery/index.md) what a model would get.",
        *_three_numbers(),
        *_quality(),
        *_pareto(),
        *_whole_models(),
        *_figure1(),
        *_clock(),
        *_cpu(),
        *_generate(),
        *_sources(),
    )


def three_numbers() -> list[str]:
    """The README's numbers, those whose data are there."""
    found: list[str] = []
    rows = {
        (row["ratio"], method_label(row)): row
        for row in document("methods") or []
        if row["method"] != "dense"
    }
    if rows:
        default, baseline = rows[README_RATIO, "default"], rows[README_RATIO, "SVD-LLM"]
        share = default["excess_log_ppl"] / baseline["excess_log_ppl"]
        found.append(
            f"**{share:.2f}x** the excess log-perplexity of SVD-LLM with uniform ranks, with "
            f"{default['effective_ratio']:.1%} instead of {baseline['effective_ratio']:.1%} of the "
            "MLP parameters removed (*measured*, the demo's model, held-out text)"
        )
    one = document(f"model_{SHOWN}", model_command(SHOWN, *README_SETTING))
    if one:
        speedup = one["speedups"]["ours"]["decode"]
        found.append(
            f"**{span(speedup['low'], speedup['high'])}** the tokens per second of our own dense "
            f"bf16 kernels: decode of all of {SHOWN}, {setting(one)} (*modelled*, one "
            f"{one['target']} core, batch 1, over both DMA models)"
        )
    on_cpu = [row for row in _forward() if (row["op"], row["M"]) == ("svd_mlp", 1)]
    if on_cpu:
        row = max(on_cpu, key=lambda row: row["r"])
        found.append(
            f"**{row['speedup']:.2f}x** a dense MLP of {SHOWN}'s shape, one token at rank "
            f"{row['r']}, on a CPU (*measured*, {_machine('cpu')}, {row['dtype']})"
        )
    return found


def _three_numbers() -> list[str]:
    return ["\n".join(f"- {line}." for line in three_numbers())]


# --- quality


def _quality() -> list[str]:
    rows = [row for row in document("methods") or [] if row["method"] != "dense"]
    found = storages()
    if not rows or not found:
        return []
    ratios = list(dict.fromkeys(row["ratio"] for row in rows))
    labels = list(dict.fromkeys(map(method_label, rows)))
    of = {(method_label(row), row["ratio"]): row for row in rows}
    methods_table = table(
        ["method", *(f"{ratio:g}" for ratio in ratios)],
        [
            [label, *(_excess(of[label, ratio]["excess_log_ppl"]) for ratio in ratios)]
            for label in labels
        ],
    )
    storage_rows = document("storages")
    storages_table = table(
        ["ratio", "storage", "at equal", "bytes", "excess", "KL, nats"],
        [
            [
                f"{row['ratio']:g}",
                row["storage"],
                row["equal"],
                f"{row['bytes'] / row['dense_bytes']:.3f}",
                _excess(row["excess_log_ppl"]),
                f"{row['kl']:.5f}",
            ]
            for row in storage_rows
            if row["rounding"] in ("native", "feedback")
        ],
    )
    return [
        "## Quality against bytes",
        "Measured: the demo's model (`make demo`), MLPs compressed, no training afterwards. "
        "*Excess* is the logarithm of the perplexity less that of the dense model's. A model "
        "trained for minutes leaves more of its MLPs unused than a real one; expect larger "
        "excesses there.",
        _image("results-quality.svg", "excess log-perplexity against bytes, by method and storage"),
        "Excess by method and nominal ratio; ranks are whole blocks, so effective ratios differ a "
        "little, as the plot shows:",
        methods_table,
        "The default by storage, rounded as `compress` does; bytes are those of the MLPs as a "
        "share of the dense bf16 ones':",
        storages_table,
    ]


def _excess(value: float) -> str:
    return f"{value:.4f}"


# --- tokens per second


def _pareto() -> list[str]:
    points = tradeoffs()
    if not points:
        return []
    best = front(points)
    return [
        "## Tokens per second against quality",
        f"**Two models**: tokens/s are {SHOWN}'s, modelled on one {TARGET} core (MLPs compressed, "
        "NeuronMM's ranks); the quality is the demo model's at the same ratio and storage, "
        "measured, with its own ranks. What the large model would lose is not known here.",
        _image("results-pareto.svg", "modelled tokens per second against measured quality"),
        table(
            ["ratio", "storage", f"{SHOWN}, tokens/s, modelled", "demo, excess, measured", "front"],
            [
                [
                    f"{point.ratio:g}",
                    point.storage,
                    number(point.tokens_per_s),
                    _excess(point.excess),
                    "yes" if point in best else "",
                ]
                for point in points
            ],
        ),
    ]


def _whole_models() -> list[str]:
    found = [one for name in SHAPES for one in models(name)]
    if not found:
        return []
    first = found[0]
    return [
        "## Whole models",
        f"Modelled: one {first['target']} core a rank, batch {first['batch']}, a prompt of "
        f"{first['prompt']} tokens, then {first['new']} more; every launch traced on the simulated "
        "core. *Dense* is our own best dense bf16 kernels. Speed-ups are ranges over the DMA "
        "models. What a serving stack adds is left out: " + "; ".join(first["left_out"][:1]) + ".",
        _image("results-models.svg", "speed-up of decode and prefill, by model and setting"),
        setting_rows(found),
        *_published(found),
        *_components(),
    ]


def setting_rows(found: list[Row]) -> str:
    """A table of modelled documents, low rank beside dense, a row each."""
    head = (
        *("model", "compressed", "prefill ms", "dense", "speed-up"),
        *("ms/token", "dense", "speed-up", "tokens/s"),
    )
    return table(head, [_model_row(one) for one in found])


def _model_row(one: Row) -> list[str]:
    dense, own = variant(one, "dense"), variant(one, "low_rank")
    cells = [model_name(one), setting(one)]
    for phase in PHASES:
        speedup = one["speedups"]["ours"][phase]
        cells += [
            number(own["phases"][phase]["time_ms"]),
            number(dense["phases"][phase]["time_ms"]),
            span(speedup["low"], speedup["high"]),
        ]
    return [*cells, number(own["tokens_per_s"])]


def _published(found: list[Row]) -> list[str]:
    """The same beside NeuronMM's setting, of those that it can run."""
    compared = [one for one in found if "published" in one["speedups"]]
    if not compared:
        return []
    names = {"published": "theirs over theirs", "ours_over_published": "ours over theirs, dense"}
    return [
        "Beside the published setting, NeuronMM's kernels and its tutorial baseline, traced in the "
        "same run: *theirs over theirs* is what the paper states (low rank over a tutorial's dense "
        "matmul), *ours over theirs, dense* adds our kernels. The speed-ups above are over a dense "
        "baseline as good as we can make it.",
        table(
            ["model", "compressed", "speed-up", *(f"{p}, over the DMA models" for p in PHASES)],
            [
                [
                    *(model_name(one), setting(one), label),
                    *(_ends(one["speedups"][key][phase]) for phase in PHASES),
                ]
                for one in compared
                for key, label in names.items()
            ],
        ),
    ]


def _ends(speedup: Row) -> str:
    return f"{speedup['low']:.2f}-{speedup['high']:.2f}x"


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
        f"What a token of {SHOWN} waits for, in ms (modelled):",
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
    return (
        f"What binds at {label}: {' and '.join(shares)} of it. The output head, attention with its "
        "KV cache and the norms are what no compression of the layers' Linears touches."
    )


# --- kernels


def _figure1() -> list[str]:
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
        _image("results-figure1.svg", "time and HBM traffic against tokens"),
        "Time in ms, modelled; in brackets what the paper measured:",
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


def _clock() -> list[str]:
    found = read("clock")
    if found is None:
        return []
    rows: list[Row] = [row for run in found["runs"] for row in run["document"]]
    published = {"xuv": "neuronmm_published", "svd_mlp": "neuronmm_published_mlp"}
    of = {(row["target"], row["kernel"], row["M"], row["K"]): row for row in rows}
    lines: list[list[str]] = []
    for (target, kernel, M, K), row in of.items():
        theirs = of.get((target, published.get(kernel, ""), M, K))
        if theirs is None or theirs["times_ms"] is None:
            continue
        ratios = [theirs["times_ms"][model] / row["times_ms"][model] for model in DMA_MODELS]
        lines.append(
            [
                f"`{kernel}` [{M}, {K}], {target}",
                _ends({"low": min(ratios), "high": max(ratios)}),
                *(f"{ratio:.2f}" for ratio in ratios),
                span(row["time_low_ms"], row["time_high_ms"], 4, ""),
            ]
        )
    return [
        "## How far the clock may be wrong",
        "Modelled: our kernels beside NeuronMM's published ones at "
        f"{SHOWN}'s shape, ratio 0.2, under each of the simulated core's "
        "[two DMA models](neuroncore.md#what-is-modelled). They differ in what small DMAs cost, "
        "which public figures say least about: a claim here is a range.",
        table(
            [
                *("op [M, K], target", "speed-up: range over the DMA models"),
                *(f"`{model}`" for model in DMA_MODELS),
                "our ms",
            ],
            lines,
        ),
    ]


# --- measured here


def _cpu() -> list[str]:
    rows = _forward()
    if not rows:
        return []
    return [
        "## Ops on a CPU",
        f"Measured: {_machine('cpu')}, {rows[0]['threads']} threads, {rows[0]['dtype']}, medians "
        f"of paired rounds at {SHOWN}'s shape. *Ideal* is the ratio of parameters.",
        table(
            ["op", "M", "r", "dense ms", "two GEMMs ms", "op ms", "speed-up", "ideal"],
            [
                [
                    *(f"`{row['op']}`", row["M"], row["r"]),
                    *(f"{row[name]:.2f}" for name in ("dense_ms", "two_gemm_ms", "op_ms")),
                    *(f"{row[name]:.2f}" for name in ("speedup", "ideal_speedup")),
                ]
                for row in rows
            ],
        ),
    ]


def _forward() -> list[Row]:
    """The CPU's rows without gradients."""
    return [row for row in document("cpu") or [] if row["pass"] == FORWARD]


def _generate() -> list[str]:
    rows: list[Row] = document("generate") or []
    if not rows:
        return []
    return [
        "## Generating on a CPU",
        f"Measured: {_machine('generate')}, {rows[0]['threads']} threads, "
        f"{rows[0]['compute_dtype']}, Transformers' `generate` with a static cache, a prompt of "
        f"{rows[0]['prompt']} tokens, then {rows[0]['new']} more; speed-ups are medians of paired "
        "rounds, with their range. The demo's model is so small that most of a step is Python.",
        table(
            ["model", "compiled", "first token ms", "ms/token", "tokens/s", "decode speed-up"],
            [
                [
                    f"`{row['dir']}`",
                    "yes" if row["compiled"] else "no",
                    *(number(row[name]) for name in ("ttft_ms", "token_ms", "tokens_per_s")),
                    _measured_range(row["speedup"]),
                ]
                for row in rows
                if not row["failed"]
            ],
        ),
    ]


def _measured_range(speedup: Row | None) -> str:
    if speedup is None:
        return ""
    decode = speedup["decode"]
    return f"{decode['median']:.2f} ({decode['low']:.2f} to {decode['high']:.2f})"


# --- where from


def _sources() -> list[str]:
    rows: list[list[str]] = []
    for name, dataset in datasets().items():
        found: Any = read(name)
        if found is None:
            continue
        told = found["provenance"]
        more = len(dataset.commands) - 1
        rows.append(
            [
                f"[{name}](results/{name}.json)",
                f"`{dataset.commands[0]}`" + (f" and {more} more" if more else ""),
                "measured" if dataset.measured else _kind(name),
                told["date"],
                f"{told['seconds']:,}",
                f"`{told['commit']}`",
            ]
        )
    return [
        "## Where the numbers come from",
        "`make results` writes this page, its plots, the README's numbers and the gallery from the "
        "files below, in seconds; `make results-data` runs the commands that make the files, for "
        "an hour, and `make results-data DATA=cpu` those of one. Each file names its commands, the "
        "machine, the versions and the commit.",
        table(["data", "command, with `--json`", "times", "date", "took s", "commit"], rows),
        *_versions(),
    ]


def _kind(name: str) -> str:
    """Whether the times of a data set that measures none of this machine's are modelled."""
    return "none" if name in ("methods", "storages") else "modelled"


def _versions() -> list[str]:
    told: Iterable[Any] = [found["provenance"] for name in datasets() if (found := read(name))]
    lines = dict.fromkeys(
        f"{each['machine']}; "
        + ", ".join(f"{name} {number}" for name, number in each["versions"].items())
        for each in told
    )
    return ["\n".join(f"- {line}" for line in lines)]


def _machine(name: str) -> str:
    found = read(name)
    assert found is not None
    return found["provenance"]["machine"]


def _image(name: str, alt: str) -> str:
    return f"![{alt}](images/{name})" if name in plots() else ""
