"""What is known of an expression while it is rewritten: text, shape, and affine indices."""

from __future__ import annotations

import ast
import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["python", "tile", "index", "mask", "grid", "blocks"]
Box = dict[int, tuple[str, str]]
"""Begin and end of axes, as text; axes are counted from the last, -1."""


class ByHandError(Exception):
    """A statement that is left: the rule's name."""


class OverloadedError(Exception):
    """An axis that has to become a loop, and its size."""


def _linear(node: ast.expr, factor: int, into: Counter[str]) -> None:
    match node:
        case ast.BinOp(left, ast.Add() | ast.Sub() as op, right):
            _linear(left, factor, into)
            _linear(right, factor if isinstance(op, ast.Add) else -factor, into)
        case ast.UnaryOp(ast.USub(), operand):
            _linear(operand, -factor, into)
        case ast.BinOp(ast.Constant(int(n)), ast.Mult(), other):
            _linear(other, factor * n, into)
        case ast.BinOp(other, ast.Mult(), ast.Constant(int(n))):
            _linear(other, factor * n, into)
        case ast.Constant(int(n)):
            into[""] += factor * n
        case _:
            into[ast.unparse(node)] += factor


def total(*parts: tuple[int, str]) -> str:
    """A sum of multiples of expressions, simplified."""
    terms: Counter[str] = Counter()
    for factor, text in parts:
        _linear(ast.parse(text, mode="eval").body, factor, terms)
    last = terms.pop("", 0)
    shown = []
    for text, n in sorted(terms.items(), key=lambda item: item[1] < 0):
        if n:
            one = f"({text})" if abs(n) == 1 else f"{abs(n)} * ({text})"
            shown.append(("-" if n < 0 else "+" if shown else "") + one)
    if last or not shown:
        shown.append(f"{last:+d}" if shown else str(last))
    return tidy("".join(shown))


def tidy(text: str) -> str:
    """Without parentheses that are not needed."""
    return ast.unparse(ast.parse(text, mode="eval"))


def product(*factors: str) -> str:
    """A product, without factors of 1."""
    numbers = [int(f) for f in factors if f.lstrip("-").isdigit()]
    rest = [f for f in factors if not f.lstrip("-").isdigit()]
    count = math.prod(numbers)
    if not rest or not count:
        return str(count)
    if len(rest) == 1:
        return total((count, rest[0]))
    return tidy(" * ".join([*([str(count)] if count != 1 else []), *[f"({f})" for f in rest]]))


@dataclass
class Value:
    """An expression of the new text.

    Attributes:
        text: how it is written; of an affine view, `view` writes it.
        shape: sizes as text; None where they are not known.
        dtype: its dtype as text; "" where it is not known.
        memory: "sbuf", "psum" or "hbm"; "" where it is not known.
        blocks: block dimensions that are still to be indexed, of lists of tiles.
        offset: of an index.
        terms: of an index: (coefficient, size) of each axis.
        parts: of a mask: indices that are not negative where it holds; of a grid, its axes; of an
            affine view, the index of each dimension of `base`.
    """

    text: str
    kind: Kind = "python"
    shape: tuple[str, ...] | None = None
    dtype: str = ""
    memory: str = ""
    blocks: int = 0
    offset: str = "0"
    terms: dict[int, tuple[str, str]] = field(default_factory=dict)
    parts: list[Value] = field(default_factory=list)
    base: Value | None = None

    def size(self, dim: int) -> str:
        """The size of a dimension."""
        return self.shape[dim] if self.shape else f"{self.text}.shape[{dim}]"

    def shape_text(self) -> str:
        """The shape as an expression."""
        if self.shape is None:
            return f"{self.text}.shape"
        return f"({', '.join(self.shape)}{',' * (len(self.shape) == 1)})"

    def dtype_text(self) -> str:
        """The dtype as an expression."""
        return self.dtype or f"{self.text}.dtype"


def index(offset: str, terms: dict[int, tuple[str, str]]) -> Value:
    """An affine index."""
    return Value("", "index", offset=offset, terms=terms)


def added(a: Value, b: Value, sign: int = 1) -> Value:
    """a + sign * b of an index and an index or a number."""
    if b.kind != "index":
        return index(total((1, a.offset), (sign, b.text)), a.terms)
    if a.kind != "index":
        return added(scaled(b, str(sign)), a)
    terms = dict(a.terms)
    for axis, (step, size) in b.terms.items():
        before = terms.get(axis, ("0", size))[0]
        terms[axis] = (total((1, before), (sign, step)), size)
    return index(total((1, a.offset), (sign, b.offset)), terms)


def scaled(a: Value, factor: str) -> Value:
    """An index times a number."""
    terms = {axis: (product(factor, step), size) for axis, (step, size) in a.terms.items()}
    return index(product(factor, a.offset), terms)


def fixed(a: Value, places: dict[int, str]) -> Value:
    """An index where axes became loops; those before them count on without them."""
    offset, terms = a.offset, {}
    for axis, (step, size) in a.terms.items():
        if axis in places:
            offset = total((1, offset), (1, product(step, places[axis])))
        else:
            terms[axis + sum(axis < gone for gone in places)] = (step, size)
    return index(offset, terms)


def unfixed(axis: int, places: dict[int, str]) -> int:
    """The axis that `fixed` counts as this one."""
    return [a for a in range(-1, axis - len(places) - 1, -1) if a not in places][-axis - 1]


def box_of(mask: Value | None) -> Box:
    """The ends of axes to which a mask cuts them. Raises ByHandError where it is no box."""
    box: Box = {}
    for part in mask.parts if mask else ():
        moving = [(axis, *term) for axis, term in part.terms.items() if term[0] != "0"]
        if len(moving) != 1 or moving[0][1] not in ("1", "-1"):
            raise ByHandError("mask")
        axis, step, size = moving[0]
        low, high = box.get(axis, ("0", size))
        if step == "1":
            low = least("max", low, total((-1, part.offset)))
        else:
            high = least("min", high, total((1, part.offset), (1, "1")))
        box[axis] = (low, high)
    return box


def least(function: str, a: str, b: str) -> str:
    """min or max of two sizes."""
    return a if a == b else f"{function}({a}, {b})"


def axes_of(value: Value) -> list[int]:
    """The axes of an affine view, the first one first."""
    axes = [axis for part in value.parts for axis in part.terms]
    return list(range(min(axes, default=-1), 0))


def shape_of(value: Value) -> tuple[str, ...]:
    """The sizes of an affine view's axes."""
    sizes = {axis: size for part in value.parts for axis, (_, size) in part.terms.items()}
    return tuple(sizes.get(axis, "1") for axis in axes_of(value))


def view(value: Value, box: Box | None = None, last: tuple[int, ...] = ()) -> str:
    """An affine view as slices, or where these cannot say it, as an access pattern.

    Args:
        value: the tile; one without affine indices is sliced to the box.
        box: ends of axes.
        last: axes to move to the end.

    Raises:
        OverloadedError: an engine's access pattern cannot say it.
    """
    box = box or {}
    base = value.base
    if base is None:
        if not box or value.shape is None:
            return value.text
        cut = []
        for axis in range(-len(value.shape), 0):
            low, high = box.get(axis, ("0", ""))
            whole = axis not in box or value.shape[axis] == "1"
            cut.append(":" if whole else f"{low}:{high}")
        return f"{value.text}[{', '.join(cut)}]" if set(cut) != {":"} else value.text
    ends = {axis: ("0", size) for part in value.parts for axis, (_, size) in part.terms.items()}
    ends |= {axis: end for axis, end in box.items() if axis in ends}
    order = [axis for part in value.parts for axis in part.terms]
    steps = [step for part in value.parts for step, _ in part.terms.values()]
    is_simple = order == sorted(set(order)) and all(len(part.terms) < 2 for part in value.parts)
    if is_simple and not last and not any(step.startswith("-") for step in steps):
        return f"{base.text}[{_slices(value, ends)}]"
    return _pattern(value, ends, last)


def _slices(value: Value, ends: Box) -> str:
    missing = len(axes_of(value)) - sum(1 for part in value.parts if part.terms)
    keys = []
    for part in reversed(value.parts):
        if not part.terms:
            kept = f"{part.offset}:{total((1, part.offset), (1, '1'))}"
            keys.append(kept if missing > 0 else part.offset)
            missing -= 1
            continue
        ((axis, (step, _)),) = part.terms.items()
        low, high = ends[axis]
        start = total((1, part.offset), (1, product(step, low)))
        if step == "1":
            stop = total((1, part.offset), (1, high))
            keys.append(f"{start if start != '0' else ''}:{stop}")
        else:
            reach = product(step, total((1, high), (-1, "1")))
            keys.append(f"{start}:{total((1, part.offset), (1, reach), (1, '1'))}:{step}")
    return ", ".join(reversed(keys))


def _pattern(value: Value, ends: Box, last: tuple[int, ...]) -> str:
    base = value.base
    assert base is not None
    on_chip = base.memory != "hbm"
    if base.base is not None or base.kind != "tile" or not base.text.isidentifier():
        raise ByHandError("index-pattern")  # an access pattern starts from the tensor's own storage
    dims = range(len(value.parts))
    strides = [product(*[base.size(d) for d in dims[i + 1 :]]) for i in dims]
    crowded = [p for p in value.parts if len(p.terms) > 1]
    negative = [p for p in crowded if any(step.startswith("-") for step, _ in p.terms.values())]
    axes = axes_of(value)
    if negative or (on_chip and len(axes) > 5):
        part = next(iter(negative or crowded), value.parts[-1])
        axis = min(part.terms, default=axes[1])
        raise OverloadedError(axis, shape_of(value)[axis])
    pairs, offset = {}, []
    for axis in axes_of(value):
        low, high = ends.get(axis, ("0", "1"))
        steps = [(part.terms[axis][0], s) for part, s in zip(value.parts, strides, strict=True)
                 if axis in part.terms]  # fmt: skip
        stride = total(*[(1, product(*pair)) for pair in steps]) if steps else "0"
        pairs[axis] = f"[{stride}, {total((1, high), (-1, low))}]"
        offset.append((1, product(stride, low)))
    offset += [(1, product(p.offset, s)) for p, s in zip(value.parts, strides, strict=True)]
    order = [a for a in pairs if a not in last] + [a for a in pairs if a in last]
    start = total(*offset)
    text = f"[{', '.join(pairs[a] for a in order)}]"
    return f"{base.text}.ap({text}{'' if start == '0' else f', offset={start}'})"
