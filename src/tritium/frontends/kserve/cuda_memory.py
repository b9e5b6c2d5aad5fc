"""Memory of a GPU that another process shares, through the CUDA driver itself (no torch, no toolkit).

The calls are those of the driver API (docs.nvidia.com/cuda/cuda-driver-api): a handle is opened in the primary
context of its device, and bytes are copied between it and host memory.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from functools import cache
from typing import Any

from tritium.errors import TritiumError, invalid

HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1
_DRIVER = "libcuda.so.1"
_REFUSED = "failed to register shared memory region: invalid args"


class _Handle(ctypes.Structure):
    """``CUipcMemHandle``, which is passed by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


@cache
def _driver() -> Any:
    """The driver, initialised; None where there is none, or no device."""
    try:
        driver = ctypes.CDLL(_DRIVER)
    except OSError:
        return None
    driver.cuIpcOpenMemHandle_v2.argtypes = (ctypes.POINTER(ctypes.c_uint64), _Handle, ctypes.c_uint)
    driver.cuIpcCloseMemHandle.argtypes = (ctypes.c_uint64,)
    driver.cuMemcpyDtoH_v2.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t)
    driver.cuMemcpyHtoD_v2.argtypes = (ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t)
    driver.cuMemGetAddressRange_v2.argtypes = (
        ctypes.POINTER(ctypes.c_uint64),
        ctypes.POINTER(ctypes.c_size_t),
        ctypes.c_uint64,
    )
    return driver if driver.cuInit(0) == 0 else None


class CudaMemory:
    """An opened CUDA IPC handle.

    Args:
        handle: the 64 bytes of a ``cudaIpcMemHandle_t``.
        device: index of the GPU.
        size: how many bytes the client says that it has.

    Raises:
        TritiumError: INVALID_ARGUMENT when there is no GPU here, or the handle is not one of another process.
    """

    def __init__(self, handle: bytes, device: int, size: int) -> None:
        self._address = 0
        if len(handle) != HANDLE_BYTES:
            got = f"raw_handle has {len(handle)} bytes, expected {HANDLE_BYTES}"
            raise invalid(f"{_REFUSED}: {got}", param="raw_handle")
        driver = _driver()
        if driver is None:
            raise invalid(f"{_REFUSED}: this server has no CUDA device", param="device_id")
        self._driver = driver
        self._context = self._retain(device)
        self._enter()
        address = ctypes.c_uint64()
        opened = driver.cuIpcOpenMemHandle_v2(
            ctypes.byref(address), _Handle.from_buffer_copy(handle), _LAZY_PEER_ACCESS
        )
        if opened != 0:
            raise invalid(f"{_REFUSED}: the driver does not open the handle ({self._name(opened)})", param="raw_handle")
        self._address = address.value
        base, whole = ctypes.c_uint64(), ctypes.c_size_t()
        self._check(driver.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(whole), address), "look at")
        if size < 1 or address.value + size > base.value + whole.value:
            self.close()
            raise invalid(f"{_REFUSED}: byte_size is {size}, the memory has {whole.value} bytes", param="byte_size")

    def _retain(self, device: int) -> Any:
        number, context = ctypes.c_int(), ctypes.c_void_p()
        if self._driver.cuDeviceGet(ctypes.byref(number), device) != 0:
            raise invalid(f"{_REFUSED}: there is no GPU {device}", param="device_id")
        self._check(self._driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), number), "open")
        return context

    def _enter(self) -> None:
        """Makes the device's context that of this thread."""
        self._check(self._driver.cuCtxSetCurrent(self._context), "enter")

    def read(self, offset: int, size: int) -> memoryview:
        """A copy of these bytes in host memory."""
        data = bytearray(size)
        if size:
            self._enter()
            target = (ctypes.c_char * size).from_buffer(data)
            self._check(self._driver.cuMemcpyDtoH_v2(ctypes.addressof(target), self._address + offset, size), "read")
        return memoryview(data)

    def write(self, offset: int, data: memoryview) -> None:
        """Writes these bytes."""
        if data.nbytes:
            self._enter()
            source = (ctypes.c_char * data.nbytes).from_buffer_copy(data)
            self._check(
                self._driver.cuMemcpyHtoD_v2(self._address + offset, ctypes.addressof(source), data.nbytes), "write"
            )

    def close(self) -> None:
        """Lets go of it."""
        if self._address:
            self._enter()
            self._driver.cuIpcCloseMemHandle(self._address)
            self._address = 0

    def __del__(self) -> None:
        with suppress(TritiumError):  # the device is gone, and the memory with it
            self.close()

    def _check(self, result: int, doing: str) -> None:
        if result != 0:
            raise invalid(f"the CUDA driver cannot {doing} the shared memory ({self._name(result)})")

    def _name(self, result: int) -> str:
        text = ctypes.c_char_p()
        self._driver.cuGetErrorName(result, ctypes.byref(text))
        return (text.value or str(result).encode()).decode()
