"""Tables of a TOML file as dataclasses: every key and every type is checked, in one line."""

from collections.abc import Collection, Mapping
from dataclasses import MISSING, fields
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from neuronmm_ops.eval.protocols import check_name

Table = TypeVar("Table")
_NAMES = {str: "a text", int: "an integer", float: "a number", bool: "true or false"}


def read_table(kind: type[Table], values: object, where: str) -> Table:
    """Make a dataclass of a table.

    Its annotations may be `str`, `int`, `float`, `bool`, `Literal` of texts, tuples of one of them
    (a list in the file; one bare value counts as a list of it), and `| None`.

    Args:
        kind: the dataclass.
        values: what the file holds.
        where: the table's name, for messages.

    Raises:
        ValueError: a key is unknown or missing, or a value has another type.
    """
    table, hints = checked_table(values, where), get_type_hints(kind)
    check_keys(table, hints, where)
    for field in fields(kind):  # pyright: ignore[reportArgumentType]  (any dataclass)
        if field.name not in table and field.default is MISSING:
            raise ValueError(f"{_inside(where)}{field.name} is missing")
    return kind(**{key: _checked(_inside(where) + key, table[key], hints[key]) for key in table})


def checked_table(values: object, where: str) -> Mapping[str, Any]:
    """Return what the file holds, which must be a table."""
    if not isinstance(values, dict):
        raise ValueError(f"{where or 'the file'} must be a table, got {values!r:.50}")
    return values


def check_keys(table: Mapping[str, Any], known: Collection[str], where: str) -> None:
    """Raise ValueError, with the nearest known name, for a key that is not known."""
    for key in table:
        check_name(f"key of {where}" if where else "key", key, known)


def _inside(where: str) -> str:
    return f"{where}." if where else ""


def _checked(name: str, value: Any, hint: Any) -> Any:
    """Return the value as the hint wants it."""
    choices = [choice for choice in get_args(hint) if choice is not type(None)]
    if type(None) in get_args(hint):
        hint, choices = choices[0], list(get_args(choices[0]))
    if get_origin(hint) is tuple:
        if isinstance(value, str) and choices[0] is float:
            raise ValueError(f"{name} must be numbers such as [0.2], got the text {value!r:.50}")
        items = value if isinstance(value, list) else [value]
        return tuple(_checked(name, item, choices[0]) for item in items)
    if get_origin(hint) is Literal:
        if value not in choices:
            raise ValueError(f"{name} must be one of {', '.join(choices)}; got {value!r}")
        return value
    # A bool is an int, and 1 is as good a float as 1.0.
    allowed = (int, float) if hint is float else hint
    if not isinstance(value, allowed) or isinstance(value, bool) != (hint is bool):
        raise ValueError(f"{name} must be {_NAMES[hint]}, got {value!r:.50}")
    return hint(value)
