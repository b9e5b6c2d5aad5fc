"""The budget of one template's rendering: what values weigh, and what operations cost before they are done.

A unit is about one character copied. Most operations cost what they are given and what they return; the table at the
end has those that make more of their input than it weighs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, ItemsView, KeysView, Mapping, ValuesView
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.utils import Namespace

STEP = 32
"""Charge of one loop iteration, one operator, one item of a list."""
CALL = 256
"""Charge of one call of a function, macro, filter or test."""
LARGEST_NUMBER = 100_000
"""Largest count, width or precision that a template may hand to a function."""
LONGEST_PATH = 1000
"""Longest dotted path by which a filter may look up attributes."""

_WIDE = re.compile(r"\d{4,}|\{[^{}]*\{|%[^%a-zA-Z]*\*")
_CONTAINERS = (list, tuple, set, frozenset, KeysView, ValuesView, ItemsView)


class OverBudget(SecurityError):
    """The template does more than its budget allows."""


class Meter:
    """What is left of one rendering's budget."""

    def __init__(self, units: int) -> None:
        self.left = units

    def spend(self, units: int) -> None:
        """Charge ``units``; raises ``OverBudget`` when they are not left."""
        self.left -= max(units, 0)
        if self.left < 0:
            raise OverBudget("the chat template does more work than its budget allows")

    def weigh(self, value: Any) -> int:
        """Size of a value in units, shared parts counted as often as they occur; raises when over what is left."""
        if isinstance(value, str | bytes):
            return len(value)
        total, stack = 0, [value]
        while stack:
            item = stack.pop()
            if isinstance(item, str | bytes):
                total += len(item)
            elif isinstance(item, range):
                total += STEP * len(item)
            elif isinstance(item, _CONTAINERS):
                total += STEP * len(item)
                stack.extend(item)
            elif isinstance(item, Namespace):
                total += STEP
                stack.append(object.__getattribute__(item, "_Namespace__attrs"))
            elif isinstance(item, Mapping):
                total += STEP * len(item)
                stack.extend(item.keys())
                stack.extend(item.values())
            if total > self.left:
                self.spend(total)
        return total

    def before(self, name: str, value: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Charge what a filter or a method of a string is about to need beyond the weight of its input."""
        given = [*args, *kwargs.values()]
        if name not in ("default", "d"):
            for number in given:
                if isinstance(number, int) and abs(number) > LARGEST_NUMBER:
                    raise OverBudget(f"the chat template calls {name} with {number}; expected up to {LARGEST_NUMBER}")
        if name in _BY_PATH:
            paths = [kwargs.get("attribute")] if name == "map" else given
            if any(isinstance(path, str) and len(path) > LONGEST_PATH for path in paths):
                raise OverBudget(f"the chat template calls {name} with a path of over {LONGEST_PATH} characters")
            if name == "sum" and any(isinstance(each, list | tuple) for each in given):
                raise OverBudget("the chat template sums what are no numbers")
        elif name == "join":
            self.spend(_joined(self, value, given))
        elif isinstance(value, str) and name in _OF_TEXT:
            self.spend(_OF_TEXT[name](self, value, given))


def check_format(text: str) -> None:
    """Refuse a format string that asks for a great or a computed width."""
    if _WIDE.search(text):
        raise OverBudget("the chat template formats with a width of more than three digits, or a computed one")


def _joined(meter: Meter, value: Any, given: list[Any]) -> int:
    """The filter is ``items | join(separator)``, the method ``separator.join(items)``."""
    separator, items = (value, given[0] if given else ()) if isinstance(value, str) else (given, value)
    return meter.weigh(separator) * (len(items) if hasattr(items, "__len__") else LARGEST_NUMBER)


def _replaced(meter: Meter, value: str, given: list[Any]) -> int:
    return value.count(given[0]) * meter.weigh(given[1:]) if given and isinstance(given[0], str) else 0


def _indented(meter: Meter, value: str, given: list[Any]) -> int:
    width = max((each if isinstance(each, int) else meter.weigh(each) for each in given), default=4)
    return width * (value.count("\n") + 1)


def _expanded(_meter: Meter, value: str, given: list[Any]) -> int:
    return value.count("\t") * max((each for each in given if isinstance(each, int)), default=8)


def _split(_meter: Meter, value: str, given: list[Any]) -> int:
    separator = given[0] if given and isinstance(given[0], str) and given[0] else None
    return STEP * value.count(separator) if separator else 4 * len(value)


def _searched(_meter: Meter, value: str, given: list[Any]) -> int:
    """Looked for every character of the one at every place of the other, several in the time of a copied one."""
    return len(value) * sum(len(each) for each in given if isinstance(each, str)) // 8


def _formatted(meter: Meter, value: str, given: list[Any]) -> int:
    check_format(value)
    return meter.weigh(given) * (1 + value.count("%"))


_BY_PATH = frozenset({"map", "sort", "unique", "sum", "min", "max", "groupby", "selectattr", "rejectattr"})
_OF_TEXT: dict[str, Callable[[Meter, str, list[Any]], int]] = {
    "replace": _replaced,
    "indent": _indented,
    "expandtabs": _expanded,
    "split": _split,
    "splitlines": _split,
    "rsplit": lambda meter, value, given: _split(meter, value, given) + _searched(meter, value, given),
    "rpartition": _searched,
    "rfind": _searched,
    "rindex": _searched,
    "strip": _searched,
    "lstrip": _searched,
    "rstrip": _searched,
    "trim": _searched,
    "format": _formatted,
}
