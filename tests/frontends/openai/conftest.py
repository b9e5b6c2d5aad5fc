from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import pytest
import uvicorn
from starlette.routing import Router

from tests.frontends.openai.fake import FakeModel, FakeServer
from tritium.frontends.asgi import BoundedBody, Receive, Scope, Send
from tritium.frontends.openai.routes import routes
from tritium.observability import logs


@dataclass
class Live:
    """The routes over a fake server on a loopback port."""

    server: FakeServer
    url: str
    port: int
    client: httpx.Client

    def settled(self, seconds: float = 5.0) -> bool:
        """Whether every iterator is closed within that time."""
        deadline = time.monotonic() + seconds
        while self.server.open and time.monotonic() < deadline:
            time.sleep(0.005)
        return not self.server.open


@pytest.fixture(scope="package")
def running() -> Iterator[Live]:
    server = FakeServer()
    inner = Router(routes(server, keepalive_s=0.2))  # type: ignore[arg-type]

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        """As ``frontends.http`` mounts the routes: with a bounded body and the request id in the logs."""
        logs.request_id.set(dict(scope["headers"]).get(b"x-request-id", b"").decode())
        await inner(scope, BoundedBody(receive, 2**20, 5), send)

    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    uvicorn_server = uvicorn.Server(uvicorn.Config(app, log_level="warning", ws="none", lifespan="off"))
    thread = threading.Thread(target=uvicorn_server.run, kwargs={"sockets": [listener]})
    thread.start()
    while not uvicorn_server.started:
        time.sleep(0.01)
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20) as client:
        yield Live(server, str(client.base_url).rstrip("/"), port, client)
    uvicorn_server.should_exit = True
    thread.join()
    listener.close()


@pytest.fixture
def live(running: Live) -> Iterator[Live]:
    yield running
    assert running.settled(), "an iterator was left open"
    fresh = FakeServer()
    for name in ("step_s", "first_s", "fail_after", "refuse", "burst", "aborted"):
        setattr(running.server, name, getattr(fresh, name))
    running.server.seen.clear()
    running.server.models[:] = [FakeModel()]
