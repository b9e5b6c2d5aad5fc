"""The short way of inference over gRPC against the long one; and both protocols count alike."""

from __future__ import annotations

from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb

from tests.frontends.kserve.ports import Ports
from tests.frontends.kserve.test_short import HTTP, Client


def message(values: Any = (1, 2), model: str = "moods", **fields: Any) -> pb.ModelInferRequest:
    array = np.array([values], "f4")
    made = pb.ModelInferRequest(model_name=model, **fields)
    made.inputs.add(name="IN", datatype="FP32", shape=array.shape)
    made.raw_input_contents.append(array.tobytes())
    return made


def changed(made: pb.ModelInferRequest, **fields: Any) -> pb.ModelInferRequest:
    for name, value in fields.items():
        if isinstance(value, list):
            del made.inputs[0].shape[:]
            made.inputs[0].shape.extend(value)
        else:
            setattr(made.inputs[0], name, value)
    return made


def typed() -> pb.ModelInferRequest:
    made = message()
    del made.raw_input_contents[:]
    made.inputs[0].contents.fp32_contents.extend([1, 2])
    return made


def out(*names: str, **parameters: int) -> list[Any]:
    kind = pb.ModelInferRequest.InferRequestedOutputTensor
    return [
        kind(name=n, parameters={k: pb.InferParameter(int64_param=v) for k, v in parameters.items()}) for n in names
    ]


def of_words(values: list[bytes], cut: int = 0) -> pb.ModelInferRequest:
    made = pb.ModelInferRequest(model_name="words")
    made.inputs.add(name="IN", datatype="BYTES", shape=[len(values)])
    made.raw_input_contents.append(b"".join(len(v).to_bytes(4, "little") + v for v in values)[: -cut or None])
    return made


GRPC = {
    "plain": message(),
    "one output": message(outputs=out("OUT")),
    "two outputs": message(outputs=out("SUM", "OUT")),
    "an id": message(id="seven"),
    "parameters": message((-3, 1), parameters={"a": pb.InferParameter(string_param="b")}),
    "as perf_analyzer": message(parameters={"triton_enable_empty_final_response": pb.InferParameter(bool_param=True)}),
    "answered with parameters": message((-3, 1)),
    "a version": message(model_version="1"),
    "an unknown version": message(model_version="9"),
    "an unknown model": message(model="moodless"),
    "an exception": message((-1, 1)),
    "an error": message((-2, 1)),
    "no elements": message(()),
    "classes": message(outputs=out("OUT", classification=1)),
    "an unknown output": message(outputs=out("NOT")),
    "another type": changed(message(), datatype="FP64"),
    "another shape": changed(message(), shape=[1, 3]),
    "a negative shape": changed(message(), shape=[1, -2]),
    "typed": typed(),
    "words": of_words([b"", b"two", b"\xff" * 300]),
    "cut words": of_words([b"one", b"two"], cut=1),
    "large": message(range(100_000)),
    "nothing": pb.ModelInferRequest(),
}


def called(port: int, sent: bytes, times: int = 1, **more: Any) -> list[Any]:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        found: list[Any] = []
        for _ in range(times):
            try:
                found.append(call(sent, timeout=10, **more))
            except grpc.RpcError as error:
                found.append((error.code(), error.details(), error.trailing_metadata()))  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize("name", GRPC)
def test_grpc_is_the_same_both_ways(ports: Ports, name: str) -> None:
    sent = GRPC[name].SerializeToString()
    expected = called(ports.grpc[1], sent)
    assert called(ports.grpc[0], sent, 3) == expected * 3
    assert called(ports.grpc[0], sent, compression=grpc.Compression.Gzip) == expected


def test_grpc_bytes_that_are_no_message(ports: Ports) -> None:
    for sent in (b"\xff\xff", b"\x0a\x05moo", GRPC["plain"].SerializeToString()[:-1]):
        assert called(ports.grpc[0], sent, 2) == called(ports.grpc[1], sent, 2)


def test_the_short_way_of_grpc_is_taken(ports: Ports, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = GRPC["one output"].SerializeToString()
    expected = called(ports.grpc[0], sent)
    monkeypatch.setattr("tritium.frontends.kserve.pb_codec.parse", None)
    monkeypatch.setattr("tritium.frontends.kserve.pb_codec.write", None)
    assert called(ports.grpc[0], sent) == expected


def test_both_ways_count_alike(ports: Ports) -> None:
    def counted() -> Any:
        (stats,) = ports.server.statistics("moods")
        ports.metrics.render()
        shown = [line for line in ports.metrics.render().decode().splitlines() if 'model="moods"' in line]
        counts = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in shown if "_us{" not in line}
        own = (stats.success.count, stats.fail.count, stats.inference_count, stats.execution_count, stats.queue.count)
        return np.array([*own, *counts.values()])

    sent = [HTTP["binary both ways"], HTTP["an exception"], HTTP["an error"], HTTP["another type"]]
    calls = [GRPC["plain"], GRPC["an exception"], GRPC["an error"], GRPC["another type"]]
    changes = []
    for way in (0, 1):
        before = counted()
        client = Client(ports.http[way])
        for one in sent:
            client.ask(one)
        client.close()
        for one in calls:
            called(ports.grpc[way], one.SerializeToString())
        changes.append(counted() - before)
    assert changes[0].tolist() == changes[1].tolist()
    # An error is an answer, an exception is a failure, and what does not fit counts nowhere.
    assert changes[0][:3].tolist() == [4, 2, 4]
