"""What launches a kernel and times it: a NeuronCore of this machine, or a simulated one.

Both are made in the worker process, from what is pickled here.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from neuroncore import hardware
from neuroncore.calibration.cases import Case
from neuroncore.calibration.published import Profiled
from neuroncore.kernel import Kernel, RunSettings
from neuroncore.kernel import run as simulate
from neuronmm_ops.device import model
from neuronmm_ops.device.values import layered
from neuronmm_ops.doctor import diagnose
from neuronmm_ops.estimate.served import LAUNCH_US
from neuronmm_ops.kernels import kernel_named
from neuronmm_ops.kernels.simulated import simulated_kernel
from neuronmm_ops.measure.timing import time_paired
from neuronmm_ops.nn import SVDMLP
from neuronmm_ops.ops.backends import neuron
from neuronmm_ops.ops.backends.environment import LNC_VARIABLE, core, xla_route
from neuronmm_ops.ops.backends.launch import Tensors
from neuronmm_ops.ops.backends.simulated import last_profile, use_impl
from neuronmm_ops.ops.definitions import SPECS

FEW, MANY = 10, 60
"""Launches between two reads of a result: the difference of their times has no read in it."""
ROUNDS = 9
LIMIT_S = 20.0
"""Of the rounds of one kernel."""
COMPILERS = {"neuron": "neuron", "xla": "openxla"}
"""`torch.compile`'s backend of a device."""


class Sample(NamedTuple):
    """Results of a launch on the CPU, and the time from one launch to the next, us."""

    outputs: tuple[Tensor, ...]
    time_us: float


@dataclass(frozen=True)
class OpKernel:
    """A kernel of an op."""

    op: str
    name: str
    lnc: int

    @property
    def kernel(self) -> Any:
        """That of the installed NKI, without its cores."""
        return kernel_named(self.op, self.name)

    @property
    def simulated(self) -> Kernel:
        """That for the simulator, on its cores."""
        return simulated_kernel(self.op, self.name, self.lnc)


Launchable = OpKernel | Case | Profiled
"""A kernel by its `name`, for `lnc` cores: as installed, without them, and as simulated on them."""


@dataclass(frozen=True)
class SimulatedDevice:
    """A device that is as modelled, but for the constants of the machine that are given.

    Attributes:
        target: trn1, trn2 or trn3.
        constants: fields of `hardware.Machine`.
        launch_us: what each launch takes beyond its kernel.
    """

    target: str
    constants: Mapping[str, Any] = field(default_factory=dict[str, Any])
    launch_us: float = LAUNCH_US.middle
    name: str = "simulated"

    def prepare(self, lnc: int) -> None:
        """Give this process the constants."""
        machine = hardware.resolve_target(self.target)
        hardware.MACHINES[machine.target] = replace(machine, **self.constants)

    def run(self, kernel: Launchable, tensors: Tensors, arguments: Mapping[str, Any]) -> Sample:
        """Simulate a launch, with values. Raises NkiValidationError where it is refused."""
        settings = RunSettings(self.target)
        done = simulate(kernel.simulated, tensors, dict(arguments), settings)
        return Sample(_all(done.outputs), 1e3 * done.profile.time_ms + self.launch_us)

    def chain(self, op: str, tensors: Tensors, layers: int) -> Sample:
        """Simulate an op, `layered`."""
        times_ms: list[float] = []

        def call(tensors: Tensors) -> Tensor:
            result = call_op(op, tensors)
            times_ms.append(last_profile().time_ms)
            return result

        with use_impl("simulated", self.target):
            result = layered(call, tensors, layers)
        return Sample((result,), 1e3 * sum(times_ms) + layers * self.launch_us)

    def passes(self, lm: Any, pieces: Sequence[Tensor]) -> list[Sample]:
        """Simulate the compressed MLPs of a model's `passes`; the rest takes no time."""
        times_ms: list[float] = []
        samples: list[Sample] = []
        for mlp in lm.modules():
            if isinstance(mlp, SVDMLP):
                mlp.register_forward_hook(lambda *_: times_ms.append(last_profile().time_ms))
        with use_impl("simulated", self.target):
            for logits in model.passes(lm, model.static_cache(lm), pieces):
                time_us = 1e3 * sum(times_ms) + len(times_ms) * self.launch_us
                samples.append(Sample((logits,), time_us))
                times_ms.clear()
        return samples


@dataclass(frozen=True)
class NeuronDevice:
    """A NeuronCore of this machine.

    Attributes:
        target: trn1, trn2 or trn3.
        name: `neuron`, TorchNeuron's device, or `xla`, that of PyTorch/XLA.
    """

    target: str
    name: str

    def prepare(self, lnc: int) -> None:
        """Choose one logical core of so many physical ones: before the runtime starts."""
        os.environ[LNC_VARIABLE] = str(lnc)
        os.environ[hardware.TARGET_VARIABLE] = self.target
        os.environ.setdefault("NEURON_RT_VISIBLE_CORES", "0")
        flags = os.environ.get("NEURON_CC_FLAGS", "")
        if "--logical-nc-config" not in flags:
            os.environ["NEURON_CC_FLAGS"] = f"{flags} --logical-nc-config={lnc}".strip()

    def run(self, kernel: Launchable, tensors: Tensors, arguments: Mapping[str, Any]) -> Sample:
        """Launch a kernel many times. Raises what NKI, the compiler or the runtime raises."""
        call = neuron.on_cores(kernel.kernel, kernel.name, kernel.lnc)
        return self._timed(lambda *operands: call(*operands, **arguments), tensors)

    def chain(self, op: str, tensors: Tensors, layers: int) -> Sample:
        """Run a graph of an op, `layered`."""

        def graph(*operands: Tensor | None) -> Tensor:
            return layered(lambda tensors: call_op(op, tensors), operands, layers)

        if self.name == "neuron":
            return self._timed(torch.compile(graph, backend="neuron", dynamic=False), tensors)
        return self._timed(graph, tensors)

    def passes(self, lm: Any, pieces: Sequence[Tensor]) -> list[Sample]:
        """Run a model's `passes` on the device, each timed until its logits are on the CPU."""
        neuron.call_mode()  # imports what brings the device
        lm.to(self._device)
        lm.tie_weights()  # torch_xla's .to() makes two of a tied weight
        compiled = torch.compile(lm, backend=COMPILERS[self.name], fullgraph=True, dynamic=False)
        cache, ids = model.static_cache(lm), [piece.to(self._device) for piece in pieces]

        def run() -> list[Sample]:
            samples: list[Sample] = []
            started = time.perf_counter()
            for logits in model.passes(compiled, cache, ids):
                samples.append(Sample((logits,), 1e6 * (time.perf_counter() - started)))
                started = time.perf_counter()
            return samples

        run()  # compiles
        rounds = zip(*[run() for _ in range(ROUNDS)], strict=True)
        return [each[0]._replace(time_us=median([s.time_us for s in each])) for each in rounds]

    def _timed(self, call: Callable[..., Any], tensors: Tensors) -> Sample:
        """The results of a call on the device, and the time from one call to the next."""
        neuron.call_mode()  # imports what brings the device
        on_device = tree_map_only(Tensor, lambda tensor: tensor.to(self._device), tensors)

        def launch() -> tuple[Tensor, ...]:
            results = _all(call(*on_device))
            self._step()
            return results

        def launches(count: int) -> None:
            for _ in range(count - 1):
                launch()
            launch()[0].cpu()

        with torch.inference_mode():
            outputs = tuple([result.cpu() for result in launch()])
        times = time_paired(
            {"few": lambda _: launches(FEW), "many": lambda _: launches(MANY)},
            rounds=ROUNDS, warmup=1, limit_s=LIMIT_S,
        )  # fmt: skip
        between = times.median_ms("many") - times.median_ms("few")
        return Sample(outputs, 1e3 * between / (MANY - FEW))

    @cached_property
    def _device(self) -> torch.device:
        if self.name == "xla":
            import torch_xla  # pyright: ignore[reportMissingImports]

            return torch_xla.device()
        return torch.device(self.name)

    @cached_property
    def _step(self) -> Callable[[], object]:
        """What makes a graph of its own of a launch: XLA would run equal ones in a graph once."""
        if self.name == "xla":
            import torch_xla  # pyright: ignore[reportMissingImports]

            return torch_xla.sync
        return lambda: None


Runner = SimulatedDevice | NeuronDevice


def call_op(op: str, tensors: Tensors) -> Tensor:
    """Call an op on all of its tensors, with default choices."""
    spec = SPECS[op]
    return getattr(torch.ops.neuronmm, op)(*spec.joined(tensors, spec.defaults))


def device_here(target: str | None = None) -> NeuronDevice:
    """The device of this machine. Imports none of the Neuron packages.

    Args:
        target: what it must be; None for any.

    Raises:
        ValueError: there is none, it is another one, or what it needs is missing.
    """
    backends = {each["name"]: each for each in diagnose()["backends"]}
    routes = {"neuron": True, "xla": backends["xla"]["usable"] and xla_route().name == "nki"}
    usable = [name for name, is_nki in routes.items() if is_nki and backends[name]["usable"]]
    if not usable:
        reasons = "; ".join([f"{name}: {backends[name]['reason']}" for name in routes])
        raise ValueError(
            f"device-check needs a Neuron device, got none ({reasons}); see docs/trainium.md, or "
            "use --simulated"
        )
    here = core().target
    if target is not None and hardware.resolve_target(target).target != here:
        raise ValueError(f"--target {target} is not this machine's, {here}; leave it out")
    return NeuronDevice(here, usable[0])


def _all(results: Any) -> tuple[Any, ...]:
    return tuple(results) if isinstance(results, tuple | list) else (results,)
