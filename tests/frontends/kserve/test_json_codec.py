from __future__ import annotations

import contextlib
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tritonclient.http import InferenceServerClient, InferInput, InferRequestedOutput

from tritium.backends.config import ModelConfig, TensorSpec
from tritium.errors import Code, TritiumError
from tritium.frontends.kserve import json_codec
from tritium.types import DType, InferResponse, RequestedOutput, SequenceRef, Tensor

FLAT = ModelConfig("m", None, inputs=(TensorSpec("IN", DType.FP32, (-1,)),))
BATCHED = ModelConfig("m", None, inputs=(TensorSpec("IN", DType.FP32, (-1,)),), max_batch_size=8)
KINDS = [d for d in DType if d not in (DType.BYTES, DType.BF16)]


def read(body: Any, length: str | None = None, config: ModelConfig = FLAT) -> json_codec.HttpInfer:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return json_codec.read(raw, length, config, "m", "", 5)


def one(dtype: str, shape: Any, data: Any, **more: Any) -> dict[str, Any]:
    return {"inputs": [{"name": "IN", "datatype": dtype, "shape": shape, "data": data, **more}]}


def refused(body: Any, length: str | None = None, config: ModelConfig = FLAT) -> TritiumError:
    with pytest.raises(TritiumError) as caught:
        read(body, length, config)
    return caught.value


def test_a_request_with_everything() -> None:
    body = one("INT32", [2, 2], [[1, 2], [3, 4]]) | {
        "id": "x",
        "outputs": [
            {"name": "A", "parameters": {"binary_data": True}},
            {"name": "B", "parameters": {"classification": 3}},
        ],
        "parameters": {
            **{"sequence_id": 4, "sequence_start": True, "priority": 2, "timeout": 9, "binary_data_output": True},
            **{"t": "s", "i": -3, "b": True, "f": 2.5, "big": 2**63},
        },
    }
    asked = read(body)
    request = asked.request
    assert (request.model, request.id, request.arrived_ns, asked.binary) == ("m", "x", 5, True)
    assert request.inputs["IN"].numpy().tolist() == [[1, 2], [3, 4]]
    assert request.outputs == [RequestedOutput("A", 0, True), RequestedOutput("B", 3, False)]
    assert request.sequence == SequenceRef(4, True, False)
    assert (request.priority, request.timeout_us) == (2, 9)
    assert request.parameters == {"t": "s", "i": -3, "b": True, "f": 2.5, "big": float(2**63)}
    assert read(one("INT8", [1], [1]) | {"parameters": {"sequence_id": "s"}}).request.sequence == SequenceRef("s")
    assert read(one("INT8", [1], [1])).request.sequence is None


@pytest.mark.parametrize(
    ("dtype", "data", "values"),
    [
        ("INT8", [300, -300], [44, -44]),
        ("UINT8", [300, 7], [44, 7]),
        ("UINT64", [2**64 - 1, 0], [2**64 - 1, 0]),
        ("FP32", [1, 2.5], [1.0, 2.5]),
        ("FP32", [1e300, -1e300], [np.inf, -np.inf]),
        ("FP64", [2**64 - 1, 1], [float(2**64 - 1), 1.0]),
        ("BOOL", [True, False], [True, False]),
        ("BYTES", ["grüße ☃", ""], ["grüße ☃".encode(), b""]),
        ("INT32", [[[1]], [[[2]], []]], [1, 2]),
    ],
)
def test_values(dtype: str, data: Any, values: list[Any]) -> None:
    assert read(one(dtype, [2], data)).request.inputs["IN"].numpy().tolist() == values


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        ([], 500, "Unable to parse 'inputs': attempt to access non-existing object member 'inputs'"),
        ({"inputs": {}}, 500, "Unable to parse 'inputs': attempt to access JSON non-array as array"),
        ({"inputs": [5]}, 500, "Unable to parse 'name': attempt to access non-existing object member 'name'"),
        ({"id": 7, "inputs": []}, 500, "Unable to parse 'id': attempt to access JSON non-string as string"),
        ({"id": "x" * 5000, "inputs": []}, 400, "'id' has 5000 characters"),
        (one("FLOAT", [1], [1]), 400, "invalid datatype for input IN"),
        (one("FP16", [1], [1]), 400, "receiving FP16 data via JSON is not supported"),
        (one("BF16", [1], [1]), 400, "receiving BF16 data via JSON is not supported"),
        (one("FP32", [-1], [1]), 500, "Unable to parse 'shape': attempt to access JSON non-unsigned-integer"),
        (one("FP32", [True], [1]), 500, "Unable to parse 'shape': attempt to access JSON non-unsigned-integer"),
        (one("FP32", 3, [1]), 500, "Unable to parse 'shape': attempt to access JSON non-array as array"),
        (one("FP32", [2**62, 8], [1]), 400, "shape of input 'IN' for model 'm' has too many elements"),
        (one("FP32", [2] * 100_000, [1]), 400, "shape of input 'IN' for model 'm' has too many elements"),
        (one("FP32", [3], [1, 2]), 500, "Unable to parse 'data': Shape does not match true shape of 'data' field"),
        (one("FP32", [1], [[1], [2]]), 500, "Unable to parse 'data': Shape does not match"),
        (one("FP32", [1], 5), 500, "Unable to parse 'data': attempt to access JSON non-array as array"),
        (one("FP32", [2], [1, True]), 500, "Unable to parse 'data': attempt to access JSON non-number as double"),
        (one("FP32", [1], ["1"]), 500, "Unable to parse 'data': attempt to access JSON non-number as double"),
        (one("INT32", [1], [1.5]), 500, "attempt to access JSON non-signed-integer as signed-integer"),
        (one("INT64", [1], [2**63]), 500, "attempt to access JSON non-signed-integer as signed-integer"),
        (one("UINT8", [1], [-1]), 500, "attempt to access JSON non-unsigned-integer as unsigned-integer"),
        (one("BOOL", [2], [1, 0]), 500, "attempt to access JSON non-boolean as boolean"),
        (one("BYTES", [1], [5]), 500, "Unable to parse JSON bytes array: attempt to access JSON non-string as string"),
        (one("INT8", [1], [1]) | {"outputs": {}}, 500, "Unable to parse 'outputs'"),
        (one("INT8", [1], [1]) | {"outputs": [{}]}, 500, "Unable to parse 'name'"),
        (one("INT8", [1], [1], parameters={"binary_data_size": 1}), 400, "Input must set only one of the following"),
        ({"inputs": [{"name": "IN", "datatype": "INT8", "shape": [1]}]}, 400, "Input must set only one of the"),
    ],
)
def test_refusals_of_tensors(body: Any, status: int, text: str) -> None:
    error = refused(body)
    assert error.status.v2 == status
    assert text in error.message
    assert len(error.message) < 512


@pytest.mark.parametrize(
    ("parameters", "status", "text"),
    [
        ([1], 500, "failed to get request params.: attempt to get members for non-object"),
        ({"a": [1]}, 400, "parameter 'a' has invalid type. It should be either 'int', 'bool', or 'string'."),
        ({"a": None}, 400, "parameter 'a' has invalid type"),
        ({"triton_own": 1}, 400, "parameter keys starting with 'triton_' are reserved"),
        ({"triton_enable_empty_final_response": True}, 400, "parameter keys starting with 'triton_' are reserved"),
        ({"priority": "high"}, 500, "Unable to parse 'priority': attempt to access JSON non-unsigned-integer"),
        ({"timeout": 1.5}, 500, "Unable to parse 'timeout': attempt to access JSON non-unsigned-integer"),
        ({"sequence_start": 1}, 500, "Unable to parse 'sequence_start': attempt to access JSON non-boolean"),
        ({"sequence_id": True}, 500, "Unable to parse 'sequence_id': attempt to access JSON non-string as string"),
        ({"binary_data_output": 1}, 500, "Unable to parse 'binary_data_output'"),
        ({str(i): i for i in range(2000)}, 400, "'parameters' has 2000 keys"),
    ],
)
def test_refusals_of_parameters(parameters: Any, status: int, text: str) -> None:
    error = refused(one("INT8", [1], [1]) | {"parameters": parameters})
    assert error.status.v2 == status
    assert text in error.message


@pytest.mark.parametrize("value", ["two", -1, True])
def test_classes_are_a_number(value: Any) -> None:
    error = refused(one("INT8", [1], [1]) | {"outputs": [{"name": "A", "parameters": {"classification": value}}]})
    assert (error.status.v2, error.code) == (500, Code.INTERNAL)


def test_the_same_input_twice() -> None:
    body = one("INT8", [1], [1])
    body["inputs"] *= 2
    assert refused(body).message == "[request id: <id_unknown>] input 'IN' already exists in request"
    assert refused(body | {"id": "7"}).message == "[request id: 7] input 'IN' already exists in request"


def test_shared_memory_is_not_there() -> None:
    region = {"parameters": {"shared_memory_region": "r", "shared_memory_byte_size": 1}}
    error = refused({"inputs": [{"name": "IN", "datatype": "INT8", "shape": [1], **region}]})
    assert (error.status.v2, error.message) == (404, "Unable to find shared memory region: 'r'")
    assert refused(one("INT8", [1], [1]) | {"outputs": [{"name": "A", **region}]}).status.v2 == 404


def binary(size: Any, tail: bytes, shape: Any = (1, 4)) -> tuple[bytes, str]:
    entry = {"name": "IN", "datatype": "FP32", "shape": shape, "parameters": {"binary_data_size": size}}
    head = json.dumps({"inputs": [entry]}).encode()
    return head + tail, str(len(head))


def test_binary_tensors_are_views_of_the_body() -> None:
    body, length = binary(16, np.arange(4, dtype="f4").tobytes())
    tensor = read(body, length).request.inputs["IN"]
    assert tensor.data.obj is body
    assert tensor.numpy().tolist() == [[0, 1, 2, 3]]


@pytest.mark.parametrize(
    ("size", "tail", "status", "text"),
    [
        (16, b"", 400, "unexpected size for input 'IN', expecting 16 additional bytes for model 'm'"),
        (16, b"x" * 20, 400, "unexpected additional input data for model 'm'"),
        ("16", b"x" * 16, 500, "Unable to parse 'binary_data_size': attempt to access JSON non-unsigned-integer"),
        (2**64, b"", 400, "unexpected size for input 'IN'"),
    ],
)
def test_binary_sizes(size: Any, tail: bytes, status: int, text: str) -> None:
    error = refused(*binary(size, tail)) if size != 2**64 else refused(*binary(2**63, tail))
    assert error.status.v2 == status
    assert text in error.message


@pytest.mark.parametrize("length", ["-5", "99999", "abc", "", "1e3", "9" * 40, "+1_0"])
def test_header_lengths(length: str) -> None:
    error = refused(one("INT8", [1], [1]), length)
    assert error.status.v2 == 400
    assert (
        "Inference-Header-Content-Length" in error.message
        or "inference header size should be in range" in error.message
    )


def test_raw_bodies() -> None:
    asked = read(np.array([1.5, 2.5], dtype="f4").tobytes(), "0", BATCHED)
    assert asked.binary
    assert asked.request.inputs["IN"].numpy().tolist() == [[1.5, 2.5]]
    assert read(b"", "0", BATCHED).request.inputs["IN"].shape == (1, 0)
    text = ModelConfig("m", None, inputs=(TensorSpec("IN", DType.BYTES, (1,)),), max_batch_size=2)
    assert read(b"hello", "0", text).request.inputs["IN"].numpy().tolist() == [[b"hello"]]
    fixed = ModelConfig("m", None, inputs=(TensorSpec("IN", DType.INT16, (2, -1)),))
    assert read(b"\1\0\2\0\3\0\4\0", "0", fixed).request.inputs["IN"].numpy().tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        ([], "Raw request must only have 1 input (found 1) to be deduced but got 0 inputs"),
        (
            [TensorSpec("IN", DType.BYTES, (-1,))],
            "For BYTE datatype raw input 'IN', the model must have input shape [1]",
        ),
        ([TensorSpec("IN", DType.FP32, (-1, -1))], "more than one variable-sized dimension"),
        ([TensorSpec("IN", DType.FP32, (-1,))], "raw input 'IN' has 5 bytes, expected a multiple of 4"),
    ],
)
def test_raw_bodies_that_cannot_be_tensors(inputs: list[TensorSpec], text: str) -> None:
    error = refused(b"abcde", "0", ModelConfig("m", None, inputs=tuple(inputs)))
    assert error.status.v2 == 400
    assert error.message.startswith("[request id: <id_unknown>] ")
    assert text in error.message


@settings(deadline=None, max_examples=60)
@given(st.data(), st.sampled_from(KINDS), st.booleans(), st.booleans())
def test_round_trip_through_tritonclient(data: st.DataObject, dtype: DType, binary_in: bool, binary_out: bool) -> None:
    shape = data.draw(hnp.array_shapes(max_dims=3, min_side=0, max_side=3))
    array = data.draw(hnp.arrays(dtype.numpy, shape))
    if dtype is DType.FP16:
        binary_in = binary_out = True
    given_input = InferInput("IN", list(shape), dtype.value)
    given_input.set_data_from_numpy(array, binary_data=binary_in)
    wanted = InferRequestedOutput("OUT", binary_data=binary_out)
    body, size = InferenceServerClient.generate_request_body([given_input], outputs=[wanted], request_id="r")
    asked = read(body, None if size is None else str(size))
    tensor = asked.request.inputs["IN"]
    assert (tensor.dtype, tensor.shape, asked.request.id) == (dtype, shape, "r")
    np.testing.assert_array_equal(tensor.numpy(), array)
    answer = InferResponse("m", "1", "r", [Tensor("OUT", tensor.dtype, tensor.shape, tensor.data)], {"p": 1})
    parts, head = json_codec.write(asked, answer, FLAT)
    result = InferenceServerClient.parse_response_body(b"".join(parts), header_length=head or None)
    assert result.get_response()["parameters"] == {"p": 1}
    np.testing.assert_array_equal(result.as_numpy("OUT").reshape(shape), array)


@settings(deadline=None, max_examples=80)
@given(st.binary(max_size=300), st.one_of(st.none(), st.integers(-2, 310).map(str)))
def test_any_bytes_are_a_request_or_a_tritium_error(body: bytes, length: str | None) -> None:
    with contextlib.suppress(TritiumError):
        read(body, length)


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None, max_examples=80)
@given(st.data())
def test_any_json_is_a_request_or_a_tritium_error(data: st.DataObject) -> None:
    keys = ["name", "datatype", "shape", "data", "parameters"]
    entry: dict[str, Any] = one("INT32", [1], [1])["inputs"][0] | data.draw(
        st.dictionaries(st.sampled_from(keys), JUNK)
    )
    body = {"inputs": [entry]} | data.draw(st.dictionaries(st.sampled_from(["id", "outputs", "parameters"]), JUNK))
    with contextlib.suppress(TritiumError):
        read(json.dumps(body).encode("utf-8", "surrogatepass"))


def test_answers_as_recorded() -> None:
    asked = read(one("INT8", [1], [1]))
    answer = InferResponse("m", "1", "", [Tensor.from_numpy("SUM", np.array([[11.0, 22.0]], dtype="f4"))])
    parts, size = json_codec.write(asked, answer, FLAT)
    output = b'{"name":"SUM","datatype":"FP32","shape":[1,2],"data":[11.0,22.0]}'
    text = b'{"model_name":"m","model_version":"1","outputs":[' + output + b"]}"
    assert (parts, size) == ([text], 0)


def test_an_answer_without_a_byte_behind_it_is_plain_json() -> None:
    asked = read(b"", "0", BATCHED)
    answer = InferResponse("m", "1", "", [Tensor("OUT", DType.FP32, (1, 0), memoryview(b""))])
    parts, size = json_codec.write(asked, answer, BATCHED)
    assert size == 0
    assert json.loads(parts[0])["outputs"][0] == {  # type: ignore[arg-type]
        **{"name": "OUT", "datatype": "FP32", "shape": [1, 0]},
        "parameters": {"binary_data_size": 0},
    }
