"""Test-only: run the custom call `AwsNeuronCustomNativeKernel` on XLA's CPU client.

torch_xla exports no way to register a handler, but its library keeps the symbols of XLA's registry;
their offsets from an exported function give their addresses. Two handlers: one calls the op's
reference, one runs the kernel on the simulated NeuronCore.
"""

import base64
import ctypes
import json
import math
import subprocess
from dataclasses import replace
from functools import cache
from typing import Any

import _XLAC
import torch
from torch import Tensor

from neuroncore.kernel import RunSettings, run
from neuronmm_ops.kernels import nki_kernel
from neuronmm_ops.ops.backends.launch import Launch
from neuronmm_ops.ops.backends.xla import TARGET
from neuronmm_ops.ops.definitions import SPECS
from neuronmm_ops.plan import plan_op

EXPORTED = "PyInit__XLAC"
STD_STRING = "RKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"
GLOBAL = "_ZN3xla24CustomCallTargetRegistry6GlobalEv"
REGISTER = f"_ZN3xla24CustomCallTargetRegistry8RegisterE{STD_STRING}PvS8_"

Callback = ctypes.CFUNCTYPE(
    None,
    ctypes.c_void_p,  # out
    ctypes.POINTER(ctypes.c_void_p),  # in
    ctypes.c_void_p,  # opaque: not NUL-terminated
    ctypes.c_size_t,
    ctypes.c_void_p,  # status
)
SetFailure = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t)


class StdString(ctypes.Structure):
    """libstdc++'s std::string: pointer, length, and 16 bytes for its short form."""

    _fields_ = (
        ("pointer", ctypes.c_void_p),
        ("length", ctypes.c_size_t),
        ("capacity", ctypes.c_size_t * 2),
    )


class Status(ctypes.Structure):
    """XlaCustomCallStatus_: a std::optional<std::string>, empty on success."""

    _fields_ = (("message", StdString), ("failed", ctypes.c_bool))


@SetFailure
def set_failure(status: int, message: bytes, length: int) -> None:
    """XLA's `XlaCustomCallStatusSetFailure`, which torch_xla's library leaves out."""
    allocate = ctypes.CDLL("libstdc++.so.6")._Znwm  # the string is freed by operator delete
    allocate.restype, allocate.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    text = allocate(length + 1)
    ctypes.memmove(text, message, length)
    ctypes.memset(text + length, 0, 1)
    failure = Status.from_address(status)
    failure.message = StdString(text, length, (ctypes.c_size_t * 2)(length, 0))
    failure.failed = True


@cache
def addresses() -> dict[str, int]:
    """Addresses of the registry's functions in this process."""
    wanted = {EXPORTED, GLOBAL, REGISTER}
    listing = subprocess.run(["nm", _XLAC.__file__], capture_output=True, text=True, check=True)
    lines = (line.split() for line in listing.stdout.splitlines())
    offsets = {line[-1]: int(line[0], 16) for line in lines if line[-1] in wanted}
    exported = ctypes.cast(ctypes.CDLL(_XLAC.__file__)[EXPORTED], ctypes.c_void_p).value
    return {name: exported + offset - offsets[EXPORTED] for name, offset in offsets.items()}


def register(address: int) -> None:
    """Make the function at `address` the handler of the custom call on the host."""
    found = addresses()
    registry = ctypes.CFUNCTYPE(ctypes.c_void_p)(found[GLOBAL])()
    add = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 4)(found[REGISTER])
    texts = [ctypes.create_string_buffer(text.encode()) for text in (TARGET, "Host")]
    name, platform = (StdString(ctypes.addressof(text), len(text) - 1) for text in texts)
    add(registry, ctypes.addressof(name), address, ctypes.addressof(platform))


def decode(config: str | bytes) -> dict[str, Any]:
    """The JSON of a backend_config."""
    return json.loads(base64.b64decode(config, validate=True))


def launch_of(config: dict[str, Any]) -> Launch:
    """The launch that a config names; the plan's predictions are not in it."""
    call = config["neuronmm"]
    spec, matrices = SPECS[call["op"]], tuple(map(tuple, call["matrices"]))
    plan = plan_op(
        *(spec.name, call["M"], matrices, call["dtype"], call["target"], call["lnc"]),
        weight_dtype=call["weight_dtype"],
        compute=call["compute"],
        others=(("x_up", (-1, matrices[1][0]), ""),) if call["inputs"] == 2 else (),
    )
    plan = replace(plan, kernel=config["func_name"], blocks=tuple(call["blocks"].items()))
    choices = {name: call[name] for name in spec.options}
    names = tuple(config["klir_binary"]["input_names"])
    return Launch(spec, plan, ((call["M"], plan.problem.N),), names, choices)


def tensor_at(address: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The tensor of a bare pointer."""
    raw = (ctypes.c_char * (math.prod(shape) * dtype.itemsize)).from_address(address)
    return torch.frombuffer(raw, dtype=dtype).view(shape)


class Handler:
    """A handler of the custom call that calls the op's reference, and keeps the configs."""

    def __init__(self) -> None:
        self.configs: list[dict[str, Any]] = []
        self.callback = Callback(self.handle)

    @property
    def address(self) -> int:
        return ctypes.cast(self.callback, ctypes.c_void_p).value

    @property
    def count(self) -> int:
        """Calls that were made."""
        return len(self.configs)

    def handle(self, out: int, operands: Any, opaque: int, length: int, status: int) -> None:
        try:
            self.call(decode(ctypes.string_at(opaque, length)), out, operands)
        except Exception as error:
            message = f"{type(error).__name__}: {error}".encode()
            set_failure(status, message, len(message))

    def call(self, config: dict[str, Any], out: int, operands: Any) -> None:
        """Read the operands where XLA has them, compute, and write the result."""
        launch = launch_of(config)
        problem, spec = launch.plan.problem, launch.spec
        dtype = getattr(torch, problem.dtype)
        weight_dtype = getattr(torch, problem.weight_dtype or problem.dtype)
        layouts = {"x": ((problem.M, problem.K), dtype)}
        if "x_up" in launch.operands:
            layouts["x_up"] = ((problem.M, problem.matrices[1][0]), dtype)
        biases = [operand.name for operand in spec.operands if operand.role == "bias"]
        for name, size in zip(biases, problem.outputs, strict=False):  # svd_mlp has none
            layouts[name] = ((size,), dtype)
        for place, matrix in zip(spec.factors, problem.matrices, strict=True):
            name = spec.operands[place].name
            layouts[name] = (matrix, weight_dtype)
            layouts[f"{name}_scale"] = ((matrix[1],), torch.float32)
        given = {
            name: tensor_at(operands[i], *layouts[name]) for i, name in enumerate(launch.operands)
        }
        tensors = tuple(given.get(operand.name) for operand in spec.tensors)
        tensor_at(out, launch.shapes[0], dtype).copy_(self.compute(launch, tensors))
        self.configs.append(config)

    def compute(self, launch: Launch, tensors: tuple[Tensor | None, ...]) -> Tensor:
        spec = launch.spec
        return spec.reference(*spec.joined(tensors, tuple(launch.choices.values())))


class SimulatedCore(Handler):
    """A handler that runs the call's kernel on the simulated NeuronCore."""

    def compute(self, launch: Launch, tensors: tuple[Tensor | None, ...]) -> Tensor:
        kernel, target = nki_kernel(launch.plan), launch.plan.problem.target
        return run(kernel, tensors, launch.arguments, RunSettings(target)).outputs
