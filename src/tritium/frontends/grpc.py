"""The gRPC port: the KServe service, the standard health service and reflection on one server.

Two servers can carry them. Ours (``http2``) has the event loop to itself and answers plain inference without a task;
``grpc.aio``, some five times as expensive a call, is there for what ours does not do: TLS and compressed answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from tritium.errors import Code, TritiumError
from tritium.frontends.access import grpc_refusal
from tritium.frontends.grpc_transport import Transport
from tritium.frontends.http2.listener import Http2Server
from tritium.frontends.kserve.grpc import SERVICE, KserveGrpc, abort
from tritium.frontends.kserve.shared import Shared

if TYPE_CHECKING:
    from tritium.serving.server import Server

# How often a watcher of the health service looks, in seconds.
_WATCH_S = 0.5
_HEALTH: str = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name


class GrpcFrontend:
    """One gRPC server in front of a Server.

    Args:
        shared: what the HTTP port has too.
        max_message_bytes: largest message that is taken, after decompression; more is RESOURCE_EXHAUSTED.
            The requests of one ModelStreamInfer call that run at the same time share as many bytes.
        max_concurrent_streams: calls of one connection that run at the same time.
        max_in_flight: requests of one ModelStreamInfer call that run at the same time.
        write_timeout_s: how long a client of ModelStreamInfer may read none of its answers.
        transport: keep-alive, compression, TLS.
    """

    def __init__(
        self,
        server: Server,
        shared: Shared | None = None,
        *,
        max_message_bytes: int = 64 << 20,
        max_concurrent_streams: int = 1024,
        max_in_flight: int = 256,
        write_timeout_s: float = 60.0,
        transport: Transport | None = None,
    ) -> None:
        transport = transport or Transport()
        self._server = server
        self._shared = shared or Shared()
        self._kserve = KserveGrpc(
            server,
            self._shared,
            max_in_flight=max_in_flight,
            max_in_flight_bytes=max_message_bytes,
            write_timeout_s=write_timeout_s,
        )
        self._plain = transport.plain
        self._options: list[tuple[str, int]] = [
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.max_send_message_length", -1),
            ("grpc.max_concurrent_streams", max_concurrent_streams),
            *transport.options,
        ]
        self._credentials = transport.credentials
        self._listener: grpc.aio.Server | Http2Server | None = None

    async def start(self, host: str = "127.0.0.1", port: int = 8001) -> int:
        """Listens; returns the port, which matters when 0 was asked for.

        Raises:
            TritiumError: UNAVAILABLE when the address cannot be had.
        """
        return await (self._start_own(host, port) if self._plain else self._start_aio(host, port))

    def _register(self, listener: Any) -> None:
        listener.add_generic_rpc_handlers((self._kserve.handlers(), self._health()))
        names = (SERVICE, _HEALTH, reflection.SERVICE_NAME)
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(reflection.aio.ReflectionServicer(names), listener)

    async def _start_own(self, host: str, port: int) -> int:
        listener = Http2Server(dict(self._options), self._kserve.quick())
        self._register(listener)
        try:
            bound = await listener.start(host, port)
        except OSError as error:
            raise _cannot_listen(host, port) from error
        self._listener = listener
        return bound

    async def _start_aio(self, host: str, port: int) -> int:
        listener = grpc.aio.server(options=self._options)
        self._register(listener)
        address = _address(host, port)
        try:
            if self._credentials is None:
                bound = listener.add_insecure_port(address)
            else:
                bound = listener.add_secure_port(address, self._credentials)
        except RuntimeError:
            bound = 0
        if not bound:
            raise _cannot_listen(host, port)
        await listener.start()
        self._listener = listener
        return bound

    async def stop(self, grace_s: float) -> None:
        """Takes no new calls, lets the running ones finish for at most ``grace_s``, then cancels them."""
        if self._listener is not None:
            await self._listener.stop(grace_s)
            self._listener = None

    def _health(self) -> grpc.GenericRpcHandler:
        serializer: Any = health_pb2.HealthCheckResponse.SerializeToString
        deserializer: Any = health_pb2.HealthCheckRequest.FromString
        return grpc.method_handlers_generic_handler(
            _HEALTH,
            {
                "Check": grpc.unary_unary_rpc_method_handler(self._check, deserializer, serializer),
                "Watch": grpc.unary_stream_rpc_method_handler(self._watch, deserializer, serializer),
            },
        )

    def _status(self) -> Any:
        """SERVING or NOT_SERVING, whatever service is asked about, as Triton answers."""
        states = health_pb2.HealthCheckResponse
        return states(status=states.SERVING if self._server.ready() else states.NOT_SERVING)

    async def _admit(self, context: Any) -> None:
        given = dict(context.invocation_metadata() or ())
        missing = self._shared.grpc_access.refusal("health", given.get)
        if missing is not None:
            await abort(context, grpc_refusal(missing))

    async def _check(self, request: Any, context: Any) -> Any:
        await self._admit(context)
        return self._status()

    async def _watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        await self._admit(context)
        last = None
        while True:
            status = self._status()
            if status != last:
                last = status
                yield status
            await asyncio.sleep(_WATCH_S)


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _cannot_listen(host: str, port: int) -> TritiumError:
    return TritiumError(Code.UNAVAILABLE, f"gRPC cannot listen on {_address(host, port)}: is the port in use?")
