"""What NKI's front ends refuse: the simulator runs any Python, the real compiler does not.

`lint` reads source and runs nothing. It follows the functions and classes that a kernel reaches,
also into other modules of its package or folder, never into NKI or installed packages.
"""

import inspect
import os
from collections.abc import Callable

from neuroncore.checks.lint_rules import LINES, RULES, Line, LintError
from neuroncore.checks.lint_scope import Checker
from neuroncore.checks.lint_source import Definition, FunctionNode, Sources, reached

__all__ = ["LINES", "RULES", "Line", "LintError", "lint", "lint_file"]


def lint(
    kernel: Callable[..., object] | str | os.PathLike[str], nki: Line = "0.7"
) -> list[LintError]:
    """Return what a line of NKI refuses in a kernel, ordered by file and line.

    `kernel` is a function, an object that holds one as `func`, or the path of a Python file, in
    which every function decorated with `jit` is a kernel. Functions that a kernel reaches are read
    too, and classes with all their methods and base classes; other code at module level is not,
    imports of neuronxcc excepted. `nki` is "0.6", for its parser and those before it, or "0.7".

    Raises:
        ValueError: the source cannot be read, or the line is neither.
    """
    if nki not in LINES:
        raise ValueError(f"nki must be one of {', '.join(LINES)}; got {nki!r}")
    if isinstance(kernel, (str, os.PathLike)):
        return lint_file(os.fspath(kernel), nki)
    function = inspect.unwrap(getattr(kernel, "func", kernel))
    if not inspect.isfunction(function):
        name = type(kernel).__name__
        raise ValueError(f"cannot lint a {name}; pass a function, a kernel or the path of a file")
    sources = Sources(nki, imported=True)
    try:
        lines, _ = inspect.findsource(function)
        source = sources.add(inspect.getsourcefile(function) or "<unknown>", "".join(lines))
        node = source.find(function.__name__, function.__code__.co_firstlineno)
    except (OSError, LookupError):
        problem = f"the source of {function.__name__} is not available"
        raise ValueError(f"{problem}; define it with def in a file") from None
    return findings(sources, [(source, node)])


def lint_file(path: str, nki: Line, name: str = "") -> list[LintError]:
    """As `lint` of a file, in which the function of that name is a kernel, decorated or not."""
    sources = Sources(nki)
    source = sources.read(path)
    kernels, named = source.kernels(), source.definitions.get(name)
    if isinstance(named, FunctionNode) and (source, named) not in kernels:
        kernels.append((source, named))
    return findings(sources, kernels)


def findings(sources: Sources, kernels: list[Definition]) -> list[LintError]:
    """What is refused in kernels, ordered by file and line."""
    definitions, bodies = reached(kernels)
    for source, scope in definitions:
        on_device = (source, scope) in bodies
        Checker(source, scope, on_device).check(is_kernel=(source, scope) in kernels)
    return sorted(sources.found)
