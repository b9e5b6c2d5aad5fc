"""Plain definitions of every op, in torch, on any device: what each kernel is tested against.

Everything is computed in float32 and rounded once at the end. A result depends on its own row and
position alone, never on the rest of the batch, so these also serve deterministic mode where no kernel does.
Shapes: T tokens, H heads, G key/value heads, D head dim, I intermediate size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from tritium.llm.kernels.sampling import draw as draw

if TYPE_CHECKING:
    from tritium.llm.layers.inputs import ForwardInputs


# Rows of the output head that are widened at a time, to hold a few MiB more instead of a second head.
HEAD_ROWS = 8192


def rms_norm(x: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """RMSNorm (Zhang and Sennrich 2019) over the last dim: ``x / sqrt(mean(x^2) + eps) * weight``.

    ``x`` may be wider than the weight; the result has the weight's type.
    """
    x32 = x.float()
    scale = torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return (x32 * scale * weight_H.float()).to(weight_H.dtype)


def add_rms_norm(x_TH: Tensor, residual_TH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Adds ``x`` to the residual IN PLACE, which may be wider, then norms it: (normed, residual)."""
    residual_TH.add_(x_TH)
    return rms_norm(residual_TH, weight_H, eps), residual_TH


def silu_and_mul(x_T2I: Tensor) -> Tensor:
    """SwiGLU (Shazeer 2020): ``silu(gate) * up`` of ``[gate | up]``, [T, I]."""
    gate, up = x_T2I.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(x_T2I.dtype)


def gelu_and_mul(x_T2I: Tensor, tanh: bool) -> Tensor:
    """GeGLU (Shazeer 2020): ``gelu(gate) * up`` of ``[gate | up]``, by erf or the tanh formula, [T, I]."""
    gate, up = x_T2I.float().chunk(2, dim=-1)
    return (F.gelu(gate, approximate="tanh" if tanh else "none") * up).to(x_T2I.dtype)


def rotate(x_THD: Tensor, cos_sin_PD: Tensor, positions_T: Tensor, interleaved: bool) -> Tensor:
    """Rotary embedding (Su et al. 2021) of the first ``cos_sin_PD.shape[1]`` dims; the others pass."""
    rot = cos_sin_PD.shape[1]
    cos, sin = cos_sin_PD[positions_T].float().unsqueeze(1).chunk(2, dim=-1)
    x32 = x_THD[..., :rot].float()
    if interleaved:
        first, second = x32[..., 0::2], x32[..., 1::2]
    else:
        first, second = x32.chunk(2, dim=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    flat = torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)
    return torch.cat((flat.to(x_THD.dtype), x_THD[..., rot:]), dim=-1)


def rope_and_write(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    cos_sin_PD: Tensor,
    inputs: ForwardInputs,
    layer: int,
    interleaved: bool = False,
) -> None:
    """Rotates q and k IN PLACE and writes k and v to the cache at ``inputs.slots_T``.

    Args:
        cos_sin_PD: float32 ``[cos | sin]``, one row per position; as wide as the rotated part of a head.
        interleaved: pairs are (0, 1), (2, 3), ... instead of (0, rot/2), (1, rot/2 + 1), ...
    """
    q_THD.copy_(rotate(q_THD, cos_sin_PD, inputs.positions_T, interleaved))
    k_TGD.copy_(rotate(k_TGD, cos_sin_PD, inputs.positions_T, interleaved))
    block, offset = inputs.slots_T // inputs.block_size, inputs.slots_T % inputs.block_size
    inputs.keys[layer][block, :, offset] = k_TGD.to(inputs.keys[layer].dtype)
    inputs.values[layer][block, :, offset] = v_TGD.to(inputs.values[layer].dtype)


def gather_row(cache: Tensor, table_M: Tensor, context: int) -> Tensor:
    """The keys or values of one row in order of position, [context, G, D]."""
    blocks = table_M[: -(-context // cache.shape[2])].long()
    return cache[blocks].transpose(1, 2).flatten(0, 1)[:context]


def attention(q_THD: Tensor, inputs: ForwardInputs, layer: int, scale: float, window: int | None) -> Tensor:
    """Causal attention over the paged cache, [T, H, D].

    The query at position p sees positions ``max(0, p - window + 1) .. p``. Query head h reads key/value
    head ``h // (H // G)``. Query by query, so that nothing but its own keys can touch a result.
    """
    out = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    group = q_THD.shape[1] // inputs.keys[layer].shape[1]
    for row, (start, count, context) in enumerate(inputs.row_spans()):
        table_M = inputs.block_table_BM[row]
        k_HLD = gather_row(inputs.keys[layer], table_M, context).float().repeat_interleave(group, 1).transpose(0, 1)
        v_HLD = gather_row(inputs.values[layer], table_M, context).float().repeat_interleave(group, 1).transpose(0, 1)
        for i in range(count):
            end = context - count + i + 1
            first = 0 if window is None else max(0, end - window)
            scores_H1L = q_THD[start + i].float().unsqueeze(1) @ k_HLD[:, first:end].transpose(1, 2) * scale
            weights_H1L = torch.softmax(scores_H1L, dim=-1)
            out[start + i] = (weights_H1L @ v_HLD[:, first:end]).squeeze(1).to(out.dtype)
    return out


def logits(x_NH: Tensor, weight_VH: Tensor) -> Tensor:
    """Scores of the next token, ``x W^T`` in float32, [N, V], row by row.

    Never rounded to the type of the operands: BF16 has 8 bits of mantissa, in which the best tokens tie.
    """
    slices = weight_VH.split(HEAD_ROWS)
    return torch.stack([torch.cat([part.float() @ x.float() for part in slices]) for x in x_NH.unbind()])
