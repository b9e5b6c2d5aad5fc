"""Writes the tokenizer of a GGUF file as the files of a Hugging Face folder.

A byte-level vocabulary becomes a ``tokenizer.json``. A vocabulary with scores becomes a ``tokenizer.model``
(sentencepiece), the form that it was made from: an ordered list of merges, which is all that a tokenizer.json can
hold, does not say the same as scores.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

from tritium.errors import invalid
from tritium.llm.tokenizer import from_gguf
from tritium.llm.tokenizer.from_gguf import UNKNOWN, USER_DEFINED, GgufTokenizer

BPE = 2  # TrainerSpec.ModelType


def tokenizer_files(values: Mapping[str, Any], max_length: int) -> dict[str, bytes]:
    """Contents by file name: ``tokenizer_config.json``, and ``tokenizer.json`` or ``tokenizer.model``.

    Args:
        values: the ``tokenizer.*`` key-values of the GGUF file.
        max_length: the model's context, in tokens.

    Raises:
        TritiumError: the tokenizer is malformed or of an unknown kind, as in ``from_gguf.build``, or has no unknown
            token where a tokenizer.model needs one.
    """
    read = from_gguf.build(values)
    config: dict[str, Any] = {name: read.vocabulary.tokens[number] for name, number in read.named.items()}
    config |= {
        "add_bos_token": read.adds_bos,
        "add_eos_token": read.adds_eos,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
    if set(read.templates) == {"default"}:
        config["chat_template"] = read.templates["default"]
    elif read.templates:
        config["chat_template"] = [{"name": name, "template": text} for name, text in read.templates.items()]
    if read.vocabulary.byte_level:
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
        document = from_gguf.byte_level_document(values)
        document["post_processor"] = _frame(read)
        document["model"]["merges"] = [merge.split(" ", 1) for merge in document["model"]["merges"]]
        tokenizer = {"tokenizer.json": _json(document)}
    else:
        config |= {"tokenizer_class": "LlamaTokenizer", "legacy": True, "sp_model_kwargs": {}}
        if added := _user_defined(values):
            config["added_tokens_decoder"] = added
        tokenizer = {"tokenizer.model": _sentencepiece_model(values, read)}
    return tokenizer | {"tokenizer_config.json": _json(config)}


def generation_ids(values: Mapping[str, Any]) -> dict[str, int | list[int]]:
    """``bos_token_id``, ``eos_token_id`` (every id that ends an answer) and ``pad_token_id``, those that there are."""
    read = from_gguf.build(values)
    found: dict[str, int | list[int]] = {}
    if read.ends:
        found["eos_token_id"] = list(read.ends)
    for name in ("bos", "pad"):
        if f"{name}_token" in read.named:
            found[f"{name}_token_id"] = read.named[f"{name}_token"]
    return found


def _frame(read: GgufTokenizer) -> dict[str, Any] | None:
    """The post-processor that puts BOS before a text and EOS after it."""
    wanted = {"bos_token": read.adds_bos, "eos_token": read.adds_eos}
    ids = {str(read.vocabulary.tokens[read.named[name]]): read.named[name] for name, adds in wanted.items() if adds}
    if not ids:
        return None

    def around(letter: str, kind: int) -> list[dict[str, Any]]:
        frame: dict[str, list[dict[str, Any]]] = {}
        for name, adds in wanted.items():
            token = read.vocabulary.tokens[read.named[name]] if adds else None
            frame[name] = [{"SpecialToken": {"id": token, "type_id": kind}}] if adds else []
        return [*frame["bos_token"], {"Sequence": {"id": letter, "type_id": kind}}, *frame["eos_token"]]

    return {
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": [*around("A", 0), *around("B", 1)],
        "special_tokens": {token: {"id": token, "ids": [number], "tokens": [token]} for token, number in ids.items()},
    }


def _user_defined(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Tokens that are found before anything else; text behind them begins anew, as added tokens have it."""
    types = values.get("tokenizer.ggml.token_type", ())
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    tokens = values["tokenizer.ggml.tokens"]
    return {str(n): {"content": tokens[n], **plain} for n, kind in enumerate(types) if kind == USER_DEFINED}


def _sentencepiece_model(values: Mapping[str, Any], read: GgufTokenizer) -> bytes:
    """The vocabulary as a ``ModelProto`` of sentencepiece_model.proto, in protobuf's wire format.

    Written by hand: the generated module that sentencepiece brings refuses every older protobuf.
    """
    tokens = values["tokenizer.ggml.tokens"]
    types = list(values.get("tokenizer.ggml.token_type", ()))
    if UNKNOWN not in types:
        raise invalid(
            f"GGUF key tokenizer.ggml.token_type names no unknown token (type {UNKNOWN}), which a tokenizer.model "
            "must have; serve the GGUF file itself"
        )
    scores = values.get("tokenizer.ggml.scores", [0.0] * len(tokens))
    pieces = b"".join(  # GGUF took its types from here
        _field(1, _field(1, token.encode()) + _field(2, float(score)) + _field(3, int(kind)))
        for token, score, kind in zip(tokens, scores, types, strict=True)
    )
    trainer = _field(3, BPE) + _field(4, len(tokens)) + _field(35, int(read.vocabulary.byte_fallback))
    for number, name in enumerate(("unk", "bos", "eos", "pad")):
        token_id = types.index(UNKNOWN) if name == "unk" else read.named.get(f"{name}_token")
        trainer += _field(40 + number, -1 if token_id is None else token_id)
        if token_id is not None:
            trainer += _field(45 + number, tokens[token_id].encode())
    # No character is changed, no space removed; a space before the text where the GGUF file asks for it.
    prefix = int(read.vocabulary.strips_prefix)
    normalizer = _field(1, b"identity") + _field(3, prefix) + _field(4, 0) + _field(5, 1)
    return pieces + _field(2, trainer) + _field(3, normalizer)


def _field(number: int, value: bytes | int | float) -> bytes:
    """One field: bytes and messages with their length, int as varint, float as 32 bits."""
    if isinstance(value, float):
        return _varint(number << 3 | 5) + struct.pack("<f", value)
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1  # negative numbers as 64 bits, two's complement
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False, indent=2).encode()
