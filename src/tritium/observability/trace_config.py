"""The settings of traces: what the command line says, and what may be changed over the network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from tritium.errors import TritiumError, invalid
from tritium.settings.parts import parts

OPTION = "--trace-config"
OFF, TIMESTAMPS, TENSORS = "OFF", "TIMESTAMPS", "TENSORS"
# What a level may be called; the last two are of Triton's past.
LEVELS: dict[str, str] = {
    OFF: OFF,
    TIMESTAMPS: TIMESTAMPS,
    TENSORS: TENSORS,
    "MIN": TIMESTAMPS,
    "MAX": TIMESTAMPS,
}
_INT32_MAX = (1 << 31) - 1
TRITON, OPENTELEMETRY = "triton", "opentelemetry"
# Settings of the mode opentelemetry that are numbers.
_BATCHING = ("bsp_max_queue_size", "bsp_schedule_delay", "bsp_max_export_batch_size")
# Setting that can be changed over the network -> its least value.
NUMBERS = {"trace_rate": 1, "trace_count": -1, "log_frequency": 0}


@dataclass(frozen=True, slots=True)
class TraceConfig:
    """Which requests are traced, and where to.

    Attributes:
        file: where traces go; "" takes none.
        levels: TIMESTAMPS and TENSORS, or nothing.
        rate: one request of so many is traced, the first one to begin with. 0, in the mode ``opentelemetry`` only,
            for those that come with a context of their client: they are traced at any rate.
        count: traces that are taken in all; -1 for no limit.
        log_frequency: after so many traces the next file begins (``<file>.0``, ``<file>.1``); 0 for one file.
        mode: ``triton`` or ``opentelemetry``; the latter sends spans and writes no file.
        url: where spans go, with OTLP over HTTP.
        resource: attributes of the server in its spans.
        batching: how spans are collected before they go: ``bsp_max_queue_size``, ``bsp_schedule_delay`` (ms),
            ``bsp_max_export_batch_size``; those that were given.
    """

    file: str = ""
    levels: tuple[str, ...] = ()
    rate: int = 1000
    count: int = -1
    log_frequency: int = 0
    mode: str = TRITON
    url: str = "http://localhost:4318/v1/traces"
    resource: Mapping[str, str] = field(default_factory=dict[str, str])
    batching: Mapping[str, int] = field(default_factory=dict[str, int])

    @property
    def writes(self) -> bool:
        """Whether traces go anywhere."""
        return bool(self.file) or self.mode == OPENTELEMETRY


def parse_trace_config(texts: Sequence[str]) -> TraceConfig:
    """What ``--trace-config`` says; without a level, a file or the mode opentelemetry stands for TIMESTAMPS.

    Raises:
        TritiumError: INVALID_ARGUMENT for a setting that there is not, or a value that does not fit.
    """
    found = parts(OPTION, texts)
    config = TraceConfig(mode=next((p.value for p in reversed(found) if (p.group, p.key) == ("", "mode")), TRITON))
    for group in {config.mode, *(part.group for part in found if part.group)} - {TRITON, OPENTELEMETRY}:
        raise _wrong(f"mode is '{group}', expected triton or opentelemetry")
    levels: list[str] = []
    for group, key, value in found:
        if group == OPENTELEMETRY:
            config = _opentelemetry(config, key, value)
        elif key == "level":
            if value not in LEVELS:
                raise _wrong(f"level is '{value}', expected one of {', '.join(LEVELS)}")
            levels.append(value)
        elif key != "mode":
            config = _general(config, key, value)
    if not levels and config.writes:
        levels = [TIMESTAMPS]
    wanted = parse_setting("trace_level", levels) if levels else ()
    if wanted and not config.writes:
        raise _wrong(f"a trace level wants a file: {OPTION}=triton,file=FILE")
    if config.mode == OPENTELEMETRY and TENSORS in levels:
        raise _wrong("level is TENSORS, expected TIMESTAMPS: spans hold no tensors")
    return replace(config, levels=wanted)


def _general(config: TraceConfig, key: str, value: str) -> TraceConfig:
    """A setting without a mode before it, or of the mode triton."""
    if key == "file":
        return replace(config, file=value)
    if key == "rate" and value == "0" and config.mode == OPENTELEMETRY:
        return replace(config, rate=0)
    if key in ("rate", "count"):
        return replace(config, **{key: parse_setting(f"trace_{key}", [value])})
    if key == "log-frequency":
        return replace(config, log_frequency=parse_setting("log_frequency", [value]))
    known = "level, rate, count, mode, triton,file, triton,log-frequency or opentelemetry,SETTING"
    raise _wrong(f"there is no setting '{key}', expected {known}")


def _wrong(why: str) -> TritiumError:
    return invalid(f"{OPTION}: {why}", param="trace_config")


def _opentelemetry(config: TraceConfig, key: str, value: str) -> TraceConfig:
    """A setting ``opentelemetry,KEY=VALUE``."""
    if key == "url":
        url = value if "://" in value else f"http://{value}"
        return replace(config, url=url if "/" in url.partition("://")[2] else f"{url}/v1/traces")
    if key == "resource":
        name, equals, text = value.partition("=")
        if not name or not equals:
            raise _wrong(f"opentelemetry,resource is '{value}', expected KEY=VALUE")
        return replace(config, resource={**config.resource, name: text})
    if key in _BATCHING:
        if not value.isascii() or not value.isdecimal() or not 0 < int(value[:11]) <= _INT32_MAX:
            raise _wrong(f"opentelemetry,{key} is '{value[:20]}', expected a number from 1")
        return replace(config, batching={**config.batching, key: int(value)})
    known = ", ".join(("url", "resource", *_BATCHING))
    raise _wrong(f"there is no setting 'opentelemetry,{key}', expected {known}")


def parse_setting(key: str, values: list[str]) -> int | tuple[str, ...]:
    """The value of a setting.

    Raises:
        TritiumError: INVALID_ARGUMENT in Triton's words.
    """
    if key == "trace_level":
        # Triton takes a level that it does not know as OFF.
        levels = [LEVELS.get(value, OFF) for value in values]
        return tuple(level for level in (TIMESTAMPS, TENSORS) if level in levels)
    if len(values) != 1:
        raise invalid(f"expect only 1 value for '{key}'", param=key)
    least = NUMBERS[key]
    text = values[0][:100]
    if not text.removeprefix("-").isdecimal() or not text.isascii():
        raise invalid(f"Unable to parse '{key}', got: {text}", param=key)
    if len(text) > 11 or not least <= int(text) <= _INT32_MAX:
        raise invalid(
            f"Unable to parse '{key}', value is out of range [ {least}, {_INT32_MAX} ], got: {text}", param=key
        )
    return int(text)
