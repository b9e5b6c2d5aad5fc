"""A client that leaves frees what it held, streaming or not; one that waits in a queue hears that it is alive."""

from __future__ import annotations

import json
import socket
import time
from typing import Any

import pytest

from tests.frontends.openai.conftest import Live

SLOW = {"model": "fake", "prompt": "x", "max_tokens": 200, "ignore_eos": True}


def send(live: Live, body: dict[str, Any]) -> socket.socket:
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    connection = socket.create_connection(("127.0.0.1", live.port))
    connection.sendall(head.encode() + b"\r\n\r\n" + data)
    return connection


def wait_for(live: Live, count: int) -> None:
    deadline = time.monotonic() + 5
    while len(live.server.open) < count and time.monotonic() < deadline:
        time.sleep(0.005)
    assert len(live.server.open) == count


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("when", ["queued", "running"])
def test_leaving_closes_every_iterator_at_once(live: Live, stream: bool, when: str) -> None:
    live.server.step_s = 0.02
    live.server.first_s = 30 if when == "queued" else 0
    connection = send(live, SLOW | {"stream": stream, "n": 3, "prompt": ["a", "b"]})
    wait_for(live, 6)
    if stream and when == "running":
        assert connection.recv(1)
    connection.close()
    left = time.monotonic()
    assert live.settled()
    assert time.monotonic() - left < 1
    assert live.server.aborted == 6


def test_two_hundred_clients_leave_at_the_first_byte(live: Live) -> None:
    live.server.step_s = 0.05
    for _ in range(200):
        connection = send(live, SLOW | {"stream": True})
        assert connection.recv(1)
        connection.close()
    assert live.settled()
    assert live.server.aborted == 200


def test_a_queued_stream_gets_comments_and_then_its_answer(live: Live) -> None:
    live.server.first_s = 0.7
    with live.client.stream("POST", "/v1/completions", json=SLOW | {"stream": True, "max_tokens": 3}) as response:
        lines = [line for line in response.iter_lines() if line]
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    comments = [line for line in lines if line.startswith(":")]
    assert 2 <= len(comments) <= 4
    assert lines[: len(comments)] == comments
    assert lines[-1] == "data: [DONE]"


def test_an_error_after_comments_is_an_event(live: Live) -> None:
    live.server.first_s, live.server.fail_after = 0.5, 0
    with live.client.stream("POST", "/v1/completions", json=SLOW | {"stream": True}) as response:
        lines = [line for line in response.iter_lines() if line]
    assert response.status_code == 200
    error = json.loads(lines[-1].removeprefix("data: "))["error"]
    assert error["type"] == "overloaded_error"
    assert "[DONE]" not in "".join(lines)


def test_a_whole_answer_outlasts_the_keep_alive(live: Live) -> None:
    live.server.first_s = 0.5
    response = live.client.post("/v1/completions", json=SLOW | {"max_tokens": 3})
    assert response.json()["usage"]["completion_tokens"] == 3
