"""Traffic for the Python models: every scheduler, both protocols, each answer checked against what it must be."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import numpy as np
import tritonclient.grpc.aio as grpcclient
from scripts.soak.models import LINES
from scripts.soak.run import Run, post
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

# What a request inside an instance that dies ends with, and the later ones of a sequence that was lost with it.
STUB = re.compile(r"Stub process '([^']+)' is not healthy")
LOST = re.compile(r"sequence \d+ of model '([^']+)' was lost with its instance")
AWAY = ("has no available versions", "is not found", "is not at ready state", "is being unloaded", "is being loaded")


class Gone(Exception):
    """The instance died; the caller must not go on."""


class Client:
    """One client with its gRPC connection."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.grpc = grpcclient.InferenceServerClient(f"127.0.0.1:{run.grpc_port}")
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{run.grpc_port}")
        self.stub: Any = service_pb2_grpc.GRPCInferenceServiceStub(self.channel)
        self._ids = 0

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.grpc.close()
        await self.channel.close()

    def next_id(self) -> int:
        self._ids += 1
        return id(self) % 1_000_000_007 * 1_000_000 + self._ids

    def crash(self, status: str, text: str) -> bool:
        """Whether an error is one of a crash, which is counted for its instance; it must be a typed UNAVAILABLE."""
        found = STUB.search(text) or LOST.search(text)
        if found is None:
            return False
        self.run.crashed[found.group(1)] += 1
        if "UNAVAILABLE" not in status and status != "503":
            self.run.problem(f"a crash was answered with {status}: {text}")
        return True

    async def infer(self, model: str, value: Any, **options: Any) -> Any:
        """OUT for IN over gRPC.

        Raises:
            Gone: the instance died, or the model is away and may be.
        """
        array = np.array(value, np.int32)
        tensor = grpcclient.InferInput("IN", list(array.shape), "INT32")
        tensor.set_data_from_numpy(array)
        try:
            found: Any = await self.grpc.infer(model, [tensor], **options)
        except InferenceServerException as error:
            raise self.told(model, str(error.status()), error.message()) from None
        return found.as_numpy("OUT")

    async def infer_http(self, model: str, value: list[list[int]]) -> Any:
        """The same over HTTP, in JSON."""
        shape = [len(value), len(value[0])]
        flat = [x for row in value for x in row]
        body = {"inputs": [{"name": "IN", "datatype": "INT32", "shape": shape, "data": flat}]}
        status, answer = await post(self.run, f"/v2/models/{model}/infer", body)
        if status != 200:
            raise self.told(model, str(status), answer.decode(errors="replace"))
        return np.array(json.loads(answer)["outputs"][0]["data"], np.int32).reshape(shape)

    def told(self, model: str, status: str, text: str) -> Exception:
        """An error: one that may be, or a problem."""
        if self.crash(status, text) or (model == "coming" and any(words in text for words in AWAY)):
            return Gone()
        return RuntimeError(f"{model}: {status}: {text[:200]}")


def rows(run: Run, most: int = 3) -> list[list[int]]:
    # Most of them travel in the message, the large ones by shared memory.
    width = run.draw.randint(20_000, 40_000) if run.draw.random() < 0.05 else run.draw.randint(1, 4)
    return [[run.draw.randint(0, 1000) for _ in range(width)] for _ in range(run.draw.randint(1, most))]


async def line(client: Client, name: str, **options: Any) -> None:
    """A linear model: the answer is known."""
    value = rows(client.run)
    if client.run.draw.random() < 0.3 and not options:
        found = await client.infer_http(name, value)
    else:
        found = await client.infer(name, value, **options)
    factor, summand = LINES[name]
    check(client, name, found, np.array(value) * factor + summand)


def check(client: Client, name: str, found: Any, expected: Any) -> None:
    if not np.array_equal(found, expected):
        client.run.problem(f"{name}: {found!r} instead of {expected!r}"[:300])


async def plain(client: Client) -> None:
    await line(client, "plain")


async def dynamic(client: Client) -> None:
    await line(client, "dynamic", priority=client.run.draw.randint(0, 2))


async def rerun(client: Client) -> None:
    await line(client, "rerun")


async def cached(client: Client) -> None:
    await line(client, "cached")


async def coming(client: Client) -> None:
    await line(client, "coming")


async def moving(client: Client) -> None:
    """Whatever file it was loaded from, the whole answer is of one."""
    value = rows(client.run)
    added = await client.infer("moving", value) - np.array(value)
    if len(set(added.flat)) != 1 or added.flat[0] % 1000:
        client.run.problem(f"moving: added {added!r}"[:300])


async def pair(client: Client) -> None:
    value = rows(client.run)
    (a, b), (c, d) = LINES["plain"], LINES["dynamic"]
    check(client, "pair", await client.infer("pair", value), (np.array(value) * a + b) * c + d)


async def _sequence(client: Client, name: str) -> None:
    length, total, number = client.run.draw.randint(2, 6), 0, client.next_id()
    for step in range(length):
        value = client.run.draw.randint(1, 100)
        total += value
        ends = {"sequence_start": step == 0, "sequence_end": step == length - 1}
        found = await client.infer(name, [[value]], sequence_id=number, **ends)
        check(client, name, found, [[total]])


async def direct(client: Client) -> None:
    await _sequence(client, "direct")


async def oldest(client: Client) -> None:
    await _sequence(client, "oldest")


async def decoupled(client: Client) -> None:
    """Two requests on a stream: so many answers each, in order, and one end; an error is an end too."""
    wanted = {str(client.next_id()): client.run.draw.randint(0, 5) for _ in range(2)}
    seen: dict[str, list[int]] = {id: [] for id in wanted}
    ends = Counter[str]()
    died: set[str] = set()
    hold = asyncio.Event()

    async def requests() -> AsyncIterator[Any]:
        for id, count in wanted.items():
            yield _stream_request(id, count)
        await hold.wait()

    answers = client.stub.ModelStreamInfer(requests())
    try:
        async for answer in answers:
            id = answer.infer_response.id
            if answer.error_message:
                if not client.crash("UNAVAILABLE", answer.error_message):
                    raise RuntimeError(f"decoupled: {answer.error_message}")
                died.add(id)
                ends[id] += 1
            elif answer.infer_response.parameters["triton_final_response"].bool_param:
                ends[id] += 1
            else:
                seen[id].append(int(np.frombuffer(answer.infer_response.raw_output_contents[0], np.int32)[0]))
            if len(ends) == len(wanted):
                break
    finally:
        hold.set()
        answers.cancel()
    for id, count in wanted.items():
        whole = seen[id] == list(range(count)) or (id in died and seen[id] == list(range(len(seen[id]))))
        if not whole or ends[id] != 1:
            client.run.problem(f"decoupled: {seen[id]} and {ends[id]} ends, expected {count} answers and 1")


def _stream_request(id: str, count: int) -> Any:
    """A request that wants to see the bare final response, which the client library cannot ask for."""
    message = service_pb2.ModelInferRequest(model_name="decoupled", id=id)
    message.parameters["triton_enable_empty_final_response"].bool_param = True
    message.inputs.add(name="IN", datatype="INT32", shape=[1, 1])
    message.raw_input_contents.append(np.array([count], np.int32).tobytes())
    return message


async def leaves(client: Client) -> None:
    """Goes away while it waits, runs, or streams; nobody else notices."""
    name = client.run.draw.choice(["plain", "dynamic", "rerun", "pair"])
    task = asyncio.create_task(client.infer(name, rows(client.run)))
    await asyncio.sleep(client.run.draw.random() * 0.01)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


KINDS: list[Callable[[Client], Awaitable[None]]] = [
    plain,
    dynamic,
    rerun,
    cached,
    coming,
    moving,
    pair,
    direct,
    oldest,
    decoupled,
    leaves,
]
