"""``tritium models`` and ``convert``: what there is, and one form out of another."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tritium.cli import options
from tritium.cli.flags import Parsed
from tritium.errors import TritiumError, invalid
from tritium.llm.checkpoint import find_checkpoint, read_metadata
from tritium.llm.config import TransformerConfig
from tritium.llm.models.families import resolve
from tritium.llm.names import NAMED, find_model
from tritium.observability.tables import size, table


def models(parsed: Parsed) -> int:
    """Lists named models and those of repositories."""
    asked = parsed.get(options.Models)
    rows = [*_named(), *(row for folder in asked.model_repository for row in _in_repository(Path(folder)))]
    if asked.json:
        print(json.dumps(rows, indent=2))
    else:
        cells = [(r["name"], r["kind"], r["about"], r["path"] or r["fix"] or "") for r in rows]
        print(table(("name", "kind", "about", "where"), cells))
    return 0


def _named() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for model in NAMED.values():
        file = model.file()
        about = describe(file)[0] if file is not None else model.about
        rows.append(
            {
                "name": model.name,
                "kind": "installed" if file is not None else "not installed",
                "about": about,
                "path": str(file) if file is not None else None,
                "fix": None if file is not None else model.install,
            }
        )
    return rows


def _in_repository(folder: Path) -> list[dict[str, Any]]:
    """Models of a repository, by their folders; what is wrong with one is said in its row."""
    if not folder.is_dir():
        raise invalid(f"--model-repository {folder}: no such folder", param="model_repository")
    rows: list[dict[str, Any]] = []
    for model in sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith(".")):
        versions = sorted((v for v in model.iterdir() if v.is_dir() and v.name.isdecimal()), key=lambda v: int(v.name))
        about, fix = "no version folder", None
        if versions:
            about, fix = _version(versions[-1])
        numbers = ", ".join(v.name for v in versions)
        about = f"version {numbers}: {about}" if numbers else about
        rows.append({"name": model.name, "kind": "repository", "about": about, "path": str(model), "fix": fix})
    return rows


def _version(folder: Path) -> tuple[str, str | None]:
    if (folder / "model.py").is_file():
        return "model.py", None
    try:
        return describe(find_checkpoint(folder))
    except TritiumError as error:
        return error.message, None


def describe(path: Path) -> tuple[str, str | None]:
    """A line about a checkpoint (family, sizes), or why it cannot be read and what would help."""
    try:
        facts = resolve(read_metadata(path))
    except TritiumError as error:
        return f"cannot be served: {error.message}", None
    files = [path] if path.is_file() else [*path.glob("*.safetensors"), *path.glob("*.gguf"), *path.glob("*.bin")]
    on_disk = sum(f.stat().st_size for f in files)
    count = num_parameters(facts)
    return f"{facts.family}, {count / 1e6:.0f} M parameters, {size(on_disk)} on disk", None


def num_parameters(facts: TransformerConfig) -> int:
    """Parameters of the matrices and the embedding; norms and biases, below a thousandth of them, are left out."""
    attention = facts.hidden * facts.head_dim * (2 * facts.heads + 2 * facts.kv_heads)
    block = attention + 3 * facts.hidden * facts.intermediate
    embeddings = facts.vocab * facts.hidden * (1 if facts.tied else 2)
    return facts.layers * block + embeddings


def convert(parsed: Parsed) -> int:
    """Writes a checkpoint as safetensors."""
    from tritium.llm.models.convert import convert as write_safetensors

    asked = parsed.get(options.Convert)
    out = Path(asked.out).expanduser()
    source = find_model(asked.source)
    print(f"converting {source} ...", file=sys.stderr)
    written = write_safetensors(source, out, dtype=asked.dtype)
    print(f"{out}: {describe(out)[0]}", file=sys.stderr)
    for path in written:
        print(path)
    return 0
