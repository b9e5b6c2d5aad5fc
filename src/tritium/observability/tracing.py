"""Traces of single requests: which are taken, what they hold, and the file that they are written to.

The settings and the file are those of Triton's trace extension: a JSON array in which a trace has one object
with its model and its request, one with its timestamps, and with TENSORS one for each tensor. The file is whole
JSON after every trace, so a reader need not wait for the end of the server. Times are nanoseconds of
``time.monotonic_ns``. In the mode ``opentelemetry`` there is no file: each trace becomes spans (``otel``).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import replace
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

from tritium.errors import Code, TritiumError, invalid, pip_install
from tritium.observability import logs
from tritium.observability.trace_config import (
    NUMBERS,
    OFF,
    OPENTELEMETRY,
    TENSORS,
    TIMESTAMPS,
    TraceConfig,
    parse_setting,
)
from tritium.observability.trace_file import TraceFile
from tritium.types import DType, Tensor, TraceRef

if TYPE_CHECKING:
    from tritium.observability.otel import Exporter, Spans

_log = logs.get(__name__)

# Elements of a tensor that a trace holds at most.
MAX_ELEMENTS = 4096


class Trace:
    """What happens to one request, until ``release`` writes it.

    Args:
        spans: what it becomes in the mode ``opentelemetry``.
    """

    def __init__(
        self,
        traces: Traces,
        levels: tuple[str, ...],
        model: str,
        version: str,
        request_id: str,
        parent_id: int = 0,
        spans: Spans | None = None,
    ) -> None:
        self._traces = traces
        self._levels = levels
        self._spans = spans
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
        spans = None if self._spans is None else self._spans.child(model)
        return Trace(self._traces, self._levels, model, version, request_id, self.id, spans)

    def ref(self) -> TraceRef:
        """What another process is told of it."""
        return TraceRef(self.id, "" if self._spans is None else self._spans.carrier())

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
        if TENSORS in self._levels and self._spans is None:
            self._tensors += [{"id": self.id, "activity": activity, "tensor": _tensor(tensor)} for tensor in tensors]

    def release(self) -> None:
        """Writes it."""
        if self._spans is not None:
            self._spans.end(self._head, sorted(self._stamps, key=lambda stamp: stamp[0]))
            return
        entries: list[dict[str, Any]] = [self._head]
        if self._stamps:
            stamps = sorted(self._stamps, key=lambda stamp: stamp[0])
            entries.append({"id": self.id, "timestamps": [{"name": name, "ns": ns} for ns, name in stamps]})
        self._traces.write([*entries, *self._tensors])


def make_exporter(url: str, resource: Mapping[str, str], batching: Mapping[str, int]) -> Exporter:
    """What sends spans.

    Raises:
        TritiumError: UNAVAILABLE, with the command that helps, when the OpenTelemetry SDK is not installed;
            INVALID_ARGUMENT for settings that do not go together.
    """
    try:
        from tritium.observability.otel import Exporter
    except ImportError as error:
        raise TritiumError(
            Code.UNAVAILABLE,
            f"--trace-config mode=opentelemetry needs the OpenTelemetry SDK ({error}); get it with: "
            f"{pip_install('tritium[opentelemetry]')}",
            param="trace_config",
        ) from None
    try:
        return Exporter(url, resource, batching)
    except ValueError as error:
        raise invalid(f"--trace-config: opentelemetry: {error}", param="trace_config") from None


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
        return bool(self.config.levels) and self.config.writes

    def take(self) -> bool:
        if not self.left:
            return False
        taken = self.config.rate > 0 and self._seen % self.config.rate == 0
        self._seen += 1
        if taken and self.left > 0:
            self.left -= 1
        return taken


class Traces:
    """The trace settings of a server and of its models, and the file.

    Raises:
        TritiumError: INVALID_ARGUMENT when the file cannot be written, UNAVAILABLE when the OpenTelemetry SDK is
            wanted and not installed.
    """

    def __init__(self, config: TraceConfig | None = None) -> None:
        self._start = config or TraceConfig()
        self._changes: dict[str, dict[str, Any]] = {}  # by model; "" is the server
        self._samplers: dict[str, _Sampler] = {"": _Sampler(self._start)}
        self._ids = itertools.count(1)
        self._file: TraceFile | None = None
        self._exporter: Exporter | None = None
        if self._start.mode == OPENTELEMETRY:
            self._exporter = make_exporter(self._start.url, self._start.resource, self._start.batching)
        elif self._start.file:
            self._file = TraceFile(self._start.file, self._start.log_frequency)

    def next_id(self) -> int:
        """The number of the next trace."""
        return next(self._ids)

    @property
    def joins(self) -> bool:
        """Whether ``begin`` has a use for the headers of a request."""
        return self._exporter is not None

    def begin(
        self,
        model: str,
        version: str = "",
        request_id: str = "",
        headers: Mapping[str, str] | None = None,
        arrived_ns: int | None = None,
    ) -> Trace | None:
        """The trace of a request, if it is one of those that are traced.

        Args:
            headers: of the request, names in lower case: ``traceparent`` makes it part of the client's trace,
                and then it is traced whatever rate and count are.
        """
        sampler = self._samplers.get(model) or self._samplers[""]
        joined = self._exporter is not None and headers is not None and "traceparent" in headers
        if not sampler.on or not (joined or sampler.take()):
            return None
        digits = version if version.isascii() and version.isdecimal() else ""
        spans = None
        if self._exporter is not None:
            spans = self._exporter.begin(model, headers or {}, monotonic_ns() if arrived_ns is None else arrived_ns)
        return Trace(self, sampler.config.levels, model, digits, request_id, spans=spans)

    def samples(self, model: str) -> bool:
        """Whether requests of a model may be traced now."""
        return (self._samplers.get(model) or self._samplers[""]).on

    def settings(self, model: str = "") -> dict[str, list[str]]:
        """The settings of a model, or of the server for "", as texts."""
        sampler = self._samplers.get(model) or self._samplers[""]
        config = sampler.config
        found = {
            "trace_level": list(config.levels) or [OFF],
            "trace_rate": [str(config.rate)],
            "trace_count": [str(sampler.left)],
        }
        if config.mode == OPENTELEMETRY:
            found |= {"trace_mode": [config.mode], "url": [config.url]}
            if config.resource:
                found["resource"] = [",".join(f"{key}={value}" for key, value in config.resource.items())]
            return found | {key: [str(value)] for key, value in config.batching.items()}
        return found | {
            "log_frequency": [str(config.log_frequency)],
            "trace_file": [config.file],
            "trace_mode": [config.mode],
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
            if key not in NUMBERS and key != "trace_level":
                continue
            if not values:
                own.pop(key, None)
            else:
                own[key] = parse_setting(key, values)
        self._changes[model] = own
        server = _changed(self._start, self._changes.get("", {}))
        if not server.writes and own.get("trace_level"):
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
        """Closes the file, or sends the spans that are left."""
        if self._exporter is not None:
            self._exporter.close()
            self._exporter = None
        if self._file is not None:
            self._file.close()
            self._file = None


def _changed(config: TraceConfig, changes: Mapping[str, Any]) -> TraceConfig:
    fields = {"trace_level": "levels", "trace_rate": "rate", "trace_count": "count", "log_frequency": "log_frequency"}
    return replace(config, **{fields[key]: value for key, value in changes.items()})
