"""Python models on a live server: clients that leave on every way in, instance groups, and the rate limiter."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc.aio as grpcclient

from tests.e2e.calls import until
from tests.e2e.live import LiveServer

# Notes when each request began and ended, and whether anybody still waited for it then.
MODEL = """
import json, os, time
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.file = os.path.join(args["model_repository"], "..", "..", "notes")
        self.name = args["model_instance_name"]
        config = json.loads(args["model_config"])
        self.decoupled = pb_utils.using_decoupled_model_transaction_policy(config)

    def execute(self, requests):
        answers = []
        for request in requests:
            number = int(pb_utils.get_input_tensor_by_name(request, "IN").as_numpy().flat[0])
            begin, deadline = time.monotonic(), time.monotonic() + (0.3 if number < 1000 else 20)
            self.note(number, "begins", begin)
            sender = request.get_response_sender() if self.decoupled else None
            while time.monotonic() < deadline and not request.is_cancelled():
                if sender is not None:
                    sender.send(self.answer(number))
                time.sleep(0.02)
            self.note(number, "cancelled" if request.is_cancelled() else "ends", time.monotonic())
            if sender is not None:
                sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            else:
                answers.append(self.answer(number))
        return None if self.decoupled else answers

    def answer(self, number):
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.full((1, 1), number, np.int32))])

    def note(self, number, what, at):
        with open(self.file, "a") as file:
            file.write(json.dumps([self.name, number, what, at]) + "\\n")
"""
CONFIG = """
backend: "python"
max_batch_size: 1
input { name: "IN" data_type: TYPE_INT32 dims: 1 }
output { name: "OUT" data_type: TYPE_INT32 dims: 1 }
"""
GROUP = 'instance_group { name: "%s" count: %d kind: KIND_CPU %s }\n'
LIMIT = 'rate_limiter { resources { name: "seat" count: %d } priority: %d }'
SEQUENCE = """sequence_batching { control_input { name: "START" control {
  kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } } }"""
OVER = """
platform: "ensemble" max_batch_size: 1
input { name: "IN" data_type: TYPE_INT32 dims: 1 }
output { name: "OUT" data_type: TYPE_INT32 dims: 1 }
ensemble_scheduling { step { model_name: "plain" model_version: -1
  input_map { key: "IN" value: "IN" } output_map { key: "OUT" value: "OUT" } } }
"""
MODELS = {
    "plain": CONFIG,
    "stream": CONFIG + "model_transaction_policy { decoupled: true }",
    "steps": CONFIG + SEQUENCE,
    "two": CONFIG + GROUP % ("two", 2, ""),
    "shy": CONFIG + GROUP % ("shy", 2, LIMIT % (2, 1)),
    "other": CONFIG + GROUP % ("other", 1, LIMIT % (2, 1)),
    "small": CONFIG + GROUP % ("small", 2, LIMIT % (1, 1)),
}
_numbers = itertools.count()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("scheduling")
    for name, config in MODELS.items():
        (root / "models" / name / "1").mkdir(parents=True)
        (root / "models" / name / "1" / "model.py").write_text(MODEL)
        (root / "models" / name / "config.pbtxt").write_text(config)
    (root / "models" / "over" / "1").mkdir(parents=True)
    (root / "models" / "over" / "config.pbtxt").write_text(OVER)
    return root


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[LiveServer]:
    flags = [f"--model-repository={folder / 'models'}", "--rate-limit=execution_count", "--rate-limit-resource=seat:2"]
    with LiveServer(flags, folder / "log") as server:
        yield server


def notes(folder: Path) -> list[tuple[str, int, str, float]]:
    with suppress(FileNotFoundError):
        return [tuple(json.loads(line)) for line in (folder / "notes").read_text().splitlines()]
    return []


def said(folder: Path, number: int, what: str) -> bool:
    return any(note[1:3] == (number, what) for note in notes(folder))


def body(number: int) -> dict[str, Any]:
    return {"inputs": [{"name": "IN", "datatype": "INT32", "shape": [1, 1], "data": [number]}]}


def tensor(number: int) -> Any:
    found = grpcclient.InferInput("IN", [1, 1], "INT32")
    found.set_data_from_numpy(np.array([[number]], np.int32))
    return found


async def http_infer(server: LiveServer, model: str, number: int) -> None:
    async with httpx.AsyncClient(timeout=60) as client:
        answer = await client.post(f"{server.url}/v2/models/{model}/infer", json=body(number))
    assert answer.json()["outputs"][0]["data"] == [number]


async def http_stream(server: LiveServer, model: str, number: int) -> None:
    url = f"{server.url}/v2/models/{model}/generate_stream"
    async with httpx.AsyncClient(timeout=60) as client, client.stream("POST", url, json={"IN": number}) as answer:
        async for _ in answer.aiter_lines():
            pass


async def grpc_infer(server: LiveServer, model: str, number: int) -> None:
    async with grpcclient.InferenceServerClient(server.grpc) as client:
        await client.infer(model, [tensor(number)])


async def grpc_sequence(server: LiveServer, model: str, number: int) -> None:
    async with grpcclient.InferenceServerClient(server.grpc) as client:
        options = {"sequence_id": number, "sequence_start": True, "sequence_end": True}
        await client.infer(model, [tensor(number)], **options)


async def grpc_stream(server: LiveServer, model: str, number: int) -> None:
    async def requests() -> Any:
        yield {"model_name": model, "inputs": [tensor(number)]}
        await asyncio.sleep(60)

    async with grpcclient.InferenceServerClient(server.grpc) as client:
        answers = client.stream_infer(requests())
        try:
            async for _, error in answers:
                assert error is None
        finally:
            answers.cancel()


WAYS: list[tuple[Callable[[LiveServer, str, int], Awaitable[None]], str]] = [
    (http_infer, "plain"),
    (http_stream, "plain"),
    (http_stream, "stream"),
    (grpc_infer, "plain"),
    (grpc_stream, "plain"),
    (grpc_stream, "stream"),
    (grpc_sequence, "steps"),
    (http_infer, "over"),
    (grpc_infer, "over"),
    (grpc_infer, "two"),
]


@pytest.mark.parametrize(("way", "model"), WAYS, ids=[f"{way.__name__}-{model}" for way, model in WAYS])
async def test_a_client_that_leaves_is_known_to_the_model(
    server: LiveServer, folder: Path, way: Callable[..., Awaitable[None]], model: str
) -> None:
    """On every way in: the model that runs is told, and is free for the next one at once."""
    number = 1000 + next(_numbers)
    task = asyncio.create_task(way(server, model, number))  # type: ignore[arg-type]
    await until(lambda: said(folder, number, "begins"), "it runs")
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    await until(lambda: said(folder, number, "cancelled"), "the model is told", 10)


@pytest.mark.parametrize("way", [http_infer, grpc_infer])
async def test_a_client_that_leaves_the_queue_never_reaches_the_model(
    server: LiveServer, folder: Path, way: Callable[..., Awaitable[None]]
) -> None:
    first, second, third = (1000 + next(_numbers) for _ in range(3))
    before = server.metric("nv_inference_request_failure", model="plain", reason="CANCELED")
    tasks = {first: asyncio.create_task(way(server, "plain", first))}  # type: ignore[arg-type]
    await until(lambda: said(folder, first, "begins"), "it runs")
    for number in (second, third):
        tasks[number] = asyncio.create_task(way(server, "plain", number))  # type: ignore[arg-type]
    await until(lambda: server.metric("nv_inference_pending_request_count", model="plain") == 2, "they wait")
    for number in (second, first):
        tasks[number].cancel()
    await until(lambda: said(folder, third, "begins"), "the next one runs")
    tasks[third].cancel()
    await asyncio.gather(*tasks.values(), return_exceptions=True)
    await until(lambda: said(folder, third, "cancelled"), "it is told")
    assert not said(folder, second, "begins")
    failed = "nv_inference_request_failure"
    await until(lambda: server.metric(failed, model="plain", reason="CANCELED") == before + 3, "all three are counted")


def spans(folder: Path, numbers: list[int]) -> dict[int, tuple[str, float, float]]:
    """Instance, begin and end of each."""
    found: dict[int, tuple[str, float, float]] = {}
    for name, number, what, at in notes(folder):
        if number in numbers:
            begin = found[number][1] if number in found else at
            found[number] = (name, begin, at)
        assert what != "cancelled" or number >= 1000
    return found


def overlap(one: tuple[str, float, float], two: tuple[str, float, float]) -> bool:
    return one[1] < two[2] and two[1] < one[2]


async def run(server: LiveServer, folder: Path, *models: str) -> list[tuple[str, float, float]]:
    numbers = [next(_numbers) for _ in models]
    await asyncio.gather(*(grpc_infer(server, model, number) for model, number in zip(models, numbers, strict=True)))
    found = spans(folder, numbers)
    return [found[number] for number in numbers]


async def test_the_instances_of_a_group_run_at_once(server: LiveServer, folder: Path) -> None:
    first, second = await run(server, folder, "two", "two")
    assert overlap(first, second)
    assert {first[0], second[0]} == {"two_0", "two_1"}


async def test_resources_serialize_instances_of_all_models(server: LiveServer, folder: Path) -> None:
    """Two seats: instances that need both run alone, those that need one run in pairs."""
    found = await run(server, folder, "shy", "other", "shy", "other")
    for one, two in itertools.combinations(found, 2):
        assert not overlap(one, two), (one, two)
    first, second = await run(server, folder, "small", "small")
    assert overlap(first, second)
    found = await run(server, folder, "small", "other", "small")
    assert not overlap(found[0], found[1]) and not overlap(found[2], found[1])


async def test_who_leaves_gives_back_what_it_held(server: LiveServer, folder: Path) -> None:
    number = 1000 + next(_numbers)
    task = asyncio.create_task(grpc_infer(server, "other", number))
    await until(lambda: said(folder, number, "begins"), "it holds both seats")
    waiting = asyncio.create_task(run(server, folder, "shy"))
    task.cancel()
    begun = time.monotonic()
    await asyncio.gather(task, return_exceptions=True)
    await waiting
    assert time.monotonic() - begun < 15
