"""Reads a ``tokenizer.model`` through the sentencepiece library, with the tokens added beside it."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from tritium.errors import Code, TritiumError, invalid, pip_install
from tritium.llm.tokenizer.vocabulary import Vocabulary

_NO_PREFIX = b"\x1a\x02\x18\x00"
"""``ModelProto(normalizer_spec(add_dummy_prefix=false))`` on the wire: behind a serialized model it overrides it."""


def build(
    path: Path, added: Mapping[str, int], special: Iterable[str], *, legacy: bool
) -> tuple[Vocabulary, SentencepieceCodec]:
    """Vocabulary and codec of a sentencepiece model.

    Args:
        path: the tokenizer.model.
        added: tokens beside the model -> id, beyond its own ids or naming one of them.
        special: tokens that are control tokens beside those that the model says are.
        legacy: the model's dummy prefix also goes before text that follows an added or control token
            (``legacy`` of tokenizer_config.json).

    Raises:
        TritiumError: sentencepiece is not installed, the file is no model, or ids contradict each other.
    """
    library = _library()
    processor = _load(library, path, b"")
    size: int = processor.get_piece_size()
    tokens: list[str | None] = [processor.id_to_piece(number) for number in range(size)]
    for token, number in sorted(added.items(), key=lambda item: item[1]):
        if number < 0 or number > size + len(added):
            raise invalid(f"added token {token!r} has id {number}; expected one below {size + len(added)}")
        tokens += [None] * (number + 1 - len(tokens))
        if number < size and tokens[number] != token:
            raise invalid(f"added token {token!r} has id {number}, which is {tokens[number]!r} in {path.name}")
        tokens[number] = token
    own = (number for number in range(size) if processor.is_control(number) or processor.is_unknown(number))
    named = set(special)
    vocabulary = Vocabulary(
        tokens,
        byte_level=False,
        byte_fallback=any(processor.is_byte(number) for number in range(size)),
        strips_prefix=processor.normalize("a").startswith("\u2581"),
        special=frozenset(own) | {number for number, token in enumerate(tokens) if token in named},
    )
    inside = _load(library, path, _NO_PREFIX)
    return vocabulary, SentencepieceCodec(processor, inside, vocabulary, added, legacy=legacy)


def _library() -> Any:
    try:
        return importlib.import_module("sentencepiece")
    except ImportError as error:
        raise TritiumError(
            Code.UNIMPLEMENTED,
            f"this checkpoint's tokenizer is a sentencepiece model: {pip_install('tritium[sentencepiece]')}",
        ) from error


def _load(library: Any, path: Path, override: bytes) -> Any:
    processor = library.SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(path.read_bytes() + override)
    except RuntimeError as error:
        raise invalid(f"{path.name} is not a sentencepiece model") from error
    return processor


class SentencepieceCodec:
    """A codec on the sentencepiece library.

    Args:
        start: the model, for text at the start.
        inside: the same model without the dummy prefix.
        vocabulary: the tokens.
        added: tokens beside the model -> id.
        legacy: see ``build``.
    """

    def __init__(
        self, start: Any, inside: Any, vocabulary: Vocabulary, added: Mapping[str, int], *, legacy: bool
    ) -> None:
        self._start = start
        self._inside = start if legacy else inside
        self._without_prefix = inside
        self._special = vocabulary.special
        # A model may declare a control token as user-defined; it would then be found in any text.
        self._found_anyway = frozenset(
            number for number in vocabulary.special if number < start.get_piece_size() and not _is_own(start, number)
        )
        self._added = {token: number for token, number in added.items() if number not in vocabulary.special}
        longest_first = sorted(self._added, key=len, reverse=True)
        self._cut = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if longest_first else None

    def encode(self, parts: Sequence[str | int]) -> list[int]:
        """See ``Codec.encode``."""
        ids: list[int] = []
        processor = self._start
        for part in self._split(parts):
            ids += [part] if isinstance(part, int) else self._text(processor, part)
            processor = self._inside
        return ids

    def _split(self, parts: Sequence[str | int]) -> Iterator[str | int]:
        for part in parts:
            if isinstance(part, int) or self._cut is None:
                if part != "":
                    yield part
                continue
            for piece in self._cut.split(part):
                if piece:
                    yield self._added.get(piece, piece)

    def _text(self, processor: Any, text: str) -> list[int]:
        ids: list[int] = processor.encode(text)
        if self._found_anyway.isdisjoint(ids):
            return ids
        # Encoded character by character, the spelling is text.
        spellings = [re.escape(processor.id_to_piece(number)) for number in self._found_anyway]
        cuts = [
            cut for match in re.finditer("|".join(spellings), text) for cut in range(match.start() + 1, match.end())
        ]
        ids = []
        for start, end in pairwise([0, *cuts, len(text)]):
            ids += processor.encode(text[start:end])
            processor = self._without_prefix
        return [number for number in ids if number not in self._found_anyway]


def _is_own(processor: Any, number: int) -> bool:
    return processor.is_control(number) or processor.is_unknown(number) or processor.is_byte(number)
