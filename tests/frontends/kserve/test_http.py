from __future__ import annotations

import gzip
import http.client
import json
import socket
import time
import zlib
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.http as client
import tritonclient.http.aio as aio_client
from tritonclient.utils import InferenceServerException

from tests.frontends.kserve.models import Live, Mirror, wait

ECHO = {"inputs": [{"name": "IN", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}]}
WORDS = {"inputs": [{"name": "IN", "datatype": "BYTES", "shape": [1], "data": ["x" * 5000]}]}


def call(live: Live, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, str | None, Any]:
    """Status, content type, and the JSON (or the bytes) of an answer; the path goes out as it is."""
    connection = http.client.HTTPConnection("127.0.0.1", live.http_port, timeout=10)
    raw = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    connection.request(method, path, raw, {k.replace("_", "-"): v for k, v in headers.items()})
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    try:
        return answer.status, answer.getheader("content-type"), json.loads(content)
    except ValueError:
        return answer.status, answer.getheader("content-type"), content


NOT_FOUND = (404, "text/plain", {"error": "Not Found"})
NOT_ALLOWED = (405, "text/plain", {"error": "Method Not Allowed"})


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("GET", "/v2/health/live", (200, None, b"")),
        ("GET", "/v2/health/ready", (200, None, b"")),
        ("POST", "/v2/health/live", NOT_ALLOWED),
        ("HEAD", "/v2/health/live", (405, "text/plain", b"")),
        ("GET", "/v2/models/echo/ready", (200, None, b"")),
        ("GET", "/v2/models/echo/versions/1/ready", (200, None, b"")),
        ("GET", "/v2/models/echo/versions/9/ready", (400, "text/plain", {"error": "Model version not ready"})),
        ("GET", "/v2/models/nope/ready", (400, "text/plain", {"error": "Model version not ready"})),
        ("GET", "/v2/models/echo/versions/x/ready", NOT_FOUND),
        ("GET", "/v2/", NOT_FOUND),
        ("GET", "/v2/nothing", NOT_FOUND),
        ("GET", "/v2/models", NOT_FOUND),
        ("GET", "/v2//models/echo", NOT_FOUND),
        ("GET", "/v2/models/echo/", NOT_FOUND),
        ("GET", "/v2/models/echo/explain", NOT_FOUND),
        ("GET", "/v2x", NOT_FOUND),
        ("PUT", "/v2/models/echo/infer", NOT_ALLOWED),
        ("DELETE", "/v2/models/echo", NOT_ALLOWED),
        ("POST", "/v2/models/echo/config", NOT_ALLOWED),
        ("GET", "/v2/repository/index", NOT_ALLOWED),
        ("GET", "/v2/models/echo/generate", NOT_ALLOWED),
        ("TRACE", "/v2/models/echo", NOT_ALLOWED),
    ],
)
def test_routes(live: Live, method: str, path: str, expected: Any) -> None:
    assert call(live, method, path) == expected


@pytest.mark.parametrize("path", ["/v2/models/ech%6F", "/v2/models/%2e%2e", "/v2/models/..", "/v2/models/e%00o"])
def test_names_are_looked_up_as_they_were_sent(live: Live, path: str) -> None:
    name = path.rsplit("/", 1)[1]
    message = f"Request for unknown model: '{name}' is not found"
    assert call(live, "GET", path) == (404, "application/json", {"error": message})


def test_metadata_config_and_statistics(live: Live) -> None:
    status, kind, found = call(live, "GET", "/v2")
    assert (status, kind, found["name"]) == (200, "application/json", "live")
    assert "binary_tensor_data" in found["extensions"]
    tensors = {
        name: [{"name": n, "datatype": "FP32", "shape": [-1, -1]}] for name, n in (("inputs", "IN"), ("outputs", "OUT"))
    }
    expected = {"name": "echo", "versions": ["1"], "platform": "mirror", **tensors}
    assert call(live, "GET", "/v2/models/echo?x=1")[2] == expected
    assert call(live, "GET", "/v2/models/echo/config")[2]["max_batch_size"] == 8
    stats = call(live, "GET", "/v2/models/echo/versions/1/stats")[2]["model_stats"]
    assert stats[0]["inference_stats"]["success"].keys() == {"count", "ns"}
    assert {s["name"] for s in call(live, "GET", "/v2/models/stats")[2]["model_stats"]} >= {"echo", "types"}
    assert call(live, "GET", "/v2/models/nope/stats")[0] == 400


def test_infer_and_its_errors(live: Live) -> None:
    outputs = [{"name": "OUT", "datatype": "FP32", "shape": [1, 2], "data": [1.0, 2.0]}]
    expected = {"id": "7", "model_name": "echo", "model_version": "1", "outputs": outputs, "parameters": {"note": 7}}
    body = {**ECHO, "id": "7", "parameters": {"note": True}}
    assert call(live, "POST", "/v2/models/echo/infer", body) == (200, "application/json", expected)
    assert call(live, "POST", "/v2/models/nope/infer", ECHO)[:2] == (404, "text/plain")
    assert call(live, "POST", "/v2/models/echo/versions/9/infer", ECHO)[0] == 404
    assert call(live, "POST", "/v2/models/echo/infer", b"{")[:2] == (500, "application/json")
    assert call(live, "POST", "/v2/models/echo/infer", {"inputs": []})[:2] == (400, "application/json")
    model = {**ECHO, "parameters": {"error_answer": True}}
    assert call(live, "POST", "/v2/models/echo/infer", model)[0] == 503
    decoupled = {"error": "HTTP end point doesn't support models with decoupled transaction policy"}
    assert call(live, "POST", "/v2/models/repeat/infer", ECHO) == (501, "text/plain", decoupled)


def test_an_empty_body_is_an_empty_tensor(live: Live) -> None:
    status, kind, found = call(live, "POST", "/v2/models/echo/infer", b"")
    assert (status, kind, found["outputs"][0]["shape"]) == (200, "application/json", [1, 0])


def test_retry_after(live: Live) -> None:
    body = {**ECHO, "parameters": {"error": "UNAVAILABLE"}}
    answer = httpx.post(f"{live.url}/v2/models/echo/infer", json=body)
    assert (answer.status_code, answer.headers["retry-after"], answer.json()) == (503, "3", {"error": "as asked"})


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_codings(live: Live, coding: str) -> None:
    packed = (gzip.compress if coding == "gzip" else zlib.compress)(json.dumps(WORDS).encode())
    headers = {"content-encoding": coding, "accept-encoding": coding}
    with httpx.stream("POST", f"{live.url}/v2/models/texts/infer", content=packed, headers=headers) as answer:
        raw = b"".join(answer.iter_raw())
    assert answer.headers["content-encoding"] == coding
    plain = (gzip.decompress if coding == "gzip" else zlib.decompress)(raw)
    assert json.loads(plain)["outputs"][0]["data"] == ["x" * 5000]
    assert len(raw) < 500
    refused = httpx.post(f"{live.url}/v2/models/texts/infer", json={"inputs": []}, headers={"accept-encoding": coding})
    assert "content-encoding" not in refused.headers
    assert call(live, "POST", "/v2/models/texts/infer", b"x", content_encoding="br") == (
        *(501, "application/json"),
        {"error": "Unsupported compression type"},
    )


def test_generate(live: Live) -> None:
    path = "/v2/models/repeat/generate"
    expected = {"model_name": "repeat", "model_version": "1", "ITEM": 5}
    assert call(live, "POST", path, {"ITEMS": [5]}) == (200, "application/json", expected)
    status, _, found = call(live, "POST", path, {"ITEMS": [5, 6]})
    assert (status, found["error"][:53]) == (200, "generate expects model to produce exactly 1 response,")
    assert call(live, "POST", path, {"ITEMS": []})[2] == found
    assert call(live, "POST", path, {"ITEMS": [5], "fail_at": 0})[::2] == (400, {"error": "no item at 0"})
    assert call(live, "POST", path, {"ITEMS": [5], "error": "NOT_FOUND"})[0] == 404
    assert call(live, "POST", "/v2/models/nope/generate", {})[:2] == (404, "application/json")


def events(live: Live, body: Any) -> tuple[int, Any, list[Any]]:
    answer = httpx.post(f"{live.url}/v2/models/repeat/generate_stream", json=body)
    blocks = answer.text.split("\n\n")
    assert blocks.pop() == "" and all(block.startswith("data: ") for block in blocks)
    return answer.status_code, answer.headers["content-type"], [json.loads(block[6:]) for block in blocks]


def test_generate_stream(live: Live) -> None:
    kind = "text/event-stream; charset=utf-8"
    same = {"model_name": "repeat", "model_version": "1"}
    assert events(live, {"ITEMS": [1, 2]}) == (200, kind, [{**same, "ITEM": 1}, {**same, "ITEM": 2}])
    assert events(live, {"ITEMS": [1], "with_last": True}) == (200, kind, [{**same, "ITEM": 1}])
    assert events(live, {"ITEMS": []}) == (200, kind, [])
    assert events(live, {"ITEMS": [1, 2], "fail_at": 0})[0] == 400
    later = [{**same, "ITEM": 1}, {"error": "no item at 1"}, {**same, "ITEM": 3}]
    assert events(live, {"ITEMS": [1, 2, 3], "fail_at": 1}) == (200, kind, later)
    path = "/v2/models/repeat/generate_stream"
    assert call(live, "POST", path, {"ITEMS": [1], "error": "NOT_FOUND"})[:2] == (404, "application/json")
    assert call(live, "POST", path, b"{")[:2] == (500, "application/json")


@pytest.mark.parametrize(("model", "verb"), [("echo", "infer"), ("repeat", "generate"), ("repeat", "generate_stream")])
def test_a_client_that_leaves_cancels(live: Live, model: str, verb: str) -> None:
    request_id = f"leaver-{verb}"
    body: dict[str, Any] = {**ECHO, "id": request_id, "parameters": {"hang": True}}
    if verb != "infer":
        body = {"ITEMS": [1, 2], "id": request_id, "hang": True}
    raw = json.dumps(body).encode()
    head = f"POST /v2/models/{model}/{verb} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", live.http_port)) as connection:
        connection.sendall(head + raw)
        assert wait(lambda: Mirror.running == 1)
        time.sleep(0.05)
    assert wait(lambda: request_id in Mirror.left)
    assert wait(lambda: Mirror.running == 0)


def test_a_client_that_leaves_a_stream_in_the_middle(live: Live) -> None:
    body = {"ITEMS": [*range(1000)], "id": "middle", "wait_ms": 5}
    with httpx.stream("POST", f"{live.url}/v2/models/repeat/generate_stream", json=body) as answer:
        assert next(answer.iter_lines()).startswith("data: ")
    assert wait(lambda: "middle" in Mirror.left)


def test_a_client_that_does_not_read_is_given_up(live: Live) -> None:
    raw = json.dumps({"ITEMS": [1] * 4000, "id": "unread" * 600}).encode()
    head = f"POST /v2/models/repeat/generate_stream HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", live.http_port)) as connection:
        connection.sendall(head + raw)
        assert wait(lambda: "unread" * 600 in Mirror.left)
        got = b""
        while data := connection.recv(1 << 20):
            got += data
    assert not got.endswith(b"0\r\n\r\n")


def test_repository(live: Live) -> None:
    index = call(live, "POST", "/v2/repository/index", b"")[2]
    assert {"name": "echo", "version": "1", "state": "READY"} in index
    assert all(e["state"] == "READY" for e in call(live, "POST", "/v2/repository/r/index", {"ready": True})[2])
    assert call(live, "POST", "/v2/repository/index", {"ready": "yes"})[0] == 500
    assert call(live, "POST", "/v2/repository/index", b"[")[0] == 500
    load, unload = "/v2/repository/models/one_text/load", "/v2/repository/models/one_text/unload"
    assert call(live, "POST", load, b"") == (200, "application/json", b"")
    assert call(live, "GET", "/v2/models/one_text/ready")[0] == 200
    raw = call(live, "POST", "/v2/models/one_text/infer", b"abc", Inference_Header_Content_Length="0")
    assert raw[:2] == (200, "application/octet-stream")
    assert call(live, "POST", unload, {"parameters": {"unload_dependents": False}})[0] == 200
    assert wait(lambda: call(live, "GET", "/v2/models/one_text/ready")[0] == 400)
    assert call(live, "POST", load, {"parameters": {"color": 1}})[::2] == (
        400,
        {"error": "unrecognized request parameter 'color'"},
    )
    assert call(live, "POST", load, {"parameters": {"file:1/x": "%%"}})[0] == 400
    assert call(live, "POST", "/v2/repository/models/../load", b"")[0] == 500
    refused = call(live, "POST", load, b"", Origin="http://evil.test")
    assert refused[0] == 403
    assert call(live, "POST", unload, b"", Origin=f"http://127.0.0.1:{live.http_port}")[0] == 200


def typed(name: str, array: Any, dtype: str, binary: bool = True) -> client.InferInput:
    found = client.InferInput(name, list(array.shape), dtype)
    found.set_data_from_numpy(array, binary_data=binary)
    return found


def test_tritonclient(live: Live) -> None:
    with client.InferenceServerClient(live.url.removeprefix("http://"), concurrency=4) as triton:
        assert triton.is_server_live() and triton.is_server_ready() and triton.is_model_ready("echo")
        assert triton.get_model_config("echo")["name"] == "echo"
        array = np.arange(6, dtype=np.float32).reshape(2, 3)
        waiting = [triton.async_infer("echo", [typed("IN", array + i, "FP32")], request_id=str(i)) for i in range(8)]
        for i, item in enumerate(waiting):
            result = item.get_result()
            assert result.get_response()["id"] == str(i)
            np.testing.assert_array_equal(result.as_numpy("OUT"), array + i)
        texts = np.array(["a", "ä", ""], dtype=object)
        for binary in (True, False):
            wanted = [client.InferRequestedOutput("OUT", binary_data=binary)]
            found = triton.infer("texts", [typed("IN", texts, "BYTES", binary)], outputs=wanted)
            assert [x.decode() if isinstance(x, bytes) else x for x in found.as_numpy("OUT")] == texts.tolist()
        for coding in ("gzip", "deflate"):
            found = triton.infer(
                *("echo", [typed("IN", array, "FP32")]),
                request_compression_algorithm=coding,
                response_compression_algorithm=coding,
            )
            np.testing.assert_array_equal(found.as_numpy("OUT"), array)
        with pytest.raises(InferenceServerException, match="data-type is 'INT32', but model 'echo' expects 'FP32'"):
            triton.infer("echo", [typed("IN", array.astype(np.int32), "INT32")])


async def test_tritonclient_aio(live: Live) -> None:
    async with aio_client.InferenceServerClient(live.url.removeprefix("http://")) as triton:
        array = np.ones((1, 2), dtype=np.float32)
        entry = aio_client.InferInput("IN", [1, 2], "FP32")
        entry.set_data_from_numpy(array)
        found = await triton.infer("echo", [entry])
        np.testing.assert_array_equal(found.as_numpy("OUT"), array)
