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
        labels: names of the classes of an output, by index; the repository reads them (``label_filename``).
    """

    name: str
    dtype: DType
    dims: tuple[int, ...]
    optional: bool = False
    reshape: tuple[int, ...] | None = None
    ragged: bool = False
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Resource:
    """So many units of a named resource; a shared one is counted once for all devices."""

    name: str
    count: int
    shared: bool = False


@dataclass(frozen=True, slots=True)
class InstanceGroup:
    """Executing copies of the model on one kind of device.

    Attributes:
        count: copies per device.
        device: where they run; ``auto`` leaves the choice to the backend, ``model`` to the model's own files.
        gpus: indices of the devices; empty for all that there are.
        resources: what an execution holds while it runs, for the rate limiter.
        priority: weight of the rate limiter: an instance of priority 2 gets half the turns of one of priority 1;
            0 counts as 1.
    """

    name: str
    count: int = 1
    device: Literal["auto", "cpu", "gpu", "model"] = "auto"
    gpus: tuple[int, ...] = ()
    resources: tuple[Resource, ...] = ()
    priority: int = 0


@dataclass(frozen=True, slots=True)
class QueuePolicy:
    """How long and how many requests may wait.

    Attributes:
        timeout_us: longest wait in microseconds; 0 for no limit.
        allow_override: a request may shorten ``timeout_us``.
        max_size: most requests that wait; 0 for no limit.
        delay: after ``timeout_us`` the request yields to all of its level that are in time, and is answered some
            day; otherwise it ends with an error.
    """

    timeout_us: int = 0
    allow_override: bool = False
    max_size: int = 0
    delay: bool = False

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
        policy: of the queue, and of each level that has none of its own.
        level_policies: by level.
        preserve_order: answers leave in the order in which the requests came.
    """

    preferred: tuple[int, ...] = ()
    delay_us: int = 0
    levels: int = 0
    default_level: int = 0
    policy: QueuePolicy = QueuePolicy()
    level_policies: Mapping[int, QueuePolicy] = field(default_factory=dict[int, QueuePolicy])
    preserve_order: bool = False

    def level_of(self, priority: int) -> int:
        """The level of a request that asks for ``priority``; one out of range has the default. 0 without levels."""
        return priority if 1 <= priority <= self.levels else self.default_level

    def policy_of(self, level: int) -> QueuePolicy:
        """The policy of a level."""
        return self.level_policies.get(level, self.policy)


@dataclass(frozen=True, slots=True)
class Direct:
    """Each sequence has a place in the batch of an instance until it ends.

    Attributes:
        delay_us: longest wait of a request for others; counts only with ``min_utilization``.
        min_utilization: share of the places that makes a batch before the delay is over.
    """

    delay_us: int = 0
    min_utilization: float = 0.0


@dataclass(frozen=True, slots=True)
class Oldest:
    """The oldest requests of the sequences that an instance has taken on make its batch.

    Attributes:
        candidates: most sequences that an instance has taken on.
        preferred, delay_us, preserve_order: as in ``DynamicBatching``.
    """

    candidates: int = 1
    preferred: tuple[int, ...] = ()
    delay_us: int = 0
    preserve_order: bool = False


@dataclass(frozen=True, slots=True)
class Control:
    """An input by which the server tells a model about its sequence.

    Attributes:
        kind: what it tells.
        values: what stands for false and for true; without meaning for "corrid".
    """

    kind: Literal["start", "end", "ready", "corrid"]
    name: str
    dtype: DType
    values: tuple[float, float] = (0, 1)


@dataclass(frozen=True, slots=True)
class InitialState:
    """What a sequence's state begins with: zeros, or a file in the model's folder ``initial_state``."""

    name: str
    dtype: DType
    dims: tuple[int, ...]
    file: str = ""


@dataclass(frozen=True, slots=True)
class StateSpec:
    """A tensor that the server keeps between the requests of a sequence: an output that is the next input."""

    input: str
    output: str
    dtype: DType
    dims: tuple[int, ...]
    initial: tuple[InitialState, ...] = ()


@dataclass(frozen=True, slots=True)
class SequenceBatching:
    """Requests of one sequence go to one instance, in order, one at a time.

    Attributes:
        idle_us: a sequence without a request for that long is over, in microseconds.
        iterative: a request is run again and again until its model lets go of it.
    """

    strategy: Direct | Oldest = Direct()
    idle_us: int = 1_000_000
    controls: tuple[Control, ...] = ()
    states: tuple[StateSpec, ...] = ()
    iterative: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """One step of an ensemble.

    Attributes:
        version: of the model; -1 for what its policy decides.
        inputs: input of the model -> tensor of the ensemble.
        outputs: output of the model -> tensor of the ensemble.
    """

    model: str
    version: int
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Ensemble:
    """A graph of models; ``max_inflight`` limits the requests of a step for one request, 0 for no limit."""

    steps: tuple[Step, ...]
    max_inflight: int = 0


@dataclass(frozen=True, slots=True)
class WarmupInput:
    """One input of a warm-up sample: zeros, random values, or a file in the model's folder ``warmup``."""

    name: str
    dtype: DType
    dims: tuple[int, ...]
    source: Literal["zero", "random", "file"] = "zero"
    file: str = ""


@dataclass(frozen=True, slots=True)
class WarmupSample:
    """Requests that run before a model is ready.

    Attributes:
        batch_size: requests (of one inference each) that run together; 0 for a model without a batch dimension.
        count: how often.
    """

    name: str
    batch_size: int
    count: int
    inputs: tuple[WarmupInput, ...]


@dataclass(frozen=True, slots=True)
class BatchInput:
    """An input that the server makes from the shapes of another one across a batch.

    Attributes:
        kind: name of the ``BatchInput.Kind``, such as BATCH_ELEMENT_COUNT.
        target: name of the input that is made.
        source: name of the input whose elements are counted.
    """

    kind: str
    target: str
    dtype: DType
    source: str


@dataclass(frozen=True, slots=True)
class BatchOutput:
    """An output of a whole batch that is cut into answers by the shapes of an input."""

    target: str
    source: str


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
        batching: how requests are put together; None for one request an execution.
        response_cache: answers may come from the response cache.
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
    batching: DynamicBatching | SequenceBatching | Ensemble | None = None
    instances: tuple[InstanceGroup, ...] = ()
    versions: Latest | All | Specific = Latest()
    decoupled: bool = False
    parameters: Mapping[str, str] = field(default_factory=dict[str, str])
    response_cache: bool = False
    warmup: tuple[WarmupSample, ...] = ()
    batch_inputs: tuple[BatchInput, ...] = ()
    batch_outputs: tuple[BatchOutput, ...] = ()

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
        ensemble = found.get("ensemble_scheduling")
        if ensemble is not None and not ensemble.get("max_inflight_requests"):
            # A field that is younger than the clients' idea of a configuration: shown only where it is used.
            ensemble.pop("max_inflight_requests", None)
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
