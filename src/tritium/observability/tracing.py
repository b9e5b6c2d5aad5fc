"""Traces of single requests: which are taken, what they hold, and the file that they are written to.

The settings and the file are those of Triton's trace extension: a JSON array in which a trace has one object
with its model and its request, one with its timestamps, and with TENSORS one for each tensor. The file is whole
JSON after every trace, so a reader need not wait for the end of the server. Times are nanoseconds of
``time.monotonic_ns``.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from io import BufferedWriter
from time import monotonic_ns
from typing import Any

from tritium.errors import Code, TritiumError, invalid
from tritium.observability import logs
from tritium.settings.parts import parts
from tritium.types import DType, Tensor

_log = logs.get(__name__)

OFF, TIMESTAMPS, TENSORS = "OFF", "TIMESTAMPS", "TENSORS"
# What a level may be called; the last two are of Triton's past.
LEVELS: dict[str, str] = {
    OFF: OFF,
    TIMESTAMPS: TIMESTAMPS,
    TENSORS: TENSORS,
    "MIN": TIMESTAMPS,
    "MAX": TIMESTAMPS,
}
# Elements of a tensor that a trace holds at most.
MAX_ELEMENTS = 4096
_INT32_MAX = (1 << 31) - 1
# Setting that can be changed over the network -> its least value.
_NUMBERS = {"trace_rate": 1, "trace_count": -1, "log_frequency": 0}


@dataclass(frozen=True, slots=True)
class TraceConfig:
    """Which requests are traced, and where to.

    Attributes:
        file: where traces go; "" takes none.
        levels: TIMESTAMPS and TENSORS, or nothing.
        rate: one request of so many is traced, the first one to begin with.
        count: traces that are taken in all; -1 for no limit.
        log_frequency: after so many traces the next file begins (``<file>.0``, ``<file>.1``); 0 for one file.
    """

    file: str = ""
    levels: tuple[str, ...] = ()
    rate: int = 1000
    count: int = -1
    log_frequency: int = 0


def parse_trace_config(texts: Sequence[str]) -> TraceConfig:
    """What ``--trace-config`` says; without a level, a file stands for TIMESTAMPS.

    Raises:
        TritiumError: INVALID_ARGUMENT for a setting that there is not, or a value that does not fit;
            UNIMPLEMENTED for another mode than ``triton``.
    """
    option = "--trace-config"
    config = TraceConfig()
    levels: list[str] | None = None
    for group, key, value in parts(option, texts):
        if group not in ("", "triton") or (key == "mode" and value != "triton"):
            raise TritiumError(
                Code.UNIMPLEMENTED,
                f"{option}: mode '{group or value}' is not supported, expected triton",
                param="trace_config",
            )
        if key == "file":
            config = replace(config, file=value)
        elif key == "level":
            if value not in LEVELS:
                raise invalid(f"{option}: level is '{value}', expected one of {', '.join(LEVELS)}")
            levels = [*(levels or []), value]
        elif key in ("rate", "count"):
            config = replace(config, **{key: parse_setting(f"trace_{key}", [value])})
        elif key == "log-frequency":
            config = replace(config, log_frequency=parse_setting("log_frequency", [value]))
        elif key != "mode":
            known = "level, rate, count, mode, triton,file or triton,log-frequency"
            raise invalid(f"{option}: there is no setting '{key}', expected {known}", param="trace_config")
    if levels is None:
        levels = [TIMESTAMPS] if config.file else []
    found = parse_setting("trace_level", levels) if levels else ()
    if found and not config.file:
        raise invalid(f"{option}: a trace level wants a file: {option}=triton,file=FILE", param="trace_config")
    return replace(config, levels=found)


class Trace:
    """What happens to one request, until ``release`` writes it."""

    def __init__(
        self, traces: Traces, levels: tuple[str, ...], model: str, version: str, request_id: str, parent_id: int = 0
    ) -> None:
        self._traces = traces
        self._levels = levels
        self.id = traces.next_id()
        self.parent_id = parent_id
        self._head: dict[str, Any] = {"id": self.id, "model_name": model}
        if version:
            self._head["model_version"] = int(version)
        if request_id:
            self._head["request_id"] = request_id
        if parent_id:
            self._head["parent_id"] = parent_id
        self._stamps: list[tuple[int, str]] = []
        self._tensors: list[dict[str, Any]] = []

    def child(self, model: str, version: str, request_id: str = "") -> Trace:
        """The trace of a request that this one makes; the model that answers it releases it."""
        return Trace(self._traces, self._levels, model, version, request_id, self.id)

    def stamp(self, name: str, ns: int | None = None) -> None:
        """Something happened now, or at ``ns``."""
        if TIMESTAMPS in self._levels:
            self._stamps.append((monotonic_ns() if ns is None else ns, name))

    def served(
        self, version: str, arrived_ns: int, ended_ns: int, parts_ns: tuple[int, int, int] | None = None
    ) -> None:
        """The model is done with the request; a ``child`` is released.

        Args:
            version: of the model, where the request left it open.
            parts_ns: how long it waited, and its inputs and outputs took; None when the model did not run.
        """
        self._head["model_version"] = int(version)
        self.stamp("REQUEST_START", arrived_ns)
        self.stamp("QUEUE_START", arrived_ns)
        if parts_ns is not None:
            queue_ns, input_ns, output_ns = parts_ns
            started = min(ended_ns, arrived_ns + queue_ns)
            self.stamp("COMPUTE_START", started)
            self.stamp("COMPUTE_INPUT_END", min(ended_ns, started + input_ns))
            self.stamp("COMPUTE_OUTPUT_START", max(started, ended_ns - output_ns))
            self.stamp("COMPUTE_END", ended_ns)
        self.stamp("REQUEST_END", ended_ns)
        if self.parent_id:
            self.release()

    def hold(self, activity: str, tensors: Iterable[Tensor]) -> None:
        """Keeps tensors, with TENSORS."""
        if TENSORS in self._levels:
            self._tensors += [{"id": self.id, "activity": activity, "tensor": _tensor(tensor)} for tensor in tensors]

    def release(self) -> None:
        """Writes it."""
        entries: list[dict[str, Any]] = [self._head]
        if self._stamps:
            stamps = sorted(self._stamps, key=lambda stamp: stamp[0])
            entries.append({"id": self.id, "timestamps": [{"name": name, "ns": ns} for ns, name in stamps]})
        self._traces.write([*entries, *self._tensors])


def _tensor(tensor: Tensor) -> dict[str, str]:
    if tensor.dtype is DType.BYTES:
        values = [text.decode(errors="backslashreplace") for text in tensor.strings()[:MAX_ELEMENTS]]
    else:
        values = [str(value) for value in tensor.numpy().reshape(-1)[:MAX_ELEMENTS].tolist()]
    if tensor.size > MAX_ELEMENTS:
        values.append("...")
    shape = ",".join(map(str, tensor.shape))
    return {"name": tensor.name, "data": ",".join(values), "shape": shape, "dtype": tensor.dtype.value}


class _Sampler:
    """Picks the requests of one group of settings."""

    def __init__(self, config: TraceConfig) -> None:
        self.config = config
        self.left = config.count
        self._seen = 0

    @property
    def on(self) -> bool:
        return bool(self.config.levels) and bool(self.config.file) and self.left != 0

    def take(self) -> bool:
        taken = self._seen % self.config.rate == 0
        self._seen += 1
        if taken and self.left > 0:
            self.left -= 1
        return taken


class Traces:
    """The trace settings of a server and of its models, and the file.

    Raises:
        TritiumError: INVALID_ARGUMENT when the file cannot be written.
    """

    def __init__(self, config: TraceConfig | None = None) -> None:
        self._start = config or TraceConfig()
        self._changes: dict[str, dict[str, Any]] = {}  # by model; "" is the server
        self._samplers: dict[str, _Sampler] = {"": _Sampler(self._start)}
        self._ids = itertools.count(1)
        self._file = _File(self._start.file, self._start.log_frequency) if self._start.file else None

    def next_id(self) -> int:
        """The number of the next trace."""
        return next(self._ids)

    def begin(self, model: str, version: str = "", request_id: str = "") -> Trace | None:
        """The trace of a request, if it is one of those that are traced."""
        sampler = self._samplers.get(model) or self._samplers[""]
        if not sampler.on or not sampler.take():
            return None
        digits = version if version.isascii() and version.isdecimal() else ""
        return Trace(self, sampler.config.levels, model, digits, request_id)

    def samples(self, model: str) -> bool:
        """Whether requests of a model may be traced now."""
        return (self._samplers.get(model) or self._samplers[""]).on

    def settings(self, model: str = "") -> dict[str, list[str]]:
        """The settings of a model, or of the server for "", as texts."""
        sampler = self._samplers.get(model) or self._samplers[""]
        config = sampler.config
        return {
            "trace_level": list(config.levels) or [OFF],
            "trace_rate": [str(config.rate)],
            "trace_count": [str(sampler.left)],
            "log_frequency": [str(config.log_frequency)],
            "trace_file": [config.file],
            "trace_mode": ["triton"],
        }

    def update(self, changes: Mapping[str, list[str] | None], model: str = "") -> None:
        """Changes settings of a model, or of the server for "".

        Args:
            changes: texts by setting, of which only ``trace_level`` takes several; None takes a change back, so
                that the model follows the server again and the server what it was started with. Keys that are
                no setting are passed over, as in Triton; so is ``trace_mode``.

        Raises:
            TritiumError: INVALID_ARGUMENT for a value that does not fit; UNIMPLEMENTED for ``trace_file``.
        """
        own = dict(self._changes.get(model, {}))
        for key, values in changes.items():
            if key == "trace_file":
                raise TritiumError(
                    Code.UNIMPLEMENTED, "trace file location can not be updated through network protocol"
                )
            if key not in _NUMBERS and key != "trace_level":
                continue
            if not values:
                own.pop(key, None)
            else:
                own[key] = parse_setting(key, values)
        self._changes[model] = own
        server = _changed(self._start, self._changes.get("", {}))
        if not server.file and own.get("trace_level"):
            _log.warning("no request is traced without --trace-config file=FILE", model=model)
        touched = [model] if model else ["", *(name for name in self._changes if name)]
        for name in touched:
            if name and not self._changes[name]:
                del self._changes[name]
                self._samplers.pop(name, None)
            else:
                self._samplers[name] = _Sampler(_changed(server, self._changes.get(name, {})) if name else server)
        if self._file is not None:
            self._file.log_frequency = self._samplers[""].config.log_frequency

    def write(self, entries: list[dict[str, Any]]) -> None:
        """Adds a trace to the file; when that fails, no more are taken."""
        if self._file is None:
            return
        try:
            self._file.add(entries)
        except OSError as error:
            _log.error("traces cannot be written; no more are taken", file=self._start.file, error=error)
            self._file.close()
            self._file = None

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _changed(config: TraceConfig, changes: Mapping[str, Any]) -> TraceConfig:
    fields = {"trace_level": "levels", "trace_rate": "rate", "trace_count": "count", "log_frequency": "log_frequency"}
    return replace(config, **{fields[key]: value for key, value in changes.items()})


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
    least = _NUMBERS[key]
    text = values[0][:100]
    if not text.removeprefix("-").isdecimal() or not text.isascii():
        raise invalid(f"Unable to parse '{key}', got: {text}", param=key)
    if len(text) > 11 or not least <= int(text) <= _INT32_MAX:
        raise invalid(
            f"Unable to parse '{key}', value is out of range [ {least}, {_INT32_MAX} ], got: {text}", param=key
        )
    return int(text)


class _File:
    """A JSON array that grows at its end, and is whole after each growth."""

    def __init__(self, path: str, log_frequency: int) -> None:
        self._path = path
        self.log_frequency = log_frequency
        self._index = 0
        self._in_file = 0
        try:
            self._open: BufferedWriter | None = self._begin(f"{path}.0" if log_frequency else path)
        except OSError as error:
            raise invalid(f"trace file '{path}' cannot be written: {error.strerror}", param="trace_config") from None

    def _begin(self, path: str) -> BufferedWriter:
        self._in_file = 0
        # Only for its owner: traces may hold what users sent.
        file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb")
        file.write(b"[]")
        file.flush()
        return file

    def add(self, entries: list[dict[str, Any]]) -> None:
        """Appends the entries of one trace."""
        if self._open is None or (self.log_frequency and self._in_file >= self.log_frequency):
            self.close()
            self._index += 1
            self._open = self._begin(f"{self._path}.{self._index}")
        text = ",\n".join(json.dumps(entry, separators=(",", ":")) for entry in entries)
        self._open.seek(-1, os.SEEK_END)
        self._open.write((",\n" if self._in_file else "").encode() + text.encode() + b"]")
        self._open.flush()
        self._in_file += 1

    def close(self) -> None:
        """Closes the file that is open."""
        if self._open is not None:
            self._open.close()
            self._open = None
