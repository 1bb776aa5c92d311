"""Make the page of results and its gallery from committed data, or the data from commands.

`python examples/results` writes docs/results.md, docs/gallery, their plots and the blocks of
other pages in seconds; `--data` runs the commands that the data come from, for an hour.
"""

import argparse
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))  # where the package `benchmarks` is
from blocks import filled_pages
from gallery import gallery
from plots import draw
from results_page import results_page
from rich.console import Console
from sources import DATA, ROOT, datasets, make

from neuroncore.files import replacing


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
    try:
        if arguments.data is None:
            write(console)
            return
        for name in arguments.data or known:
            console.print(f"{name}: about {known[name].minutes:g} minutes …")
            make(known[name])
    except (OSError, RuntimeError, ValueError) as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit("interrupted; what was finished is kept")


def pages() -> dict[Path, str]:
    """Every generated text by its file."""
    docs = DATA.parent
    gallery_pages = {docs / "gallery" / name: text for name, text in gallery().items()}
    return {docs / "results.md": results_page(), **filled_pages(), **gallery_pages}


def write(console: Console) -> None:
    """Write the pages and draw the plots."""
    texts = pages()
    (DATA.parent / "gallery").mkdir(exist_ok=True)
    for path, text in texts.items():
        with replacing(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
    written = [*texts, *draw()]
    console.print(f"{len(written)} files below {ROOT}")


if __name__ == "__main__":
    main()
