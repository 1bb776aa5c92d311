"""Ops on several layers: a group of operands is one list in the schema.

A list has the operands of one layer after those of the layer before it. What runs or checks a call
asks `LayeredSpec.of` for the spec of as many layers as it has, whose operands are tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from inspect import signature
from itertools import groupby
from typing import Any

from torch import Tensor

from neuronmm_ops.ops.spec import Operand, OpSpec, Options


@dataclass(frozen=True, eq=False)
class LayeredSpec(OpSpec):
    """An op on layers, without gradient: its arguments are tensors, lists, and then the options.

    Operands of a group follow each other. A size whose name begins with a lower-case letter is that
    of one layer. No list has a default: a schema has none for lists of tensors. Autocast leaves
    the arguments as they are.
    """

    @cached_property
    def scales(self) -> tuple[Operand, ...]:
        """As of any op, in a list."""
        return tuple([scale._replace(group="scales") for scale in super().scales])

    @cached_property
    def groups(self) -> dict[str, list[int]]:
        """The tensors' arguments by name: places of what a list has of each layer, or of one."""
        places = groupby(range(len(self.tensors)), lambda place: _argument(self.tensors[place]))
        return {name: list(own) for name, own in places}

    @property
    def schema(self) -> str:
        """The schema, as `torch.library` takes it."""
        tensors = [self._declared(name, places) for name, places in self.groups.items()]
        return self.schema_of([*tensors, *self.declared_options])

    def _declared(self, name: str, places: Sequence[int]) -> str:
        members = [self.tensors[place] for place in places]
        if not members[0].group:
            return self.declared(places[0]).removesuffix("=None")
        kind = f"Tensor(a{places[0]}!)" if places[0] in self.states else "Tensor"
        return f"{kind}{'?' * any(each.optional for each in members)}[] {name}"

    def complete(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """All arguments of a call in the order of the schema, the default where one is missing."""
        bound = signature(self.reference).bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.args

    def of(self, args: tuple[Any, ...]) -> LayersSpec:
        """The op on as many layers as a call has.

        Raises:
            ValueError: a list has too many operands for them, or too few.
        """
        lists = {
            name: (len(values), len(places))
            for (name, places), values in zip(self.groups.items(), args, strict=False)
            if self.tensors[places[0]].group
        }
        layers = max([count // each for count, each in lists.values()])
        for name, (count, each) in lists.items():
            is_optional = all(self.tensors[place].optional for place in self.groups[name])
            if (count != layers * each and not (count == 0 and is_optional)) or layers == 0:
                raise ValueError(
                    f"{self.name}: {name} must have {each} tensors for each layer, got {count} "
                    f"of {max(layers, 1)} layers"
                )
        return self._of(layers)

    def _of(self, layers: int) -> LayersSpec:
        if layers not in self._known:
            self._known[layers] = LayersSpec(
                self.name,
                tuple(_repeated(self.operands, layers)),
                self.reference,
                choices=self.choices,
                outputs=self.outputs,
                is_scaled=self.is_scaled,
                computes=self.computes,
                is_mixed=self.is_mixed,
                rule=self.rule,
                layered=self,
                layers=layers,
            )
        return self._known[layers]

    @cached_property
    def _known(self) -> dict[int, LayersSpec]:
        return {}

    def check(self, *args: Any) -> None:
        """As `OpSpec.check`, of as many layers as the call has."""
        self.of(self.complete(args, {})).check(*args)


@dataclass(frozen=True, eq=False)
class LayersSpec(OpSpec):
    """An op on so many layers: its tensors are those of all, its arguments lists.

    Attributes:
        layered: the op on any number of layers.
        layers: how many.
    """

    layered: LayeredSpec | None = None
    layers: int = 1

    @property
    def _of_any(self) -> LayeredSpec:
        assert self.layered is not None
        return self.layered

    @cached_property
    def scales(self) -> tuple[Operand, ...]:
        """Of each factor of each layer."""
        return tuple(_repeated(self._of_any.scales, self.layers))

    def complete(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """As of any number of layers."""
        return self._of_any.complete(args, kwargs)

    def split(self, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], Options]:
        """All arguments of a call as the values of `tensors` and of `options`."""
        groups, tensors = self._of_any.groups, list[Any]()
        for places, value in zip(groups.values(), args, strict=False):
            if not self._of_any.tensors[places[0]].group:
                tensors.append(value)
            else:
                tensors += list(value) or [None] * (len(places) * self.layers)
        return tuple(tensors), args[len(groups) :]

    def joined(self, tensors: tuple[Any, ...], options: tuple[Any, ...]) -> tuple[Any, ...]:
        """What `split` took apart, in the order of the schema."""
        return (*self.listed(tensors), *options)

    def listed(self, tensors: Sequence[Any]) -> list[Any]:
        """The tensors as kernels take them, those of a group in a tuple; () where all are None."""
        values, start = list[Any](), 0
        for places in self._of_any.groups.values():
            if not self._of_any.tensors[places[0]].group:
                values.append(tensors[start])
                start += 1
                continue
            own = tuple(tensors[start : start + len(places) * self.layers])
            values.append(own if any(each is not None for each in own) else ())
            start += len(own)
        return values

    def planned(self, tensors: Sequence[Any]) -> list[tuple[Operand, list[Tensor]]]:
        """What a plan of one layer is for: each operand that the first has, of those like it.

        A layer is like the first one if it has the same operands: as many Linears are pairs.
        """
        values = dict(zip([each.name for each in self.operands], tensors, strict=False))
        layers = [
            [values[_of_layer(each, n).name if each.group else each.name] for each in self._own]
            for n in range(self.layers)
        ]
        missing = [[each is None for each in own] for own in layers]
        alike = [own for own, gaps in zip(layers, missing, strict=True) if gaps == missing[0]]
        operands = zip(self._own, zip(*alike, strict=True), strict=True)
        return [(operand, list(own)) for operand, own in operands if own[0] is not None]

    @property
    def _own(self) -> tuple[Operand, ...]:
        """The operands of any layer."""
        return self._of_any.operands


def _argument(operand: Operand) -> str:
    return operand.group or operand.name


def _repeated(operands: Iterable[Operand], layers: int) -> list[Operand]:
    """The operands of all layers, in the order of the lists."""
    repeated: list[Operand] = []
    for _, members in groupby(operands, _argument):
        own = list(members)
        if not own[0].group:
            repeated += own
            continue
        for n in range(layers):
            repeated += [_of_layer(each, n) for each in own]
    return repeated


def _of_layer(operand: Operand, n: int) -> Operand:
    shape = [f"{name}_{n}" if name[0].islower() else name for name in operand.shape.split()]
    return operand._replace(name=f"{operand.name}_{n}", shape=" ".join(shape))
