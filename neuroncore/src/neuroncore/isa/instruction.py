"""What makes a function an instruction of `nki.isa`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable
from typing import Any, ParamSpec

from neuroncore import core as running
from neuroncore.checks.base import note, refuse, seen
from neuroncore.isa import indirection
from neuroncore.isa.enums import OPTIONS, option
from neuroncore.memory.indirection import IndirectTile
from neuroncore.memory.tensor import NkiTensor
from neuroncore.timing.trace import InstructionTemplate, NkiInstruction

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
        signature = inspect.signature(build)
        parameters = signature.parameters
        operands = {n: p.default for n, p in parameters.items() if p.annotation in _OPERANDS}
        tiles = {n for n, p in parameters.items() if p.annotation == "NkiTensor"}
        options = {n: OPTIONS[k] for n, p in parameters.items() if (k := p.annotation) in OPTIONS}

        def prepared(core: running.SimulatedCore, *args: P.args, **kwargs: P.kwargs) -> Any:
            """The template, the places of the tensors among the arguments, and their names."""
            names = [*[*parameters][: len(args)], *kwargs]
            if "dtype" in kwargs and "dtype" not in parameters:
                _check_dtype(opcode, kwargs.get("dst", args[0] if args else None), kwargs["dtype"])
                kwargs.pop("dtype")
            try:
                call = signature.bind(*args, **kwargs)
            except TypeError as error:
                refuse(f"{opcode}: {error}; its signature is {opcode}{_shown(signature)}")
            for n in tiles & call.arguments.keys():
                if not isinstance(call.arguments[n], NkiTensor):
                    refuse(f"{opcode}: {n} must be a tile; got {seen(call.arguments[n])}")
            for n in options.keys() & call.arguments.keys():
                call.arguments[n] = option(opcode, n, options[n], call.arguments[n])
            template = build(*call.args, **call.kwargs)
            values = call.arguments
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
                entry = core.templates.get(key)
            except TypeError:  # a list among the options, or what is no option at all
                parts = list(map(running.hashable, parts))
                for part in parts:
                    if not isinstance(part, Hashable):
                        refuse(f"{opcode}: takes tiles and options; got {seen(part)}")
                key = (build, len(args), *kwargs, *parts)
                entry = core.templates.get(key)
            if entry is None:
                if any(v.__class__ is IndirectTile for v in values):
                    by_name = dict(zip([*[*parameters][: len(args)], *kwargs], values, strict=True))
                    return indirection.issue(issue, opcode, {**by_name, "name": name})
                entry = core.templates[key] = prepared(core, *args, **kwargs)
            template, places, names = entry
            tensors = [values[i] for i in places]
            arguments = None
            if core.execute:
                by_name = dict(zip(names, values, strict=True))
                arguments = [by_name.get(n, default) for n, default in operands.items()]
            done = core.record(template, tensors, arguments)
            return done if name is None else done.named(name)

        return issue

    return declare


def _check_dtype(opcode: str, dst: Any, dtype: Any) -> None:
    """`dtype=` of NKI 0.1 and 0.2, which named the dtype of a result that was returned."""
    if getattr(dst, "dtype", None) != dtype:
        refuse(f"{opcode}: takes no dtype, the result has that of dst, {dst}; got {seen(dtype)}")
    note(f"{opcode}: dtype={dtype!r} is dst's own and without effect; NKI 0.3 and later refuse it")


def _shown(signature: inspect.Signature) -> str:
    """The names of the parameters, those with a default as `name=default`."""
    plain = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=plain, return_annotation=signature.empty))
