from __future__ import annotations

import contextlib
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.frontends.kserve.test_json_codec import JUNK
from tritium.backends.config import ModelConfig, TensorSpec
from tritium.errors import Code, TritiumError
from tritium.frontends.kserve import generate
from tritium.types import DType, InferResponse, Tensor

INPUTS = (
    TensorSpec("PROMPT", DType.BYTES, (1,)),
    TensorSpec("TIMES", DType.INT32, (1,), optional=True),
    TensorSpec("GRID", DType.FP32, (-1, 2), optional=True),
    TensorSpec("HALF", DType.FP16, (-1,), optional=True),
)
BATCHED = ModelConfig("m", None, inputs=INPUTS, max_batch_size=4)
FLAT = ModelConfig("m", None, inputs=INPUTS)


def read(body: Any, config: ModelConfig = BATCHED) -> Any:
    return generate.read(body if isinstance(body, bytes) else json.dumps(body).encode(), config, "m", "1", 5)


def test_keys_become_inputs_or_parameters() -> None:
    request = read(
        {
            "PROMPT": "hi",
            "id": "g1",
            "top": 3,
            "parameters": {"TIMES": [2], "temperature": 0.5, "name": "x", "on": True},
        }
    )
    assert request.id == "g1"
    assert request.inputs["PROMPT"].shape == (1, 1)
    assert request.inputs["TIMES"].numpy().tolist() == [[2]]
    assert request.parameters == {"id": "g1", "top": 3, "temperature": 0.5, "name": "x", "on": True}


def test_open_dimensions_are_filled_from_the_last() -> None:
    assert read({"GRID": [1, 2, 3, 4]}).inputs["GRID"].shape == (1, 2, 2)
    assert read({"GRID": [[1, 2], [3, 4]]}, FLAT).inputs["GRID"].shape == (2, 2)
    assert read({"PROMPT": ["a", "b"]}).inputs["PROMPT"].shape == (2, 1)


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        (b"", 500, "failed to parse the request JSON buffer: The document is empty. at 0"),
        (b"{", 500, "failed to parse the request JSON buffer: Missing a name for object member. at 1"),
        ([], 500, "attempt to get members for non-object"),
        (7, 500, "attempt to get members for non-object"),
        ({"id": 3}, 500, "Unable to parse 'id': attempt to access JSON non-string as string"),
        ({"PROMPT": 3}, 500, "Unable to parse JSON bytes array: attempt to access JSON non-string as string"),
        ({"PROMPT": None}, 500, "Unable to parse JSON bytes array: attempt to access JSON non-string as string"),
        ({"TIMES": 1.5}, 500, "Unable to parse 'data': attempt to access JSON non-signed-integer as signed-integer"),
        ({"GRID": [1, 2, 3]}, 400, "The schema can not convert input 'GRID' to tensor with proper shape"),
        ({"HALF": 1}, 400, "receiving FP16 data via JSON is not supported"),
        ({"mine": [1]}, 400, "parameter 'mine' has invalid type"),
        ({"parameters": 5}, 500, "Expected JSON object for keyword: 'parameters'"),
        ({"PROMPT": "a", "parameters": {"PROMPT": "b"}}, 400, "[request id: <id_unknown>] input 'PROMPT' already"),
        ({"parameters": {str(i): i for i in range(2000)}}, 400, "the request has 2000 parameters"),
    ],
)
def test_refusals(body: Any, status: int, text: str) -> None:
    with pytest.raises(TritiumError) as caught:
        read(body)
    assert (caught.value.status.v2, caught.value.message[: len(text)]) == (status, text)


@settings(deadline=None, max_examples=80)
@given(st.dictionaries(st.sampled_from(["PROMPT", "TIMES", "GRID", "HALF", "id", "parameters", "x"]), JUNK))
def test_any_json_is_a_request_or_a_tritium_error(body: dict[str, Any]) -> None:
    with contextlib.suppress(TritiumError):
        read(json.dumps(body).encode("utf-8", "surrogatepass"))


def test_answers() -> None:
    outputs = [
        Tensor.from_strings("TEXT", [b"w 0"]),
        Tensor.from_numpy("LIST", np.array([0.5, 1.5], dtype="f4")),
        Tensor.from_numpy("NONE", np.array([], dtype="i4")),
    ]
    answer = InferResponse("m", "1", "g", outputs, {"sequence_id": 0})
    assert json.loads(generate.write(answer)) == {
        **{"id": "g", "model_name": "m", "model_version": "1", "sequence_id": 0},
        **{"TEXT": "w 0", "LIST": [0.5, 1.5], "NONE": []},
    }
    assert generate.write(InferResponse("m", "1", "")) == b'{"model_name":"m","model_version":"1"}'
    error = TritiumError(Code.UNKNOWN, "no")
    with pytest.raises(TritiumError, match="no"):
        generate.write(InferResponse("m", "1", "", error=error))
    assert generate.write_error(error) == b'{"error":"no"}'
