"""The one validator of sampling values: from what a client wrote to ``SamplingParams``."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from tritium.errors import TritiumError, invalid
from tritium.llm.types import SamplingParams

MAX_STOPS = 16
MAX_STOP_BYTES = 1024
MAX_LOGIT_BIAS = 1024
MAX_LOGPROBS = 20
MAX_COUNT = 2**31 - 1

# What other servers call the same thing; the error names the spelling that the client used.
ALIASES: dict[str, str] = {
    "max_completion_tokens": "max_tokens",
    "max_new_tokens": "max_tokens",
    "max_output_len": "max_tokens",
    "request_output_len": "max_tokens",
    "min_length": "min_tokens",
    "runtime_top_k": "top_k",
    "runtime_top_p": "top_p",
    "random_seed": "seed",
    "stop_words": "stop",
    "include_stop_str_in_output": "include_stop",
    "end_id": "stop_token_ids",
}


def make_params(
    given: Mapping[str, Any],
    defaults: Mapping[str, Any] | None = None,
    *,
    vocab_size: int,
) -> SamplingParams:
    """Checks every value and builds the parameters of one request.

    Args:
        given: what the request says, under ``SamplingParams`` names or those of ``ALIASES``; None counts
            as not said. A name that is no sampling parameter is refused.
        defaults: the model's own values, for what the request leaves open.
        vocab_size: token ids must be below it.

    Raises:
        TritiumError: INVALID_ARGUMENT naming the field as the client spelled it, the value and the range.
    """
    values: dict[str, Any] = {}
    for source in (defaults or {}, given):
        for spelled, value in source.items():
            if value is None:
                continue
            name = ALIASES.get(spelled, spelled)
            check = _CHECKS.get(name)
            if check is None:
                raise invalid(f"'{spelled}' is not a sampling parameter", param=spelled)
            values[name] = check(spelled, value, vocab_size)
    params = SamplingParams(**values)
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise invalid(
            f"min_tokens is {params.min_tokens}, expected at most max_tokens, which is {params.max_tokens}",
            param="min_tokens",
        )
    return params


def is_sampling_field(name: str) -> bool:
    """Whether ``make_params`` knows that name or spelling."""
    return ALIASES.get(name, name) in _CHECKS


def _wrong(name: str, value: object, expected: str) -> TritiumError:
    shown = repr(value)
    if len(shown) > 60:
        shown = shown[:57] + "..."
    return invalid(f"{name} is {shown}, expected {expected}", param=name)


def _number(low: float, high: float, *, above: bool = False) -> Callable[[str, Any, int], float]:
    bounds = f"a number {'above' if above else 'from'} {low:g}" + (f" to {high:g}" if high < math.inf else "")

    def check(name: str, value: Any, _vocab: int) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _wrong(name, value, bounds)
        try:
            number = float(value)
        except OverflowError:
            raise _wrong(name, value, bounds) from None
        if not math.isfinite(number) or number < low or number > high or (above and number == low):
            raise _wrong(name, value, bounds)
        return number

    return check


def _integer(low: int, high: int) -> Callable[[str, Any, int], int]:
    bounds = f"an integer from {low} to {high}"

    def check(name: str, value: Any, _vocab: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise _wrong(name, value, bounds)
        if not low <= value <= high:
            raise _wrong(name, value, bounds)
        return value

    return check


def _boolean(name: str, value: Any, _vocab: int) -> bool:
    if not isinstance(value, bool):
        raise _wrong(name, value, "true or false")
    return value


def _token(name: str, value: Any, vocab: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocab:
        raise _wrong(name, value, f"a token id from 0 to {vocab - 1}")
    return value


def _token_ids(name: str, value: Any, vocab: int) -> list[int]:
    if isinstance(value, int) and not isinstance(value, bool):
        value = [value]
    if not isinstance(value, list | tuple):
        raise _wrong(name, value, "a list of token ids")
    items: list[Any] = list(value)  # pyright: ignore[reportUnknownArgumentType]
    if len(items) > MAX_LOGIT_BIAS:
        raise _wrong(name, f"{len(items)} ids", f"at most {MAX_LOGIT_BIAS}")
    return [_token(f"{name}[{i}]", x, vocab) for i, x in enumerate(items)]


def _stops(name: str, value: Any, _vocab: int) -> list[str]:
    if not isinstance(value, str | list):
        raise _wrong(name, value, "a string or a list of strings")
    texts: list[Any] = [value] if isinstance(value, str) else list(value)  # pyright: ignore[reportUnknownArgumentType]
    if len(texts) > MAX_STOPS:
        raise _wrong(name, f"{len(texts)} strings", f"at most {MAX_STOPS}")
    for index, text in enumerate(texts):
        if not isinstance(text, str) or not text:
            raise _wrong(f"{name}[{index}]", text, "a string that is not empty")
        try:
            size = len(text.encode())
        except UnicodeEncodeError:
            raise _wrong(f"{name}[{index}]", text, "valid Unicode text") from None
        if size > MAX_STOP_BYTES:
            raise _wrong(f"{name}[{index}]", f"{size} bytes", f"at most {MAX_STOP_BYTES}")
    return texts


def _logit_bias(name: str, value: Any, vocab: int) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise _wrong(name, value, "an object from token id to a number from -100 to 100")
    entries: Mapping[Any, Any] = value  # pyright: ignore[reportUnknownVariableType]
    if len(entries) > MAX_LOGIT_BIAS:
        raise _wrong(name, f"{len(entries)} entries", f"at most {MAX_LOGIT_BIAS}")
    number = _number(-100.0, 100.0)
    found: dict[int, float] = {}
    for key, bias in entries.items():
        digits = isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) < 12
        token = _token(f"{name} key", int(key) if digits else key, vocab)
        found[token] = number(f"{name}[{token}]", bias, vocab)
    return found


_CHECKS: dict[str, Callable[[str, Any, int], Any]] = {
    "temperature": _number(0.0, 100.0),
    "top_k": _integer(-1, MAX_COUNT),
    "top_p": _number(0.0, 1.0, above=True),
    "min_p": _number(0.0, 1.0),
    "presence_penalty": _number(-2.0, 2.0),
    "frequency_penalty": _number(-2.0, 2.0),
    "repetition_penalty": _number(0.0, 100.0, above=True),
    "logit_bias": _logit_bias,
    "max_tokens": _integer(1, MAX_COUNT),
    "min_tokens": _integer(0, MAX_COUNT),
    "stop_token_ids": _token_ids,
    "stop": _stops,
    "include_stop": _boolean,
    "ignore_eos": _boolean,
    "seed": _integer(-(2**63), 2**63 - 1),
    "logprobs": _integer(0, MAX_LOGPROBS),
    "skip_special_tokens": _boolean,
}
