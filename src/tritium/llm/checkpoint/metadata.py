"""What a checkpoint says of itself: configuration, tokenizer files and the table of its tensors. No torch."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tritium.errors import invalid

Kind = Literal["safetensors", "gguf", "bin"]

# ``TritiumError.reason`` of what is missing or cut short, as it is while a checkpoint is being copied.
INCOMPLETE = "checkpoint_incomplete"
# The largest real tokenizer.json files are about 35 MB; an index of a 400 B model is below 10 MB.
MAX_JSON_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies.

    Attributes:
        dtype: as the file names it (``BF16``, ``Q4_1``, ...).
        shape: row-major, outermost first (GGUF's order is turned around).
        file: which holds it.
        offset: of its first byte in the file.
        num_bytes: that it takes there.
    """

    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Metadata:
    """All of a checkpoint but the numbers.

    Attributes:
        config: ``config.json``, or every GGUF key outside ``tokenizer.``.
        generation_config: ``generation_config.json``, or empty.
        tokenizer: ``"tokenizer.json"`` and ``"tokenizer.model"`` (paths, where the files exist) or ``"gguf"``
            (the ``tokenizer.*`` keys), and always ``"tokenizer_config"``, ``"chat_template"`` (text or None),
            ``"special_tokens_map"`` and ``"added_tokens"``.
        tensors: by name; empty for ``bin``, which cannot be listed without unpickling.
    """

    path: Path
    kind: Kind
    config: dict[str, Any]
    generation_config: dict[str, Any]
    tokenizer: dict[str, Any]
    tensors: dict[str, TensorInfo] = field(default_factory=dict)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key '{key}' appears twice")
            seen.add(key)
    return result


def parse_json(text: bytes, source: str) -> dict[str, Any]:
    """Decode a JSON object; ``source`` names it in errors. Keys that appear twice are refused."""
    try:
        value = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise invalid(f"{source} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise invalid(f"{source} holds a JSON {type(value).__name__}, expected an object")
    return value


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object of at most ``MAX_JSON_BYTES``."""
    size = path.stat().st_size
    if size > MAX_JSON_BYTES:
        raise invalid(f"{path.name} is {size} bytes large, expected at most {MAX_JSON_BYTES}")
    return parse_json(path.read_bytes(), path.name)


def read_optional(path: Path) -> dict[str, Any]:
    """``read_json``, or an empty object where the file is absent."""
    return read_json(path) if path.is_file() else {}


def tokenizer_files(folder: Path) -> dict[str, Any]:
    """The tokenizer entry of ``Metadata`` for a Hugging Face folder."""
    files: dict[str, Any] = {name: folder / name for name in ("tokenizer.json", "tokenizer.model")}
    files = {name: path for name, path in files.items() if path.is_file()}
    config = read_optional(folder / "tokenizer_config.json")
    files["tokenizer_config"] = config
    files["chat_template"] = _chat_template(folder, config)
    files["special_tokens_map"] = read_optional(folder / "special_tokens_map.json")
    files["added_tokens"] = read_optional(folder / "added_tokens.json")
    return files


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    """A file beside the tokenizer wins over the tokenizer's configuration, as in transformers."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        if file.stat().st_size > MAX_JSON_BYTES:
            raise invalid(f"{file.name} is larger than {MAX_JSON_BYTES} bytes")
        return file.read_text(encoding="utf-8")
    template = read_optional(folder / "chat_template.json").get("chat_template", config.get("chat_template"))
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default") or next(iter(named.values()), None)
    if template is not None and not isinstance(template, str):
        raise invalid(f"chat_template is a {type(template).__name__}, expected a text or a list of named texts")
    return template
