from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as client
import tritonclient.grpc.aio as aio_client
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from tests.frontends.kserve.models import Live, Mirror, wait

pb: Any = service_pb2


@pytest.fixture
def stub(live: Live) -> Iterator[Any]:
    with grpc.insecure_channel(live.grpc_address) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


def request(model: str = "echo", values: Any = (1, 2), rid: str = "", outputs: Any = (), **parameters: Any) -> Any:
    items = model in ("repeat", "tokens")
    array = np.array(values, dtype="i4" if items else "f4").reshape([-1] if items else [1, -1])
    entry = {"name": "ITEMS" if items else "IN", "datatype": "INT32" if items else "FP32", "shape": array.shape}
    message = pb.ModelInferRequest(model_name=model, id=rid, inputs=[entry], raw_input_contents=[array.tobytes()])
    message.outputs.extend(pb.ModelInferRequest.InferRequestedOutputTensor(name=name) for name in outputs)
    for key, value in parameters.items():
        kinds = {bool: "bool_param", int: "int64_param", str: "string_param"}
        setattr(message.parameters[key], kinds[type(value)], value)
    return message


def code(call: Any, message: Any, **more: Any) -> tuple[str, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call(message, timeout=5, **more)
    return caught.value.code().name, caught.value.details()


def view(answer: Any) -> tuple[Any, ...]:
    """id, value (or error), final flag."""
    inner = answer.infer_response
    value = answer.error_message or [np.frombuffer(raw, "i4").item() for raw in inner.raw_output_contents]
    final = inner.parameters["triton_final_response"].bool_param if inner.parameters else None
    return inner.id, value, final


def test_facts(stub: Any) -> None:
    assert stub.ServerLive(pb.ServerLiveRequest()).live
    assert stub.ServerReady(pb.ServerReadyRequest()).ready
    assert stub.ModelReady(pb.ModelReadyRequest(name="echo")).ready
    assert not stub.ModelReady(pb.ModelReadyRequest(name="nope")).ready
    assert stub.ServerMetadata(pb.ServerMetadataRequest()).name == "live"
    metadata = stub.ModelMetadata(pb.ModelMetadataRequest(name="echo"))
    assert [(t.name, t.datatype, list(t.shape)) for t in metadata.inputs] == [("IN", "FP32", [-1, -1])]
    assert stub.ModelConfig(pb.ModelConfigRequest(name="echo")).config.max_batch_size == 8
    assert stub.ModelStatistics(pb.ModelStatisticsRequest(name="echo")).model_stats[0].HasField("inference_stats")
    index = stub.RepositoryIndex(pb.RepositoryIndexRequest(ready=True)).models
    assert ("echo", "1", "READY") in [(m.name, m.version, m.state) for m in index]
    unknown = "Request for unknown model: 'nope' is not found"
    assert code(stub.ModelMetadata, pb.ModelMetadataRequest(name="nope")) == ("NOT_FOUND", unknown)
    text = (
        "failed to get model version from specified version string 'x' (details: stol), version should be an integral"
    )
    assert code(stub.ModelConfig, pb.ModelConfigRequest(name="echo", version="x"))[1].startswith(text)
    assert code(stub.ModelStatistics, pb.ModelStatisticsRequest(name="nope"))[0] == "INVALID_ARGUMENT"
    for name in ("é" * 6000, "\U0001f600" * 6000):  # a message is a header, whose size is limited
        assert code(stub.ModelMetadata, pb.ModelMetadataRequest(name=name))[0] == "NOT_FOUND"
    assert code(stub.LogSettings, pb.LogSettingsRequest())[0] == "UNIMPLEMENTED"  # this process has its own


def test_load_and_unload(stub: Any) -> None:
    stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name="one_text"))
    assert stub.ModelReady(pb.ModelReadyRequest(name="one_text")).ready
    unload = pb.RepositoryModelUnloadRequest(model_name="one_text")
    unload.parameters["unload_dependents"].bool_param = True
    stub.RepositoryModelUnload(unload)
    assert wait(lambda: not stub.ModelReady(pb.ModelReadyRequest(name="one_text")).ready)
    unload.parameters["unload_dependents"].int64_param = 1
    assert code(stub.RepositoryModelUnload, unload)[0] == "INVALID_ARGUMENT"
    for name in ("", "../x", "nope"):
        assert code(stub.RepositoryModelLoad, pb.RepositoryModelLoadRequest(model_name=name))[0] == "INTERNAL"
    for key, value in (
        ("config", {"int64_param": 1}),
        ("file:1/x", {"string_param": "x"}),
        ("color", {"bool_param": True}),
    ):
        load = pb.RepositoryModelLoadRequest(model_name="one_text", parameters={key: value})
        assert code(stub.RepositoryModelLoad, load)[0] == "INVALID_ARGUMENT"


def test_infer_and_its_errors(live: Live, stub: Any) -> None:
    answer = stub.ModelInfer(request(rid="7", note=True))
    assert (answer.id, answer.model_version, answer.parameters["note"].int64_param) == ("7", "1", 7)
    assert np.frombuffer(answer.raw_output_contents[0], "f4").tolist() == [1, 2]
    assert code(stub.ModelInfer, request("nope"))[0] == "NOT_FOUND"
    assert code(stub.ModelInfer, request(error="RESOURCE_EXHAUSTED")) == ("RESOURCE_EXHAUSTED", "as asked")
    assert code(stub.ModelInfer, request(error_answer=True)) == ("UNAVAILABLE", "an answer as asked")
    assert code(stub.ModelInfer, request("repeat")) == (
        *("UNIMPLEMENTED", "ModelInfer RPC doesn't support models with decoupled transaction policy"),
    )
    for method in ("ModelInfer", "ServerLive"):
        with grpc.insecure_channel(live.grpc_address) as channel:
            raw = channel.unary_unary(f"/inference.GRPCInferenceService/{method}")
            assert code(raw, b"\xff\xff\xff")[0] == "INTERNAL"


def test_an_error_says_when_to_come_again(stub: Any) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        stub.ModelInfer(request(error="UNAVAILABLE"))
    assert ("grpc-retry-pushback-ms", "2500") in caught.value.trailing_metadata()


def test_a_deadline_cancels(stub: Any) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        stub.ModelInfer(request(rid="deadline", hang=True), timeout=0.2)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert wait(lambda: "deadline" in Mirror.left)


def test_a_cancelled_call_cancels(stub: Any) -> None:
    call = stub.ModelInfer.future(request(rid="cancelled", hang=True))
    assert wait(lambda: Mirror.running == 1)
    call.cancel()
    assert wait(lambda: "cancelled" in Mirror.left)


def test_one_answer_models_answer_in_order(stub: Any) -> None:
    requests = [request(rid=str(i), wait_ms=50 - 10 * i) for i in range(5)]
    requests.insert(2, request("nope", rid="n"))
    requests.insert(4, request(rid="e", error="UNKNOWN"))
    found = [(a.infer_response.id, a.error_message) for a in stub.ModelStreamInfer(iter(requests))]
    assert [rid for rid, _ in found] == ["0", "1", "n", "2", "e", "3", "4"]
    assert dict(found)["n"] == "Request for unknown model: 'nope' is not found"


@pytest.mark.parametrize("model", ["repeat", "tokens"])
def test_many_answers_interleave_and_hold_nobody_up(stub: Any, model: str) -> None:
    requests = [
        request(model, range(4), "slow", wait_ms=40),
        request(model, range(2), "fast", wait_ms=5),
        request(rid="one"),
    ]
    ids = [a.infer_response.id for a in stub.ModelStreamInfer(iter(requests))]
    assert ids[0] != "slow" and ids[-1] == "slow"
    assert sorted(ids) == ["fast"] * 2 + ["one"] + ["slow"] * 4


def test_final_and_empty_answers(stub: Any) -> None:
    def found(*values: int, **more: Any) -> list[Any]:
        return [view(a) for a in stub.ModelStreamInfer(iter([request("repeat", values, "d", **more)]))]

    wanted = {"triton_enable_empty_final_response": True}
    assert found(7, 8) == [("d", [7], False), ("d", [8], False)]
    assert found(7, **wanted) == [("d", [7], False), ("d", [], True)]
    assert found() == []
    assert found(**wanted) == [("d", [], True)]
    assert found(7, 8, with_last=True) == [("d", [7], False), ("d", [8], True)]
    assert found(7, 8, 9, fail_at=1) == [("d", [7], False), ("d", "no item at 1", False), ("d", [9], False)]
    assert found(7, error="UNKNOWN") == [("d", "as asked", None)]


def test_shape_of_error_answers(stub: Any) -> None:
    messages = [request("nope", rid="1"), request(rid="2", error_answer=True)]
    refused, failed = list(stub.ModelStreamInfer(iter(messages)))
    assert refused.infer_response == pb.ModelInferResponse(id="1")
    assert (failed.infer_response.model_name, failed.infer_response.model_version) == ("echo", "")
    assert failed.infer_response.parameters["triton_final_response"].bool_param


def test_an_error_may_end_the_call(stub: Any) -> None:
    metadata = (("triton_grpc_error", "true"),)
    call = stub.ModelStreamInfer(iter([request("repeat", [1, 2], fail_at=0)]), metadata=metadata)
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    assert (caught.value.code().name, caught.value.details()) == ("UNKNOWN", "no item at 0")
    kept = list(stub.ModelStreamInfer(iter([request("nope")]), metadata=metadata))
    assert kept[0].error_message


def test_messages_that_are_none(live: Live) -> None:
    with grpc.insecure_channel(live.grpc_address) as channel:
        raw = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
        parts = list(raw(iter([b"\xff\xff\xff", request(rid="ok").SerializeToString()])))
    answers = [pb.ModelStreamInferResponse.FromString(part) for part in parts]
    assert answers[0].error_message.startswith("the request is not a ModelInferRequest")
    assert answers[1].infer_response.id == "ok"


def test_a_stream_that_is_cancelled_or_left(live: Live) -> None:
    with grpc.insecure_channel(live.grpc_address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        call = stub.ModelStreamInfer(
            iter([request("repeat", range(1000), "stop", wait_ms=5), request(rid="stop2", hang=True)])
        )
        next(call)
        call.cancel()
    assert wait(lambda: {"stop", "stop2"} <= set(Mirror.left))
    assert wait(lambda: Mirror.running == 0)


def test_a_client_that_does_not_read_holds_the_models_back_and_is_given_up(live: Live) -> None:
    seen = len(Mirror.seen)
    gone = threading.Event()
    big = request(values=np.zeros(100_000), rid="big").SerializeToString()

    def endless() -> Iterator[bytes]:
        while not gone.is_set():
            yield big

    with grpc.insecure_channel(live.grpc_address) as channel:
        call = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")(endless())
        try:
            # 32 answers, 4 MiB of requests, and what lies in sockets.
            assert wait(lambda: Mirror.running == 0 and len(Mirror.seen) > seen)
            with pytest.raises(grpc.RpcError) as caught:
                time.sleep(3.0)
                assert len(Mirror.seen) - seen < 120
                for _ in call:
                    pass
        finally:
            gone.set()
            call.cancel()
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert caught.value.details() == "the client read no answer for 1.5 s"


def test_tritonclient(live: Live) -> None:
    with client.InferenceServerClient(live.grpc_address) as triton:
        array = np.arange(300_000, dtype=np.float32).reshape(2, -1)
        entry = client.InferInput("IN", list(array.shape), "FP32")
        entry.set_data_from_numpy(array)
        found = triton.infer("echo", [entry], request_id="g", client_timeout=10, compression_algorithm="gzip")
        np.testing.assert_array_equal(found.as_numpy("OUT"), array)
        with pytest.raises(InferenceServerException, match="unexpected inference output 'NO'"):
            triton.infer("echo", [entry], outputs=[client.InferRequestedOutput("NO")])
        got: queue.Queue[Any] = queue.Queue()
        triton.start_stream(callback=lambda result, error: got.put(error or result))
        items = client.InferInput("ITEMS", [3], "INT32")
        items.set_data_from_numpy(np.array([4, 5, 6], dtype=np.int32))
        triton.async_stream_infer("repeat", [items], request_id="p", enable_empty_final_response=True)
        answers = [got.get(timeout=5) for _ in range(4)]
        assert [a.as_numpy("ITEM").item() for a in answers[:3]] == [4, 5, 6]
        assert answers[3].get_response().parameters["triton_final_response"].bool_param
        triton.stop_stream()


async def test_tritonclient_aio(live: Live) -> None:
    items = aio_client.InferInput("ITEMS", [2], "INT32")
    items.set_data_from_numpy(np.array([4, 5], dtype=np.int32))

    async def requests() -> AsyncIterator[dict[str, Any]]:
        yield {"model_name": "repeat", "inputs": [items], "request_id": "a"}

    async with aio_client.InferenceServerClient(live.grpc_address) as triton:
        assert await triton.is_server_ready()
        found = [result.as_numpy("ITEM").item() async for result, error in triton.stream_infer(requests()) if not error]
        assert found == [4, 5]
        many = [triton.get_model_metadata("echo") for _ in range(20)]
        assert {m.name for m in await asyncio.gather(*many)} == {"echo"}
