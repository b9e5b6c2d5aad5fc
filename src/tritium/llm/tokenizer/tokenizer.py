"""The tokenizer of a checkpoint: one class over all formats, and the function that picks the reader."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

from tritium.errors import invalid
from tritium.llm.tokenizer import from_gguf, from_json, from_sentencepiece
from tritium.llm.tokenizer.chat_template import ChatTemplate, special_pattern
from tritium.llm.tokenizer.codec import Codec
from tritium.llm.tokenizer.detokenizer import Detokenizer
from tritium.llm.tokenizer.vocabulary import Vocabulary

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_LISTED_TOKENS = ("additional_special_tokens", "extra_special_tokens")


class TokenizerSource(Protocol):
    """What of a checkpoint's metadata is read here (``llm.checkpoint.Metadata``)."""

    @property
    def config(self) -> dict[str, Any]:
        """config.json."""
        ...

    @property
    def generation_config(self) -> dict[str, Any]:
        """generation_config.json."""
        ...

    @property
    def tokenizer(self) -> dict[str, Any]:
        """``tokenizer.json`` or ``tokenizer.model`` (paths) or ``gguf`` (key-values), and what lies beside them."""
        ...


@dataclass(frozen=True)
class TokenizerParts:
    """What a reader found out.

    Attributes:
        vocabulary: the tokens.
        codec: text to ids.
        named: ``bos_token``, ``eos_token`` ... -> spelling.
        before: ids put before a text when special tokens are added.
        after: ids put after it.
        ends: ids that end an answer, the tokenizer's own first.
        templates: chat templates by name.
        listed: further control tokens, which templates see as ``additional_special_tokens``.
    """

    vocabulary: Vocabulary
    codec: Codec
    named: dict[str, str] = field(default_factory=dict)
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    templates: dict[str, str] = field(default_factory=dict)
    listed: tuple[str, ...] = ()


class Tokenizer:
    """Text to token ids and back, and messages to prompts. Immutable; safe to use from several threads.

    Attributes:
        vocab_size: one more than the largest id of the tokenizer. A model's own vocabulary may be larger; ids
            between the two decode to nothing.
        bos_token_id: id that opens a text; None when the model has none.
        eos_token_ids: ids that end an answer.
    """

    def __init__(self, parts: TokenizerParts) -> None:
        vocabulary = parts.vocabulary
        self._vocabulary = vocabulary
        self._codec = parts.codec
        self._before, self._after = list(parts.before), list(parts.after)
        special = {vocabulary.tokens[number]: number for number in sorted(vocabulary.special)}
        self._special = {token: number for token, number in special.items() if token}
        self._find_special = special_pattern(self._special)
        variables: dict[str, Any] = dict(parts.named)
        if parts.listed:
            variables["additional_special_tokens"] = list(parts.listed)
        self._chat = ChatTemplate(parts.templates, self._special, variables)
        self.vocab_size = vocabulary.size
        bos = parts.named.get("bos_token")
        self.bos_token_id = None if bos is None else vocabulary.ids.get(bos)
        self.eos_token_ids = parts.ends

    @property
    def chat_templates(self) -> tuple[str, ...]:
        """Names of the checkpoint's chat templates; empty when it has none."""
        return self._chat.names

    @cached_property
    def longest_token(self) -> int:
        """Bytes of the longest token: a text of N bytes has at least N / longest_token tokens."""
        return max((len(self._vocabulary.piece(number)) for number in range(self.vocab_size)), default=0) or 1

    def encode(self, text: str, *, add_special_tokens: bool = True, allow_special: bool = False) -> list[int]:
        """Token ids of a text.

        Args:
            text: any text that is valid Unicode.
            add_special_tokens: add BOS and EOS as the model has it; a BOS that the text itself spells is not doubled.
            allow_special: spellings of control tokens are those tokens. Otherwise they are text.

        Raises:
            TritiumError: the text holds half of a surrogate pair, or the tokenizer fails on it.
        """
        ids = self._codec.encode(self._split(_valid(text)) if allow_special else [_valid(text)])
        return self._framed(ids) if add_special_tokens else ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of some ids; invalid bytes become U+FFFD, ids without a token nothing."""
        detokenizer = self.detokenizer(skip_special_tokens=skip_special_tokens)
        return detokenizer.push(ids) + detokenizer.flush()

    def detokenizer(self, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True) -> Detokenizer:
        """A decoder for the ids that follow ``prompt_ids``."""
        return Detokenizer(self._vocabulary, prompt_ids, skip_special_tokens=skip_special_tokens)

    def id_to_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes of one token, possibly part of a character; of a control token, its spelling."""
        return self._vocabulary.piece(token_id)

    def token_text(self, token_id: int) -> str:
        """One token alone as text; bytes that are no whole character become U+FFFD."""
        return self._vocabulary.piece(token_id).decode("utf-8", "replace")

    def is_special(self, token_id: int) -> bool:
        """True for a control token, which ``skip_special_tokens`` leaves out."""
        return token_id in self._vocabulary.special

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template: str | None = None,
        **variables: Any,
    ) -> str:
        """The prompt of a conversation as text; see ``ChatTemplate.render`` for arguments and errors."""
        parts = self._chat.render(
            messages, add_generation_prompt=add_generation_prompt, tools=tools, template=template, variables=variables
        )
        return "".join(part if isinstance(part, str) else self._vocabulary.tokens[part] or "" for part in parts)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template: str | None = None,
        **variables: Any,
    ) -> list[int]:
        """The prompt of a conversation as ids.

        Control tokens stand only where the template wrote them; a message that spells one has it as text. The
        template alone says whether the prompt opens with BOS. See ``ChatTemplate.render`` for arguments and errors.
        """
        parts = self._chat.render(
            messages, add_generation_prompt=add_generation_prompt, tools=tools, template=template, variables=variables
        )
        return self._codec.encode([_valid(part, "messages") if isinstance(part, str) else part for part in parts])

    def _split(self, text: str) -> list[str | int]:
        if self._find_special is None:
            return [text]
        parts: list[str | int] = []
        end = 0
        for match in self._find_special.finditer(text):
            parts += [text[end : match.start()], self._special[match[0]]]
            end = match.end()
        return [part for part in (*parts, text[end:]) if part != ""]

    def _framed(self, ids: list[int]) -> list[int]:
        before, after = self._before, self._after
        opened = bool(before) and ids[: len(before)] == before
        closed = bool(after) and ids[len(ids) - len(after) :] == after
        return ([] if opened else before) + ids + ([] if closed else after)


def load_tokenizer(metadata: TokenizerSource) -> Tokenizer:
    """The tokenizer of a checkpoint.

    Raises:
        TritiumError: there is none, it is malformed, or of a kind that is not supported; the message names the
            file and field.
    """
    files = metadata.tokenizer
    if "tokenizer.json" in files:
        parts = _of_json(files)
    elif "tokenizer.model" in files:
        parts = _of_sentencepiece(files)
    elif "gguf" in files:
        parts = _of_gguf(files["gguf"])
    else:
        raise invalid("the checkpoint has no tokenizer; expected tokenizer.json, tokenizer.model or GGUF metadata")
    ends = dict.fromkeys((*parts.ends, *_declared_ends(metadata)))
    return Tokenizer(replace(parts, ends=tuple(ends), templates=parts.templates | _templates(files)))


def _of_json(files: Mapping[str, Any]) -> TokenizerParts:
    config = files.get("tokenizer_config") or {}
    named, listed = _named(files)
    document = from_json.read_document(files["tokenizer.json"])
    known = {entry.get("content") for entry in document.get("added_tokens") or () if isinstance(entry, dict)}
    more = [entry for entry in _added_tokens(files) if entry["content"] not in known]
    vocabulary, codec = from_json.build(document, {*named.values(), *listed}, more)
    # The file's post-processor decides, as in transformers 5. Where it adds nothing, an explicit flag still counts:
    # DeepSeek's files rely on their tokenizer class reading it.
    before, after = codec.framing()
    before = before or _frame(config.get("add_bos_token"), named.get("bos_token"), vocabulary)
    after = after or _frame(config.get("add_eos_token"), named.get("eos_token"), vocabulary)
    return TokenizerParts(
        vocabulary, codec, named, tuple(before), tuple(after), _end(named, vocabulary), listed=tuple(listed)
    )


def _of_sentencepiece(files: Mapping[str, Any]) -> TokenizerParts:
    config = files.get("tokenizer_config") or {}
    named, listed = _named(files)
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"} | named
    added = _added_tokens(files)
    special = {*named.values(), *listed, *(entry["content"] for entry in added if entry.get("special"))}
    vocabulary, codec = from_sentencepiece.build(
        files["tokenizer.model"],
        {entry["content"]: int(entry["id"]) for entry in added},
        special,
        legacy=bool(config.get("legacy", True)),
    )
    named = {name: token for name, token in named.items() if token in vocabulary.ids}
    before = _frame(config.get("add_bos_token", True), named.get("bos_token"), vocabulary)
    after = _frame(config.get("add_eos_token", False), named.get("eos_token"), vocabulary)
    return TokenizerParts(
        vocabulary, codec, named, tuple(before), tuple(after), _end(named, vocabulary), listed=tuple(listed)
    )


def _of_gguf(values: Mapping[str, Any]) -> TokenizerParts:
    read = from_gguf.build(values)
    named = {name: token for name, number in read.named.items() if (token := read.vocabulary.tokens[number])}
    return TokenizerParts(
        read.vocabulary,
        read.codec,
        named,
        (read.named["bos_token"],) if read.adds_bos else (),
        (read.named["eos_token"],) if read.adds_eos else (),
        read.ends,
        read.templates,
    )


def _spelling(value: Any) -> str | None:
    """A token of a config file: a string, or an object with its ``content``."""
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else None


def _named(files: Mapping[str, Any]) -> tuple[dict[str, str], list[str]]:
    merged = {**(files.get("special_tokens_map") or {}), **(files.get("tokenizer_config") or {})}
    named = {name: token for name in _NAMED_TOKENS if (token := _spelling(merged.get(name))) is not None}
    listed: list[str] = []
    for name in _LISTED_TOKENS:
        values = merged.get(name) or ()
        for value in values.values() if isinstance(values, dict) else values:
            if (token := _spelling(value)) is not None:
                listed.append(token)
    return named, list(dict.fromkeys(listed))


def _added_tokens(files: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Tokens beside the model: ``added_tokens.json``, and ``added_tokens_decoder``, which says more about them."""
    found = {token: {"content": token, "id": number} for token, number in (files.get("added_tokens") or {}).items()}
    decoder = (files.get("tokenizer_config") or {}).get("added_tokens_decoder") or {}
    for number, entry in decoder.items():
        if not str(number).isdecimal() or _spelling(entry) is None:
            raise invalid(f"tokenizer_config.json: added_tokens_decoder[{number!r}] is not an id with a 'content'")
        found[entry["content"]] = {**entry, "id": int(number)}
    return list(found.values())


def _frame(wanted: Any, token: str | None, vocabulary: Vocabulary) -> tuple[int, ...]:
    return (vocabulary.ids[token],) if wanted and token is not None and token in vocabulary.ids else ()


def _end(named: Mapping[str, str], vocabulary: Vocabulary) -> tuple[int, ...]:
    token = named.get("eos_token")
    return (vocabulary.ids[token],) if token is not None and token in vocabulary.ids else ()


def _declared_ends(metadata: TokenizerSource) -> list[int]:
    for file, config in (("generation_config.json", metadata.generation_config), ("config.json", metadata.config)):
        ends = config.get("eos_token_id")
        if ends is None:
            continue
        ids = ends if isinstance(ends, list) else [ends]
        if not all(type(end) is int and end >= 0 for end in ids):
            raise invalid(f"{file}: eos_token_id is {ends!r:.100}, expected a token id or a list of them")
        return ids
    return []


def _templates(files: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name; what ``chat_template`` beside the other files says is the default."""
    named: dict[str, str] = {}
    for given in ((files.get("tokenizer_config") or {}).get("chat_template"), files.get("chat_template")):
        if isinstance(given, str):
            named["default"] = given
            continue
        if isinstance(given, list):
            given = {entry.get("name"): entry.get("template") for entry in given if isinstance(entry, dict)}
        named |= {str(name): text for name, text in (given or {}).items() if isinstance(text, str)}
    return named


def _valid(text: str, param: str = "prompt") -> str:
    """The text, when it can be encoded as UTF-8 at all."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise invalid(
            f"the text has half of a surrogate pair (U+{ord(text[error.start]):04X}) at character {error.start};"
            " expected valid Unicode",
            param=param,
        ) from error
    return text
