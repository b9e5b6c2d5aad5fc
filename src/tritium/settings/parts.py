"""Options of Triton that hold several settings in one text: ``GROUP,KEY=VALUE``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tritium.errors import invalid


class Part(NamedTuple):
    """One setting.

    Attributes:
        group: what stands before the first comma; "" where there is none.
    """

    group: str
    key: str
    value: str


def parts(option: str, texts: Sequence[str]) -> list[Part]:
    """The settings in the texts of an option.

    Raises:
        TritiumError: INVALID_ARGUMENT for a text without a key and a value.
    """
    found: list[Part] = []
    for text in texts:
        head, equals, value = text.partition("=")
        group, comma, key = head.partition(",")
        if not comma:
            group, key = "", head
        if not equals or not key:
            raise invalid(f"{option}: '{text}' is not KEY=VALUE or GROUP,KEY=VALUE", param=option.lstrip("-"))
        found.append(Part(group.strip(), key.strip(), value))
    return found


def groups(option: str, texts: Sequence[str]) -> dict[str, dict[str, str]]:
    """The same, by group and key; of a key that comes twice the last value holds.

    Raises:
        TritiumError: as ``parts``.
    """
    found: dict[str, dict[str, str]] = {}
    for part in parts(option, texts):
        found.setdefault(part.group, {})[part.key] = part.value
    return found


def flag(option: str, part: Part) -> bool:
    """The value of a setting that is on or off.

    Raises:
        TritiumError: INVALID_ARGUMENT when it is neither.
    """
    word = part.value.lower()
    if word not in ("true", "false", "1", "0"):
        raise invalid(f"{option}: {part.key} is '{part.value}', expected true or false", param=option.lstrip("-"))
    return word in ("true", "1")
