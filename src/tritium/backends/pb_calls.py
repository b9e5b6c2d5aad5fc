"""Requests that a model sends to other models of the server (business logic scripting)."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from tritium.backends.pb_server import Server, server
from tritium.errors import Code, TritiumError
from tritium.types import InferRequest, InferResponse

Make = Callable[[InferResponse], Any]


class _Call:
    """One request on its way."""

    def __init__(self, request: InferRequest, decoupled: bool) -> None:
        self.server: Server = server()
        self.answers: deque[InferResponse] = deque()
        self.ended = False
        self.wake: Callable[[], None] | None = None
        self.number = self.server.call(request, decoupled, self._take)

    def _take(self, answer: InferResponse) -> None:
        self.answers.append(answer)
        self.ended = self.ended or answer.final
        if self.wake is not None:
            self.wake()

    def next(self) -> InferResponse | None:
        """The next answer, waiting for it; None after the last one."""
        if not self.answers and not self.ended:
            self.server.pipe.wait(lambda: bool(self.answers) or self.ended)
        return self.answers.popleft() if self.answers else None

    async def anext(self) -> InferResponse | None:
        """``next`` for an event loop."""
        loop = asyncio.get_running_loop()
        while not self.answers and not self.ended:
            event = asyncio.Event()

            def wake(event: asyncio.Event = event) -> None:
                # The loop may be gone: then nobody waits.
                with suppress(RuntimeError):
                    loop.call_soon_threadsafe(event.set)

            self.wake = wake
            if self.answers or self.ended:
                break
            _Reader.watch(self)
            await event.wait()
        self.wake = None
        return self.answers.popleft() if self.answers else None

    def hang_up(self) -> None:
        """Takes no further answers."""
        if not self.ended:
            self.ended = True
            self.server.hang_up(self.number)
            self.server.pipe.nudge()


class _Reader:
    """A thread that reads while an event loop waits, since the loop itself cannot; there are calls to wait for."""

    _lock = threading.Lock()
    _calls: set[_Call] = set()  # noqa: RUF012
    _running = False

    @classmethod
    def watch(cls, call: _Call) -> None:
        with cls._lock:
            cls._calls.add(call)
            if not cls._running:
                cls._running = True
                threading.Thread(target=cls._read, args=(call.server,), daemon=True, name="tritium-calls").start()

    @classmethod
    def _read(cls, server: Server) -> None:
        while True:
            with cls._lock:
                cls._calls = {call for call in cls._calls if not (call.answers or call.ended)}
                if not cls._calls:
                    cls._running = False
                    return
                calls = frozenset(cls._calls)
            server.pipe.wait(lambda calls=calls: any(call.answers or call.ended for call in calls))


class ResponseIterator:
    """The answers of a decoupled model, one after the other; for ``for`` and ``async for``.

    The last one may be empty: it has no tensors and only says that nothing follows.
    """

    def __init__(self, call: _Call, make: Make, first: InferResponse | None = None) -> None:
        self._call = call
        self._make = make
        self._first = first

    def __iter__(self) -> ResponseIterator:
        return self

    def __next__(self) -> Any:
        answer, self._first = (self._first, None) if self._first is not None else (self._call.next(), None)
        if answer is None:
            raise StopIteration
        return self._make(answer)

    def __aiter__(self) -> ResponseIterator:
        return self

    async def __anext__(self) -> Any:
        answer, self._first = (self._first, None) if self._first is not None else (await self._call.anext(), None)
        if answer is None:
            raise StopAsyncIteration
        return self._make(answer)

    def cancel(self) -> None:
        """Wants no further answers; the other model learns that the request is cancelled."""
        self._call.hang_up()

    def __del__(self) -> None:
        # A destructor runs anywhere, also in the middle of a send.
        if not self._call.ended:
            self._call.server.later(self._call.hang_up)


def call(request: InferRequest, decoupled: bool, make: Make) -> Any:
    """Sends a request and waits for its only answer; with ``decoupled`` returns an iterator at once."""
    sent = _Call(request, decoupled)
    if decoupled:
        return ResponseIterator(sent, make)
    first = sent.next()
    return make(_only(sent, request.model, first))


async def async_call(request: InferRequest, decoupled: bool, make: Make) -> Any:
    """``call`` for an event loop; with ``decoupled`` it returns once the first answer is there."""
    sent = _Call(request, decoupled)
    first = await sent.anext()
    if decoupled:
        return ResponseIterator(sent, make, first)
    return make(_only(sent, request.model, first))


def _only(sent: _Call, model: str, answer: InferResponse | None) -> InferResponse:
    """The answer, if it is the only one."""
    if answer is not None and answer.final and not answer.empty:
        return answer
    sent.hang_up()
    error = TritiumError(
        Code.INVALID_ARGUMENT,
        f"Model {model} is using the decoupled. The current BLS request call doesn't support models using the "
        "decoupled transaction policy. Please use 'decoupled=True' argument to the 'exec' or 'async_exec' calls for "
        "decoupled models.'",
    )
    return InferResponse("", "", "", error=error)
