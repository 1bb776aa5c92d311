"""A pytest plugin: the device behind nki-library's own tests is the simulated core.

Their inputs, references, tolerances and comparison are used as they are; what needs the Neuron SDK
is here: `neuron_dtypes`, and the method that compiles a kernel, runs it on a device and compares.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import json
import signal
import sys
import time
import types
import warnings
from collections.abc import Generator
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, cast

import ml_dtypes
import numpy as np
import pytest

import neuroncore
from neuroncore import dtypes

BUDGET = neuroncore.Budget(instructions=100_000, seconds=240.0, bytes=4 << 30)
CASE_SECONDS = 40
"""CPU time of a case with its inputs and reference, which no budget of the simulator bounds."""
_run: dict[str, Any] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Before their first conftest.py is imported: the packages of the SDK that it needs."""
    parser.addoption("--library-results", help="file to which a line of JSON is added for a case")
    parser.addoption("--library-cases", type=int, help="cases of each test that run, evenly spread")
    neuroncore.install()
    sys.meta_path.append(_Absent())
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
    """Keep some cases of each test, when so asked."""
    keep = config.getoption("--library-cases")
    if not keep:
        return
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    items[:] = [
        cases[i * len(cases) // min(keep, len(cases))]
        for cases in tests.values()
        for i in range(min(keep, len(cases)))
    ]


def pytest_collection_finish(session: pytest.Session) -> None:
    """The device's place is taken when their modules have been imported."""
    orchestrator = sys.modules["test.utils.test_orchestrator"]
    orchestrator.Orchestrator.execute = execute


def execute(self: Any, test: Any) -> None:
    """Run a test's kernel on the simulated core, and compare as they do."""
    tests = sys.modules["test.utils.common_dataclasses"]
    validator = importlib.import_module("test.utils.output_validator").OutputValidator
    test.emitter = self.emitter
    ranks = test.inference_args.collective_ranks
    args = _arguments(test.kernel_input, ranks)
    _run["stage"] = "kernel"
    started = time.process_time()
    kernel = test.kernel_func
    kernel = kernel if isinstance(kernel, neuroncore.Kernel) else neuroncore.jit(kernel)
    done = neuroncore.simulate(
        kernel[test.compiler_input.logical_nc_config], **args,
        target=test.compiler_input.platform_target.get_compile_target(),
        ranks=ranks if ranks > 1 else None, uninitialised="warn", follow="kernels",
        budget=BUDGET,
    )  # fmt: skip
    _run.update(instructions=done.profile.instructions, kernel_s=time.process_time() - started)
    _run["stage"] = "reference"
    if test.validation_args is None:
        return
    outputs = done.outputs if ranks > 1 else (done.outputs,)
    golden = test.validation_args.golden_output
    is_lazy = isinstance(golden, tests.LazyGoldenGenerator)
    if is_lazy and golden.golden is None:
        return
    checker = validator(test, [])
    failed: list[str] = []
    per_rank = isinstance(golden, tests.PerRankLazyGoldenGenerator)
    for rank in range(ranks if per_rank else 1):
        expected = golden.golden if is_lazy else tests.normalize_golden_output(golden, rank)
        source = golden.output_ndarray if is_lazy else expected
        found = outputs[rank] if isinstance(outputs[rank], tuple) else (outputs[rank],)
        names = list(source)
        if len(found) != len(names):
            raise RuntimeError(f"the kernel returns {len(found)} tensors, not {names}")
        actual = {
            n: _as_given(f, expected[n], source[n]) for n, f in zip(names, found, strict=True)
        }
        _run["stage"] = "values"
        failed += checker._compare_outputs(
            actual, expected, test.validation_args, self.emitter.get_collector(), None, False
        )
    _run["compared"] = True
    assert not failed, f"wrong values: {failed}"


def _arguments(given: Any, ranks: int) -> dict[str, Any]:
    if hasattr(given, "for_rank"):
        each = [given.for_rank(rank) for rank in range(ranks)]
        return {
            name: neuroncore.PerRank([one[name] for one in each])
            if isinstance(value, np.ndarray)
            else value
            for name, value in each[0].items()
        }
    return {name.removesuffix(".must_alias_input"): value for name, value in (given or {}).items()}


def _as_given(found: np.ndarray, expected: Any, source: Any) -> np.ndarray:
    """An output as their loader reads it: bytes for a validator of theirs."""
    if hasattr(expected, "validator"):
        return np.ascontiguousarray(found).reshape(-1).view(np.uint8)
    flat = np.ascontiguousarray(found).reshape(-1)
    wanted = np.dtype(source.dtype)
    return flat.view(np.uint8).view(wanted).reshape(expected.shape)


class _LateError(BaseException):
    pass


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """A case's time is bounded, and its outcome is a line of the results."""
    _run.clear()
    _run.update(case=item.nodeid, stage="inputs")
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Interrupt what takes too long outside the simulator, too."""

    def late(*_: object) -> None:
        raise _LateError

    before = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, CASE_SECONDS)
    started = time.process_time()
    error: BaseException | None = None
    noted: list[warnings.WarningMessage] = []
    try:
        with warnings.catch_warnings(record=True) as noted:
            return (yield)
    except BaseException as caught:
        error = caught
        if isinstance(caught, _LateError):
            pytest.fail(f"longer than {CASE_SECONDS} CPU seconds")
        raise
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
        _run["seconds"] = round(time.process_time() - started, 2)
        _run.update(
            outcome(error),
            notes=sorted(
                {str(w.message)[:160] for w in noted if w.category is neuroncore.NkiWarning}
            ),
        )
        if path := item.config.getoption("--library-results"):
            with Path(path).open("a") as file:
                print(json.dumps(_run, default=str), file=file)


def outcome(error: BaseException | None) -> dict[str, Any]:
    """What became of a case, in one word, and why."""
    if error is None:
        return {"outcome": "right" if _run.get("compared") else "not compared"}
    chain = [error]
    while (inner := chain[-1].__cause__ or chain[-1].__context__) and inner not in chain:
        chain.append(inner)
    why = {"error": type(error).__name__, "why": " ".join(str(error).split())[:400]}
    text = why["why"]
    if isinstance(error, _LateError | MemoryError) or "larger budget" in text:
        return {"outcome": "too big", **why}
    if isinstance(error, pytest.skip.Exception):
        return {"outcome": "skipped", **why}
    if "expected to fail, but it hasn't" in text:
        return {"outcome": "accepted", **why}
    if isinstance(error, neuroncore.NkiValidationError):
        return {"outcome": "refused", **why}
    if text.startswith("wrong values") or _run["stage"] == "values":
        return {"outcome": "wrong", **why}
    if "NCC_INKI016" in text:
        return {"outcome": "refused by the kernel", **why}
    return {"outcome": "other", **why}
