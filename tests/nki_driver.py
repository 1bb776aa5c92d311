"""A stand-in of NKI's compile driver: the signatures of 0.6 and 0.7, traced on the simulated core.

`STAND_IN_DRIVER` says what happens to a kernel, as `lm_head_decode=NCC_EXTP004`.
"""

import base64
import inspect
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import neuroncore
from neuroncore.dtypes import dtype_of

FILES = {
    "nki/__init__.py": "from nki_driver import jit",
    **{
        f"nki/{name}.py": f"import sys, neuroncore.{name} as m; sys.modules[__name__] = m"
        for name in ("isa", "language")
    },
    "nki/framework/_torch_xla.py": "",
    "nki/framework/compiled.py": "from nki_driver import compile_kernel_to_nir",
    "nki/compiler/ncc_driver.py": "from nki_driver import CompileOptions, compile_bir_to_neff",
}
COMPILER = {"neuronxcc/__init__.py": ""}


class NCCError(Exception):
    """As `nki.compiler._errors`."""


@dataclass(frozen=True)
class RealKernel:
    """As `nki.framework.kernel.Kernel`: not one that the simulated core runs."""

    func: Any
    lnc: int = 1

    def __getitem__(self, lnc: int) -> "RealKernel":
        return replace(self, lnc=lnc)


jit = RealKernel


class Spec(NamedTuple):
    """A tensor of a kernel."""

    name: str


@dataclass(frozen=True)
class CompileOptions:
    """As `nki.compiler.ncc_driver`, with what is used of it."""

    target: str = "trn1"
    lnc: int = 1
    artifacts_dir: str | None = None
    output_path: str = "file.neff"
    optimizes: bool = True

    def disable_backend_optimizations(self) -> "CompileOptions":
        """The default of production."""
        return replace(self, optimizes=False)


@dataclass(frozen=True)
class Nir:
    """As `NirResult`: what `descriptor` and `build_config` are asked for."""

    name: str
    input_specs: tuple[Spec, ...]
    output_specs: tuple[Spec, ...]

    @property
    def descriptor(self) -> "Nir":
        """It has the specs."""
        return self

    @property
    def backend_config_b64(self) -> bytes:
        """What a custom call takes."""
        return base64.b64encode(json.dumps({"func_name": self.name}).encode())

    def build_config(self) -> "Nir":
        """It has the config."""
        return self


def compile_kernel_to_nir(
    kernel_func: RealKernel,
    *,
    inputs: dict[str, Any],
    compile_opts: CompileOptions,
    frontend: Any = None,
    enable_cache: bool = True,
    trace_cache: Any = None,
) -> Nir:
    """Trace a kernel on arrays; every parameter is given, by its name."""
    assert "NKI_SIMULATOR" not in os.environ
    assert os.environ["NEURON_PLATFORM_TARGET_OVERRIDE"] == compile_opts.target
    assert kernel_func.lnc == compile_opts.lnc
    assert not compile_opts.optimizes
    assert compile_opts.artifacts_dir is not None
    assert Path(compile_opts.artifacts_dir).is_absolute()
    assert list(inputs) == list(inspect.signature(kernel_func.func).parameters)
    name = kernel_func.func.__name__
    print(f"tracing {name}", file=sys.stderr, flush=True)
    endings = dict(each.split("=") for each in os.environ.get("STAND_IN_DRIVER", "").split())
    _end(endings.get(name, ""))
    names: list[str] = []
    values = [_specs(value, name, names) for name, value in inputs.items()]
    kernel = neuroncore.Kernel(kernel_func.func, kernel_func.lnc)
    run = neuroncore.simulate(kernel, *values, target=compile_opts.target, mode="trace")
    Path(compile_opts.artifacts_dir).mkdir()
    outputs = run.outputs if isinstance(run.outputs, tuple) else (run.outputs,)
    made = tuple([Spec(f"output_{n}") for n in range(len(outputs))])
    return Nir(name, tuple(map(Spec, names)), made)


def _specs(value: Any, name: str, names: list[str]) -> Any:
    """An input without its values, a tuple of arrays too; `names` gets that of each array."""
    if isinstance(value, tuple):
        return tuple([_specs(each, f"{name}_{n}", names) for n, each in enumerate(value)])
    if not isinstance(value, np.ndarray):
        return value
    names.append(name)
    return neuroncore.TensorSpec(value.shape, dtype_of(value.dtype.name))


def _end(how: str) -> None:
    if how.startswith("NCC"):
        raise NCCError(f"neuronx-cc failed with 70:\n[{how}] Too many instructions")
    if how == "hang":
        subprocess.run(["sleep", "600"], check=True)
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)


def compile_bir_to_neff(
    compile_opts: CompileOptions,
    bir: Nir,
    input_arrays: list[np.ndarray],
    argument_names: list[str],
    output_arg_names: list[str],
) -> None:
    """Write a NEFF that names the kernel and its tensors."""
    assert input_arrays == []
    Path(compile_opts.output_path).write_text(
        json.dumps([bir.name, argument_names, output_arg_names])
    )
