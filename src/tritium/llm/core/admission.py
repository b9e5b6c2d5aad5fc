"""What an engine takes in: its settings, and which requests can run on it at all."""

from __future__ import annotations

from dataclasses import dataclass

from tritium.errors import Code, TritiumError, invalid
from tritium.llm.config import EngineConfig
from tritium.llm.types import GenerateRequest


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The settings of ``EngineConfig`` that scheduling depends on, under the same names.

    Raises:
        TritiumError: INVALID_ARGUMENT naming the setting that is out of range.
    """

    block_size: int
    max_rows: int
    max_tokens_per_step: int
    max_length: int
    prefix_cache: bool = True
    max_waiting: int = 0
    queue_timeout_us: int = 0
    queue_delay_us: int = 0
    preferred_rows: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        limits = (
            ("block_size", self.block_size, 1),
            ("max_rows", self.max_rows, 1),
            ("max_length", self.max_length, 2),
            ("max_waiting", self.max_waiting, 0),
            ("queue_timeout_us", self.queue_timeout_us, 0),
            ("queue_delay_us", self.queue_delay_us, 0),
        )
        for name, value, least in limits:
            if value < least:
                raise invalid(f"{name} is {value}, expected at least {least}", param=name)
        if self.max_tokens_per_step < self.max_rows:
            raise invalid(
                f"max_tokens_per_step is {self.max_tokens_per_step}, expected at least max_rows, which is"
                f" {self.max_rows}: every running sequence needs one token per step",
                param="max_tokens_per_step",
            )

    @classmethod
    def of(cls, config: EngineConfig, max_length: int) -> SchedulerConfig:
        """Takes them from an engine's settings; ``max_length`` is what its model and memory allow."""
        return cls(
            block_size=config.block_size,
            max_rows=config.max_rows,
            max_tokens_per_step=config.max_tokens_per_step,
            max_length=max_length,
            prefix_cache=config.prefix_cache,
            max_waiting=config.max_waiting,
            queue_timeout_us=config.queue_timeout_us,
            queue_delay_us=config.queue_delay_us,
            preferred_rows=config.preferred_rows,
        )


def wait_limit(request: GenerateRequest, config: SchedulerConfig) -> int | None:
    """When a request that still waits ends with an error, in ``time.monotonic_ns()``; None for never."""
    own = request.queue_deadline_ns
    if not config.queue_timeout_us:
        return own
    general = request.arrived_ns + config.queue_timeout_us * 1000
    return general if own is None else min(own, general)


def token_limit(request: GenerateRequest, config: SchedulerConfig, num_blocks: int) -> int:
    """Prompt and output tokens at which a request ends: by its ``max_tokens`` or with the context.

    Raises:
        TritiumError: INVALID_ARGUMENT (with reason ``context_length_exceeded`` for a prompt that leaves no
            room in the context) or RESOURCE_EXHAUSTED (more blocks than there are): it can never run.
    """
    length, wanted = len(request.tokens), request.params.max_tokens
    if not length:
        raise invalid("the prompt has 0 tokens, expected at least 1", param="prompt")
    if length >= config.max_length:
        raise invalid(
            f"the prompt has {length} tokens, expected at most {config.max_length - 1}: the context holds"
            f" {config.max_length} and at least one is generated",
            param="prompt",
            reason="context_length_exceeded",
        )
    if wanted is not None and wanted < 1:
        raise invalid(f"max_tokens is {wanted}, expected at least 1", param="max_tokens")
    # Keys and values of the last token are never needed.
    capacity = num_blocks * config.block_size + 1
    if wanted is None:
        limit = min(config.max_length, max(capacity, length + 1))
    else:
        limit = min(config.max_length, length + wanted)
    if limit > capacity:
        needed = -(-(limit - 1) // config.block_size)
        raise TritiumError(
            Code.RESOURCE_EXHAUSTED,
            f"{length} prompt tokens and {limit - length} output tokens need {needed} KV blocks,"
            f" the engine has {num_blocks}",
        )
    return limit
