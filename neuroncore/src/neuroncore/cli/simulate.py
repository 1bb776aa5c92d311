"""`simulate`: run kernels of the user's files on the simulated NeuronCore, print their profiles."""

from __future__ import annotations

import argparse
import contextlib
import signal
import threading
import time
from collections.abc import Generator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neuroncore import Budget
from neuroncore.cli.console import check_output, show_warning
from neuroncore.cli.parser import add_command
from neuroncore.hardware import DMA_MODELS, MODELS, resolve_target
from neuroncore.uncertainty import assuming

if TYPE_CHECKING:
    from neuroncore.cli.runs import LaunchOptions, Run

_DESCRIPTION = """\
Run an NKI kernel on the simulated NeuronCore and print what it moves, holds and costs; every time
is modelled. The command imports FILE.py and calls KERNEL in it: it runs the code of that file, as
`python FILE.py` would. `import nki` in it finds the simulator."""
_ARGUMENT = """\
a parameter of the kernel: DTYPE[SHAPE] makes a random tensor (x=bf16[1024,8192]; without values
under --trace-only), FILE.npy, FILE.npz:NAME or FILE.safetensors:NAME reads one (DTYPE[FILE.npy]
converts it), anything else is a compile-time value: a number, true, false, none, a tuple or a text.
FILE.npz alone gives all that it holds, FILE.py:FUNCTION those of the dict that it returns"""


def add(commands: Any) -> None:
    """Add the command to the parser."""
    description = "run an NKI kernel; time is modelled"
    example = "kernel.py:scale --arg 'x=bf16[128,512]'"
    command = add_command(commands, "simulate", _simulate, _show, description, example=example)
    command.description = _DESCRIPTION
    command.add_argument(
        "kernels",
        nargs="+",
        metavar="FILE.py:KERNEL",
        help="file, or module of a package, and function; its code runs on this machine",
    )
    many = command.add_mutually_exclusive_group()
    for options, to in (_ARGUMENTS, command), (_MANY, many), (_OPTIONS, command):
        for name, settings, text in options:
            to.add_argument(name, help=text, **settings)


def add_options(command: argparse.ArgumentParser, names: Sequence[str]) -> None:
    """Add those of the options that have the names, and of the others what `launch_of` reads."""
    for option, settings, text in (*_ARGUMENTS, *_MANY, *_OPTIONS):
        name = option.removeprefix("--")
        if name in names:
            command.add_argument(option, help=text, **settings)
        else:
            is_flag = settings.get("action") == "store_true"
            default = settings.get("default", False if is_flag else None)
            command.set_defaults(**{settings.get("dest", name.replace("-", "_")): default})


_OptionTable = tuple[tuple[str, dict[str, Any], str], ...]
_LIST = {"action": "append", "default": []}
_FLAG = {"action": "store_true"}
_BUDGET = Budget()
_JSON = {"type": Path, "metavar": "OUT.json"}
_ARGUMENTS: _OptionTable = (
    ("--arg", {**_LIST, "metavar": "NAME=VALUE", "dest": "arguments"}, _ARGUMENT),
)
_MANY: _OptionTable = (
    ("--compare", _FLAG,
     "compare several kernels, each with the --arg that it takes; ratios are to the first"),
    ("--sweep", {**_LIST, "metavar": "NAME=V,V,...", "dest": "sweeps"},
     "run once for each value of a parameter, or of a constant of the file; given more than once, "
     "for each combination"),
)  # fmt: skip
_OPTIONS: _OptionTable = (
    ("--target", {}, "trn1, trn2 or trn3 (default: of this machine, else trn2)"),
    ("--lnc", {"type": int, "choices": (1, 2)}, "cores (default: the kernel's own)"),
    ("--cost-model", {"choices": MODELS, "default": "calibrated"},
     "matmul issue overhead: measured (default), none, or only where the stationary operand "
     "changes"),
    ("--dma-model", {"choices": DMA_MODELS, "default": DMA_MODELS[0]},
     "cost of small DMAs: a queue starts one per interval (default), or short rows move slowly; "
     "the profile has the range of both"),
    ("--assume", {**_LIST, "metavar": "NAME"},
     "take the other end of what is not known, a name of the report's last section; may be given "
     "more than once"),
    ("--cores-busy", {"type": int, "default": 1, "metavar": "N"},
     "busy cores that share the chip's HBM (default 1)"),
    ("--trace-only", _FLAG, "compute no values: full sizes take seconds"),
    ("--seed", {"type": int, "default": 0}, "seed of the random tensors (default 0)"),
    ("--schedules", {"type": int, "default": 0, "metavar": "N"},
     "run it N times more, its cores in other orders; a value that changes is a race"),
    ("--strict", _FLAG, "exit with 1 if the kernel causes a warning"),
    ("--max-instructions", {"type": int, "default": _BUDGET.instructions, "metavar": "N"},
     f"stop a kernel after this many instructions (default {_BUDGET.instructions:,}, where the "
     "compiler gives up)"),
    ("--max-seconds", {"type": float, "default": _BUDGET.seconds, "metavar": "N"},
     f"stop a kernel after this many seconds of its code (default {_BUDGET.seconds:g})"),
    ("--max-bytes", {"type": int, "default": _BUDGET.bytes, "metavar": "N"},
     "stop a kernel after this many bytes of this machine's memory for values (default: all)"),
    ("--reference", {"metavar": "FILE.py:FUNCTION"},
     "compare the outputs with those of a NumPy function of the same arguments, in fp64"),
    ("--save", {"type": Path, "metavar": "OUT"},
     "write the outputs: OUT.npy or OUT.safetensors"),
    ("--summary", _JSON,
     "write the profile as neuron-explorer's summary-json, for `neuroncore compare`, with its "
     "tables SbufAllocation and PsumUsage"),
    ("--timeline", {"type": Path, "metavar": "OUT.html"}, "write a timeline page"),
    ("--perfetto", _JSON, "write a Perfetto trace"),
    ("--plot", {"type": Path, "metavar": "OUT.png"}, "draw timeline and roofline (matplotlib)"),
)  # fmt: skip


def _simulate(options: argparse.Namespace) -> Any:
    from neuroncore.cli import runs as kernel_runs
    from neuroncore.cli.arguments import read_sweep
    from neuroncore.cli.files import as_nki, contained, place_of

    places = [place_of(text) for text in options.kernels]
    _check(options, len(places))
    launch = launch_of(options)
    with contained(is_quiet=options.json), as_nki(), awakened(options.max_seconds):
        launch = kernel_runs.with_inputs(launch)
        if options.compare:
            document = kernel_runs.compare(places, launch)
            _warn(options, [w for kernel in document["kernels"] for w in kernel["warnings"]])
            return document
        if options.sweeps:
            sweeps = dict(read_sweep(text) for text in options.sweeps)
            document = kernel_runs.sweep(places[0], sweeps, launch)
            _warn(options, [w for point in document["points"] for w in point["warnings"]])
            return document
        run = kernel_runs.run(places[0], launch)
    _warn(options, run.warnings)
    return _one(run, launch, options)


@contextlib.contextmanager
def awakened(seconds: float) -> Generator[None]:
    """Let a budget's SIGINT end a kernel's sleep in a process that ignores it: in the background.

    Before these seconds nothing but Ctrl-C sends one, and that stays ignored.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        yield
        return
    end = time.monotonic() + seconds

    def interrupt(*_: object) -> None:
        if time.monotonic() >= end:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _warn(options: argparse.Namespace, warnings: list[dict[str, Any]]) -> None:
    """Print warnings of the kernels, each once, and let `--strict` fail for them."""
    places = [f" [{w['file']}:{w['line']}]" if w["file"] else "" for w in warnings]
    for text in dict.fromkeys(w["message"] + at for w, at in zip(warnings, places, strict=True)):
        show_warning(text)
    if options.strict and warnings:
        options.exit_code = lambda document: 1


def launch_of(options: argparse.Namespace) -> LaunchOptions:
    """What the options of a run say. Raises ValueError."""
    from neuroncore.cli.arguments import read_arguments
    from neuroncore.cli.files import place_of
    from neuroncore.cli.runs import LaunchOptions
    from neuroncore.kernel import RunSettings

    texts = [text for text in options.arguments if not _names_function(text)]
    inputs = [place_of(text, "FUNCTION") for text in options.arguments if _names_function(text)]
    arguments = [pair for text in texts for pair in read_arguments(text)]
    _once("--arg", [name for name, _ in arguments])
    _once("--sweep", [text.partition("=")[0] for text in options.sweeps])
    given_reference = options.reference is not None
    reference = place_of(options.reference, "FUNCTION") if given_reference else None
    return LaunchOptions(
        arguments=dict(arguments),
        settings=RunSettings(
            target=resolve_target(options.target).target,
            mode="trace" if options.trace_only else "execute",
            model=options.cost_model,
            dma_model=options.dma_model,
            assume=tuple(options.assume),
            cores_busy=options.cores_busy,
            seed=options.seed,
            budget=Budget(options.max_instructions, options.max_seconds, options.max_bytes),
            schedules=options.schedules,
        ),
        lnc=options.lnc,
        reference=reference,
        inputs=inputs,
    )


def _names_function(argument: str) -> bool:
    return ":" in argument and "=" not in argument


def _once(option: str, names: list[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{option} {name} is given twice")


def _check(options: argparse.Namespace, kernels: int) -> None:
    """Find what would fail after the run before it."""
    from neuroncore.cli.tensors import check_suffix
    from neuroncore.profile import plot

    machine = resolve_target(options.target).with_cores_busy(options.cores_busy)
    assuming(machine, options.assume)
    if options.seed < 0:
        raise ValueError(f"--seed must not be negative, got {options.seed}")
    if options.compare and kernels < 2:
        raise ValueError("--compare takes two kernels or more")
    if not options.compare and kernels > 1:
        raise ValueError(f"got {kernels} kernels; put --compare before them, or name one")
    names = ("save", "summary", "timeline", "perfetto", "plot")
    files = {name: getattr(options, name) for name in names}
    for name, path in files.items():
        if path is None:
            continue
        if options.compare or options.sweeps:
            raise ValueError(f"--{name} takes a single run; leave out --compare and --sweep")
        check_output(path)
    if options.plot is not None:
        plot.check_format(options.plot)
    if options.save is not None:
        check_suffix(options.save)
    for name in ("save", "reference"):
        if options.trace_only and getattr(options, name) is not None:
            raise ValueError(f"--{name} needs values; leave out --trace-only")


def _one(run: Run, launch: LaunchOptions, options: argparse.Namespace) -> Any:
    from neuroncore.cli import lines, summaries
    from neuroncore.cli.reference import check_agreement, describe
    from neuroncore.cli.tensors import save_outputs
    from neuroncore.profile import places, report

    profile = run.profile
    if options.save is not None:
        save_outputs(run.outputs, options.save)
    if options.summary is not None:
        more = {"lines": lines.of_profile(profile), "tables": places.tables(profile.schedule)}
        summaries.save({**profile.to_json(), **more}, options.summary)
    if options.timeline is not None:
        profile.save_timeline(options.timeline)
    if options.perfetto is not None:
        profile.save_perfetto(options.perfetto)
    if options.plot is not None:
        profile.plot(options.plot)
    if launch.reference is not None:
        check_agreement(run.agreements, launch.reference)
    if options.json:
        return {
            **run.document(),
            "lines": lines.of_profile(profile),
            "what_would_help": profile.what_would_help,
            "what_if": [entry.document() for entry in profile.what_if],
            "time_range_ms": list(profile.time_range_ms),
            "uncertainties": [asdict(end) for end in profile.uncertainties],
        }
    sections = report.what_would_help(profile), report.what_is_uncertain(profile)
    page = "\n\n".join([str(profile), *sections])
    if run.agreements:
        lines = [f"  {describe(entry)}" for entry in run.agreements]
        page += "\n\n" + "\n".join([f"Values next to {launch.reference} in fp64", *lines])
    return page


def _show(document: Any) -> None:
    from neuroncore.cli import runs as kernel_runs

    if isinstance(document, str):
        print(document)
    elif "points" in document:
        kernel_runs.show_sweep(document)
    else:
        kernel_runs.show_comparison(document)
