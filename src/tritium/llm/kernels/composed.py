"""The ops composed of torch's own fused calls, on any device: the fallback where there is no kernel of ours.

Not batch-invariant: torch picks other algorithms for other shapes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from tritium.llm.kernels.reference import (
    HEAD_ROWS,
    add_rms_norm,
    gather_row,
    gelu_and_mul,
    rms_norm,
    rope_and_write,
    silu_and_mul,
)
from tritium.llm.kernels.sampling import draw

if TYPE_CHECKING:
    from tritium.llm.layers.inputs import ForwardInputs

__all__ = ["add_rms_norm", "attention", "draw", "gelu_and_mul", "logits", "rms_norm", "rope_and_write", "silu_and_mul"]


def attention(q_THD: Tensor, inputs: ForwardInputs, layer: int, scale: float, window: int | None) -> Tensor:
    """See ``reference.attention``. Rows with one token go in one call, the others row by row."""
    out = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    ones = inputs.num_decode
    if ones:
        out[:ones] = _decode(q_THD[:ones], inputs, layer, scale, window)
    for row, (start, count, context) in enumerate(inputs.row_spans()[ones:], start=ones):
        table_M = inputs.block_table_BM[row]
        k_GLD, v_GLD = (
            gather_row(cache[layer], table_M, context).transpose(0, 1) for cache in (inputs.keys, inputs.values)
        )
        query = torch.arange(context - count, context, device=q_THD.device).unsqueeze(1)
        key = torch.arange(context, device=q_THD.device)
        seen_TL = key <= query
        if window is not None:
            seen_TL &= key > query - window
        q_HTD = q_THD[start : start + count].transpose(0, 1)
        out[start : start + count] = _sdpa(q_HTD[None], k_GLD[None], v_GLD[None], seen_TL, scale)[0].transpose(0, 1)
    return out


def _decode(q_BHD: Tensor, inputs: ForwardInputs, layer: int, scale: float, window: int | None) -> Tensor:
    """Rows with one token: their keys padded to the longest one's blocks."""
    lens_B1 = inputs.context_lens_B[: q_BHD.shape[0]].long().unsqueeze(1)
    longest = max(context for _, _, context in inputs.row_spans()[: q_BHD.shape[0]])
    num_blocks = -(-longest // inputs.block_size)
    key_L = torch.arange(num_blocks * inputs.block_size, device=q_BHD.device)
    seen_BL = key_L < lens_B1
    # Table entries past a context are undefined, and so is what their slots hold: 0 * NaN would be NaN.
    table_BM = inputs.block_table_BM[: q_BHD.shape[0], :num_blocks].long()
    table_BM = table_BM.masked_fill(~seen_BL[:, :: inputs.block_size], 0)
    if window is not None:
        seen_BL &= key_L >= lens_B1 - window
    hidden_B1L1 = ~seen_BL[:, None, :, None]
    k_BGLD, v_BGLD = (
        cache[layer][table_BM].transpose(1, 2).flatten(2, 3).masked_fill(hidden_B1L1, 0.0)
        for cache in (inputs.keys, inputs.values)
    )
    return _sdpa(q_BHD.unsqueeze(2), k_BGLD, v_BGLD, seen_BL[:, None, None, :], scale).squeeze(2)


def _sdpa(q_BHTD: Tensor, k_BGLD: Tensor, v_BGLD: Tensor, seen: Tensor, scale: float) -> Tensor:
    k, v = k_BGLD.to(q_BHTD.dtype), v_BGLD.to(q_BHTD.dtype)
    return F.scaled_dot_product_attention(q_BHTD, k, v, attn_mask=seen, scale=scale, enable_gqa=True)


def logits(x_NH: Tensor, weight_VH: Tensor) -> Tensor:
    """See ``reference.logits``."""
    if x_NH.dtype == weight_VH.dtype == torch.float32:
        return F.linear(x_NH, weight_VH)
    if x_NH.is_cuda and x_NH.dtype == weight_VH.dtype:
        return torch.mm(x_NH, weight_VH.T, out_dtype=torch.float32)
    x32 = x_NH.float()
    return torch.cat([F.linear(x32, part.float()) for part in weight_VH.split(HEAD_ROWS)], dim=1)
