"""What an op is: `OpSpec` says which operands it takes, and holds its arithmetic.

Registration, launchers and tables of shapes are loops over the specs in `ops/definitions`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from inspect import signature
from itertools import chain
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from neuronmm_ops.storages import COMPUTES, STORAGES, WeightStorage, size_of, storage_of

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
LEADING = "..."
Values = tuple[str, ...] | float
"""Of an argument that is no tensor: the strings that it may be, or a number's default."""
Options = tuple[str | float, ...]
Results = Tensor | tuple[Tensor, ...] | None
_WHICH = {-1: "last", -2: "first"}
_LINES = {-1: "columns", -2: "rows"}


class Operand(NamedTuple):
    """A tensor of an op.

    Attributes:
        name: as in the schema.
        shape: a name for each dimension, `K r`; the same name is the same size in all operands, a
            number that size: `K 2 I` packs two weights. `...` stands for any leading dimensions.
        role: "activation" is x, and tokens with it, "factor" a matrix of weights, or several,
            packed, "vector" a vector of weights, "bias" a vector added to the result, "scale" the
            fp32 vector `<factor>_scale` that multiplies the columns of a one-byte factor's product,
            "integer" int32 numbers that are read at run time, "state" what is changed in place.
        optional: may be None; x stands for an activation that is.
        group: of an op on layers, the list of its schema that has this operand of each layer.
    """

    name: str
    shape: str
    role: Literal["activation", "factor", "vector", "bias", "scale", "integer", "state"] = "factor"
    optional: bool = False
    group: str = ""

    @property
    def sizes(self) -> tuple[str, ...]:
        """Names of the dimensions, without the leading ones."""
        return tuple(name for name in self.shape.split() if name != LEADING)


class Cut(NamedTuple):
    """How one call becomes a call on each of several ranks, which hold parts of its operands.

    Attributes:
        dims: for each of a spec's `tensors` the dimension that is cut, counted from the last (-1),
            None for a tensor that every rank has whole.
        is_partial: whether the results of the ranks are summed, and a bias belongs to one rank
            alone. Otherwise they lie side by side, each size of `outputs` for itself.
    """

    dims: tuple[int | None, ...]
    is_partial: bool


class _EqualSizes(NamedTuple):
    """A rule: a dimension of one operand has the size of one of another."""

    name: str
    left: int
    left_dim: int
    right: int
    right_dim: int
    is_vector: bool


@dataclass(frozen=True, eq=False)
class OpSpec:
    """The op `neuronmm::<name>`: everything but its kernels, which are in `kernels/<name>`.

    K is the last dimension of x; ranks have lower-case names.

    Attributes:
        name: of the op.
        operands: in the order of the schema, x first.
        reference: the op in plain torch, for any device: its specification. Tools that read a
            schema from a function's signature read this one's.
        backward: `(grad, needs, x, *weights, *activations, *integers, *choices)` to the gradients
            of x, weights (factors and vectors) and activations, for rows grad [M, N], or as many as
            `outputs`, and x [M, K]; None for each that `needs` does not want. None where the op has
            no gradient, as one with a state.
        choices: arguments after the operands: strings, each with its values, the default first, and
            numbers, each with its default.
        outputs: the last size of each result `[..., N]`; `N_a+N_b` lie side by side in one.
        is_scaled: whether factors may be in one byte, with `scales` after the choices and then the
            choice `compute`.
        computes: values of that choice.
        is_mixed: whether some factors may be in one byte, and others not.
        cuts: names of the sizes that ranks may divide between them; `N` stands for all sizes of
            `outputs`.
        rule: raises ValueError for arguments, in the order of the schema, which shapes and dtypes
            alone do not refuse.

    Raises:
        ValueError: an op with a state has a gradient or a cut.
    """

    name: str
    operands: tuple[Operand, ...]
    reference: Callable[..., Results]
    backward: Callable[..., tuple[Tensor | None, ...]] | None = None
    choices: Mapping[str, Values] = field(default_factory=dict[str, Values])
    outputs: tuple[str, ...] = ("N",)
    is_scaled: bool = False
    computes: tuple[str, ...] = COMPUTES
    is_mixed: bool = False
    cuts: tuple[str, ...] = ()
    rule: Callable[..., None] | None = None

    def __post_init__(self) -> None:
        if self.states and (self.backward or self.cuts):
            raise ValueError(f"{self.name}: an op with a state has neither backward nor cuts")

    @cached_property
    def factors(self) -> tuple[int, ...]:
        """Places of the factors among the operands."""
        return self._places("factor")

    @cached_property
    def weights(self) -> tuple[int, ...]:
        """Places of the factors and vectors."""
        return self._places("factor", "vector")

    @cached_property
    def activations(self) -> tuple[int, ...]:
        """Places of the activations among the operands, that of x first."""
        return self._places("activation")

    @cached_property
    def integers(self) -> tuple[int, ...]:
        """Places of the integers."""
        return self._places("integer")

    @cached_property
    def states(self) -> tuple[int, ...]:
        """Places of the operands that are changed in place."""
        return self._places("state")

    def _places(self, *roles: str) -> tuple[int, ...]:
        return tuple(i for i, operand in enumerate(self.operands) if operand.role in roles)

    @cached_property
    def sides(self) -> tuple[tuple[str, ...], ...]:
        """Of each of `outputs` the sizes that lie side by side."""
        return tuple([tuple(names.split("+")) for names in self.outputs])

    @cached_property
    def scales(self) -> tuple[Operand, ...]:
        """The fp32 vector `<factor>_scale` of each factor's columns; empty where none are taken."""
        factors = [self.operands[place] for place in self.factors if self.is_scaled]
        return tuple(
            Operand(f"{factor.name}_scale", " ".join(factor.sizes[1:]), "scale", optional=True)
            for factor in factors
        )

    @cached_property
    def tensors(self) -> tuple[Operand, ...]:
        """The operands and their scales, as kernels take them."""
        return self.operands + self.scales

    @cached_property
    def options(self) -> Mapping[str, Values]:
        """The choices, and `compute`."""
        return {**self.choices, "compute": self.computes} if self.is_scaled else self.choices

    # --- calls -----------------------------------------------------------------------------------

    @property
    def schema(self) -> str:
        """The schema, as `torch.library` takes it."""
        tensors = tuple([self.declared(place) for place in range(len(self.tensors))])
        return self.schema_of(self.joined(tensors, self.declared_options))

    def schema_of(self, arguments: Sequence[str]) -> str:
        """The schema of all arguments."""
        results = ", ".join(["Tensor"] * len(self.outputs))
        results = results if len(self.outputs) == 1 else f"({results})"
        return f"{self.name}({', '.join(arguments)}) -> {results}"

    def declared(self, place: int) -> str:
        """A tensor in the schema."""
        operand = self.tensors[place]
        kind = f"Tensor(a{place}!)" if place in self.states else "Tensor"
        return f"{kind}? {operand.name}=None" if operand.optional else f"{kind} {operand.name}"

    @property
    def declared_options(self) -> tuple[str, ...]:
        """The options in the schema."""
        pairs = zip(self.options, self.defaults, strict=True)
        return tuple(
            [
                f'str {name}="{value}"'
                if isinstance(value, str)
                else f"{type(value).__name__} {name}={value}"
                for name, value in pairs
            ]
        )

    def of(self, args: tuple[Any, ...]) -> OpSpec:
        """The op on what a call has: of an op on layers, that of so many."""
        del args
        return self

    def listed(self, tensors: Sequence[Any]) -> Sequence[Any]:
        """The tensors as kernels take them."""
        return tensors

    def planned(self, tensors: Sequence[Any]) -> list[tuple[Operand, list[Tensor]]]:
        """What a plan is for: each operand that is given, of as many layers as have it."""
        pairs = zip(self.operands, tensors, strict=False)
        return [(operand, [tensor]) for operand, tensor in pairs if tensor is not None]

    def complete(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """All arguments of a call in the order of the schema, the default where one is missing."""
        if kwargs:
            bound = signature(self.reference).bind(*args, **kwargs)
            bound.apply_defaults()
            return bound.args
        return args + self._defaults[len(args) :]

    def split(self, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], Options]:
        """All arguments of a call as the values of `tensors` and of `options`."""
        start = len(self.operands)
        scales = start + len(self.choices)
        end = scales + len(self.scales)
        return args[:start] + args[scales:end], args[start:scales] + args[end:]

    def joined(self, tensors: tuple[Any, ...], options: tuple[Any, ...]) -> tuple[Any, ...]:
        """What `split` took apart, in the order of the schema."""
        start, count = len(self.operands), len(self.choices)
        return (*tensors[:start], *options[:count], *tensors[start:], *options[count:])

    @cached_property
    def defaults(self) -> Options:
        """The default of each of `options`."""
        values = self.options.values()
        return tuple([each[0] if isinstance(each, tuple) else each for each in values])

    @cached_property
    def _defaults(self) -> tuple[str | float | None, ...]:
        return self.joined((None,) * len(self.tensors), self.defaults)

    def returned(self, results: Sequence[Tensor]) -> Results:
        """What a call returns for as many results as `outputs`."""
        return results[0] if len(self.outputs) == 1 else tuple(results) or None

    # --- shapes ----------------------------------------------------------------------------------

    def shapes(self, sizes: Mapping[str, int], lead: Sequence[int] = ()) -> list[tuple[int, ...]]:
        """The shapes of all operands.

        Args:
            sizes: of the dimensions by name.
            lead: the leading dimensions.
        """
        return [
            (
                *(lead if LEADING in operand.shape else ()),
                *[int(name) if name.isdigit() else sizes[name] for name in operand.sizes],
            )
            for operand in self.operands
        ]

    def widths(self, tensors: Sequence[Any]) -> list[int]:
        """All sizes of `outputs` for the op's tensors."""
        places = [self._first[name] for name in chain(*self.sides)]
        return [tensors[index].shape[dim] for index, dim in places]

    def result_shapes(self, tensors: Sequence[Any]) -> list[tuple[int, ...]]:
        """The shape `[..., N]` of each result for the op's tensors."""
        widths = iter(self.widths(tensors))
        return [
            (*tensors[0].shape[:-1], sum([next(widths) for _ in names])) for names in self.sides
        ]

    def cut(self, name: str) -> Cut:
        """How ranks divide the size called `name`: a contraction to sums, `N` to parts.

        With `compute="fp8"` a rank rounds its part of a token by that part's own scale.

        Raises:
            ValueError: it is none of `cuts`.
        """
        if name not in self.cuts:
            raise ValueError(
                f"{self.name}: ranks may divide {' or '.join(self.cuts) or 'nothing'}, got {name!r}"
            )
        names = tuple(chain(*self.sides)) if name == "N" else (name,)
        dims: list[int | None] = [None] * len(self.tensors)
        for size, index, dim in self._dimensions():
            if size in names:
                dims[index] = dim
        return Cut(tuple(dims), is_partial=name != "N")

    def _dimensions(self) -> Iterator[tuple[str, int, int]]:
        """Each named size, the tensor that has it, and its dimension, counted from the last."""
        rest = (index for index in range(len(self.tensors)) if index not in self.activations)
        for index in chain(self.activations, rest):
            operand = self.tensors[index]
            for dim, name in enumerate(operand.sizes, -len(operand.sizes)):
                if not name.isdigit():
                    yield name, index, dim

    @cached_property
    def _first(self) -> dict[str, tuple[int, int]]:
        """Operand and dimension where each named size comes first."""
        firsts: dict[str, tuple[int, int]] = {}
        for name, index, dim in self._dimensions():
            firsts.setdefault(name, (index, dim))
        return firsts

    # --- checks ----------------------------------------------------------------------------------

    def check(self, *args: Any) -> None:
        """Check a call's arguments, in the order of the schema.

        Raises:
            ValueError: shapes do not fit, or a choice is unknown.
            TypeError: dtypes or devices differ, or the dtype is not supported.
        """
        tensors, options = self.split(self.complete(args, {}))
        x = tensors[0]
        if x.dim() == 0:
            raise ValueError(
                f"{self.name}: x must have at least one dimension [..., K], got a 0-D tensor"
            )
        for operand, tensor in zip(self.operands, tensors, strict=False):
            self._check_dimensions(operand, tensor)
        if x.dtype not in FLOAT_DTYPES:
            raise TypeError(
                f"{self.name}: dtype must be bfloat16, float16, float32 or float64, got {x.dtype}; "
                "cast x and the weights"
            )
        first = self.first_factor(tensors)
        is_stored = self.is_scaled and storage_of(first.dtype) is not None
        for operand, tensor in zip(self.operands[1:], tensors[1:], strict=False):
            like = first if is_stored and operand.role == "factor" else x
            if self.is_mixed and operand.role == "factor" and tensor is not None:
                like = x if storage_of(tensor.dtype) is None else tensor
            dtype = torch.int32 if operand.role == "integer" else like.dtype
            if tensor is None or (tensor.dtype == dtype and tensor.device == x.device):
                continue
            if operand.role == "integer" and tensor.dtype != dtype:
                raise TypeError(f"{self.name}: {operand.name} must be {dtype}, got {tensor.dtype}")
            like = tensor if operand.role == "integer" else like
            raise TypeError(self._unlike(x, like, operand.name, tensor))
        scales = zip(self.factors, self.scales, tensors[len(self.operands) :], strict=False)
        for place, operand, scale in scales:
            self._check_scale(x, tensors[place], operand.name, scale)
        for place in self.activations[1:]:
            self._check_leading(x, self.operands[place].name, tensors[place])
        for rule in self._equal_sizes:
            _, left, left_dim, right, right_dim, is_vector = rule
            a, b = x if tensors[left] is None else tensors[left], tensors[right]
            is_missing = tensors[left] is None and left not in self.activations
            if b is None or is_missing:
                continue
            size, shape = size_of(a)[left_dim], size_of(b)
            is_unfit = is_vector and len(shape) != len(self.tensors[right].sizes)
            if right >= len(self.operands):
                is_unfit = shape != _scale_shape(tensors[self.factors[right - len(self.operands)]])
            elif not is_unfit:
                is_unfit = size != shape[right_dim]
            if is_unfit:
                raise ValueError(self._unequal(rule, a, b, a is x))
        self._check_options(options, first.dtype)
        if self.rule is not None:
            self.rule(*args)

    def first_factor(self, tensors: Sequence[Any]) -> Tensor:
        """The first factor that is given, x where there is none."""
        factors = (tensors[place] for place in self.factors)
        return next((factor for factor in factors if factor is not None), tensors[0])

    def _check_dimensions(self, operand: Operand, tensor: Tensor | None) -> None:
        """Refuse other dimensions than the names, and other sizes than the numbers of a shape."""
        if tensor is None and not operand.optional:
            raise ValueError(f"{self.name}: {operand.name} must be a tensor, got None; pass it")
        if tensor is None or operand.role in ("activation", "bias"):
            return
        shape, sizes = list(tensor.shape), operand.sizes
        numbers = [size for name, size in zip(sizes, shape, strict=False) if name.isdigit()]
        wanted = [int(name) for name in sizes if name.isdigit()]
        if len(shape) == len(sizes) and numbers == wanted:
            return
        is_matrix = operand.role == "factor" and len(sizes) == 2
        what = "be a matrix" if is_matrix else f"have shape [{', '.join(sizes)}]"
        raise ValueError(f"{self.name}: {operand.name} must {what}, got shape {shape}")

    def _check_options(self, options: Options, dtype: torch.dtype) -> None:
        """Refuse unknown values, and to round x to fp8 with factors of another `dtype`."""
        for (name, values), value in zip(self.options.items(), options, strict=True):
            if not isinstance(values, tuple):
                kind = type(values)
                if not isinstance(value, kind):
                    article = "an" if kind is int else "a"
                    raise TypeError(
                        f"{self.name}: {name} must be {article} {kind.__name__}, got {value!r}"
                    )
            elif value not in values:
                raise ValueError(
                    f"{self.name}: {name} must be one of {', '.join(values)}; got {value!r}"
                )
        storage = storage_of(dtype)
        computes = storage.computes if storage else COMPUTES[:1]
        if self.is_scaled and options[-1] not in computes:
            able = [each for each in STORAGES.values() if options[-1] in each.computes]
            raise TypeError(
                f"{self.name}: compute={options[-1]!r} needs factors in {_dtypes(able)}, "
                f"got {dtype}; use compute={COMPUTES[0]!r}"
            )

    def _check_scale(
        self, x: Tensor, factor: Tensor | None, name: str, scale: Tensor | None
    ) -> None:
        """Refuse one-byte factors without scales, scales of others, and those not in fp32."""
        needed = factor is not None and storage_of(factor.dtype) is not None
        factors = "no factor" if factor is None else f"factors in {factor.dtype}"
        if (scale is not None) != needed:
            raise ValueError(
                f"{self.name}: factors in {_dtypes(STORAGES.values())} have scales, "
                f"others have none, got {factors} and "
                + (f"no {name}; pass it" if needed else f"{name}; leave it out")
            )
        if scale is not None and scale.dtype != torch.float32:
            raise TypeError(
                f"{self.name}: {name} must be torch.float32, got {scale.dtype}; cast it"
            )
        if scale is not None and scale.device != x.device:
            raise TypeError(self._unlike(x, scale, name, scale))

    def _check_leading(self, x: Tensor, name: str, tensor: Tensor | None) -> None:
        """Refuse an activation with other tokens than x."""
        if tensor is not None and (tensor.dim() == 0 or tensor.shape[:-1] != x.shape[:-1]):
            raise ValueError(
                f"{self.name}: x and {name} must have the same leading dimensions, "
                f"got x {list(x.shape)} and {name} {list(tensor.shape)}"
            )

    def _unlike(self, x: Tensor, like: Tensor, name: str, tensor: Tensor) -> str:
        """Why a tensor's dtype, which must be that of `like`, or its device is refused."""
        owner = "x" if like is x else self.operands[self.factors[0]].name
        if tensor.dtype == like.dtype:
            ours, theirs = x.device, tensor.device
            return (
                f"{self.name}: x and {name} must be on the same device, got {ours} and {theirs}; "
                "move one of them with .to(device)"
            )
        return (
            f"{self.name}: {owner} and {name} must have the same dtype, got {like.dtype} and "
            f"{tensor.dtype}; cast one of them with .to(dtype)"
        )

    def _unequal(self, rule: _EqualSizes, left: Tensor, right: Tensor, is_x: bool) -> str:
        """Why the sizes of two operands, `left` x itself or not, are refused."""
        first, second = self.tensors[0 if is_x else rule.left].name, self.tensors[rule.right].name
        got = f"{first} {list(left.shape)}", f"{second} {list(right.shape)}"
        if rule.is_vector:
            text = f"{second} must have shape [{rule.name}] with {rule.name} the columns of {first}"
            got = got[::-1]
        elif rule.left_dim == rule.right_dim in _LINES:
            text = f"{first} and {second} must have the same number of {_LINES[rule.left_dim]}"
        elif rule.left_dim in _WHICH and rule.right_dim in _WHICH:
            which, other = _WHICH[rule.left_dim], _WHICH[rule.right_dim]
            text = f"{which} dimension of {first} must equal {other} dimension of {second}"
        else:
            text = f"{rule.name} must be the same size in {first} and {second}"
        return f"{self.name}: {text}, got {got[0]} and {got[1]}"

    @cached_property
    def _equal_sizes(self) -> tuple[_EqualSizes, ...]:
        """What the names of the dimensions ask of the operands' shapes."""
        return tuple(
            _EqualSizes(
                *(name, *self._first[name], index, dim),
                self.tensors[index].role in ("vector", "bias", "scale"),
            )
            for name, index, dim in self._dimensions()
            if self._first[name] != (index, dim)
        )


def _scale_shape(factor: Tensor) -> tuple[int, ...]:
    """The shape of a stored factor's scales."""
    storage = storage_of(factor.dtype)
    assert storage is not None
    return storage.shapes(*size_of(factor))[1]


def _dtypes(storages: Iterable[WeightStorage]) -> str:
    return " or ".join(str(storage.torch_dtype) for storage in storages)
