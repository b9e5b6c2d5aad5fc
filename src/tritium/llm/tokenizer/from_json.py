"""Reads a ``tokenizer.json`` (the format of the ``tokenizers`` library)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson
from tokenizers import Tokenizer as LibraryTokenizer

from tritium.errors import Code, TritiumError, invalid
from tritium.llm.tokenizer.codec import Aliases, LibraryCodec, is_library_failure
from tritium.llm.tokenizer.vocabulary import SPACE, Vocabulary

MAX_FILE_BYTES = 512 << 20
"""Largest tokenizer.json that is read; the largest known one (256k tokens) has 35 MB."""

Document = dict[str, Any]


def read_document(path: Path) -> Document:
    """Parse a tokenizer.json.

    Raises:
        TritiumError: the file is too large, no JSON, or no object with a model.
    """
    size = path.stat().st_size
    if size > MAX_FILE_BYTES:
        raise invalid(f"{path.name} has {size} bytes; at most {MAX_FILE_BYTES} are read")
    try:
        document = orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError as error:
        raise invalid(f"{path.name} is not valid JSON: {error}") from error
    if not isinstance(document, dict) or not isinstance(document.get("model"), dict):
        raise invalid(f"{path.name} is not a tokenizer: expected an object with a 'model'")
    return document


def build(document: Document, special: Iterable[str], more: Iterable[Document] = ()) -> tuple[Vocabulary, LibraryCodec]:
    """Vocabulary and codec of a tokenizer.json document.

    Args:
        document: the parsed file; it is changed.
        special: tokens that the checkpoint declares as control tokens elsewhere (``eos_token`` and so on).
        more: added tokens from elsewhere (``added_tokens_decoder`` of tokenizer_config.json), in the same form as
            the document's ``added_tokens``.

    Raises:
        TritiumError: a field is missing, inconsistent or of a kind that cannot be decoded piece by piece.
    """
    try:
        return _build(document, set(special), more)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise invalid(f"tokenizer.json is malformed: {type(error).__name__}: {error}") from error


def _build(document: Document, special: set[str], more: Iterable[Document]) -> tuple[Vocabulary, LibraryCodec]:
    added = {entry["content"]: dict(entry) for entry in (*document.get("added_tokens", ()), *more)}
    spellings = _model_tokens(document["model"])
    for token, entry in added.items():
        spellings[token] = int(entry["id"])
    special = {token for token in special if token in added or _stands_apart(token, document["model"])}
    special |= {token for token, entry in added.items() if entry.get("special")}
    for token in special:
        added.setdefault(token, {"id": spellings[token], "content": token})["special"] = True

    decoding = _decoding(document.get("decoder"))
    vocabulary = Vocabulary(
        _by_id(spellings),
        **decoding,
        # In a sentencepiece vocabulary added tokens keep its alphabet: Gemma adds runs of U+2581.
        literal=frozenset(int(entry["id"]) for entry in added.values() if decoding["byte_level"]),
        special=frozenset(spellings[token] for token in special),
    )
    aliases = Aliases({token: spellings[token] for token in special})
    document["added_tokens"] = _added_tokens(added, aliases)
    _rename_in_model(document["model"], aliases)
    return vocabulary, LibraryCodec(_library(document, added, aliases), aliases)


def _stands_apart(token: str, model: Document) -> bool:
    """True for a token of the model that no text becomes.

    Some checkpoints name an ordinary token as their ``pad_token``, "!" say; making that one unreachable would lose
    text.
    """
    if token not in (model["vocab"] if isinstance(model["vocab"], dict) else {entry[0] for entry in model["vocab"]}):
        return False
    return len(token) > 1 and all(left + right != token for left, right in _pairs(model))


def _by_id(spellings: Mapping[str, int]) -> list[str | None]:
    largest = max(spellings.values(), default=-1)
    if largest > 4 * len(spellings) + 65536:
        raise invalid(f"tokenizer.json gives id {largest} to one of {len(spellings)} tokens; ids must be dense")
    tokens: list[str | None] = [None] * (largest + 1)
    for token, number in spellings.items():
        tokens[number] = token
    return tokens


def _model_tokens(model: Document) -> dict[str, int]:
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        return dict(vocab)
    return {entry[0]: number for number, entry in enumerate(vocab)}


def _added_tokens(added: Mapping[str, Document], aliases: Aliases) -> list[Document]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    entries = [
        {name: entry.get(name, default) for name, default in flags.items()}
        | {"id": int(entry["id"]), "content": aliases.rename(token)}
        for token, entry in added.items()
    ]
    return sorted(entries, key=lambda entry: entry["id"])


def _rename_in_model(model: Document, aliases: Aliases) -> None:
    """Put aliases in place of control tokens, so that no merge, trie or whole-word match can reach them."""
    renamed, vocab = aliases.of_token, model["vocab"]
    if isinstance(vocab, dict):
        for token in renamed.keys() & vocab.keys():
            vocab[renamed[token]] = vocab.pop(token)
    else:
        model["vocab"] = [(aliases.rename(token), score) for token, score in vocab]
    if model.get("unk_token"):
        model["unk_token"] = aliases.rename(model["unk_token"])
    if model.get("merges"):
        model["merges"] = [
            (left, right)
            for left, right in _pairs(model)
            if left + right not in renamed and left not in renamed and right not in renamed
        ]


def _pairs(model: Document) -> Iterator[tuple[str, str]]:
    for merge in model.get("merges") or ():
        left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
        yield left, right


def _library(document: Document, added: Mapping[str, Document], aliases: Aliases) -> LibraryTokenizer:
    # Length is the engine's business: a file that cuts or pads prompts silently is not obeyed.
    document["truncation"] = document["padding"] = None
    try:
        library = LibraryTokenizer.from_buffer(orjson.dumps(document))
    except BaseException as error:
        if is_library_failure(error):
            raise invalid(f"tokenizer.json is refused by the tokenizers library: {error}") from error
        raise
    for token, entry in added.items():
        if (found := library.token_to_id(aliases.rename(token))) != int(entry["id"]):
            raise invalid(
                f"tokenizer.json gives the added token {token!r} id {entry['id']}, but it comes to be {found}"
            )
    return library


def _decoding(decoder: Document | None) -> dict[str, bool]:
    """Which of the two alphabets a decoder reads, as keyword arguments of ``Vocabulary``."""
    steps = _flatten(decoder)
    kinds = [step["type"] for step in steps]
    if "ByteLevel" in kinds and set(kinds) <= {"ByteLevel", "Fuse"}:
        return {"byte_level": True}
    strips = fallback = spaces = False
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}:
                spaces = True
            case {"type": "Metaspace", "replacement": "\u2581"}:
                spaces, strips = True, strips or step.get("prepend_scheme", "always") != "never"
            case {"type": "ByteFallback"}:
                fallback = True
            case {"type": "Strip", "content": " ", "start": 1, "stop": 0}:
                strips = True
            case {"type": "Fuse"} | {"type": "Strip", "start": 0, "stop": 0}:
                pass
            case _:
                spaces = False
                break
    if not spaces:
        raise TritiumError(
            Code.UNIMPLEMENTED,
            f"tokenizer.json has decoder {kinds or None}; expected ByteLevel, or sentencepiece's"
            f" (Replace {SPACE!r} by a space or Metaspace, ByteFallback, Fuse, Strip)",
        )
    return {"byte_level": False, "byte_fallback": fallback, "strips_prefix": strips}


def _flatten(decoder: Document | None) -> list[Document]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [step for inner in decoder["decoders"] for step in _flatten(inner)]
    return [decoder]
