"""Make the page of results and its gallery from committed data, or the data from commands.

`python examples/results` writes docs/results.md, docs/gallery, their plots and the README's three
numbers in seconds; `--data` runs the commands that the data comes from, for hours.
"""

import argparse
import sys

from rich.console import Console
from sources import datasets, make


def main() -> None:
    known = datasets()
    parser = argparse.ArgumentParser(prog="python examples/results", description=__doc__)
    parser.add_argument(
        "--data",
        nargs="*",
        choices=known,
        metavar="NAME",
        help=f"run the commands of these data sets instead; default all: {', '.join(known)}",
    )
    arguments = parser.parse_args()
    console = Console(soft_wrap=True, stderr=True)
    if arguments.data is not None:
        for name in arguments.data or known:
            dataset = known[name]
            console.print(f"{name}: about {dataset.minutes:g} minutes …")
            try:
                make(dataset)
            except (OSError, RuntimeError, ValueError) as error:
                sys.exit(f"{name}: {error}")
        return


if __name__ == "__main__":
    sys.exit(main())
