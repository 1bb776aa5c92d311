"""`NKIObject`: the data classes of kernels."""

import dataclasses
from typing import Any, NamedTuple

import pytest
from samples import data, equal

import neuroncore as nc
from neuroncore import language as nl


def test_fields_of_a_class_are_none_unless_given():
    class Tiles(nl.NKIObject):
        rows: int
        columns: int = 4
        spare = None
        half = 0.5

        def area(self):
            return self.rows * self.columns

    first, second = Tiles(2), Tiles(3, columns=5, spare=1)
    assert (first.rows, first.columns, first.spare, first.half) == (2, 4, None, 0.5)
    assert (second.area(), second.spare, Tiles().rows) == (15, 1, None)
    for call in (lambda: Tiles(1, 2, 3, 4, 5), lambda: Tiles(height=1), lambda: Tiles(1, rows=2)):
        with pytest.raises(TypeError, match=r"Tiles\(rows, columns, spare, half\) got"):
            call()
    assert nl.NKIObject(any=1).any == 1


def test_data_classes_take_unannotated_fields_too():
    @dataclasses.dataclass
    class Buffers(nl.NKIObject):
        tiles: list = dataclasses.field(default_factory=list)
        q = None

        def __post_init__(self):
            self.tiles.append(self.q)

    @dataclasses.dataclass(frozen=True)
    class Frozen(nl.NKIObject):
        size: int
        name: str = "a"

    assert Buffers(q=3).tiles == [3]
    assert Buffers().tiles == [None]
    assert Frozen(4) == Frozen(size=4, name="a") != Frozen(5)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Frozen(4).size = 5  # pyright: ignore


def test_a_class_keeps_its_own_initializer():
    class Own(nl.NKIObject):
        x: int = 1

        def __init__(self, x):
            self.x = 2 * x

    class Below(Own):
        y: int = 1

    assert (Own(2).x, Below(3).x) == (4, 6)


class Pair(NamedTuple):
    tensor: Any
    size: int


def test_a_named_tuple_of_arguments_keeps_its_names():
    got = nc.simulate(lambda p: p.tensor if p.size == 2 else None, Pair(data((4, 6)), 2)).outputs
    equal(got, data((4, 6)))
