"""The host process of an instance, from its start to its end: one life, one pipe."""

from __future__ import annotations

import asyncio
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple, TypeVar

from tritium.backends import wire
from tritium.errors import LOST, Code, TritiumError
from tritium.ipc import start_child
from tritium.ipc.pipe import AsyncPipe
from tritium.observability import logs
from tritium.observability.tracing import Trace
from tritium.serving.execution import Execution, Reply, Times
from tritium.serving.services import Client, Services
from tritium.types import Copies, InferRequest, InferResponse

MODULE = "tritium.backends.host"
# What a model's ``finalize`` may take, in seconds.
STOP_S = 30.0
_Expected = TypeVar("_Expected", wire.Described, wire.Loaded, wire.Stopped)

_log = logs.get(__name__)


class _Note(NamedTuple):
    copies: Copies | None
    trace: Trace | None


class Process:
    """A host process.

    Args:
        name: of the instance.
        on_idle: called whenever the model's ``execute`` has returned.
        on_end: called when the process is gone although nobody stopped it.
    """

    def __init__(
        self, name: str, model: str, services: Services, on_idle: Callable[[], None], on_end: Callable[[str], None]
    ) -> None:
        self.ended = False
        self._name = name
        self._model = model
        self._services = services
        self._on_idle = on_idle
        self._on_end = on_end
        self._child: asyncio.subprocess.Process | None = None
        self._pipe: AsyncPipe[wire.FromHost] | None = None
        self._client: Client | None = None
        self._exit: asyncio.Task[None] | None = None
        self._expected: asyncio.Future[wire.FromHost] | None = None
        self._probes: dict[int, asyncio.Future[bool]] = {}
        self._running: dict[int, Execution] = {}
        # What is kept of the requests of a batch: not their tensors.
        self._notes: dict[int, list[_Note]] = {}
        self._left: dict[int, int] = {}
        self._batches = 0
        # Those that have not returned from the model: the first one is inside, the others wait for it.
        self._inside: deque[Execution] = deque()
        self._stopping = False
        self._unfollow: Callable[[], None] = lambda: None

    @property
    def busy(self) -> bool:
        """Whether the model's ``execute`` is running."""
        return bool(self._inside)

    @property
    def pid(self) -> int | None:
        """Its process id; None before it runs."""
        return None if self._child is None else self._child.pid

    async def start(self) -> None:
        """Starts it; ``exchange`` says what to do."""
        ours, theirs = socket.socketpair()
        try:
            arguments = ["--fd", str(theirs.fileno()), "--parent", str(os.getpid())]
            self._child = await start_child(MODULE, arguments, {}, pass_fds=(theirs.fileno(),))
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._pipe = AsyncPipe(ours, wire.FromHost, self._take, self._end)
        self._client = Client(self._model, self._services, self._pipe, self._trace)
        self._pipe.send(wire.Logging(logs.state()))
        self._unfollow = logs.follow(self._log_like)
        self._exit = asyncio.create_task(self._watch(self._child, self._pipe))

    @staticmethod
    async def _watch(child: asyncio.subprocess.Process, pipe: AsyncPipe[wire.FromHost]) -> None:
        """Its death ends the pipe, even if a process that the model forked still holds the other end."""
        await child.wait()
        pipe.shut()

    def _log_like(self, state: logs.LogState) -> None:
        if self._pipe is not None:
            self._pipe.send(wire.Logging(state))

    async def exchange(self, message: wire.ToHost, answer: type[_Expected]) -> _Expected:
        """Sends a message and waits for the answer to it.

        Raises:
            TritiumError: what the process says instead; UNAVAILABLE when it ends.
        """
        if self._pipe is None or self.ended:
            raise self.gone()
        self._expected = asyncio.get_running_loop().create_future()
        self._pipe.send(message)
        try:
            found = await self._expected
        finally:
            self._expected = None
        if isinstance(found, wire.Failed):
            raise wire.error_of((found.code, found.message))
        if not isinstance(found, answer):
            raise TritiumError(Code.INTERNAL, f"instance '{self._name}' said {type(found).__name__} out of turn")
        return found

    def execute(self, requests: Sequence[InferRequest]) -> Execution:
        """Runs a batch; the caller has looked that it may."""
        assert self._pipe is not None
        self._batches += 1
        batch, arena = self._batches, self._pipe.arena
        # First what may fail (there may be no memory, or no descriptor left): a batch that never left is not inside.
        self._pipe.send(wire.Execute(batch, [wire.pack_request(request, arena) for request in requests]))
        execution = Execution(len(requests), partial(self._cancel, batch))
        self._running[batch] = execution
        self._left[batch] = len(requests)
        self._inside.append(execution)
        if any(request.copies is not None or request.trace is not None for request in requests):
            self._notes[batch] = [_Note(request.copies, request.trace) for request in requests]
        return execution

    def _cancel(self, batch: int, index: int) -> None:
        if self._pipe is not None and not self.ended:
            self._pipe.send(wire.Cancel(batch, index))

    async def well(self) -> bool:
        """What the model says of itself; a busy one is well."""
        if self._pipe is None or self.ended:
            return False
        if self.busy:
            return True
        number = len(self._probes)
        while number in self._probes:
            number += 1
        self._probes[number] = asyncio.get_running_loop().create_future()
        self._pipe.send(wire.Probe(number))
        try:
            return await self._probes[number]
        finally:
            del self._probes[number]

    # -- messages -------------------------------------------------------------------------------------------

    def _take(self, message: wire.FromHost) -> None:
        if type(message) is wire.Replies:
            self._replies(message)
        elif isinstance(message, wire.Described | wire.Loaded | wire.Failed | wire.Stopped):
            if self._expected is not None and not self._expected.done():
                self._expected.set_result(message)
        elif isinstance(message, wire.Health):
            probe = self._probes.get(message.probe)
            if probe is not None and not probe.done():
                probe.set_result(message.well)
        elif self._client is not None:
            self._client.take(message)

    def _replies(self, message: wire.Replies) -> None:
        execution = self._running.get(message.batch)
        if execution is None or self._pipe is None:
            return
        arena = self._pipe.arena
        replies: list[Reply] = []
        left = self._left[message.batch]
        for response in message.responses:
            if response.rescheduled:
                replies.append(Reply(response.index, None, rescheduled=True))
                left -= 1
            else:
                unpacked = wire.unpack_response(response, arena)
                if message.batch in self._notes:
                    self._count(message.batch, unpacked, response.index)
                replies.append(Reply(response.index, unpacked, failed=response.failed))
                left -= response.final
        times = None if message.times is None else Times(*message.times)
        self._left[message.batch] = left
        if message.returned:
            # They run in the order in which they were sent.
            self._inside.popleft()
        if not left and (message.returned or execution.returned):
            del self._running[message.batch], self._left[message.batch]
            self._notes.pop(message.batch, None)
        execution.put(replies, times, message.returned)
        if message.returned:
            self._on_idle()

    def _count(self, batch: int, response: InferResponse, index: int) -> None:
        """The process copied each output to where we read it."""
        copies = self._notes[batch][index].copies
        if copies is not None:
            for tensor in response.outputs:
                copies.add(tensor.data.nbytes)

    def _trace(self, number: int) -> Trace | None:
        """The trace of that number, if it is that of a request that runs here."""
        found = (note.trace for notes in self._notes.values() for note in notes if note.trace is not None)
        return next((trace for trace in found if trace.id == number), None)

    # -- end ------------------------------------------------------------------------------------------------

    def gone(self) -> TritiumError:
        """What requests inside are told."""
        return TritiumError(
            Code.UNAVAILABLE,
            f"Failed to process the request(s) for model '{self._name}', message: Stub process '{self._name}' is "
            "not healthy.",
            reason=LOST,
        )

    def _end(self, why: str) -> None:
        """The pipe has ended: everything that waits for the process learns it."""
        if self.ended:
            return
        self.ended = True
        self._unfollow()
        if self._client is not None:
            self._client.close()
        error = self.gone()
        waiting = [self._expected, *self._probes.values()]
        for future in waiting:
            if future is not None and not future.done():
                future.set_exception(error)
        # A batch is begun after the answer to the one before: the others behind it are as they were.
        unseen = set(list(self._inside)[1:])
        running, self._running = list(self._running.values()), {}
        self._left.clear()
        self._inside.clear()
        self._notes.clear()
        if not self._stopping:
            self._on_end(why)
        for execution in reversed(running):  # so that each is put back before those that came after it
            execution.fail(error, execution not in unseen)

    async def stop(self, wait_s: float = STOP_S) -> None:
        """Unloads the model and ends the process, by force after ``wait_s`` seconds."""
        self._stopping = True
        if self._pipe is not None and not self.ended:
            with suppress(TritiumError, TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self.exchange(wire.Stop(), wire.Stopped)
        await self.kill()

    async def kill(self) -> None:
        """Ends the process now, if it still runs, and waits for it; returns nothing before it is gone."""
        self._stopping = True
        if self._pipe is not None:
            self._pipe.close()
        self._end("it was stopped")
        child = self._child
        if child is not None:
            if child.returncode is None:
                with suppress(ProcessLookupError):
                    child.kill()
            await child.wait()
