"""Rebuilds a tokenizer from the ``tokenizer.ggml.*`` values of a GGUF file.

The keys are those of the GGUF specification (ggml/docs/gguf.md). A byte-level vocabulary (``gpt2``) says only by
name how text is cut into words before merging; the expressions behind the names are those of the models'
published tokenizers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tritium.errors import Code, TritiumError, invalid
from tritium.llm.tokenizer import from_json
from tritium.llm.tokenizer.codec import Codec
from tritium.llm.tokenizer.score_bpe import ScoreCodec
from tritium.llm.tokenizer.vocabulary import Vocabulary

# Token types of the specification that matter here.
UNKNOWN, CONTROL, USER_DEFINED, BYTE = 2, 3, 4, 6

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + _TAIL
_QWEN2 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + _TAIL
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}" + _CASED_TAIL
_SHORT_FORMS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SHORT_FORMS}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SHORT_FORMS}"
    r"|\p{N}{1,3}" + _CASED_TAIL
)
_DEEPSEEK_V3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class WordRule:
    """How a byte-level vocabulary cuts text into words.

    Attributes:
        splits: regular expressions, each cutting the pieces that the one before left; matches and what lies
            between them both become pieces.
        whole_words: a word that is a token is taken as it is, without merging.
        adds_bos: the default of ``tokenizer.ggml.add_bos_token``.
        normalizer: Unicode normalization of the published tokenizer.
    """

    splits: tuple[str, ...]
    whole_words: bool = False
    adds_bos: bool = False
    normalizer: str | None = None


_DIGITS = WordRule((r"\p{N}", _GPT2))
_PLAIN = WordRule((_GPT2,))
_LLAMA3_RULE = WordRule((_LLAMA3,), whole_words=True, adds_bos=True)

WORD_RULES: dict[str, WordRule] = {
    "default": WordRule((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": _PLAIN,
    "phi-2": _PLAIN,
    "olmo": _PLAIN,
    "mpt": _PLAIN,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "command-r": _DIGITS,
    "codeshell": _DIGITS,
    "llama-bpe": _LLAMA3_RULE,
    "llama3": _LLAMA3_RULE,
    "llama-v3": _LLAMA3_RULE,
    "dbrx": WordRule((_LLAMA3,)),
    "smaug-bpe": WordRule((_LLAMA3,)),
    "qwen2": WordRule((_QWEN2,), normalizer="NFC"),
    "deepseek-r1-qwen": WordRule((_QWEN2,)),
    "stablelm2": WordRule((_QWEN2,)),
    "tekken": WordRule((_TEKKEN,), whole_words=True, adds_bos=True),
    "gpt-4o": WordRule((_GPT4O,)),
    "deepseek-coder": WordRule(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
    "deepseek-v3": WordRule((r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+", _DEEPSEEK_V3)),
}
"""By the value of ``tokenizer.ggml.pre``. A name that is not here is refused: a near miss would give wrong ids."""

_TURN_ENDS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<end_of_turn>",
    "<|EOT|>",
    "<EOT>",
    "<｜end▁of▁sentence｜>",
)
"""Control tokens that end an answer. GGUF has one ``eos_token_id``, where a checkpoint's generation_config.json
would list several; llama.cpp finds the others by these spellings too."""


@dataclass(frozen=True)
class GgufTokenizer:
    """A tokenizer read from GGUF values, with what they say beside it.

    Attributes:
        vocabulary: the tokens.
        codec: text to ids.
        adds_bos: a BOS token goes before every text.
        adds_eos: an EOS token goes after every text.
        named: ``bos_token``, ``eos_token`` ... -> id.
        ends: ids that end an answer.
        templates: chat templates by name.
    """

    vocabulary: Vocabulary
    codec: Codec
    adds_bos: bool
    adds_eos: bool
    named: dict[str, int]
    ends: tuple[int, ...]
    templates: dict[str, str]


def build(values: Mapping[str, Any]) -> GgufTokenizer:
    """Rebuild the tokenizer.

    Args:
        values: the file's key-value pairs; only ``tokenizer.*`` is read.

    Raises:
        TritiumError: a key is missing, has the wrong length, or names a kind of tokenizer that is not known.
    """
    ggml = _ggml(values)
    model = str(_need(ggml, "model"))
    tokens, types = _tokens(ggml)
    match model:
        case "gpt2":
            vocabulary, codec = from_json.build(byte_level_document(values), special=())
            adds_bos = _word_rule(ggml).adds_bos
        case "llama":
            vocabulary, codec = _by_score(ggml, tokens, types)
            adds_bos = True
        case _:
            raise TritiumError(
                Code.UNIMPLEMENTED, f"GGUF tokenizer.ggml.model is {model!r}; expected 'gpt2' or 'llama'"
            )
    named = _named(ggml, len(tokens))
    ends = [ggml.get(f"{name}_token_id") for name in ("eos", "eot", "eom")]
    ends += [vocabulary.ids.get(end) for end in _TURN_ENDS if vocabulary.ids.get(end) in vocabulary.special]
    return GgufTokenizer(
        vocabulary,
        codec,
        adds_bos=bool(ggml.get("add_bos_token", adds_bos)) and "bos_token" in named,
        adds_eos=bool(ggml.get("add_eos_token", False)) and "eos_token" in named,
        named=named,
        ends=tuple(dict.fromkeys(int(end) for end in ends if end is not None)),
        templates=_templates(values),
    )


def _ggml(values: Mapping[str, Any]) -> dict[str, Any]:
    prefix = "tokenizer.ggml."
    return {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}


def _tokens(ggml: Mapping[str, Any]) -> tuple[list[str], list[int]]:
    """Spelling and type of each id."""
    tokens = [str(token) for token in _need(ggml, "tokens")]
    return tokens, _column(ggml, "token_type", len(tokens), 1)


def _templates(values: Mapping[str, Any]) -> dict[str, str]:
    prefix = "tokenizer.chat_template"
    return {
        key.removeprefix(prefix).lstrip(".") or "default": value
        for key, value in values.items()
        if (key == prefix or key.startswith(prefix + ".")) and isinstance(value, str)
    }


def _need(ggml: Mapping[str, Any], key: str) -> Any:
    if key not in ggml:
        raise invalid(f"GGUF key tokenizer.ggml.{key} is missing")
    return ggml[key]


def _column(ggml: Mapping[str, Any], key: str, length: int, default: float) -> list[Any]:
    if key not in ggml:
        return [default] * length
    column = [value.item() if hasattr(value, "item") else value for value in ggml[key]]
    if len(column) != length:
        raise invalid(f"GGUF key tokenizer.ggml.{key} has {len(column)} values for {length} tokens")
    return column


def _named(ggml: Mapping[str, Any], size: int) -> dict[str, int]:
    keys = {
        "bos_token": "bos_token_id",
        "eos_token": "eos_token_id",
        "unk_token": "unknown_token_id",
        "sep_token": "seperator_token_id",
        "pad_token": "padding_token_id",
        "mask_token": "mask_token_id",
    }
    found = {name: int(ggml[key]) for name, key in keys.items() if ggml.get(key) is not None}
    for name, token_id in found.items():
        if not 0 <= token_id < size:
            raise invalid(f"GGUF key tokenizer.ggml.{keys[name]} is {token_id}; the vocabulary has {size} tokens")
    return found


def _word_rule(ggml: Mapping[str, Any]) -> WordRule:
    name = str(ggml.get("pre", "default"))
    if name not in WORD_RULES:
        known = ", ".join(sorted(WORD_RULES))
        raise TritiumError(Code.UNIMPLEMENTED, f"GGUF tokenizer.ggml.pre is {name!r}; expected one of {known}")
    return WORD_RULES[name]


def byte_level_document(values: Mapping[str, Any]) -> from_json.Document:
    """The tokenizer.json that means the same as a byte-level (``gpt2``) vocabulary, BOS and EOS left out.

    Raises:
        TritiumError: as ``build``.
    """
    ggml = _ggml(values)
    tokens, types = _tokens(ggml)
    rule = _word_rule(ggml)
    splits = [
        {"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated", "invert": False} for split in rule.splits
    ]
    alphabet = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": number, "content": token, **plain, "special": kind in (CONTROL, UNKNOWN)}
            for number, (token, kind) in enumerate(zip(tokens, types, strict=True))
            if kind in (CONTROL, UNKNOWN, USER_DEFINED)
        ],
        "normalizer": {"type": rule.normalizer} if rule.normalizer else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, alphabet]},
        "post_processor": None,
        "decoder": alphabet,
        "model": {
            "type": "BPE",
            "ignore_merges": rule.whole_words,
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": list(_need(ggml, "merges")),
        },
    }


def _by_score(ggml: Mapping[str, Any], tokens: list[str], types: list[int]) -> tuple[Vocabulary, Codec]:
    scores = _column(ggml, "scores", len(tokens), 0.0)
    prefix = bool(ggml.get("add_space_prefix", True))
    unknown = ggml.get("unknown_token_id")
    vocabulary = Vocabulary(
        tokens,
        byte_level=False,
        byte_fallback=BYTE in types,
        strips_prefix=prefix,
        special=frozenset(number for number, kind in enumerate(types) if kind in (CONTROL, UNKNOWN)),
    )
    unreachable = (CONTROL, UNKNOWN, BYTE, USER_DEFINED)
    codec = ScoreCodec(
        pieces={token: number for number, token in enumerate(tokens) if types[number] not in unreachable},
        scores=scores,
        user_defined={token: number for number, token in enumerate(tokens) if types[number] == USER_DEFINED},
        bytes_={token: number for number, token in enumerate(tokens) if types[number] == BYTE},
        unknown=int(unknown) if unknown is not None else None,
        space_prefix=prefix,
    )
    return vocabulary, codec
