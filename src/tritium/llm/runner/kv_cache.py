"""The KV cache: how large it may be, its tensors, and copies of blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tritium.errors import Code, TritiumError, invalid
from tritium.llm.config import EngineConfig, TransformerConfig
from tritium.llm.types import MemoryBudget
from tritium.observability.machine import free_host_bytes

# Default limits on a CPU, whose memory is shared with everything else on the machine.
CPU_SHARE = 4
CPU_MOST_BYTES = 2 << 30


@dataclass(frozen=True, slots=True)
class Size:
    """What was decided.

    Attributes:
        max_length: most tokens of a sequence: as configured, the model's own, or what the cache holds.
        notices: sentences for the operator.
    """

    budget: MemoryBudget
    max_length: int
    notices: list[str]


class KvCache:
    """Keys and values of all layers, ``[num_blocks, kv_heads, block_size, head_dim]`` each."""

    def __init__(
        self, model: TransformerConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (num_blocks, model.kv_heads, block_size, model.head_dim)
        self.keys = [torch.empty(shape, dtype=dtype, device=device) for _ in range(model.layers)]
        self.values = [torch.empty(shape, dtype=dtype, device=device) for _ in range(model.layers)]

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copies blocks, (source, target) each; all sources are read before any target is written."""
        if not pairs:
            return
        source, target = torch.tensor(pairs, device=self.keys[0].device).unbind(1)
        for cache in (*self.keys, *self.values):
            cache[target] = cache[source]


def usable_bytes(config: EngineConfig, device: torch.device) -> int:
    """Memory that the engine may use: ``memory_fraction`` of what is free (CPU) or of the total (CUDA).

    Raises:
        TritiumError: INVALID_ARGUMENT when ``memory_fraction`` is not in (0, 1].
    """
    if not 0 < config.memory_fraction <= 1:
        raise invalid(
            f"memory_fraction is {config.memory_fraction}, expected a share above 0 and at most 1",
            param="memory_fraction",
        )
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return min(free, int(total * config.memory_fraction))
    return int(free_host_bytes() * config.memory_fraction)


def activations_bytes(config: EngineConfig, model: TransformerConfig, dtype: torch.dtype) -> int:
    """Estimate of what a full step holds at once: hidden states, projections, scores of the sampled rows."""
    qkv = (model.heads + 2 * model.kv_heads) * model.head_dim
    per_token = 4 * model.hidden + qkv + model.heads * model.head_dim + 3 * model.intermediate
    tokens, rows = config.max_tokens_per_step, config.max_rows
    # Logits in float32, a copy to work on, and their cumulative sum in float64.
    return tokens * per_token * dtype.itemsize + rows * model.vocab * (4 + 4 + 8)


def plan(
    config: EngineConfig,
    model: TransformerConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    usable: int,
    weights: int,
) -> Size:
    """Sizes the cache within ``usable`` bytes, of which the model's weights take ``weights``.

    ``num_blocks`` wins over ``kv_cache_bytes``, and that over the default: what ``max_rows`` sequences of
    ``max_length`` need; on a CPU no more than a quarter of the usable memory and 2 GiB.

    Raises:
        TritiumError: RESOURCE_EXHAUSTED when the model or the asked-for cache does not fit, or
            INVALID_ARGUMENT for a bad value; the message says what fits.
    """
    length = _wanted_length(config, model)
    token_bytes = 2 * model.layers * model.kv_heads * model.head_dim * dtype.itemsize
    block_bytes = token_bytes * config.block_size
    activations = activations_bytes(config, model, dtype)
    room = usable - weights - activations
    fits = max(room, 0) // block_bytes
    if fits < 1:
        raise _exhausted(
            f"the model does not fit: weights take {_mib(weights)} and activations {_mib(activations)} of the"
            f" {_mib(max(usable, 0))} that memory_fraction {config.memory_fraction} leaves the engine;"
            " use a smaller model or dtype, or lower max_rows or max_tokens_per_step",
            "memory_fraction",
        )
    num_blocks = _num_blocks(config, device, length, block_bytes, usable, fits)
    length, notices = _held_length(config, length, num_blocks, token_bytes, fits * block_bytes)
    budget = MemoryBudget(
        weights_bytes=weights,
        activations_bytes=activations,
        kv_bytes=num_blocks * block_bytes,
        kv_bytes_per_token=token_bytes,
        margin_bytes=room - num_blocks * block_bytes,
        num_blocks=num_blocks,
        block_size=config.block_size,
    )
    return Size(budget, length, notices)


def _wanted_length(config: EngineConfig, model: TransformerConfig) -> int:
    for name in ("block_size", "max_rows", "max_tokens_per_step", "num_blocks", "kv_cache_bytes"):
        value = getattr(config, name)
        if value is not None and value < 1:
            raise invalid(f"{name} is {value}, expected at least 1", param=name)
    if config.max_length is None:
        return model.max_positions
    if not 2 <= config.max_length <= model.max_positions:
        raise invalid(
            f"max_length is {config.max_length}, expected 2 to {model.max_positions}, the positions of the model",
            param="max_length",
        )
    return config.max_length


def _held_length(
    config: EngineConfig, length: int, num_blocks: int, token_bytes: int, free: int
) -> tuple[int, list[str]]:
    """What the cache leaves of the length of a sequence, and the notice when that is less than the model's."""
    held = num_blocks * config.block_size
    if held >= length:
        return length, []
    if config.max_length is not None:
        raise _exhausted(
            f"max_length is {length}, but the KV cache holds {held} tokens ({num_blocks} blocks of"
            f" {config.block_size}, {_mib(held * token_bytes)}); lower max_length to {held} or give the cache"
            f" {length * token_bytes} bytes with kv_cache_bytes ({free} are free)",
            "max_length",
        )
    return held, [
        f"max_length is lowered from the model's {length} to {held} tokens, which is what the KV cache holds"
        f" ({_mib(held * token_bytes)}); kv_cache_bytes or memory_fraction give it more"
    ]


def _num_blocks(
    config: EngineConfig, device: torch.device, length: int, block_bytes: int, usable: int, fits: int
) -> int:
    asked, name = config.num_blocks, "num_blocks"
    if asked is None and config.kv_cache_bytes is not None:
        asked, name = config.kv_cache_bytes // block_bytes, "kv_cache_bytes"
        if asked < 1:
            raise invalid(
                f"kv_cache_bytes is {config.kv_cache_bytes}, expected at least {block_bytes}, one block of"
                f" {config.block_size} tokens",
                param=name,
            )
    if asked is not None:
        if asked > fits:
            raise _exhausted(
                f"{name} is {getattr(config, name)}, which takes {_mib(asked * block_bytes)}; {fits} blocks"
                f" ({fits * block_bytes} bytes) fit",
                name,
            )
        return asked
    need = config.max_rows * -(-length // config.block_size)
    if device.type == "cpu":
        most = max(1, min(usable // CPU_SHARE, CPU_MOST_BYTES) // block_bytes)
        return min(need, most, fits)
    return min(need, fits)


def _exhausted(message: str, param: str) -> TritiumError:
    return TritiumError(Code.RESOURCE_EXHAUSTED, message, param=param)


def _mib(count: int) -> str:
    return f"{count / (1 << 20):.1f} MiB"
