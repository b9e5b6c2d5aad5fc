"""What a model in a host process may ask of the server around it: other models, loads, metrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tritium.backends import wire
from tritium.errors import Code, TritiumError, invalid
from tritium.ipc.pipe import AsyncPipe
from tritium.observability import logs
from tritium.observability.metrics import Metrics, check_labels
from tritium.observability.series import Family, Histogram, Value
from tritium.observability.tracing import Trace
from tritium.types import NO_TRACE, REPORT_COPIES, Copies, InferResponse

_log = logs.get(__name__)

Call = Callable[[Any], AsyncIterator[InferResponse]]


@dataclass(frozen=True, slots=True)
class Services:
    """The server, as models see it.

    Attributes:
        call: ``Server.infer_stream``, which does not refuse while the server drains.
        load: ``Server.load``: name, configuration in JSON, contents of files.
        unload: ``Server.unload``: name, with its dependents.
        ready: ``Server.model_healthy``: name, version.
        metrics: where metrics of models go; None where nobody reads them.
    """

    call: Call
    load: Callable[[str, str | None, Mapping[str, bytes] | None], Awaitable[None]]
    unload: Callable[[str, bool], Awaitable[None]]
    ready: Callable[[str, str], Awaitable[bool]]
    metrics: Metrics | None = None


class Client:
    """One host process as a client of the server.

    Args:
        model: for log lines.
        pipe: to the process.
        trace: the trace of a request that runs in the process, by its number.
    """

    def __init__(
        self,
        model: str,
        services: Services,
        pipe: AsyncPipe[wire.FromHost],
        trace: Callable[[int], Trace | None] = lambda number: None,
    ) -> None:
        self._trace = trace
        self._model = model
        self._services = services
        self._pipe = pipe
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._asks: set[asyncio.Task[None]] = set()
        self._families: list[Family | None] = []
        self._series: list[Value | Histogram] = []

    def take(self, message: wire.FromHost) -> None:
        """Does what a message asks for, at once or in a task."""
        match message:
            case wire.Log(level, text):
                self._write(level, text)
            case wire.Change(metric, action, value):
                self._change(metric, action, value)
            case wire.Call(call):
                task = asyncio.create_task(self._call(message))
                self._calls[call] = task
                task.add_done_callback(lambda _: self._calls.pop(call, None))
            case wire.HangUp(call):
                if call in self._calls:
                    self._calls[call].cancel()
            case wire.Ask():
                task = asyncio.create_task(self._ask(message))
                self._asks.add(task)
                task.add_done_callback(self._asks.discard)
            case _:
                raise ValueError(f"{type(message).__name__} is no message of a client")

    def close(self) -> None:
        """The process is gone: nobody waits for its calls."""
        for task in [*self._calls.values(), *self._asks]:
            task.cancel()

    def _write(self, level: str, text: str) -> None:
        write = {"debug": _log.debug, "info": _log.info, "warning": _log.warning}.get(level, _log.error)
        write("%s", text, model=self._model)

    # -- calls ----------------------------------------------------------------------------------------------

    async def _call(self, message: wire.Call) -> None:
        try:
            async for answer in self._answers(message):
                self._pipe.send(wire.Answer(message.call, wire.pack_response(0, answer, self._pipe.arena)))
        except TritiumError as error:
            self._refuse(message.call, error)
        except Exception as error:
            _log.exception("a model's call failed", model=self._model, called=message.request.model)
            self._refuse(message.call, TritiumError(Code.INTERNAL, f"the call failed: {type(error).__name__}"))

    async def _answers(self, message: wire.Call) -> AsyncGenerator[InferResponse]:
        request = wire.unpack_request(message.request, self._pipe.arena, time.monotonic_ns())
        parent = self._trace(request.trace_ref.id) if request.trace_ref.id else None
        if parent is not None:
            request.trace = parent.child(request.model, "", request.id)
        if request.parameters.get(REPORT_COPIES) is True:
            request.copies = Copies()
            for tensor in request.inputs.values():
                request.copies.add(tensor.data.nbytes)
        # The caller's buffers go back when the request is gone, not when the message is.
        message.request = wire.Request("", "", "", [], [], {}, 0, 0, 0, 0, NO_TRACE)
        answers = self._services.call(request)
        try:
            async for answer in answers:
                yield answer
        finally:
            if isinstance(answers, AsyncGenerator):
                await answers.aclose()

    def _refuse(self, call: int, error: TritiumError) -> None:
        answer = InferResponse("", "", "", error=error)
        self._pipe.send(wire.Answer(call, wire.pack_response(0, answer, self._pipe.arena)))

    # -- questions ------------------------------------------------------------------------------------------

    async def _ask(self, message: wire.Ask) -> None:
        value: Any = None
        error: tuple[str, str] | None = None
        try:
            value = await self._answer(message.what, message.arguments)
        except TritiumError as cause:
            error = (cause.code.value, cause.message)
        except Exception as cause:
            _log.exception("a model's question failed", model=self._model, question=message.what)
            error = (Code.INTERNAL.value, f"'{message.what}' failed: {type(cause).__name__}")
        self._pipe.send(wire.Result(message.ask, value, error))

    async def _answer(self, what: str, arguments: list[Any]) -> Any:
        match what, arguments:
            case "load", [name, config, files]:
                await self._services.load(name, config, files)
                return None
            case "unload", [name, dependents]:
                await self._services.unload(name, dependents)
                return None
            case "ready", [name, version]:
                return await self._services.ready(name, version)
            case "metric_family", [name, kind, description]:
                metrics = self._services.metrics
                self._families.append(None if metrics is None else metrics.custom(name, kind, description))
                return len(self._families) - 1
            case "metric", [int(family), labels, bounds]:
                self._series.append(self._one(self._families[family], labels, bounds))
                return len(self._series) - 1
            case "metric_value", [int(metric)]:
                series = self._series[metric]
                return series.value if isinstance(series, Value) else None
            case _:
                raise invalid(f"a model cannot ask for '{what}'")

    @staticmethod
    def _one(family: Family | None, labels: Mapping[str, str], bounds: list[float] | None) -> Value | Histogram:
        if family is None:
            # Nobody reads it, but the model reads it back.
            return Value() if bounds is None else Histogram(bounds)
        labels = check_labels(labels)
        return family.value(labels) if bounds is None else family.histogram(labels, bounds)

    def _change(self, metric: int, action: str, value: float) -> None:
        series = self._series[metric]
        if isinstance(series, Histogram):
            series.observe(value)
        elif action == "set":
            series.set(value)
        else:
            series.inc(value)
