"""Tritium: an inference server for large language models, and its engine for scripts.

    >>> from tritium import LLM, SamplingParams
    >>> LLM("smollm2").generate("The capital of France is", SamplingParams(max_tokens=8))

Importing this package loads nothing; its names are loaded when they are used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tritium.errors import TritiumError
    from tritium.llm.api import LLM, Completion, RequestOutput
    from tritium.llm.types import SamplingParams

__all__ = ["LLM", "Completion", "RequestOutput", "SamplingParams", "TritiumError"]

_HOMES = {
    "LLM": "tritium.llm.api",
    "Completion": "tritium.llm.api",
    "RequestOutput": "tritium.llm.api",
    "SamplingParams": "tritium.llm.types",
    "TritiumError": "tritium.errors",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'tritium' has no attribute {name!r}")
    return getattr(import_module(home), name)
