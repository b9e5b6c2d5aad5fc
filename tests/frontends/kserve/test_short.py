"""The short way of inference over HTTP against the long one: the same bytes in must give the same bytes out."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import socket
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.frontends.kserve.ports import WORDS, Ports
from tritium.frontends.access import Restrictions
from tritium.frontends.http import HttpListener, app
from tritium.frontends.kserve.shared import Shared, header_pattern
from tritium.frontends.kserve.short import ShortInfer, read_head
from tritium.frontends.kserve.short_grpc import ShortGrpc
from tritium.serving.server import Server


def post(body: bytes, *lines: bytes, path: bytes = b"/v2/models/moods/infer") -> bytes:
    head = [b"POST " + path + b" HTTP/1.1", b"Host: x", b"Content-Length: %d" % len(body), *lines]
    return b"\r\n".join(head) + b"\r\n\r\n" + body


def binary(values: Any = (1, 2), model: str = "moods", path: bytes = b"", lines: Any = (), **more: Any) -> bytes:
    array = np.array([values], "f4")
    entry = {"name": "IN", "datatype": "FP32", "shape": list(array.shape)}
    entry["parameters"] = {"binary_data_size": array.nbytes}
    text = json.dumps({"inputs": [entry | more.pop("entry", {})], **more}).encode()
    size = b"Inference-Header-Content-Length: %d" % len(text)
    return post(text + array.tobytes(), size, *lines, path=path or f"/v2/models/{model}/infer".encode())


def plain(values: Any = (1, 2), **more: Any) -> bytes:
    entry = {"name": "IN", "datatype": "FP32", "shape": [1, len(values)], "data": values}
    return post(json.dumps({"inputs": [entry | more.pop("entry", {})], **more}).encode())


def words(values: list[bytes], cut: int = 0) -> bytes:
    packed = b"".join(len(v).to_bytes(4, "little") + v for v in values)[: -cut or None]
    entry = {"name": "IN", "datatype": "BYTES", "shape": [len(values)], "parameters": {"binary_data_size": len(packed)}}
    text = json.dumps({"inputs": [entry], "parameters": {"binary_data_output": True}}).encode()
    size = b"Inference-Header-Content-Length: %d" % len(text)
    return post(text + packed, size, path=b"/v2/models/words/infer")


class Client:
    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=10)
        self._rest = b""

    def ask(self, *parts: bytes, pause: float = 0.0) -> bytes:
        """The answer, its date apart; parts are sent one by one."""
        for part in parts:
            self._socket.sendall(part)
            time.sleep(pause)
        return self.answer()

    def answer(self) -> bytes:
        while b"\r\n\r\n" not in self._rest:
            self._more()
        head, _, body = self._rest.partition(b"\r\n\r\n")
        found = re.search(rb"content-length: ([0-9]+)", head)
        assert found is not None
        length = int(found[1])
        while len(body) < length:
            self._more()
            body = self._rest.partition(b"\r\n\r\n")[2]
        self._rest = body[length:]
        return re.sub(rb"\r\ndate: [^\r]*", b"", head) + b"\r\n\r\n" + body[:length]

    def _more(self) -> None:
        data = self._socket.recv(1 << 20)
        if not data:
            raise EOFError(self._rest)
        self._rest += data

    def silent(self) -> bool:
        """Whether the server has closed without another word."""
        return not self._rest and not self._socket.recv(10)

    def close(self) -> None:
        self._socket.close()


OUT, SUM = {"name": "OUT"}, {"name": "SUM"}
BINARY = {"parameters": {"binary_data": True}}
HTTP = {
    "binary in, JSON out": binary(),
    "binary both ways": binary(outputs=[OUT | BINARY]),
    "one of each": binary(outputs=[OUT | BINARY, SUM]),
    "binary by default": binary(parameters={"binary_data_output": True}),
    "JSON": plain(),
    "raw": post(np.array([1, 2, 3], "f4").tobytes(), b"Inference-Header-Content-Length: 0"),
    "an id": binary(id="seven", outputs=[OUT | BINARY]),
    "an empty id": binary(id="", outputs=[OUT | BINARY]),
    "parameters": binary(values=(-3, 1), parameters={"a": 1}),
    "priority and timeout": binary(parameters={"priority": 1, "timeout": 10}),
    "answered with parameters": binary(values=(-3, 1), outputs=[OUT | BINARY]),
    "a version": binary(path=b"/v2/models/moods/versions/1/infer"),
    "an unknown version": binary(path=b"/v2/models/moods/versions/9/infer"),
    "an unknown model": binary(model="moodless"),
    "a query": binary(path=b"/v2/models/moods/infer?a=b"),
    "an escape": binary(path=b"/v2/models/mo%6fds/infer"),
    "an exception": binary(values=(-1, 1)),
    "an error": binary(values=(-2, 1), outputs=[OUT | BINARY]),
    "no elements": binary(values=(), outputs=[OUT | BINARY]),
    "classes": binary(outputs=[OUT | {"parameters": {"classification": 1}}]),
    "an unknown output": binary(outputs=[{"name": "NOT"}]),
    "another type": binary(entry={"datatype": "FP64"}),
    "an unknown type": binary(entry={"datatype": "FP31"}),
    "too large a batch": binary(entry={"shape": [9, 2]}),
    "too few bytes": binary(entry={"shape": [1, 3], "parameters": {"binary_data_size": 12}}),
    "too many bytes": binary(entry={"shape": [1, 1], "parameters": {"binary_data_size": 4}}),
    "data twice": binary(entry={"data": [1, 2]}),
    "an unknown region": binary(entry={"parameters": {"shared_memory_region": "r", "shared_memory_byte_size": 8}}),
    "no JSON": post(b"{", b"Inference-Header-Content-Length: 1"),
    "a wrong length": post(b"{}", b"Inference-Header-Content-Length: 7"),
    "a length that is none": post(b"{}", b"Inference-Header-Content-Length: x"),
    "accepting gzip": binary(lines=[b"Accept-Encoding: gzip"]),
    "accepting anything": binary(lines=[b"Accept: */*", b"Accept-Encoding: identity", b"X-Anything: at all"]),
    "gzip": post(gzip.compress(plain().partition(b"\r\n\r\n")[2], mtime=0), b"Content-Encoding: gzip"),
    "a request id": binary(lines=[b"X-Request-Id: abc"]),
    "words": words([b"", b"two", b"\xff" * 300]),
    "cut words": words([b"one", b"two"], cut=1),
    "large": binary(values=range(100_000), outputs=[OUT | BINARY]),
    "large JSON": plain(values=list(range(20_000))),
}


@pytest.mark.parametrize("name", HTTP)
def test_http_is_the_same_both_ways(ports: Ports, name: str) -> None:
    sent = HTTP[name]
    head, _, body = sent.partition(b"\r\n\r\n")
    short, long = (Client(port) for port in ports.http)
    expected = long.ask(sent)
    # As a whole twice, since the second time it is known; then in pieces.
    assert [short.ask(sent), short.ask(sent)] == [expected] * 2
    assert short.ask(head + b"\r\n\r\n", body, pause=0.02) == expected
    half = len(body) // 2
    assert short.ask(head[:20], head[20:] + b"\r\n\r\n" + body[:half], body[half:], pause=0.02) == expected
    for client in (short, long):
        client.close()


def test_the_short_way_is_taken(ports: Ports, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = HTTP["binary both ways"]
    client = Client(ports.http[0])
    expected = client.ask(sent)
    monkeypatch.setattr("tritium.frontends.kserve.json_codec.read", None)
    monkeypatch.setattr("tritium.frontends.kserve.json_codec.write", None)
    assert client.ask(sent) == expected
    client.close()


def test_requests_that_come_before_the_answers(ports: Ports) -> None:
    names = ["binary both ways", "JSON", "an exception", "a query", "large", "binary in, JSON out"] * 3
    expected = []
    for name in names:
        client = Client(ports.http[1])
        expected.append(client.ask(HTTP[name]))
        client.close()
    client = Client(ports.http[0])
    sender = threading.Thread(target=client._socket.sendall, args=(b"".join(HTTP[name] for name in names),))
    sender.start()
    assert [client.answer() for _ in names] == expected
    sender.join()
    client.close()


def test_a_body_that_does_not_come(ports: Ports) -> None:
    answers = []
    for port in ports.http:
        client = Client(port)
        client.ask(HTTP["large"])
        answers.append(client.ask(HTTP["large"][:-1]))
        assert client.silent()
        client.close()
    assert answers[0] == answers[1] and answers[0].startswith(b"HTTP/1.1 408")


def test_a_client_that_leaves(ports: Ports) -> None:
    def left() -> int:
        return ports.server.statistics("moods")[0].failures.get("CANCELED", 0)

    for port in ports.http:
        before = left()
        client = Client(port)
        client._socket.sendall(binary(values=(-4, 0.4)))
        time.sleep(0.2)
        client.close()
        end = time.monotonic() + 5
        while left() == before and time.monotonic() < end:
            time.sleep(0.01)
        assert left() == before + 1


def test_an_answer_under_way_is_sent_when_the_server_ends(ports: Ports) -> None:
    async def listen(way: bool) -> HttpListener:
        listener = HttpListener(app(ports.server, short=way))
        await listener.start("127.0.0.1", 0)
        return listener

    answers = []
    for way in (True, False):
        listener = ports.run(listen(way))
        client, idle = Client(listener.port), Client(listener.port)
        idle.ask(binary())
        client._socket.sendall(binary(values=(-4, 0.3)))
        time.sleep(0.1)
        ending = asyncio.run_coroutine_threadsafe(listener.stop(5.0), ports.loop)
        answers.append(client.answer())
        assert client.silent() and idle.silent()
        ending.result(10)
        for one in (client, idle):
            one.close()
    assert answers[0] == answers[1] and b"connection: close" in answers[0]


def test_a_model_that_was_loaded_anew_is_asked_anew(ports: Ports, tmp_path: Path) -> None:
    folder = tmp_path / "m" / "1"
    folder.mkdir(parents=True)
    (folder / "model.py").write_text(WORDS)
    config = 'backend: "python" input { name: "IN" data_type: TYPE_FP32 dims: -1 }'
    config += 'output { name: "OUT" data_type: TYPE_FP32 dims: -1 } max_batch_size: '
    (tmp_path / "m" / "config.pbtxt").write_text(config + "1")

    async def begin() -> tuple[Server, HttpListener]:
        server = Server([tmp_path], control="explicit", load_models=["m"])
        await server.start()
        listener = HttpListener(app(server))
        await listener.start("127.0.0.1", 0)
        return server, listener

    server, listener = ports.run(begin())
    client = Client(listener.port)
    two = binary(model="m", entry={"shape": [2, 1]})
    assert client.ask(two).startswith(b"HTTP/1.1 400")
    (tmp_path / "m" / "config.pbtxt").write_text(config + "2")
    ports.run(server.load("m"))
    assert [client.ask(two)[:12] for _ in range(2)] == [b"HTTP/1.1 200"] * 2
    (tmp_path / "m" / "config.pbtxt").write_text(config + "1")
    ports.run(server.load("m"))
    assert client.ask(two).startswith(b"HTTP/1.1 400")
    ports.run(server.unload("m"))
    assert client.ask(two).startswith((b"HTTP/1.1 400", b"HTTP/1.1 404"))
    client.close()
    ports.run(listener.stop(0.1))
    ports.run(server.drain(1))


@pytest.mark.parametrize(
    "line",
    [
        b"Transfer-Encoding: chunked",
        b"Connection: close",
        b"Expect: 100-continue",
        b"Content-Encoding: gzip",
        b"Content-Length: 2",
        b"Accept-Encoding: gzip",
        b"X-Request-Id: a",
        b"Upgrade: h2c",
        b" folded",
        b"no colon",
        b"bad name : 1",
        b"bad: va\x01lue",
    ],
)
def test_heads_that_are_not_plain(line: bytes) -> None:
    head = post(b"", b"X: y")
    assert read_head(head) is not None
    assert read_head(head[:-2] + line + b"\r\n\r\n") is None


def test_lines_that_are_not_plain() -> None:
    for line in (
        b"GET /v2/models/a/infer HTTP/1.1",
        b"POST /v2/models/a/infer HTTP/1.0",
        b"POST /v2/models/a HTTP/1.1",
    ):
        assert read_head(line + b"\r\nContent-Length: 1\r\n\r\n") is None


def test_what_an_operator_wants_of_headers_closes_the_short_ways(ports: Ports) -> None:
    some = header_pattern("--x", "x-.*")
    asked = Restrictions("--http-restricted-api", ["inference:a=b"])
    for shared in (Shared(http_headers=some, grpc_headers=some), Shared(http_access=asked, grpc_access=asked)):
        assert ShortInfer(ports.server, shared, 1).closed
        assert ShortGrpc(ports.server, shared)._closed
    assert not ports.short.closed
