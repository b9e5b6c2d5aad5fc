"""``pb_utils.Tensor``: a name over a numpy array, over received bytes or over another library's tensor."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tritium.backends import pb_dlpack
from tritium.backends.pb_types import DATATYPES, TritonModelException
from tritium.types import DType
from tritium.types import Tensor as TypedTensor

_DTYPES: dict[np.dtype[Any], DType] = {dtype.numpy: dtype for dtype in DType if dtype not in (DType.BF16, DType.BYTES)}


class Tensor:
    """An input or output of a model.

    Args:
        numpy_array: arrays of objects or bytes become strings.

    Raises:
        TritonModelException: the type of the array has no counterpart.
    """

    __slots__ = ("__weakref__", "_array", "_dtype", "_foreign", "_name", "_received", "_shape")

    def __init__(self, name: str, numpy_array: npt.NDArray[Any]) -> None:
        dtype = _DTYPES.get(numpy_array.dtype)
        if dtype is None:
            if numpy_array.dtype.kind in "OS":
                dtype = DType.BYTES
            elif not numpy_array.dtype.isnative and numpy_array.dtype.newbyteorder("=") in _DTYPES:
                numpy_array = numpy_array.astype(numpy_array.dtype.newbyteorder("="))
                dtype = _DTYPES[numpy_array.dtype]
            else:
                raise TritonModelException(
                    f"Tensor dtype used for numpy_array ({numpy_array.dtype}) is not support by Python backend. "
                    "Please use np.object_ instead."
                )
        self._name = name
        self._dtype = dtype
        self._array: npt.NDArray[Any] | None = numpy_array
        self._shape: tuple[int, ...] = numpy_array.shape
        self._received: TypedTensor | None = None
        self._foreign: Any = None

    @classmethod
    def received(cls, tensor: TypedTensor) -> Tensor:
        """A tensor of a request or of an answer; its bytes are looked at when somebody asks."""
        made = cls.__new__(cls)
        made._name, made._dtype, made._shape = tensor.name, tensor.dtype, tensor.shape
        made._array, made._received, made._foreign = None, tensor, None
        return made

    def name(self) -> str:
        """Its name."""
        return self._name

    def shape(self) -> list[int]:
        """Sizes of the dimensions."""
        return list(self._shape)

    def triton_dtype(self) -> int:
        """Its number in TRITONSERVER_DataType."""
        return DATATYPES.index(self._dtype.value) + 1

    def is_cpu(self) -> bool:
        """Whether it lies in memory of the CPU."""
        return self._foreign is None

    def as_numpy(self) -> npt.NDArray[Any]:
        """The array, writable, without a copy; strings are an array of bytes objects.

        Raises:
            TritonModelException: it lies on a GPU, or is BF16, which numpy does not know.
        """
        if self._foreign is not None:
            raise TritonModelException("Tensor is stored in GPU and cannot be converted to NumPy.")
        if self._dtype is DType.BF16:
            raise TritonModelException(
                f"tensor '{self._name}' is BF16, which NumPy does not have; use to_dlpack or from_dlpack"
            )
        return self._words()

    def _words(self) -> npt.NDArray[Any]:
        """The array; BF16 as 16-bit words."""
        if self._array is None:
            assert self._received is not None
            self._array = self._received.numpy()
        return self._array

    def typed(self) -> TypedTensor:
        """The server's form of it, strings packed; copied only when it is not contiguous or lies elsewhere."""
        if self._foreign is not None:
            array, dtype = pb_dlpack.take(_fetched(self._foreign).__dlpack__())
            return TypedTensor.from_numpy(self._name, array, dtype)
        # An array that was asked for may have been written to. Strings are objects: that copy is another.
        if self._received is not None and (self._array is None or self._dtype is not DType.BYTES):
            received = self._received
            return TypedTensor(self._name, received.dtype, received.shape, received.data)
        return TypedTensor.from_numpy(self._name, self._words(), self._dtype)

    @staticmethod
    def from_dlpack(name: str, tensor: Any) -> Tensor:
        """A tensor over one of another library, or over a DLPack capsule.

        Raises:
            TritonModelException: it has no DLPack form, or one that has no counterpart.
        """
        made = Tensor.__new__(Tensor)
        made._name, made._received, made._foreign = name, None, None
        if hasattr(tensor, "__dlpack_device__") and int(tensor.__dlpack_device__()[0]) not in (pb_dlpack.CPU, 3):
            made._foreign, made._array = tensor, None
            made._dtype, made._shape = _foreign_type(tensor), tuple(tensor.shape)
            return made
        try:
            made._array, made._dtype = pb_dlpack.take(tensor.__dlpack__() if hasattr(tensor, "__dlpack__") else tensor)
        except ValueError as error:
            raise TritonModelException(f"tensor '{name}': {error}") from None
        made._shape = made._array.shape
        return made

    def to_dlpack(self) -> Any:
        """A DLPack capsule; taking it does not copy.

        Raises:
            TritonModelException: strings have no DLPack form.
        """
        return self.__dlpack__()

    def __dlpack__(self, *, stream: Any = None, **_: Any) -> Any:
        if self._foreign is not None:
            return self._foreign.__dlpack__() if stream is None else self._foreign.__dlpack__(stream=stream)
        if self._dtype is DType.BYTES:
            raise TritonModelException("DLPack does not have support for string tensors.")
        return pb_dlpack.give(np.ascontiguousarray(self._words()).reshape(self._shape), self._dtype)

    def __dlpack_device__(self) -> tuple[int, int]:
        if self._foreign is not None:
            return self._foreign.__dlpack_device__()
        return (pb_dlpack.CPU, 0)


def _foreign_type(tensor: Any) -> DType:
    """The type of a tensor of torch, cupy and others, by the name that they give it."""
    names = {"bool": "BOOL", "bfloat16": "BF16", "float16": "FP16", "float32": "FP32", "float64": "FP64"}
    name = str(tensor.dtype).rpartition(".")[2]
    return DType.of(names.get(name, name.upper()))


def _fetched(tensor: Any) -> Any:
    """A copy on the CPU, made by the library that the tensor is of (torch: cpu, cupy: get)."""
    for method in ("cpu", "get"):
        if hasattr(tensor, method):
            return getattr(tensor, method)()
    raise TritonModelException(f"a {type(tensor).__name__} on a GPU cannot be brought to the CPU: it has no cpu()")


def serialize_byte_tensor(input_tensor: npt.NDArray[Any]) -> bytes:
    """The strings of an array, each behind its length of 4 bytes, in row-major order."""
    return bytes(TypedTensor.from_numpy("", input_tensor, DType.BYTES).data)


def deserialize_bytes_tensor(encoded_tensor: bytes) -> npt.NDArray[Any]:
    """The strings of ``serialize_byte_tensor``, in one dimension."""
    view, at, found = memoryview(encoded_tensor), 0, list[bytes]()
    while at < len(view):
        end = at + 4 + int.from_bytes(view[at : at + 4], "little")
        found.append(bytes(view[at + 4 : end]))
        at = end
    array = np.empty(len(found), dtype=np.object_)
    array[:] = found
    return array
