"""A pytest plugin: the device behind nki-library's own tests is the simulated core.

Their inputs, references, tolerances and comparison are used as they are; what needs the Neuron SDK
is here: `neuron_dtypes`, and the method that compiles a kernel, runs it on a device and compares.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import json
import os
import resource
import signal
import sys
import types
from collections.abc import Generator
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, cast

import ml_dtypes
import numpy as np
import pytest

import neuroncore
from neuroncore import dtypes

_run: dict[str, Any] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Before their first conftest.py is imported: the packages of the SDK that it needs."""
    parser.addoption("--library-results", help="file to which a line of JSON is added for a case")
    parser.addoption("--library-cases", type=int, help="cases of each test that run, evenly spread")
    parser.addoption("--library-seconds", type=int, default=40, help="CPU time of a case")
    # what a case takes beyond is an error of it, not the end of all of them
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * 4 // 5
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    neuroncore.install()
    stand_in()


def stand_in(*others: str) -> None:
    """Take the place of what nki-library's tests import and is not published, and of others."""
    sys.meta_path.append(_Absent(*others))
    arrays: dict[str, Any] = {str(d): dtypes.array_dtype(d) for d in dtypes.DTYPES.values()}
    cast("dict[str, Any]", np.sctypeDict).update(arrays)
    _module("neuron_dtypes", **arrays, static_cast=static_cast, finfo=ml_dtypes.finfo,
            sizeinbytes=lambda dtype: np.dtype(dtype).itemsize,
            is_float_type=lambda dtype: dtypes.from_numpy(dtype).is_float)  # fmt: skip
    _module("neuronxcc.nki.typing", **vars(importlib.import_module("neuroncore.typing")))
    _module("neuronxcc.starfish.support.dtype", static_cast=static_cast)


def _module(name: str, **contents: Any) -> types.ModuleType:
    """A module, with the packages that it is in."""
    package, _, last = name.rpartition(".")
    module = types.ModuleType(name)
    vars(module).update(contents, __path__=[])
    sys.modules[name] = module
    if package:
        setattr(sys.modules.get(package) or _module(package), last, module)
    return module


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stands in for packages that are not installed and no kernel needs: other hosts, reports."""

    names = (
        "fabric2", "paramiko", "boto3", "botocore", "aws_embedded_metrics", "pytest_html",
        "plotext", "test.utils.perf_analysis_private", "test.utils.scripts",  # not published
    )  # fmt: skip

    def __init__(self, *others: str) -> None:
        self.names = (*self.names, *others)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Found when no finder before has it."""
        is_known = any(name == known or name.startswith(f"{known}.") for known in self.names)
        return ModuleSpec(name, self, is_package=True) if is_known else None

    def exec_module(self, module: types.ModuleType) -> None:
        """Each name in it is a class."""
        module.__getattr__ = functools.cache(_placeholder)


def _placeholder(name: str) -> type[Exception]:
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (Exception,), {})


def static_cast(values: Any, dtype: Any) -> np.ndarray:
    """Values in another dtype; packed ones hold four in the last dimension's element."""
    values, wanted = np.asarray(values), np.dtype(dtype)
    if values.dtype == wanted:
        return values
    if values.dtype.names:
        values = _unpack(values)
    if not wanted.names:
        return values.astype(wanted)
    name = wanted.names[0].removesuffix("_x4")
    fields = values.astype(np.dtype(getattr(ml_dtypes, name))).view(np.uint8)
    if name == "float4_e2m1fn":
        pairs = fields.reshape(*fields.shape[:-1], -1, 2)
        fields = pairs[..., 0] | pairs[..., 1] << 4
    return np.ascontiguousarray(fields).view(wanted)


def _unpack(values: np.ndarray) -> np.ndarray:
    name = str(values.dtype.names and values.dtype.names[0]).removesuffix("_x4")
    fields = np.ascontiguousarray(values).view(np.uint8)
    if name == "float4_e2m1fn":
        fields = np.stack([fields & 15, fields >> 4], -1).reshape(*fields.shape[:-1], -1)
    return fields.view(getattr(ml_dtypes, name)).astype(np.float32)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep some cases of each test, when so asked, without those that have a result already."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    keep = config.getoption("--library-cases") or len(items)
    path = config.getoption("--library-results")
    lines = Path(path).read_text().splitlines() if path else []
    done = {json.loads(line)["case"] for line in lines}
    kept = [
        cases[i * len(cases) // min(keep, len(cases))]
        for cases in tests.values()
        for i in range(min(keep, len(cases)))
    ]
    items[:] = [item for item in kept if item.nodeid not in done]


def pytest_collection_finish(session: pytest.Session) -> None:
    """The device's place is taken when their modules have been imported.

    They look a packed dtype up by its text, which for NumPy's is not its name.
    """
    if mx := sys.modules.get("nkilib_src.nkilib.core.utils.mx_torch_common"):
        quantize = vars(mx)["quantize_to_mx"]
        vars(mx)["quantize_to_mx"] = lambda data, kind: quantize(
            data, dtypes.from_numpy(kind) if isinstance(kind, np.dtype) else kind
        )
    orchestrator = sys.modules["test.utils.test_orchestrator"]
    orchestrator.Orchestrator.execute = execute


def execute(self: Any, test: Any) -> None:
    """Run a test's kernel on the simulated core, and compare as they do."""
    tests = sys.modules["test.utils.common_dataclasses"]
    test.emitter = self.emitter
    ranks = test.inference_args.collective_ranks
    kernel = test.kernel_func
    kernel = kernel if isinstance(kernel, neuroncore.Kernel) else neuroncore.jit(kernel)
    done = neuroncore.simulate(
        kernel[test.compiler_input.logical_nc_config],
        **_arguments(test.kernel_input, ranks),
        target=test.compiler_input.platform_target.get_compile_target(),
        ranks=ranks if ranks > 1 else None,
        uninitialised="warn",
        follow="kernels",
    )
    _run["stage"] = "reference"
    checks = test.validation_args
    golden = checks and checks.golden_output
    is_lazy = isinstance(golden, tests.LazyGoldenGenerator)
    if golden is None or (is_lazy and golden.golden is None):
        return
    checker = importlib.import_module("test.utils.output_validator").OutputValidator(test, [])
    failed: list[str] = []
    per_rank = isinstance(golden, tests.PerRankLazyGoldenGenerator)
    for rank in range(ranks if per_rank else 1):
        expected = golden.golden if is_lazy else tests.normalize_golden_output(golden, rank)
        kinds = golden.output_ndarray if is_lazy else expected
        outputs = done.outputs[rank] if ranks > 1 else done.outputs
        pairs = zip(kinds, outputs if isinstance(outputs, tuple) else (outputs,), strict=True)
        actual = {n: _as_read(f, expected[n], kinds[n]) for n, f in pairs if n in expected}
        _run["stage"] = "values"
        metrics = self.emitter.get_collector()
        failed += checker._compare_outputs(actual, expected, checks, metrics, None, False)
    assert not failed, f"wrong values: {failed}"


def _arguments(given: Any, ranks: int) -> dict[str, Any]:
    if not hasattr(given, "for_rank"):
        return _named(given)
    each = [_named(given.for_rank(rank)) for rank in range(ranks)]
    arrays = [name for name, value in each[0].items() if isinstance(value, np.ndarray)]
    return each[0] | {name: neuroncore.PerRank([one[name] for one in each]) for name in arrays}


def _named(given: dict[str, Any] | None) -> dict[str, Any]:
    return {name.removesuffix(".must_alias_input"): value for name, value in (given or {}).items()}


def _as_read(actual: np.ndarray, expected: Any, kind: Any) -> np.ndarray:
    """An output as their loader reads it: bytes for a validator of theirs."""
    content = np.ascontiguousarray(actual).reshape(-1).view(np.uint8)
    if hasattr(expected, "validator"):
        return content
    return content.view(np.dtype(kind.dtype)).reshape(expected.shape)


class _LateError(BaseException):
    pass


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """A case's time is bounded, and its outcome is a line of the results."""

    def late(*_: object) -> None:
        raise _LateError(f"longer than {seconds} CPU seconds")

    seconds: int = item.config.option.library_seconds
    before = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    _run["stage"] = "none"
    error: BaseException | None = None
    try:
        return (yield)
    except BaseException as caught:
        error = caught
        if isinstance(caught, _LateError):
            pytest.fail(str(caught), pytrace=False)
        raise
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
        why = " ".join(f"{type(error).__name__}: {error}".split())[:400] if error else ""
        may_fail = item.get_closest_marker("xfail") is not None
        line = {"case": item.nodeid, "outcome": _outcome(error, may_fail), "why": why}
        if path := item.config.getoption("--library-results"):
            with Path(path).open("a") as file:
                print(json.dumps(line), file=file)


def _outcome(error: BaseException | None, may_fail: bool) -> str:
    """What became of a case. A test that expects an error takes any: it proves little."""
    if error is None:
        passed = {"values": "right", "reference": "no values", "none": "refused as expected"}
        return passed[_run["stage"]]
    text = str(error)
    if isinstance(error, _LateError | MemoryError) or "larger budget" in text:
        return "too big"
    if isinstance(error, pytest.skip.Exception):
        return "skipped"
    if "expected to fail, but it hasn't" in text:
        return "accepted"
    if _run["stage"] == "values":
        return "fails as marked" if may_fail else "wrong"
    is_refusal = isinstance(error, neuroncore.NkiValidationError) or "NCC_INKI016" in text
    return "refused" if is_refusal else "other"
