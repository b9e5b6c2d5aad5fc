"""What each token id stands for: its spelling, its bytes, and whether it is a control token."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

SPACE = "\u2581"
"""How sentencepiece vocabularies spell a space."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """Character -> byte of GPT-2's byte-level alphabet (Radford et al. 2019, encoder.py).

    Printable Latin-1 bytes stand for themselves; the other 68 follow from U+0100 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


BYTE_LEVEL = _byte_level_alphabet()


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a model, by id.

    Attributes:
        tokens: spelling of each id as its file has it; None where an id is unused.
        byte_level: spellings use GPT-2's byte alphabet; otherwise they are sentencepiece's.
        byte_fallback: ``<0xNN>`` is the byte NN (sentencepiece vocabularies only).
        strips_prefix: the first text token loses one leading space, because encoding added it.
        literal: ids whose spelling is plain text whatever the alphabet (tokens added beside the model).
        special: ids of control tokens; user text never produces them, and ``skip_special_tokens`` drops them.
    """

    tokens: Sequence[str | None]
    byte_level: bool
    byte_fallback: bool = False
    strips_prefix: bool = False
    literal: frozenset[int] = frozenset()
    special: frozenset[int] = frozenset()
    ids: Mapping[str, int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        ids = {token: number for number, token in enumerate(self.tokens) if token is not None}
        object.__setattr__(self, "ids", ids)

    @property
    def size(self) -> int:
        """One more than the largest id."""
        return len(self.tokens)

    def spelling(self, token_id: int) -> str | None:
        """The token as its file spells it; None for an id without a token (a model's vocabulary may be padded)."""
        return self.tokens[token_id] if 0 <= token_id < len(self.tokens) else None

    def piece(self, token_id: int) -> bytes:
        """The UTF-8 bytes that a token adds to a text, possibly part of a character; empty for an unused id."""
        token = self.spelling(token_id)
        if token is None:
            return b""
        if token_id in self.literal:
            return token.encode()
        if self.byte_level:
            try:
                return bytes([BYTE_LEVEL[char] for char in token])
            except KeyError:
                return token.encode()
        if self.byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return token.replace(SPACE, " ").encode()
