"""What a setting's type asks of a value, in words."""

from __future__ import annotations

import types
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

import msgspec

_WORDS: dict[Any, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


def expected(kind: Any) -> str:
    """``a whole number from 0 to 65535`` and the like; of a tuple, what each of its values must be."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        limits = next((a for a in arguments[1:] if isinstance(a, msgspec.Meta)), msgspec.Meta())
        return expected(arguments[0]) + _limits(limits)
    if origin in (Union, types.UnionType):
        return " or ".join("none" if part is type(None) else expected(part) for part in arguments)
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if origin is tuple:
        return expected(arguments[0])
    return _WORDS.get(kind, str(getattr(kind, "__name__", kind)))


def _limits(meta: msgspec.Meta) -> str:
    low, high = meta.ge, meta.le
    if meta.gt is not None:
        return f" above {meta.gt:g}" + ("" if high is None else f" and at most {high:g}")
    if low is not None and high is not None:
        return f" from {_number(low)} to {_number(high)}"
    if low is not None:
        return f" of at least {_number(low)}"
    return "" if high is None else f" of at most {_number(high)}"


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


def quoted(value: object) -> str:
    """A value as a message shows it: texts in quotes, except those that are numbers."""
    if isinstance(value, list | tuple):
        return ", ".join(quoted(part) for part in cast("list[object]", value)) or "empty"
    if not isinstance(value, str):
        return repr(value)
    try:
        float(value)
    except ValueError:
        return repr(value)
    return value
