"""What a ``config.pbtxt`` says, as frozen dataclasses; ``serving.config`` parses, checks and completes it.

They lie here because a backend reads and completes a configuration, and backends know nothing of serving.
The names follow the ModelConfig message of Triton (``model_config.proto``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.json_format import MessageToDict

from tritium.types import DType

# Written for "any size" in ``TensorSpec.dims``.
ANY = -1
_LONG = (FieldDescriptor.TYPE_INT64, FieldDescriptor.TYPE_UINT64)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One declared input or output.

    Attributes:
        dims: sizes without the batch dimension, -1 for any.
        optional: an input that a request may leave out.
        reshape: the shape that the backend sees instead of ``dims``; None when it is the same.
        ragged: requests of different shapes may share a batch.
    """

    name: str
    dtype: DType
    dims: tuple[int, ...]
    optional: bool = False
    reshape: tuple[int, ...] | None = None
    ragged: bool = False


@dataclass(frozen=True, slots=True)
class InstanceGroup:
    """Executing copies of the model on one kind of device.

    Attributes:
        count: copies per device.
        device: where they run; ``auto`` leaves the choice to the backend, ``model`` to the model's own files.
        gpus: indices of the devices; empty for all that there are.
    """

    name: str
    count: int = 1
    device: Literal["auto", "cpu", "gpu", "model"] = "auto"
    gpus: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class QueuePolicy:
    """How long and how many requests may wait.

    Attributes:
        timeout_us: longest wait in microseconds, after which the request ends with an error; 0 for no limit.
        allow_override: a request may shorten ``timeout_us``.
        max_size: most requests that wait; 0 for no limit.
    """

    timeout_us: int = 0
    allow_override: bool = False
    max_size: int = 0

    def wait_us(self, asked_us: int) -> int:
        """The longest wait of a request that asks for ``asked_us`` (0: nothing asked); it can only shorten it."""
        if self.allow_override and asked_us > 0 and (not self.timeout_us or asked_us < self.timeout_us):
            return asked_us
        return self.timeout_us


@dataclass(frozen=True, slots=True)
class DynamicBatching:
    """How requests are put together.

    Attributes:
        preferred: batch sizes that are worth waiting for.
        delay_us: longest wait for more requests, in microseconds.
        levels: number of priority levels; 0 when there are none. Level 1 is the highest.
        default_level: level of requests that name none; 0 without levels.
        policy: of the queue.
    """

    preferred: tuple[int, ...] = ()
    delay_us: int = 0
    levels: int = 0
    default_level: int = 0
    policy: QueuePolicy = QueuePolicy()


@dataclass(frozen=True, slots=True)
class Latest:
    """Serve the highest ``count`` versions."""

    count: int = 1


@dataclass(frozen=True, slots=True)
class All:
    """Serve every version that there is."""


@dataclass(frozen=True, slots=True)
class Specific:
    """Serve exactly these versions."""

    versions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The configuration of one model, checked and completed.

    Attributes:
        backend: a name in ``backends.BACKENDS``; ``platform`` is the older spelling and counts when it is empty.
        max_batch_size: 0 when the first dimension is not a batch.
        batching: None without a batcher.
        decoupled: a request may have no answer or many.
        parameters: the ``parameters`` map of the file, texts as they stand there.
        source: the ModelConfig message that all this was read from. Fields that have no attribute here
            are kept in it, so that nothing is lost on the way back to a client.
    """

    name: str
    source: Any = field(repr=False, compare=False)
    backend: str = ""
    platform: str = ""
    max_batch_size: int = 0
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    batching: DynamicBatching | None = None
    instances: tuple[InstanceGroup, ...] = ()
    versions: Latest | All | Specific = Latest()
    decoupled: bool = False
    parameters: Mapping[str, str] = field(default_factory=dict[str, str])

    def input(self, name: str) -> TensorSpec | None:
        """The declared input of that name."""
        return next((spec for spec in self.inputs if spec.name == name), None)

    def output(self, name: str) -> TensorSpec | None:
        """The declared output of that name."""
        return next((spec for spec in self.outputs if spec.name == name), None)

    def to_json(self) -> dict[str, Any]:
        """The form of ``GET /v2/models/<model>/config``: names as in the file, defaults written out."""
        found = MessageToDict(self.source, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
        _numbers(self.source.DESCRIPTOR, found)
        return found


def _numbers(descriptor: Any, found: dict[str, Any]) -> None:
    """Turns 64-bit integers, texts in protobuf's JSON, into numbers as Triton does.

    It leaves those of ``initial_state`` as they are, and so does this.
    """
    for name, value in found.items():
        many = isinstance(value, list)
        values = cast(list[Any], value if many else [value])
        field_type = descriptor.fields_by_name[name]
        message = field_type.message_type
        if message is None:
            if field_type.type in _LONG:
                found[name] = [int(x) for x in values] if many else int(value)
        elif message.GetOptions().map_entry:
            inner = message.fields_by_name["value"].message_type
            for entry in value.values() if inner is not None else ():
                _numbers(inner, entry)
        elif name != "initial_state":
            for entry in values:
                _numbers(message, entry)
