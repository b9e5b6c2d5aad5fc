"""Facts of a model's architecture and settings of an engine: the dataclasses only."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

import msgspec

from tritium.errors import invalid

DTypeName = Literal["auto", "float32", "float16", "bfloat16"]
DeviceName = Literal["auto", "cpu", "cuda"]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Natural = Annotated[int, msgspec.Meta(ge=0)]


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding (Su et al. 2021) and its scaling.

    Attributes:
        kind: ``default``, ``linear`` or ``llama3`` (the wavelength-dependent rule of Llama 3.1).
        interleaved: pairs are (0, 1), (2, 3), ... instead of (0, d/2), (1, d/2 + 1), ...
    """

    theta: float
    dim: int
    kind: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    interleaved: bool = False


@dataclass(frozen=True, slots=True)
class TransformerConfig:
    """Architecture of a decoder.

    Attributes:
        family: key of ``models.families``.
        window: sliding window in tokens; a query sees that many keys, itself included. None for all.
        tied: the output head is the embedding matrix.
        dtype: type of the stored weights, what ``auto`` follows.
        quantized: how they are stored where that is no plain type (``Q4_1``, ...): they are dequantized to ``dtype``.
        eos_token_ids: end tokens that the checkpoint names.
    """

    family: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    max_positions: int
    norm_eps: float
    activation: Literal["silu", "gelu", "gelu_tanh"]
    rope: Rope
    tied: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    window: int | None = None
    window_layers: tuple[bool, ...] | None = None
    dtype: DTypeName = "bfloat16"
    eos_token_ids: tuple[int, ...] = ()
    quantized: str | None = None


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of one engine. Field names are the flags of the command line.

    Attributes:
        model: path of a checkpoint folder or a GGUF file (names are resolved before).
        dtype: type of weights and activations; auto follows the checkpoint, BF16 on a CPU that has it.
        device: auto takes CUDA when there is one.
        block_size: tokens per KV block.
        max_rows: sequences that run at the same time.
        max_tokens_per_step: tokens that one step computes at most; longer prompts are cut in chunks.
        max_length: most tokens of prompt and output; by default the model's own limit.
        memory_fraction: share of the device's memory that the engine may use (CUDA: of the total;
            CPU: of what is free at start).
        kv_cache_bytes: bytes of the KV cache; by default ``memory_fraction`` and the need decide.
        num_blocks: exact number of KV blocks; overrides the sizes above.
        prefix_cache: reuse blocks of equal prefixes.
        deterministic: tokens of a request do not depend on what else runs; slower.
        threads: CPU threads; by default the physical cores.
        max_waiting: requests that may wait beyond those that can run; 0 for no limit.
        queue_timeout_us: how long a request may wait, in microseconds; 0 for no limit.
        queue_delay_us: how long an idle engine collects arrivals before its first step, in microseconds.
        preferred_rows: numbers of waiting requests that end that wait at once.
        allow_bin: read pickled ``.bin`` shards (weights only, in a child process).
        seed: of everything random that a request does not seed itself.
    """

    model: str
    dtype: DTypeName = "auto"
    device: DeviceName = "auto"
    block_size: Positive = 16
    max_rows: Annotated[int, msgspec.Meta(ge=1, le=65536)] = 64
    max_tokens_per_step: Positive = 512
    max_length: Annotated[int, msgspec.Meta(ge=2)] | None = None
    memory_fraction: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.9
    kv_cache_bytes: Positive | None = None
    num_blocks: Positive | None = None
    prefix_cache: bool = True
    deterministic: bool = False
    threads: Annotated[int, msgspec.Meta(ge=1, le=1024)] | None = None
    max_waiting: Natural = 0
    queue_timeout_us: Natural = 0
    queue_delay_us: Annotated[int, msgspec.Meta(ge=0, le=60_000_000)] = 0
    preferred_rows: tuple[Positive, ...] = field(default=())
    allow_bin: bool = False
    seed: int = 0

    def same_engine(self, other: EngineConfig) -> bool:
        """Whether they differ only in waits and limits of the queue, which a live engine can follow."""
        queue = ("max_waiting", "queue_timeout_us", "queue_delay_us", "preferred_rows")
        return replace(other, **{name: getattr(self, name) for name in queue}) == self

    def checked(self) -> EngineConfig:
        """These settings, when each is of its field's type and within its limits.

        Raises:
            TritiumError: INVALID_ARGUMENT naming the field, the value and what was expected.
        """
        try:
            return msgspec.convert(msgspec.to_builtins(self), EngineConfig)
        except msgspec.ValidationError as error:
            what, _, name = str(error).replace("`", "").partition(" - at $.")
            value = getattr(self, name, None)
            raise invalid(f"{name} is {value!r}, {what[0].lower()}{what[1:]}", param=name) from None
