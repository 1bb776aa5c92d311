"""`NKIObject`: the base of classes that a kernel may use."""

from __future__ import annotations

import functools
import inspect
from dataclasses import MISSING, Field
from types import FunctionType
from typing import Any

_NO_FIELD = (FunctionType, classmethod, property, staticmethod)


class NKIObject:
    """Base of the classes of kernels, which are data classes with or without `@dataclass`.

    Unless a class defines `__init__`, it takes its fields by position or name; those without a
    default are None; then `__post_init__` runs (NKI language guide, Class Support). Its fields are
    what it annotates, then what else it assigns in its body.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Give the class its initializer, which `@dataclass` then leaves alone."""
        super().__init_subclass__(**kwargs)
        if cls.__init__ in (NKIObject.__init__, _set_fields) and _fields(cls):
            cls.__init__ = _set_fields

    def __init__(self, **kwargs: Any) -> None:
        """Set attributes, of a class without fields."""
        for name, value in kwargs.items():
            setattr(self, name, value)

    def __post_init__(self) -> None:
        """Run after the initializer; for classes to define."""


def _set_fields(self: NKIObject, *args: Any, **kwargs: Any) -> None:
    cls = type(self)
    names = _fields(cls)
    values = dict(zip(names, args, strict=False))
    unknown = [n for n in kwargs if n not in names or n in values]
    if unknown or len(args) > len(names):
        problem = f"twice or not a field: {', '.join(unknown)}" if unknown else "too many values"
        raise TypeError(f"{cls.__name__}({', '.join(names)}) got {problem}")
    values |= kwargs
    for name in names:
        value = values[name] if name in values else _default(cls, name)
        object.__setattr__(self, name, value)  # a frozen data class refuses setattr
    self.__post_init__()


@functools.cache
def _fields(cls: type) -> tuple[str, ...]:
    """Names of a class's fields, those of its bases first."""
    fields: dict[str, None] = {}
    for base in reversed(cls.__mro__):
        if base in (NKIObject, object):
            continue
        fields |= dict.fromkeys(inspect.get_annotations(base))
        plain = {n for n, v in vars(base).items() if not isinstance(v, _NO_FIELD)}
        fields |= dict.fromkeys([n for n in vars(base) if n in plain and not n.startswith("_")])
    return tuple(fields)


def _default(cls: type, name: str) -> Any:
    value = getattr(cls, "__dataclass_fields__", {}).get(name, getattr(cls, name, None))
    if not isinstance(value, Field):
        return value
    if value.default_factory is not MISSING:
        return value.default_factory()
    return None if value.default is MISSING else value.default
