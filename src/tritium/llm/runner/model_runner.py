"""One step: rows, forward pass, draw."""

from __future__ import annotations

import time

import torch

from tritium.llm.models.decoder import Decoder
from tritium.llm.runner.inputs import RowTable
from tritium.llm.runner.kv_cache import KvCache
from tritium.llm.runner.sampler import Draw, Sampler
from tritium.llm.types import ScheduledBatch, StepOutput, TokenLogprob


class ModelRunner:
    """A loaded model, its cache, and the rows that live in it."""

    def __init__(
        self, model: Decoder, cache: KvCache, rows: RowTable, sampler: Sampler, *, deterministic: bool
    ) -> None:
        self.model = model
        self.cache = cache
        self.rows = rows
        self.sampler = sampler
        self.deterministic = deterministic

    @torch.inference_mode()
    def run(self, batch: ScheduledBatch) -> StepOutput:
        """Computes a batch; batches must come in the order in which they were scheduled."""
        started_ns = time.perf_counter_ns()
        for row in batch.freed:
            self.sampler.forget(row)
        for new in batch.new:
            self.sampler.add(new)
        self.rows.update(batch)
        self.cache.copy(batch.copies)
        prepared = self.rows.prepare(batch, self.cache.keys, self.cache.values, deterministic=self.deterministic)
        hidden_NH = self.model.forward(prepared.forward)
        if not prepared.rows_N.size:
            return StepOutput(batch.step, [], [], [], time.perf_counter_ns() - started_ns)
        drawn = self.sampler.sample(self.model.logits(hidden_NH), prepared.rows_N, prepared.lengths_N)
        self.rows.store(prepared.rows_N, drawn.tokens_N)
        bad = prepared.rows_N[drawn.bad_N].tolist()
        tokens, logprobs = _to_lists(drawn)
        return StepOutput(batch.step, tokens, logprobs, bad, time.perf_counter_ns() - started_ns)


def _to_lists(drawn: Draw) -> tuple[list[list[int]], list[list[TokenLogprob] | None]]:
    tokens = [[token] for token in drawn.tokens_N.tolist()]
    return tokens, [None if entry is None else [entry] for entry in drawn.logprobs]
