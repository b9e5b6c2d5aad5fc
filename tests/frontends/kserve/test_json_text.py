from __future__ import annotations

import json
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tritium.errors import Code, TritiumError
from tritium.frontends.kserve import json_text
from tritium.types import DType, Tensor


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", "The document is empty. at 0"),
        (b"  ", "The document is empty. at 0"),
        (b"{", "Missing a name for object member. at 1"),
        (b'{"inputs": [{"name":', "Invalid value. at 20"),
        (b"{} tail", "The document root must not be followed by other values. at 3"),
        (b'{"a" 1}', "Missing a colon after a name of object member. at 5"),
        (b"[1 2]", "Missing a comma or ] after an array element. at 3"),
        (b'{"a":1 "b":2}', "Missing a comma or } after an object member. at 7"),
        (b"1e400", "Number too big to be stored in double. at 0"),
        (b'["\\ud800"]', "The surrogate pair in string is invalid. at 2"),
        (b'["\xff"]', "Invalid encoding in string. at 0"),
        (b'[NaN, "\\ud800"]', "Invalid value. at 1"),
        (b"[NaN, 1e999]", "Invalid value. at 1"),
        (b'{"a":' * 2000, "Nested too deeply."),
    ],
)
def test_malformed_in_rapidjsons_words(body: bytes, why: str) -> None:
    with pytest.raises(TritiumError) as caught:
        json_text.parse(body)
    assert caught.value.code is Code.INTERNAL
    assert caught.value.message.startswith(f"failed to parse the request JSON buffer: {why}")


def test_what_orjson_refuses_and_triton_takes() -> None:
    found = json_text.parse(b"[NaN, Infinity, -Infinity, 1e3, 99999999999999999999, 3]")
    assert str(found) == "[nan, inf, -inf, 1000.0, 1e+20, 3]"
    deep = b'{"data":[' + b"[" * 3000 + b'1 , "[[" ,[2 ]' + b"]" * 3000 + b',3],"shape":[1,2]}'
    assert json_text.parse(deep) == {"data": [1, "[[", 2, 3], "shape": [1, 2]}


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 250_000,
        b"[" * 2000 + b'\\"' * 200_000,
        b"[" * 2000 + b'"' + b'\\"' * 200_000,
        (b"[" * 3000 + b"]" * 3000 + b",") * 100,
        b"1" * 100_000,
        b'[NaN, "' + b"\\u0041" * 100_000,
    ],
)
def test_hostile_text_costs_little(body: bytes) -> None:
    start = time.perf_counter()
    with pytest.raises(TritiumError):
        json_text.parse(body)
    assert time.perf_counter() - start < 1.0


@given(st.binary(max_size=200))
def test_any_bytes_are_a_value_or_a_tritium_error(body: bytes) -> None:
    try:
        json_text.parse(body)
    except TritiumError as error:
        assert error.code is Code.INTERNAL


@given(st.lists(st.text(), max_size=8))
def test_texts_come_back(texts: list[str]) -> None:
    texts = [t for t in texts if t.encode("utf-8", "replace").decode() == t]
    tensor = Tensor.from_strings("T", [t.encode() for t in texts])
    assert json.loads(json_text.elements(tensor)) == texts


@given(st.lists(st.floats(width=32), max_size=8))
def test_floats_come_back_as_the_double_of_the_same_value(values: list[float]) -> None:
    tensor = Tensor.from_numpy("T", np.array(values, dtype=np.float32))
    found = json.loads(json_text.elements(tensor))
    np.testing.assert_array_equal(np.array(found, dtype=np.float64), np.array(values, dtype=np.float64))


def test_forms_of_elements() -> None:
    def text(array: list[object], kind: str) -> bytes:
        return json_text.elements(Tensor.from_numpy("T", np.array(array, dtype=kind)))

    assert text([0.1, 1.0, 3.4028234663852886e38], "f4")[:24] == b"[0.10000000149011612,1.0"
    assert text([float("nan"), float("inf"), -float("inf")], "f8") == b"[NaN,Infinity,-Infinity]"
    assert text([True, False], "?") == b"[true,false]"
    assert text([-9223372036854775808], "i8") == b"[-9223372036854775808]"
    assert text([], "i4") == b"[]"
    # Not UTF-8: as it is, controls escaped as rapidjson does.
    raw = Tensor.from_strings("T", [b'\xff\xfe\x00a"\\\n', b"ok"])
    assert json_text.elements(raw) == b'["\xff\xfe\\u0000a\\"\\\\\\n","ok"]'


def test_elements_that_lie_askew_in_memory() -> None:
    data = memoryview(b"x" + np.arange(4, dtype=np.int64).tobytes())[1:]
    assert json_text.elements(Tensor("T", DType.INT64, (4,), data)) == b"[0,1,2,3]"


@pytest.mark.parametrize("dtype", [DType.FP16, DType.BF16])
def test_halves_are_refused(dtype: DType) -> None:
    with pytest.raises(TritiumError, match=f"sending {dtype.value} data via JSON is not supported"):
        json_text.elements(Tensor("T", dtype, (1,), memoryview(b"\0\0")))


def test_a_long_text_is_cut_in_messages() -> None:
    assert json_text.shown("x" * 1000) == "x" * 100 + "..."
