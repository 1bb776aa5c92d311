"""How the ops are called in the engine's graphs: as nodes of its NKI wrapper.

The engine's compiler takes Dynamo's graph as it is and lowers the wrapper's nodes; an op of another
library would be a node that it does not know, and its cache would not see our kernels' source. So
the wrapper is called in Python while Dynamo traces, and only planning is hidden from it.
"""

import sys
from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from neuroncore import jit
from neuroncore.hardware import TARGET_VARIABLE
from neuronmm_ops.engines.vllm_neuron.engine import kernel_wrapper
from neuronmm_ops.errors import NkiVersionError
from neuronmm_ops.kernels import kernel_named
from neuronmm_ops.ops.backends.environment import (
    INSTALL,
    core,
    nki_release,
    why_not_compilable,
)
from neuronmm_ops.ops.backends.launch import launch_here
from neuronmm_ops.ops.definitions import SPECS
from neuronmm_ops.ops.spec import OpSpec

OPS = ("xw", "mlp", "svd_mlp")


class PlannedLaunch(NamedTuple):
    """One launch: how many tokens, by which kernel, with which compile-time arguments."""

    tokens: int
    kernel: str
    names: tuple[str, ...]
    values: tuple[int | bool | str | float, ...]


class Kernels:
    """Runs ops: by NKI kernels where the engine would run its own, else in plain torch.

    Args:
        can_run: the engine's `can_run_kernel`.

    Raises:
        ImportError: kernels are to run, and nki or `wrap_nki` is not installed.
        NkiVersionError: they cannot compile with the installed nki.
        RuntimeError: which NeuronCore this machine has is not known.
    """

    def __init__(self, can_run: Callable[[Tensor | str], bool]) -> None:
        self.can_run = can_run
        _fill_caches()
        self.callers = _callers() if can_run("neuron") else {}

    def run(self, op: str, *args: Tensor | str | None) -> Tensor:
        """Return the op `[M, N]` of x `[M, K]`, its other operands and its choices."""
        spec = SPECS[op]
        tensors = [arg for arg in args if not isinstance(arg, str)]
        options = [arg for arg in args if isinstance(arg, str)]
        choices = (*options, *spec.defaults[len(options) :])
        x = tensors[0]
        assert x is not None
        if not self.can_run(x):
            result: Any = spec.reference(*spec.joined(self._filled(spec, tensors), choices))
            return result
        # A bucket's size may be a symbol by now; Python needs it as a number: a graph a bucket.
        tokens = len(range(x.shape[0]))
        known = tuple(
            [
                None
                if t is None
                else (tuple(t.shape[1:] if place in spec.activations else t.shape), t.dtype)
                for place, t in enumerate(tensors)
            ]
        )
        parts = planned(op, tokens, known, choices)
        results: list[Tensor] = []
        start = 0
        for part in parts:
            rows = slice(start, start + part.tokens)
            operands = [
                (t if len(parts) == 1 else t[rows]).contiguous()
                if place in spec.activations and t is not None
                else t
                for place, t in enumerate(self._filled(spec, tensors))
            ]
            arguments = dict(zip(part.names, part.values, strict=True))
            results.append(self.callers[part.kernel](*operands, **arguments))
            start = rows.stop
        return results[0] if len(results) == 1 else torch.cat(results)

    @staticmethod
    def _filled(spec: OpSpec, tensors: list[Tensor | None]) -> tuple[Tensor | None, ...]:
        return (*tensors, *(None,) * (len(spec.tensors) - len(tensors)))


@torch.compiler.assume_constant_result
def planned(
    op: str,
    tokens: int,
    operands: tuple[tuple[tuple[int, ...], torch.dtype] | None, ...],
    choices: tuple[Any, ...],
) -> tuple[PlannedLaunch, ...]:
    """The launches of an op on so many tokens.

    Args:
        op: its name.
        tokens: M.
        operands: shape, of an activation `[M, K]` without M, and dtype of each of the first ones.
        choices: the op's options.
    """
    spec = SPECS[op]
    known = [
        None
        if operand is None
        else torch.empty(
            (tokens, *operand[0]) if place in spec.activations else operand[0],
            dtype=operand[1],
            device="meta",
        )
        for place, operand in enumerate(operands)
    ]
    tensors = (*known, *(None,) * (len(spec.tensors) - len(known)))
    launch = launch_here(spec, tensors, choices)
    assert launch is not None, "the engine's buckets are not empty"
    parts = launch.plan.launches
    launches = [launch.part(size) for size in parts] if len(parts) > 1 else [launch]
    return tuple(
        [
            PlannedLaunch(size, it.plan.kernel, tuple(it.arguments), tuple(it.arguments.values()))
            for size, it in zip(parts, launches, strict=True)
        ]
    )


def _fill_caches() -> None:
    """Ask for what a spec finds when it is first asked: Dynamo cannot trace the lock there."""
    for op in OPS:
        for name, member in vars(OpSpec).items():
            if isinstance(member, cached_property):
                getattr(SPECS[op], name)


def _callers() -> dict[str, Callable[..., Any]]:
    """Every kernel in the engine's wrapper, by name, before the first graph is traced.

    The wrapper takes the kernel and is given the grid: a kernel that has its grid loses it there.
    """
    wrap_nki = kernel_wrapper()
    # `neuroncore run` and the like put the simulator in the place of nki: it has no release.
    is_simulated = getattr(sys.modules.get("nki"), "jit", None) is jit
    if wrap_nki is None or (nki_release() is None and not is_simulated):
        raise ImportError(
            "vLLM-Neuron's kernels need nki and wrap_nki of libtorch_neuronx_lite, torch_neuronx "
            f"or vllm_neuron, one is not found; {INSTALL}"
        )
    problem = why_not_compilable()
    if problem:
        raise NkiVersionError(problem)
    chosen = core()
    if not chosen.known:
        raise RuntimeError(
            "an NKI kernel is planned for one NeuronCore, found no Neuron instance type; "
            f"set {TARGET_VARIABLE}"
        )
    return {
        name: wrap_nki(kernel_named(op, name))[(chosen.lnc,)]
        for op in OPS
        for name in (op, f"{op}_decode")
    }
