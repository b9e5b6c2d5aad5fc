"""The command line: one table of commands, each a few dataclasses and a function."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module, metadata
from typing import cast

from tritium.cli import options
from tritium.cli.flags import Group, Parsed, explained, parse
from tritium.errors import TritiumError
from tritium.llm.config import EngineConfig
from tritium.settings import ServerSettings, nearest

ENGINE = Group(EngineConfig, leave_out=("model",), title="engine options")
# Where one answer is drawn, --seed is that of the answer (options.Sampling).
ENGINE_OF_ONE = Group(EngineConfig, leave_out=("model", "seed"), title="engine options")
SAMPLING = Group(options.Sampling, title="sampling options")
SERVER = Group(ServerSettings, positional=("model",), title="server options")


@dataclass(frozen=True, slots=True)
class Command:
    """One command.

    Attributes:
        groups: what it reads.
        run: "module:function", called with ``Parsed``; returns the exit status.
    """

    summary: str
    groups: tuple[Group, ...]
    run: str


COMMANDS: dict[str, Command] = {
    "serve": Command(
        "Serve a model (a checkpoint folder, a GGUF file, an installed name), or a model repository.",
        (SERVER, ENGINE),
        "tritium.cli.serve:serve",
    ),
    "chat": Command(
        "Talk with a model in the terminal. Ctrl-C stops an answer; where nothing is being answered, Ctrl-C or Ctrl-D "
        "leaves.",
        (Group(options.Chat, positional=("model",)), SAMPLING, ENGINE_OF_ONE),
        "tritium.cli.talk:chat",
    ),
    "generate": Command(
        "Continue a text.",
        (Group(options.Generate, positional=("prompt",)), SAMPLING, ENGINE_OF_ONE),
        "tritium.cli.talk:generate",
    ),
    "models": Command(
        "List the models that can be named here.",
        (Group(options.Models),),
        "tritium.cli.catalogue:models",
    ),
    "config": Command(
        "Print every setting of serve, its value and where it came from.",
        (Group(options.Show), SERVER, ENGINE),
        "tritium.cli.show:config",
    ),
    "doctor": Command(
        "Check this machine: device, memory, kernels, limits, packages, ports.",
        (
            Group(options.Doctor, positional=("model",)),
            Group(ServerSettings, leave_out=("model",), title="server options"),
            ENGINE,
        ),
        "tritium.cli.doctor:doctor",
    ),
    "convert": Command(
        "Write a .bin or GGUF checkpoint as safetensors.",
        (Group(options.Convert, positional=("source", "out")),),
        "tritium.cli.catalogue:convert",
    ),
    "bench": Command(
        "Measure throughput and latency of an engine or of a server.",
        (Group(options.Bench, positional=("workload",)), ENGINE),
        "tritium.cli.measure:bench",
    ),
}


def known_settings() -> set[str]:
    """Names of all settings of all commands."""
    return {s.name for command in COMMANDS.values() for group in command.groups for s in group.settings()}


def overview() -> str:
    """What ``tritium --help`` prints."""
    width = max(map(len, COMMANDS)) + 2
    lines = [f"  {name:<{width}}{command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: tritium COMMAND [OPTIONS]",
            "",
            *lines,
            "",
            "tritium COMMAND --help shows its options. Each may also be set by the environment variable",
            "TRITIUM_<OPTION>, or in a file (--config FILE; TOML, YAML or JSON).",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status: 0, 1 when it failed, 2 when it was typed wrongly."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if not words or words[0] in ("-h", "--help", "help"):
            print(overview())
            return 0 if words else 2
        if words[0] in ("-V", "--version", "version"):
            print(f"tritium {metadata.version('tritium')}")
            return 0
        return _command(words[0], words[1:])
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def tritonserver() -> int:
    """``tritonserver OPTIONS``, for scripts that start Triton: the same as ``tritium serve OPTIONS``."""
    words = sys.argv[1:]
    return main(["--version"] if words == ["--version"] else ["serve", *words])


def _command(name: str, words: list[str]) -> int:
    if name not in COMMANDS:
        return _complain(f"unknown command {name!r}{nearest(name, COMMANDS)}; see tritium --help", 2)
    command = COMMANDS[name]
    try:
        parsed = parse(name, command.summary, command.groups, words, known_settings())
    except TritiumError as error:
        return _complain(f"{error.message}; see tritium {name} --help", 2)
    for notice in parsed.notices:
        print(f"tritium: note: {notice}", file=sys.stderr)
    module, _, function = command.run.partition(":")
    run = cast("Callable[[Parsed], int]", getattr(import_module(module), function))
    try:
        return run(parsed)
    except TritiumError as error:
        return _complain(explained(error, parsed), 1)


def _complain(message: str, status: int) -> int:
    print(f"tritium: error: {message}", file=sys.stderr)
    return status
