from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.serving.executors import config_of, request
from tritium.errors import Code, TritiumError
from tritium.serving import batch
from tritium.types import InferRequest, InferResponse, RequestedOutput, Tensor

PLAIN = """
backend: "x" max_batch_size: 8
input { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] }
input { name: "WORD" data_type: TYPE_STRING dims: [ 1 ] optional: true }
output { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] }
"""
RAGGED = """
backend: "x" max_batch_size: 8
input { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] allow_ragged_batch: true }
output { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] }
batch_output { target_name: "OUT" kind: BATCH_SCATTER_WITH_INPUT_SHAPE source_input: "IN" }
"""
KINDS = (
    "BATCH_ELEMENT_COUNT",
    "BATCH_ACCUMULATED_ELEMENT_COUNT",
    "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO",
    "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE",
    "BATCH_ITEM_SHAPE",
    "BATCH_ITEM_SHAPE_FLATTEN",
)


def words(*texts: str) -> Tensor:
    return Tensor.from_strings("WORD", [t.encode() for t in texts], (len(texts), 1))


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.integers(0, 3))
def test_join_and_split_are_inverse(rows: list[int], width: int):
    config = config_of(PLAIN)
    requests = [request(n, width) for n in rows]
    for number, one in enumerate(requests):
        one.inputs["WORD"] = words(*(f"{number}:{i}" * i for i in range(rows[number])))
    joined = batch.join(config, requests, rows)
    assert joined.inputs["IN"].shape == (sum(rows), width)
    assert joined.inputs["WORD"].shape == (sum(rows), 1)
    response = InferResponse("", "", "", list(joined.inputs.values()), {"a": 1})
    for one, part in zip(requests, batch.split(config, response, requests, rows), strict=True):
        for tensor in part.outputs:
            assert tensor.shape == one.inputs[tensor.name].shape
            assert bytes(tensor.data) == bytes(one.inputs[tensor.name].data)
        assert part.parameters == {"a": 1}


def test_a_single_request_is_not_copied():
    one = request(3)
    assert batch.join(config_of(PLAIN), [one], [3]) is one


def test_each_request_gets_the_outputs_that_it_asked_for():
    config = config_of(PLAIN)
    asked = [request(1), request(1, outputs=[RequestedOutput("OUT")]), request(1, outputs=[RequestedOutput("B")])]
    assert batch.join(config, asked, [1, 1, 1]).outputs == []
    assert [output.name for output in batch.join(config, asked[1:], [1, 1]).outputs] == ["OUT", "B"]
    answer = InferResponse("", "", "", [Tensor.from_numpy(name, np.zeros((3, 1))) for name in ("OUT", "B")])
    found = batch.split(config, answer, asked, [1, 1, 1])
    assert [[tensor.name for tensor in one.outputs] for one in found] == [["OUT", "B"], ["OUT"], ["B"]]


def test_an_answer_without_a_batch_dimension_stays_whole():
    config = config_of(PLAIN.replace("max_batch_size: 8", "max_batch_size: 0"))
    answer = InferResponse("", "", "", [Tensor.from_numpy("OUT", np.zeros((5, 2)))])
    assert batch.split(config, answer, [request(2)], [1]) == [answer]


def test_ragged_inputs_lie_flat_and_outputs_are_scattered():
    config = config_of(RAGGED)
    requests, rows = [request(1, 3), request(2, 1), request(1, 0)], [1, 2, 1]
    joined = batch.join(config, requests, rows)
    assert joined.inputs["IN"].shape == (5,)
    out = Tensor("OUT", joined.inputs["IN"].dtype, (5,), joined.inputs["IN"].data)
    parts = batch.split(config, InferResponse("", "", "", [out]), requests, rows)
    assert [part.outputs[0].shape for part in parts] == [(1, 3), (2, 1), (1, 0)]
    assert [part.outputs[0].numpy().tolist() for part in parts] == [[[0, 1, 2]], [[0], [1]], [[]]]


def test_an_error_is_the_answer_to_all():
    response = InferResponse("", "", "", error=TritiumError(Code.INTERNAL, "no"))
    parts = batch.split(config_of(PLAIN), response, [request(), request()], [1, 1])
    assert [part.error for part in parts] == [response.error] * 2
    assert parts[0] is not parts[1]


@pytest.mark.parametrize(("text", "shape"), [(PLAIN, (3, 1)), (PLAIN, ()), (RAGGED, (2, 1))])
def test_an_output_without_the_rows_of_the_batch_is_an_error(text: str, shape: tuple[int, ...]):
    out = Tensor.from_numpy("OUT", np.zeros(shape, np.float32))
    with pytest.raises(TritiumError, match="output 'OUT' of model 'm' has"):
        batch.split(config_of(text), InferResponse("", "", "", [out]), [request(), request()], [1, 1])


def test_strings_that_end_early_are_an_error():
    broken = Tensor("WORD", words("a").dtype, (2, 1), words("a").data)
    with pytest.raises(TritiumError, match="ends before its last element"):
        batch.split(config_of(PLAIN), InferResponse("", "", "", [broken]), [request(), request()], [1, 1])


def test_which_requests_may_share_a_batch():
    same = batch.shape_rule(config_of(PLAIN))
    assert same(request(1, 2)) == same(request(3, 2))
    assert same(request(1, 2)) != same(request(1, 3))
    with_word = request(1, 2)
    with_word.inputs["WORD"] = words("a")
    assert same(request(1, 2)) != same(with_word)
    ragged = batch.shape_rule(config_of(RAGGED))
    assert ragged(request(1, 2)) == ragged(request(1, 3))


def made(kind: str) -> tuple[list[InferRequest], InferRequest]:
    config = config_of(
        RAGGED + f'batch_input {{ kind: {kind} target_name: "MADE" data_type: TYPE_INT32 source_input: "IN" }}'
    )
    rows = [1, 2, 1]
    parts = batch.add_inputs(config, [request(1, 3), request(2, 2), request(1, 0)], rows)
    return parts, batch.join(config, parts, rows)


@pytest.mark.parametrize(
    ("kind", "parts", "joined"),
    [
        (KINDS[0], [[3], [4], [0]], [3, 4, 0]),
        (KINDS[1], [[3], [7], [7]], [3, 7, 7]),
        (KINDS[2], [[0, 3], [7], [7]], [0, 3, 7, 7]),
        (KINDS[3], [[0] * 4] * 3, [0] * 4),
        (KINDS[4], [[[3]], [[2], [2]], [[0]]], [[3], [2], [2], [0]]),
        (KINDS[5], [[3], [2, 2], [0]], [3, 2, 2, 0]),
    ],
)
def test_inputs_that_are_made_from_shapes(kind: str, parts: list[object], joined: list[object]):
    requests, whole = made(kind)
    assert [one.inputs["MADE"].numpy().tolist() for one in requests] == parts
    assert whole.inputs["MADE"].numpy().tolist() == joined


def test_reshape_there_and_back():
    config = config_of(
        """
        backend: "x" max_batch_size: 4
        input { name: "IN" data_type: TYPE_FP32 dims: [ 4 ] reshape { shape: [ 2, 2 ] } }
        input { name: "ONE" data_type: TYPE_FP32 dims: [ 1 ] reshape { shape: [ ] } optional: true }
        output { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] reshape { shape: [ -1, 1 ] } }
        output { name: "RAW" data_type: TYPE_FP32 dims: [ 1 ] }
        """
    )
    seen = batch.reshape_inputs(config, request(3, 4))
    assert seen.inputs["IN"].shape == (3, 2, 2)
    one = request(3, 4)
    one.inputs["ONE"] = Tensor.from_numpy("ONE", np.zeros((3, 1), np.float32))
    assert batch.reshape_inputs(config, one).inputs["ONE"].shape == (3,)
    out = Tensor.from_numpy("OUT", np.zeros((3, 5, 1), np.float32))
    raw = Tensor.from_numpy("RAW", np.zeros((3, 1), np.float32))
    response = InferResponse("", "", "", [out, raw])
    batch.reshape_outputs(config, response)
    assert [tensor.shape for tensor in response.outputs] == [(3, 5), (3, 1)]
