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
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args, get_origin, get_type_hints

import msgspec
import yaml

from tritium.errors import invalid

ENV_PREFIX = "TRITIUM_"
CONFIG_LIMIT_BYTES = 1 << 20

Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Settings of the server around the engines. Field names are the flags of the command line.

    Attributes:
        model: checkpoint folder, GGUF file or installed model name to serve, instead of a repository.
        model_repository: folders of models in Triton's layout (``<model>/config.pbtxt``, ``<model>/<version>/``);
            may be repeated.
        served_model_name: name under which MODEL is served; None for the name of its file or folder.
        host: address to listen on.
        http_port: HTTP: KServe v2 and OpenAI routes; 0 takes a free one.
        grpc_port: gRPC: KServe v2; 0 takes a free one.
        metrics_port: Prometheus metrics (``/metrics``; they are on the HTTP port too); 0 takes a free one.
        grpc_host: address of gRPC; None for HOST.
        metrics_host: address of the metrics; None for HOST.
        allow_http: open the HTTP port.
        allow_grpc: open the gRPC port.
        allow_metrics: open the metrics port.
        model_control_mode: none loads the whole repository at start; explicit loads what LOAD_MODEL names and
            then what clients ask for.
        load_model: model to load at start in mode explicit; may be repeated, ``*`` is all.
        model_load_limit: models that load at the same time.
        strict_readiness: ready means that every model that should be loaded is; otherwise that requests are taken.
        exit_on_error: end the server when a model cannot be loaded at start.
        exit_timeout_secs: how long SIGTERM waits for requests in flight, in seconds.
        http_max_body_bytes: largest accepted HTTP request body, in bytes.
        grpc_max_message_bytes: largest accepted gRPC message, in bytes.
        server_name: what the server calls itself in its metadata.
        log_level: least severe line that is logged.
        log_format: text for people, json for machines.
    """

    model: str | None = None
    model_repository: tuple[str, ...] = ()
    served_model_name: str | None = None
    host: str = "127.0.0.1"
    http_port: Port = 8000
    grpc_port: Port = 8001
    metrics_port: Port = 8002
    grpc_host: str | None = None
    metrics_host: str | None = None
    allow_http: bool = True
    allow_grpc: bool = True
    allow_metrics: bool = True
    model_control_mode: Literal["none", "explicit"] = "none"
    load_model: tuple[str, ...] = ()
    model_load_limit: Positive = 4
    strict_readiness: bool = True
    exit_on_error: bool = True
    exit_timeout_secs: Seconds = 30.0
    http_max_body_bytes: Positive = 64 << 20
    grpc_max_message_bytes: Positive = 64 << 20
    server_name: str = "tritium"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"


# Other projects' spellings of settings that exist here (hyphens stand for underscores too).
ALIASES: dict[str, str] = {
    # vLLM
    "port": "http_port",
    "max-model-len": "max_length",
    "max-num-seqs": "max_rows",
    "max-num-batched-tokens": "max_tokens_per_step",
    "gpu-memory-utilization": "memory_fraction",
    "kv-cache-memory-bytes": "kv_cache_bytes",
    "num-gpu-blocks-override": "num_blocks",
    "enable-prefix-caching": "prefix_cache",
    "shutdown-timeout": "exit_timeout_secs",
    # Triton
    "model-store": "model_repository",
    "http-address": "host",
    "grpc-address": "grpc_host",
    "metrics-address": "metrics_host",
    "http-max-input-size": "http_max_body_bytes",
    "model-load-thread-count": "model_load_limit",
    "id": "server_name",
    # TensorRT-LLM
    "max-batch-size": "max_rows",
    "max-num-tokens": "max_tokens_per_step",
    "max-seq-len": "max_length",
}

# Other projects' spellings of values.
VALUE_ALIASES: dict[str, dict[str, str]] = {
    "dtype": {
        "half": "float16",
        "fp16": "float16",
        "bf16": "bfloat16",
        "float": "float32",
        "fp32": "float32",
    },
}

_ALWAYS = "continuous (in-flight) batching is always on"
_KERNELS = "kernels are chosen for the machine at start"

# Flags that are taken, with this reason in a notice, because what they ask for is how Tritium always works.
NOTICES: dict[str, str] = {
    "enable-inflight-batching": _ALWAYS,
    "use-inflight-batching": _ALWAYS,
    "inflight-batching": _ALWAYS,
    "enable-chunked-prefill": "prompts are always computed in chunks between decode steps",
    "use-gemm-plugin": _KERNELS,
    "gemm-plugin": _KERNELS,
    "use-gpt-attention-plugin": _KERNELS,
    "gpt-attention-plugin": _KERNELS,
    "remove-input-padding": "batches are never padded",
    "paged-kv-cache": "the KV cache is always paged",
    "use-paged-kv-cache": "the KV cache is always paged",
    "trust-remote-code": "no code of a checkpoint is ever run",
    "disable-log-requests": "prompts and answers are never logged",
}
# What may follow such a flag as its value.
NOTICE_WORDS = frozenset(
    ("auto", "true", "false", "enable", "disable", "none", "float16", "float32", "bfloat16", "int8", "fp8")
)


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

        Raises:
            TritiumError: the value is of the wrong type or out of range; names setting, value and source.
        """
        if isinstance(value, str):
            value = VALUE_ALIASES.get(self.name, {}).get(value.lower(), value)
            if value.lower() == "none" and type(None) in get_args(self.type):
                return None
            if self.is_tuple:
                value = [part.strip() for part in value.split(",") if part.strip()]
        try:
            found = msgspec.convert(value, self.type, strict=not isinstance(value, str | list))
            if isinstance(found, float) and not math.isfinite(found):
                raise msgspec.ValidationError("Expected a finite number")
            return found
        except msgspec.ValidationError as error:
            detail = str(error).replace("`", "")
            raise invalid(f"{source}: {self.name}: {value!r} does not fit: {detail}", param=self.name) from None


@dataclass(frozen=True, slots=True)
class Effective:
    """A value in force and where it came from (``default``, a file, a variable, a flag)."""

    value: Any
    source: str


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
                table[name] = Effective(by_name[name].convert(value, str(config)), str(config))
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
