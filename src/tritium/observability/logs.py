"""Structured log lines: text for people, JSON for machines, one line per event, the request id in each.

A message is a fixed sentence; what varies comes as fields, so that a line can be searched and no value
can pose as another line (control characters are escaped). What users write or models answer does not
belong in a log: fields of those names are replaced by their size.

How it is used::

    setup("info", "text")
    log = get(__name__)
    log.info("model is loaded", model="smollm2", version="1", seconds=1.8)
    with bound_request_id("abc"):      # a front end, once per request
        log.warning("queue is full", waiting=128)
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

import msgspec

from tritium.errors import invalid

Level = Literal["debug", "info", "warning", "error"]
Format = Literal["text", "json", "default", "ISO8601"]

request_id: ContextVar[str] = ContextVar("request_id", default="")

MAX_VALUE = 512
LEVELS: dict[str, int] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
# Fields that would hold what a user wrote or a model answered.
PRIVATE = frozenset(
    {"prompt", "prompts", "messages", "content", "text", "text_input", "text_output", "tokens", "input", "inputs"}
    | {"output", "outputs", "input_ids", "output_ids", "body", "authorization", "api_key", "cache_salt", "user"}
)


@contextmanager
def bound_request_id(value: str) -> Generator[None]:
    """Puts ``value`` into every line that this task, and those it starts, write inside the block."""
    token = request_id.set(value)
    try:
        yield
    finally:
        request_id.reset(token)


class Log:
    """Writes the lines of one module; ``get`` makes it.

    ``args`` are put into the message as ``logging`` does it; better are ``fields``.
    """

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def debug(self, message: str, *args: object, **fields: object) -> None:
        """A step that only somebody who looks for a fault wants to see."""
        self._write(logging.DEBUG, message, args, fields)

    def info(self, message: str, *args: object, **fields: object) -> None:
        """A change of state."""
        self._write(logging.INFO, message, args, fields)

    def warning(self, message: str, *args: object, **fields: object) -> None:
        """Something that an operator should look at."""
        self._write(logging.WARNING, message, args, fields)

    def error(self, message: str, *args: object, exc_info: BaseException | None = None, **fields: object) -> None:
        """Something that failed, with the traceback of ``exc_info`` when it is given."""
        self._write(logging.ERROR, message, args, fields, exc_info)

    def exception(self, message: str, *args: object, **fields: object) -> None:
        """Something that failed, with the traceback of the exception that is being handled."""
        self._write(logging.ERROR, message, args, fields, True)

    def enabled(self, level: Level) -> bool:
        """Whether lines of that level are written, for callers whose fields cost something."""
        return self._logger.isEnabledFor(LEVELS[level])

    def _write(
        self,
        level: int,
        message: str,
        args: tuple[object, ...],
        fields: dict[str, object],
        exc_info: BaseException | Literal[True] | None = None,
    ) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, message, *args, exc_info=exc_info, extra={"fields": fields})


def get(name: str) -> Log:
    """The log of a module, usually under its ``__name__``; names begin with ``tritium``."""
    return Log(name)


class TextFormatter(logging.Formatter):
    """``2026-01-31T12:00:00.123Z INFO  tritium.launch: model is loaded model=smollm2 request_id=abc``."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, and below it, indented, the lines of a traceback."""
        fields = " ".join(f"{key}={_text(value)}" for key, value in _fields(record).items())
        line = f"{_time(record)} {record.levelname:<7} {record.name}: {_escape(record.getMessage())}"
        if fields:
            line += " " + fields
        for trace in self._trace(record).splitlines():
            line += "\n    | " + _escape(trace)
        return line

    def _trace(self, record: logging.LogRecord) -> str:
        return self.formatException(record.exc_info) if record.exc_info and record.exc_info[0] else ""


class JsonFormatter(TextFormatter):
    """One JSON object per line: time, level, logger, message, then the fields, then ``exception``."""

    def format(self, record: logging.LogRecord) -> str:
        """The line; a field cannot take the place of a standard key."""
        line: dict[str, Any] = {key: _plain(value) for key, value in _fields(record).items()}
        line |= {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if trace := self._trace(record):
            line["exception"] = trace
        return json.dumps(line, ensure_ascii=True, allow_nan=False)


class Switches(logging.Filter):
    """Which kinds of lines go through a handler, each by itself, as Triton's log settings have it.

    Attributes:
        verbose: 0 without the lines of level debug.
    """

    def __init__(self) -> None:
        super().__init__()
        self.error = self.warning = self.info = True
        self.verbose = 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a line is written."""
        if record.levelno >= logging.ERROR:
            return self.error
        if record.levelno >= logging.WARNING:
            return self.warning
        return self.info if record.levelno >= logging.INFO else self.verbose > 0

    def lowest(self) -> int:
        """The least level that is written at all."""
        levels = ((self.verbose > 0, logging.DEBUG), (self.info, logging.INFO), (self.warning, logging.WARNING))
        return next((level for on, level in levels if on), logging.ERROR if self.error else logging.CRITICAL + 1)


def setup(level: str = "info", format: str = "text", stream: TextIO | None = None) -> logging.Handler:
    """Sends every line of this process, those of libraries too, to ``stream`` (stderr) in one form.

    Calling it again replaces what the last call did.

    Raises:
        TritiumError: INVALID_ARGUMENT for an unknown level or format.
    """
    if level not in LEVELS:
        raise invalid(f"log level is '{level}', expected one of {', '.join(LEVELS)}", param="log_level")
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(formatter(format))
    root = logging.getLogger()
    for old in [h for h in root.handlers if isinstance(h.formatter, TextFormatter)]:
        root.removeHandler(old)
    root.addHandler(handler)
    set_level(LEVELS[level])
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        library = logging.getLogger(name)
        library.handlers.clear()
        library.propagate = True
    return handler


class LogState(msgspec.Struct, array_like=True, frozen=True):
    """How a process logs, so that another one can log the same way."""

    format: str
    verbose: int
    info: bool
    warning: bool
    error: bool

    def passes(self, level: str) -> bool:
        """Whether lines of that level are written."""
        return {"debug": self.verbose > 0, "info": self.info, "warning": self.warning}.get(level, self.error)


# Who wants to know when that changes; like ``logging`` itself, one for the process.
_followers: set[Callable[[LogState], None]] = set()


def state() -> LogState:
    """How this process logs now."""
    level = logging.getLogger("tritium").getEffectiveLevel()
    own = [h for h in logging.getLogger().handlers if isinstance(h.formatter, TextFormatter)]
    form = "json" if any(isinstance(h.formatter, JsonFormatter) for h in own) else "text"
    for switches in (f for h in own for f in h.filters if isinstance(f, Switches)):
        return LogState(form, switches.verbose, switches.info, switches.warning, switches.error)
    passes = [level <= LEVELS[name] for name in ("info", "warning", "error")]
    return LogState(form, int(level <= logging.DEBUG), passes[0], passes[1], passes[2])


def apply(state: LogState, name: str = "") -> None:
    """Makes this process log that way.

    Args:
        name: whose lines alone it is about, in a process that is somebody else's; "" for all.
    """
    logger = logging.getLogger(name)
    own = [h for h in logger.handlers if isinstance(h.formatter, TextFormatter)]
    handler = own[0] if own else logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter(state.format))
    switches = Switches()
    switches.verbose, switches.info, switches.warning, switches.error = (
        state.verbose,
        state.info,
        state.warning,
        state.error,
    )
    handler.filters[:] = [switches]
    if not own:
        logger.addHandler(handler)
    if name:
        logger.propagate = False
        logger.setLevel(switches.lowest())
    else:
        set_level(switches.lowest())


def follow(changed: Callable[[LogState], None]) -> Callable[[], None]:
    """Calls ``changed`` after every change of the settings, until what this returns is called."""
    _followers.add(changed)
    return lambda: _followers.discard(changed)


def announce() -> None:
    """The settings have changed: whoever follows them is told."""
    now = state()
    for changed in list(_followers):
        changed(now)


def set_level(level: int) -> None:
    """The least level that is written from now on."""
    # Libraries are heard from warnings on, except when somebody looks for a fault.
    logging.getLogger().setLevel(logging.DEBUG if level <= logging.DEBUG else max(level, logging.WARNING))
    logging.getLogger("tritium").setLevel(level)


def formatter(format: str) -> logging.Formatter:
    """What writes lines of that format.

    Raises:
        TritiumError: INVALID_ARGUMENT for an unknown one.
    """
    if format not in FORMATTERS:
        raise invalid(f"log format is '{format}', expected one of {', '.join(FORMATTERS)}", param="log_format")
    return FORMATTERS[format]()


# Triton's two names stand for the text, whose times are ISO 8601 anyway.
FORMATTERS: dict[str, type[TextFormatter]] = {
    "text": TextFormatter,
    "json": JsonFormatter,
    "default": TextFormatter,
    "ISO8601": TextFormatter,
}


def child_arguments() -> list[str]:
    """The arguments that make a child process log as this one does (``--log-level``, ``--log-format``)."""
    level = logging.getLogger("tritium").getEffectiveLevel()
    name = next((name for name, number in LEVELS.items() if number >= level), "error")
    forms = [h.formatter for h in logging.getLogger().handlers if isinstance(h.formatter, TextFormatter)]
    return ["--log-level", name, "--log-format", "json" if any(isinstance(f, JsonFormatter) for f in forms) else "text"]


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    given: Mapping[str, Any] = getattr(record, "fields", {})
    fields = {key: _private(value) if key in PRIVATE else value for key, value in given.items()}
    if current := request_id.get():
        fields.setdefault("request_id", current)
    return fields


def _private(value: Any) -> str:
    return (
        f"<{len(value)} {'characters' if isinstance(value, str) else 'items'}>" if hasattr(value, "__len__") else "<>"
    )


def _plain(value: Any) -> Any:
    if isinstance(value, bool | int) or value is None:
        return value
    if isinstance(value, float):
        return value if value - value == 0 else str(value)
    return _cut(str(value))


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = _cut(str(value))
    plain = text.isprintable() and text and not any(c in text for c in ' "=')
    return text if plain else json.dumps(text, ensure_ascii=not text.isprintable())


def _cut(text: str) -> str:
    return text if len(text) <= MAX_VALUE else f"{text[:MAX_VALUE]}... ({len(text)} characters)"


def _escape(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
