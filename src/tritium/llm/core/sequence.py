"""A request as the scheduler sees it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

from tritium.llm.core.blocks import BlockTable, scope
from tritium.llm.types import FinishReason, GenerateRequest, TokenDelta, TokenLogprob, WireError


class SequenceStatus(IntEnum):
    """Where a sequence is in its life, in order; preemption is the only way back."""

    WAITING = 0
    RUNNING = 1
    FINISHED = 2


@dataclass(slots=True, eq=False)
class Sequence:
    """The scheduler's record of a request.

    One rule covers chunked prefill, prefix hits, decoding and preemption: ``remaining`` positions are to be
    scheduled, wherever they come from. A prefix hit starts with ``scheduled`` above 0, preemption sets it
    back to 0, and each sampled token adds one.

    Attributes:
        serial: order of arrival at the scheduler; breaks ties.
        limit: prompt and output tokens at which it ends.
        deadline_ns: when it ends if it never ran; None for never.
        tokens: prompt, then output: one growing list.
        scheduled: positions whose keys and values are in the cache or come with a step in flight.
        computed: positions whose step has run.
        pending: tokens sampled by steps in flight; the device knows them, we do not yet.
        in_flight: steps in flight that compute it.
        hashes: of its full blocks, as far as they were needed.
        row: device row, -1 for none; held, as the blocks are, until no step in flight uses it.
        parked: hash of the block that it waits for somebody else to compute.
        started: whether a step ever took it.
        shares: sum of 1 / rows over the ``steps`` that computed it.
    """

    request: GenerateRequest
    serial: int
    limit: int
    deadline_ns: int | None
    tokens: list[int] = field(init=False)
    num_prompt: int = field(init=False)
    stops: frozenset[int] = field(init=False)
    scope: bytes = field(init=False)
    order: tuple[int, int, int] = field(init=False)
    table: BlockTable = field(init=False)
    status: SequenceStatus = SequenceStatus.WAITING
    scheduled: int = 0
    computed: int = 0
    pending: int = 0
    in_flight: int = 0
    hashes: list[bytes] = field(default_factory=list[bytes])
    row: int = -1
    parked: bytes | None = None
    started: bool = False
    queue_ns: int = 0
    first_token_ns: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    shares: float = 0.0
    steps: int = 0

    def __post_init__(self) -> None:
        request = self.request
        self.tokens = list(request.tokens)
        self.num_prompt = len(self.tokens)
        self.stops = frozenset(request.params.stop_token_ids)
        self.scope = scope(request.cache_salt)
        self.order = (request.priority, request.arrived_ns, self.serial)
        self.table = BlockTable([], self.scope)

    @property
    def remaining(self) -> int:
        """Positions still to be scheduled; the last of them gives the next token."""
        return len(self.tokens) + self.pending - self.scheduled

    @property
    def exhausted(self) -> bool:
        """Whether the tokens in flight bring it to its limit: it needs no further step."""
        return len(self.tokens) + self.pending >= self.limit

    @property
    def turn(self) -> tuple[int, bool, int, int]:
        """Place in the waiting queue: by priority, preempted ones first among equals, then by arrival."""
        priority, arrived_ns, serial = self.order
        return (priority, not self.preemptions, arrived_ns, serial)

    def reset(self) -> None:
        """Forgets all that was computed; the tokens stay."""
        self.scheduled = self.computed = 0
        self.table = BlockTable([], self.scope)
        self.row = -1

    def finish_reason(self, token: int) -> FinishReason | None:
        """Whether ``token``, the last of ``tokens``, ends the sequence."""
        # The sampler masks stop tokens until min_tokens are there; so this one may count from the next on.
        if token in self.stops and len(self.tokens) - self.num_prompt > self.request.params.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.tokens) >= self.limit else None

    def delta(
        self,
        tokens: list[int],
        finish: FinishReason | None = None,
        *,
        logprobs: list[TokenLogprob] | None = None,
        error: WireError | None = None,
    ) -> TokenDelta:
        """What the client hears of the sequence now."""
        return TokenDelta(
            id=self.request.id,
            tokens=tokens,
            logprobs=logprobs,
            finish=finish,
            stop_reason=tokens[-1] if finish is FinishReason.STOP else None,
            error=error,
            cached_tokens=self.cached_tokens,
            queue_ns=self.queue_ns,
            first_token_ns=self.first_token_ns,
            exec_share=self.shares / self.steps if self.steps else 0.0,
            preemptions=self.preemptions,
        )
