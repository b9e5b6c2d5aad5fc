"""Http2Server: one port that serves gRPC methods; to those who register methods it looks like ``grpc.aio.Server``."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, NamedTuple

import grpc

from tritium.frontends.http2.care import Limits
from tritium.frontends.http2.connection import Connection
from tritium.frontends.http2.opening import Opening


class _Details(NamedTuple):
    """What a generic handler is asked with."""

    method: str
    invocation_metadata: tuple[tuple[str, str | bytes], ...]


class Http2Server:
    """One port.

    Args:
        options: channel arguments of gRPC; those that have a meaning here are honoured.
        quick: by path, methods that answer without a task: given the message and the call, they return what
            cancels it, or None when they leave it to the handler.
    """

    def __init__(self, options: Mapping[str, int], quick: Mapping[str, Callable[..., Any]] | None = None) -> None:
        self.max_streams = options.get("grpc.max_concurrent_streams", 1024)
        self.max_message_bytes = options.get("grpc.max_receive_message_length", 64 << 20)
        self.limits = Limits.of(options)
        self._reuse_port = bool(options.get("grpc.so_reuseport", 0))
        self._quick = dict(quick or {})
        self._handlers: list[grpc.GenericRpcHandler] = []
        self._connections: set[Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._listening: asyncio.Server | None = None

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """Registers methods."""
        self._handlers += handlers

    def add_registered_method_handlers(self, service_name: str, method_handlers: object) -> None:
        """Generated code registers its methods a second time; once is enough here."""

    async def start(self, host: str, port: int) -> int:
        """Listens; returns the port.

        Raises:
            OSError: the address cannot be had.
        """
        six = ":" in host
        listening = socket.create_server(
            (host, port),
            family=socket.AF_INET6 if six else socket.AF_INET,
            backlog=2048,
            reuse_port=self._reuse_port,
            dualstack_ipv6=host == "::" and socket.has_dualstack_ipv6(),
        )
        loop = asyncio.get_running_loop()
        self._listening = await loop.create_server(lambda: Connection(self), sock=listening)
        return listening.getsockname()[1]

    async def stop(self, grace_s: float) -> None:
        """Takes no new calls, lets the running ones finish for at most ``grace_s``, then ends them."""
        if self._listening is None:
            return
        self._listening.close()
        for connection in list(self._connections):
            connection.leave()
        end = asyncio.get_running_loop().time() + grace_s
        while self._connections and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(0.005)
        for connection in list(self._connections):
            connection.cancel_calls()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._listening = None

    # -- for the connections ----------------------------------------------------------------------------------

    def complete(self, opening: Opening) -> None:
        """Finds what answers a call."""
        details: Any = _Details(opening.path, opening.metadata)
        for one in self._handlers:
            handler = one.service(details)
            if handler is not None:
                opening.handler = handler
                opening.quick = self._quick.get(opening.path)
                return

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs a coroutine."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def opened(self, connection: Connection) -> None:
        """A client has come."""
        self._connections.add(connection)

    def closed(self, connection: Connection) -> None:
        """A client has left."""
        self._connections.discard(connection)
