"""Blocks of hand-written pages that data sets fill, each between two marks."""

import re
from collections.abc import Callable
from pathlib import Path

from command_line import argument_lists
from in_sources import in_sources
from modelled import (
    aws,
    course,
    held_out,
    nkibench,
    paper_run,
    published,
    served,
    stored_times,
    whole,
)
from readme import block
from refusals import lint_rules, run_rules
from sources import ROOT
from tensor_parallel import layouts, speedups, traffic_of_ranks

BLOCKS: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"results": lambda: block("docs/")},
    "docs/benchmarks.md": {"course": course},
    "docs/cli.md": argument_lists(),
    "docs/engines.md": {"in-sources": in_sources},
    "docs/index.md": {"results": lambda: block("")},
    "docs/tensor-parallel.md": {"traffic": traffic_of_ranks},
    "docs/whole-model.md": {
        "whole": whole,
        "paper-run": paper_run,
        "aws": aws,
        "served": served,
        "layouts": layouts,
        "divided": speedups,
    },
    "neuroncore/README.md": {"held-out": held_out},
    "neuroncore/docs/index.md": {"held-out": held_out},
    "neuroncore/docs/rules.md": {"lint": lint_rules, "run": run_rules},
    "neuroncore/docs/modelled.md": {
        "published": published,
        "stored": stored_times,
        "nkibench": nkibench,
    },
}
"""What fills each block of each page, by the names in its marks."""
_BLOCK = re.compile(
    r"(?P<begin><!-- (?P<name>[a-z-]+): written by `make results` -->\n)"
    r".*?(?P<end><!-- /(?P=name) -->)",
    re.DOTALL,
)


def filled(page: str, text: str) -> str:
    """A page's text with its blocks written anew.

    Raises:
        ValueError: the page has other blocks than `BLOCKS` says.
    """
    wanted = BLOCKS[page]
    names = [match["name"] for match in _BLOCK.finditer(text)]
    if sorted(names) != sorted(wanted):
        raise ValueError(f"{page} must have the blocks {sorted(wanted)}, each once; got {names}")
    return _BLOCK.sub(lambda m: f"{m['begin']}\n{wanted[m['name']]()}\n\n{m['end']}", text)


def filled_pages() -> dict[Path, str]:
    """Every page with blocks, written anew."""
    return {ROOT / page: filled(page, (ROOT / page).read_text(encoding="utf-8")) for page in BLOCKS}
