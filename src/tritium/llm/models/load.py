"""Fill a model from a checkpoint: check the table, then stream, fuse and pack tensor by tensor."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tritium.errors import TritiumError, invalid
from tritium.llm.checkpoint import Checkpoint
from tritium.llm.config import TransformerConfig
from tritium.llm.formats import check_values
from tritium.llm.formats.dense import can_pack
from tritium.llm.formats.gguf import dequantize, undo_rope_permutation
from tritium.llm.layers.linear import Target
from tritium.llm.models import create
from tritium.llm.models.decoder import Decoder
from tritium.llm.models.families import GGUF_ROPE_FACTORS, stored_name

log = logging.getLogger(__name__)

NAMED_AT_MOST = 5
# Buffers that old checkpoints carry and every reader computes anew.
COMPUTED = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")


def load(
    config: TransformerConfig,
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device,
    deterministic: bool = False,
) -> Decoder:
    """The model with the checkpoint's weights. Peak memory: the model and one tensor.

    Raises:
        TritiumError: a tensor is missing, has another shape, or holds values that are not finite or do not fit
            in ``dtype``; the message names it.
    """
    config, notices = settle(config, checkpoint)
    return fill(config, checkpoint, notices, dtype=dtype, device=device, deterministic=deterministic)


def settle(config: TransformerConfig, checkpoint: Checkpoint) -> tuple[TransformerConfig, list[str]]:
    """The architecture that the checkpoint's tensors really have, and sentences for the operator; allocates nothing.

    Raises:
        TritiumError: a tensor is missing or has another shape; the message names it.
    """
    table = {name: info.shape for name, info in checkpoint.metadata.tensors.items()}
    gguf = checkpoint.kind == "gguf"
    head = stored_name("head.weight", gguf=gguf)
    notices: list[str] = []
    if not config.tied and head not in table:
        config = replace(config, tied=True)
    elif config.tied and head in table and not _equal_head(checkpoint, head, stored_name("embed.weight", gguf=gguf)):
        notices.append(f"'{head}' differs from the embedding that the configuration ties it to; it is used as it is")
        config = replace(config, tied=False)
    check_table(config, table, gguf=gguf)
    return config, notices


def weights_bytes(config: TransformerConfig, dtype: torch.dtype, device: torch.device) -> int:
    """Memory that the weights will take (``Decoder.weights_bytes``), in bytes; nothing is allocated.

    Args:
        config: as ``settle`` gives it.
    """
    # One position stands for all of the rotary table, which is computed, not only allocated.
    model = create(replace(config, max_positions=1), dtype, torch.device("meta"))
    table = (config.max_positions - 1) * model.cos_sin_PD.nbytes
    # A tied head has memory of its own only where it is packed, which ``DenseHead`` does to float32 alone.
    packs = config.tied and dtype == torch.float32 and can_pack(dtype, device)
    packed_head = model.embed.num_bytes if packs else 0
    return model.weights_bytes + table + packed_head


def fill(
    config: TransformerConfig,
    checkpoint: Checkpoint,
    notices: list[str],
    *,
    dtype: torch.dtype,
    device: torch.device,
    deterministic: bool = False,
) -> Decoder:
    """``load`` of an architecture that ``settle`` gave, with its notices.

    Raises:
        TritiumError: as ``load`` does for values.
    """
    gguf = checkpoint.kind == "gguf"
    head = stored_name("head.weight", gguf=gguf)
    factors = _rope_factors(config, checkpoint) if gguf else None
    model = create(config, dtype, device, deterministic=deterministic, rope_factors=factors)
    targets = {stored_name(name, gguf=gguf): target for name, target in model.targets()}
    ignored = [name for name in checkpoint.metadata.tensors if name not in targets and not _expected_extra(name, head)]
    if ignored:
        notices = [*notices, f"{len(ignored)} tensors of the checkpoint are not used: {_some(ignored)}"]
    model.notices += notices
    for notice in notices:
        log.warning("%s", notice)
    _fill(config, checkpoint, targets, dtype)
    if config.tied:
        model.tie()
    return model


@torch.inference_mode()
def _fill(config: TransformerConfig, checkpoint: Checkpoint, targets: dict[str, Target], dtype: torch.dtype) -> None:
    for name, stored, quant in checkpoint.tensors():
        target = targets.get(name)
        if target is None:
            continue
        tensor = plain(config, checkpoint, name, stored, quant)
        if problem := check_values(name, tensor, dtype):
            raise invalid(problem, param="model")
        target.load(tensor)


def plain(
    config: TransformerConfig, checkpoint: Checkpoint, name: str, stored: Tensor, quant: dict[str, Any] | None
) -> Tensor:
    """A streamed tensor as numbers in Hugging Face's order."""
    tensor = stored if quant is None else dequantize(stored, quant)
    if checkpoint.kind == "gguf" and config.family == "llama":
        heads = {"attn_q": config.heads, "attn_k": config.kv_heads}.get(name.split(".")[-2])
        if heads is not None:
            return undo_rope_permutation(tensor, heads)
    return tensor


def expected_shapes(config: TransformerConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every weight that the architecture has, by our names, without allocating any."""
    hidden, inner = config.hidden, config.intermediate
    query, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (config.vocab, hidden), "norm.weight": (hidden,)}
    if not config.tied:
        shapes["head.weight"] = (config.vocab, hidden)
    layer: dict[str, tuple[int, ...]] = {"attention_norm.weight": (hidden,), "mlp_norm.weight": (hidden,)}
    if config.qk_norm:
        layer |= {"q_norm.weight": (config.head_dim,), "k_norm.weight": (config.head_dim,)}
    matrices = [
        (config.qkv_bias, {"q": (query, hidden), "k": (kv, hidden), "v": (kv, hidden)}),
        (config.output_bias, {"o": (hidden, query)}),
        (config.mlp_bias, {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}),
    ]
    for bias, parts in matrices:
        for part, shape in parts.items():
            layer[f"{part}.weight"] = shape
            if bias:
                layer[f"{part}.bias"] = shape[:1]
    for index in range(config.layers):
        shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


def num_parameters(config: TransformerConfig) -> int:
    """Weights of the architecture, a tied head counted once."""
    return sum(math.prod(shape) for shape in expected_shapes(config).values())


def check_table(config: TransformerConfig, table: dict[str, tuple[int, ...]], *, gguf: bool) -> None:
    """Refuse a checkpoint whose tensors are not those of its configuration, before anything is allocated."""
    expected = {stored_name(name, gguf=gguf): shape for name, shape in expected_shapes(config).items()}
    missing = [name for name in expected if name not in table]
    if missing:
        raise invalid(f"{len(missing)} tensors are missing from the checkpoint: {_some(missing)}", param="model")
    for name, shape in expected.items():
        if table[name] != shape:
            raise invalid(
                f"tensor '{name}' has shape {list(table[name])}, expected {list(shape)} by the configuration",
                param="model",
            )


def _some(names: list[str]) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:NAMED_AT_MOST])
    return shown + (", ..." if len(names) > NAMED_AT_MOST else "")


def _expected_extra(name: str, head: str) -> bool:
    return name in (head, GGUF_ROPE_FACTORS) or name.endswith(COMPUTED)


def _stored(checkpoint: Checkpoint, wanted: set[str]) -> dict[str, tuple[Tensor, dict[str, Any] | None]]:
    """Some tensors, as they are stored."""
    return {name: (tensor, quant) for name, tensor, quant in checkpoint.tensors(wanted)}


def _equal_head(checkpoint: Checkpoint, head: str, embed: str) -> bool:
    """Whether a stored head is the embedding; transformers unties them where it is not."""
    if embed not in checkpoint.metadata.tensors:
        return True  # the missing embedding is the error to report
    stored = _stored(checkpoint, {head, embed})
    return torch.equal(stored[head][0], stored[embed][0])


def _rope_factors(config: TransformerConfig, checkpoint: Checkpoint) -> Tensor | None:
    if GGUF_ROPE_FACTORS not in checkpoint.metadata.tensors:
        return None
    tensor, quant = _stored(checkpoint, {GGUF_ROPE_FACTORS})[GGUF_ROPE_FACTORS]
    if quant is not None or tensor.shape != (config.rope.dim // 2,) or not bool((tensor > 0).all()):
        raise _wrong_factors(config, tensor)
    return tensor.float()


def _wrong_factors(config: TransformerConfig, tensor: Tensor) -> TritiumError:
    return invalid(
        f"tensor '{GGUF_ROPE_FACTORS}' has shape {list(tensor.shape)} or values below 0, "
        f"expected {config.rope.dim // 2} positive numbers",
        param="model",
    )
