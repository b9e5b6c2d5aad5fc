"""Instances that run in the test itself, and what is asked of batchers around them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import numpy as np

from tritium.backends.base import Timing
from tritium.backends.config import ModelConfig
from tritium.errors import Code, TritiumError
from tritium.serving.config import make_config, parse_text
from tritium.serving.execution import Execution, Listener, Reply, Times
from tritium.serving.stats import ModelStats
from tritium.types import InferRequest, InferResponse, SequenceRef, Tensor

Model = Callable[[Sequence[InferRequest], "Running"], Awaitable[None]]


class Running:
    """A batch that runs; the model calls ``reply``."""

    def __init__(self, requests: Sequence[InferRequest]) -> None:
        self.requests = requests
        self.times: Times | None = None
        self.cancelled: set[int] = set()
        self._execution = Execution(len(requests), self.cancelled.add)

    @property
    def returned(self) -> bool:
        return self._execution.returned

    def listen(self, listener: Listener) -> None:
        self._execution.listen(listener)

    def reply(self, index: int, response: InferResponse, failed: bool = False) -> None:
        self._execution.put([Reply(index, response, failed=failed)], None, False)

    def reschedule(self, index: int) -> None:
        self._execution.put([Reply(index, None, rescheduled=True)], None, False)

    def end(self) -> None:
        self._execution.put([], None, True)

    def die(self, started: bool = True) -> None:
        self._execution.fail(TritiumError(Code.UNAVAILABLE, "the process died"), started)

    def cancel(self, index: int) -> None:
        self._execution.cancel(index)


class Executor:
    """Runs batches with ``model``, one at a time; ``log`` holds those that have begun."""

    def __init__(self, model: Model, name: str = "m_0") -> None:
        self.name = name
        self.life = 1
        self.on_free: Callable[[], None] | None = None
        self.log: list[list[InferRequest]] = []
        self.running: list[Running] = []
        self.up = True
        self._model = model
        self._line: list[Running] = []
        self._task: asyncio.Task[None] | None = None

    @property
    def ready(self) -> bool:
        return self.up

    @property
    def busy(self) -> bool:
        return bool(self._line)

    @property
    def idle(self) -> bool:
        return self.up and not self.busy

    def execute(self, requests: Sequence[InferRequest], *, ahead: bool = False) -> Running:
        assert ahead or not self.busy, "a batch for an instance that is busy"
        if not self.up:
            raise TritiumError(Code.UNAVAILABLE, "not up")
        running = Running(requests)
        self.running.append(running)
        self._line.append(running)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())
        return running

    def kill(self) -> None:
        """The process dies, and is there again at once."""
        self.life += 1
        inside, self._line = self._line, []
        if self._task is not None:
            self._task.cancel()
            self._task = None
        waiting = set(inside[1:])
        for running in reversed(self.running):
            running.die(running not in waiting)
        self.running.clear()
        asyncio.get_running_loop().call_soon(self._say_free)

    def _say_free(self) -> None:
        if self.on_free is not None:
            self.on_free()

    async def _run(self) -> None:
        while self._line:
            running = self._line[0]
            try:
                if len(running.cancelled) < len(running.requests):
                    self.log.append(list(running.requests))
                    await self._model(running.requests, running)
                else:
                    for index in running.cancelled:
                        running.reply(index, InferResponse("", "", ""))
            finally:
                running.times = Times(10, 20, 30)
                if running in self._line:
                    self._line.remove(running)
                    running.end()
            self._say_free()
        self._task = None


async def echo(requests: Sequence[InferRequest], running: Running) -> None:
    """Answers each request with its inputs."""
    await asyncio.sleep(0)
    running.times = Times(10, 20, 30)
    for index, request in enumerate(requests):
        outputs = [Tensor("OUT", t.dtype, t.shape, t.data) for t in request.inputs.values()]
        running.reply(index, InferResponse("", "", "", outputs))


class Gate:
    """A model that answers like ``echo`` once ``open`` is set, or one batch for each ``step``."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self._steps = asyncio.Semaphore(0)

    def step(self) -> None:
        self._steps.release()

    async def __call__(self, requests: Sequence[InferRequest], running: Running) -> None:
        waits = [asyncio.create_task(self.open.wait()), asyncio.create_task(self._steps.acquire())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        await echo(requests, running)


def config_of(text: str, name: str = "m") -> ModelConfig:
    return make_config(parse_text(text.encode(), name), name)


def stats() -> ModelStats:
    return ModelStats("m", "1")


def request(rows: int = 1, width: int = 2, id: str = "", **fields: object) -> InferRequest:
    array = np.arange(rows * width, dtype=np.float32).reshape(rows, width)
    made = InferRequest("m", "", id, {"IN": Tensor.from_numpy("IN", array)}, [], time.monotonic_ns())
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def step(id: int | str, start: bool = False, end: bool = False, value: int = 0) -> InferRequest:
    tensor = Tensor.from_numpy("IN", np.array([[value]], dtype=np.int32))
    return InferRequest(
        "m", "", f"{id}/{value}", {"IN": tensor}, [], time.monotonic_ns(), sequence=SequenceRef(id, start, end)
    )


async def collect(answers: AsyncIterator[InferResponse]) -> list[InferResponse]:
    return [answer async for answer in answers]


async def ask(batcher: object, one: InferRequest, rows: int = 1) -> list[InferResponse]:
    return await collect(batcher.stream(one, Timing(), rows))  # type: ignore[attr-defined]
