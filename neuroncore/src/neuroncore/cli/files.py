"""Kernels and references in the user's files: found, imported and run as the user's code."""

import ast
import contextlib
import importlib.util
import itertools
import linecache
import os
import sys
import types
from collections.abc import Callable, Generator, Iterable, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, NamedTuple, TextIO, cast

from neuroncore import Kernel, NkiValidationError
from neuroncore import as_nki as simulator_as_nki
from neuroncore.cli.console import KernelError, Terminated, show_warning
from neuroncore.dropin import torch_on_cpu


class UsageError(ValueError):
    """A mistake of the command line, also where the user's code is running around it."""


class FunctionPath(NamedTuple):
    """A function in a file."""

    path: Path
    name: str

    def __str__(self) -> str:
        return f"{self.path.name}:{self.name}"


def place_of(text: str, what: str = "KERNEL") -> FunctionPath:
    """`FILE.py:NAME` or `PACKAGE.MODULE:NAME` as a place, which is looked up and not imported.

    Raises ValueError where it is none, or there is no such file; without a name it lists kernels.
    """
    file, _, name = text.rpartition(":")
    if file and name.isidentifier():
        return FunctionPath(python_file(file), name)
    if what == "KERNEL" and not file and Path(text).suffix in (".py", ".ipynb", ".neff"):
        from neuroncore.checks.lint_source import Sources

        kernels = Sources("0.7").read(str(python_file(text))).kernels()
        names = listed(kernel.name for _, kernel in kernels)
        there = f"name a kernel of it, as in FILE.py:KERNEL: {names}"
        raise ValueError(f"{text}: {there if names else _NO_KERNEL}")
    raise ValueError(f"{what} must be FILE.py:{what}, such as matmul.py:matmul; got {text!r}")


_NO_KERNEL = "it has no function under @nki.jit"


def python_file(text: str) -> Path:
    """The file of that path, or of the module with that dotted name. Raises ValueError."""
    path = Path(text)
    if path.suffix == ".ipynb":
        raise ValueError(f"{text} is a notebook; in it call neuroncore.install() before import nki")
    if path.suffix == ".neff":
        raise ValueError(f"{text} is a compiled kernel, which only a device runs; name its source")
    if path.is_file():
        return path.resolve()
    places: Any = [os.getcwd(), *sys.path]
    origin = None
    for end in (i for i, c in enumerate(text + ".") if c == "."):
        spec = PathFinder.find_spec(text[:end], places)
        if spec is None:
            raise ValueError(f"{text} is no file")
        places, origin = spec.submodule_search_locations or (), spec.origin
    if origin is None:
        raise ValueError(f"{text} is a package without code; name a module in it")
    return Path(origin).resolve()


def kernel_of(module: types.ModuleType, place: FunctionPath) -> Kernel:
    """The kernel, or plain function, of that name; also inside of a wrapper."""
    kernel = wrapped = getattr(module, place.name, None)
    while wrapped is not None:
        if isinstance(wrapped, Kernel):
            return wrapped
        kept = (getattr(wrapped, name, None) for name in ("__wrapped__", "kernel", "func"))
        wrapped = next((inner for inner in kept if callable(inner)), None)
    if isinstance(kernel, types.FunctionType):
        return Kernel(kernel)
    names = sorted(n for n, value in vars(module).items() if isinstance(value, Kernel))
    there = f"it has {listed(names)}" if names else _NO_KERNEL
    file = place.path.name
    if kernel is not None:
        raise UsageError(f"{place.name} of {file} is no kernel but {kernel!r:.40}; {there}")
    raise UsageError(f"{file} has no kernel {place.name}; {there}")


def function_of(module: types.ModuleType, place: FunctionPath) -> Callable[..., Any]:
    """The function of that name, which may be a kernel's own."""
    function = getattr(module, place.name, None)
    function = function.func if isinstance(function, Kernel) else function
    if not callable(function):
        raise UsageError(f"{place.path.name} has no function {place.name}")
    return function


def listed(names: Iterable[str]) -> str:
    """Names, with commas."""
    return ", ".join(names)


@contextlib.contextmanager
def as_nki() -> Generator[None]:
    """`import nki` and `neuronxcc.nki` find the simulator; torch-xla's device is the CPU."""
    from neuroncore.legacy import as_neuronxcc

    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(simulator_as_nki())
            stack.enter_context(torch_on_cpu())
        except RuntimeError as error:
            raise ValueError(str(error)) from error
        stack.enter_context(as_neuronxcc(show_warning))
        yield


@contextlib.contextmanager
def module(path: Path, constants: Mapping[str, Any] | None = None) -> Generator[types.ModuleType]:
    """The file as a module, imported as `python FILE.py` would: its directory is on the path.

    A file in a package is imported under its name there, and the package's folder is on the path.

    Args:
        path: the file.
        constants: values for names that the file assigns at its top level, in their place.
    """
    root = path.parent
    while (root / "__init__.py").is_file():
        root = root.parent
    parts = path.relative_to(root).with_suffix("").parts
    name = ".".join(parts) if len(parts) > 1 else f"_simulated_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path.name} is no Python file: it must end in .py")
    before, shadowed = list(sys.path), dict(sys.modules)
    sys.path.insert(0, str(root))
    try:
        for parent in itertools.accumulate(parts[:-1], "{}.{}".format):
            importlib.import_module(parent)
        if constants or getattr(sys.modules.get(name), "__file__", "") != str(path):
            sys.modules[name] = made = importlib.util.module_from_spec(spec)
            if constants:
                tree = _with_constants(ast.parse(path.read_bytes(), str(path)), path, constants)
                code = compile(tree, str(path), "exec", dont_inherit=True)
                exec(code, vars(made))  # noqa: S102 - the user's own file
            else:
                spec.loader.exec_module(made)
        yield sys.modules[name]
    finally:
        top = name.partition(".")[0]
        for imported in [n for n in sys.modules if n.partition(".")[0] == top]:
            del sys.modules[imported]
            if imported in shadowed:  # another file of that name, around this one
                sys.modules[imported] = shadowed[imported]
        sys.path[:] = before


def _with_constants(tree: ast.Module, path: Path, constants: Mapping[str, Any]) -> ast.Module:
    assignments = dict.fromkeys(constants, 0)
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.AnnAssign) and node.value is not None:
            targets = [node.target]
        if len(targets) != 1 or not isinstance(targets[0], ast.Name):
            continue
        name = targets[0].id
        if name in constants and isinstance(node, ast.Assign | ast.AnnAssign):
            assignments[name] += 1
            node.value = ast.copy_location(ast.Constant(constants[name]), node)
    for name, count in assignments.items():
        if count != 1:
            times = "never" if count == 0 else f"{count} times"
            raise UsageError(
                f"--sweep {name}: it is no parameter of the kernel, and {path.name} assigns it "
                f"{times} at its top level; it must do so once"
            )
    return tree


class _Borrowed:
    """A stream that whoever borrows it cannot close."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def close(self) -> None:
        """Leave it open."""


@contextlib.contextmanager
def contained(is_quiet: bool) -> Generator[None]:
    """Keep what the user's code does to this process from what comes after it.

    It may close stdout and stderr and change the working directory. What it prints goes to stdout;
    `is_quiet` keeps that for a document and sends to stderr what is printed, past Python's streams,
    too.
    """
    directory = os.open(".", os.O_RDONLY)
    copies = {number: os.dup(number) for number in (1, 2) if _is_open(number)}
    if is_quiet and len(copies) == 2:
        os.dup2(2, 1)
    prints, errors = (
        cast("TextIO", _Borrowed(stream))
        for stream in (sys.stderr if is_quiet else sys.stdout, sys.stderr)
    )
    try:
        with contextlib.redirect_stdout(prints), contextlib.redirect_stderr(errors):
            yield
    finally:
        for number, copy in copies.items():
            os.dup2(copy, number)
            os.close(copy)
        os.fchdir(directory)
        os.close(directory)


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


_ON_DEVICE = "; it runs on a device alone: call the kernel with CPU tensors or NumPy arrays"
_ABSENT = {
    "torch_xla": _ON_DEVICE,
    "torch_neuronx": _ON_DEVICE,
    "jax_neuronx": _ON_DEVICE,
}
"""What to say of packages of the Neuron SDK that are not there."""


@contextlib.contextmanager
def reported(path: Path) -> Generator[None]:
    """Turn what the user's code raises into a KernelError of one line with its file and line."""
    try:
        yield
    except (UsageError, KernelError):
        raise
    except NkiValidationError as error:
        raise KernelError(str(error)) from error
    except MemoryError as error:
        raise UsageError("no memory left for the values; use --trace-only") from error
    except (KeyboardInterrupt, Terminated):
        raise
    except BaseException as error:
        line = _innermost_line(error, path)
        where = f" [{path.name}:{line}]" if line else ""
        if not where and not isinstance(error, SyntaxError):
            raise  # not from there: a defect of the simulator
        try:
            what = str(error)
        except Exception:
            what = "an error that has no text"
        if isinstance(error, AssertionError) and not what:
            what = linecache.getline(str(path), line).strip()
        if isinstance(error, ImportError):
            what += _ABSENT.get((error.name or "").partition(".")[0], "")
        raise KernelError(f"{type(error).__name__}: {what}{where}") from error


def _innermost_line(error: BaseException, path: Path) -> int:
    """The line of the innermost frame in the file, or 0."""
    line = 0
    frame = error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_code.co_filename == str(path):
            line = frame.tb_lineno
        frame = frame.tb_next
    return line
