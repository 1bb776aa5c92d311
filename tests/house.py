"""`make house`: what one has to read, and to wait for, to change something; and the limit of each.

Run it as `python tests/house.py`. CPU seconds are the least of three runs.
"""

import ast
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
SOURCES = ("src", "neuroncore/src", "benchmarks")
MAX_PARAMETERS = 9


class Limit(NamedTuple):
    measure: Callable[[], float]
    most: float


def lines(*folders: str) -> int:
    """Of Python files below folders."""
    return sum(len(path.read_text().splitlines()) for path in files(*folders))


def files(*folders: str) -> Iterator[Path]:
    for folder in folders:
        yield from sorted((ROOT / folder).rglob("*.py"))


def long_signatures() -> list[str]:
    """Each function of the sources with more than `MAX_PARAMETERS`, `self` not counted."""
    return [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
        for path in files(*SOURCES)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and parameters(node.args) > MAX_PARAMETERS
    ]


def parameters(arguments: ast.arguments) -> int:
    names = [each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")])


def words(folder: str, pages: str = "*.md") -> int:
    """Of a folder's pages, those below it (the gallery) excepted: they are generated."""
    return sum(len(page.read_text().split()) for page in (ROOT / folder).glob(pages))


def cpu_seconds(*arguments: str) -> float:
    """The least CPU time of three runs of Python."""

    def spent() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    times: list[float] = []
    for _ in range(3):
        before = spent()
        subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
        times.append(spent() - before)
    return min(times)


SIZES = {
    "lines of src/neuronmm_ops": Limit(lambda: lines("src/neuronmm_ops"), 30_000),
    "lines of neuroncore/src": Limit(lambda: lines("neuroncore/src"), 14_500),
    "lines of tests": Limit(lambda: lines("tests", "neuroncore/tests"), 40_000),
    f"functions of more than {MAX_PARAMETERS} parameters": Limit(
        lambda: len(long_signatures()), 15
    ),
    "words of docs": Limit(lambda: words("docs"), 40_000),
    "words of neuroncore/docs": Limit(
        lambda: words("neuroncore/docs") - words("neuroncore/docs", "rules.md"), 12_000
    ),
    "words of neuroncore/docs/rules.md": Limit(lambda: words("neuroncore/docs", "rules.md"), 8_000),
}
TIMES = {
    "CPU-s of from neuroncore import simulate": Limit(
        lambda: cpu_seconds("-c", "from neuroncore import simulate"), 0.5
    ),
    "CPU-s of neuronmm --version": Limit(
        lambda: cpu_seconds("-m", "neuronmm_ops_command", "--version"), 0.3
    ),
    "CPU-s of neuronmm plan --model Llama-3.2-1B": Limit(
        lambda: cpu_seconds("-m", "neuronmm_ops_command", "plan", "--model", "Llama-3.2-1B"), 1.5
    ),
}


def main() -> None:
    for name, limit in (SIZES | TIMES).items():
        value = limit.measure()
        missed = "" if value <= limit.most else "  missed"
        print(f"{name:<44} {value:>9,.6g}  of {limit.most:>9,g}{missed}")


if __name__ == "__main__":
    main()
