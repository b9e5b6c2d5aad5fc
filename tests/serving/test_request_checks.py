from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.serving.fakes import request
from tests.serving.test_config import made
from tritium.errors import TritiumError
from tritium.serving.request_checks import check_request
from tritium.types import DType, RequestedOutput, Tensor

ADD_SUB = made(
    """
    max_batch_size: 8
    input [ { name: "LEFT" data_type: TYPE_FP32 dims: 4 }, { name: "RIGHT" data_type: TYPE_FP32 dims: 4 } ]
    output { name: "SUM" data_type: TYPE_FP32 dims: 4 }
    """,
    "add_sub",
)
FLAT = made(
    'input { name: "IN" data_type: TYPE_INT32 dims: [2, -1] } output { name: "OUT" data_type: TYPE_FP32 dims: 1 }'
)
TEXT = made('input { name: "IN" data_type: TYPE_STRING dims: -1 }')
OPTIONAL = made(
    """
    input [ { name: "A" data_type: TYPE_FP32 dims: 2 }, { name: "B" data_type: TYPE_FP32 dims: 2 optional: true } ]
    """
)


def zeros(name: str, *shape: int, dtype: type = np.float32) -> Tensor:
    return Tensor.from_numpy(name, np.zeros(shape, dtype))


def told(config, *tensors: Tensor, outputs: tuple[str, ...] = (), id: str = "") -> str:
    made_up = request(config.name, id=id)
    made_up.inputs = {tensor.name: tensor for tensor in tensors}
    made_up.outputs = [RequestedOutput(name) for name in outputs]
    try:
        return str(check_request(config, made_up))
    except TritiumError as error:
        assert error.status.v2 == 400
        return error.message


def test_requests_that_fit():
    assert told(ADD_SUB, zeros("LEFT", 3, 4), zeros("RIGHT", 3, 4), outputs=("SUM", "SUM")) == "3"
    assert told(FLAT, zeros("IN", 2, 5, dtype=np.int32)) == "1"
    assert told(FLAT, zeros("IN", 2, 0, dtype=np.int32)) == "1"
    assert told(TEXT, Tensor.from_strings("IN", [b"a", b"", b"c" * 300])) == "1"
    assert told(OPTIONAL, zeros("A", 2)) == "1"


UNKNOWN = "[request id: <id_unknown>] "


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        (
            [zeros("LEFT", 1, 4)],
            UNKNOWN + "expected 2 inputs but got 1 inputs for model 'add_sub'. Got input(s) ['LEFT'], but missing "
            "required input(s) ['RIGHT']. Please provide all required input(s).",
        ),
        (
            [zeros("LEFT", 1, 4), zeros("RIGHT", 1, 4), zeros("MORE", 1, 4)],
            UNKNOWN + "expected 2 inputs but got 3 inputs for model 'add_sub'. Got input(s) ['MORE','RIGHT','LEFT'], "
            "but missing required input(s) ]. Please provide all required input(s).",
        ),
        ([zeros("LEFT", 1, 4), zeros("MORE", 1, 4)], "unexpected inference input 'MORE' for model 'add_sub'"),
        (
            [zeros("LEFT", 1, 4), zeros("RIGHT", 2, 4)],
            UNKNOWN + "input 'LEFT' batch size does not match other inputs for 'add_sub'",
        ),
        (
            [zeros("LEFT", 9, 4), zeros("RIGHT", 9, 4)],
            UNKNOWN + "inference request batch-size must be <= 8 for 'add_sub'",
        ),
        ([zeros("LEFT", 4), zeros("RIGHT", 1, 4)], UNKNOWN + "input 'LEFT' batch size does not match other inputs"),
        (
            [zeros("LEFT", 0, 4), zeros("RIGHT", 0, 4)],
            UNKNOWN + "input byte size mismatch for input 'RIGHT' for model 'add_sub'. Expected 16, got 0",
        ),
        (
            [Tensor("LEFT", DType.FP32, (-1, 4), memoryview(b"")), zeros("RIGHT", 1, 4)],
            UNKNOWN + "All input dimensions should be specified for input 'LEFT' for model 'add_sub', got [-1,4]",
        ),
        ([zeros("LEFT"), zeros("RIGHT", 1, 4)], UNKNOWN + "input 'LEFT' has no shape but model requires batch"),
        (
            [zeros("LEFT", 1, 4, dtype=np.int32), zeros("RIGHT", 1, 4)],
            UNKNOWN + "inference input 'LEFT' data-type is 'INT32', but model 'add_sub' expects 'FP32'",
        ),
        (
            [zeros("LEFT", 1, 3), zeros("RIGHT", 1, 4)],
            UNKNOWN + "unexpected shape for input 'LEFT' for model 'add_sub'. Expected [-1,4], got [1,3]. NOTE: ",
        ),
        ([zeros("LEFT", 1, 1, 4), zeros("RIGHT", 1, 4)], UNKNOWN + "unexpected shape for input 'LEFT'"),
        (
            [Tensor("LEFT", DType.FP32, (1, -1), memoryview(b"")), zeros("RIGHT", 1, 4)],
            UNKNOWN + "All input dimensions should be specified for input 'LEFT' for model 'add_sub', got [1,-1]",
        ),
        (
            [Tensor("LEFT", DType.FP32, (1, 4), memoryview(bytes(12))), zeros("RIGHT", 1, 4)],
            UNKNOWN + "input byte size mismatch for input 'LEFT' for model 'add_sub'. Expected 16, got 12",
        ),
    ],
)
def test_requests_that_do_not_fit(tensors: list[Tensor], words: str):
    assert told(ADD_SUB, *tensors).startswith(words)


def test_an_empty_batch_of_empty_rows():
    config = made('max_batch_size: 8 input { name: "IN" data_type: TYPE_FP32 dims: -1 }')
    assert told(config, zeros("IN", 0, 0)).endswith("batch size is 0 for model 'm', expected at least 1")
    assert "Expected 4, got 0" in told(config, zeros("IN", 0, 1))


def test_the_request_id_is_named():
    assert told(ADD_SUB, id="x1").startswith("[request id: x1] expected 2 inputs but got 0 inputs")


def test_without_a_batch_dimension_there_is_no_note():
    assert told(FLAT, zeros("IN", 3, 5, dtype=np.int32)).endswith("Expected [2,-1], got [3,5].")


def test_unknown_outputs():
    assert told(FLAT, outputs=("NOPE",)) == "unexpected inference output 'NOPE' for model 'm'"


def test_optional_inputs_are_counted():
    assert "expected number of inputs between 1 and 2 but got 0 inputs" in told(OPTIONAL)
    # Recorded (generate/missing_input): the number is right, so the backend must notice that A is not there.
    assert told(OPTIONAL, zeros("B", 2)) == "1"
    assert told(OPTIONAL, zeros("A", 2), zeros("C", 2)) == "unexpected inference input 'C' for model 'm'"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\1\0\0\0a\1\0\0\0b", "expected 3 string elements for inference input 'IN' for model 'm', got 2"),
        (b"\1\0\0", "a length of 4 bytes is cut off at byte 0"),
        (b"\xff\xff\xff\xffab", "an element of 4294967295 bytes at byte 4 runs past the end at 6"),
    ],
)
def test_strings_are_counted_and_bounded(data: bytes, words: str):
    assert words in told(TEXT, Tensor("IN", DType.BYTES, (3,), memoryview(data)))


@given(st.lists(st.integers(0, 1 << 63), max_size=5), st.binary(max_size=40), st.sampled_from(list(DType)))
@settings(max_examples=200, deadline=None)
def test_what_is_let_through_can_be_read(shape: list[int], data: bytes, dtype: DType):
    tensor = Tensor("IN", dtype, tuple(shape), memoryview(data))
    for config in (FLAT, TEXT):
        if told(config, tensor) == "1":
            assert tensor.numpy().shape == tuple(shape)
