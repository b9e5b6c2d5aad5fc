"""How text becomes token ids: one small interface, and its form on the ``tokenizers`` library."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from tokenizers import Tokenizer as LibraryTokenizer

from tritium.errors import invalid


class Codec(Protocol):
    """Turns a text with control tokens at known places into ids; safe to call from several threads."""

    def encode(self, parts: Sequence[str | int]) -> list[int]:
        """Ids of the parts in order.

        A ``str`` is plain text: it never yields a control token, even where it spells one. An ``int`` is the id of
        a control token standing there. Parts are one text: what a tokenizer does only at the start of a text
        happens once.
        """
        ...


class Aliases:
    """Other spellings for control tokens, which no user can write.

    The ``tokenizers`` library finds control tokens by their spelling in the text. Here the tokenizer knows each of
    them only under a spelling with 64 random bits, drawn anew in every process. Text that spells the public name is
    therefore text, for every kind of model and pre-tokenizer, and one call still encodes text and control tokens
    together.
    """

    def __init__(self, special: Mapping[str, int]) -> None:
        secret = secrets.token_hex(8)
        self.of_id = {number: f"\ue000{secret}.{number}\ue001" for number in special.values()}
        self.of_token = {token: self.of_id[number] for token, number in special.items()}

    def rename(self, token: str) -> str:
        """The alias of a control token; any other token unchanged."""
        return self.of_token.get(token, token)


class LibraryCodec:
    """A codec on the ``tokenizers`` library."""

    def __init__(self, library: LibraryTokenizer, aliases: Aliases) -> None:
        self._library = library
        self._aliases = aliases

    def encode(self, parts: Sequence[str | int]) -> list[int]:
        """See ``Codec.encode``."""
        return self._run("".join(self._spell(parts)))

    def framing(self) -> tuple[list[int], list[int]]:
        """Ids that the file's post-processor puts before and after a text, found by encoding one."""
        bare, framed = self._run("a"), self._run("a", frame=True)
        for start in range(len(framed) - len(bare) + 1):
            if framed[start : start + len(bare)] == bare:
                return framed[:start], framed[start + len(bare) :]
        raise invalid("tokenizer.json has a post_processor that changes the tokens of the text")

    def _spell(self, parts: Iterable[str | int]) -> Iterable[str]:
        for part in parts:
            yield part if isinstance(part, str) else self._aliases.of_id[part]

    def _run(self, text: str, *, frame: bool = False) -> list[int]:
        try:
            # A batch of one: the library's encode() would keep every other thread of this process from running.
            return self._library.encode_batch_fast([text], add_special_tokens=frame)[0].ids
        except BaseException as error:
            # The library panics (a BaseException) when a checkpoint's regular expression backtracks more than its
            # limit of ten million steps on a text. That is one request's failure, not this thread's.
            if is_library_failure(error):
                raise invalid(f"the text could not be tokenized: {error}", param="prompt") from error
            raise


def is_library_failure(error: BaseException) -> bool:
    """True for what the ``tokenizers`` library raises; false for an interrupt or an exit."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"
