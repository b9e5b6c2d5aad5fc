"""Log-probabilities beside text: which token made which characters, in both of OpenAI's forms.

A token is handed out only when its characters are, so that a stream and a whole answer agree, nothing of a
stop string shows, and ``"".join(tokens)`` is the text. A token in the middle of a character (UTF-8 spread
over several) has no characters of its own: completions show it as "", chats as its bytes escaped, with
``bytes`` exact. Alternatives are always shown alone, never as a continuation.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tritium.frontends.openai.answers import ChatLogprob, ChatLogprobs, CompletionLogprobs, TopLogprob
from tritium.llm.types import FinishReason, GenerateRequest, TokenDelta, TokenLogprob

if TYPE_CHECKING:
    from tritium.llm.tokenizer import Tokenizer

# What OpenAI writes for a token that cannot come; JSON has no infinity.
LEAST = -9999.0


@dataclass(slots=True)
class Entry:
    """One token: the characters that it added, and where they begin in the answer's text."""

    found: TokenLogprob
    piece: str
    start: int


class Ledger:
    """Pairs the tokens of one answer with its text."""

    def __init__(self, tokenizer: Tokenizer, request: GenerateRequest) -> None:
        params = request.params
        self._detokenizer = tokenizer.detokenizer(request.tokens, skip_special_tokens=params.skip_special_tokens)
        self._include_stop = params.include_stop
        self._waiting: deque[Entry] = deque()
        self._made = 0
        self._sent = 0

    def add(self, delta: TokenDelta) -> list[Entry]:
        """The entries whose characters are out after this delta; the last one gives what is left."""
        found = delta.logprobs or []
        by_text = isinstance(delta.stop_reason, str)
        if delta.finish is FinishReason.STOP and not by_text and not self._include_stop:
            # The last token ended the answer and is no part of it.
            found = found[: max(0, len(delta.tokens) - 1)]
        for one in found:
            self._push(one, self._detokenizer.push([one.token]))
        self._sent += len(delta.text)
        if delta.finish is None:
            return self._release()
        if self._waiting:
            self._waiting[-1].piece += self._detokenizer.flush()
        return self._close(by_text)

    def _push(self, found: TokenLogprob, piece: str) -> None:
        self._waiting.append(Entry(found, piece, self._made))
        self._made += len(piece)

    def _release(self) -> list[Entry]:
        """Entries up to the last one that ends a piece of the text; half a character waits for its other half."""
        count = 0
        for number, entry in enumerate(self._waiting, 1):
            if entry.start + len(entry.piece) > self._sent:
                break
            if entry.piece:
                count = number
        return [self._waiting.popleft() for _ in range(count)]

    def _close(self, by_text: bool) -> list[Entry]:
        out: list[Entry] = []
        for entry in self._waiting:
            if by_text and entry.start >= self._sent:
                break
            entry.piece = entry.piece[: max(0, self._sent - entry.start)] if by_text else entry.piece
            out.append(entry)
        self._waiting.clear()
        return out


class Renderer:
    """Writes entries in OpenAI's forms; one per answer, since it remembers what tokens look like."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, bytes, bool]] = {}

    def chat(self, entries: list[Entry]) -> ChatLogprobs:
        """``choices[].logprobs`` of a chat."""
        return ChatLogprobs([self._chat_entry(entry) for entry in entries])

    def completion(self, entries: list[Entry]) -> CompletionLogprobs:
        """``choices[].logprobs`` of a completion."""
        return CompletionLogprobs(
            tokens=[entry.piece for entry in entries],
            token_logprobs=[_finite(entry.found.logprob) for entry in entries],
            top_logprobs=[self._best(entry.found) for entry in entries],
            text_offset=[entry.start for entry in entries],
        )

    def _chat_entry(self, entry: Entry) -> ChatLogprob:
        text, raw, whole = self._alone(entry.found.token)
        shown: list[int] | None = list(raw)
        if whole and not entry.piece:
            # A control token that is left out of the text.
            shown = None
        elif whole and "\ufffd" not in entry.piece:
            # As it stands in the answer: without a leading space, or cut by a stop string.
            text, shown = entry.piece, list(entry.piece.encode())
        top = [self._top(token, logprob) for token, logprob in entry.found.top]
        return ChatLogprob(text, _finite(entry.found.logprob), shown, top)

    def _top(self, token: int, logprob: float) -> TopLogprob:
        text, raw, _ = self._alone(token)
        return TopLogprob(text, _finite(logprob), list(raw))

    def _best(self, found: TokenLogprob) -> dict[str, float]:
        """Text to log-probability, the chosen token always among them; of two tokens that look alike, the better."""
        best: dict[str, float] = {}
        for token, logprob in [*found.top, (found.token, found.logprob)]:
            text, _, whole = self._alone(token)
            best.setdefault(text if whole else f"bytes:{text}", _finite(logprob))
        return best

    def _alone(self, token: int) -> tuple[str, bytes, bool]:
        """A token by itself: text, bytes, and whether the bytes are text (otherwise they are escaped)."""
        known = self._known.get(token)
        if known is None:
            raw = self._tokenizer.id_to_bytes(token) or self._tokenizer.token_text(token).encode()
            try:
                known = (raw.decode(), raw, True)
            except UnicodeDecodeError:
                known = ("".join(f"\\x{byte:02x}" for byte in raw), raw, False)
            self._known[token] = known
        return known


def _finite(logprob: float) -> float:
    return max(logprob, LEAST)
