"""Triton's four Python clients, unchanged, and plain HTTP for the generate extension, against a live server."""

from __future__ import annotations

import asyncio
import inspect
import json
import queue
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
import tritonclient.http.aio
from tokenizers import Tokenizer
from tritonclient.utils import InferenceServerException

from tests.e2e.live import LiveServer
from tritium.backends.llm_tensors import STANDARD_OUTPUTS

MODULES: dict[str, Any] = {
    "http": tritonclient.http,
    "http.aio": tritonclient.http.aio,
    "grpc": tritonclient.grpc,
    "grpc.aio": tritonclient.grpc.aio,
}
DTYPES = {"i": "INT32", "u": "UINT64", "f": "FP32", "b": "BOOL", "O": "BYTES"}
PROMPT = "Once upon a time there was a little model"
TEXT: dict[str, Any] = {"text_input": [[PROMPT]], "max_tokens": [[12]], "temperature": [[0.0]]}
IDS: dict[str, Any] = {"input_ids": [[5, 17, 33, 60, 7]], "request_output_len": [[9]], "temperature": [[0.0]]}


class Client:
    """One of the four clients; those that are not asynchronous are called all the same."""

    def __init__(self, kind: str, server: LiveServer) -> None:
        self.module = MODULES[kind]
        self.grpc = kind.startswith("grpc")
        self.client = self.module.InferenceServerClient(server.grpc if self.grpc else server.http)

    async def call(self, name: str, *args: Any, **options: Any) -> Any:
        """A method's result; messages of gRPC as JSON."""
        if self.grpc and name.startswith("get_"):
            options["as_json"] = True
        result = getattr(self.client, name)(*args, **options)
        return await result if inspect.isawaitable(result) else result

    async def infer(self, values: dict[str, Any], outputs: tuple[str, ...] = (), **options: Any) -> Any:
        wanted = [self.module.InferRequestedOutput(name) for name in outputs] or None
        model = options.pop("model", "tiny")
        return await self.call("infer", model, tensors(self.module, values), outputs=wanted, **options)


def tensors(module: Any, values: dict[str, Any]) -> list[Any]:
    """Inputs of that client, of the types that an LLM declares."""
    found = []
    for name, value in values.items():
        array = np.array(value)
        array = array.astype({"i": np.int32, "f": np.float32, "U": object}.get(array.dtype.kind, array.dtype))
        tensor = module.InferInput(name, array.shape, DTYPES[array.dtype.kind])
        found.append(tensor.set_data_from_numpy(array))
    return found


@pytest.fixture(params=MODULES)
async def client(request: pytest.FixtureRequest, tiny_server: LiveServer) -> AsyncIterator[Client]:
    one = Client(request.param, tiny_server)
    yield one
    await one.call("close")


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint: Path) -> Tokenizer:
    return Tokenizer.from_file(str(tiny_checkpoint / "tokenizer.json"))


def text(result: Any) -> str:
    return result.as_numpy("text_output").reshape(-1)[0].decode()


def wait_idle(server: LiveServer) -> None:
    """Waits until nothing runs, and checks that no block is held then."""
    deadline = time.monotonic() + 30
    while server.metric("tritium_requests_running", model="tiny") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert server.metric("tritium_kv_cache_usage_ratio", model="tiny") == 0


# -- one answer -----------------------------------------------------------------------------------------------


async def test_health_metadata_and_config(client: Client) -> None:
    assert await client.call("is_server_live")
    assert await client.call("is_server_ready")
    assert await client.call("is_model_ready", "tiny")
    assert await client.call("is_model_ready", "tiny", "1")
    assert not await client.call("is_model_ready", "tiny", "2")
    assert not await client.call("is_model_ready", "other")
    server = await client.call("get_server_metadata")
    assert server["name"] == "tritium" and "model_configuration" in server["extensions"]
    metadata = await client.call("get_model_metadata", "tiny")
    assert metadata["name"] == "tiny" and metadata["versions"] == ["1"]
    inputs = {i["name"]: (i["datatype"], [int(d) for d in i["shape"]]) for i in metadata["inputs"]}
    assert inputs["text_input"] == ("BYTES", [-1, 1])
    assert inputs["input_ids"] == ("INT32", [-1, -1])
    assert inputs["temperature"] == ("FP32", [-1, 1])
    assert {o["name"] for o in metadata["outputs"]} == set(STANDARD_OUTPUTS)
    config = await client.call("get_model_config", "tiny")
    config = config.get("config", config)
    assert config["name"] == "tiny" and config["backend"] == "tritium" and config["max_batch_size"] == 64
    assert all(tensor["optional"] for tensor in config["input"])


async def test_text_in_text_out(client: Client, tokenizer: Tokenizer) -> None:
    result = await client.infer(TEXT, request_id="text-1")
    output = result.as_numpy("text_output")
    assert output.shape == (1, 1)
    response = result.get_response()
    assert (response.id if client.grpc else response["id"]) == "text-1"
    ids = tokenizer.encode(PROMPT).ids
    same = await client.infer(
        {"input_ids": [ids], "max_tokens": [[12]], "temperature": [[0.0]]}, ("text_output", "output_ids")
    )
    assert text(same) == text(result)
    assert tokenizer.decode(same.as_numpy("output_ids")[0, 0].tolist()) == text(result)


async def test_ids_in_ids_out(client: Client) -> None:
    result = await client.infer(IDS, request_id="ids-1")
    output, length = result.as_numpy("output_ids"), result.as_numpy("sequence_length")
    assert output.shape == (1, 1, 9) and output.dtype == np.int32
    assert length.tolist() == [[9]]
    assert result.as_numpy("text_output") is None
    response = result.get_response()
    assert (response.id if client.grpc else response["id"]) == "ids-1"


async def test_batch_of_rows_of_different_lengths(client: Client) -> None:
    rows = [[5, 17, 33], [60, 7, 8, 9, 10, 11], [90], [200, 201, 202, 203]]
    limits = [3, 11, 6, 1]
    padded = [row + [0] * (6 - len(row)) for row in rows]
    result = await client.infer(
        {
            "input_ids": padded,
            "input_lengths": [[len(row)] for row in rows],
            "request_output_len": [[limit] for limit in limits],
            "temperature": [[0.0]] * 4,
            "pad_id": [[383]] * 4,
        }
    )
    output, length = result.as_numpy("output_ids"), result.as_numpy("sequence_length")
    assert output.shape[:2] == (4, 1) and output.shape[2] == length.max()
    for row, limit, ids, count in zip(rows, limits, output[:, 0], length[:, 0], strict=True):
        alone = await client.infer({"input_ids": [row], "request_output_len": [[limit]], "temperature": [[0.0]]})
        assert ids[:count].tolist() == alone.as_numpy("output_ids")[0, 0].tolist()
        assert ids[count:].tolist() == [383] * (len(ids) - count)


async def test_batch_of_texts(client: Client) -> None:
    prompts = ["a", PROMPT, "介绍一下", "🙂 the lazy dog"]
    values = {"text_input": [[p] for p in prompts], "max_tokens": [[6]] * 4, "temperature": [[0.0]] * 4}
    output = (await client.infer(values)).as_numpy("text_output")
    assert output.shape == (4, 1)
    for prompt, row in zip(prompts, output[:, 0], strict=True):
        assert row.decode() == text(await client.infer(TEXT | {"text_input": [[prompt]], "max_tokens": [[6]]}))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (TEXT | {"temperature": [[-1.0]]}, "temperature is -1.0, expected a number from 0 to 100"),
        (TEXT | {"temperature": [[float("nan")]]}, "temperature is nan, expected a number from 0 to 100"),
        (TEXT | {"max_tokens": [[0]]}, "max_tokens is 0, expected an integer from 1"),
        (IDS | {"request_output_len": [[-2]]}, "request_output_len is -2, expected an integer from 1"),
        (IDS | {"input_ids": [[5, 384]]}, r"input_ids\[1\] is 384, expected a token id from 0 to 383"),
        (IDS | {"input_ids": [[-1]]}, r"input_ids\[0\] is -1, expected a token id from 0 to 383"),
        (IDS | {"input_ids": [[5] * 1024]}, "input_ids has 1024 tokens, expected fewer than the context of 1024"),
        (IDS | {"input_lengths": [[6]]}, "input_lengths is 6, expected 1 to 5"),
        (IDS | {"beam_width": [[2]]}, "beam_width is not 1"),
        (TEXT | IDS, "expected one of text_input and input_ids"),
        ({"max_tokens": [[3]]}, "expected one of text_input and input_ids"),
        (TEXT | {"no_such_input": [[3]]}, "unexpected inference input 'no_such_input' for model 'tiny'"),
        (TEXT | {"max_tokens": [[3.5]]}, "input 'max_tokens'"),
    ],
)
async def test_errors_name_field_and_value(client: Client, values: dict[str, Any], message: str) -> None:
    with pytest.raises(InferenceServerException, match=message):
        await client.infer(values)
    assert await client.call("is_model_ready", "tiny")


async def test_unknown_models_versions_and_outputs(client: Client) -> None:
    with pytest.raises(InferenceServerException, match="unknown model: 'other' is not found"):
        await client.infer(TEXT, model="other")
    with pytest.raises(InferenceServerException, match="unknown model: 'tiny' version 7 is not found"):
        await client.infer(TEXT, model_version="7")
    with pytest.raises(InferenceServerException, match="unexpected inference output 'logits' for model 'tiny'"):
        await client.infer(TEXT, ("logits",))


async def test_many_at_once_through_the_asynchronous_calls(tiny_server: LiveServer) -> None:
    with tritonclient.http.InferenceServerClient(tiny_server.http, concurrency=6) as http:
        pending = [http.async_infer("tiny", tensors(tritonclient.http, TEXT)) for _ in range(6)]
        answers = {text(one.get_result()) for one in pending}
    found: queue.Queue[Any] = queue.Queue()
    with tritonclient.grpc.InferenceServerClient(tiny_server.grpc) as grpc:
        for _ in range(6):
            grpc.async_infer("tiny", tensors(tritonclient.grpc, TEXT), lambda result, error: found.put(error or result))
        answers |= {text(found.get(timeout=120)) for _ in range(6)}
    assert len(answers) == 1


# -- streams --------------------------------------------------------------------------------------------------


def test_stream_of_texts(tiny_server: LiveServer) -> None:
    """Two requests in one stream; each piece comes with its request's id, the last one says that it is."""
    found: queue.Queue[Any] = queue.Queue()
    with tritonclient.grpc.InferenceServerClient(tiny_server.grpc) as client:
        whole = text(client.infer("tiny", tensors(tritonclient.grpc, TEXT)))
        client.start_stream(lambda result, error: found.put(error or result))
        inputs = tensors(tritonclient.grpc, TEXT | {"stream": [[True]]})
        for name in ("a", "b"):
            client.async_stream_infer("tiny", inputs, request_id=name, enable_empty_final_response=True)
        pieces: dict[str, list[str]] = {"a": [], "b": []}
        final: list[str] = []
        while len(final) < 2:
            response = (result := found.get(timeout=120)).get_response()
            assert response.id not in final
            if result.as_numpy("text_output") is not None:
                pieces[response.id].append(text(result))
            if response.parameters["triton_final_response"].bool_param:
                final.append(response.id)
        client.stop_stream()
    assert found.empty()
    assert ["".join(pieces[name]) for name in ("a", "b")] == [whole, whole]
    assert all(len(each) == 12 for each in pieces.values())


async def test_stream_of_ids(tiny_server: LiveServer) -> None:
    async with tritonclient.grpc.aio.InferenceServerClient(tiny_server.grpc) as client:
        whole = (await client.infer("tiny", tensors(tritonclient.grpc.aio, IDS))).as_numpy("output_ids")

        async def requests() -> AsyncIterator[dict[str, Any]]:
            inputs = tensors(tritonclient.grpc.aio, IDS | {"streaming": [[True]]})
            yield {"model_name": "tiny", "inputs": inputs, "request_id": "s"}

        ids: list[int] = []
        async for result, error in client.stream_infer(requests()):
            assert error is None
            assert result.get_response().id == "s"
            ids += result.as_numpy("output_ids")[0, 0].tolist()
    assert ids == whole[0, 0].tolist()


def test_an_error_in_a_stream_does_not_end_it(tiny_server: LiveServer) -> None:
    found: queue.Queue[Any] = queue.Queue()
    with tritonclient.grpc.InferenceServerClient(tiny_server.grpc) as client:
        client.start_stream(lambda result, error: found.put(error or result))
        for values in (TEXT | {"top_p": [[1.5]]}, TEXT | {"stream": [[True]], "text_input": [["a"], ["b"]]}, TEXT):
            rows = len(values["text_input"])
            values = {name: value * (rows // len(value)) for name, value in values.items()}
            client.async_stream_infer("tiny", tensors(tritonclient.grpc, values))
        answers = [found.get(timeout=120) for _ in range(3)]
        client.stop_stream()
    assert "top_p is 1.5, expected a number above 0 to 1" in str(answers[0])
    assert "stream is true for 2 sequences, expected one per request" in str(answers[1])
    assert text(answers[2])


def test_cancelled_stream_frees_its_blocks(tiny_server: LiveServer) -> None:
    found: queue.Queue[Any] = queue.Queue()
    endless = TEXT | {"max_tokens": [[900]], "ignore_eos": [[True]], "stream": [[True]]}
    with tritonclient.grpc.InferenceServerClient(tiny_server.grpc) as client:
        client.start_stream(lambda result, error: found.put(error or result))
        client.async_stream_infer("tiny", tensors(tritonclient.grpc, endless))
        text(found.get(timeout=120))
        client.stop_stream(cancel_requests=True)
        wait_idle(tiny_server)
    pieces = []
    while not found.empty():
        pieces.append(found.get())
    assert isinstance(pieces[-1], InferenceServerException)
    assert len(pieces) < 800


async def test_cancelled_asynchronous_stream_frees_its_blocks(tiny_server: LiveServer) -> None:
    endless = TEXT | {"max_tokens": [[900]], "ignore_eos": [[True]], "stream": [[True]]}

    async def requests() -> AsyncIterator[dict[str, Any]]:
        yield {"model_name": "tiny", "inputs": tensors(tritonclient.grpc.aio, endless)}

    async with tritonclient.grpc.aio.InferenceServerClient(tiny_server.grpc) as client:
        responses = client.stream_infer(requests())
        result, error = await anext(aiter(responses))
        assert error is None and result.as_numpy("text_output") is not None
        assert responses.cancel()
        await asyncio.to_thread(wait_idle, tiny_server)


# -- the generate extension -----------------------------------------------------------------------------------


def events(body: str) -> list[dict[str, Any]]:
    """The objects of a stream of server-sent events."""
    return [json.loads(line.removeprefix("data: ")) for line in body.splitlines() if line]


def test_generate(tiny_server: LiveServer) -> None:
    url = f"{tiny_server.url}/v2/models/tiny"
    body = {"text_input": PROMPT, "max_tokens": 12, "temperature": 0}
    with tritonclient.http.InferenceServerClient(tiny_server.http) as client:
        whole = text(client.infer("tiny", tensors(tritonclient.http, TEXT)))
        ids = client.infer("tiny", tensors(tritonclient.http, IDS)).as_numpy("output_ids")
    with httpx.Client(timeout=120) as http:
        answer = http.post(f"{url}/generate", json={"id": "g", **body}).json()
        assert answer == {"id": "g", "model_name": "tiny", "model_version": "1", "text_output": whole}
        assert http.post(f"{url}/versions/1/generate", json=body).json()["text_output"] == whole
        inside = {"text_input": PROMPT, "parameters": {"max_tokens": 12, "temperature": 0}}
        assert http.post(f"{url}/generate", json=inside).json()["text_output"] == whole
        numbers = {"input_ids": [5, 17, 33, 60, 7], "request_output_len": 9, "temperature": 0}
        assert http.post(f"{url}/generate", json=numbers).json()["output_ids"] == ids[0, 0].tolist()
        with http.stream("POST", f"{url}/generate_stream", json=body | {"stream": True}) as stream:
            assert stream.headers["content-type"].startswith("text/event-stream")
            pieces = events("".join(stream.iter_text()))
        assert "".join(piece["text_output"] for piece in pieces) == whole
        assert len(pieces) == 12
        once = events(http.post(f"{url}/generate_stream", json=body).text)
        assert [piece["text_output"] for piece in once] == [whole]


def test_generate_errors(tiny_server: LiveServer) -> None:
    url = f"{tiny_server.url}/v2/models"
    body = {"text_input": PROMPT, "max_tokens": 12}
    refused: list[tuple[str, dict[str, Any], int, str]] = [
        ("tiny/generate", body | {"temperature": -1}, 400, "temperature is -1.0, expected a number from 0 to 100"),
        # With this status, as Triton has it: what it counts are the answers, and the first one went well.
        ("tiny/generate", body | {"stream": True}, 200, "use generate stream"),
        ("tiny/generate", {"max_tokens": 3}, 400, "expected one of text_input and input_ids"),
        ("tiny/generate_stream", body | {"top_k": -5}, 400, "top_k is -5, expected an integer from -1"),
        ("other/generate", body, 404, "unknown model: 'other' is not found"),
    ]
    with httpx.Client(timeout=120) as http:
        for path, values, status, message in refused:
            answer = http.post(f"{url}/{path}", json=values)
            assert (answer.status_code, message in answer.json()["error"]) == (status, True), answer.text
        assert http.post(f"{url}/tiny/generate", json=body).status_code == 200
