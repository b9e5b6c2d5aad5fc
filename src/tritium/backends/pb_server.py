"""What a model asks of the server around it: log lines, metrics, other models' loads.

The host process has one model and one way to the server, so that way is kept here, as the static methods of
``pb_utils`` demand.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import Any, Protocol

from tritium.backends.pb_types import TritonModelException
from tritium.errors import TritiumError
from tritium.types import InferRequest, InferResponse


class Pipe(Protocol):
    """The part of ``ipc.pipe.ThreadPipe`` that waits."""

    def wait(self, done: Callable[[], bool]) -> None: ...  # noqa: D102

    def nudge(self) -> None: ...  # noqa: D102


class Server(Protocol):
    """The way to the server; ``backends.host.Host`` is one."""

    @property
    def pipe(self) -> Pipe: ...  # noqa: D102

    def call(self, request: InferRequest, decoupled: bool, take: Callable[[InferResponse], None]) -> int: ...  # noqa: D102

    def hang_up(self, call: int) -> None: ...  # noqa: D102

    def later(self, action: Callable[[], None]) -> None: ...  # noqa: D102

    def ask(self, what: str, *arguments: Any) -> Any: ...  # noqa: D102

    def log(self, level: str, message: str) -> None: ...  # noqa: D102

    def change(self, metric: int, action: str, value: float) -> None: ...  # noqa: D102


class _Connection:
    server: Server | None = None


def connect(server: Server) -> None:
    """Makes this process's models talk to that server; not those that they fork off."""
    _Connection.server = server
    os.register_at_fork(after_in_child=_disconnect)


def _disconnect() -> None:
    _Connection.server = None


def server() -> Server:
    """The way to the server.

    Raises:
        TritonModelException: this process runs no model.
    """
    if _Connection.server is None:
        raise TritonModelException("this works inside a model that a server runs, and no server runs this process")
    return _Connection.server


def _ask(what: str, *arguments: Any) -> Any:
    try:
        return server().ask(what, *arguments)
    except TritiumError as error:
        raise TritonModelException(error.message) from None


def load_model(model_name: str, config: str = "", files: Mapping[str, bytes] | None = None) -> None:
    """Loads a model, with a configuration in JSON and contents of files in place of those in the repository.

    Raises:
        TritonModelException: why it cannot be loaded.
    """
    _ask("load", model_name, config or None, None if files is None else dict(files))


def unload_model(model_name: str, unload_dependents: bool = False) -> None:
    """Takes a model out of service, and with ``unload_dependents`` the steps of an ensemble too."""
    _ask("unload", model_name, bool(unload_dependents))


def is_model_ready(model_name: str, model_version: str = "") -> bool:
    """Whether a model answers requests."""
    return bool(_ask("ready", model_name, str(model_version)))


class LogLevel(IntEnum):
    """Weight of a log line."""

    INFO = 0
    WARNING = 1
    ERROR = 2
    VERBOSE = 3


_LEVELS = {0: "info", 1: "warning", 2: "error", 3: "debug"}


class Logger:
    """Writes into the server's log; outside a model, nowhere."""

    LogLevel = LogLevel
    INFO = LogLevel.INFO
    WARNING = LogLevel.WARNING
    ERROR = LogLevel.ERROR
    VERBOSE = LogLevel.VERBOSE

    @staticmethod
    def log(message: str, level: int = LogLevel.INFO) -> None:
        """Writes a line."""
        if _Connection.server is not None:
            _Connection.server.log(_LEVELS[level], str(message))

    @staticmethod
    def log_info(message: str) -> None:
        """Writes a line that tells of a change."""
        Logger.log(message, LogLevel.INFO)

    @staticmethod
    def log_warn(message: str) -> None:
        """Writes a line that somebody should look at."""
        Logger.log(message, LogLevel.WARNING)

    @staticmethod
    def log_error(message: str) -> None:
        """Writes a line about a failure."""
        Logger.log(message, LogLevel.ERROR)

    @staticmethod
    def log_verbose(message: str) -> None:
        """Writes a line for whoever looks for a fault."""
        Logger.log(message, LogLevel.VERBOSE)


class MetricKind(IntEnum):
    """Kinds of metrics."""

    COUNTER = 0
    GAUGE = 1
    HISTOGRAM = 2


class Metric:
    """One series of a family; ``MetricFamily.Metric`` makes it."""

    def __init__(self, kind: MetricKind, number: int, family: MetricFamily) -> None:
        self._kind = kind
        self._number = number
        # A family is on the page as long as somebody holds it or one of its series.
        self._family = family

    def increment(self, value: float) -> None:
        """Adds to a counter or gauge.

        Raises:
            TritonModelException: a counter cannot go down; a histogram only observes.
        """
        if self._kind is MetricKind.HISTOGRAM:
            raise self._unfit("increment")
        if self._kind is MetricKind.COUNTER and value < 0:
            raise TritonModelException("TRITONSERVER_METRIC_KIND_COUNTER metrics must be incremented with value >= 0")
        self._change("increment", value)

    def set(self, value: float) -> None:
        """Sets a gauge.

        Raises:
            TritonModelException: it is none.
        """
        if self._kind is not MetricKind.GAUGE:
            raise self._unfit("set")
        self._change("set", value)

    def observe(self, value: float) -> None:
        """Adds a value to a histogram.

        Raises:
            TritonModelException: it is none.
        """
        if self._kind is not MetricKind.HISTOGRAM:
            raise self._unfit("observe")
        self._change("observe", value)

    def value(self) -> float:
        """What a counter or gauge stands at.

        Raises:
            TritonModelException: a histogram has no single value.
        """
        if self._kind is MetricKind.HISTOGRAM:
            raise self._unfit("value")
        return float(_ask("metric_value", self._number))

    def _change(self, action: str, value: float) -> None:
        server().change(self._number, action, float(value))

    def _unfit(self, operation: str) -> TritonModelException:
        return TritonModelException(
            f"TRITONSERVER_METRIC_KIND_{self._kind.name} does not support the operation '{operation}'"
        )


class MetricFamily:
    """A metric of the model's own on the server's page.

    Raises:
        TritonModelException: the name is taken by something else, or is no name.
    """

    COUNTER = MetricKind.COUNTER
    GAUGE = MetricKind.GAUGE
    HISTOGRAM = MetricKind.HISTOGRAM

    def __init__(self, name: str, description: str, kind: int) -> None:
        self._kind = MetricKind(kind)
        self._number: int = _ask("metric_family", name, self._kind.name.lower(), description)

    def Metric(self, labels: Mapping[str, str] | None = None, buckets: Sequence[float] | None = None) -> Metric:
        """One series.

        Args:
            buckets: upper bounds of a histogram, ascending.

        Raises:
            TritonModelException: buckets are missing for a histogram or given for another kind.
        """
        if (self._kind is MetricKind.HISTOGRAM) != (buckets is not None):
            wanted = "must be set" if buckets is None else "must not be set"
            raise TritonModelException(f"'buckets' {wanted} for TRITONSERVER_METRIC_KIND_{self._kind.name}")
        bounds = None if buckets is None else [float(b) for b in buckets]
        if bounds is not None and sorted(set(bounds)) != bounds:
            raise TritonModelException(f"'buckets' are {bounds}, expected ascending bounds")
        given = {str(key): str(value) for key, value in (labels or {}).items()}
        return Metric(self._kind, _ask("metric", self._number, given, bounds), self)
