"""Settings: what the server is told, and by whom.

A setting is a field of a frozen dataclass (``ServerSettings`` here, ``EngineConfig`` of the engine). Its value
comes from the first of: the command line, the environment (``TRITIUM_<FIELD>``), a configuration file
(``--config``; TOML, YAML or JSON with the field names as keys), the default. Everything knows where it came from.
This module is the only reader of environment variables.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import os
import re
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

import msgspec
import yaml

from tritium.errors import invalid
from tritium.settings.expect import expected, quoted
from tritium.settings.server import COMMAS_WITHIN, SECRETS, ServerSettings
from tritium.settings.spellings import (
    ALIASES,
    DEPRECATED,
    NOTICE_WORDS,
    NOTICES,
    NOTICES_WITH_VALUE,
    SEVERAL,
    VALUE_ALIASES,
)

__all__ = [
    "ALIASES",
    "DEPRECATED",
    "NOTICES",
    "NOTICES_WITH_VALUE",
    "NOTICE_WORDS",
    "SEVERAL",
    "VALUE_ALIASES",
    "ServerSettings",
    "expected",
]


ENV_PREFIX = "TRITIUM_"
CONFIG_LIMIT_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting: a field of a dataclass that commands read.

    Attributes:
        type: the annotation, resolved; ``msgspec.Meta`` in it gives the limits.
        default: what holds when nobody says anything; ``dataclasses.MISSING`` for a required one.
    """

    name: str
    type: Any
    default: Any
    help: str = ""

    @property
    def metavar(self) -> str:
        """What stands for its value in a usage line."""
        kind: Any = self.type
        while get_origin(kind) is not None and get_origin(kind) is not Literal:
            kind = get_args(kind)[0]
        if get_origin(kind) is Literal:
            return "|".join(map(str, get_args(kind)))
        return {int: "INT", float: "NUMBER"}.get(kind, "TEXT")

    @property
    def flag(self) -> str:
        """How the command line spells it."""
        return "--" + self.name.replace("_", "-")

    @property
    def env(self) -> str:
        """The environment variable that sets it."""
        return ENV_PREFIX + self.name.upper()

    @property
    def is_bool(self) -> bool:
        """Whether the flag stands alone."""
        return self.type is bool

    @property
    def is_tuple(self) -> bool:
        """Whether the flag may be repeated."""
        return get_origin(self.type) is tuple

    @property
    def aliases(self) -> list[str]:
        """Other projects' flags for it."""
        return [f"--{alias}" for alias, name in ALIASES.items() if name == self.name]

    def convert(self, value: object, source: str) -> Any:
        """A value of this setting out of text or of what a configuration file held.

        Args:
            source: how whoever gave it spells the setting (``--port``, ``TRITIUM_HTTP_PORT``, ...), for the error.

        Raises:
            TritiumError: the value is of the wrong type or out of range.
        """
        given = value
        if isinstance(value, str):
            separator = ";" if self.name in COMMAS_WITHIN else ","
            value = VALUE_ALIASES.get(self.name, {}).get(value.lower(), value)
            if value.lower() == "none" and type(None) in get_args(self.type):
                return None
            if self.is_tuple:
                value = [part.strip() for part in value.split(separator) if part.strip()]
        try:
            found = msgspec.convert(value, self.type, strict=not isinstance(value, str | list))
            if isinstance(found, float) and not math.isfinite(found):
                raise msgspec.ValidationError("infinite")
            return found
        except msgspec.ValidationError:
            raise invalid(f"{source} is {quoted(given)}, expected {expected(self.type)}", param=self.name) from None


@dataclass(frozen=True, slots=True)
class Effective:
    """A value in force and where it came from (``default``, a file, a variable, a flag)."""

    value: Any
    source: str


def shown(name: str, value: Any) -> Any:
    """A value as it may be printed: without its secret."""
    if name == "cache_config":
        hidden = re.compile(r"(\bpassword=).*?(?=,[a-z_]+=|$)")
        return tuple(hidden.sub(r"\1***", text) for text in cast("tuple[str, ...]", value))
    if name not in SECRETS:
        return value
    return tuple(f"{text.rpartition('=')[0]}=***" for text in cast("tuple[str, ...]", value))


def settings_of(cls: type, *, leave_out: Collection[str] = (), help: Mapping[str, str] | None = None) -> list[Setting]:
    """The settings that the fields of a dataclass are.

    Args:
        cls: the dataclass.
        leave_out: fields that are not settings.
        help: a sentence by field.
    """
    hints = get_type_hints(cls, include_extras=True)
    found: list[Setting] = []
    for entry in dataclasses.fields(cls):
        if entry.name in leave_out:
            continue
        default: Any = entry.default
        if entry.default_factory is not dataclasses.MISSING:
            default = entry.default_factory()
        found.append(Setting(entry.name, hints[entry.name], default, (help or {}).get(entry.name, "")))
    return found


def environment(name: str) -> str | None:
    """A variable of the environment that is not Tritium's own, such as ``CUDA_VISIBLE_DEVICES``."""
    return os.environ.get(name)


def prepare_libraries() -> None:
    """Tells libraries, before they are imported, what they read from the environment.

    gRPC would guard forks of this process; its children are executed anew, and it logs each one.
    """
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")


def nearest(word: str, known: Collection[str]) -> str:
    """`` (did you mean ...?)`` for a word that is not known, or nothing."""
    close = difflib.get_close_matches(word, sorted(known), n=1, cutoff=0.6)
    return f" (did you mean {close[0]}?)" if close else ""


def read_file(path: Path) -> dict[str, object]:
    """The keys of a configuration file, as field names.

    Raises:
        TritiumError: the file is missing, too large, not well-formed, or not a flat table.
    """
    kinds = {".toml": tomllib.loads, ".json": json.loads, ".yaml": yaml.safe_load, ".yml": yaml.safe_load}
    if path.suffix not in kinds:
        raise invalid(f"--config {path}: expected a file ending in {', '.join(kinds)}", param="config")
    try:
        if path.stat().st_size > CONFIG_LIMIT_BYTES:
            raise invalid(f"--config {path}: larger than {CONFIG_LIMIT_BYTES} bytes", param="config")
        content: object = kinds[path.suffix](path.read_text(encoding="utf-8"))
    except OSError as error:
        raise invalid(f"--config {path}: {error.strerror}", param="config") from None
    except RecursionError:
        raise invalid(f"--config {path}: nested too deeply", param="config") from None
    except (ValueError, yaml.YAMLError) as error:  # TOML and JSON errors are ValueErrors
        raise invalid(f"--config {path}: {error}", param="config") from None
    if not isinstance(content, dict):
        raise invalid(f"--config {path}: expected a table of settings, got {type(content).__name__}", param="config")
    table = cast("dict[object, object]", content)
    names = {str(key): value for key, value in table.items()}
    return {ALIASES.get(n.replace("_", "-"), n.replace("-", "_")): value for n, value in names.items()}


def below_command_line(
    settings: Collection[Setting], known: Collection[str], config: Path | None = None
) -> tuple[dict[str, Effective], list[str]]:
    """What defaults, file and environment make of these settings, and notices about what was not understood.

    Args:
        settings: those that the command reads.
        known: names of all settings of all commands; a file may serve several commands.
        config: the configuration file.

    Raises:
        TritiumError: a value that does not fit, or a key of the file that no command knows.
    """
    table = {s.name: Effective(s.default, "default") for s in settings}
    by_name = {s.name: s for s in settings}
    if config is not None:
        for name, value in read_file(config).items():
            if name not in known:
                raise invalid(f"{config}: unknown setting {name!r}{nearest(name, known)}", param=name)
            if name in by_name:
                table[name] = Effective(by_name[name].convert(value, f"{config}: {name}"), str(config))
    notices: list[str] = []
    for variable, value in sorted(os.environ.items()):
        if not variable.startswith(ENV_PREFIX):
            continue
        name = variable.removeprefix(ENV_PREFIX).lower()
        name = ALIASES.get(name.replace("_", "-"), name)
        if name in by_name:
            table[name] = Effective(by_name[name].convert(value, variable), variable)
        elif name not in known and name != "config":
            notices.append(f"environment variable {variable} is no setting{nearest(name, known)}; ignored")
    return table, notices


def config_path(given: str | None) -> Path | None:
    """The configuration file: what ``--config`` gave, or ``TRITIUM_CONFIG``."""
    chosen = given or os.environ.get(ENV_PREFIX + "CONFIG")
    return Path(chosen) if chosen else None
