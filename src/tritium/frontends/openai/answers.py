"""OpenAI's wire, outwards: the shapes of answers, chunks, lists and errors.

Source: platform.openai.com/docs/api-reference. Fields that only vLLM has are marked.
"""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from tritium.errors import TritiumError

MAX_MESSAGE = 500


class PromptDetails(msgspec.Struct):
    """How many tokens of the prompt came from the prefix cache."""

    cached_tokens: int


class Usage(msgspec.Struct):
    """Tokens of a request; the prompt counts once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class TopLogprob(msgspec.Struct):
    """A token, its log-probability, and its bytes; null for one that shows nothing in the text."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatLogprob(TopLogprob):
    """The token that came, and the best ones at its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """``logprobs`` of a chat choice."""

    content: list[ChatLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct):
    """``logprobs`` of a completion choice; ``text_offset`` counts characters from the start of its text."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class ChatMessage(msgspec.Struct):
    """The answer of a chat."""

    content: str
    role: str = "assistant"
    refusal: None = None


class ChatDelta(msgspec.Struct, omit_defaults=True):
    """What a chunk adds to the message."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    """One of the ``n`` answers; ``stop_reason`` is vLLM's: the stop string or token id."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None


class ChatChunkChoice(msgspec.Struct):
    """One of the ``n`` answers, in a chunk."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET


class CompletionChoice(msgspec.Struct):
    """One answer to one prompt, whole or in a chunk."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET


class Completion(msgspec.Struct):
    """Every answer and chunk of both routes: ``object`` says which it is."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice] | list[ChatChunkChoice] | list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class ModelCard(msgspec.Struct):
    """A served model; ``root``, ``parent`` and ``max_model_len`` are vLLM's additions."""

    id: str
    created: int
    root: str
    max_model_len: int
    object: str = "model"
    owned_by: str = "tritium"
    parent: str | None = None


class ModelList(msgspec.Struct):
    """The body of ``GET /v1/models``."""

    data: list[ModelCard]
    object: str = "list"


class ErrorDetail(msgspec.Struct):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct):
    """The body of every error, and the last event of a stream that failed."""

    error: ErrorDetail


def error_body(error: TritiumError) -> bytes:
    """An error in OpenAI's form, below 512 bytes of message."""
    text = error.message.encode(errors="replace")
    message = error.message if len(text) <= MAX_MESSAGE else text[: MAX_MESSAGE - 3].decode(errors="ignore") + "..."
    return encode(ErrorBody(ErrorDetail(message, error.status.kind, error.param, error.reason)))


encode = msgspec.json.Encoder().encode
