"""Test-only: run the custom call `AwsNeuronCustomNativeKernel` on XLA's CPU client.

torch_xla exports no way to register a handler, but its library keeps the symbols of XLA's registry;
their offsets from an exported function give their addresses. Two handlers: the C one of
`csrc_stub`, and one that runs the kernel on the simulated NeuronCore.
"""

import base64
import ctypes
import json
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import _XLAC
import ml_dtypes
import numpy as np

from neuronmm_ops.kernels import Plan, Problem, nki_kernel
from neuronmm_ops.neuroncore.kernel import run
from neuronmm_ops.ops.launch import Launch
from neuronmm_ops.ops.xla import TARGET

CSRC = Path(__file__).parents[2] / "csrc_stub"
EXPORTED = "PyInit__XLAC"
STD_STRING = "RKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"
GLOBAL = "_ZN3xla24CustomCallTargetRegistry6GlobalEv"
REGISTER = f"_ZN3xla24CustomCallTargetRegistry8RegisterE{STD_STRING}PvS8_"
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}

Handler = ctypes.CFUNCTYPE(
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
    assert exported is not None
    return {name: exported + offset - offsets[EXPORTED] for name, offset in offsets.items()}


def register(address: int) -> None:
    """Make the function at `address` the handler of the custom call on the host."""
    found = addresses()
    registry = ctypes.CFUNCTYPE(ctypes.c_void_p)(found[GLOBAL])()
    add = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 4)(found[REGISTER])
    texts = [ctypes.create_string_buffer(text.encode()) for text in (TARGET, "Host")]
    name, platform = (StdString(ctypes.addressof(text), len(text) - 1) for text in texts)
    add(registry, ctypes.addressof(name), address, ctypes.addressof(platform))


def build_c_handler(folder: Path) -> ctypes.CDLL:
    """Compile the C handler and load it; it reports failures through XLA's status."""
    subprocess.run(["make", "-s", "-C", str(CSRC), "host_call", f"BUILD={folder}"], check=True)
    handler = ctypes.CDLL(str(folder / "libneuronmm_host_call.so"))
    handler.neuronmm_set_status_failure(set_failure)
    return handler


def handler_address(library: ctypes.CDLL) -> int:
    address = ctypes.cast(library.neuronmm_host_call, ctypes.c_void_p).value
    assert address is not None
    return address


def decode(config: str | bytes) -> dict[str, Any]:
    """The JSON of a backend_config."""
    return json.loads(base64.b64decode(config, validate=True))


def launch_of(config: dict[str, Any]) -> Launch:
    """The launch that a config names; the plan's predictions are not in it."""
    call = dict(config["neuronmm"])
    blocks, form = tuple(call.pop("blocks").items()), call.pop("form")
    bias, activation = call.pop("bias"), call.pop("activation")
    problem = Problem(**{**call, "ranks": tuple(call["ranks"])})
    plan = Plan(problem, form, config["func_name"], blocks, 0.0, 0, 0, 0, "")
    return Launch(plan, (problem.M, problem.N), bias, activation)


def shapes_of(problem: Problem, bias: bool) -> list[tuple[int, ...]]:
    """Shapes of a kernel's tensor arguments."""
    M, K, N, inner = problem.M, problem.K, problem.N, problem.inner
    if problem.op == "xw":
        shapes: list[tuple[int, ...]] = [(M, K), (K, N)]
    elif problem.op == "xuv":
        (r,) = problem.ranks
        shapes = [(M, K), (K, r), (r, N)]
    else:
        gate, up, down = problem.ranks
        shapes = [(M, K), (K, gate), (gate, inner), (K, up), (up, inner), (inner, down), (down, N)]
    return [*shapes, (N,)] if bias else shapes


class SimulatedCore:
    """A handler that runs the call's kernel on the simulated NeuronCore, and keeps the configs."""

    def __init__(self) -> None:
        self.configs: list[dict[str, Any]] = []
        self.callback = Handler(self.handle)

    @property
    def address(self) -> int:
        address = ctypes.cast(self.callback, ctypes.c_void_p).value
        assert address is not None
        return address

    def handle(self, out: int, operands: Any, opaque: int, length: int, status: int) -> None:
        try:
            self.launch(decode(ctypes.string_at(opaque, length)), out, operands)
        except Exception as error:
            message = f"{type(error).__name__}: {error}".encode()
            set_failure(status, message, len(message))

    def launch(self, config: dict[str, Any], out: int, operands: Any) -> None:
        self.configs.append(config)
        launch = launch_of(config)
        problem = launch.plan.problem
        dtype = np.dtype(DTYPES[problem.dtype])

        def array_at(address: int, shape: tuple[int, ...]) -> np.ndarray:
            size = int(np.prod(shape)) * dtype.itemsize
            raw = (ctypes.c_char * size).from_address(address)
            return np.frombuffer(raw, dtype).reshape(shape)

        shapes = shapes_of(problem, launch.bias)
        tensors = tuple(
            array_at(operands[number], shape).copy() for number, shape in enumerate(shapes)
        )
        done = run(nki_kernel(launch.plan), tensors, launch.arguments, target=problem.target)
        array_at(out, launch.shape)[...] = done.outputs
