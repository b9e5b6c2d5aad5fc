from __future__ import annotations

import socket

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.frontends.kserve.models import Live
from tritium.errors import TritiumError
from tritium.frontends.grpc import GrpcFrontend
from tritium.serving.server import Server


def test_health_of_any_service(live: Live) -> None:
    with grpc.insecure_channel(live.grpc_address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for service in ("", "inference.GRPCInferenceService", "no.such.Service"):
            found = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)
            assert found.status == health_pb2.HealthCheckResponse.SERVING
        watch = stub.Watch(health_pb2.HealthCheckRequest(), timeout=5)
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        watch.cancel()


def test_reflection(live: Live) -> None:
    with grpc.insecure_channel(live.grpc_address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        ask = reflection_pb2.ServerReflectionRequest(list_services="")
        (answer,) = stub.ServerReflectionInfo(iter([ask]), timeout=5)
    names = {service.name for service in answer.list_services_response.service}
    assert {"inference.GRPCInferenceService", "grpc.health.v1.Health"} <= names


def test_a_message_beyond_the_limit(live: Live) -> None:
    big = service_pb2.ModelInferRequest(model_name="echo", raw_input_contents=[bytes(5 << 20)])
    with grpc.insecure_channel(live.grpc_address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for more in ({}, {"compression": grpc.Compression.Gzip}):
            with pytest.raises(grpc.RpcError) as caught:
                stub.ModelInfer(big, timeout=5, **more)
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert stub.ServerLive(service_pb2.ServerLiveRequest(), timeout=5).live


@pytest.mark.parametrize("hello", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01\x02\x00", b"\xff" * 1000])
def test_what_is_not_http2_is_closed(live: Live, hello: bytes) -> None:
    with socket.create_connection(("127.0.0.1", live.grpc_port), timeout=5) as connection:
        connection.sendall(hello)
        while connection.recv(65536):
            pass


async def test_start_and_stop() -> None:
    server = Server()
    await server.start()
    front = GrpcFrontend(server)
    port = await front.start(port=0)
    with pytest.raises(TritiumError, match=f"gRPC cannot listen on 127.0.0.1:{port}"):
        await GrpcFrontend(server).start(port=port)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        await server.drain(0)
        found = await stub.Check(health_pb2.HealthCheckRequest())
        assert found.status == health_pb2.HealthCheckResponse.NOT_SERVING
    await front.stop(0.1)
    await front.stop(0.1)
