"""Execution: a batch that runs on an instance, and its replies as they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Protocol

from tritium.errors import TritiumError
from tritium.types import InferResponse


@dataclass(slots=True)
class Reply:
    """One answer to one request of a batch.

    Attributes:
        index: of the request in the batch.
        response: None when ``rescheduled``. An error of the model is ``response.error``; ``response.final``
            exactly once for each index unless it is rescheduled. ``response.empty``: a bare final flag.
        rescheduled: the model released the request with RESCHEDULE: it wants to see it again (iterative
            sequences). No further reply for this index follows.
        failed: the error is an exception of the model, rather than an answer of its own.
    """

    index: int
    response: InferResponse | None
    rescheduled: bool = False
    failed: bool = False


@dataclass(slots=True)
class Times:
    """What an execution took, in nanoseconds."""

    input_ns: int = 0
    infer_ns: int = 0
    output_ns: int = 0


class Listener(Protocol):
    """Who is called with the replies of an execution as they come, which costs no switch of tasks."""

    def replies(self, found: list[Reply]) -> None:
        """Replies have come, at least one."""
        ...

    def ended(self, error: TritiumError | None, started: bool) -> None:
        """Nothing more will come; with an error, because the process died.

        Args:
            started: whether the model may have seen the batch.
        """
        ...


class Execution(AsyncIterator[Reply]):
    """A batch that runs. Ends when every request has its final reply and the model's ``execute`` has returned.

    Its replies are taken one by one (``async for``), as they have gathered (``some``), or by a ``listen``er.

    Args:
        count: requests of the batch.
        cancel: tells the instance that nobody waits for a request.

    Attributes:
        times: set with the last final reply, and anew once the model's ``execute`` has returned.
        returned: whether it has. A decoupled model may go on answering after that, while the instance runs the
            next batch already.
    """

    __slots__ = ("_cancel", "_closed", "_error", "_listener", "_open", "_replies", "_waiter", "returned", "times")

    def __init__(self, count: int, cancel: Callable[[int], None]) -> None:
        self.times: Times | None = None
        self.returned = False
        self._cancel = cancel
        self._open = {0} if count == 1 else set(range(count))
        self._replies: list[Reply] = []
        self._waiter: asyncio.Future[None] | None = None
        self._error: TritiumError | None = None
        self._closed = False
        self._listener: Listener | None = None

    @property
    def over(self) -> bool:
        """Whether nothing more will come."""
        return not self._open

    async def __anext__(self) -> Reply:
        if not self._replies:
            await self._wait()
            if not self._replies:
                raise StopAsyncIteration
        return self._replies.pop(0)

    async def some(self) -> list[Reply]:
        """All replies that have come since the last call, at least one; [] at the end. Cheaper than one by one.

        Raises:
            TritiumError: UNAVAILABLE when the process died.
        """
        if not self._replies:
            await self._wait()
        replies, self._replies = self._replies, []
        return replies

    async def _wait(self) -> None:
        while not self._replies and (self._open or not self.returned) and not self._closed:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def listen(self, listener: Listener) -> None:
        """From now on every reply goes to ``listener``; said before any has come."""
        self._listener = listener

    def cancel(self, index: int) -> None:
        """Tells the model that nobody waits for this request any more; its final reply still comes."""
        if index in self._open and self._error is None:
            self._cancel(index)

    async def aclose(self) -> None:
        """Cancels every request that is not final; nothing more comes of it."""
        for index in sorted(self._open):
            self.cancel(index)
        self._open.clear()
        self._replies.clear()
        self._closed = True
        self._wake()

    # -- for the instance -----------------------------------------------------------------------------------

    def put(self, replies: list[Reply], times: Times | None, returned: bool) -> None:
        """Replies have come; those to requests that have ended already are dropped."""
        if times is not None:
            self.times = times
        self.returned = self.returned or returned
        for reply in replies:
            if reply.index in self._open:
                if reply.rescheduled or (reply.response is not None and reply.response.final):
                    self._open.discard(reply.index)
                self._replies.append(reply)
        if self._listener is None:
            self._wake()
            return
        listener = self._listener
        if self.returned and not self._open:
            self._listener = None  # it refers to this
        if self._replies:
            found, self._replies = self._replies, []
            listener.replies(found)
        if self.returned and not self._open:
            listener.ended(None, True)

    def fail(self, error: TritiumError, started: bool = True) -> None:
        """Nothing more will come, for this reason.

        Args:
            started: whether the model may have seen the batch.
        """
        self._error = error
        listener, self._listener = self._listener, None
        if listener is not None and not self._closed:
            listener.ended(error, started)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
