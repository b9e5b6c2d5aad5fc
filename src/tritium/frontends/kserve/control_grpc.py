"""The gRPC methods for shared memory, trace settings and log settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from google.protobuf.message import Message

from tritium.errors import invalid
from tritium.frontends.kserve.control import log_settings
from tritium.frontends.kserve.json_text import shown
from tritium.frontends.kserve.shared import Shared
from tritium.observability.log_settings import SWITCHES, Setting
from tritium.proto import service_pb2 as pb

if TYPE_CHECKING:
    from tritium.serving.server import Server

# Log setting -> field of its value.
_LOG_FIELDS: dict[str, str] = {
    **dict.fromkeys(SWITCHES, "bool_param"),
    "log_verbose_level": "uint32_param",
    "log_format": "string_param",
    "log_file": "string_param",
}


class ControlGrpc:
    """Those methods, each a request in and an answer out."""

    def __init__(self, server: Server, shared: Shared) -> None:
        self._server = server
        self._shared = shared

    async def system_status(self, request: Any) -> Message:
        """``SystemSharedMemoryStatus``."""
        answer = pb.SystemSharedMemoryStatusResponse()
        for region in self._shared.regions.status("system", request.name):
            entry = answer.regions[region.name]
            entry.name, entry.key, entry.offset, entry.byte_size = region.name, region.key, region.offset, region.size
        return answer

    async def system_register(self, request: Any) -> Message:
        """``SystemSharedMemoryRegister``."""
        self._shared.regions.register_system(request.name, request.key, request.offset, request.byte_size)
        return pb.SystemSharedMemoryRegisterResponse()

    async def system_unregister(self, request: Any) -> Message:
        """``SystemSharedMemoryUnregister``."""
        self._shared.regions.unregister("system", request.name)
        return pb.SystemSharedMemoryUnregisterResponse()

    async def cuda_status(self, request: Any) -> Message:
        """``CudaSharedMemoryStatus``."""
        answer = pb.CudaSharedMemoryStatusResponse()
        for region in self._shared.regions.status("cuda", request.name):
            entry = answer.regions[region.name]
            entry.name, entry.device_id, entry.byte_size = region.name, region.device, region.size
        return answer

    async def cuda_register(self, request: Any) -> Message:
        """``CudaSharedMemoryRegister``."""
        self._shared.regions.register_cuda(request.name, request.raw_handle, request.device_id, request.byte_size)
        return pb.CudaSharedMemoryRegisterResponse()

    async def cuda_unregister(self, request: Any) -> Message:
        """``CudaSharedMemoryUnregister``."""
        self._shared.regions.unregister("cuda", request.name)
        return pb.CudaSharedMemoryUnregisterResponse()

    async def trace(self, request: Any) -> Message:
        """``TraceSetting``."""
        name = request.model_name
        if name and not self._server.model_ready(name):
            raise invalid(f"Request for unknown model : {shown(name)}", param="model")
        changes = {key: list(request.settings[key].value) or None for key in request.settings}
        if changes:
            self._server.traces.update(changes, name)
        answer = pb.TraceSettingResponse()
        for key, values in self._server.traces.settings(name).items():
            answer.settings[key].value.extend(values)
        return answer

    async def log(self, request: Any) -> Message:
        """``LogSettings``."""
        logs = log_settings(self._shared)
        changes: dict[str, Setting] = {}
        for key in request.settings:
            if key in _LOG_FIELDS:
                field = _LOG_FIELDS[key]
                if request.settings[key].WhichOneof("parameter_choice") != field:
                    raise invalid(f"invalid value type for '{key}', expected {field}.", param=key)
                changes[key] = getattr(request.settings[key], field)
        logs.update(changes)
        answer = pb.LogSettingsResponse()
        for key, value in logs.as_dict().items():
            setattr(answer.settings[key], _LOG_FIELDS[key], value)
        return answer
