"""JSON as Triton reads and writes it: the parse, members with Triton's error texts, tensors as text.

A body is read by orjson. What orjson refuses and Triton takes (``NaN`` and ``Infinity``, as tritonclient
writes them; ``data`` nested thousands of levels deep) is read a second time by slower means, up to a size at
which that cannot be used to keep the server busy.

Every error here is Triton's INTERNAL (HTTP status 500), since that is what it answers to malformed JSON.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

import numpy as np
import orjson

from tritium.errors import Code, TritiumError, invalid
from tritium.types import DType, Tensor

MAX_SLOW_BYTES = 4 << 20
MAX_NESTED_BYTES = 1 << 20
MAX_NESTING = 10_000

_MISSING: Any = object()
_INT64_MIN, _UINT64_END = -(1 << 63), 1 << 64

# What orjson says (beginning of it) -> what rapidjson, Triton's parser, says.
_TEXTS = (
    ("Input is a zero-length", "The document is empty."),
    ("input data is empty", "The document is empty."),
    ("unexpected content after", "The document root must not be followed by other values."),
    ("unexpected character, expected ':'", "Missing a colon after a name of object member."),
    ("unexpected character, expected ',' or '}'", "Missing a comma or } after an object member."),
    ("unexpected character, expected ',' or ']'", "Missing a comma or ] after an array element."),
    ("unexpected character, expected a string", "Missing a name for object member."),
    ("no digit after decimal point", "Miss fraction part in number."),
    ("no digit after exponent", "Miss exponent in number."),
    ("number is infinity", "Number too big to be stored in double."),
    ("no low surrogate", "The surrogate pair in string is invalid."),
    ("invalid low surrogate", "The surrogate pair in string is invalid."),
    ("invalid high surrogate", "The surrogate pair in string is invalid."),
    ("invalid escaped", "Invalid escape character in string."),
    ("str is not valid UTF-8", "Invalid encoding in string."),
)
_ESCAPED = re.compile(rb'[\x00-\x1f"\\]')
_SHORT = {b'"': b'\\"', b"\\": b"\\\\", b"\b": b"\\b", b"\f": b"\\f", b"\n": b"\\n", b"\r": b"\\r", b"\t": b"\\t"}
_NESTED = ("depth limit", "failed to allocate", "recursion")
_TOKEN = re.compile(rb'[^"\[\],:]+|"(?:[^"\\]|\\.)*+"|.', re.DOTALL)


def internal(message: str) -> TritiumError:
    """The error of malformed JSON."""
    return TritiumError(Code.INTERNAL, message)


def shown(text: str, limit: int = 100) -> str:
    """A user's text as an error message may hold it."""
    return text if len(text) <= limit else text[:limit] + "..."


def parse(body: bytes | memoryview) -> Any:
    """The value of a JSON document.

    Raises:
        TritiumError: INTERNAL, ``failed to parse the request JSON buffer: <why>. at <byte>``.
    """
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        return _parse_again(bytes(body), error)


def _parse_again(body: bytes, error: orjson.JSONDecodeError) -> Any:
    if error.msg.startswith(_NESTED) and len(body) <= MAX_NESTED_BYTES:
        try:
            return orjson.loads(_flatten(body))
        except orjson.JSONDecodeError:
            raise internal(_why(body, error)) from None
    if (b"NaN" in body or b"Infinity" in body) and len(body) <= MAX_SLOW_BYTES:
        try:
            return _parse_not_finite(body)
        except (ValueError, RecursionError):
            pass
    raise internal(_why(body, error)) from None


def _parse_not_finite(body: bytes) -> Any:
    value = json.loads(body.decode(), parse_int=_integer, parse_float=_number)
    json.dumps(value, ensure_ascii=False).encode()  # a lone surrogate ends here, not later
    return value


def _integer(text: str) -> int | float:
    value = int(text) if len(text) <= 20 else None
    return value if value is not None and _INT64_MIN <= value < _UINT64_END else _number(text)


def _number(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError("number is infinity")
    return value


def _flatten(body: bytes) -> bytes:
    """The document with arrays directly inside arrays opened up; Triton counts elements and not levels.

    Raises:
        TritiumError: deeper than MAX_NESTING.
    """
    kept: list[bytes] = []
    levels: list[bool] = []  # of each open array, whether it was kept
    before = b""
    for found in _TOKEN.finditer(body):
        token = found.group()
        if token == b"[":
            if len(levels) >= MAX_NESTING:
                raise internal(f"failed to parse the request JSON buffer: nested deeper than {MAX_NESTING} levels")
            levels.append(before not in (b"[", b","))
            if levels[-1]:
                kept.append(token)
        elif token == b"]":
            if not levels or levels.pop():
                kept.append(token)
        elif token == b'"':
            raise internal("failed to parse the request JSON buffer: Missing a closing quotation mark in string.")
        else:
            kept.append(token)
        if not token.isspace():
            before = token
    return b"".join(kept)


def _why(body: bytes, error: orjson.JSONDecodeError) -> str:
    text = next((ours for theirs, ours in _TEXTS if error.msg.startswith(theirs)), None)
    if text is None:
        last = body[: error.pos].rstrip()[-1:]
        text = "Missing a name for object member." if last == b"{" else "Invalid value."
        if error.msg.startswith(_NESTED):
            text = "Nested too deeply."
    return f"failed to parse the request JSON buffer: {text} at {error.pos}"


def member(value: Any, key: str) -> Any:
    """The member ``key``, which must be there."""
    found = value.get(key, _MISSING) if isinstance(value, dict) else _MISSING
    if found is _MISSING:
        raise internal(f"Unable to parse '{key}': attempt to access non-existing object member '{key}'")
    return found


def string(value: Any, what: str) -> str:
    """``value`` as a text; ``what`` begins the error message, as in the functions below."""
    if not isinstance(value, str):
        raise internal(f"{what}: attempt to access JSON non-string as string")
    return value


def boolean(value: Any, what: str) -> bool:
    """``value`` as a truth value."""
    if not isinstance(value, bool):
        raise internal(f"{what}: attempt to access JSON non-boolean as boolean")
    return value


def unsigned(value: Any, what: str) -> int:
    """``value`` as an unsigned 64-bit integer."""
    if type(value) is not int or value < 0:
        raise internal(f"{what}: attempt to access JSON non-unsigned-integer as unsigned-integer")
    return value


def array(value: Any, what: str) -> list[Any]:
    """``value`` as an array."""
    if not isinstance(value, list):
        raise internal(f"{what}: attempt to access JSON non-array as array")
    return value


def members(value: Any, what: str = "") -> dict[str, Any]:
    """``value`` as an object."""
    if not isinstance(value, dict):
        raise internal(f"{what}attempt to get members for non-object")
    return value


def elements(tensor: Tensor) -> bytes:
    """The elements of a tensor as a JSON array, flat.

    NaN and infinities come out as ``NaN`` and ``Infinity`` and BYTES that are no UTF-8 as they are, both of
    which Triton does although it is no JSON. FP32 is printed as the shortest double of the same value.

    Raises:
        TritiumError: INVALID_ARGUMENT for FP16 and BF16, which Triton does not write.
    """
    if tensor.dtype is DType.BYTES:
        return b"[" + b",".join([_quoted(text) for text in tensor.strings()]) + b"]"
    if tensor.dtype in (DType.FP16, DType.BF16):
        raise invalid(
            f"sending {tensor.dtype.value} data via JSON is not supported. Please use the binary data format for output"
        )
    values = tensor.numpy().reshape(-1)
    if tensor.dtype in (DType.FP32, DType.FP64):
        values = values.astype(np.float64)
        if not np.isfinite(values).all():
            return json.dumps(values.tolist(), separators=(",", ":")).encode()
    # orjson takes no array that lies askew in memory, as a slice of a message may.
    return orjson.dumps(np.require(values, requirements="A"), option=orjson.OPT_SERIALIZE_NUMPY)


def _quoted(text: bytes) -> bytes:
    return b'"' + _ESCAPED.sub(_escape, text) + b'"' if _ESCAPED.search(text) else b'"' + text + b'"'


def _escape(found: re.Match[bytes]) -> bytes:
    return _SHORT.get(found.group()) or b"\\u%04X" % found.group()[0]
