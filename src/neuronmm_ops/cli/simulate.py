"""`simulate`: run a kernel of the user's file on the simulated NeuronCore and print its profile."""

import argparse
import contextlib
import importlib.util
import inspect
import sys
import types
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from neuronmm_ops.cli.console import KernelError, check_output
from neuronmm_ops.cli.kernel_arguments import Tensor, read_argument
from neuronmm_ops.cli.parser import add_command
from neuronmm_ops.hardware import MODELS, resolve_target
from neuronmm_ops.neuroncore import Kernel, NkiValidationError, Profile, TensorSpec, as_nki
from neuronmm_ops.neuroncore import kernel as kernels
from neuronmm_ops.neuroncore.profile import plot

_DESCRIPTION = """\
Run an NKI kernel on the simulated NeuronCore and print what it moves, holds and costs; every time
is modelled. The command imports FILE.py and calls KERNEL in it: it runs the code of that file, as
`python FILE.py` would. `import nki` in it finds the simulator."""
_ARGUMENT = """\
a parameter of the kernel: DTYPE[SHAPE] makes a random tensor (x=bf16[1024,8192]; without values
under --trace-only), anything else is a compile-time value: a number, true, false, none, a tuple
or a text"""


def add(commands: Any) -> None:
    """Add the command to the parser."""
    command = add_command(
        commands, "simulate", _simulate, print, "run an NKI kernel; time is modelled"
    )
    command.description = _DESCRIPTION
    command.add_argument("kernel", metavar="FILE.py:KERNEL", help="its code runs on this machine")
    command.add_argument(
        "--arg", action="append", default=[], metavar="NAME=VALUE", dest="arguments", help=_ARGUMENT
    )
    command.add_argument(
        "--target", help="trn1, trn2 or trn3 (default: of this machine, else trn2)"
    )
    command.add_argument(
        "--lnc", type=int, choices=(1, 2), help="cores (default: the kernel's own)"
    )
    command.add_argument(
        "--cost-model",
        choices=MODELS,
        default="calibrated",
        help="with the fitted matmul overhead (default), without it, or with it only "
        "where the stationary operand changes",
    )
    command.add_argument(
        "--trace-only", action="store_true", help="compute no values: full sizes take seconds"
    )
    command.add_argument("--seed", type=int, default=0, help="of the random tensors (default 0)")
    command.add_argument("--perfetto", type=Path, metavar="OUT.json", help="write a Perfetto trace")
    command.add_argument(
        "--plot", type=Path, metavar="OUT.png", help="draw timeline and roofline (matplotlib)"
    )


def _simulate(options: argparse.Namespace) -> Any:
    path, name = _file_and_name(options.kernel)
    resolve_target(options.target)
    given = [read_argument(text) for text in options.arguments]
    values = dict(given)
    for parameter in values:
        if [n for n, _ in given].count(parameter) > 1:
            raise ValueError(f"--arg {parameter} is given twice")
    if options.seed < 0:
        raise ValueError(f"--seed must not be negative, got {options.seed}")
    _check_outputs(options)
    # A kernel's own prints must not mix with the document.
    out = contextlib.redirect_stdout(sys.stderr) if options.json else contextlib.nullcontext()
    with out, _as_nki(), _reported(path), _module(path) as module:
        kernel = _kernel(module, path, name)
        arguments = _arguments(kernel, name, values, options)
        profile = _run(kernel, arguments, options)
    if options.perfetto is not None:
        profile.save_perfetto(options.perfetto)
    if options.plot is not None:
        profile.plot(options.plot)
    return profile.to_json() if options.json else str(profile)


def _run(kernel: Kernel, arguments: dict[str, Any], options: argparse.Namespace) -> Profile:
    if options.lnc is not None:
        kernel = kernel[options.lnc]
    mode = "trace" if options.trace_only else "execute"
    return kernels.run(
        kernel,
        (),
        arguments,
        target=options.target,
        mode=mode,
        model=options.cost_model,
        seed=options.seed,
    ).profile


# --- what is asked for


class _UsageError(ValueError):
    """A mistake of the command line, also where the user's code is running around it."""


def _file_and_name(text: str) -> tuple[Path, str]:
    file, _, name = text.rpartition(":")
    if not file or not name.isidentifier():
        raise ValueError(f"KERNEL must be FILE.py:KERNEL, such as matmul.py:matmul; got {text!r}")
    path = Path(file)
    if not path.is_file():
        raise ValueError(f"{file} is no file")
    return path.resolve(), name


def _check_outputs(options: argparse.Namespace) -> None:
    """Find what would fail after the run before it."""
    for path in (options.perfetto, options.plot):
        if path is not None:
            check_output(path)
    if options.plot is not None:
        plot.check_format(options.plot)


def _kernel(module: types.ModuleType, path: Path, name: str) -> Kernel:
    found = getattr(module, name, None)
    if isinstance(found, Kernel):
        return found
    if isinstance(found, types.FunctionType):
        return Kernel(found)
    names = sorted(n for n, value in vars(module).items() if isinstance(value, Kernel))
    there = f"it has {', '.join(names)}" if names else "it has no function under @nki.jit"
    if found is not None:
        raise _UsageError(f"{name} of {path.name} is no kernel but {found!r:.40}; {there}")
    raise _UsageError(f"{path.name} has no kernel {name}; {there}")


def _arguments(
    kernel: Kernel, name: str, values: dict[str, Any], options: argparse.Namespace
) -> dict[str, Any]:
    parameters = inspect.signature(kernel.func).parameters.values()
    variadic = {p.kind for p in parameters}
    known = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    unknown = [n for n in values if n not in known]
    if unknown and inspect.Parameter.VAR_KEYWORD not in variadic:
        raise _UsageError(
            f"kernel {name} has no parameter {_names(unknown)}; it has {_names(known) or 'none'}"
        )
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    missing = [
        p.name
        for p in parameters
        if p.default is p.empty and p.kind not in optional and p.name not in values
    ]
    if missing:
        raise _UsageError(f"kernel {name} needs --arg {_names(missing)}")
    random = np.random.default_rng(options.seed)
    made: dict[str, Any] = {}
    for key, value in values.items():
        if not isinstance(value, Tensor):
            made[key] = value
        elif options.trace_only:
            made[key] = TensorSpec(value.shape, value.dtype)
        else:
            made[key] = value.values(random)
    return made


def _names(names: Iterable[str]) -> str:
    return ", ".join(names)


# --- the user's code


@contextlib.contextmanager
def _as_nki() -> Generator[None, None, None]:
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(as_nki())
        except RuntimeError as error:
            raise ValueError(str(error)) from error
        yield


@contextlib.contextmanager
def _module(path: Path) -> Generator[types.ModuleType, None, None]:
    """The file as a module, imported as `python FILE.py` would: its directory is on the path."""
    name = f"_simulated_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise _UsageError(f"{path.name} is no Python file: it must end in .py")
    module = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    sys.path.insert(0, str(path.parent))
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        del sys.modules[name]
        sys.path[:] = before


@contextlib.contextmanager
def _reported(path: Path) -> Generator[None, None, None]:
    """Turn what the user's code raises into a KernelError of one line with its file and line."""
    try:
        yield
    except _UsageError:
        raise
    except NkiValidationError as error:
        raise KernelError(str(error)) from error
    except MemoryError as error:
        raise _UsageError("no memory left for the values; use --trace-only") from error
    except (Exception, SystemExit) as error:
        where = _innermost_line(error, path)
        if not where and not isinstance(error, SyntaxError):
            raise  # not from there: a defect of the simulator
        raise KernelError(f"{type(error).__name__}: {error}{where}") from error


def _innermost_line(error: BaseException, path: Path) -> str:
    """` [file:line]` of the innermost frame in the file, or nothing."""
    found = ""
    frame = error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_code.co_filename == str(path):
            found = f" [{path.name}:{frame.tb_lineno}]"
        frame = frame.tb_next
    return found
