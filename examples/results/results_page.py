"""docs/results.md, from the data sets alone."""

from collections.abc import Iterable
from typing import Any

from measured import cpu, forward, generation, quality
from modelled import clock, figure1, pareto, whole_models
from selection import Row, document, gain_as_served, method_label, setting
from sources import SHOWN, Dataset, datasets, machine_of, model_command, read
from writing import MARK, page, ranged, span, table

from neuronmm_ops.models import SHAPES

README_RATIO = 0.4
"""Of the demo's model, in the README's first number."""
EARLIER_SHARE = 0.66
"""The first number of the data of 2026-11-22: threads make each training another model."""
README_SETTING = (0.2, "fp8", "all-linear")
"""Of the large model, in its second."""


def results_page() -> str:
    """The page."""
    return page(
        MARK,
        "# Results",
        "Every number comes from a file that a command wrote, and is either *measured* or "
        "*modelled* (kernels traced on the simulated core, never run on a device). [Where the "
        "numbers come from](#where-the-numbers-come-from) has the commands, [benchmarks]"
        "(benchmarks.md) the method, and [the gallery](gallery/index.md) a page per model.",
        *_three_numbers(),
        *quality(),
        *pareto(),
        *whole_models(),
        *figure1(),
        *clock(),
        *cpu(),
        *generation(),
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
            f"MLP parameters removed (*measured*, the demo's model; {EARLIER_SHARE:.2f}x after "
            "another training)"
        )
    one = document(f"model_{SHOWN}", model_command(SHOWN, *README_SETTING))
    if one:
        speedup = one["speedups"]["ours"]["decode"]
        found.append(
            f"**{speedup['middle']:.2f}x** the tokens per second of our best dense "
            f"bf16 kernels: decode of all of {SHOWN}, {setting(one)} (*modelled*, one "
            f"{one['target']} core, batch 1; {span(speedup['low'], speedup['high'])} "
            f"over all that is not known){_rivals(one)}; {gain_as_served(one)} with what a launch "
            "costs where dense models were served"
        )
    on_cpu = [row for row in forward() if (row["op"], row["M"]) == ("svd_mlp", 1)]
    if on_cpu:
        row = max(on_cpu, key=lambda row: row["r"])
        found.append(
            f"**{row['speedup']:.2f}x** a dense MLP of {SHOWN}'s shape, one token at rank "
            f"{row['r']}, on a CPU (*measured*, {machine_of('cpu')}, {row['dtype']}); both "
            "as Transformers multiplies: a dense weight that oneDNN packs is faster than both"
        )
    return found


def _rivals(one: Row) -> str:
    """What one byte and rank each give of it, and what dense weights in one byte give."""
    storage, rank = (one["speedups"][kind]["decode"] for kind in ("storage", "rank"))
    ends = f"; dense weights in fp8 give {ranged(storage)}, "
    rival = document("rival")
    if rival is not None:
        whole = rival["speedups"]["storage"]["decode"]
        ends += (
            f"and {ranged(whole)} with the output head in fp8 as well, which "
            "this package does not store yet; "
        )
    return ends + f"rank adds {ranged(rank)} at equal storage"


def _three_numbers() -> list[str]:
    return ["\n".join(f"- {line}." for line in three_numbers())]


# --- where from


def _sources() -> list[str]:
    sets = [dataset for name, dataset in datasets().items() if read(name)]
    families: dict[str, list[Dataset]] = {_family(dataset.name): [] for dataset in sets}
    for dataset in sets:
        families[_family(dataset.name)].append(dataset)
    return [
        "## Where the numbers come from",
        "`make results` writes this page, its plots, the README's numbers and the gallery from the "
        "files below, in seconds; `make results-data` runs the commands that make the files, for "
        "an hour, and `make results-data DATA=cpu` those of one. Each file names its commands, the "
        "machine, the versions and the commit.",
        table(
            ["data", "command", "times", "date", "commit"],
            [_source_row(name, members) for name, members in families.items()],
        ),
        *_versions(),
    ]


def _family(name: str) -> str:
    """The name of a data set without a model's: `model_` and `plan_` have one for each."""
    kind, _, model = name.partition("_")
    return f"{kind}_MODEL" if model in SHAPES else name


def _source_row(name: str, members: list[Dataset]) -> list[str]:
    first = members[0]
    more = sum(len(dataset.commands) for dataset in members) - 1
    told: list[Any] = [found["provenance"] for one in members if (found := read(one.name))]
    link = (
        f"[{name}](results/{name}.json)" if len(members) == 1 else f"{name}, {len(members)} files"
    )
    return [
        link,
        f"`{' '.join(first.commands[0].split()[:3])} ...`" + (f" and {more} more" if more else ""),
        "measured" if first.measured else _kind(name),
        " ".join(sorted({each["date"] for each in told})),
        " ".join(f"`{commit}`" for commit in sorted({each["commit"] for each in told})),
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
