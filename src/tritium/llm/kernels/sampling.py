"""The definition of a draw, in torch: from logits and filters to tokens, row by row and all at once."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Filters(NamedTuple):
    """How each row draws; tensors of N rows on the host.

    Attributes:
        temperature: float32; 0 takes the best id.
        top_k: int64; 0 keeps all.
        top_p: float64; 1 keeps all.
        min_p: float32; 0 keeps all.
        uniform: float64 in [0, 1), the row's random number.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    uniform: Tensor

    def pick(self, index: Tensor) -> Filters:
        """Some of the rows."""
        return Filters(*(column[index] for column in self))


def draw(logits_NV: Tensor, filters: Filters) -> Tensor:
    """Tokens, int64 [N]: the best id (the first of equals) or one drawn by inverse CDF over the ids in order."""
    tokens_N = torch.argmax(logits_NV, dim=-1)
    index = torch.nonzero(filters.temperature > 0).squeeze(1)
    if not len(index):
        return tokens_N
    weights_DV = weigh(logits_NV[index.to(logits_NV.device)], filters.pick(index))
    cumulative = torch.cumsum(weights_DV, dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    # Below the total even where the product rounds up to it: the last id with a weight is the last answer.
    uniform = filters.uniform[index].to(total.device).unsqueeze(1)
    target = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    # (A row without any weight left, NaN all over, must not run out of the vocabulary.)
    drawn = torch.searchsorted(cumulative, target, right=True).squeeze(1).clamp_(max=logits_NV.shape[1] - 1)
    tokens_N[index.to(tokens_N.device)] = drawn
    return tokens_N


def weigh(logits_DV: Tensor, filters: Filters) -> Tensor:
    """Unnormalized float32 probabilities, 1 for the best id and 0 for what the filters take out.

    Top-k, then top-p over what is left of it, then min-p, as transformers orders them. Ids that tie with the
    last one kept are kept too.
    """
    device = logits_DV.device
    temperature = filters.temperature.to(device).unsqueeze(1)
    scaled_DV = (logits_DV - logits_DV.amax(dim=-1, keepdim=True)) / temperature
    limited = torch.nonzero((filters.top_k > 0) & (filters.top_k < scaled_DV.shape[1])).squeeze(1)
    if len(limited):
        _keep_top_k(scaled_DV, limited.to(device), filters.top_k[limited])
    weights_DV = torch.exp(scaled_DV)
    nucleus = torch.nonzero(filters.top_p < 1).squeeze(1)
    if len(nucleus):
        _keep_top_p(weights_DV, nucleus.to(device), filters.top_p[nucleus].to(device).unsqueeze(1))
    weights_DV.masked_fill_(weights_DV < filters.min_p.to(device).unsqueeze(1), 0.0)
    return weights_DV


def _keep_top_k(scaled_DV: Tensor, index: Tensor, counts: Tensor) -> None:
    some_SV = scaled_DV[index]
    best = torch.topk(some_SV, int(counts.max()), dim=-1).values
    last = best.gather(1, counts.to(best.device).unsqueeze(1) - 1)
    scaled_DV[index] = some_SV.masked_fill(some_SV < last, -torch.inf)


def _keep_top_p(weights_DV: Tensor, index: Tensor, share: Tensor) -> None:
    """Keeps the smallest set of best ids whose share of the sum is at least top-p."""
    some_SV = weights_DV[index]
    total = some_SV.sum(dim=-1, dtype=torch.float64, keepdim=True)
    # Ids below (1 - p) / V of the sum cannot make up 1 - p together, so they are never needed: sort the others only.
    candidates = (some_SV >= (1 - share) * total / some_SV.shape[1]).sum(dim=-1, keepdim=True).clamp_(min=1)
    best = torch.topk(some_SV, int(candidates.max()), dim=-1).values
    before = torch.cumsum(best, dim=-1, dtype=torch.float64) - best
    kept = torch.minimum((before < share * total).sum(dim=-1, keepdim=True).clamp_(min=1), candidates)
    last = best.gather(1, kept - 1)
    weights_DV[index] = some_SV.masked_fill(some_SV < last, 0.0)
