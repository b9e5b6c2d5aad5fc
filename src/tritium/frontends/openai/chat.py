"""From what a client asks to what an engine runs: messages and prompts become ``GenerateRequest``s.

Everything here may take long (templates, tokenization of megabytes) and touches nothing shared, so the routes
call ``prepare`` in a small thread pool.
"""

from __future__ import annotations

import secrets
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from tritium.errors import TritiumError, invalid
from tritium.frontends.openai.schema import (
    SAMPLING_FIELDS,
    ChatRequest,
    CompletionRequest,
    Message,
    StreamOptions,
    short_text,
    shown,
)
from tritium.llm.params import make_params
from tritium.llm.types import GenerateRequest, SamplingParams

if TYPE_CHECKING:
    from tritium.serving.server import TextModel

MAX_PROMPTS = 2048
# OpenAI's default for /v1/completions; a chat goes on until it ends or the context is full.
COMPLETION_MAX_TOKENS = 16
# A template gets "system" for both: no published template knows "developer".
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


@dataclass(frozen=True, slots=True)
class Call:
    """One API call, ready to run.

    Attributes:
        id: as the client will see it, ``chatcmpl-...`` or ``cmpl-...``.
        created: unix time, in seconds.
        requests: ``choices`` of them for each prompt, in the order of the choices' indices.
    """

    id: str
    created: int
    chat: bool
    model: TextModel
    requests: list[GenerateRequest]
    choices: int
    stream: bool
    include_usage: bool
    continuous_usage: bool


class Preparer:
    """Makes calls for models. Safe in threads."""

    def prepare(
        self, body: ChatRequest | CompletionRequest, model: TextModel, arrived_ns: int, request_id: str = ""
    ) -> Call:
        """Checks a request against its model and tokenizes it.

        Args:
            arrived_ns: ``time.monotonic_ns()`` when the HTTP request was read.
            request_id: of the HTTP request; "" when the client gave none.

        Raises:
            TritiumError: INVALID_ARGUMENT naming the field; its reason is ``context_length_exceeded`` for a
                prompt that does not fit.
        """
        options = _stream_options(body)
        params = _params(body, model)
        salt = short_text("cache_salt", body.cache_salt) if body.cache_salt is not None else ""
        name, own = _names(body, request_id)
        prompts = self._prompts(body, model)
        choices = body.n or 1
        if len(prompts) * choices > MAX_PROMPTS:
            raise invalid(
                f"n is {choices} for {len(prompts)} prompts, expected at most {MAX_PROMPTS} answers together", param="n"
            )
        requests: list[GenerateRequest] = []
        for tokens in prompts:
            fitted = _fit(params, body, model, len(tokens))
            for choice in range(choices):
                requests.append(
                    GenerateRequest(
                        id=f"{own}-{len(requests)}",
                        tokens=tokens,
                        params=_seeded(fitted, choice),
                        arrived_ns=arrived_ns,
                        priority=body.priority or 0,
                        cache_salt=salt,
                    )
                )
        return Call(
            id=name,
            created=int(time.time()),
            chat=isinstance(body, ChatRequest),
            model=model,
            requests=requests,
            choices=choices,
            stream=bool(body.stream),
            include_usage=bool(options.include_usage),
            continuous_usage=bool(options.include_usage and options.continuous_usage_stats),
        )

    def _prompts(self, body: ChatRequest | CompletionRequest, model: TextModel) -> list[list[int]]:
        if isinstance(body, ChatRequest):
            return [self._chat(body, model)]
        return [self._prompt(name, prompt, model) for name, prompt in _named_prompts(body.prompt)]

    def _chat(self, body: ChatRequest, model: TextModel) -> list[int]:
        if not body.messages:
            raise invalid("messages is an empty list, expected at least one message", param="messages")
        messages = [_message(f"messages[{i}]", message) for i, message in enumerate(body.messages)]
        self._check_size("messages", (m["content"] for m in messages), model)
        tokens = model.tokenizer.encode_chat(messages)
        if not tokens:
            raise invalid("messages give an empty prompt with the template of this model", param="messages")
        return tokens

    def _prompt(self, name: str, prompt: Any, model: TextModel) -> list[int]:
        if isinstance(prompt, str):
            if not prompt:
                raise invalid(f'{name} is "", expected some text', param=name)
            self._check_size(name, [prompt], model)
            return model.tokenizer.encode(prompt)
        if not isinstance(prompt, list):
            raise invalid(f"{name} is {shown(prompt)}, expected a string or a list of token ids", param=name)
        if not prompt:
            raise invalid(f"{name} is an empty list, expected at least one token id", param=name)
        for position, token in enumerate(prompt):
            if type(token) is not int or not 0 <= token < model.vocab_size:
                raise invalid(
                    f"{name}[{position}] is {shown(token)}, expected a token id from 0 to {model.vocab_size - 1}",
                    param=f"{name}[{position}]",
                )
        return prompt

    def _check_size(self, name: str, texts: Iterable[str], model: TextModel) -> None:
        """Refuses before tokenization what cannot fit: no token is longer than the longest of the vocabulary."""
        size = sum(len(text.encode()) for text in texts)
        if size <= model.max_length:
            return
        at_least = size // model.tokenizer.longest_token
        if at_least >= model.max_length:
            raise _too_long(name, model, f"at least {at_least}", at_least, 1)


def _stream_options(body: ChatRequest | CompletionRequest) -> StreamOptions:
    if body.stream_options is None:
        return StreamOptions()
    if not body.stream:
        raise invalid("stream_options is only allowed when stream is true", param="stream_options")
    return body.stream_options


def _params(body: ChatRequest | CompletionRequest, model: TextModel) -> SamplingParams:
    given = {name: getattr(body, name) for name in SAMPLING_FIELDS[type(body)]}
    if isinstance(body, ChatRequest):
        if body.max_tokens is not None and body.max_completion_tokens is not None:
            raise invalid(
                "max_tokens and max_completion_tokens are both set, expected only one of them",
                param="max_completion_tokens",
            )
        if body.top_logprobs is not None and not body.logprobs:
            raise invalid("top_logprobs is only allowed when logprobs is true", param="top_logprobs")
        given["logprobs"] = (body.top_logprobs or 0) if body.logprobs else None
    elif body.best_of not in (None, body.n or 1):
        raise invalid(
            f"best_of is {body.best_of}, which this server does not support (n is {body.n or 1})", param="best_of"
        )
    # The model's own default of max_tokens is no wish of the client: _fit() lets it shrink with the room.
    defaults = {name: value for name, value in model.sampling_defaults.items() if name != "max_tokens"}
    return make_params(given, defaults, vocab_size=model.vocab_size)


def _fit(
    params: SamplingParams, body: ChatRequest | CompletionRequest, model: TextModel, length: int
) -> SamplingParams:
    """Checks prompt and output against the context, and settles ``max_tokens`` when the client left it open."""
    field = "messages" if isinstance(body, ChatRequest) else "prompt"
    room = model.max_length - length
    wanted = params.max_tokens
    if room < (wanted or 1):
        raise _too_long(field, model, str(length), length, wanted or 1)
    if wanted is not None:
        return params
    default = model.sampling_defaults.get("max_tokens")
    if not isinstance(default, int):
        default = room if isinstance(body, ChatRequest) else COMPLETION_MAX_TOKENS
    if params.min_tokens > room:
        raise invalid(
            f"min_tokens is {params.min_tokens}, expected at most {room}, which is what the context of "
            f"{model.max_length} tokens leaves after a prompt of {length}",
            param="min_tokens",
        )
    return msgspec.structs.replace(params, max_tokens=min(room, max(default, params.min_tokens)))


def _too_long(field: str, model: TextModel, said: str, length: int, wanted: int) -> TritiumError:
    total = length + wanted
    return invalid(
        f"This model's maximum context length is {model.max_length} tokens. However, you requested {total} tokens "
        f"({said} in the {field}, {wanted} in the completion). Please reduce the length of the {field} or completion.",
        param=field,
        reason="context_length_exceeded",
    )


def _seeded(params: SamplingParams, choice: int) -> SamplingParams:
    """Choices of one prompt must differ though the client named one seed; wraps around in 64 bits."""
    if params.seed is None or choice == 0:
        return params
    return msgspec.structs.replace(params, seed=(params.seed + choice + 2**63) % 2**64 - 2**63)


def _names(body: ChatRequest | CompletionRequest, request_id: str) -> tuple[str, str]:
    """The id that the client sees, and the one that the engine sees, which no other request has."""
    prefix = "chatcmpl" if isinstance(body, ChatRequest) else "cmpl"
    given = short_text("request_id", body.request_id) if body.request_id else request_id
    if not given:
        name = f"{prefix}-{uuid.uuid4().hex}"
        return name, name
    return f"{prefix}-{given}", f"{prefix}-{given}-{secrets.token_hex(4)}"


def _message(name: str, message: Message) -> dict[str, str]:
    """A message as the template sees it.

    Text parts are joined by line breaks, as vLLM does for templates that take plain text.
    """
    for field in ("tool_calls", "function_call", "tool_call_id", "audio"):
        if getattr(message, field) not in (None, []):
            raise invalid(f"{name}.{field} is set, which this server does not support", param=f"{name}.{field}")
    if message.role not in ROLES:
        raise invalid(f"{name}.role is {shown(message.role)}, expected one of {', '.join(ROLES)}", param=f"{name}.role")
    content = message.content
    if content is None and message.role == "assistant":
        content = message.refusal if isinstance(message.refusal, str) else ""
    if content is None:
        raise invalid(f"{name}.content is null, expected a string or a list of parts", param=f"{name}.content")
    if isinstance(content, list):
        content = "\n".join(_part(f"{name}.content[{i}]", part.type, part.text) for i, part in enumerate(content))
    found = {"role": ROLES[message.role], "content": content}
    return found | {"name": message.name} if message.name else found


def _part(name: str, kind: str, text: str | None) -> str:
    if kind != "text":
        raise invalid(f"{name}.type is {shown(kind)}, expected text", param=f"{name}.type")
    if text is None:
        raise invalid(f"{name}.text is missing, expected a string", param=f"{name}.text")
    return text


def _named_prompts(prompt: Any) -> list[tuple[str, Any]]:
    """The prompts of a completion request, each with the name that an error gives it."""
    if not isinstance(prompt, list) or (prompt and isinstance(prompt[0], int | float)):
        # One string, or the token ids of one prompt (whose bad ones are found later, by position).
        return [("prompt", prompt)]
    if not prompt:
        raise invalid("prompt is an empty list, expected at least one prompt", param="prompt")
    if len(prompt) > MAX_PROMPTS:
        raise invalid(f"prompt has {len(prompt)} entries, expected at most {MAX_PROMPTS}", param="prompt")
    for position, one in enumerate(prompt):
        if type(one) is not type(prompt[0]) or not isinstance(one, str | list):
            expected = "a string" if isinstance(prompt[0], str) else "a list of token ids"
            raise invalid(
                f"prompt[{position}] is {shown(one)}, expected {expected} like its neighbours",
                param=f"prompt[{position}]",
            )
    return [(f"prompt[{position}]", one) for position, one in enumerate(prompt)]
