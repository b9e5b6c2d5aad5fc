"""Next tokens out of logits, for all sampled rows at once.

Order, per row: repetition penalty, presence and frequency penalties, logit bias, stop tokens masked before
``min_tokens``; then argmax, or temperature, top-k, top-p, min-p and one draw. A row's token depends on its own
logits, parameters and history only: its one random number is a function of (seed, place in the output), and
sums run in a fixed order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tritium.llm.kernels import ops
from tritium.llm.kernels.sampling import Filters
from tritium.llm.types import NewRow, SamplingParams, TokenLogprob

Ints = NDArray[np.int64]


class History:
    """Prompt and output of a row, on the device, and what they do to its next logits.

    Args:
        tokens: so far, the first ``num_prompt`` of them the prompt.
    """

    def __init__(self, tokens: list[int], num_prompt: int, vocab: int, device: torch.device) -> None:
        self._length = len(tokens)
        self._tokens_L = torch.empty(max(64, 2 * len(tokens)), dtype=torch.int64, device=device)
        self._tokens_L[: len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
        self._counts_V = torch.zeros(vocab, dtype=torch.float32, device=device)
        output = self._tokens_L[num_prompt : len(tokens)]
        self._counts_V.index_add_(0, output, torch.ones(len(output), device=device))

    def append(self, token: Tensor) -> None:
        """One more token of the output, an int64 scalar."""
        if self._length == len(self._tokens_L):
            self._tokens_L = torch.cat((self._tokens_L, torch.empty_like(self._tokens_L)))
        self._tokens_L[self._length] = token
        self._length += 1
        self._counts_V[token] += 1

    def penalize(self, logits_V: Tensor, params: SamplingParams) -> None:
        """Penalties, in place.

        Repetition (Keskar et al. 2019): logits of ids in the prompt or output are divided by it where positive
        and multiplied where negative. Presence and frequency (OpenAI): subtracted once, and once per occurrence,
        for ids in the output.
        """
        ids_L = self._tokens_L[: self._length]  # an id that occurs twice is written twice, with the same value
        x_L, counts_L = logits_V[ids_L], self._counts_V[ids_L]
        x_L = torch.where(x_L > 0, x_L / params.repetition_penalty, x_L * params.repetition_penalty)
        x_L -= params.presence_penalty * (counts_L > 0) + params.frequency_penalty * counts_L
        logits_V[ids_L] = x_L


@dataclass(slots=True)
class Row:
    """What the sampler knows of a row.

    Attributes:
        seed: of its draws.
        stop_N: ids that may not be drawn before ``min_tokens``.
        bias_ids, bias_values: the logit bias.
        history: of its tokens; None unless a penalty needs it.
    """

    params: SamplingParams
    num_prompt: int
    seed: int
    stop_N: Tensor
    bias_ids: Tensor
    bias_values: Tensor
    history: History | None


@dataclass(frozen=True, slots=True)
class Draw:
    """One step's tokens.

    Attributes:
        tokens_N: int64, on the device; 0 for bad rows.
        bad_N: which rows' logits were not finite.
        logprobs: per row, or None where not asked for.
    """

    tokens_N: Tensor
    bad_N: NDArray[np.bool_]
    logprobs: list[TokenLogprob | None]


class Sampler:
    """Keeps the parameters and penalty counts of live rows.

    Args:
        seed: for rows that bring none.
    """

    def __init__(self, vocab: int, device: torch.device, seed: int = 0) -> None:
        self._vocab = vocab
        self._device = device
        self._seed = seed
        self._rows: dict[int, Row] = {}

    def add(self, new: NewRow) -> None:
        """A sequence takes a row; its output so far counts in its penalties."""
        params = new.params
        penalized = params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty
        self._rows[new.row] = Row(
            params=params,
            num_prompt=new.num_prompt,
            seed=self._seed if params.seed is None else params.seed,
            # A tokenizer may have ends that its model does not: nobody can draw them.
            stop_N=self._ids(sorted({token for token in params.stop_token_ids if token < self._vocab})),
            bias_ids=self._ids(list(params.logit_bias)),
            bias_values=torch.tensor(list(params.logit_bias.values()), dtype=torch.float32, device=self._device),
            history=History(new.tokens, new.num_prompt, self._vocab, self._device) if penalized else None,
        )

    def forget(self, row: int) -> None:
        """The row is free."""
        self._rows.pop(row, None)

    def _ids(self, ids: list[int]) -> Tensor:
        return torch.tensor(ids, dtype=torch.int64, device=self._device)

    def sample(self, logits_NV: Tensor, rows_N: Ints, lengths_N: Ints) -> Draw:
        """Draws a token per row. ``logits_NV`` (float32) is used up.

        Args:
            rows_N: row numbers.
            lengths_N: tokens of each row so far, prompt included.
        """
        rows = [self._rows[row] for row in rows_N.tolist()]
        places = [length - row.num_prompt for row, length in zip(rows, lengths_N.tolist(), strict=True)]
        asked = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
        raw_AV = torch.log_softmax(logits_NV[asked], dim=-1) if asked else None
        bad_N = not_finite(logits_NV)
        if bad_N.any():
            logits_NV[torch.from_numpy(np.flatnonzero(bad_N)).to(self._device)] = 0.0
        self._adjust(logits_NV, rows, places)
        tokens_N = ops.draw(logits_NV, filters_of(rows, places))
        if bad_N.any():
            tokens_N[torch.from_numpy(np.flatnonzero(bad_N)).to(self._device)] = 0
        for i, row in enumerate(rows):
            if row.history is not None:
                row.history.append(tokens_N[i])
        logprobs: list[TokenLogprob | None] = [None] * len(rows)
        if raw_AV is not None:
            self._read_logprobs(raw_AV, asked, rows, tokens_N, logprobs)
        return Draw(tokens_N, bad_N, logprobs)

    def _adjust(self, logits_NV: Tensor, rows: list[Row], places: list[int]) -> None:
        """Penalties, bias and masks, in place."""
        for i, row in enumerate(rows):
            if row.history is not None:
                row.history.penalize(logits_NV[i], row.params)
            if len(row.bias_ids):
                logits_NV[i].index_add_(0, row.bias_ids, row.bias_values)
            if len(row.stop_N) and places[i] < row.params.min_tokens:
                logits_NV[i, row.stop_N] = -torch.inf

    def _read_logprobs(
        self,
        raw_AV: Tensor,
        asked: list[int],
        rows: list[Row],
        tokens_N: Tensor,
        into: list[TokenLogprob | None],
    ) -> None:
        chosen_A = tokens_N[asked]
        own = raw_AV.gather(1, chosen_A.unsqueeze(1)).squeeze(1).tolist()
        top = best_of(raw_AV, [rows[i].params.logprobs or 0 for i in asked])
        for a, (i, token) in enumerate(zip(asked, chosen_A.tolist(), strict=True)):
            into[i] = TokenLogprob(token, own[a], top[a])


def best_of(values_AV: Tensor, counts: list[int]) -> list[list[tuple[int, float]]]:
    """The ``counts[a]`` best ids of each row and their values; among equals the lower id comes first.

    16-bit logits are often equal, and which of them ``topk`` takes depends on how many it is asked for: a row
    would show what its neighbours want.
    """
    most = min(max(counts), values_AV.shape[1])
    if not most:
        return [[] for _ in counts]
    last_A1 = torch.tensor([[min(max(count, 1), most) - 1] for count in counts], device=values_AV.device)
    least_A1 = torch.topk(values_AV, most, dim=-1).values.gather(1, last_A1)
    found = (values_AV >= least_A1).nonzero()
    values = values_AV[found[:, 0], found[:, 1]].cpu().numpy()
    row, ids = found.cpu().numpy().T
    order = np.lexsort((ids, -values, row))
    starts = np.searchsorted(row, np.arange(len(counts))).tolist()
    pairs = list(zip(ids[order].tolist(), values[order].tolist(), strict=True))
    ends = [*starts[1:], len(pairs)]
    return [pairs[start : min(start + n, end)] for start, end, n in zip(starts, ends, counts, strict=True)]


def not_finite(logits_NV: Tensor) -> NDArray[np.bool_]:
    """Which rows hold a NaN or an infinity."""
    # A sum is one pass; only where it overflowed or is not finite is every value looked at.
    bad_N = ~torch.isfinite(logits_NV.sum(dim=-1)).cpu().numpy()
    for i in np.flatnonzero(bad_N).tolist():
        bad_N[i] = not bool(torch.isfinite(logits_NV[i]).all())
    return bad_N


def filters_of(rows: list[Row], places: list[int]) -> Filters:
    """The rows' filters and random numbers."""
    params = [row.params for row in rows]
    return Filters(
        torch.tensor([0.0 if p.greedy else p.temperature for p in params], dtype=torch.float32),
        torch.tensor([max(p.top_k, 0) for p in params], dtype=torch.int64),
        torch.tensor([p.top_p for p in params], dtype=torch.float64),
        torch.tensor([p.min_p for p in params], dtype=torch.float32),
        torch.from_numpy(uniforms([row.seed for row in rows], places)),
    )


def uniforms(seeds: list[int], places: list[int]) -> NDArray[np.float64]:
    """One number in [0, 1) per (seed, place in the output): SplitMix64 (Steele et al. 2014) as a counter-based mix."""
    state = np.array(seeds, np.int64).view(np.uint64)
    for word in (np.uint64(0), np.array(places, np.uint64)):
        state = _mix(state + (word + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15))
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
