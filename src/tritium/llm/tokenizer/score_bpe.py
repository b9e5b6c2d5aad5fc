"""Sentencepiece's byte-pair merging by scores, for vocabularies that come without their merge list.

The ``tokenizers`` library can only merge by an ordered list of pairs. Scores are not one: pairs that make tokens of
equal score are taken from left to right, and enlarged vocabularies (Chinese-LLaMA) give all their new tokens the
same score. The algorithm is that of Kudo and Richardson 2018 (sentencepiece, "bpe"), as GGUF's ``llama`` vocabularies
mean it: the adjacent pair with the highest score first, ties from the left.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from heapq import heapify, heappop, heappush

from tritium.llm.tokenizer.vocabulary import SPACE

_CACHED_WORDS = 1 << 16
_CACHED_LENGTH = 64


class ScoreCodec:
    """A codec for a vocabulary with scores.

    Args:
        pieces: tokens that text can become -> id.
        scores: score of each id; higher merges first.
        user_defined: tokens found in the text before anything else -> id.
        bytes_: ``<0xNN>`` -> id, for characters without a token; may be empty.
        unknown: id for such a character when there are no byte tokens; None drops it.
        space_prefix: a space is put before the text, and before text behind a control or user-defined token.
    """

    def __init__(
        self,
        pieces: Mapping[str, int],
        scores: Sequence[float],
        user_defined: Mapping[str, int],
        bytes_: Mapping[str, int],
        unknown: int | None,
        space_prefix: bool,
    ) -> None:
        self._pieces = pieces
        self._scores = scores
        self._user_defined = user_defined
        self._bytes = [bytes_.get(f"<0x{byte:02X}>", unknown) for byte in range(256)] if bytes_ else None
        self._unknown = unknown
        self._prefix = " " if space_prefix else ""
        longest_first = sorted(user_defined, key=len, reverse=True)
        self._cut = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if longest_first else None
        # When no token has a space behind another character, no merge crosses that place: text falls into words.
        crosses = any(SPACE in piece.lstrip(SPACE) for piece in pieces)
        self._words = re.compile("(?s).+" if crosses else f"{SPACE}+[^{SPACE}]*|[^{SPACE}]+")
        self._cached = lru_cache(maxsize=_CACHED_WORDS)(self._merge)

    def encode(self, parts: Sequence[str | int]) -> list[int]:
        """See ``Codec.encode``."""
        ids: list[int] = []
        for part in self._split(parts):
            if isinstance(part, int):
                ids.append(part)
                continue
            for word in self._words.findall((self._prefix + part).replace(" ", SPACE)):
                ids += self._cached(word) if len(word) <= _CACHED_LENGTH else self._merge(word)
        return ids if self._bytes else _join_unknown(ids, self._unknown)

    def _split(self, parts: Sequence[str | int]) -> Iterator[str | int]:
        for part in parts:
            if isinstance(part, int) or self._cut is None:
                if part != "":
                    yield part
                continue
            for piece in self._cut.split(part):
                if piece:
                    yield self._user_defined.get(piece, piece)

    def _merge(self, word: str) -> tuple[int, ...]:
        """Merge one word: symbols in a linked list, candidate pairs in a heap; O(n log n)."""
        symbols: list[str] = list(word)
        following = list(range(1, len(symbols) + 1))
        before = list(range(-1, len(symbols) - 1))
        pieces, scores = self._pieces, self._scores

        def candidates(left: int) -> Iterator[tuple[float, int, int, str]]:
            right = following[left]
            if right < len(symbols):
                joined = symbols[left] + symbols[right]
                if (token := pieces.get(joined)) is not None:
                    yield -scores[token], left, right, joined

        heap = [pair for left in range(len(symbols) - 1) for pair in candidates(left)]
        heapify(heap)
        while heap:
            _, left, right, joined = heappop(heap)
            # A pair is stale when either side has been merged since: the lengths no longer add up, or it is gone.
            if following[left] != right or not symbols[left] or symbols[left] + symbols[right] != joined:
                continue
            symbols[left], symbols[right] = joined, ""
            following[left] = following[right]
            if following[left] < len(symbols):
                before[following[left]] = left
            for pair in candidates(left):
                heappush(heap, pair)
            if before[left] >= 0:
                for pair in candidates(before[left]):
                    heappush(heap, pair)
        return tuple(self._ids(symbol for symbol in symbols if symbol))

    def _ids(self, symbols: Iterator[str]) -> Iterator[int]:
        for symbol in symbols:
            if (token := self._pieces.get(symbol)) is not None:
                yield token
            elif self._bytes:
                yield from (token for byte in symbol.encode() if (token := self._bytes[byte]) is not None)
            elif self._unknown is not None:
                yield self._unknown


def _join_unknown(ids: list[int], unknown: int | None) -> list[int]:
    """A run of unknown characters is one unknown token, as sentencepiece has it."""
    return [token for n, token in enumerate(ids) if token != unknown or n == 0 or ids[n - 1] != unknown]
