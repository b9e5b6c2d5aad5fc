"""Incremental decoding: token ids in, whole characters out."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from tritium.llm.tokenizer.vocabulary import Vocabulary


class Detokenizer:
    """Decodes one sequence as it grows, in constant time per token.

    Every token is a run of bytes, so the text is the UTF-8 decoding of their concatenation, and only an incomplete
    character at the end (at most three bytes) is ever held back. Truly invalid bytes become U+FFFD, one for each
    maximal ill-formed part (Unicode 16, section 3.9), and decoding goes on behind them. So the concatenation of all
    pieces is the decoding of all ids, wherever they were split.

    Args:
        vocabulary: the tokens.
        prompt_ids: what comes before. It is not decoded; it only decides whether the first token opens the text
            (a sentencepiece token then loses the space that encoding put before it).
        skip_special_tokens: leave control tokens out.
    """

    def __init__(
        self, vocabulary: Vocabulary, prompt_ids: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> None:
        self._vocabulary = vocabulary
        self._skipped = vocabulary.special if skip_special_tokens else frozenset[int]()
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        self._opens_text = vocabulary.strips_prefix and not any(map(self._piece, reversed(prompt_ids)))

    def push(self, ids: Iterable[int]) -> str:
        """Text that these ids complete; may be empty."""
        pieces = [piece for token_id in ids if (piece := self._piece(token_id))]
        if pieces and self._opens_text:
            self._opens_text = False
            pieces[0] = pieces[0].removeprefix(b" ")
        return self._decode(b"".join(pieces))

    def flush(self) -> str:
        """What is held back at the end of the sequence: U+FFFD when a character stayed incomplete, else nothing."""
        return self._decode(b"", True)

    def _piece(self, token_id: int) -> bytes:
        return b"" if token_id in self._skipped else self._vocabulary.piece(token_id)
