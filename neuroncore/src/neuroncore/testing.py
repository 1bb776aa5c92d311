"""Tests of kernels: `assert_kernel`, and the options that `pytest -p neuroncore` has for it."""

from __future__ import annotations

import copy
import inspect
import json
import os
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from neuroncore import __version__
from neuroncore.checks.base import NkiValidationError, NkiWarning
from neuroncore.cli.console import KernelError
from neuroncore.cli.findings import RUN_RULES, of_message
from neuroncore.cli.reference import Expected, agreements, describe, expected_of
from neuroncore.documents import read_json
from neuroncore.files import replacing
from neuroncore.kernel import Kernel, RunSettings, run
from neuroncore.profile.profile import Profile

SLOWER = 0.01
"""The share of a stored time by which a kernel may be slower."""
BASELINES = Path("neuroncore-baselines.json")
_UPDATE, _ARTIFACTS = "--neuroncore-update-baselines", "--neuroncore-artifacts"


class _Chosen:
    """What the options of pytest say."""

    update = False
    artifacts: Path | None = None


def add_options(parser: Any) -> None:
    """Add the options to pytest's."""
    group = parser.getgroup("neuroncore")
    group.addoption(_UPDATE, action="store_true", help="store the modelled times of assert_kernel")
    group.addoption(
        _ARTIFACTS, metavar="DIR", type=Path, help="where assert_kernel writes timeline pages"
    )


def configure(config: Any) -> None:
    """Take over the options."""
    _Chosen.update, _Chosen.artifacts = config.getoption(_UPDATE), config.getoption(_ARTIFACTS)


def assert_kernel(
    kernel: Kernel | Callable[..., Any],
    args: Sequence[Any] | Mapping[str, Any],
    reference: Callable[..., Any] | None = None,
    max_time_ms: float | None = None,
    targets: Sequence[str] = ("trn2",),
    rtol: float | None = None,
    baseline: str | os.PathLike[str] | None = None,
    allow: Collection[str] = (),
    timeline: bool = False,
) -> dict[str, Profile]:
    """Run a kernel on simulated targets and hold it to its values, the rules and a modelled time.

    Args:
        kernel: a jitted kernel, `kernel[2]` for two cores, or a plain function.
        args: its arguments, by place or by name: NumPy arrays, CPU torch tensors, plain values.
        reference: a function of those of the arguments that it names. It gets floats in fp64, and
            again in fp32, whose rounding to the output's dtype says what error is allowed.
        max_time_ms: bound of the modelled time, compared with the middle of its range.
        targets: of "trn1", "trn2" and "trn3".
        rtol: allowed error by the largest value, in the place of that from rounding.
        baseline: the JSON file with stored times, or a name in neuroncore-baselines.json of the
            working directory. A time that is over 1 % longer than the stored fails.
        allow: names of rules whose warnings do not fail.
        timeline: write the timeline page, also where nothing fails; needs --neuroncore-artifacts.

    Returns the profile of each target. Raises AssertionError with a line for each problem, and
    ValueError or TypeError for arguments that no kernel could meet.
    """
    __tracebackhide__ = True
    if unknown := set(allow) - RUN_RULES.keys():
        raise ValueError(
            f"allow: {', '.join(sorted(unknown))} is no rule of {', '.join(RUN_RULES)}"
        )
    if not isinstance(args, tuple | list | Mapping):
        raise TypeError(f"args must be a tuple or a dict of arguments; got {type(args).__name__}")
    kernel = kernel if isinstance(kernel, Kernel) else Kernel(kernel)
    signature = inspect.signature(kernel.func)
    bound = signature.bind(**args) if isinstance(args, Mapping) else signature.bind(*args)
    named = args if isinstance(args, Mapping) else bound.arguments
    expected = None
    if reference is not None:
        expected = expected_of(reference, getattr(reference, "__name__", "reference"), {**named})
    entry = _entry(kernel.func.__name__, named, baseline)
    profiles: dict[str, Profile] = {}
    problems: list[str] = []
    for target in (targets,) if isinstance(targets, str) else targets:
        name = f"{entry} on {target}"
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", NkiWarning)
            try:
                own = copy.deepcopy((bound.args, bound.kwargs))  # a kernel may write its inputs
                done = run(kernel, *own, RunSettings(target=target))
            except NkiValidationError as error:
                problems.append(f"{name}: rule {of_message(str(error)).rule}: {error}")
                continue
        profile = profiles[target] = done.profile
        failures = _warned(caught, allow)
        failures += _values(done.outputs, expected, rtol) if expected else []
        failures += _time(profile, max_time_ms) if max_time_ms is not None else []
        failures += _stored(name, profile, baseline) if baseline is not None else []
        if _Chosen.artifacts is not None and (failures or timeline):
            page = _Chosen.artifacts / f"{re.sub(r'[^A-Za-z0-9_.]+', '-', name).strip('-')}.html"
            page.parent.mkdir(parents=True, exist_ok=True)
            profile.save_timeline(page)
            failures = [f"{text} [{page}]" for text in failures]
        problems += [f"{name}: {text}" for text in failures]
    if problems:
        raise AssertionError("\n".join(problems))
    return profiles


def _entry(kernel: str, named: Mapping[str, Any], baseline: str | os.PathLike[str] | None) -> str:
    """The name of a stored time: the one given, or the kernel's with its arguments' shapes."""
    if baseline is not None and not _is_file(baseline):
        return str(baseline)
    shapes = [f"{n} {[*v.shape]} {v.dtype}" for n, v in named.items() if hasattr(v, "shape")]
    plain = [f"{n} {v!r}" for n, v in named.items() if isinstance(v, bool | int | float | str)]
    return f"{kernel}({', '.join([*shapes, *plain])})"


def _is_file(baseline: str | os.PathLike[str]) -> bool:
    return str(baseline).endswith(".json")


def _warned(caught: Iterable[warnings.WarningMessage], allow: Collection[str]) -> list[str]:
    failures: list[str] = []
    for each in caught:
        rule = of_message(str(each.message)).rule
        if issubclass(each.category, NkiWarning) and rule not in allow:
            place = f"{os.path.basename(each.filename)}:{each.lineno}"
            failures.append(f'rule {rule}: {each.message} [{place}]; mend it, or allow=("{rule}",)')
    return failures


def _values(outputs: Any, expected: Expected, rtol: float | None) -> list[str]:
    try:
        compared = agreements(outputs, expected)
    except KernelError as error:
        return [f"values: {error}"]
    if rtol is not None:
        compared = [each.within(rtol) for each in compared]
    return [
        f"values: {describe(each)}, of {expected.of} in fp64"
        for each in compared
        if not each.agrees
    ]


def _in_words(time_ms: float, low: float, high: float) -> str:
    return f"{time_ms:.4g} ms (modelled; range {low:.4g} to {high:.4g})"


def _time(profile: Profile, most: float) -> list[str]:
    if profile.time_ms <= most:
        return []
    taken = _in_words(profile.time_ms, *profile.time_range_ms)
    return [f"time: {taken} is more than max_time_ms={most:g}; {profile.what_would_help}"]


def _stored(name: str, profile: Profile, baseline: str | os.PathLike[str]) -> list[str]:
    """Compare with the stored time, or store it where pytest was told to."""
    path = Path(baseline) if _is_file(baseline) else BASELINES
    known: Any = read_json(path) if path.is_file() else {}
    if not isinstance(known, dict):
        raise ValueError(f"{path} holds no stored times; remove it")
    if _Chosen.update:
        known[name] = {
            "kernel": profile.kernel_name,
            "neuroncore": __version__,
            "range_ms": list(profile.time_range_ms),
            "target": profile.target,
            "time_ms": profile.time_ms,
        }
        with replacing(path) as file:
            file.write_text(json.dumps(known, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        return []
    if name not in known:
        return [f"baseline: {path} has no such entry; store it with pytest {_UPDATE}"]
    stored = known[name]
    try:
        least, share = stored["time_ms"], profile.time_ms / stored["time_ms"] - 1
        before = _in_words(least, *stored["range_ms"])
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return [f"baseline: {path} has no time_ms and range_ms; store it with pytest {_UPDATE}"]
    if share <= SLOWER:
        return []
    taken = _in_words(profile.time_ms, *profile.time_range_ms)
    version = stored.get("neuroncore")
    why = "" if version == __version__ else f", whose clock is that of neuroncore {version}"
    return [
        f"baseline: {taken} is {share:.1%} more than {before} of {path}{why}; "
        f"{profile.what_would_help} Where it is meant to be, store it with pytest {_UPDATE}"
    ]
