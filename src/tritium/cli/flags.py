"""Flags from dataclasses: other projects' spellings become ours, every value is checked and knows its source."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from docstring_parser import parse as parse_docstring

from tritium.cli.help import page
from tritium.errors import TritiumError, invalid
from tritium.settings import (
    ALIASES,
    DEPRECATED,
    NOTICE_WORDS,
    NOTICES,
    NOTICES_WITH_VALUE,
    SEVERAL,
    VALUE_ALIASES,
    Effective,
    Setting,
    below_command_line,
    config_path,
    expected,
    nearest,
    settings_of,
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Group:
    """The settings of one dataclass, as one command reads them.

    Attributes:
        positional: fields that are arguments instead of flags, in their order.
        leave_out: fields that the command fills by itself.
        title: of its flags in the help.
    """

    cls: type
    positional: tuple[str, ...] = ()
    leave_out: tuple[str, ...] = ()
    title: str = "options"

    def settings(self) -> list[Setting]:
        """Its settings, with the help that the class's docstring gives."""
        doc = parse_docstring(self.cls.__doc__ or "")
        help = {p.arg_name: " ".join((p.description or "").split()) for p in doc.params}
        return settings_of(self.cls, leave_out=self.leave_out, help=help)


@dataclass(slots=True)
class Argv:
    """A command line, sorted.

    Attributes:
        values: field name -> what was typed for it, in order; of a switch, whether it is on.
        given: field name -> the spelling that gave it.
        positional: the other words.
        config: value of ``--config``.
    """

    values: dict[str, list[str] | bool] = field(default_factory=dict[str, "list[str] | bool"])
    given: dict[str, str] = field(default_factory=dict[str, str])
    positional: list[str] = field(default_factory=list[str])
    notices: list[str] = field(default_factory=list[str])
    config: str | None = None
    help: bool = False


@dataclass(frozen=True, slots=True)
class Parsed:
    """All values of one command.

    Attributes:
        effective: by field name.
        notices: sentences for the person who typed it.
    """

    groups: dict[type, dict[str, Any]]
    effective: dict[str, Effective]
    notices: list[str]

    def get(self, cls: type[T], **more: object) -> T:
        """The object of one group; ``more`` fills the fields that the group leaves out."""
        return cls(**self.groups[cls], **more)

    def chosen(self, cls: type) -> dict[str, Any]:
        """The values of a group that somebody set, defaults left out."""
        return {n: v for n, v in self.groups[cls].items() if self.effective[n].source != "default"}


def canonical(argv: Sequence[str], settings: Collection[Setting], known: Collection[str] = ()) -> Argv:
    """Sorts a command line by field names, whatever project's spelling it used.

    Args:
        known: names of all settings of all commands.

    Raises:
        TritiumError: an unknown flag (with the nearest one), or a flag without its value.
    """
    by_name = {s.name: s for s in settings}
    words = list(argv)
    result = Argv()
    while words:
        word = words.pop(0)
        if word == "--":
            result.positional += words
            break
        if not word.startswith("-") or word == "-":
            result.positional.append(word)
        elif word in ("-h", "--help"):
            result.help = True
        else:
            _flag(word, words, by_name, result, known)
    return result


def _flag(word: str, words: list[str], by_name: dict[str, Setting], result: Argv, known: Collection[str]) -> None:
    """Takes one flag, and its value out of ``words``."""
    spelling, equals, inline = word.partition("=")
    name = spelling.lstrip("-").replace("_", "-")
    if name in DEPRECATED:
        flag, template = DEPRECATED[name]
        value = template.format(inline if equals else _value_of(spelling, name, words))
        result.notices.append(f"{spelling} is deprecated, it was taken as --{flag}={value}")
        return _flag(f"--{flag}={value}", words, by_name, result, known)
    if name in NOTICES:
        if name in NOTICES_WITH_VALUE:
            _ = inline if equals else _value_of(spelling, name, words)
        elif not equals and words and words[0].lower() in NOTICE_WORDS:
            words.pop(0)
        result.notices.append(f"{spelling} changes nothing here: {NOTICES[name]}")
        return
    setting, negated = _find(name, by_name)
    if name == "config" or (setting is not None and not setting.is_bool):
        value = inline if equals else _value_of(spelling, name, words)
        if setting is None:
            result.config = value
            return
        result.given[setting.name] = spelling
        values = [value]
        while setting.name in SEVERAL and result.positional and words and not words[0].startswith("-"):
            values.append(words.pop(0))
        before = result.values.get(setting.name) if setting.is_tuple else None
        result.values[setting.name] = [*before, *values] if isinstance(before, list) else values
        return
    if setting is None:
        if ALIASES.get(name, name.replace("-", "_")) in known:
            raise invalid(f"{spelling} is a flag of other commands, not of this one", param=name)
        flags = [s.flag for s in by_name.values()] + [f"--{a}" for a, n in ALIASES.items() if n in by_name]
        raise invalid(f"unknown flag {spelling}{nearest('--' + name, [*flags, '--config'])}", param=name)
    if equals or (words and words[0].lower() in ("true", "false")):
        value = inline if equals else words.pop(0)
        on = bool(setting.convert(value, spelling))
        negated = on == negated
    result.given[setting.name] = spelling
    result.values[setting.name] = not negated


def _value_of(spelling: str, name: str, words: list[str]) -> str:
    """Takes the value of a flag out of ``words``."""
    if not words or words[0].startswith("--"):
        raise invalid(f"{spelling} needs a value", param=name)
    return words.pop(0)


def _find(name: str, by_name: dict[str, Setting]) -> tuple[Setting | None, bool]:
    """The setting that a flag (without dashes) spells, and whether it is the ``no-`` form."""
    setting = by_name.get(ALIASES.get(name, name.replace("-", "_")))
    if setting is None and name.startswith("no-"):
        positive = name.removeprefix("no-")
        setting = by_name.get(ALIASES.get(positive, positive.replace("-", "_")))
        return (setting, True) if setting is not None and setting.is_bool else (None, False)
    return setting, False


def parse(name: str, summary: str, groups: Sequence[Group], argv: Sequence[str], known: Collection[str]) -> Parsed:
    """Parses the command line of one command.

    Args:
        name: of the command.
        summary: first lines of its help.
        groups: what it reads.
        argv: what follows the command's name.
        known: names of all settings of all commands.

    Raises:
        TritiumError: what was typed, exported or written does not fit.
        SystemExit: ``--help`` was asked for (0).
    """
    per_group = {group.cls: group.settings() for group in groups}
    settings = [s for found in per_group.values() for s in found]
    line = canonical(argv, settings, known)
    below, notices = below_command_line(settings, known, config_path(line.config))
    if line.help:
        print(page(name, summary, groups, below))
        raise SystemExit(0)
    _place(line, [p for group in groups for p in group.positional])
    effective: dict[str, Effective] = {}
    for setting in settings:
        effective[setting.name] = _typed(setting, line) or below[setting.name]
        if effective[setting.name].value is dataclasses.MISSING:
            raise invalid(f"{setting.name.upper()} is missing, expected {expected(setting.type)}", param=setting.name)
    found = {cls: {s.name: effective[s.name].value for s in own} for cls, own in per_group.items()}
    return Parsed(found, effective, line.notices + notices)


def _place(line: Argv, positional: list[str]) -> None:
    """Gives the words that are no flags their fields."""
    free = [name for name in positional if name not in line.given]
    if len(line.positional) > len(free):
        most = " and ".join(map(str.upper, free)) or "none"
        raise invalid(f"unexpected argument {line.positional[len(free)]!r}, expected no more than {most}")
    for name, word in zip(free, line.positional, strict=False):
        line.values[name], line.given[name] = [word], name.upper()


def _typed(setting: Setting, line: Argv) -> Effective | None:
    """What the command line says of a setting, if anything."""
    if setting.name not in line.given:
        return None
    typed, spelling = line.values[setting.name], line.given[setting.name]
    source = f"command line ({spelling})" if spelling.startswith("-") else "command line"
    if isinstance(typed, bool):
        return Effective(typed, source)
    aliases = VALUE_ALIASES.get(setting.name, {})
    values = [aliases.get(value.lower(), value) for value in typed]
    return Effective(setting.convert(values if setting.is_tuple else values[-1], spelling), source)


def explained(error: TritiumError, parsed: Parsed) -> str:
    """The message of an error, with the flag beside each setting in it that was typed under another name."""
    hints: list[str] = []
    for name, effective in parsed.effective.items():
        flag = effective.source.removeprefix("command line (").removesuffix(")")
        if flag.startswith("-") and flag not in error.message and re.search(rf"\b{name}\b", error.message):
            hints.append(f"{name} is what {flag} gave")
    return error.message + (f" ({', '.join(hints)})" if hints else "")
