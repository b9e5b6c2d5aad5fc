"""DLPack: tensors of other libraries without a copy, by the C structures of https://dmlc.github.io/dlpack.

numpy's own functions know no BF16 and no read-only memory, so the structures are read and written here.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt

from tritium.types import DType

CPU = 1
# Pinned memory is memory of the CPU.
_READABLE = (CPU, 3)
_NAME, _USED = b"dltensor", b"used_dltensor"
_CODES: dict[DType, tuple[int, int]] = {
    DType.BOOL: (6, 8),
    DType.UINT8: (1, 8),
    DType.UINT16: (1, 16),
    DType.UINT32: (1, 32),
    DType.UINT64: (1, 64),
    DType.INT8: (0, 8),
    DType.INT16: (0, 16),
    DType.INT32: (0, 32),
    DType.INT64: (0, 64),
    DType.FP16: (2, 16),
    DType.FP32: (2, 32),
    DType.FP64: (2, 64),
    DType.BF16: (4, 16),
}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}


class _Device(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int32), ("index", ctypes.c_int32))


class _DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


def _function(name: str, result: Any, *arguments: Any) -> Any:
    return ctypes.PYFUNCTYPE(result, *arguments)((name, ctypes.pythonapi))


_new = _function("PyCapsule_New", ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_is_valid = _function("PyCapsule_IsValid", ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)
_pointer = _function("PyCapsule_GetPointer", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)
_rename = _function("PyCapsule_SetName", ctypes.c_int, ctypes.py_object, ctypes.c_char_p)

# Structures that were handed out, until whoever took them gives them back.
_out: dict[int, tuple[Any, ...]] = {}


@_Deleter
def _forget(address: int) -> None:
    _out.pop(address, None)


@_Deleter
def _unused(capsule: int) -> None:
    # The destructor of a capsule that nobody took.
    if _is_valid(capsule, _NAME):
        _out.pop(_pointer(capsule, _NAME), None)


def give(array: npt.NDArray[Any], dtype: DType) -> Any:
    """A capsule over contiguous memory; the array lives until the taker is through.

    Raises:
        ValueError: BYTES have no DLPack form.
    """
    if dtype is DType.BYTES:
        raise ValueError("DLPack does not have support for string tensors.")
    shape = (ctypes.c_int64 * max(1, array.ndim))(*array.shape)
    code, bits = _CODES[dtype]
    tensor = _Tensor(array.ctypes.data, _Device(CPU, 0), array.ndim, _DataType(code, bits, 1), shape, None, 0)
    managed = _Managed(tensor, None, ctypes.cast(_forget, ctypes.c_void_p))
    address = ctypes.addressof(managed)
    _out[address] = (managed, shape, array)
    return _new(address, _NAME, ctypes.cast(_unused, ctypes.c_void_p))


def take(capsule: Any) -> tuple[npt.NDArray[Any], DType]:
    """The tensor of a capsule, BF16 as 16-bit words; a copy only when it is not contiguous.

    Raises:
        ValueError: it is no such capsule, was taken already, lies on another device or has a type without a name.
    """
    if type(capsule).__name__ != "PyCapsule" or not _is_valid(id(capsule), _NAME):
        raise ValueError("expected a DLPack capsule that was not used yet")
    address = _pointer(id(capsule), _NAME)
    managed = _Managed.from_address(address)
    tensor = managed.tensor
    dtype = _DTYPES.get((tensor.dtype.code, tensor.dtype.bits))
    if dtype is None or tensor.dtype.lanes != 1:
        raise ValueError(f"DLPack type (code {tensor.dtype.code}, {tensor.dtype.bits} bits) is not supported")
    if tensor.device.kind not in _READABLE:
        raise ValueError(f"tensor lies on a device of kind {tensor.device.kind}, expected the CPU")
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    item = dtype.numpy.itemsize
    dense = tuple(int(np.prod(shape[i + 1 :])) for i in range(len(shape)))
    strides = tuple(tensor.strides[i] for i in range(tensor.ndim)) if tensor.strides else dense
    reach = 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    if reach < 0 or any(s < 0 for s in strides):
        raise ValueError(f"DLPack strides are {list(strides)}, expected none below 0")
    _rename(capsule, _USED)
    if reach:
        memory = (ctypes.c_ubyte * (reach * item)).from_address(tensor.data + tensor.byte_offset)
        flat: npt.NDArray[Any] = np.frombuffer(memoryview(memory), dtype.numpy)
    else:
        flat = np.empty(0, dtype.numpy)
    if managed.deleter:
        weakref.finalize(flat, _Deleter(managed.deleter), address)
    if not reach:
        return flat.reshape(shape), dtype
    view = np.lib.stride_tricks.as_strided(flat, shape, tuple(s * item for s in strides))
    return np.ascontiguousarray(view).reshape(shape) if strides != dense else flat.reshape(shape), dtype
