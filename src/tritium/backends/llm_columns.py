"""Inputs of a language model by sequence: the values of a row, as numbers or as text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tritium.errors import invalid
from tritium.types import Tensor

MAX_JSON_BYTES = 1 << 16


class Column:
    """One input, by sequence."""

    def __init__(self, tensor: Tensor, batched: bool) -> None:
        self._tensor = tensor
        array = tensor.numpy()
        self._rows = array.reshape(array.shape[0], -1) if batched and array.ndim else array.reshape(1, -1)

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self._rows)))

    def numbers(self, row: int) -> list[Any]:
        """The values of that sequence; an input with one row holds for all of them."""
        if row >= len(self._rows) and len(self._rows) != 1:
            raise invalid(f"{self._tensor.name} has {len(self._rows)} rows, expected one per sequence")
        return self._rows[row if len(self._rows) > 1 else 0].tolist()

    def flag(self) -> bool:
        """The value of a switch, which is one for all sequences."""
        values = {bool(v) for v in self._rows.reshape(-1).tolist()}
        if len(values) != 1:
            raise invalid(f"{self._tensor.name} has no single value, expected one true or false")
        return values.pop()

    def texts(self, row: int) -> list[str]:
        """The same of a BYTES input, as text."""
        found: list[str] = []
        for value in self.numbers(row):
            try:
                found.append(bytes(value).decode())
            except UnicodeDecodeError as error:
                raise invalid(f"{self._tensor.name} is not UTF-8: {error.reason}", param=self._tensor.name) from None
        return found

    def text(self, row: int) -> str:
        """The only text of that sequence."""
        texts = self.texts(row)
        if len(texts) != 1:
            raise invalid(f"{self._tensor.name} has {len(texts)} texts, expected 1", param=self._tensor.name)
        return texts[0]


def shorten(tokens: list[int], length: int) -> list[int]:
    """The first ``length`` tokens, as ``input_lengths`` says it.

    Raises:
        TritiumError: INVALID_ARGUMENT when there are fewer.
    """
    if not 0 < length <= len(tokens):
        raise invalid(f"input_lengths is {length}, expected 1 to {len(tokens)}", param="input_lengths")
    return tokens[:length]


def json_object(text: str) -> dict[str, Any]:
    """``sampling_parameters`` of vLLM's backend: a JSON object whose values may be texts."""
    if len(text) > MAX_JSON_BYTES:
        raise invalid(f"sampling_parameters has {len(text)} characters, expected at most {MAX_JSON_BYTES}")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise invalid("sampling_parameters is not JSON", param="sampling_parameters") from None
    if not isinstance(value, dict):
        raise invalid("sampling_parameters is no JSON object", param="sampling_parameters")
    return {key: _plain(entry) if key != "stop" else entry for key, entry in value.items()}


def _plain(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value.lower())
    except (ValueError, RecursionError):
        return value
