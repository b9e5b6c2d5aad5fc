"""Writes docs/settings.md out of the tables that the command line itself is made of.

python scripts/settings_page.py          writes the page
python scripts/settings_page.py --check  ends with 1 when the page is not what it would write
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any, get_args, get_origin

from tritium.cli import COMMANDS, ENGINE, SAMPLING, SERVER
from tritium.cli.flags import Group
from tritium.settings import NOTICES, VALUE_ALIASES, Setting

PAGE = Path(__file__).parents[1] / "docs" / "settings.md"
HEAD = """# Settings

Made by `python scripts/settings_page.py`; `tritium COMMAND --help` says the same, and `tritium config` prints what \
holds now and where it came from.

A value comes from the first of: the command line, the environment, a file (`--config FILE` or `TRITIUM_CONFIG`; TOML, \
YAML or JSON, with the flags' names as keys), the default. Hyphens and underscores are the same. A switch is turned \
off by `--no-FLAG` or `--FLAG=false`. A flag that may be repeated takes a list with commas from the environment.
"""
SECTIONS: tuple[tuple[str, str, Group], ...] = (
    ("Server", "`serve` and `config`; `doctor` reads them too.", SERVER),
    (
        "Engine",
        "`serve`, `config`, `doctor`, `chat`, `generate` and `bench`. In a model repository they are the "
        "defaults of every language model; its `parameters` win ([model-repository.md](model-repository.md)).",
        ENGINE,
    ),
    ("Sampling", "`chat` and `generate`, whose `--seed` is this one.", SAMPLING),
)


def main() -> int:
    """Writes the page, or checks it."""
    page = render()
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(page, encoding="utf-8")
        return 0
    if PAGE.read_text(encoding="utf-8") == page:
        return 0
    print("docs/settings.md is not current: python scripts/settings_page.py", file=sys.stderr)
    return 1


def render() -> str:
    """The whole page."""
    parts = [HEAD]
    shared = {group.cls for _, _, group in SECTIONS}
    for title, where, group in SECTIONS:
        parts += [f"## {title}", where, table(group)]
    for name, command in COMMANDS.items():
        own = [group for group in command.groups if group.cls not in shared]
        parts += [part for group in own for part in (f"## tritium {name}", table(group))]
    parts += ["## Values in other spellings", values_table()]
    parts += ["## Flags that change nothing", "They are accepted, with this reason in a notice.", notices_table()]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def table(group: Group) -> str:
    """The settings of one dataclass."""
    lines = ["| flag | default | environment | also spelled | meaning |", "| --- | --- | --- | --- | --- |"]
    for setting in group.settings():
        flag = f"`{setting.name.upper()}` (argument)" if setting.name in group.positional else f"`{setting.flag}`"
        spelled = ", ".join(f"`{alias}`" for alias in setting.aliases)
        meaning = setting.help.replace("``", "`") + _choices(setting)
        cells = (flag, _default(setting), f"`{setting.env}`", spelled, meaning.replace("|", "\\|"))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _default(setting: Setting) -> str:
    if setting.default is dataclasses.MISSING:
        return "required"
    if setting.default in (None, (), ""):
        return "–"
    if isinstance(setting.default, bool):
        return "on" if setting.default else "off"
    return f"`{setting.default}`"


def _choices(setting: Setting) -> str:
    kind: Any = setting.type
    if get_origin(kind) is not None and str(get_origin(kind)).endswith("Literal"):
        return " One of " + ", ".join(f"`{choice}`" for choice in get_args(kind)) + "."
    return ""


def values_table() -> str:
    """Other projects' words for values."""
    lines = ["| setting | value | means |", "| --- | --- | --- |"]
    lines += [f"| `{s}` | `{word}` | `{v}` |" for s, words in VALUE_ALIASES.items() for word, v in words.items()]
    return "\n".join(lines)


def notices_table() -> str:
    """Flags for what is always so."""
    lines = ["| flag | why |", "| --- | --- |"]
    return "\n".join(lines + [f"| `--{flag}` | {why} |" for flag, why in NOTICES.items()])


if __name__ == "__main__":
    sys.exit(main())
