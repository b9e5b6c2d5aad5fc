"""What ``tritium COMMAND --help`` prints: plain text out of the same settings that are parsed."""

from __future__ import annotations

import dataclasses
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tritium.settings import Effective, Setting, shown

if TYPE_CHECKING:
    from tritium.cli.flags import Group

COLUMN = 24
WIDEST = 100
COMMON = (
    ("--config FILE", "file with settings (.toml, .yaml, .json), flags' names as keys. Also TRITIUM_CONFIG."),
    ("-h, --help", "show this."),
)
CLOSING = (
    "Each option may also be set by the environment variable TRITIUM_<OPTION>. Hyphens and underscores are the same."
)


def usage(name: str, groups: Sequence[Group]) -> str:
    """The line that says what may be typed."""
    words: list[str] = []
    for group in groups:
        by_name = {s.name: s for s in group.settings()}
        for positional in group.positional:
            required = by_name[positional].default is dataclasses.MISSING
            words.append(positional.upper() if required else f"[{positional.upper()}]")
    return " ".join(["usage: tritium", name, *words, "[OPTIONS]"])


def page(name: str, summary: str, groups: Sequence[Group], below: Mapping[str, Effective]) -> str:
    """The whole help of a command.

    Args:
        below: what holds where nothing is typed, and by whose word.
    """
    width = min(WIDEST, shutil.get_terminal_size().columns)
    lines = [usage(name, groups), "", *textwrap.wrap(summary, width)]
    arguments = [s for group in groups for s in group.settings() if s.name in group.positional]
    if arguments:
        lines += ["", "arguments:"]
        lines += [line for s in arguments for line in _entry(s.name.upper(), _about(s, below[s.name]), width)]
    for group in groups:
        settings = [s for s in group.settings() if s.name not in group.positional]
        if settings:
            lines += ["", f"{group.title}:"]
            lines += [line for s in settings for line in _entry(_flag(s), _about(s, below[s.name]), width)]
    lines += ["", "common options:", *(line for flag, about in COMMON for line in _entry(flag, about, width))]
    return "\n".join([*lines, "", *textwrap.wrap(CLOSING, width)])


def _flag(setting: Setting) -> str:
    if setting.is_bool:
        return f"{setting.flag}, --no-{setting.flag.removeprefix('--')}"
    return f"{setting.flag} {setting.metavar}"


def _about(setting: Setting, at: Effective) -> str:
    parts = [setting.help.replace("``", "")]
    if setting.aliases:
        parts.append(f"Also {', '.join(setting.aliases)}.")
    if at.source != "default":
        parts.append(f"Set to {_value(setting, at.value)} by {at.source}.")
    elif setting.default is dataclasses.MISSING:
        parts.append("Required.")
    elif setting.default not in (None, (), ""):
        parts.append(f"Default: {_value(setting, setting.default)}.")
    return " ".join(parts)


def _value(setting: Setting, value: object) -> str:
    value = shown(setting.name, value)
    if isinstance(value, bool):
        return "on" if value else "off"
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _entry(head: str, about: str, width: int) -> list[str]:
    lines = textwrap.wrap(about, max(20, width - COLUMN), break_long_words=False, break_on_hyphens=False)
    head = f"  {head}"
    first = [head] if len(head) > COLUMN - 2 else [head.ljust(COLUMN) + lines.pop(0)]
    return [*first, *(" " * COLUMN + line for line in lines)]
