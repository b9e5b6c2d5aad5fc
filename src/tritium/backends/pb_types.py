"""The constants, codes and errors of ``triton_python_backend_utils``."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np

from tritium.errors import Code, TritiumError

TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = 2
TRITONSERVER_REQUEST_RELEASE_ALL = 1
TRITONSERVER_REQUEST_RELEASE_RESCHEDULE = 2

TRITON_STRING_TO_NUMPY: dict[str, Any] = {
    "TYPE_BOOL": bool,
    "TYPE_UINT8": np.uint8,
    "TYPE_UINT16": np.uint16,
    "TYPE_UINT32": np.uint32,
    "TYPE_UINT64": np.uint64,
    "TYPE_INT8": np.int8,
    "TYPE_INT16": np.int16,
    "TYPE_INT32": np.int32,
    "TYPE_INT64": np.int64,
    "TYPE_FP16": np.float16,
    "TYPE_FP32": np.float32,
    "TYPE_FP64": np.float64,
    "TYPE_STRING": np.object_,
}
# Numbers of TRITONSERVER_DataType, in its order.
_NUMBERS: tuple[Any, ...] = (
    *(np.bool_, np.uint8, np.uint16, np.uint32, np.uint64, np.int8, np.int16, np.int32, np.int64),
    *(np.float16, np.float32, np.float64, np.object_),
)
DATATYPES = (
    *("BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64"),
    *("FP16", "FP32", "FP64", "BYTES", "BF16"),
)


def triton_string_to_numpy(triton_type_string: str) -> Any:
    """The numpy type of ``TYPE_FP32`` and the like.

    Raises:
        KeyError: there is none; numpy has no BF16.
    """
    return TRITON_STRING_TO_NUMPY[triton_type_string]


def triton_to_numpy_type(data_type: int) -> Any:
    """The numpy type of a number of TRITONSERVER_DataType; None when there is none."""
    return _NUMBERS[data_type - 1] if 1 <= data_type <= len(_NUMBERS) else None


def numpy_to_triton_type(data_type: Any) -> int | None:
    """The number in TRITONSERVER_DataType of a numpy type; None when there is none."""
    wanted = np.dtype(data_type)
    if wanted.kind == "S":
        wanted = np.dtype(np.object_)
    return next((at for at, known in enumerate(_NUMBERS, 1) if wanted == np.dtype(known)), None)


class TritonModelException(Exception):
    """What a model raises, and what is raised to it."""


class ErrorCode(IntEnum):
    """TRITONSERVER_Error_Code."""

    UNKNOWN = 0
    INTERNAL = 1
    NOT_FOUND = 2
    INVALID_ARG = 3
    UNAVAILABLE = 4
    UNSUPPORTED = 5
    ALREADY_EXISTS = 6
    CANCELLED = 7


_CODES: dict[int, Code] = {
    ErrorCode.UNKNOWN: Code.UNKNOWN,
    ErrorCode.INTERNAL: Code.INTERNAL,
    ErrorCode.NOT_FOUND: Code.NOT_FOUND,
    ErrorCode.INVALID_ARG: Code.INVALID_ARGUMENT,
    ErrorCode.UNAVAILABLE: Code.UNAVAILABLE,
    ErrorCode.UNSUPPORTED: Code.UNIMPLEMENTED,
    ErrorCode.ALREADY_EXISTS: Code.ALREADY_EXISTS,
    ErrorCode.CANCELLED: Code.CANCELLED,
}
_BACK = {code: ErrorCode(number) for number, code in _CODES.items()} | {
    Code.DEADLINE_EXCEEDED: ErrorCode.UNAVAILABLE,
    Code.RESOURCE_EXHAUSTED: ErrorCode.UNAVAILABLE,
    Code.PERMISSION_DENIED: ErrorCode.UNAVAILABLE,
}


class TritonError:
    """An error that a response carries.

    Args:
        message: what went wrong.
        code: one of the constants of this class.
    """

    UNKNOWN = ErrorCode.UNKNOWN
    INTERNAL = ErrorCode.INTERNAL
    NOT_FOUND = ErrorCode.NOT_FOUND
    INVALID_ARG = ErrorCode.INVALID_ARG
    UNAVAILABLE = ErrorCode.UNAVAILABLE
    UNSUPPORTED = ErrorCode.UNSUPPORTED
    ALREADY_EXISTS = ErrorCode.ALREADY_EXISTS
    CANCELLED = ErrorCode.CANCELLED

    def __init__(self, message: str, code: int = ErrorCode.INTERNAL) -> None:
        if code not in _CODES:
            raise TritonModelException(f"code of TritonError is {code!r}, expected one of its constants")
        self._message = str(message)
        self._code = ErrorCode(code)

    def code(self) -> ErrorCode:
        """What kind of error."""
        return self._code

    def message(self) -> str:
        """What went wrong."""
        return self._message

    def __str__(self) -> str:
        return self._message


def to_tritium(error: TritonError) -> TritiumError:
    """The error as the server knows it."""
    return TritiumError(_CODES[error.code()], error.message())


def from_tritium(error: TritiumError) -> TritonError:
    """The server's error as a model knows it."""
    return TritonError(error.message, _BACK.get(error.code, ErrorCode.INTERNAL))
