"""Runs of a user's kernels: one, several side by side, or one for each value of a sweep."""

import itertools
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from neuroncore import Kernel, NkiWarning, Profile
from neuroncore import kernel as kernels
from neuroncore.checks.base import COMMAND
from neuroncore.cli.arguments import (
    Tensor,
    check_arguments,
    make_arguments,
    parameters_of,
)
from neuroncore.cli.console import KernelError, one_line, show_table, stdout
from neuroncore.cli.files import FunctionPath, UsageError, kernel_of, listed, module, reported
from neuroncore.cli.reference import Agreement, Expected, agreements, expect, inputs_of
from neuroncore.cli.tensors import TensorFile

_NUMBERS = (
    *("time_ms", "limit_ms", "limit_share", "bound", "tflops", "mfu", "hbm_bytes"),
    *("instructions", "sbuf_peak_bytes", "psum_peak_banks"),
)
"""Fields of a profile's document that a row of a sweep has."""


@dataclass(frozen=True)
class LaunchOptions:
    """How kernels are launched, all of them alike.

    Attributes:
        arguments: values by parameter, tensors as descriptions.
        settings: of every run; their seed is that of random tensors, too.
        lnc: cores; None takes the kernel's own.
        reference: a function to compare the outputs with.
        inputs: functions that return more arguments, see `with_inputs`.
    """

    arguments: Mapping[str, Any]
    settings: kernels.RunSettings
    lnc: int | None
    reference: FunctionPath | None
    inputs: Sequence[FunctionPath] = ()


def with_inputs(launch: LaunchOptions) -> LaunchOptions:
    """The same with the arguments that its functions return; those given by name come first."""
    made = {name: value for each in launch.inputs for name, value in inputs_of(each).items()}
    return replace(launch, arguments={**made, **launch.arguments})


@dataclass(frozen=True)
class Run:
    """What a kernel returned, its profile, how far it is from the reference, and its warnings.

    A warning is {"message", "file", "line"}, of a launch as a whole with None for a place.
    """

    outputs: Any
    profile: Profile
    agreements: list[Agreement]
    warnings: list[dict[str, Any]]

    def document(self) -> dict[str, Any]:
        """The profile's document, with what the run adds to it."""
        agreement = [entry.document() for entry in self.agreements]
        return {**self.profile.to_json(), "warnings": self.warnings, "agreement": agreement}


def run(
    place: FunctionPath, launch: LaunchOptions, constants: Mapping[str, Any] | None = None
) -> Run:
    """Run the kernel once, under `as_nki`, with values for constants of its file.

    Raises KernelError, of one line, for what goes wrong in the user's code.
    """
    with reported(place.path), module(place.path, constants) as loaded:
        kernel = kernel_of(loaded, place)
        return _run(kernel, place, launch)


def prepared(
    kernel: Kernel, place: FunctionPath, launch: LaunchOptions
) -> tuple[Kernel, dict[str, Any]]:
    """The kernel on as many cores as asked, and its arguments. Raises UsageError."""
    check_arguments(kernel.func, f"kernel {place.name}", launch.arguments)
    settings = launch.settings
    arguments = make_arguments(launch.arguments, settings.seed, settings.mode == "trace")
    return kernel if launch.lnc is None else kernel[launch.lnc], arguments


def _run(kernel: Kernel, place: FunctionPath, launch: LaunchOptions) -> Run:
    launched, arguments = prepared(kernel, place, launch)
    expected: Expected | None = None
    if launch.reference is not None:
        expected = expect(launch.reference, arguments)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", NkiWarning)
        done = kernels.run(launched, (), arguments, launch.settings)
    compared = agreements(done.outputs, expected) if expected else []
    warned = [_warning(w) for w in caught if issubclass(w.category, NkiWarning)]
    return Run(done.outputs, done.profile, compared, warned)


def _warning(caught: warnings.WarningMessage) -> dict[str, Any]:
    """A warning's document; of a launch as a whole, which no line causes, without a place."""
    is_ours = caught.filename.startswith(COMMAND)
    place = (None, None) if is_ours else (Path(caught.filename).name, caught.lineno)
    return {"message": str(caught.message), "file": place[0], "line": place[1]}


# --- side by side


def compare(places: Sequence[FunctionPath], launch: LaunchOptions) -> dict[str, Any]:
    """Run each kernel with those of the arguments that it takes.

    Returns {"modelled", "kernels": [profile document, with "file"], "ratios": [to the first]}.
    """
    taken: set[str] = set()
    kernels: list[dict[str, Any]] = []
    for place in places:
        with reported(place.path), module(place.path) as imported:
            kernel = kernel_of(imported, place)
            known, takes_any = parameters_of(kernel.func)
            own = {
                name: value
                for name, value in launch.arguments.items()
                if takes_any or name in known
            }
            taken |= set(own)
            try:
                done = _run(kernel, place, replace(launch, arguments=own))
            except UsageError as error:
                raise UsageError(f"{place}: {error}") from error
        kernels.append({"file": str(place), **done.document()})
    unknown = [name for name in launch.arguments if name not in taken]
    if unknown:
        raise UsageError(f"none of the kernels has a parameter {listed(unknown)}")
    ratios = [
        {
            name: _ratio(of, kernels[0], name)
            for name, _ in _MEASURES
            if name not in ("bound", "error")
        }
        for of in kernels
    ]
    return {"modelled": True, "kernels": kernels, "ratios": ratios}


_MEASURES: tuple[tuple[str, str], ...] = (
    ("time_ms", "time, ms (modelled)"),
    ("limit_ms", "roofline, ms (modelled)"),
    ("mfu", "MFU"),
    ("bound", "bound by"),
    ("TensorE", "TensorE busy, ms"),
    ("VectorE", "VectorE busy, ms"),
    ("ScalarE", "ScalarE busy, ms"),
    ("GpSimdE", "GpSimdE busy, ms"),
    ("DMA", "DMA busy, ms"),
    ("flops", "FLOPs"),
    ("hbm_read_bytes", "HBM bytes read"),
    ("hbm_write_bytes", "HBM bytes written"),
    ("dma_count", "DMA transfers"),
    ("dma_efficiency", "DMA efficiency"),
    ("instructions", "instructions"),
    ("sbuf_peak_bytes", "SBUF, bytes per partition"),
    ("psum_peak_banks", "PSUM, banks"),
    ("error", "largest error"),
)
"""What a comparison shows of each kernel."""


def _measure(document: dict[str, Any], name: str) -> Any:
    """A number of a profile's document; of engines the mean of the cores."""
    if name.startswith("dma_"):
        return document["dma"][name.removeprefix("dma_")]
    if name == "error":
        return _worst(document["agreement"])
    if name in document:
        return document[name]
    busy = [e["busy_ms"] for c in document["cores"] for e in c["engines"] if e["engine"] == name]
    return sum(busy) / len(busy)


def _worst(agreement: list[dict[str, Any]]) -> str | None:
    """The largest error of the outputs, and whether all are within what is allowed."""
    if not agreement:
        return None
    errors = [entry["max_error"] for entry in agreement]
    error = "not finite" if None in errors else f"{max(errors):.3g}"
    return error if all(entry["agrees"] for entry in agreement) else f"{error}, too large"


def _ratio(document: dict[str, Any], base: dict[str, Any], name: str) -> float | None:
    value, to = _measure(document, name), _measure(base, name)
    return value / to if to else None


def show_comparison(document: dict[str, Any]) -> None:
    """Print a column per kernel, and next to each other its ratio to the first."""
    kernels = document["kernels"]
    _show_launch(kernels[0])
    files = [entry["file"] for entry in kernels]
    columns = ["", files[0]]
    for file in files[1:]:
        columns += [file, "ratio"]
    rows: list[list[str | None]] = []
    for name, title in _MEASURES:
        values = [_measure(entry, name) for entry in kernels]
        if not any(values):
            continue
        row = [title, _shown(values[0])]
        for value, ratios in zip(values[1:], document["ratios"][1:], strict=True):
            ratio = ratios.get(name)
            row += [_shown(value), "" if ratio is None else f"{ratio:.3f}"]
        rows.append(row)
    show_table(columns, rows, left=("",))


def _show_launch(profile: Mapping[str, Any]) -> None:
    cores = "1 core" if profile["lnc"] == 1 else f"{profile['lnc']} cores"
    stdout.print(f"{profile['target']}, {cores}, {profile['model']} model; times are modelled")


def _shown(value: Any) -> str | None:
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else value


# --- sweeps


def sweep(
    place: FunctionPath, sweeps: Mapping[str, list[tuple[str, Any]]], launch: LaunchOptions
) -> dict[str, Any]:
    """Run the kernel for each combination of values; what it refuses is a row with the reason.

    A name is a parameter of the kernel, else a constant that its file assigns at its top level,
    which then gets the value where the file is imported.

    Returns {"modelled", "kernel", "target", "model", "points"}; each point has "values",
    "refused" (None, or why) and numbers of its profile; fastest first, refused last.
    """
    with reported(place.path), module(place.path) as loaded:
        known, takes_any = parameters_of(kernel_of(loaded, place).func)
        is_parameter = {n: n in known or (takes_any and not hasattr(loaded, n)) for n in sweeps}
    both = [name for name in sweeps if name in launch.arguments]
    if both:
        raise UsageError(f"--sweep {listed(both)} and --arg give the same parameter a value")
    for name, values in sweeps.items():
        if not is_parameter[name] and any(isinstance(v, Tensor | TensorFile) for _, v in values):
            raise UsageError(f"--sweep {name}: a constant of a file takes no tensor")
    points: list[dict[str, Any]] = []
    for combination in itertools.product(*sweeps.values()):
        values = {n: value for n, (_, value) in zip(sweeps, combination, strict=True)}
        texts = {n: text for n, (text, _) in zip(sweeps, combination, strict=True)}
        arguments = {n: value for n, value in values.items() if is_parameter[n]}
        constants = {n: value for n, value in values.items() if not is_parameter[n]}
        one = replace(launch, arguments={**launch.arguments, **arguments})
        points.append({"values": texts, **_point(place, one, constants)})
    points.sort(key=lambda point: (point["refused"] is not None, point.get("time_ms", 0.0)))
    return {
        "modelled": True,
        "kernel": str(place),
        "target": launch.settings.target,
        "model": launch.settings.model,
        "points": points,
    }


def _point(
    place: FunctionPath, launch: LaunchOptions, constants: Mapping[str, Any]
) -> dict[str, Any]:
    try:
        done = run(place, launch, constants)
    except KernelError as error:
        return {"refused": one_line(error), "warnings": []}
    document = done.document()
    numbers = {name: document[name] for name in (*_NUMBERS, "lnc", "warnings", "agreement")}
    return {"refused": None, **numbers}


def show_sweep(document: dict[str, Any]) -> None:
    """Print a row per point; those that were refused below, with the reason."""
    points = document["points"]
    ran = [point for point in points if point["refused"] is None]
    refused = [point for point in points if point["refused"] is not None]
    names = list(points[0]["values"])
    if ran:
        _show_launch({**document, "lnc": ran[0]["lnc"]})
        with_errors = ["error"] if ran[0]["agreement"] else []
        show_table(
            [
                *names,
                *("ms", "ratio", "roofline", "bound by", "HBM MB"),
                *("instr.", "SBUF", "PSUM", *with_errors),
            ],
            [[*p["values"].values(), *_row(p, ran[0])] for p in ran],
        )
    if refused:
        rows = [[*point["values"].values(), point["refused"]] for point in refused]
        show_table([*names, "refused"], rows, left=("refused",))


def _row(point: dict[str, Any], fastest: dict[str, Any]) -> list[str | None]:
    ratio = point["time_ms"] / fastest["time_ms"] if fastest["time_ms"] else 1.0
    return [
        f"{point['time_ms']:.4f}",
        f"{ratio:.3f}",
        f"{point['limit_share']:.1%}",
        point["bound"],
        f"{point['hbm_bytes'] / 1e6:,.2f}",
        f"{point['instructions']:,}",
        f"{point['sbuf_peak_bytes']:,}",
        str(point["psum_peak_banks"]),
        *([_worst(point["agreement"])] if point["agreement"] else []),
    ]
