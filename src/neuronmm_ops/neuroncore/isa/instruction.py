"""What makes a function an instruction of `nki.isa`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec

from neuronmm_ops.neuroncore import core as running
from neuronmm_ops.neuroncore.isa import indirection
from neuronmm_ops.neuroncore.memory.indirection import IndirectTile
from neuronmm_ops.neuroncore.memory.tensor import NkiTensor
from neuronmm_ops.neuroncore.timing.trace import InstructionTemplate, NkiInstruction

Scalar = float | int | NkiTensor
"""An operand that is a number, or a tile [P, 1] with one number a partition."""

P = ParamSpec("P")
_OPERANDS = {"NkiTensor", "NkiTensor | None", "Scalar", "Scalar | None"}


def instruction(
    *written: str,
) -> Callable[[Callable[P, InstructionTemplate]], Callable[P, NkiInstruction]]:
    """Turn a function that checks operands and returns their template into an instruction.

    The function runs once per core for each combination of operand geometries and options; later
    calls share its template. What depends on values belongs into the template's `run`, which gets
    the parameters that are annotated as tensors or `Scalar`, in the order of the signature.

    Args:
        written: names of the operands that the instruction writes; it reads the others.
    """

    def declare(build: Callable[P, InstructionTemplate]) -> Callable[P, NkiInstruction]:
        opcode = build.__name__
        parameters = inspect.signature(build).parameters
        operands = {n: p.default for n, p in parameters.items() if p.annotation in _OPERANDS}

        def prepared(core: running.SimulatedCore, *args: P.args, **kwargs: P.kwargs) -> Any:
            """The template, the places of the tensors among the arguments, and their names."""
            template = build(*args, **kwargs)
            names = [*[*parameters][: len(args)], *kwargs]
            values: dict[str, Any] = dict(zip(names, (*args, *kwargs.values()), strict=True))
            tensors = [n for n in operands if isinstance(values.get(n), NkiTensor)]
            tensors.sort(key=lambda n: written.index(n) if n in written else len(written))
            template.opcode, template.writes = opcode, len(set(written).intersection(tensors))
            core.prepare(template, [values[n] for n in tensors])
            return template, [names.index(n) for n in tensors], names

        @functools.wraps(build)
        def issue(*args: P.args, **kwargs: P.kwargs) -> NkiInstruction:
            core = running.active(opcode)
            name: Any = kwargs.pop("name", None)
            values: tuple[Any, ...] = (*args, *kwargs.values())
            parts = [v.geometry if v.__class__ is NkiTensor else v for v in values]
            key = (build, len(args), *kwargs, *parts)
            try:
                found = core.templates.get(key)
            except TypeError:  # a list among the options
                key = (build, len(args), *kwargs, *map(_hashable, parts))
                found = core.templates.get(key)
            if found is None:
                if any(v.__class__ is IndirectTile for v in values):
                    given = dict(zip([*[*parameters][: len(args)], *kwargs], values, strict=True))
                    return indirection.issue(issue, opcode, {**given, "name": name})
                found = core.templates[key] = prepared(core, *args, **kwargs)
            template, places, names = found
            tensors = [values[i] for i in places]
            arguments = None
            if core.execute:
                given = dict(zip(names, values, strict=True))
                arguments = [given.get(n, default) for n, default in operands.items()]
            done = core.record(template, tensors, arguments)
            return done if name is None else done.named(name)

        return issue

    return declare


def _hashable(value: Any) -> Any:
    return tuple(map(_hashable, value)) if isinstance(value, list | tuple) else value
