"""The scheduling part of a ModelConfig message: batchers, ensembles, warm-up, and what the server makes of a batch."""

from __future__ import annotations

from collections.abc import Iterable
from types import MappingProxyType
from typing import Any, Literal

from tritium.backends.config import (
    BatchInput,
    BatchOutput,
    Control,
    Direct,
    DynamicBatching,
    Ensemble,
    InitialState,
    Oldest,
    QueuePolicy,
    SequenceBatching,
    StateSpec,
    Step,
    WarmupInput,
    WarmupSample,
)
from tritium.errors import invalid
from tritium.types import DType

# Triton's own default, which it writes into the configuration.
DEFAULT_IDLE_US = 1_000_000
# Default of ``max_candidate_sequences``.
DEFAULT_CANDIDATES = 1

_KINDS: dict[str, Literal["start", "end", "ready", "corrid"]] = {
    "CONTROL_SEQUENCE_START": "start",
    "CONTROL_SEQUENCE_END": "end",
    "CONTROL_SEQUENCE_READY": "ready",
    "CONTROL_SEQUENCE_CORRID": "corrid",
}


def dtype_of(message: Any, where: str) -> DType:
    """The type in a message's ``data_type``.

    Raises:
        TritiumError: INVALID_ARGUMENT when it is not set; ``where`` names the message.
    """
    name = enum_name(message, "data_type").removeprefix("TYPE_")
    if name == "INVALID":
        raise invalid(f"{where} has no data_type, expected one such as TYPE_INT32", param="data_type")
    return DType.BYTES if name == "STRING" else DType(name)


def enum_name(message: Any, field: str) -> str:
    """The name of the value that an enumeration field has."""
    return message.DESCRIPTOR.fields_by_name[field].enum_type.values_by_number[getattr(message, field)].name


def batching(source: Any) -> DynamicBatching | SequenceBatching | Ensemble | None:
    """The scheduling choice of a ModelConfig message, defaults filled in."""
    match source.WhichOneof("scheduling_choice"):
        case "dynamic_batching":
            return _dynamic(source.dynamic_batching, source.max_batch_size)
        case "sequence_batching":
            return _sequence(source.sequence_batching, source.max_batch_size)
        case "ensemble_scheduling":
            return _ensemble(source.ensemble_scheduling)
        case _:
            return None


def warmup(source: Any) -> tuple[WarmupSample, ...]:
    """The warm-up samples of a ModelConfig message."""
    return tuple(
        WarmupSample(
            name=sample.name,
            batch_size=sample.batch_size,
            count=sample.count or 1,
            inputs=tuple(_warmup_input(sample.name, name, one) for name, one in sorted(sample.inputs.items())),
        )
        for sample in source.model_warmup
    )


def batch_inputs(source: Any) -> tuple[BatchInput, ...]:
    """The ``batch_input`` fields of a ModelConfig message."""
    found: list[BatchInput] = []
    for message in source.batch_input:
        kind = enum_name(message, "kind")
        target = _only(message.target_name, "batch_input", "target_name")
        dtype = dtype_of(message, f"batch_input '{target}'")
        if dtype not in (DType.INT32, DType.FP32):
            raise invalid(f"batch_input '{target}' has type {dtype.value}, expected INT32 or FP32", param="batch_input")
        found.append(BatchInput(kind, target, dtype, _only(message.source_input, "batch_input", "source_input")))
    return tuple(found)


def batch_outputs(source: Any) -> tuple[BatchOutput, ...]:
    """The ``batch_output`` fields of a ModelConfig message."""
    return tuple(
        BatchOutput(target, _only(message.source_input, "batch_output", "source_input"))
        for message in source.batch_output
        for target in message.target_name
    )


def _only(names: Iterable[str], field: str, part: str) -> str:
    found = list(names)
    if len(found) != 1:
        raise invalid(f"{field} has {len(found)} values in {part}, expected one", param=field)
    return found[0]


def default_preferred(preferred: Iterable[int], max_batch_size: int) -> tuple[int, ...]:
    """The preferred sizes; without any, the full batch."""
    return tuple(preferred) or ((max_batch_size,) if max_batch_size > 0 else ())


def _dynamic(message: Any, max_batch_size: int) -> DynamicBatching:
    return DynamicBatching(
        preferred=default_preferred(message.preferred_batch_size, max_batch_size),
        delay_us=message.max_queue_delay_microseconds,
        levels=message.priority_levels,
        default_level=message.default_priority_level,
        policy=_policy(message.default_queue_policy),
        level_policies=MappingProxyType(
            {level: _policy(policy) for level, policy in sorted(message.priority_queue_policy.items())}
        ),
        preserve_order=message.preserve_ordering,
    )


def _policy(message: Any) -> QueuePolicy:
    return QueuePolicy(
        timeout_us=message.default_timeout_microseconds,
        allow_override=message.allow_timeout_override,
        max_size=message.max_queue_size,
        delay=enum_name(message, "timeout_action") == "DELAY",
    )


def _sequence(message: Any, max_batch_size: int) -> SequenceBatching:
    strategy: Direct | Oldest
    if message.WhichOneof("strategy_choice") == "oldest":
        strategy = Oldest(
            candidates=message.oldest.max_candidate_sequences or DEFAULT_CANDIDATES,
            preferred=default_preferred(message.oldest.preferred_batch_size, max_batch_size),
            delay_us=message.oldest.max_queue_delay_microseconds,
            preserve_order=message.oldest.preserve_ordering,
        )
    else:
        strategy = Direct(message.direct.max_queue_delay_microseconds, message.direct.minimum_slot_utilization)
    return SequenceBatching(
        strategy=strategy,
        idle_us=message.max_sequence_idle_microseconds or DEFAULT_IDLE_US,
        controls=tuple(_control(one.name, control) for one in message.control_input for control in one.control),
        states=tuple(_state(state) for state in message.state),
        iterative=message.iterative_sequence,
    )


def _control(name: str, message: Any) -> Control:
    kind = _KINDS[enum_name(message, "kind")]
    where = f"control_input '{name}'"
    if kind == "corrid":
        return Control(kind, name, dtype_of(message, where))
    given: list[tuple[DType, list[Any]]] = [
        (dtype, list(values))
        for dtype, values in (
            (DType.INT32, message.int32_false_true),
            (DType.FP32, message.fp32_false_true),
            (DType.BOOL, message.bool_false_true),
        )
        if values
    ]
    if len(given) != 1 or len(given[0][1]) != 2:
        raise invalid(
            f"{where} has {[values for _, values in given]} as its values for false and true, expected one of "
            "int32_false_true, fp32_false_true and bool_false_true, with two values",
            param="control_input",
        )
    dtype, (no, yes) = given[0]
    return Control(kind, name, dtype, (no, yes))


def _state(message: Any) -> StateSpec:
    where = f"state '{message.input_name}'"
    return StateSpec(
        input=message.input_name,
        output=message.output_name,
        dtype=dtype_of(message, where),
        dims=tuple(message.dims),
        initial=tuple(
            InitialState(
                one.name, dtype_of(one, f"initial_state '{one.name}' of {where}"), tuple(one.dims), one.data_file
            )
            for one in message.initial_state
        ),
    )


def _ensemble(message: Any) -> Ensemble:
    return Ensemble(
        steps=tuple(
            Step(
                model=step.model_name,
                version=step.model_version or -1,
                inputs=MappingProxyType(dict(step.input_map)),
                outputs=MappingProxyType(dict(step.output_map)),
            )
            for step in message.step
        ),
        max_inflight=message.max_inflight_requests,
    )


def _warmup_input(sample: str, name: str, message: Any) -> WarmupInput:
    where = f"model_warmup '{sample}' input '{name}'"
    dtype, dims = dtype_of(message, where), tuple(message.dims)
    match message.WhichOneof("input_data_type"):
        case "zero_data":
            return WarmupInput(name, dtype, dims, "zero")
        case "random_data":
            return WarmupInput(name, dtype, dims, "random")
        case "input_data_file":
            return WarmupInput(name, dtype, dims, "file", message.input_data_file)
        case _:
            raise invalid(
                f"{where} has no data, expected one of zero_data, random_data, input_data_file", param="model_warmup"
            )
