"""Writes docs/models.md and docs/openai.md out of the tables that the code itself reads.

python scripts/reference_pages.py          writes the pages
python scripts/reference_pages.py --check  ends with 1 when a page is not what it would write
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tritium.frontends.openai import schema
from tritium.frontends.openai.routes import routes
from tritium.llm.checkpoint.gguf import GGML_TYPES
from tritium.llm.models.families import FAMILIES, GGUF_FAMILIES, STORED_DTYPES
from tritium.llm.names import NAMED

DOCS = Path(__file__).parents[1] / "docs"
MADE = "Made by `python scripts/reference_pages.py` out of the tables that the code reads."
# Models that are published under an architecture's name, for who looks for one by its own.
KNOWN_MODELS = {
    "LlamaForCausalLM": "Llama 2, 3, 3.1, 3.2 (text), 3.3; SmolLM and SmolLM2; TinyLlama; Yi; Chinese-LLaMA; Vicuna",
    "MistralForCausalLM": "Mistral 7B (sliding window where the checkpoint has one), Mistral Nemo, Zephyr",
    "Qwen2ForCausalLM": "Qwen1.5 (dense), Qwen2, Qwen2.5, QwQ; the distilled DeepSeek-R1-Distill-Qwen",
    "Qwen3ForCausalLM": "Qwen3 (dense)",
}
# Routes of OpenAI's API, by what they are for.
OPENAI_ROUTES = {
    "/v1/responses": "the Responses API",
    "/v1/embeddings": "embeddings",
    "/v1/audio/speech": "speech out of text",
    "/v1/audio/transcriptions": "text out of speech",
    "/v1/images/generations": "images",
    "/v1/moderations": "moderation",
    "/v1/files": "files",
    "/v1/batches": "batches",
    "/v1/fine_tuning/jobs": "fine-tuning",
    "/v1/vector_stores": "vector stores",
    "/v1/realtime": "the Realtime API",
}
# And those of vLLM.
VLLM_ROUTES = {
    "/tokenize": "tokens of a text",
    "/detokenize": "text of tokens",
    "/v1/score": "scores of pairs",
    "/v1/rerank": "reranking",
    "/v1/messages": "Anthropic's Messages API",
}


def main() -> int:
    """Writes the pages, or checks them."""
    stale: list[str] = []
    for name, text in (("models.md", models_page()), ("openai.md", openai_page())):
        page = DOCS / name
        if "--check" not in sys.argv[1:]:
            page.write_text(text, encoding="utf-8")
        elif not page.exists() or page.read_text(encoding="utf-8") != text:
            stale.append(name)
    if stale:
        print(f"not current: {', '.join(stale)}: python scripts/reference_pages.py", file=sys.stderr)
    return int(bool(stale))


def models_page() -> str:
    """Which models can be served."""
    lines = ["| `architectures` in config.json | GGUF | models |", "| --- | --- | --- |"]
    for architecture, family in FAMILIES.items():
        gguf = f"`{family.name}`" if family.name in GGUF_FAMILIES else "as `llama`" if family.name == "mistral" else "–"
        lines.append(f"| `{architecture}` | {gguf} | {KNOWN_MODELS.get(architecture, '')} |")
    parts = [
        "# Models",
        MADE,
        "## Architectures",
        "A model is served when its `config.json` names one of these architectures, or its GGUF file one of these "
        "names in `general.architecture`. Anything else is refused at load with this list; so are mixtures of experts "
        "and weights quantized in other ways than GGUF's. Of real checkpoints the suite runs SmolLM2; each family is "
        "held to transformers on small random weights.",
        "\n".join(lines),
        "## Files",
        f"safetensors, whole or in shards ({listed(STORED_DTYPES)}); GGUF in one file "
        f"({listed(name for name, _, _ in GGML_TYPES.values())}: quantized tensors are dequantized at load); "
        "`pytorch_model*.bin` only with `--allow-bin`, or after `tritium convert`. The tokenizer comes from "
        "`tokenizer.json`, from the GGUF file, or from `tokenizer.model` (which needs sentencepiece: "
        "`tritium doctor` names the command).",
        "## Models that are found by name",
        "\n".join(
            f"- `{model.name}`, also {listed(model.spellings)}: {model.about} (package `{model.distribution}`)"
            for model in NAMED.values()
        ),
    ]
    return "\n\n".join(parts) + "\n"


def openai_page() -> str:
    """What there is of OpenAI's API."""
    server: Any = None  # only asked when a request comes
    there = {route.path: sorted(set(route.methods or ()) - {"HEAD"}) for route in routes(server)}
    missing = {path: what for path, what in {**OPENAI_ROUTES, **VLLM_ROUTES}.items() if path not in there}
    both = sorted(set(schema.ChatRequest.__struct_fields__) & set(schema.CompletionRequest.__struct_fields__))
    parts = [
        "# OpenAI's API",
        MADE,
        "## Routes",
        "\n".join(f"- `{' '.join(methods)} {path}`" for path, methods in there.items()),
        "Not there yet: " + ", ".join(f"`{path}` ({what})" for path, what in missing.items()) + ".",
        "## Fields of a request",
        f"Both: {listed(both)}.",
        f"Chat completions: {listed(set(schema.ChatRequest.__struct_fields__) - set(both))}.",
        f"Completions: {listed(set(schema.CompletionRequest.__struct_fields__) - set(both))}.",
        f"Checked, and without effect on the answer: {listed(schema.INERT)}.",
        "## Fields that are refused",
        "They are known and not served yet: a request with one is refused by its name, unless the value is one that "
        "changes nothing. A field that nobody knows is refused too.",
        unsupported_table(),
        "Messages hold text: parts of a type other than `text` (images, audio, files) are refused.",
    ]
    return "\n\n".join(parts) + "\n"


def unsupported_table() -> str:
    """The fields that are not served."""
    lines = ["| field | accepted all the same |", "| --- | --- |"]
    for name, values in schema.UNSUPPORTED.items():
        lines.append(f"| `{name}` | {', '.join(f'`{schema.shown(v)}`' for v in values) or '–'} |")
    return "\n".join(lines)


def listed(names: Iterable[str]) -> str:
    """Names in code style; sets in alphabetic order."""
    return ", ".join(f"`{name}`" for name in (sorted(names) if isinstance(names, set) else names))


if __name__ == "__main__":
    sys.exit(main())
