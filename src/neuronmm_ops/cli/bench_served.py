"""Tables of `bench model` of decode as served, next to the modelled times."""

from collections.abc import Iterator
from typing import Any

from neuroncore.cli.console import show_table, stdout
from neuronmm_ops.cli.bench_ranks import VARIANTS
from neuronmm_ops.estimate.served import FURTHER_US, TOKEN_US, as_served, speedup_as_served

_COLUMNS = (
    *("", "ms", "as\nserved", "range", "tokens/s\nserved"),
    *("over\ndense", "as\nserved", "range"),
)


def show_served(documents: list[dict[str, Any]]) -> None:
    """Print a token's time and its ratio to dense, each modelled and as served; a table a tp."""
    for document in documents:
        named = [*_decodes(document["variants"])]
        dense = named[0][1]
        rows = [[name, *_times(decode, document["batch"])] for name, decode in named]
        for row, (_, decode) in zip(rows[1:], named[1:], strict=True):
            row += _ratios(decode, dense)
        title = f"A token, tp {document['tp']}: modelled, and as served"
        show_table(_COLUMNS, rows, left=[""], title=title)
    stdout.print(
        f"As served: a token costs {TOKEN_US.middle:g} us more ({TOKEN_US.low:g} to "
        f"{TOKEN_US.high:g}), and each launch or collective of it {FURTHER_US.middle:g} "
        f"({FURTHER_US.low:g} to {FURTHER_US.high:g}): what published times per token have beyond "
        "our models. Prefill has no such column: what is missing there grows with the "
        "prompt, and launches do not explain it."
    )


def _decodes(variants: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each variant's decode phase by name, and that of layers that share launches."""
    for variant in variants:
        name, decode = VARIANTS[variant["name"]], variant["phases"]["decode"]
        yield name, decode
        one = decode.get("one_launch", {})  # recorded documents may be older
        if "times_ms" in one:
            yield f"{name}, layers in one launch", one


def _times(decode: dict[str, Any], batch: int) -> list[str]:
    served = as_served(decode, batch)
    return [
        *(f"{decode['time_ms']:.3g}", f"{served['time_ms']:.3g}"),
        f"{served['time_low_ms']:.3g}-{served['time_high_ms']:.3g}",
        f"{served['tokens_per_s']:.4g}",
    ]


def _ratios(decode: dict[str, Any], dense: dict[str, Any]) -> list[str]:
    served = speedup_as_served(decode, dense)
    return [
        f"{dense['time_ms'] / decode['time_ms']:.2f}x",
        f"{served['middle']:.2f}x",
        f"{served['low']:.2f}-{served['high']:.2f}",
    ]
