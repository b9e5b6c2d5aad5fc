"""Messages of the engine: what crosses between a front end, the engine and its ranks.

All of them are msgspec structs in array form, so that the wire carries no names. Only token ids
appear here; text stays with the client (``TokenDelta.text`` is filled in there).
"""

from __future__ import annotations

from enum import Enum

import msgspec

from tritium.errors import Code, TritiumError
from tritium.observability.logs import LogState


class FinishReason(Enum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class SamplingParams(msgspec.Struct, array_like=True, gc=False, kw_only=True):
    """How the next token is chosen.

    Attributes:
        temperature: 0 (or below 1e-5) is greedy.
        top_k: candidates kept by rank; 0 or -1 keeps all.
        top_p: candidates kept by cumulative probability, in (0, 1].
        min_p: candidates kept whose probability is at least this share of the best one's, in [0, 1].
        presence_penalty: subtracted once from the logits of tokens that the output holds.
        frequency_penalty: subtracted per occurrence in the output.
        repetition_penalty: divides positive and multiplies negative logits of tokens in the prompt or output
            (Keskar et al. 2019).
        logit_bias: added to the logits, by token id.
        max_tokens: most tokens to generate; None for as many as the context holds.
        min_tokens: no stop token may be chosen before this many.
        stop_token_ids: tokens that end the sequence (the model's own end tokens are added by the client).
        stop: strings that end the text; read by the client only and never part of the answer.
        include_stop: leave the matched stop string in the text.
        ignore_eos: the model's end tokens do not end the sequence.
        seed: makes the draws repeatable; None lets the client choose one.
        logprobs: log-probabilities of this many best tokens with each token; None for none at all.
        skip_special_tokens: leave control tokens out of the text.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    max_tokens: int | None = None
    min_tokens: int = 0
    stop_token_ids: list[int] = []
    stop: list[str] = []
    include_stop: bool = False
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    skip_special_tokens: bool = True

    @property
    def greedy(self) -> bool:
        """Whether the best token is taken without a draw."""
        return self.temperature < 1e-5


class GenerateRequest(msgspec.Struct, array_like=True, gc=False, kw_only=True):
    """One sequence to continue.

    Attributes:
        id: unique among the requests in flight (the client sees to it).
        tokens: the prompt.
        priority: a class number; lower runs first, 0 is the default.
        cache_salt: requests share cached prefixes only under the same salt.
        arrived_ns: ``time.monotonic_ns()`` of the arrival at the front end.
        queue_deadline_ns: still waiting then, the request ends with an error; None for no limit.
    """

    id: str
    tokens: list[int]
    params: SamplingParams
    arrived_ns: int
    priority: int = 0
    cache_salt: str = ""
    tenant: str = "default"
    queue_deadline_ns: int | None = None


class TokenLogprob(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """Log-probability of the chosen token, and of the best ones, before any temperature or mask."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


class WireError(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """A TritiumError in a message."""

    code: Code
    message: str
    retry_after_s: float | None = None
    param: str | None = None
    reason: str | None = None

    def exception(self) -> TritiumError:
        """The error to raise on this side of the edge."""
        return TritiumError(
            self.code, self.message, param=self.param, reason=self.reason, retry_after_s=self.retry_after_s
        )


class TokenDelta(msgspec.Struct, array_like=True, gc=False, kw_only=True):
    """What a step added to one request.

    Attributes:
        tokens: new ids, a stop token included.
        logprobs: one entry per token when asked for.
        finish: set on the last delta of a request, and only there.
        stop_reason: the stop token id or stop string that ended it.
        cached_tokens: prompt tokens whose keys and values came from the prefix cache.
        queue_ns: from arrival to the step that first took it.
        first_token_ns: ``time.monotonic_ns()`` of the first token; 0 before it.
        exec_share: the request's share of the engine's executions so far: the mean over its steps of
            1 / (rows in the step), so that inferences / executions is the mean batch.
        text: new text; empty on the wire.
    """

    id: str
    tokens: list[int]
    logprobs: list[TokenLogprob] | None = None
    finish: FinishReason | None = None
    stop_reason: int | str | None = None
    error: WireError | None = None
    cached_tokens: int = 0
    queue_ns: int = 0
    first_token_ns: int = 0
    exec_share: float = 0.0
    preemptions: int = 0
    text: str = ""


class NewRow(msgspec.Struct, array_like=True, gc=False):
    """A sequence takes a device row: all that the runner must know of it.

    Attributes:
        tokens: prompt, then the output so far (a preempted sequence comes back with it).
        num_prompt: how many of them are the prompt.
        blocks: the block table so far; ``RowStep.new_blocks`` extends it.
    """

    row: int
    tokens: list[int]
    num_prompt: int
    blocks: list[int]
    params: SamplingParams


class RowStep(msgspec.Struct, array_like=True, gc=False):
    """What one row computes in a step: positions ``start`` to ``start + count``.

    Attributes:
        new_blocks: appended to the row's block table before the step.
        sample: whether a token is drawn from the last position.
    """

    row: int
    start: int
    count: int
    new_blocks: list[int]
    sample: bool


class ScheduledBatch(msgspec.Struct, array_like=True, gc=False):
    """One step, as differences to the last one; a row is stable for the life of its sequence.

    Attributes:
        freed: rows given back since the last step, to be forgotten before ``new`` is read.
        copies: (source, target) blocks to copy before the step.
    """

    step: int
    freed: list[int]
    new: list[NewRow]
    rows: list[RowStep]
    copies: list[tuple[int, int]]

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return sum(r.count for r in self.rows)


class StepOutput(msgspec.Struct, array_like=True, gc=False):
    """What a step drew, for the rows with ``sample``, in their order.

    Attributes:
        tokens: ids per sampled row (one today; accepted drafts will follow).
        logprobs: entries beside ``tokens``, or None for rows that did not ask.
        bad: sampled rows whose logits were not finite; they have no usable token.
        elapsed_ns: time of the forward pass and the sampling.
    """

    step: int
    tokens: list[list[int]]
    logprobs: list[list[TokenLogprob] | None]
    bad: list[int]
    elapsed_ns: int


class EngineStats(msgspec.Struct, array_like=True, gc=False, kw_only=True):
    """Counters and levels of an engine, as of its last step."""

    running: int = 0
    waiting: int = 0
    blocks_used: int = 0
    blocks_total: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    steps: int = 0
    step_tokens: int = 0
    step_ns: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0


class MemoryBudget(msgspec.Struct, array_like=True, gc=False, kw_only=True):
    """Where the memory of an engine goes, in bytes.

    Attributes:
        margin_bytes: left free of the memory that the engine may use.
    """

    weights_bytes: int
    activations_bytes: int
    kv_bytes: int
    kv_bytes_per_token: int
    margin_bytes: int
    num_blocks: int
    block_size: int


class Resolved(msgspec.Struct, array_like=True, gc=False):
    """What became of a setting that nobody gave.

    Attributes:
        source: what decided: ``checkpoint``, ``machine``, or both.
    """

    value: int | str
    source: str


class EngineInfo(msgspec.Struct, array_like=True, gc=False, kw_only=True):
    """What an engine says of itself when it is ready, after a real token.

    Attributes:
        dtype: of the weights and activations, with ``dtype_reason`` saying why.
        max_length: most tokens of prompt and output together.
        startup: seconds by phase (load, warm-up and so on).
        notices: sentences for the operator.
        resolved: settings that were left open, by the field of ``EngineConfig``.
    """

    family: str
    device: str
    dtype: str
    dtype_reason: str
    max_length: int
    max_rows: int
    vocab_size: int
    budget: MemoryBudget
    kernels: str
    startup: dict[str, float]
    notices: list[str]
    resolved: dict[str, Resolved] = {}


def to_wire(error: TritiumError) -> WireError:
    """The message form of an error."""
    return WireError(error.code, error.message, error.retry_after_s, error.param, error.reason)


class Submit(msgspec.Struct, array_like=True, gc=False, tag=True):
    """Front end to engine: requests to run."""

    requests: list[GenerateRequest]


class Abort(msgspec.Struct, array_like=True, gc=False, tag=True):
    """Front end to engine: requests whose clients have gone."""

    ids: list[str]


class QueueSettings(msgspec.Struct, array_like=True, gc=False, tag=True):
    """Front end to engine: other waits and limits of the queue, named as in ``EngineConfig``."""

    max_waiting: int
    queue_timeout_us: int
    queue_delay_us: int
    preferred_rows: tuple[int, ...]


class Shutdown(msgspec.Struct, array_like=True, gc=False, tag=True):
    """Front end to engine: end now (draining is the front end's business)."""


class Ready(msgspec.Struct, array_like=True, gc=False, tag=True):
    """Engine to front end: a real token has been generated."""

    info: EngineInfo


class Failed(msgspec.Struct, array_like=True, gc=False, tag=True):
    """Engine to front end: it cannot start, and why."""

    error: WireError


class Busy(msgspec.Struct, array_like=True, gc=False, tag=True):
    """Engine to front end: the step that begins now may take that long, so do not take it for a hang."""

    expected_ns: int


class Progress(msgspec.Struct, array_like=True, gc=False, tag=True):
    """Engine to front end: what one step (or an idle turn of the loop) brought; its heartbeat."""

    deltas: list[TokenDelta]
    stats: EngineStats


class Logging(msgspec.Struct, array_like=True, gc=False, tag=True):
    """Front end to engine: log like this from now on."""

    state: LogState


ToEngine = Submit | Abort | QueueSettings | Logging | Shutdown
FromEngine = Ready | Failed | Busy | Progress
