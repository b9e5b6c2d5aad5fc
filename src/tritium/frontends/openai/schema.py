"""OpenAI's wire, inwards: what a request may hold.

Every field of OpenAI's API, and of vLLM's additions to it, is known by name here. A field is either one of
a request struct, or in ``UNSUPPORTED`` (refused unless its value has no effect), or in ``INERT`` (checked,
then dropped, since it never changes an answer). Any other name is refused as OpenAI refuses it.

Sources: platform.openai.com/docs/api-reference/chat and /completions; docs.vllm.ai, "Extra parameters".
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from tritium.errors import TritiumError, invalid

MAX_TEXT_BYTES = 512
MAX_METADATA = 16

Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
Choices = Annotated[int, Meta(ge=1, le=128)]
TopLogprobs = Annotated[int, Meta(ge=0, le=20)]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """What a stream carries besides the text; ``include_obfuscation`` changes nothing here."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class Part(msgspec.Struct):
    """One part of a message's content; other types than "text" are refused by name later."""

    type: str
    text: str | None = None


class Message(msgspec.Struct, forbid_unknown_fields=True):
    """One turn of a chat. What a client sends back of an earlier answer is known, if only to be refused."""

    role: str
    content: str | list[Part] | None = None
    name: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: Any = None
    function_call: Any = None
    tool_calls: list[Any] | None = None
    tool_call_id: str | None = None


class Sampling(msgspec.Struct, kw_only=True):
    """The fields that both requests share.

    Those typed ``Any`` are checked by ``llm.params.make_params``, the one validator of sampling values.
    """

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Choices | None = None
    max_tokens: Any = None
    temperature: Any = None
    top_p: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    logit_bias: Any = None
    stop: Any = None
    seed: Any = None
    top_k: Any = None
    min_p: Any = None
    repetition_penalty: Any = None
    min_tokens: Any = None
    stop_token_ids: Any = None
    ignore_eos: Any = None
    include_stop_str_in_output: Any = None
    skip_special_tokens: Any = None
    priority: Int32 | None = None
    cache_salt: str | None = None
    request_id: str | None = None


class ChatRequest(Sampling, kw_only=True):
    """The body of ``POST /v1/chat/completions``."""

    messages: list[Message]
    max_completion_tokens: Any = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None


class CompletionRequest(Sampling, kw_only=True):
    """The body of ``POST /v1/completions``; ``prompt`` is checked where it is tokenized."""

    prompt: Any
    logprobs: Any = None
    best_of: Choices | None = None


_SAMPLING_OF_BOTH = (
    *("temperature", "top_p", "presence_penalty", "frequency_penalty", "logit_bias", "stop", "seed", "top_k"),
    *("min_p", "repetition_penalty", "min_tokens", "stop_token_ids", "ignore_eos", "include_stop_str_in_output"),
    *("skip_special_tokens", "max_tokens"),
)
# Fields handed on to make_params under the name that the client used.
SAMPLING_FIELDS: dict[type[Sampling], tuple[str, ...]] = {
    ChatRequest: (*_SAMPLING_OF_BOTH, "max_completion_tokens"),
    CompletionRequest: (*_SAMPLING_OF_BOTH, "logprobs"),
}

# Known, not served (yet): refused unless the value is one of these, or null.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    # of OpenAI
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "reasoning_effort": (),
    "verbosity": ("medium",),
    "web_search_options": (),
    "moderation": (),
    "store": (False,),
    "echo": (False,),
    "suffix": ("",),
    # of vLLM
    "length_penalty": (1, 1.0),
    "use_beam_search": (False,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "prompt_logprobs": (),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "add_special_tokens": (),
    "documents": ([],),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "thinking_token_budget": (),
    "include_reasoning": (True,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "vllm_xargs": ({},),
    "kv_transfer_params": ({},),
    "logits_processors": ([],),
}


def short_text(name: str, value: Any) -> str:
    """A text that is kept as it is: short, and without control characters, so that no log line can be forged.

    Raises:
        TritiumError: INVALID_ARGUMENT otherwise.
    """
    if not isinstance(value, str):
        raise invalid(f"{name} is {shown(value)}, expected a string", param=name)
    if len(value.encode()) > MAX_TEXT_BYTES:
        raise invalid(f"{name} has {len(value.encode())} bytes, expected at most {MAX_TEXT_BYTES}", param=name)
    if not value.isprintable():
        raise invalid(f"{name} is {shown(value)}, expected no control characters", param=name)
    return value


def _metadata(name: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        raise invalid(f"{name} is {shown(value)}, expected an object of strings", param=name)
    entries: Mapping[str, Any] = value
    if len(entries) > MAX_METADATA:
        raise invalid(f"{name} has {len(entries)} entries, expected at most {MAX_METADATA}", param=name)
    for key, text in entries.items():
        short_text(f"{name} key", key)
        short_text(f"{name}.{key}", text)


def _boolean(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise invalid(f"{name} is {shown(value)}, expected true or false", param=name)


def _object(name: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        raise invalid(f"{name} is {shown(value)}, expected an object", param=name)


# Hints and labels that never change an answer: checked, then dropped.
INERT: dict[str, Callable[[str, Any], object]] = {
    "user": short_text,
    "safety_identifier": short_text,
    "metadata": _metadata,
    "service_tier": short_text,
    "prompt_cache_key": short_text,
    "prompt_cache_retention": short_text,
    "prompt_cache_options": _object,
    "prediction": _object,
    "parallel_tool_calls": _boolean,
    "session_id": short_text,
}

R = TypeVar("R", bound=Sampling)


def decode(body: bytes, kind: type[R]) -> R:
    """A request out of its JSON.

    Raises:
        TritiumError: INVALID_ARGUMENT naming the field, its value and what was expected.
    """
    fields = _fields(body)
    kept: dict[str, Any] = {}
    for name, value in fields.items():
        if name in kind.__struct_fields__:
            kept[name] = value
        elif name in UNSUPPORTED:
            if value is not None and not any(value == x and type(value) is type(x) for x in UNSUPPORTED[name]):
                raise invalid(f"{name} is {shown(value)}, which this server does not support", param=name)
        elif name in INERT:
            if value is not None:
                INERT[name](name, value)
        else:
            raise invalid(f"Unrecognized request argument supplied: {_cut(name)}", param=_cut(name))
    try:
        return msgspec.convert(kept, kind)
    except msgspec.ValidationError as error:
        raise _explain(str(error), fields) from None


def _fields(body: bytes) -> dict[str, Any]:
    try:
        fields = msgspec.json.decode(body)
    except RecursionError:
        raise invalid("the request body is nested too deeply") from None
    except msgspec.DecodeError as error:
        raise _unreadable(body, error) from None
    if not isinstance(fields, dict):
        raise invalid(f"the request body is {shown(fields)}, expected a JSON object")
    return fields


def _unreadable(body: bytes, error: msgspec.DecodeError) -> TritiumError:
    """Names the field that holds half of a surrogate pair, the one fault whose place JSON parsers do not tell."""
    try:
        stack: list[tuple[str, Any]] = [("", json.loads(body))]
    except (ValueError, RecursionError):
        stack = []
    while stack:
        path, value = stack.pop()
        if isinstance(value, dict):
            stack += [(f"{path}.{key}" if path else str(key), item) for key, item in value.items()]
        elif isinstance(value, list):
            stack += [(f"{path}[{i}]", item) for i, item in enumerate(value)]
        elif isinstance(value, str) and re.search("[\ud800-\udfff]", value):
            path = _cut(path.encode(errors="replace").decode())
            return invalid(f"{path} holds half of a surrogate pair, expected valid Unicode text", param=path)
    return invalid(f"the request body is not valid JSON: {error}")


def _explain(text: str, fields: dict[str, Any]) -> TritiumError:
    """msgspec's complaint, with the field by its name and the value that was sent."""
    found = re.fullmatch(r"(.*?)(?: - at `\$\.?(.*)`)?", text, re.DOTALL)
    what, path = (found[1], found[2] or "") if found else (text, "")
    for pattern, say in (
        (r"Object missing required field `(.*)`", "Missing required parameter: '{}'"),
        (r"Object contains unknown field `(.*)`", "Unrecognized request argument supplied: {}"),
    ):
        if match := re.fullmatch(pattern, what, re.DOTALL):
            name = _cut(f"{path}.{match[1]}" if path else match[1])
            return invalid(say.format(name), param=name)
    value: Any = fields
    try:
        for key, index in re.findall(r"(\w+)|\[(\d+)\]", path):
            value = value[int(index)] if index else value[key]
    except (LookupError, TypeError):
        # A field that is named like msgspec's own words: its complaint cannot be taken apart.
        return invalid(f"the request body does not fit: {_cut(text)}")
    expected = re.sub(r"^Expected ", "expected ", re.sub(r", got `.*`$", "", what))
    return invalid(f"{path} is {shown(value)}, {expected.replace('`', '')}", param=path)


def shown(value: Any) -> str:
    """A value as an error message shows it: short, whatever was sent."""
    if isinstance(value, dict | list) and len(value) > 20:
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)} entries"
    try:
        return _cut(json.dumps(_cut(value) if isinstance(value, str) else value, ensure_ascii=False))
    except (ValueError, RecursionError):
        return f"a nested {type(value).__name__}"


def _cut(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."
