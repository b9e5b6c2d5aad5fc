from __future__ import annotations

import asyncio
import json
import logging
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.frontends.kserve.models import Live, Mirror, wait
from tritium.errors import Code, TritiumError
from tritium.frontends import connection
from tritium.frontends.asgi import Receive, Scope, Send, reply
from tritium.frontends.http import HttpListener, app, serve
from tritium.serving.server import Server

ECHO = json.dumps({"inputs": [{"name": "IN", "datatype": "FP32", "shape": [1, 1], "data": [1]}]}).encode()


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
    yield
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)


def raw(live: Live, *parts: bytes, pause: float = 0.0, half_close: bool = False) -> bytes:
    """Sends bytes as they are and reads until the server closes or is silent for a second."""
    got = b""
    with socket.create_connection(("127.0.0.1", live.http_port), timeout=5) as client:
        try:
            for part in parts:
                client.sendall(part)
                time.sleep(pause)
            if half_close:
                client.shutdown(socket.SHUT_WR)
            client.settimeout(1.0)
            while data := client.recv(65536):
                got += data
        except (TimeoutError, ConnectionError):
            pass
    return got


def post(path: bytes = b"/v2/models/echo/infer", body: bytes = ECHO, *more: bytes, length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    head = [b"POST " + path + b" HTTP/1.1", b"Host: x", b"Content-Length: %d" % size, *more]
    return b"\r\n".join([*head, b"", body])


def test_health_ready_metrics_and_root(live: Live) -> None:
    with httpx.Client(base_url=live.url) as client:
        assert client.get("/health").json() == {"live": True}
        assert client.get("/ready").json() == {"ready": True}
        page = client.get("/metrics")
        assert "nv_inference_count{" in page.text
        assert page.headers["content-type"].startswith("text/plain; version=0.0.4")
        root = client.get("/")
        assert (root.status_code, root.json()) == (404, {"error": "Not Found"})
        assert client.get("/nothing/").json() == {"error": "Not Found"}
        wrong = client.post("/metrics")
        assert (wrong.status_code, wrong.json()) == (405, {"error": "Method Not Allowed"})
        assert set(wrong.headers["allow"].split(", ")) == {"GET", "HEAD"}


def test_v1_paths_have_errors_of_their_own_form(live: Live) -> None:
    with httpx.Client(base_url=live.url) as client:
        assert client.get("/v1/models").json() == {"object": "list", "data": []}
        unknown = client.get("/v1/nothing")
        assert (unknown.status_code, unknown.json()["error"]["message"]) == (404, "Not Found")
        wrong = client.get("/v1/chat/completions")
        assert (wrong.status_code, wrong.json()["error"]["type"]) == (405, "invalid_request_error")
        large = client.post("/v1/completions", content=b"x" * (5 << 20))
        assert (large.status_code, large.json()["error"]["code"]) == (413, "request_too_large")


@pytest.mark.parametrize("value", ["abc-1", "x" * 128, "a b"])
def test_a_request_id_comes_back(live: Live, value: str) -> None:
    for path in ("/v2/health/live", "/health", "/nothing"):
        assert httpx.get(live.url + path, headers={"x-request-id": value}).headers["x-request-id"] == value


@pytest.mark.parametrize("value", ["x" * 129, "\xe9", "a\tb"])
def test_a_strange_request_id_does_not(live: Live, value: str) -> None:
    found = httpx.get(live.url + "/v2/health/live", headers={"x-request-id": value.encode("latin-1")})  # type: ignore[dict-item]
    assert found.status_code == 200
    assert "x-request-id" not in found.headers


def test_bodies_beyond_the_limit(live: Live) -> None:
    answer = raw(live, post(length=1 << 30, body=b"{}"))
    assert answer.startswith(b"HTTP/1.1 413")
    assert b"exceeds 4194304 bytes" in answer
    chunks = b"POST /v2/models/echo/infer HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    answer = raw(live, chunks, *[b"100000\r\n" + b"x" * (1 << 20) + b"\r\n"] * 5)
    assert answer.startswith(b"HTTP/1.1 413")


def test_a_refused_body_is_thrown_away_up_to_a_limit(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    with httpx.Client(base_url=live.url) as client:
        for _ in range(2):
            assert client.post("/v2/models/echo/infer", content=b"x" * (8 << 20)).status_code == 413
    monkeypatch.setattr(connection, "MAX_DISCARDED_BYTES", 1 << 20)
    with socket.create_connection(("127.0.0.1", live.http_port), timeout=5) as client:
        client.sendall(post(length=1 << 40, body=b"{}"))
        with pytest.raises(ConnectionError):
            for _ in range(1000):
                client.sendall(bytes(1 << 20))


def test_a_body_that_does_not_come(live: Live) -> None:
    start = time.monotonic()
    answer = raw(live, post(length=500, body=b"{}"))
    assert answer.startswith(b"HTTP/1.1 408") and b"nothing of the request body came for 0.5 s" in answer
    assert time.monotonic() - start < 3
    answer = raw(live, post(b"/v2/models/echo/infer", b"", b"Expect: 100-continue", length=10))
    assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 408")


def test_expect_continue_and_chunks_work(live: Live) -> None:
    assert raw(live, post(b"/v2/models/echo/infer", ECHO, b"Expect: 100-continue")).count(b"HTTP/1.1 200") == 1
    head = b"POST /v2/models/echo/infer HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunks = b"5\r\n" + ECHO[:5] + b"\r\n%x\r\n" % (len(ECHO) - 5) + ECHO[5:] + b"\r\n0\r\n\r\n"
    assert raw(live, head + chunks).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "head",
    [
        b"this is not http\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\nContent-Length: 20\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: abc\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000000000000000000000\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked, identity\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nFFFFFFFFFFFFFFFFF\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n",
        b"GET / HTTP/1.1\r\nA\x00: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nA : x\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\n\r\n",
        b"FOO / HTTP/1.1\r\n\r\n",
    ],
)
def test_bad_framing_is_refused_and_closed(live: Live, head: bytes) -> None:
    with socket.create_connection(("127.0.0.1", live.http_port), timeout=5) as client:
        client.sendall(head)
        got = b""
        while data := client.recv(65536):
            got += data
    assert got.startswith((b"HTTP/1.1 400", b"HTTP/1.1 404"))
    assert b"HTTP/1.1 400" in got
    assert httpx.get(live.url + "/v2/health/live").status_code == 200


def test_heads_beyond_the_limit(live: Live) -> None:
    one = b"GET / HTTP/1.1\r\nX-Forwarded-For: " + b"A" * 40_000
    assert raw(live, one, b"A" * 40_000, b"A" * 40_000, pause=0.05).startswith(b"HTTP/1.1 431")
    many = b"".join(b"h%05d: 0\r\n" % i for i in range(10_000))
    assert raw(live, b"GET / HTTP/1.1\r\n" + many + b"\r\n").startswith(b"HTTP/1.1 431")
    assert raw(live, b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\n\r\n")[:12] in (b"HTTP/1.1 431", b"HTTP/1.1 404")


def test_a_head_that_does_not_end(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.2)
    for part in (b"", b"GET / HTTP/1.1\r\nHost"):
        answer = raw(live, part)
        assert answer.startswith(b"HTTP/1.1 408") and answer.endswith(b'{"error":"Request Timeout"}')
    # An answer takes as long as it takes.
    body = {**json.loads(ECHO), "parameters": {"wait_ms": 500}}
    assert raw(live, post(body=json.dumps(body).encode())).startswith(b"HTTP/1.1 200")


def test_http_1_0(live: Live) -> None:
    answer = raw(live, b"GET /v2/health/live HTTP/1.0\r\n\r\n")
    assert answer.startswith(b"HTTP/1.0 200 OK\r\n") and b"connection: close" in answer
    body = b'{"ITEMS":[1,2]}'
    head = b"POST /v2/models/repeat/generate_stream HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(body)
    head, _, events = raw(live, head + body).partition(b"\r\n\r\n")
    assert b"chunked" not in head
    assert events.startswith(b"data: {") and events.count(b"\n\n") == 2 and b"\r\n" not in events


def test_pipelined_requests_are_answered_in_order_or_closed(live: Live) -> None:
    get = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n"
    assert raw(live, get * 20).count(b"HTTP/1.1 200") == 20
    assert raw(live, get * 5000).count(b"HTTP/1.1 200") <= 5000
    assert httpx.get(live.url + "/v2/health/live").status_code == 200


def test_a_body_cut_short(live: Live) -> None:
    assert not raw(live, post(length=500, body=b"{}"), half_close=True).startswith(b"HTTP/1.1 200")
    assert wait(lambda: Mirror.running == 0)


@pytest.mark.parametrize("coding", [b"gzip, chunked", b"gzip", b"identity, chunked", b"xchunked"])
def test_transfer_codings_that_are_not_known(live: Live, coding: bytes) -> None:
    chunks = b"%x\r\n%b\r\n0\r\n\r\n" % (len(ECHO), ECHO)
    head = b"POST /v2/models/echo/infer HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: "
    answer = raw(live, head + coding + b"\r\n\r\n" + chunks)
    assert answer.split()[1] in (b"400", b"501") and answer.count(b"HTTP/1.1") == 1
    if coding == b"gzip, chunked":
        assert answer.startswith(b"HTTP/1.1 501 ")


def test_trailers_are_no_headers_and_have_an_end(live: Live) -> None:
    head = b"POST /v2/models/echo/infer HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunks = b"%x\r\n%b\r\n0\r\n" % (len(ECHO), ECHO)
    answer = raw(live, head, chunks + b"X-Request-Id: from-a-trailer\r\n\r\n", pause=0.05)
    assert answer.startswith(b"HTTP/1.1 200 ") and b"from-a-trailer" not in answer
    assert b" 200 " not in raw(live, head + chunks, b"X: y\r\n" * 100_000, pause=0.05)


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("more", [(), (b"X-Request-Id: long-way",)])
def test_a_client_that_closes_its_half_gets_its_answers(live: Live, more: tuple[bytes, ...], times: int) -> None:
    answer = raw(live, post(b"/v2/models/echo/infer", ECHO, *more) * times, half_close=True)
    finals = [part for part in answer.split(b"HTTP/1.1 ")[1:] if not part.startswith(b"100 ")]
    assert len(finals) == times and all(part.startswith(b"200 ") for part in finals)


@pytest.mark.parametrize("size", [b"\xb2", b"-1", b"9" * 3000, b"1_0", b"\xd9\xa3"])
def test_a_size_of_the_json_that_is_no_number(live: Live, size: bytes) -> None:
    answer = raw(live, post(b"/v2/models/echo/infer", ECHO, b"Inference-Header-Content-Length: " + size))
    assert answer.startswith(b"HTTP/1.1 400 ")


async def get(port: int, path: str) -> httpx.Response:
    async with httpx.AsyncClient() as client:
        return await client.get(f"http://127.0.0.1:{port}{path}")


async def test_ready_says_why_not(tmp_path: Any) -> None:
    (tmp_path / "broken" / "1").mkdir(parents=True)
    (tmp_path / "broken" / "config.pbtxt").write_text('backend: "none_such"')
    server = Server([tmp_path])
    listener = HttpListener(app(server))
    port = await listener.start(port=0)
    found = await get(port, "/ready")
    assert (found.status_code, found.json()) == (503, {"ready": False, "reason": "model 'broken' is not loaded"})
    await server.start()
    assert (await get(port, "/ready")).json()["reason"].startswith("model 'broken' could not be loaded: ")
    assert (await get(port, "/v2/health/ready")).status_code == 400
    assert (await get(port, "/metrics")).status_code == 404
    await server.drain(0)
    found = await get(port, "/ready")
    assert (found.json()["reason"], found.headers["connection"]) == ("the server is draining", "close")
    await listener.stop(0.1)


async def test_stop_lets_answers_finish_and_cancels_the_slow() -> None:
    ended: list[str] = []

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await asyncio.sleep(float(scope["path"][1:]))
            ended.append("finished")
            await reply(send, 200, b"{}")
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    listener = await serve(slow, port=0)
    port = listener.port
    quick, stuck = asyncio.create_task(get(port, "/0.4")), asyncio.create_task(get(port, "/100"))
    await asyncio.sleep(0.2)
    start = time.monotonic()
    await listener.stop(1.0)
    assert time.monotonic() - start < 3
    answer = await quick
    assert (answer.status_code, answer.headers["connection"]) == (200, "close")
    await asyncio.wait([stuck])
    assert ended == ["finished", "cancelled"]
    assert stuck.exception() is not None or stuck.result().status_code == 500
    with pytest.raises(httpx.ConnectError):
        await get(port, "/0")
    await listener.stop(1.0)


async def test_a_port_in_use() -> None:
    async def nothing(scope: Scope, receive: Receive, send: Send) -> None:
        await reply(send, 200)

    listener = await serve(nothing, port=0)
    with pytest.raises(TritiumError, match=f"HTTP cannot listen on 127.0.0.1:{listener.port}: ") as caught:
        await serve(nothing, port=listener.port)
    assert caught.value.code is Code.UNAVAILABLE
    await listener.stop(0.1)
