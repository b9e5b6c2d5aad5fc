"""What the Server tells front ends of itself and its models: plain facts, no behaviour."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tritium.backends.base import TextBackend
from tritium.backends.config import ANY, ModelConfig, TensorSpec
from tritium.llm.types import EngineInfo, EngineStats

if TYPE_CHECKING:
    from tritium.llm.tokenizer import Tokenizer
    from tritium.settings import Effective

# What Triton 2.51 lists, in its order; clients look features up here.
EXTENSIONS = (
    "classification",
    "sequence",
    "model_repository",
    "model_repository(unload_dependents)",
    "schedule_policy",
    "model_configuration",
    "system_shared_memory",
    "cuda_shared_memory",
    "binary_tensor_data",
    "parameters",
    "statistics",
    "trace",
    "logging",
)


@dataclass(frozen=True, slots=True)
class ServerMetadata:
    """Name, version and protocol extensions of this server."""

    name: str
    version: str
    extensions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TensorMetadata:
    """One tensor as clients see it.

    Attributes:
        datatype: name on the wire, such as INT32.
        shape: the batch dimension in front when there is one; -1 for any size.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    """One model as clients see it.

    Attributes:
        versions: the ready ones in numeric order, or only the one that was asked for.
    """

    name: str
    versions: tuple[str, ...]
    platform: str
    inputs: tuple[TensorMetadata, ...]
    outputs: tuple[TensorMetadata, ...]


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """One line of the repository index.

    Attributes:
        version: "" for a model that was never loaded.
        state: READY, UNAVAILABLE, LOADING or UNLOADING; "" likewise.
        reason: why it is unavailable.
    """

    name: str
    version: str
    state: str
    reason: str


@dataclass(frozen=True, slots=True)
class TextModel:
    """A language model that is loaded.

    Attributes:
        max_length: most tokens of prompt and output together.
        vocab_size: token ids are below it.
        sampling_defaults: the model's own values for ``llm.params.make_params``.
        created_s: when it was loaded, in seconds since the epoch.
    """

    name: str
    version: str
    tokenizer: Tokenizer
    max_length: int
    vocab_size: int
    sampling_defaults: Mapping[str, object]
    created_s: int

    @classmethod
    def of(cls, name: str, version: str, backend: TextBackend, created_s: int) -> TextModel:
        """What a loaded backend says."""
        made = (backend.tokenizer, backend.max_length, backend.vocab_size, backend.sampling_defaults)
        return cls(name, version, *made, created_s)


@dataclass(frozen=True, slots=True)
class EngineView:
    """The engines of a language model: their last statistics, and what each said at its start.

    Attributes:
        settings: what the model's files, its checkpoint and the machine made of the server's settings.
    """

    name: str
    version: str
    stats: list[EngineStats]
    infos: list[EngineInfo]
    settings: Mapping[str, Effective] = field(default_factory=dict[str, "Effective"])

    @property
    def info(self) -> EngineInfo:
        """What the first engine said."""
        return self.infos[0]


def in_words(name: str, message: str) -> str:
    """Why a load failed, in one line: clients are told in Triton's form, with line breaks and the name again."""
    parts = message.removeprefix(f"load failed for model '{name}': ").split(";\n")
    return "; ".join(" ".join(p.replace(" is at UNAVAILABLE state:", ":", 1).split()) for p in parts if p.strip())


def model_metadata(config: ModelConfig, versions: tuple[str, ...]) -> ModelMetadata:
    """The metadata of a configuration."""

    def tensors(specs: tuple[TensorSpec, ...]) -> tuple[TensorMetadata, ...]:
        front = (ANY,) if config.max_batch_size > 0 else ()
        return tuple(TensorMetadata(spec.name, spec.dtype.value, (*front, *spec.dims)) for spec in specs)

    return ModelMetadata(
        config.name, versions, config.platform or config.backend, tensors(config.inputs), tensors(config.outputs)
    )
