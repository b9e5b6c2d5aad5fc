"""From ``config.pbtxt`` to ``ModelConfig`` and back: parse, check, complete, render.

The text is protobuf's text format of Triton's ModelConfig message. It may come from anywhere, so its size is
limited before it is parsed, and nesting without end is an error like any other.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import MappingProxyType
from typing import Any

from google.protobuf import json_format, text_format

from tritium.backends.config import (
    All,
    DynamicBatching,
    Ensemble,
    InstanceGroup,
    Latest,
    ModelConfig,
    Oldest,
    Resource,
    SequenceBatching,
    Specific,
    TensorSpec,
)
from tritium.errors import TritiumError, invalid
from tritium.proto import model_config_pb2 as pb
from tritium.serving import config_schedule as schedule
from tritium.serving.config_checks import DEVICE_KINDS, Device, check_config, refuse_unsupported
from tritium.types import DType

MAX_CONFIG_BYTES = 1 << 20
_DEVICES: dict[str, Device] = {kind: device for device, kind in DEVICE_KINDS.items()}


def read_limited(path: Path, shown: str) -> bytes:
    """The bytes of a small file.

    Args:
        shown: how error messages name it.

    Raises:
        TritiumError: INVALID_ARGUMENT when it is no regular file, cannot be read or exceeds 1 MiB.
    """
    try:
        if not path.is_file():
            raise invalid(f"{shown} is not a regular file")
        with path.open("rb") as file:
            content = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise invalid(f"{shown} cannot be read: {error.strerror}") from error
    if len(content) > MAX_CONFIG_BYTES:
        raise invalid(f"{shown} has more than {MAX_CONFIG_BYTES} bytes, expected at most that many")
    return content


def parse_text(content: bytes, shown: str) -> Any:
    """The ModelConfig message that a ``config.pbtxt`` spells.

    Raises:
        TritiumError: INVALID_ARGUMENT, ``<shown>:<line>:<column>: <what is wrong>``.
    """
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        before = content[: error.start]
        line, column = before.count(b"\n") + 1, error.start - (before.rfind(b"\n") + 1) + 1
        raise invalid(f"{shown}:{line}:{column}: byte 0x{content[error.start]:02x} is not UTF-8") from error
    try:
        return text_format.Parse(text, pb.ModelConfig())
    except text_format.ParseError as error:
        # The message begins with the place in a form of its own and may quote the whole file.
        place = f"{error.GetLine()}:{error.GetColumn()}"
        why = _short(str(error).removeprefix(f"{place} : "))
        raise invalid(f"{shown}:{place}: {why}") from error
    except RecursionError:
        raise invalid(f"{shown} is nested too deeply") from None


def parse_json(text: str, shown: str) -> Any:
    """The ModelConfig message that a JSON configuration of a load request spells.

    Raises:
        TritiumError: INVALID_ARGUMENT naming what is wrong.
    """
    if len(text) > MAX_CONFIG_BYTES:
        raise invalid(f"{shown} has {len(text)} characters, expected at most {MAX_CONFIG_BYTES}")
    try:
        return json_format.Parse(text, pb.ModelConfig())
    except json_format.ParseError as error:
        raise invalid(f"{shown}: {_short(str(error))}") from error
    except RecursionError:
        raise invalid(f"{shown} is nested too deeply") from None


def empty() -> Any:
    """The message of a model without a file."""
    return pb.ModelConfig()


def make_config(source: Any, name: str, shown: str = "config.pbtxt") -> ModelConfig:
    """Checks a message and completes what the server itself knows.

    Args:
        source: a ModelConfig message; left as it is.
        name: the model's folder, which is its name.
        shown: how error messages name the file.

    Raises:
        TritiumError: INVALID_ARGUMENT naming field, value and what was expected; UNIMPLEMENTED naming a field
            that the file sets and this server cannot honour.
    """
    try:
        if source.name not in ("", name):
            raise invalid(f"name is '{source.name}', expected '{name}', the name of the folder", param="name")
        refuse_unsupported(source)
        config = _from_message(source, name)
        check_config(config)
    except TritiumError as error:
        raise TritiumError(error.code, f"{shown}: {error.message}", param=error.param) from None
    return render(config)


def render(config: ModelConfig) -> ModelConfig:
    """The same configuration with ``source`` written anew from the attributes.

    What the message holds beyond them stays. Call it after a backend has completed a configuration.
    """
    message = pb.ModelConfig()
    message.CopyFrom(config.source)
    message.name, message.backend, message.platform = config.name, config.backend, config.platform
    message.max_batch_size = config.max_batch_size
    ensemble = isinstance(config.batching, Ensemble)
    if config.decoupled or ensemble or message.HasField("model_transaction_policy"):
        message.model_transaction_policy.decoupled = config.decoupled
    _write_tensors(message.input, config.inputs)
    _write_tensors(message.output, config.outputs)
    for spec, tensor in zip(config.inputs, message.input, strict=True):
        tensor.optional, tensor.allow_ragged_batch = spec.optional, spec.ragged
    _write_batching(message, config)
    _write_instances(message.instance_group, config.instances)
    if isinstance(config.versions, Latest):
        message.version_policy.latest.num_versions = config.versions.count
    # Triton writes these two defaults into every configuration.
    for pinned in ("input_pinned_memory", "output_pinned_memory"):
        if not ensemble and not message.optimization.HasField(pinned):
            getattr(message.optimization, pinned).enable = True
    return dataclasses.replace(config, source=message)


def _write_batching(message: Any, config: ModelConfig) -> None:
    """What a backend may have chosen, and the defaults that Triton shows."""
    match config.batching:
        case DynamicBatching() as batching:
            dynamic = message.dynamic_batching
            dynamic.SetInParent()
            preferred = schedule.default_preferred(batching.preferred, config.max_batch_size)
            dynamic.preferred_batch_size[:] = preferred
            dynamic.max_queue_delay_microseconds = batching.delay_us
        case SequenceBatching(strategy=Oldest() as oldest) as batching:
            message.sequence_batching.oldest.preferred_batch_size[:] = oldest.preferred
            message.sequence_batching.oldest.max_candidate_sequences = oldest.candidates
            message.sequence_batching.max_sequence_idle_microseconds = batching.idle_us
        case SequenceBatching() as batching:
            message.sequence_batching.direct.SetInParent()
            message.sequence_batching.max_sequence_idle_microseconds = batching.idle_us
        case _:
            pass


def _write_tensors(target: Any, specs: tuple[TensorSpec, ...]) -> None:
    """Makes the repeated field hold ``specs``; tensors that it held already keep their other fields."""
    before = list(target)
    kept: list[Any] = []
    for spec in specs:
        same = next((tensor for tensor in before if tensor.name == spec.name), None)
        if same is not None:
            before.remove(same)
        tensor = type(target.add())()
        if same is not None:
            tensor.CopyFrom(same)
        tensor.name, tensor.data_type, tensor.dims[:] = spec.name, _type_number(spec.dtype), spec.dims
        if spec.reshape is not None:
            tensor.reshape.SetInParent()
            tensor.reshape.shape[:] = spec.reshape
        kept.append(tensor)
    del target[:]
    target.extend(kept)


def _write_instances(target: Any, groups: tuple[InstanceGroup, ...]) -> None:
    del target[len(groups) :]
    for index, group in enumerate(groups):
        message = target[index] if index < len(target) else target.add()
        message.name, message.count = group.name, group.count
        message.kind = pb.ModelInstanceGroup.Kind.Value(DEVICE_KINDS[group.device])
        message.gpus[:] = group.gpus


def _from_message(source: Any, name: str) -> ModelConfig:
    return ModelConfig(
        name=name,
        source=source,
        backend=source.backend,
        platform=source.platform,
        max_batch_size=source.max_batch_size,
        inputs=tuple(_spec(tensor, "input") for tensor in source.input),
        outputs=tuple(_spec(tensor, "output") for tensor in source.output),
        batching=schedule.batching(source),
        instances=_instances(source, name),
        versions=_versions(source.version_policy),
        decoupled=source.model_transaction_policy.decoupled,
        parameters=MappingProxyType({key: value.string_value for key, value in source.parameters.items()}),
        response_cache=source.response_cache.enable,
        warmup=schedule.warmup(source),
        batch_inputs=schedule.batch_inputs(source),
        batch_outputs=schedule.batch_outputs(source),
    )


def _spec(tensor: Any, kind: str) -> TensorSpec:
    return TensorSpec(
        name=tensor.name,
        dtype=schedule.dtype_of(tensor, f"{kind} '{tensor.name}'"),
        dims=tuple(tensor.dims),
        optional=kind == "input" and tensor.optional,
        reshape=tuple(tensor.reshape.shape) if tensor.HasField("reshape") else None,
        ragged=kind == "input" and tensor.allow_ragged_batch,
    )


def _type_number(dtype: DType) -> int:
    return pb.DataType.Value("TYPE_STRING" if dtype is DType.BYTES else f"TYPE_{dtype.value}")


def _instances(source: Any, name: str) -> tuple[InstanceGroup, ...]:
    """The groups with the names and counts that Triton gives; without any, one instance of the model's name.

    An ensemble has no instances.
    """
    if source.HasField("ensemble_scheduling"):
        return ()
    if not source.instance_group:
        return (InstanceGroup(name=name),)
    return tuple(
        InstanceGroup(
            name=group.name or f"{name}_{index}",
            count=group.count or 1,
            device=_DEVICES[pb.ModelInstanceGroup.Kind.Name(group.kind)],
            gpus=tuple(group.gpus),
            resources=tuple(
                Resource(one.name, one.count, getattr(one, "global")) for one in group.rate_limiter.resources
            ),
            priority=group.rate_limiter.priority,
        )
        for index, group in enumerate(source.instance_group)
    )


def _versions(policy: Any) -> Latest | All | Specific:
    match policy.WhichOneof("policy_choice"):
        case "all":
            return All()
        case "specific":
            return Specific(tuple(sorted(set(policy.specific.versions))))
        case _:
            return Latest(policy.latest.num_versions or 1)


def _short(text: str, limit: int = 300) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."
