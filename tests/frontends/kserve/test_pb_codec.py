from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tritonclient.grpc import InferInput, InferResult, service_pb2
from tritonclient.grpc._utils import _get_inference_request

from tritium.backends.config import ModelConfig
from tritium.errors import Code, TritiumError
from tritium.frontends.kserve import pb_codec
from tritium.types import DType, InferResponse, RequestedOutput, SequenceRef, Tensor

pb: Any = service_pb2
CONFIG = ModelConfig("m", None)
UNEXPECTED = "unexpected explicit tensor data for input tensor 'IN' for model 'm'"
KINDS = [d for d in DType if d not in (DType.BYTES, DType.BF16)]


def message(inputs: list[dict[str, Any]] | None = None, raw: list[bytes] | None = None, **more: Any) -> Any:
    return pb.ModelInferRequest(model_name="m", inputs=inputs or [], raw_input_contents=raw or [], **more)


def read(request: Any) -> pb_codec.GrpcInfer:
    return pb_codec.read(pb_codec.parse(request.SerializeToString()), 5)


def refused(request: Any) -> TritiumError:
    with pytest.raises(TritiumError) as caught:
        read(request)
    assert len(caught.value.message) < 512
    return caught.value


def tensor(dtype: str = "FP32", shape: Any = (1,), **more: Any) -> dict[str, Any]:
    return {"name": "IN", "datatype": dtype, "shape": shape, **more}


@pytest.mark.parametrize("size", [4, 1 << 16])
def test_raw_contents(size: int) -> None:
    first, second = bytes(range(256)) * (size // 256 + 1), b"\1\2"
    inputs = [tensor("UINT8", [len(first)]), tensor("INT16", [1], name="TWO")]
    request = message(inputs, [first, second], id="x", outputs=[{"name": "OUT"}])
    encoded = request.SerializeToString()
    asked = pb_codec.read(pb_codec.parse(encoded), 5).request
    assert bytes(asked.inputs["IN"].data) == first
    assert asked.inputs["TWO"].numpy().tolist() == [513]
    assert (asked.id, asked.model, asked.outputs) == ("x", "m", [RequestedOutput("OUT", 0, True)])
    if size > 1000:
        assert asked.inputs["IN"].data.obj is encoded  # no copy


@pytest.mark.parametrize(
    ("dtype", "field", "values", "expected"),
    [
        ("BOOL", "bool_contents", [True, False], [True, False]),
        ("INT8", "int_contents", [300, -300], [44, -44]),
        ("INT32", "int_contents", [-5, 7], [-5, 7]),
        ("INT64", "int64_contents", [-(2**63), 7], [-(2**63), 7]),
        ("UINT16", "uint_contents", [65537, 7], [1, 7]),
        ("UINT64", "uint64_contents", [2**64 - 1, 7], [2**64 - 1, 7]),
        ("FP32", "fp32_contents", [1.5, 7], [1.5, 7]),
        ("FP64", "fp64_contents", [1e300, 7], [1e300, 7]),
        ("BYTES", "bytes_contents", [b"\xff", b""], [b"\xff", b""]),
    ],
)
def test_typed_contents(dtype: str, field: str, values: list[Any], expected: list[Any]) -> None:
    request = message([tensor(dtype, [2], contents={field: values})])
    assert read(request).request.inputs["IN"].numpy().tolist() == expected


@pytest.mark.parametrize(
    ("request_message", "text"),
    [
        (message([tensor("FLOAT")], [b"abcd"]), "invalid datatype for input IN"),
        (
            message([tensor(contents={"int_contents": [3]})]),
            UNEXPECTED + " of type 'INT32', expected datatype 'FP32'",
        ),
        (
            message([tensor("FP16", contents={"fp32_contents": [3]})]),
            UNEXPECTED + " of type 'FP32', expected datatype 'FP16'",
        ),
        (
            message([tensor(contents={"fp32_contents": [3]})], [b"abcd"]),
            "contents field must not be specified when using raw_input_contents for 'IN' for model 'm'",
        ),
        (message([tensor()]), "unable to find data for input tensor 'IN' for model 'm' in request."),
        (message([tensor()], [b"abcd"] * 3), "3 raw_input_contents for 1 inputs of model 'm'"),
        (message([tensor()] * 2, [b"abcd"] * 2), "[request id: <id_unknown>] input 'IN' already exists in request"),
        (
            message([tensor(shape=[1, -1])], [b"abcd"]),
            "[request id: <id_unknown>] All input dimensions should be specified for input 'IN' for model 'm', got",
        ),
        (message([tensor(shape=[2**62, 8])], [b"abcd"]), "shape of input 'IN' for model 'm' has too many elements"),
        (message([tensor(shape=[1] * 10_000)], [b"abcd"]), "input 'IN' has 10000 dimensions"),
        (message(id="x" * 5000), "id has 5000 characters"),
        (message(parameters={str(i): {"int64_param": i} for i in range(2000)}), "'parameters' has 2000 keys"),
    ],
)
def test_refusals(request_message: Any, text: str) -> None:
    error = refused(request_message)
    assert (error.code, error.message[: len(text)]) == (Code.INVALID_ARGUMENT, text)


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("priority", {"string_param": "high"}, "invalid value type for 'priority' parameter, expected int64_param or"),
        ("priority", {"int64_param": -1}, "invalid value for 'priority', expected value >= 0."),
        ("timeout", {"double_param": 1.5}, "invalid value type for 'timeout' parameter, expected int64_param."),
        (
            "sequence_start",
            {"int64_param": 1},
            "invalid value type for 'sequence_start' parameter, expected bool_param.",
        ),
        (
            "sequence_id",
            {"bool_param": True},
            "invalid value type for 'sequence_id' parameter, expected int64_param or",
        ),
        ("triton_own", {"int64_param": 1}, "parameter keys starting with 'triton_' are reserved"),
        ("triton_enable_empty_final_response", {"int64_param": 1}, "invalid value type for 'triton_enable_empty"),
        ("mine", {}, "invalid value type for 'mine' parameter, expected bool_param"),
    ],
)
def test_refusals_of_parameters(key: str, value: dict[str, Any], text: str) -> None:
    error = refused(message(parameters={key: value}))
    assert (error.code, error.message[: len(text)]) == (Code.INVALID_ARGUMENT, text)


def test_parameters() -> None:
    given_parameters = {
        **{"sequence_id": {"string_param": "s"}, "sequence_end": {"bool_param": True}},
        **{"priority": {"uint64_param": 2}, "timeout": {"int64_param": 9}},
        "triton_enable_empty_final_response": {"bool_param": True},
        **{
            "t": {"string_param": "t"},
            "i": {"int64_param": -3},
            "b": {"bool_param": False},
            "f": {"double_param": 2.5},
        },
    }
    asked = read(message(parameters=given_parameters))
    assert asked.empty_final
    assert asked.request.sequence == SequenceRef("s", False, True)
    assert (asked.request.priority, asked.request.timeout_us) == (2, 9)
    assert asked.request.parameters == {"t": "t", "i": -3, "b": False, "f": 2.5}
    plain = read(message())
    assert (plain.empty_final, plain.request.sequence, plain.request.parameters) == (False, None, {})


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"string_param": "x"}, "invalid value type for 'classification' parameter, expected int64_param"),
        ({"bool_param": True}, "invalid value type for 'classification' parameter, expected int64_param"),
        ({"int64_param": -1}, "invalid value for 'classification', expected value >= 0."),
    ],
)
def test_classes_are_a_number(value: dict[str, Any], text: str) -> None:
    output = {"name": "OUT", "parameters": {"classification": value}}
    assert refused(message(outputs=[output])).message == text


def test_shared_memory_is_not_there() -> None:
    size = {"shared_memory_byte_size": {"int64_param": 1}}
    region = {"shared_memory_region": {"string_param": "r"}, **size}
    for request in (message([tensor(parameters=region)]), message(outputs=[{"name": "OUT", "parameters": region}])):
        error = refused(request)
        assert (error.code, error.message) == (Code.NOT_FOUND, "Unable to find shared memory region: 'r'")


@settings(deadline=None, max_examples=60)
@given(st.data(), st.sampled_from(KINDS))
def test_round_trip_through_tritonclient(data: st.DataObject, dtype: DType) -> None:
    array = data.draw(hnp.arrays(dtype.numpy, hnp.array_shapes(max_dims=3, min_side=0, max_side=3)))
    entry = InferInput("IN", list(array.shape), dtype.value)
    entry.set_data_from_numpy(array)
    arguments = ("m", [entry], "1", "r", None, 0, False, False, 0, None, None)
    asked = read(_get_inference_request(*arguments)).request
    assert (asked.version, asked.inputs["IN"].shape) == ("1", array.shape)
    np.testing.assert_array_equal(asked.inputs["IN"].numpy(), array)
    answer = InferResponse(
        "m", "1", "r", list(asked.inputs.values()), {"a": 1, "b": "x", "c": True, "d": 0.5, "e": 2**63}
    )
    found = pb.ModelInferResponse.FromString(pb_codec.write(answer, asked, CONFIG))
    assert found.parameters["e"].uint64_param == 2**63
    assert found.parameters["c"].bool_param
    np.testing.assert_array_equal(InferResult(found).as_numpy("IN"), array)


def test_a_large_answer() -> None:
    tensors = [Tensor.from_numpy(n, np.arange(50_000, dtype=np.int64)) for n in "AB"]
    asked = read(message()).request
    encoded = pb_codec.write(InferResponse("m", "1", "", tensors), asked, CONFIG)
    stream = pb.ModelStreamInferResponse.FromString(pb_codec.write_stream(encoded, "why"))
    assert stream.error_message == "why"
    assert stream.infer_response == pb.ModelInferResponse.FromString(encoded)
    assert [len(c) for c in stream.infer_response.raw_output_contents] == [400_000, 400_000]
    assert list(stream.infer_response.outputs[1].shape) == [50_000]


def test_classes_instead_of_numbers() -> None:
    asked = read(message(outputs=[{"name": "OUT", "parameters": {"classification": {"int64_param": 1}}}])).request
    answer = InferResponse("m", "1", "", [Tensor.from_numpy("OUT", np.array([1, 5], dtype="i4"))])
    found = pb.ModelInferResponse.FromString(pb_codec.write(answer, asked, CONFIG))
    assert InferResult(found).as_numpy("OUT").tolist() == [b"5:1"]
    assert pb.ModelStreamInferResponse.FromString(pb_codec.write_refusal("7", "no")).infer_response.id == "7"


@settings(deadline=None, max_examples=100)
@given(st.binary(max_size=200), st.integers(0, 2))
def test_any_bytes_are_a_request_or_a_tritium_error(body: bytes, padding: int) -> None:
    body += pb.ModelInferRequest(raw_input_contents=[b"x" * 40_000] * padding).SerializeToString()
    try:
        pb_codec.read(pb_codec.parse(body), 0)
    except TritiumError as error:
        assert error.code in (Code.INTERNAL, Code.INVALID_ARGUMENT, Code.NOT_FOUND)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.binary(max_size=30), max_size=3), st.binary(max_size=10), st.integers(0, 60_000))
def test_the_split_agrees_with_protobuf(raw: list[bytes], unknown: bytes, cut: int) -> None:
    whole = message([tensor()] * 3, [*raw, b"y" * 40_000], id="r").SerializeToString() + unknown
    for encoded in (whole, whole[: len(whole) - cut]):
        try:
            expected = pb.ModelInferRequest.FromString(encoded)
        except Exception:
            with pytest.raises(TritiumError, match="the request is not a ModelInferRequest"):
                pb_codec.parse(encoded)
            continue
        found = pb_codec.parse(encoded)
        assert [bytes(r) for r in found.raw] == list(expected.raw_input_contents)
        assert found.fields.id == expected.id
        assert len(found.fields.inputs) == len(expected.inputs)
