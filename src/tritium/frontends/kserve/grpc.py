"""The KServe v2 service over gRPC, with Triton's extensions: each method is parse, call, render."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
from google.protobuf import json_format
from google.protobuf.message import DecodeError, Message

from tritium.backends.config import ModelConfig
from tritium.errors import Code, TritiumError, invalid
from tritium.frontends.access import Api, grpc_refusal
from tritium.frontends.kserve import pb_codec
from tritium.frontends.kserve.control_grpc import ControlGrpc
from tritium.frontends.kserve.json_text import shown
from tritium.frontends.kserve.shared import Shared, forwarded
from tritium.frontends.kserve.short_grpc import ShortGrpc
from tritium.frontends.kserve.statistics import as_json
from tritium.frontends.kserve.status import status_of
from tritium.frontends.kserve.stream import InferStream, accompany
from tritium.observability import logs
from tritium.proto import service_pb2 as pb

if TYPE_CHECKING:
    from tritium.serving.server import Server

_log = logs.get(__name__)

SERVICE: str = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name
_STATUS = {status.value[0]: status for status in grpc.StatusCode}

Context = grpc.aio.ServicerContext[Any, Any]


class KserveGrpc:
    """The methods of ``inference.GRPCInferenceService``.

    Args:
        shared: what both protocols share.
        max_in_flight: requests of one ModelStreamInfer call that run at the same time.
        max_in_flight_bytes: what the messages of those may have in all.
        write_timeout_s: how long a client may read none of its answers before the call is given up.
    """

    def __init__(
        self,
        server: Server,
        shared: Shared | None = None,
        *,
        max_in_flight: int = 256,
        max_in_flight_bytes: int = 64 << 20,
        write_timeout_s: float = 60.0,
    ) -> None:
        self._server = server
        self._shared = shared or Shared()
        self._control = ControlGrpc(server, self._shared)
        self._max_in_flight = max_in_flight
        self._max_in_flight_bytes = max_in_flight_bytes
        self._write_timeout_s = write_timeout_s

    def handlers(self) -> grpc.GenericRpcHandler:
        """What a gRPC server registers."""
        control = self._control
        plain: dict[str, tuple[Any, Callable[[Any], Awaitable[Message]], Api]] = {
            "ServerLive": (pb.ServerLiveRequest, self._server_live, "health"),
            "ServerReady": (pb.ServerReadyRequest, self._server_ready, "health"),
            "ModelReady": (pb.ModelReadyRequest, self._model_ready, "health"),
            "ServerMetadata": (pb.ServerMetadataRequest, self._server_metadata, "metadata"),
            "ModelMetadata": (pb.ModelMetadataRequest, self._model_metadata, "metadata"),
            "ModelConfig": (pb.ModelConfigRequest, self._model_config, "model-config"),
            "ModelStatistics": (pb.ModelStatisticsRequest, self._statistics, "statistics"),
            "RepositoryIndex": (pb.RepositoryIndexRequest, self._index, "model-repository"),
            "RepositoryModelLoad": (pb.RepositoryModelLoadRequest, self._load, "model-repository"),
            "RepositoryModelUnload": (pb.RepositoryModelUnloadRequest, self._unload, "model-repository"),
            "SystemSharedMemoryStatus": (pb.SystemSharedMemoryStatusRequest, control.system_status, "shared-memory"),
            "SystemSharedMemoryRegister": (
                pb.SystemSharedMemoryRegisterRequest,
                control.system_register,
                "shared-memory",
            ),
            "SystemSharedMemoryUnregister": (
                pb.SystemSharedMemoryUnregisterRequest,
                control.system_unregister,
                "shared-memory",
            ),
            "CudaSharedMemoryStatus": (pb.CudaSharedMemoryStatusRequest, control.cuda_status, "shared-memory"),
            "CudaSharedMemoryRegister": (pb.CudaSharedMemoryRegisterRequest, control.cuda_register, "shared-memory"),
            "CudaSharedMemoryUnregister": (
                pb.CudaSharedMemoryUnregisterRequest,
                control.cuda_unregister,
                "shared-memory",
            ),
            "TraceSetting": (pb.TraceSettingRequest, control.trace, "trace"),
            "LogSettings": (pb.LogSettingsRequest, control.log, "logging"),
        }
        methods: dict[str, Any] = {name: self._unary(*method) for name, method in plain.items()}
        methods |= {
            # These two take and give encoded messages, so that tensors are not copied (see pb_codec).
            "ModelInfer": grpc.unary_unary_rpc_method_handler(self._infer),
            "ModelStreamInfer": grpc.stream_stream_rpc_method_handler(self._stream_infer),
        }
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    def quick(self) -> dict[str, ShortGrpc]:
        """Methods that need no task, by path, for a server that can do without."""
        return {f"/{SERVICE}/ModelInfer": ShortGrpc(self._server, self._shared)}

    def _unary(self, kind: Any, method: Callable[[Any], Awaitable[Message]], api: Api) -> Any:
        """A handler of one message in and one out; errors of all kinds become a status."""

        async def handle(message: bytes, context: Context) -> bytes:
            try:
                self._admit(api, context)
                return (await method(kind.FromString(message))).SerializeToString()
            except DecodeError as error:
                await abort(context, TritiumError(Code.INTERNAL, f"the request is not a {kind.__name__}: {error}"))
            except TritiumError as error:
                await abort(context, error)
            except Exception as error:
                await abort(context, _unexpected(error))

        return grpc.unary_unary_rpc_method_handler(handle)

    def _admit(self, api: Api, context: Context) -> None:
        """Refuses a call that lacks the metadata that its API wants."""
        if self._shared.grpc_access:
            given = dict(context.invocation_metadata() or ())
            missing = self._shared.grpc_access.refusal(api, given.get)
            if missing is not None:
                raise grpc_refusal(missing)

    def _forwarded(self, context: Context) -> dict[str, str]:
        """The metadata that becomes parameters of a request."""
        if self._shared.grpc_headers is None:
            return {}
        given = context.invocation_metadata() or ()
        return forwarded(self._shared.grpc_headers, ((k, v) for k, v in given if isinstance(v, str)))

    async def _server_live(self, request: Any) -> Message:
        return pb.ServerLiveResponse(live=self._server.live())

    async def _server_ready(self, request: Any) -> Message:
        return pb.ServerReadyResponse(ready=self._server.ready())

    async def _model_ready(self, request: Any) -> Message:
        return pb.ModelReadyResponse(ready=await self._server.model_healthy(request.name, request.version))

    async def _server_metadata(self, request: Any) -> Message:
        metadata = self._server.server_metadata()
        return pb.ServerMetadataResponse(
            name=metadata.name, version=metadata.version, extensions=list(metadata.extensions)
        )

    async def _model_metadata(self, request: Any) -> Message:
        metadata = self._server.model_metadata(request.name, request.version)
        kind = pb.ModelMetadataResponse.TensorMetadata
        return pb.ModelMetadataResponse(
            name=metadata.name,
            versions=list(metadata.versions),
            platform=metadata.platform,
            inputs=[kind(name=t.name, datatype=t.datatype, shape=t.shape) for t in metadata.inputs],
            outputs=[kind(name=t.name, datatype=t.datatype, shape=t.shape) for t in metadata.outputs],
        )

    async def _model_config(self, request: Any) -> Message:
        return pb.ModelConfigResponse(config=self._server.model_config(request.name, request.version).source)

    async def _statistics(self, request: Any) -> Message:
        found = self._server.statistics(request.name, request.version)
        stats = [json_format.ParseDict(as_json(one), pb.ModelStatistics()) for one in found]
        return pb.ModelStatisticsResponse(model_stats=stats)

    async def _index(self, request: Any) -> Message:
        kind = pb.RepositoryIndexResponse.ModelIndex
        found = self._server.index(request.ready)
        models = [kind(name=e.name, version=e.version, state=e.state, reason=e.reason) for e in found]
        return pb.RepositoryIndexResponse(models=models)

    async def _load(self, request: Any) -> Message:
        config: str | None = None
        files: dict[str, bytes] = {}
        for key in request.parameters:
            value = request.parameters[key]
            choice = value.WhichOneof("parameter_choice")
            if key == "config":
                if choice != "string_param":
                    raise invalid("invalid value type for 'config' parameter, expected string_param.", param=key)
                config = value.string_param
            elif key.startswith("file:"):
                if choice != "bytes_param":
                    raise invalid(f"invalid value type for '{shown(key)}' parameter, expected bytes_param.", param=key)
                files[key.removeprefix("file:")] = value.bytes_param
            else:
                raise invalid(f"unrecognized request parameter '{shown(key)}'", param=key)
        await self._server.load(request.model_name, config, files or None)
        return pb.RepositoryModelLoadResponse()

    async def _unload(self, request: Any) -> Message:
        dependents = False
        if "unload_dependents" in request.parameters:
            value = request.parameters["unload_dependents"]
            if value.WhichOneof("parameter_choice") != "bool_param":
                raise invalid("invalid value type for 'unload_dependents' parameter, expected bool_param.")
            dependents = value.bool_param
        await self._server.unload(request.model_name, dependents)
        return pb.RepositoryModelUnloadResponse()

    async def _infer(self, message: bytes, context: Context) -> bytes:
        arrived_ns = monotonic_ns()
        try:
            self._admit("inference", context)
            parsed = pb_codec.parse(message)
            config = self._model(parsed.fields.model_name, parsed.fields.model_version)
            asked = pb_codec.read(parsed, arrived_ns, self._shared.regions)
            del message, parsed
            asked.request.parameters |= self._forwarded(context)
            with accompany(self._server, asked.request, context.invocation_metadata() or ()) as trace:
                response = await self._server.infer(asked.request)
                if response.error is not None:
                    raise response.error
                if trace is not None:
                    trace.stamp("GRPC_SEND_START")
                return pb_codec.write(response, asked.request, config)
        except TritiumError as error:
            await abort(context, error)
        except Exception as error:
            await abort(context, _unexpected(error))

    def _model(self, name: str, version: str) -> ModelConfig:
        """The configuration of a model that may be asked for exactly one answer."""
        config = self._server.model_config(name, version)
        # A language model answers once where no stream is asked for, whatever its file says.
        if config.decoupled and not self._server.answers_once(name, version):
            raise TritiumError(
                Code.UNIMPLEMENTED, "ModelInfer RPC doesn't support models with decoupled transaction policy"
            )
        return config

    async def _stream_infer(self, messages: AsyncIterator[bytes], context: Context) -> None:
        metadata = context.invocation_metadata() or ()
        try:
            self._admit("inference", context)
        except TritiumError as error:
            await abort(context, error)
        strict = any(key == "triton_grpc_error" and value == "true" for key, value in metadata)
        stream = InferStream(
            self._server,
            strict=strict,
            max_in_flight=self._max_in_flight,
            max_in_flight_bytes=self._max_in_flight_bytes,
            regions=self._shared.regions,
            parameters=self._forwarded(context),
            metadata=metadata,
        )
        try:
            async with aclosing(stream.answers(messages)) as answers:
                async for answer in answers:
                    async with asyncio.timeout(self._write_timeout_s):
                        await context.write(answer)
        except TritiumError as error:
            await abort(context, error)
        except TimeoutError:
            why = f"the client read no answer for {self._write_timeout_s:g} s"
            await abort(context, TritiumError(Code.RESOURCE_EXHAUSTED, why))
        except Exception as error:
            await abort(context, _unexpected(error))


async def abort(context: Context, error: TritiumError) -> NoReturn:
    """Ends the call with the status of an error."""
    status, message, trailing = status_of(error)
    await context.abort(_STATUS[status], message, trailing)


def _unexpected(error: Exception) -> TritiumError:
    """An error that is none of ours: logged, and told to nobody else."""
    _log.error("request failed", error=error, exc_info=error)
    return TritiumError(Code.INTERNAL, "internal error")
