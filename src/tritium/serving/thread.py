"""A thread of this process that runs one instance: what ``process.Process`` is to a host process.

Nothing is copied on the way in or out, and there is no second process. In return the model's native code shares our
fate, so only backends that declare it (``InstanceBackend.placements``) may run here, never a user's Python. The
runtimes let go of the interpreter's lock while they load and compute: the event loop runs on meanwhile.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeVar, cast

from tritium.backends import host, wire
from tritium.backends.base import InstanceBackend
from tritium.errors import Code, TritiumError
from tritium.observability import logs
from tritium.serving.execution import Execution, Reply, Times
from tritium.serving.process import STOP_S
from tritium.types import InferRequest, InferResponse

# How long the end of an idle thread is waited for, in seconds.
END_S = 5.0
_Expected = TypeVar("_Expected", wire.Described, wire.Loaded, wire.Stopped)
_Job = Callable[[], None]

_log = logs.get(__name__)


class Thread:
    """A thread with one instance in it; it has the methods of ``Process``.

    Args:
        name: of the instance.
        on_idle: called when the model's ``execute`` has returned.
    """

    def __init__(self, name: str, model: str, on_idle: Callable[[], None]) -> None:
        self.ended = False
        self._name = name
        self._model = model
        self._on_idle = on_idle
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._running: set[Execution] = set()
        self._inside = 0  # batches whose ``execute`` has not returned; the thread takes them in order
        self._backend: InstanceBackend | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._finished = asyncio.Event()

    @property
    def busy(self) -> bool:
        """Whether the model's ``execute`` is running."""
        return self._inside > 0

    @property
    def pid(self) -> None:
        """It has no process of its own."""
        return None

    async def start(self) -> None:
        """Starts it; ``exchange`` says what to do."""
        self._loop = asyncio.get_running_loop()
        # A daemon: native code that never returns must not keep the server from ending.
        threading.Thread(target=self._serve, name=f"tritium-{self._name}", daemon=True).start()

    def log(self, level: str, message: str) -> None:
        """Writes a line into the server's log; for the backend, from its thread."""
        write = {"info": _log.info, "warning": _log.warning}.get(level, _log.error)
        write("%s", message, model=self._model)

    async def exchange(self, message: wire.ToHost, answer: type[_Expected]) -> _Expected:
        """Does in the thread what a message says, and waits for it.

        Raises:
            TritiumError: what the backend says against it; INTERNAL for any other exception of its.
        """
        if self.ended:
            raise self.gone()
        found = await self._do(lambda: self._obey(message))
        if not isinstance(found, answer):
            raise TritiumError(Code.INTERNAL, f"instance '{self._name}' said {type(found).__name__} out of turn")
        return found

    def execute(self, requests: Sequence[InferRequest]) -> Execution:
        """Runs a batch; the caller has looked that it may."""
        self._inside += 1
        cancelled: set[int] = set()
        execution = Execution(len(requests), cancelled.add)
        self._running.add(execution)
        given_ns = time.monotonic_ns()
        self._jobs.put(lambda: self._run(execution, requests, cancelled, given_ns))
        return execution

    async def well(self) -> bool:
        """What the model says of itself; a busy one is well."""
        if self.busy or self.ended:
            return not self.ended
        backend = self._backend
        return backend is not None and bool(await self._do(backend.well))

    async def stop(self, wait_s: float = STOP_S) -> None:
        """Unloads the model and ends the thread; one that is still busy after ``wait_s`` seconds ends later."""
        with suppress(TritiumError, TimeoutError):
            async with asyncio.timeout(wait_s):
                await self.exchange(wire.Stop(), wire.Stopped)
        await self.kill()

    async def kill(self) -> None:
        """Takes nothing more and tells the thread to end: at once when it is idle, else when its work returns."""
        if not self.ended:
            self.ended = True
            self._jobs.put(self._unload)
            self._jobs.put(None)
            running, self._running = self._running, set()
            for execution in running:
                execution.fail(self.gone())
        if not self.busy:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._finished.wait(), END_S)

    def gone(self) -> TritiumError:
        """What requests inside are told."""
        return TritiumError(Code.UNAVAILABLE, f"instance '{self._name}' is stopped")

    # -- in the thread --------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            # So that the buffers of the last batch are free while the thread waits.
            del job
        self._call(self._finished.set)

    def _obey(self, message: wire.ToHost) -> wire.FromHost:
        match message:
            case wire.Setup():
                self._backend = host.make(message, self)
                config = json.loads(message.config)
                return wire.Described(json.dumps(self._backend.complete(config) if message.complete else config))
            case wire.Load(config) if self._backend is not None:
                self._backend.load(json.loads(config))
                return wire.Loaded()
            case wire.Stop():
                self._unload()
                return wire.Stopped()
            case _:
                raise TritiumError(Code.INTERNAL, f"instance '{self._name}' cannot {type(message).__name__} now")

    def _unload(self) -> None:
        backend, self._backend = self._backend, None
        if backend is not None:
            try:
                backend.unload()
            except Exception:
                _log.exception("backend failed", model=self._model, doing="unload")

    def _run(self, execution: Execution, requests: Sequence[InferRequest], cancelled: set[int], given_ns: int) -> None:
        begin_ns = time.monotonic_ns()
        send = _Send(self, execution, cancelled)
        answers: Sequence[InferResponse | None] | None = None
        failed = False
        try:
            if self._backend is None:
                raise self.gone()
            answers = self._backend.execute(requests, send)
        except Exception as error:
            cause = self._understood(error, "answer")
            failed = True
            answers = [
                None if i in send.closed else InferResponse("", "", "", error=cause) for i in range(len(requests))
            ]
        replies = [
            Reply(index, answer, failed=failed) for index, answer in enumerate(answers or ()) if answer is not None
        ]
        times = Times(begin_ns - given_ns, time.monotonic_ns() - begin_ns, 0)
        self._call(lambda: self._done(execution, replies, times))

    def _understood(self, error: Exception, doing: str) -> TritiumError:
        if isinstance(error, TritiumError):
            return error
        _log.exception("backend failed", model=self._model, doing=doing)
        return TritiumError(Code.INTERNAL, f"instance '{self._name}' failed to {doing}: {type(error).__name__}")

    # -- between the two ------------------------------------------------------------------------------------

    async def _do(self, work: Callable[[], Any]) -> Any:
        """What ``work`` returns, done in the thread after all that it was given before."""
        assert self._loop is not None
        future: asyncio.Future[Any] = self._loop.create_future()

        def job() -> None:
            try:
                found = work()
            except Exception as error:
                cause = self._understood(error, "load")
                self._call(lambda: None if future.done() else future.set_exception(cause))
            else:
                self._call(lambda: None if future.done() else future.set_result(found))

        self._jobs.put(job)
        return await future

    def _call(self, action: Callable[[], Any]) -> None:
        """Does something in the event loop; nothing when that has ended."""
        with suppress(RuntimeError):
            cast(asyncio.AbstractEventLoop, self._loop).call_soon_threadsafe(action)

    def _done(self, execution: Execution, replies: list[Reply], times: Times) -> None:
        self._inside -= 1
        self._running.discard(execution)
        if not self.ended:
            execution.put(replies, times, True)
            self._on_idle()

    def put(self, execution: Execution, reply: Reply) -> None:
        """Hands one reply over, from any thread."""
        self._call(lambda: execution.put([reply], None, False))


class _Send:
    """``backends.base.Send`` for one batch."""

    __slots__ = ("_cancelled", "_execution", "_thread", "closed")

    def __init__(self, thread: Thread, execution: Execution, cancelled: set[int]) -> None:
        self._thread = thread
        self._execution = execution
        self._cancelled = cancelled
        self.closed: set[int] = set()

    def __call__(self, index: int, response: InferResponse, failed: bool = False) -> None:
        if response.final:
            self.closed.add(index)
        self._thread.put(self._execution, Reply(index, response, failed=failed))

    def reschedule(self, index: int) -> None:
        self.closed.add(index)
        self._thread.put(self._execution, Reply(index, None, rescheduled=True))

    def cancelled(self, index: int) -> bool:
        return index in self._cancelled
