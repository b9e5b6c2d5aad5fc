"""The process of one instance: loads one ``InstanceBackend`` and runs the batches that come over a pipe.

Started as ``python -m tritium.backends.host --fd N --parent PID``. A process with one thread stays one: the main
thread reads the pipe while it waits for work, and so does the model's code while it waits for another model.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from tritium.backends import wire
from tritium.backends.base import InstanceBackend, InstanceContext
from tritium.errors import Code, TritiumError
from tritium.ipc import follow_parent
from tritium.ipc.frames import BrokenPipe
from tritium.ipc.pipe import ThreadPipe
from tritium.observability import logs
from tritium.observability.logs import LogState
from tritium.types import InferRequest, InferResponse


class Host:
    """The process's side of the pipe; a backend may talk to the server through it."""

    def __init__(self, end: socket.socket) -> None:
        self.pipe: ThreadPipe[wire.ToHost] = ThreadPipe(end, wire.ToHost, self._take)
        self._deferred: deque[Callable[[], None]] = deque()
        self._jobs: deque[wire.ToHost] = deque()
        self._cancelled: set[tuple[int, int]] = set()
        self._open: dict[int, int] = {}
        self._answers: dict[int, Callable[[InferResponse], None]] = {}
        self._results: dict[int, wire.Result | None] = {}
        self._numbers = iter(range(1 << 62))
        self._logging: LogState | None = None

    def _take(self, message: wire.ToHost) -> None:
        """Runs in whatever thread reads."""
        if type(message) is wire.Execute:
            self._open[message.batch] = len(message.requests)
            self._jobs.append(message)
            return
        match message:
            case wire.Cancel(batch, index):
                if batch in self._open:
                    self._cancelled.add((batch, index))
            case wire.Answer(call, response):
                take = self._answers.get(call)
                answer = wire.unpack_response(response, self.pipe.arena)
                if answer.final:
                    self._answers.pop(call, None)
                if take is not None:
                    take(answer)
            case wire.Result(ask):
                self._results[ask] = message
            case wire.Logging(state):
                # Only our own lines: what the model does with Python's logging is its business.
                self._logging = state
                logs.apply(state, "tritium")
            case _:
                self._jobs.append(message)

    # -- for the backend ------------------------------------------------------------------------------------

    def call(self, request: InferRequest, decoupled: bool, take: Callable[[InferResponse], None]) -> int:
        """Sends a request to a model of the server; ``take`` gets the answers, in whatever thread reads."""
        number = next(self._numbers)
        self._answers[number] = take
        with self.pipe.sending:
            self.pipe.send(wire.Call(number, wire.pack_request(request, self.pipe.arena), decoupled))
        return number

    def hang_up(self, call: int) -> None:
        """No further answers to a call, please."""
        if self._answers.pop(call, None) is not None:
            self.pipe.send(wire.HangUp(call))

    def ask(self, what: str, *arguments: Any) -> Any:
        """Asks the server for something and waits for what comes.

        Raises:
            TritiumError: what the server says against it.
        """
        number = next(self._numbers)
        self.pipe.send(wire.Ask(number, what, list(arguments)))
        self.pipe.wait(lambda: number in self._results)
        result = self._results.pop(number)
        if result is None or result.error is None:
            return None if result is None else result.value
        raise wire.error_of(result.error)

    def later(self, action: Callable[[], None]) -> None:
        """Does something in the main thread as soon as it is idle; destructors may call this."""
        self._deferred.append(action)
        self.pipe.poke()

    def log(self, level: str, message: str) -> None:
        """Writes a line into the server's log, if lines of that level are wanted."""
        self.pipe.look()
        if self._logging is None or self._logging.passes(level):
            self.pipe.send(wire.Log(level, wire.sendable(message)))

    def change(self, metric: int, action: str, value: float) -> None:
        """Moves a metric."""
        self.pipe.send(wire.Change(metric, action, value))

    # -- for the batches ------------------------------------------------------------------------------------

    def send(self, batch: int, responses: list[wire.Response], times: tuple[int, int, int], returned: bool) -> None:
        """Sends answers of a batch; a request counts as open until its last one.

        Args:
            times: of the execution up to now.
        """
        with self.pipe.sending:
            left = self._open.pop(batch, 0)
            for response in responses:
                if response.final or response.rescheduled:
                    left -= 1
                    if self._cancelled:
                        self._cancelled.discard((batch, response.index))
            if left > 0:
                self._open[batch] = left
            known = times if returned or left <= 0 else None
            self.pipe.send(wire.Replies(batch, responses, known, returned))

    def cancelled(self, batch: int, index: int) -> bool:
        """Whether a request of a batch was cancelled."""
        if (batch, index) not in self._cancelled:
            try:
                self.pipe.look()
            except BrokenPipe:
                return True
        return (batch, index) in self._cancelled

    # -- life -----------------------------------------------------------------------------------------------

    def next(self) -> wire.ToHost:
        """The next message for the main thread."""
        jobs = self._jobs
        if jobs:
            # It has waited behind another: perhaps nobody wants it any more.
            self.pipe.look()
        while not jobs:
            while self._deferred:
                self._deferred.popleft()()
            self.pipe.wait(self._has_work)
        return jobs.popleft()

    def _has_work(self) -> bool:
        return bool(self._jobs or self._deferred)

    def run(self) -> int:
        """Serves until told to stop; the exit status."""
        setup = self.next()
        assert isinstance(setup, wire.Setup)
        backend: InstanceBackend | None = None
        try:
            backend = make(setup, self)
            config = backend.complete(json.loads(setup.config)) if setup.complete else json.loads(setup.config)
            self.pipe.send(wire.Described(json.dumps(config)))
            load = self.next()
            if isinstance(load, wire.Load):
                backend.load(json.loads(load.config))
                self.pipe.send(wire.Loaded())
                self._serve(backend)
        except TritiumError as error:
            self.pipe.send(wire.Failed(*wire.told(error)))
        except BrokenPipe:
            return 1
        finally:
            if backend is not None:
                backend.unload()
        self.pipe.send(wire.Stopped())
        return 0

    def _serve(self, backend: InstanceBackend) -> None:
        while True:
            job = self.next()
            if isinstance(job, wire.Execute):
                self._execute(backend, job)
            elif isinstance(job, wire.Probe):
                self.pipe.send(wire.Health(job.probe, backend.well()))
            elif isinstance(job, wire.Stop):
                return
            # So that segments of the last batch are free while the process waits.
            del job

    def _execute(self, backend: InstanceBackend, job: wire.Execute) -> None:
        begin = time.monotonic_ns()
        arena, batch = self.pipe.arena, job.batch
        if self._cancelled and all((batch, index) in self._cancelled for index in range(len(job.requests))):
            gone = _failure(TritiumError(Code.CANCELLED, "request was cancelled"))
            refusals = [wire.pack_response(index, gone, arena) for index in range(len(job.requests))]
            self.send(batch, refusals, (0, 0, 0), True)
            return
        requests = [wire.unpack_request(request, arena, begin) for request in job.requests]
        send = _Send(self, batch, begin, time.monotonic_ns())
        answers: Sequence[InferResponse | None] | None
        try:
            answers, failed = backend.execute(requests, send), False
        except TritiumError as error:
            answers, failed = [_failure(error) if i not in send.closed else None for i in range(len(requests))], True
        with self.pipe.sending:
            packed = time.monotonic_ns()
            responses = [
                wire.pack_response(index, answer, arena, failed)
                for index, answer in enumerate(answers or ())
                if answer is not None
            ]
            self.send(batch, responses, send.times(packed), True)


class _Send:
    """``backends.base.Send`` for one batch.

    Args:
        begin: when the batch came, in ns.
        ready: when the model got it.
    """

    __slots__ = ("_batch", "_begin", "_host", "_output_ns", "_ready", "closed")

    def __init__(self, host: Host, batch: int, begin: int, ready: int) -> None:
        self._host = host
        self._batch = batch
        self._begin = begin
        self._ready = ready
        self._output_ns = 0
        self.closed: set[int] = set()

    def times(self, since: int) -> tuple[int, int, int]:
        """Input, infer and output up to now, of which answers have been made since ``since``."""
        now = time.monotonic_ns()
        self._output_ns += now - since
        return self._ready - self._begin, max(0, now - self._ready - self._output_ns), self._output_ns

    def __call__(self, index: int, response: InferResponse, failed: bool = False) -> None:
        if response.final:
            self.closed.add(index)
        with self._host.pipe.sending:
            since = time.monotonic_ns()
            packed = wire.pack_response(index, response, self._host.pipe.arena, failed)
            self._host.send(self._batch, [packed], self.times(since), False)

    def reschedule(self, index: int) -> None:
        self.closed.add(index)
        self._host.send(self._batch, [wire.rescheduled(index)], self.times(time.monotonic_ns()), False)

    def cancelled(self, index: int) -> bool:
        return self._host.cancelled(self._batch, index)


def _failure(error: TritiumError) -> InferResponse:
    return InferResponse("", "", "", error=error)


def make(setup: wire.Setup, server: object) -> InstanceBackend:
    """The backend of an instance.

    Args:
        server: what it may say to the server (``InstanceBackend.connect``).

    Raises:
        TritiumError: UNAVAILABLE when its module cannot be imported.
    """
    context = InstanceContext(
        setup.model,
        setup.version,
        Path(setup.model_folder),
        Path(setup.version_folder),
        setup.instance,
        setup.kind,  # type: ignore[arg-type]
        setup.device_id,
        setup.settings,
        setup.auto_complete,
    )
    module, _, name = setup.backend.partition(":")
    try:
        made: InstanceBackend = getattr(import_module(module), name)(context)
    except ImportError as error:
        raise TritiumError(Code.UNAVAILABLE, f"backend '{setup.backend}' cannot be used here: {error}") from error
    made.connect(server)
    return made


def main() -> int:
    """Entry point; standard output and error are those of the server."""
    parser = argparse.ArgumentParser(prog="tritium.backends.host")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    arguments = parser.parse_args()
    follow_parent(arguments.parent)
    host = Host(socket.socket(fileno=arguments.fd))
    os.register_at_fork(after_in_child=host.pipe.forsake)
    try:
        return host.run()
    except BrokenPipe:
        return 1


if __name__ == "__main__":
    # What a model does at exit (threads that never end, destructors of libraries) must not hold the server up.
    status = 1
    try:
        status = main()
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
