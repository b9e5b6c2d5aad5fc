"""Checkpoints on disk: their metadata without torch, and one stream of their tensors.

Everything read here is hostile until checked: sizes are compared with the file before anything is allocated.
"""

from __future__ import annotations

from tritium.llm.checkpoint.metadata import Metadata, TensorInfo
from tritium.llm.checkpoint.reader import Checkpoint, find_checkpoint, incomplete, open_checkpoint, read_metadata

__all__ = ["Checkpoint", "Metadata", "TensorInfo", "find_checkpoint", "incomplete", "open_checkpoint", "read_metadata"]
