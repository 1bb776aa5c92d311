"""docs/results.md, from the data sets alone."""

from collections.abc import Iterable
from typing import Any

from measured import cpu, generation, gpu, quality
from modelled import clock, figure1, pareto, whole_models
from sources import Dataset, datasets, read
from writing import MARK, page, table

from neuronmm_ops.models import SHAPES


def results_page() -> str:
    """The page."""
    return page(
        MARK,
        "# Results",
        "Every number comes from a file that a command wrote, and is either *measured* or "
        "*modelled* (kernels traced on the simulated core, never run on a device). [Where the "
        "numbers come from](#where-the-numbers-come-from) has the commands, [benchmarks]"
        "(benchmarks.md) the method, [the gallery](gallery/index.md) a page per model, [the first "
        "page](index.md) the numbers of one model.",
        *quality(),
        *pareto(),
        *whole_models(),
        *figure1(),
        *clock(),
        *cpu(),
        *gpu(),
        *generation(),
        *_sources(),
    )


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
    told: list[Any] = [data["provenance"] for one in members if (data := read(one.name))]
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
    quality = ("methods", "storages", "divergence", "stories", "residuals", "engines")
    return "none" if name in quality else "modelled"


def _versions() -> list[str]:
    told: Iterable[Any] = [data["provenance"] for name in datasets() if (data := read(name))]
    lines = dict.fromkeys(
        f"{each['machine']}; "
        + ", ".join(f"{name} {number}" for name, number in each["versions"].items())
        for each in told
    )
    return ["\n".join(f"- {line}" for line in lines)]
