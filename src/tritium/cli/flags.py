"""Flags from dataclasses: other projects' spellings become ours, tyro parses, every value knows its source."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

import tyro
from docstring_parser import parse as parse_docstring

from tritium.errors import invalid
from tritium.settings import (
    ALIASES,
    DEPRECATED,
    NOTICE_WORDS,
    NOTICES,
    NOTICES_WITH_VALUE,
    VALUE_ALIASES,
    Effective,
    Setting,
    below_command_line,
    config_path,
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
    """

    cls: type
    positional: tuple[str, ...] = ()
    leave_out: tuple[str, ...] = ()

    def settings(self) -> list[Setting]:
        """Its settings, with the help that the class's docstring gives."""
        doc = parse_docstring(self.cls.__doc__ or "")
        help = {p.arg_name: " ".join((p.description or "").split()) for p in doc.params}
        return settings_of(self.cls, leave_out=self.leave_out, help=help)


@dataclass(slots=True)
class Argv:
    """A command line in canonical form.

    Attributes:
        tokens: what tyro parses: one ``--field value`` or ``--field`` each, and the positional arguments.
        given: field name -> the spelling that gave it.
        config: value of ``--config``.
    """

    tokens: list[str] = field(default_factory=list[str])
    given: dict[str, str] = field(default_factory=dict[str, str])
    notices: list[str] = field(default_factory=list[str])
    config: str | None = None


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


def canonical(argv: Sequence[str], settings: Collection[Setting]) -> Argv:
    """Rewrites a command line into the field names, whatever project's spelling it used.

    Raises:
        TritiumError: an unknown flag (with the nearest one), or a flag without its value.
    """
    by_name = {s.name: s for s in settings}
    words = list(argv)
    result = Argv()
    while words:
        word = words.pop(0)
        if word == "--":
            result.tokens += [word, *words]
            break
        if not word.startswith("-") or word == "-":
            result.tokens.append(word)
        elif word in ("-h", "--help"):
            result.tokens.append("--help")
        else:
            _flag(word, words, by_name, result)
    return result


def _flag(word: str, words: list[str], by_name: dict[str, Setting], result: Argv) -> None:
    """Takes one flag, and its value out of ``words``."""
    spelling, equals, inline = word.partition("=")
    name = spelling.lstrip("-").replace("_", "-")
    if name in DEPRECATED:
        flag, template = DEPRECATED[name]
        value = template.format(inline if equals else _value_of(spelling, name, words))
        result.notices.append(f"{spelling} is deprecated, it was taken as --{flag}={value}")
        return _flag(f"--{flag}={value}", words, by_name, result)
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
        result.tokens.append(f"{setting.flag}={VALUE_ALIASES.get(setting.name, {}).get(value.lower(), value)}")
        return
    if setting is None:
        known = [s.flag for s in by_name.values()] + [f"--{a}" for a, n in ALIASES.items() if n in by_name]
        raise invalid(f"unknown flag {spelling}{nearest('--' + name, [*known, '--config'])}", param=name)
    if equals or (words and words[0].lower() in ("true", "false")):
        value = inline if equals else words.pop(0)
        on = bool(setting.convert(value, spelling))
        negated = on == negated
    result.given[setting.name] = spelling
    result.tokens.append(setting.flag if not negated else "--no-" + setting.flag.removeprefix("--"))


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


def _annotation(setting: Setting, positional: bool, source: str) -> Any:
    """The type that tyro reads: with help, other spellings and, when it is not the default, the source."""
    help = setting.help
    if setting.aliases:
        help += f" Also {', '.join(setting.aliases)}."
    if source != "default":
        help += f" Set by {source}."
    kind: Any = tyro.conf.Positional[setting.type] if positional else setting.type
    if setting.is_tuple and not positional:
        kind = tyro.conf.UseAppendAction[kind]
    return Annotated[kind, tyro.conf.arg(help=help.replace("%", "%%"))]


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
        SystemExit: ``--help`` was asked for (0), or tyro refused an argument (2; it has printed why).
    """
    per_group = {group.cls: group.settings() for group in groups}
    settings = [s for found in per_group.values() for s in found]
    line = canonical(argv, settings)
    below, notices = below_command_line(settings, known, config_path(line.config))
    positional = {p for group in groups for p in group.positional} - set(line.given)
    fields: list[Any] = []
    for setting in settings:
        at = below[setting.name]
        default = () if setting.is_tuple and setting.name in line.given else at.value
        annotation = _annotation(setting, setting.name in positional, at.source)
        # Required positional arguments come first: a dataclass wants fields without a default before the others.
        fields.append((setting.name, annotation, dataclasses.field(default=default)))
    fields.sort(key=lambda entry: entry[2].default is not dataclasses.MISSING)
    options = dataclasses.make_dataclass(name, fields, frozen=True)
    options.__doc__ = summary
    values = vars(tyro.cli(options, args=line.tokens, prog=f"tritium {name}"))
    effective: dict[str, Effective] = {}
    for setting in settings:
        source = below[setting.name].source
        if setting.name in line.given:
            source = f"command line ({line.given[setting.name]})"
        elif setting.name in positional and values[setting.name] != below[setting.name].value:
            source = "command line"
        value = values[setting.name]
        if source.startswith("command line"):
            value = setting.convert(list(value) if setting.is_tuple else value, source)
        effective[setting.name] = Effective(value, source)
    found = {cls: {s.name: effective[s.name].value for s in own} for cls, own in per_group.items()}
    return Parsed(found, effective, line.notices + notices)
