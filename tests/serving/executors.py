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
from tritium.serving.instance import Reply, Times
from tritium.serving.stats import ModelStats
from tritium.types import InferRequest, InferResponse, SequenceRef, Tensor

Model = Callable[[Sequence[InferRequest], "Running"], Awaitable[None]]


class Running:
    """A batch that runs; the model calls ``reply``."""

    def __init__(self, requests: Sequence[InferRequest]) -> None:
        self.requests = requests
        self.times: Times | None = None
        self.cancelled: set[int] = set()
        self._replies: list[Reply] = []
        self._open = set(range(len(requests)))
        self._change = asyncio.Event()
        self._died: TritiumError | None = None

    def reply(self, index: int, response: InferResponse, failed: bool = False) -> None:
        if response.final:
            self._open.discard(index)
        self._replies.append(Reply(index, response, failed=failed))
        self._change.set()

    def reschedule(self, index: int) -> None:
        self._open.discard(index)
        self._replies.append(Reply(index, None, rescheduled=True))
        self._change.set()

    def die(self) -> None:
        self._died = TritiumError(Code.UNAVAILABLE, "the process died")
        self._change.set()

    async def some(self) -> list[Reply]:
        while not self._replies:
            if self._died is not None:
                raise self._died
            if not self._open:
                return []
            self._change.clear()
            await self._change.wait()
        found, self._replies = self._replies, []
        return found

    def cancel(self, index: int) -> None:
        self.cancelled.add(index)

    async def aclose(self) -> None:
        self._open.clear()


class Executor:
    """Runs batches with ``model``, one at a time; ``log`` holds those that have begun."""

    def __init__(self, model: Model, name: str = "m_0") -> None:
        self.name = name
        self.life = 1
        self.log: list[list[InferRequest]] = []
        self.running: list[Running] = []
        self.up = True
        self.busy = False
        self._model = model
        self._free = asyncio.Event()
        self._free.set()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def ready(self) -> bool:
        return self.up

    async def free(self) -> None:
        await self._free.wait()

    def execute(self, requests: Sequence[InferRequest]) -> Running:
        assert not self.busy, "a batch for an instance that is busy"
        if not self.up:
            raise TritiumError(Code.UNAVAILABLE, "not up")
        self.busy = True
        self._free.clear()
        self.log.append(list(requests))
        running = Running(requests)
        self.running.append(running)
        task = asyncio.get_running_loop().create_task(self._run(running))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return running

    def kill(self) -> None:
        """The process dies, and is there again at once."""
        self.life += 1
        for running in self.running:
            running.die()
        for task in self._tasks:
            task.cancel()

    async def _run(self, running: Running) -> None:
        try:
            await self._model(running.requests, running)
            running.times = Times(10, 20, 30)
        finally:
            self.busy = False
            self._free.set()


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
