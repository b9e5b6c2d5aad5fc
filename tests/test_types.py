"""Tensors: typed buffers that survive every way in and out."""

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tritium.errors import TritiumError
from tritium.types import DType, Tensor

NUMERIC = [d for d in DType if d not in (DType.BYTES, DType.BF16)]


@given(st.sampled_from(NUMERIC).flatmap(lambda d: hnp.arrays(d.numpy, hnp.array_shapes(min_dims=0, min_side=0))))
def test_numbers_round_trip(array: np.ndarray) -> None:
    tensor = Tensor.from_numpy("x", array)
    assert tensor.dtype.numpy == array.dtype
    assert tensor.shape == array.shape
    assert tensor.data.nbytes == array.nbytes
    assert tensor.numpy().tobytes() == np.ascontiguousarray(array).tobytes()


def test_numpy_is_a_view() -> None:
    data = bytearray(np.arange(4, dtype=np.int32).tobytes())
    tensor = Tensor("x", DType.INT32, (2, 2), memoryview(data))
    data[0] = 9
    assert tensor.numpy()[0, 0] == 9


def test_bf16_is_carried_as_words() -> None:
    words = np.array([0x3F80, 0x4000], dtype=np.uint16)
    tensor = Tensor.from_numpy("x", words, DType.BF16)
    assert (tensor.dtype, tensor.data.tobytes()) == (DType.BF16, words.tobytes())


@given(st.lists(st.binary(max_size=20), max_size=6))
def test_bytes_round_trip(strings: list[bytes]) -> None:
    tensor = Tensor.from_strings("x", strings)
    assert tensor.strings() == strings
    assert tensor.numpy().tolist() == strings
    assert tensor.shape == (len(strings),)


def test_objects_become_bytes() -> None:
    tensor = Tensor.from_numpy("x", np.array([["a", b"b"]], dtype=object))
    assert (tensor.dtype, tensor.shape, tensor.strings()) == (DType.BYTES, (1, 2), [b"a", b"b"])


@pytest.mark.parametrize(
    ("data", "shape", "why"),
    [
        (b"\x01\x00", (1,), "cut off at byte 0"),
        (struct.pack("<I", 5) + b"abc", (1,), "5 bytes at byte 4 runs past the end at 7"),
        (struct.pack("<I", 2**32 - 1), (1,), "runs past the end"),
        (struct.pack("<I", 1) + b"a", (2,), "1 elements, expected 2"),
    ],
)
def test_malformed_bytes_are_refused(data: bytes, shape: tuple[int, ...], why: str) -> None:
    with pytest.raises(TritiumError, match=why):
        Tensor("x", DType.BYTES, shape, memoryview(data)).strings()


def test_a_wrong_size_is_refused() -> None:
    with pytest.raises(TritiumError, match=r"input 'x' has 3 bytes, expected 8 for shape \[2\] of FP32"):
        Tensor("x", DType.FP32, (2,), memoryview(b"abc")).numpy()


def test_types_by_name() -> None:
    assert DType.of("FP32") is DType.FP32
    assert (DType.FP32.size, DType.BYTES.size) == (4, None)
    with pytest.raises(TritiumError, match="datatype 'FLOAT' is unknown, expected one of BOOL"):
        DType.of("FLOAT")
