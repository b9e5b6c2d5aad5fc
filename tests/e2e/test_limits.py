"""What a server refuses, and that it is none the worse for it: full queues, expired waits, bad requests."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.grpc.aio
from tritonclient.utils import InferenceServerException

from tests.e2e.calls import CALLS, Ask, Running, ask_once, grpc_inputs, until
from tests.e2e.live import LiveServer
from tests.tiny import VOCAB, make_checkpoint
from tritium.bench.engine import tree

LONG = 4000
CONTEXT = 4096
BATCHING = "dynamic_batching {{ {} }}"
QUEUE = "default_queue_policy {{ {} }}"
MODELS = {
    "queue": (2, QUEUE.format("max_queue_size: 2")),
    "timeout": (1, QUEUE.format("default_timeout_microseconds: 300000")),
    "delay_0": (4, "preferred_batch_size: [ 2 ] max_queue_delay_microseconds: 0"),
    "delay_100": (4, "preferred_batch_size: [ 2 ] max_queue_delay_microseconds: 100"),
    "delay_5000": (4, "preferred_batch_size: [ 2 ] max_queue_delay_microseconds: 5000"),
    # Long enough to tell a wait from a slow machine.
    "delay_long": (4, "preferred_batch_size: [ 2 ] max_queue_delay_microseconds: 1000000"),
}
PARAMETERS = 'parameters { key: "threads" value { string_value: "1" } }\n'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    root = tmp_path_factory.mktemp("limits")
    checkpoint = make_checkpoint(root / "checkpoint", max_position_embeddings=CONTEXT, num_hidden_layers=4)
    for name, (rows, batching) in MODELS.items():
        (root / "models" / name).mkdir(parents=True)
        (root / "models" / name / "1").symlink_to(checkpoint)
        text = f'name: "{name}"\nbackend: "tritium"\nmax_batch_size: {rows}\n{BATCHING.format(batching)}\n{PARAMETERS}'
        (root / "models" / name / "config.pbtxt").write_text(text)
    with LiveServer([f"--model-repository={root / 'models'}"], root / "log") as live:
        yield live


def running(server: LiveServer, model: str) -> float:
    return server.metric("tritium_requests_running", model=model)


def waiting(server: LiveServer, model: str) -> float:
    return server.metric("tritium_requests_waiting", model=model)


# -- queues ---------------------------------------------------------------------------------------------------


async def test_full_queue(server: LiveServer) -> None:
    """Two run, two wait; everybody else is told to come again, and the four are answered."""
    holding = [Running("v1_stream", server, Ask("queue", f"{n}", LONG)) for n in range(2)]
    await until(lambda: running(server, "queue") == 2, "two run")
    patient = [Running(kind, server, Ask("queue", "and", 8)) for kind in ("v2_infer", "grpc_infer")]
    await until(lambda: waiting(server, "queue") == 2, "two wait")
    for kind in CALLS:
        begun = time.monotonic()
        refused = await ask_once(kind, server, Ask("queue"))
        wanted = {"grpc_infer": "StatusCode.UNAVAILABLE", "grpc_stream": "OK"}.get(kind, 503)
        assert (refused.status, refused.done) == (wanted, False), (kind, refused)
        assert "Exceeds maximum queue size" in refused.error, (kind, refused)
        assert time.monotonic() - begun < 5
        if wanted == 503:
            assert int(refused.headers["retry-after"]) >= 1
    assert running(server, "queue") == waiting(server, "queue") == 2
    await holding[0].leave()
    for one in patient:
        outcome = await one.end()
        assert outcome.done, (one.kind, outcome)
    assert (await holding[1].end(120)).done
    assert (await ask_once("v1_whole", server, Ask("queue"))).done


async def test_expired_wait(server: LiveServer) -> None:
    """A request that no row came free for in its time ends with an error and never runs."""
    holding = Running("v1_stream", server, Ask("timeout", "hold", LONG))
    await until(lambda: running(server, "timeout") == 1, "one runs")
    late = [Running(kind, server, Ask("timeout", f"{kind}")) for kind in CALLS]
    for one in late:
        outcome = await one.end(20)
        wanted = {"grpc_infer": "StatusCode.UNAVAILABLE", "grpc_stream": "OK"}.get(one.kind, 503)
        assert (outcome.status, outcome.done, outcome.pieces) == (wanted, False, 0), (one.kind, outcome)
        assert "Request timeout expired" in outcome.error, (one.kind, outcome)
    assert (running(server, "timeout"), waiting(server, "timeout")) == (1, 0)
    assert holding.outcome.error == ""
    await holding.leave()
    await until(lambda: running(server, "timeout") == 0, "nobody runs")
    assert (await ask_once("v1_whole", server, Ask("timeout"))).done


# -- max_queue_delay_microseconds -----------------------------------------------------------------------------


def executions(server: LiveServer, model: str) -> float:
    return server.metric("nv_inference_exec_count", model=model)


def queue_us(server: LiveServer, model: str) -> float:
    return server.metric("nv_inference_queue_duration_us", model=model)


async def alone(server: LiveServer, model: str) -> float:
    """The shortest wait of several requests that come one by one, in microseconds."""
    found = []
    for n in range(5):
        before = queue_us(server, model)
        assert (await ask_once("v2_infer", server, Ask(model, f"{n}"))).done
        found.append(queue_us(server, model) - before)
    return min(found)


@pytest.mark.parametrize("model", ["delay_0", "delay_100", "delay_5000"])
async def test_idle_engine_collects_that_long(server: LiveServer, model: str) -> None:
    delay_us = int(model.removeprefix("delay_"))
    waited_us = await alone(server, model)
    assert delay_us <= waited_us < delay_us + 20_000


async def pair_of(server: LiveServer, model: str, prompts: list[str]) -> None:
    """Two sequences at once: in one request where every microsecond counts, else on two connections."""
    if model == "delay_long":
        pair = [Running("v2_infer", server, Ask(model, prompt)) for prompt in prompts]
        assert all([(await one.end()).done for one in pair])
        return
    body = Ask(model).v1(stream=False) | {"prompt": prompts}
    async with httpx.AsyncClient(timeout=60) as client:
        answer = await client.post(f"{server.url}/v1/completions", json=body)
    assert len(answer.json()["choices"]) == 2


@pytest.mark.parametrize(("model", "least"), [("delay_5000", 4), ("delay_long", 8)])
async def test_two_that_arrive_together(server: LiveServer, model: str, least: int) -> None:
    """They share every step when the engine collected them; the preferred size ends the wait."""
    shared = []
    for n in range(8):
        before, begun = executions(server, model), time.monotonic()
        await pair_of(server, model, [f"{n} and {m}" for m in range(2)])
        # Each counts 1 / (rows of its steps): 1 in all when they ran side by side, 2 when one by one.
        shared.append(executions(server, model) - before == pytest.approx(1))
        if model == "delay_long":
            assert time.monotonic() - begun < 1, "nobody waits once there are two"
    assert sum(shared) >= least, shared


async def test_busy_engine_never_waits(server: LiveServer) -> None:
    """What comes while something runs joins the next step, however long an idle engine would collect."""
    begun = time.monotonic()
    first = Running("v1_stream", server, Ask("delay_long", "first", LONG))
    await asyncio.wait_for(first.outcome.first.wait(), 30)
    assert time.monotonic() - begun > 1, "alone it waits"
    before = queue_us(server, "delay_long")
    for n in range(3):
        assert (await ask_once("v2_infer", server, Ask("delay_long", f"{n}"))).done
    assert queue_us(server, "delay_long") - before < 500_000
    assert first.outcome.error == "" and not first.outcome.done, "it was meant to be running still"
    await first.leave()


# -- bad requests ---------------------------------------------------------------------------------------------

TOO_LONG = "fox " * 5000
V1_BAD: list[tuple[dict[str, Any], int, str]] = [
    ({"model": "nobody"}, 404, "nobody"),
    ({"prompt": TOO_LONG}, 400, str(CONTEXT)),
    ({"prompt": []}, 400, "prompt"),
    ({"prompt": [VOCAB]}, 400, str(VOCAB)),
    ({"prompt": [-1]}, 400, "-1"),
    ({"prompt": [1 << 40]}, 400, str(1 << 40)),
    ({"max_tokens": 0}, 400, "max_tokens"),
    ({"max_tokens": -5}, 400, "max_tokens is -5"),
    ({"max_tokens": "many"}, 400, "max_tokens"),
    ({"temperature": -0.1}, 400, "temperature is -0.1"),
    ({"temperature": float("nan")}, 400, ""),
    ({"temperature": float("inf")}, 400, ""),
    ({"top_p": 0}, 400, "top_p is 0"),
    ({"top_p": 1.01}, 400, "top_p is 1.01"),
    ({"top_k": -7}, 400, "top_k is -7"),
    ({"min_p": 2}, 400, "min_p is 2"),
    ({"repetition_penalty": 0}, 400, "repetition_penalty is 0"),
    ({"presence_penalty": 5}, 400, "presence_penalty is 5"),
    ({"logit_bias": {str(VOCAB): 1}}, 400, "logit_bias"),
    ({"logprobs": 10_000}, 400, "logprobs"),
    ({"seed": 1 << 70}, 400, "seed"),
    ({"n": 0}, 400, "n"),
    ({"stop": [""]}, 400, "stop"),
    ({"stop_token_ids": [VOCAB]}, 400, "stop_token_ids"),
]
# Name of the input, datatype, shape, data; the words that the error must have.
V2_BAD: list[tuple[str, str, list[int], list[Any], str]] = [
    ("input_ids", "INT32", [1, 2], [5, VOCAB], f"input_ids[1] is {VOCAB}"),
    ("input_ids", "INT32", [1, 2], [5, -3], "input_ids[1] is -3"),
    ("input_ids", "INT32", [1, CONTEXT], [5] * CONTEXT, str(CONTEXT)),
    ("text_input", "BYTES", [1, 1], [TOO_LONG], "text_input has"),
    ("text_input", "BYTES", [1, 1], [""], "text_input"),
    ("temperature", "FP32", [1, 1], [-1.0], "temperature is -1.0"),
    ("top_p", "FP32", [1, 1], [7.0], "top_p is 7.0"),
    ("top_k", "INT32", [1, 1], [-9], "top_k is -9"),
    ("max_tokens", "INT32", [1, 1], [0], "max_tokens is 0"),
    ("repetition_penalty", "FP32", [1, 1], [0.0], "repetition_penalty is 0.0"),
    ("beam_width", "INT32", [1, 1], [4], "beam_width is not 1"),
    ("sampling_parameters", "BYTES", [1, 1], ['{"top_p": 9}'], "top_p is 9"),
    ("no_such_input", "FP32", [1, 1], [1.0], "no_such_input"),
]


def v2_inputs(name: str, datatype: str, shape: list[int], data: list[Any]) -> list[tuple[str, str, list[int], Any]]:
    inputs = [(name, datatype, shape, data), ("request_output_len", "INT32", [1, 1], [4])]
    if name not in ("input_ids", "text_input"):
        inputs.append(("text_input", "BYTES", [1, 1], ["fox"]))
    return inputs[:1] + inputs[2:] if name == "max_tokens" else inputs


def grpc_tensors(inputs: list[tuple[str, str, list[int], Any]]) -> list[Any]:
    kinds: dict[str, Any] = {"BYTES": object, "INT32": np.int32, "FP32": np.float32}
    found = []
    for name, datatype, shape, data in inputs:
        tensor = grpcclient.InferInput(name, shape, datatype)
        tensor.set_data_from_numpy(np.array(data, dtype=kinds[datatype]).reshape(shape))
        found.append(tensor)
    return found


def bad_v1(server: LiveServer, client: httpx.Client) -> None:
    for changes, status, words in V1_BAD:
        body = Ask("delay_0").v1(stream=False) | changes
        for stream in (False, True):
            content = json.dumps(body | {"stream": stream})
            answer = client.post(f"{server.url}/v1/completions", content=content, headers=JSON)
            assert answer.status_code == status, (changes, answer.text)
            error = answer.json()["error"]
            assert words in error["message"] and error["type"], (changes, error)


def bad_v2(server: LiveServer, client: httpx.Client, grpc: grpcclient.InferenceServerClient) -> None:
    url = f"{server.url}/v2/models"
    for *one, words in V2_BAD:
        inputs = v2_inputs(*one)
        fields = ("name", "datatype", "shape", "data")
        answer = client.post(
            f"{url}/delay_0/infer", json={"inputs": [dict(zip(fields, i, strict=True)) for i in inputs]}
        )
        assert (answer.status_code, words in answer.text) == (400, True), (one, answer.text)
        with pytest.raises(InferenceServerException) as caught:
            grpc.infer("delay_0", grpc_tensors(inputs))
        assert caught.value.status() == "StatusCode.INVALID_ARGUMENT", (one, caught.value)
        assert words in caught.value.message(), (one, caught.value)
    for value in (float("nan"), float("inf")):
        with pytest.raises(InferenceServerException, match=r"temperature is (nan|inf)"):
            grpc.infer("delay_0", grpc_tensors(v2_inputs("temperature", "FP32", [1, 1], [value])))
    assert client.post(f"{url}/nobody/infer", json={"inputs": []}).status_code == 404
    with pytest.raises(InferenceServerException, match="nobody") as caught:
        grpc.infer("nobody", grpc_tensors(v2_inputs("temperature", "FP32", [1, 1], [1.0])))
    assert caught.value.status() == "StatusCode.NOT_FOUND"
    for body in (b"", b"{", b"[]", b'{"inputs": 3}', b'{"text_input": NaN}', b"\xff\xfe", b"[" * 100_000):
        for path in ("infer", "generate", "generate_stream"):
            answer = client.post(f"{url}/delay_0/{path}", content=body)
            assert 400 <= answer.status_code <= 500 and answer.json()["error"], (path, body[:20], answer.text)


JSON = {"content-type": "application/json"}


def resources(server: LiveServer) -> tuple[int, int]:
    """Resident bytes and open files of all processes of the server."""
    assert server.process is not None
    size = files = 0
    for pid in tree(server.process.pid):
        size += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        files += len(os.listdir(f"/proc/{pid}/fd"))
    return size, files


async def control(server: LiveServer) -> list[str]:
    """What a fixed request is answered over each protocol; all the same text."""
    return [(await ask_once(kind, server, Ask("delay_0", max_tokens=32))).text for kind in CALLS]


async def test_bad_requests_do_no_harm(server: LiveServer) -> None:
    """Each is refused by name; after many of them the server answers as before and holds no more than before."""
    assert server.process is not None
    pids = sorted(tree(server.process.pid))
    before = await control(server)
    assert len(set(before)) == 1 and before[0]

    def all_of_them() -> None:
        with (
            httpx.Client(timeout=60) as client,
            grpcclient.InferenceServerClient(server.grpc) as grpc,
        ):
            bad_v1(server, client)
            bad_v2(server, client, grpc)

    # Threads and their memory pools come into being one by one; after that nothing may grow.
    for _ in range(8):
        await asyncio.to_thread(all_of_them)
    assert await control(server) == before
    await asyncio.sleep(0.2)
    held = resources(server)
    for _ in range(4):
        await asyncio.to_thread(all_of_them)
        assert server.ready()
    assert await control(server) == before
    await until(lambda: resources(server)[1] <= held[1] + 2, "files are closed", 10)
    assert resources(server)[0] < held[0] + (8 << 20)
    assert sorted(tree(server.process.pid)) == pids
    assert running(server, "delay_0") == server.metric("tritium_kv_cache_usage_ratio", model="delay_0") == 0
    assert "Traceback" not in server.output()


async def test_an_error_in_a_stream_of_requests(server: LiveServer) -> None:
    """The others on the same gRPC stream are answered."""

    async def requests() -> AsyncIterator[dict[str, Any]]:
        for name, value in (("a", 0.5), ("b", float("nan")), ("c", 0.0)):
            inputs = grpc_inputs(Ask("delay_0"), stream=False)
            inputs[2].set_data_from_numpy(np.array([[value]], dtype=np.float32))
            yield {"model_name": "delay_0", "inputs": inputs, "request_id": name}

    found = []
    async with tritonclient.grpc.aio.InferenceServerClient(server.grpc) as client:
        async for result, error in client.stream_infer(requests()):
            found.append(error.message() if error else result.get_response().id)
    assert (found[0], found[2]) == ("a", "c")
    assert "temperature is nan" in found[1]
