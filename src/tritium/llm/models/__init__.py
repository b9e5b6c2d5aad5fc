"""Model architectures by the name that checkpoints give them. Importing this package imports no torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tritium.llm.config import TransformerConfig

if TYPE_CHECKING:
    import torch

    from tritium.llm.models.decoder import Decoder

_DECODER = "tritium.llm.models.decoder:Decoder"

ARCHITECTURES = {
    "llama": _DECODER,
    "mistral": _DECODER,
    "qwen2": _DECODER,
    "qwen3": _DECODER,
}


def create(config: TransformerConfig, dtype: torch.dtype, device: torch.device, **options: Any) -> Decoder:
    """An empty model of a family; ``load`` fills it. ``options`` are the model class's own."""
    module, _, name = ARCHITECTURES[config.family].partition(":")
    return getattr(import_module(module), name)(config, dtype, device, **options)
