"""Continuous batching: who computes what in the next step.

Every step is formed anew (Yu et al. 2022, Orca) under a budget of tokens: first each running sequence
that needs one token, then the rest of a prompt (chunks: Agrawal et al. 2024, Sarathi), then new ones. The
scheduler is driven by its calls only; several steps may be in flight (``schedule`` again before
``update``), because what it does not know yet, the sampled token, it does not need.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from heapq import heappop, heappush
from secrets import token_bytes

import msgspec

from tritium.errors import Code, TritiumError
from tritium.llm.core.admission import SchedulerConfig, token_limit, wait_limit
from tritium.llm.core.blocks import Block, BlockPool, BlockTable
from tritium.llm.core.queue import WaitingQueue
from tritium.llm.core.sequence import Sequence, SequenceStatus
from tritium.llm.types import (
    EngineStats,
    FinishReason,
    GenerateRequest,
    NewRow,
    RowStep,
    ScheduledBatch,
    StepOutput,
    TokenDelta,
    to_wire,
)

HASH_KEY_BYTES = 32
# Said to a refused client while no sequence has finished yet and nothing better is known.
FIRST_RETRY_AFTER_S = 1.0


class Scheduler:
    """Decides, for each step, which sequences compute how many tokens in which blocks.

    Order is (priority, arrival) everywhere. Blocks of a prompt are taken at admission and one per
    ``block_size`` tokens after it. When they run out, the last running sequence in the order is preempted:
    steps are filled in that order, so it is never one that is already in the step, and the first
    sequence always gets on, which is why all of them end.

    Args:
        num_blocks: KV blocks of the engine.
        hash_key: of the prefix hashes; random when None.
    """

    def __init__(self, config: SchedulerConfig, num_blocks: int, *, hash_key: bytes | None = None) -> None:
        self.config = config
        self.pool = BlockPool(num_blocks, config.block_size, hash_key or token_bytes(HASH_KEY_BYTES))
        self._queue = WaitingQueue(config.queue_delay_us * 1000, config.preferred_rows, config.max_rows)
        self._sequences: dict[str, Sequence] = {}
        self._running: list[Sequence] = []
        self._rows: list[Sequence | None] = [None] * config.max_rows
        self._free_rows = list(range(config.max_rows))
        self._freed: list[int] = []
        self._flights: deque[int] = deque()
        self._ended: list[TokenDelta] = []
        self._stats = EngineStats(blocks_total=num_blocks)
        self._step = 0
        self._serial = 0
        self._service_ns = 0

    def add(self, request: GenerateRequest, now_ns: int) -> TokenDelta | None:
        """Lets a request wait for its turn; when it is refused, its only delta."""
        try:
            limit = token_limit(request, self.config, len(self.pool.blocks))
            self._check_room(request)
        except TritiumError as error:
            return TokenDelta(id=request.id, tokens=[], finish=FinishReason.ERROR, error=to_wire(error))
        self._serial += 1
        seq = Sequence(request, self._serial, limit, wait_limit(request, self.config))
        self._sequences[request.id] = seq
        self._queue.arrive(seq, now_ns, idle=len(self._free_rows) == self.config.max_rows)
        return None

    def follow(self, config: SchedulerConfig) -> None:
        """Other waits and limits of the queue for requests that come from now on; all else is as it was."""
        self.config = config
        self._queue.follow(config.queue_delay_us * 1000, config.preferred_rows)

    def abort(self, request_id: str) -> bool:
        """Ends a request now; False when it is not known, or no longer.

        Its last delta comes from ``take_finished``. Blocks and row of a sequence that a step in flight
        computes are kept until the ``update`` of that step.
        """
        seq = self._sequences.get(request_id)
        if seq is None:
            return False
        self._end(seq)
        self._ended.append(seq.delta([], FinishReason.ABORT))
        return True

    def has_work(self) -> bool:
        """Whether a request is unfinished or a step in flight."""
        return bool(self._sequences or self._flights)

    def ready_at(self, now_ns: int) -> int | None:
        """While an idle engine collects arrivals: when to call ``schedule``; None for at once."""
        return self._queue.wait_until(now_ns)

    def take_finished(self) -> list[TokenDelta]:
        """Last deltas of requests that ended outside of ``update``: expired in ``schedule``, or aborted."""
        ended, self._ended = self._ended, []
        return ended

    def stats(self) -> EngineStats:
        """Counters since the start, and the levels now."""
        return msgspec.structs.replace(
            self._stats,
            running=len(self._running),
            waiting=len(self._sequences) - len(self._running),
            blocks_used=len(self.pool.blocks) - self.pool.num_free,
        )

    def start_counting(self) -> None:
        """Sets the counters of ``stats`` to 0."""
        self._stats = EngineStats(blocks_total=len(self.pool.blocks))

    def schedule(self, now_ns: int) -> ScheduledBatch | None:
        """Forms the next step; rows with one token come first.

        None when nothing can run now: no work, an idle engine collecting arrivals, or everything waits for
        the ``update`` of a step in flight.
        """
        for seq in self._queue.expired(now_ns):
            self._expire(seq, now_ns)
        if self._queue.collecting(now_ns):
            return None
        batch = ScheduledBatch(self._step + 1, [], [], [], [])
        budget, short = self._continue_running(batch)
        if not short and self._free_rows and self._queue.head() is not None:
            self._admit(batch, budget, now_ns)
        if not batch.rows:
            return None
        self._step += 1
        self._flights.append(batch.step)
        batch.freed, self._freed = self._freed, []
        return batch

    def update(self, batch: ScheduledBatch, output: StepOutput, now_ns: int) -> list[TokenDelta]:
        """Takes in what the oldest step in flight drew; what that adds to each request.

        Raises:
            TritiumError: INTERNAL when ``batch`` is not that step, or ``output`` not its output.
        """
        if not self._flights or not self._flights[0] == batch.step == output.step:
            oldest = self._flights[0] if self._flights else None
            text = f"step {batch.step} with output {output.step} came back, expected step {oldest}"
            raise TritiumError(Code.INTERNAL, text)
        self._flights.popleft()
        self._stats.steps += 1
        self._stats.step_tokens += batch.num_tokens
        self._stats.step_ns += output.elapsed_ns
        deltas: list[TokenDelta] = []
        share = 1 / len(batch.rows)
        sampled = 0
        for step in batch.rows:
            seq = self._rows[step.row]
            assert seq is not None, f"row {step.row} was given away while its step was in flight"
            seq.in_flight -= 1
            if seq.status is not SequenceStatus.FINISHED:
                seq.shares += share
                seq.steps += 1
                if step.sample and step.row in output.bad:
                    deltas.append(self._fail(seq))
                else:
                    self._computed(seq, step.count)
                    if step.sample:
                        deltas.append(self._sampled(seq, output, sampled, now_ns))
            sampled += step.sample
            if seq.status is not SequenceStatus.RUNNING:
                self._release(seq)
        return deltas

    def check_integrity(self) -> None:
        """Raises AssertionError when the scheduler's own books contradict each other."""
        self.pool.check_integrity()
        self._queue.check_integrity()
        refs = [0] * len(self.pool.blocks)
        held = [seq for seq in self._rows if seq is not None]
        for seq in held:
            assert self._rows[seq.row] is seq, f"{seq.request.id} is not in its row {seq.row}"
            assert seq.status is SequenceStatus.RUNNING or seq.in_flight, f"{seq.request.id} holds a row for nothing"
            assert seq.computed <= seq.scheduled <= len(seq.table.ids) * self.config.block_size, "counts"
            for block_id in seq.table.ids:
                refs[block_id] += 1
        assert refs == [block.refs for block in self.pool.blocks], "blocks are held by nobody, or not enough"
        running = sorted((s for s in held if s.status is SequenceStatus.RUNNING), key=_order)
        assert self._running == running, "running sequences without a row, or out of order"
        used = {seq.row for seq in held}
        assert sorted(self._free_rows) == [r for r in range(len(self._rows)) if r not in used], "rows were lost"
        assert len(self._running) + len(self._queue) <= len(self._sequences), "a sequence without a request"

    # Waiting -----------------------------------------------------------------------------------------------

    def _check_room(self, request: GenerateRequest) -> None:
        if request.id in self._sequences:
            raise TritiumError(Code.ALREADY_EXISTS, f"request id '{request.id}' is already in flight", param="id")
        waiting = len(self._sequences) - len(self._running)
        if self.config.max_waiting and waiting >= self.config.max_waiting + len(self._free_rows):
            # One place in the queue comes free per finished sequence.
            retry_after_s = self._service_ns / 1e9 / self.config.max_rows or FIRST_RETRY_AFTER_S
            raise TritiumError(Code.UNAVAILABLE, "Exceeds maximum queue size", retry_after_s=retry_after_s)

    def _expire(self, seq: Sequence, now_ns: int) -> None:
        self._end(seq)
        seq.queue_ns = now_ns - seq.request.arrived_ns
        error = to_wire(TritiumError(Code.UNAVAILABLE, "Request timeout expired"))
        self._ended.append(seq.delta([], FinishReason.ERROR, error=error))

    # Admission to a step ---------------------------------------------------------------------------------

    def _continue_running(self, batch: ScheduledBatch) -> tuple[int, bool]:
        """Schedules running sequences; the token budget left, and whether blocks ran out."""
        budget = self.config.max_tokens_per_step
        block_size, running, rows = self.config.block_size, self._running, batch.rows
        unfinished: Sequence | None = None
        short = False
        index = 0
        while index < len(running):  # Preemption shortens it, at its end.
            seq = running[index]
            index += 1
            if seq.exhausted:
                continue
            if seq.remaining > 1:
                # There is only one: nothing is admitted before the budget has covered every running prompt.
                unfinished = seq
                continue
            blocks: list[int] = []
            if seq.scheduled == len(seq.table.ids) * block_size:
                grown = self._grow(seq)
                if grown is None:
                    short = True
                    continue
                blocks = grown
            rows.append(self._row_step(seq, 1, blocks))
            budget -= 1
        if unfinished is not None:
            count = min(unfinished.remaining, budget)
            rows.append(self._row_step(unfinished, count, []))
            budget -= count
        return budget, short

    def _grow(self, seq: Sequence) -> list[int] | None:
        """One more block, from sequences that come after it if need be; None when it must wait or was preempted."""
        while (blocks := self.pool.allocate(1)) is None:
            victim = self._running[-1]
            leaving = self.config.max_rows - len(self._free_rows) - len(self._running)
            if leaving or victim.exhausted:
                # Blocks come back with a step in flight: nobody has to give up more.
                return None
            self._preempt(victim)
            if victim is seq:
                return None
        return blocks

    def _preempt(self, seq: Sequence) -> None:
        seq.preemptions += 1
        self._stats.preemptions += 1
        self._leave(seq, SequenceStatus.WAITING)

    def _admit(self, batch: ScheduledBatch, budget: int, now_ns: int) -> None:
        """Starts waiting sequences while there are rows, tokens and blocks, strictly in their order.

        One free block is left for each running sequence that will grow, or what comes in would soon be
        preempted again. No more than ``max_rows`` are looked at, so that hashing a flood of prompts that
        all have to wait for one prefix does not hold up the step.
        """
        pool, block_size = self.pool, self.config.block_size
        reserve = sum(self._will_grow(seq) for seq in self._running)
        for _ in range(self.config.max_rows):
            seq = self._queue.head()
            if seq is None or not budget or not self._free_rows:
                return
            found: list[Block] = []
            if self.config.prefix_cache:
                pool.extend_hashes(seq.hashes, seq.tokens, seq.scope)
                found = pool.match(seq.hashes, seq.tokens, seq.scope)
                last = (len(seq.tokens) - 1) // block_size
                if self._queue.park(seq.hashes[len(found) : last]):
                    continue
            needed = -(-len(seq.tokens) // block_size) - len(found)
            unused = sum(1 for block in found if not block.refs)
            if needed + unused + reserve > pool.num_free:
                return
            self._queue.pop()
            pool.share(found)
            blocks = pool.allocate(needed)
            assert blocks is not None
            self._start(seq, found, now_ns)
            ids = list(seq.table.ids)
            batch.new.append(NewRow(seq.row, list(seq.tokens), seq.num_prompt, ids, seq.request.params))
            count = min(seq.remaining, budget)
            batch.rows.append(self._row_step(seq, count, blocks))
            budget -= count
            reserve += self._will_grow(seq)

    def _will_grow(self, seq: Sequence) -> bool:
        return seq.limit - 1 > len(seq.table.ids) * self.config.block_size

    def _start(self, seq: Sequence, found: list[Block], now_ns: int) -> None:
        seq.status = SequenceStatus.RUNNING
        insort(self._running, seq, key=_order)
        seq.row = heappop(self._free_rows)
        self._rows[seq.row] = seq
        parent = found[-1].serial if found else seq.scope
        seq.table = BlockTable([block.id for block in found], parent, len(found))
        seq.scheduled = seq.computed = len(found) * self.config.block_size
        self._queue.claim(seq, seq.hashes[len(found) :])
        if not seq.started:
            seq.started = True
            seq.queue_ns = now_ns - seq.request.arrived_ns
            seq.cached_tokens = seq.scheduled
            self._stats.prompt_tokens += seq.num_prompt
            if self.config.prefix_cache:
                self._stats.prefix_queries += seq.num_prompt
                self._stats.prefix_hits += seq.scheduled

    def _row_step(self, seq: Sequence, count: int, blocks: list[int]) -> RowStep:
        start = seq.scheduled
        seq.table.ids += blocks
        seq.scheduled += count
        sample = seq.remaining == 0
        seq.pending += sample
        seq.in_flight += 1
        return RowStep(seq.row, start, count, blocks, sample)

    # After a step ----------------------------------------------------------------------------------------

    def _computed(self, seq: Sequence, count: int) -> None:
        """Publishes what a step filled: only now is it there to be read."""
        seq.computed += count
        full, first = seq.computed // self.config.block_size, seq.table.published
        if full > first and self.config.prefix_cache:
            self.pool.extend_hashes(seq.hashes, seq.tokens, seq.scope)
            self.pool.publish(seq.table, seq.hashes, seq.tokens, full)
            self._queue.release(seq, seq.hashes[first:full])

    def _sampled(self, seq: Sequence, output: StepOutput, index: int, now_ns: int) -> TokenDelta:
        (token,) = output.tokens[index]
        seq.tokens.append(token)
        seq.pending -= 1
        self._stats.output_tokens += 1
        if not seq.first_token_ns:
            seq.first_token_ns = now_ns
        finish = seq.finish_reason(token)
        if finish is not None:
            self._learn_service(now_ns - seq.request.arrived_ns - seq.queue_ns)
            self._end(seq)
        return seq.delta([token], finish, logprobs=output.logprobs[index])

    def _fail(self, seq: Sequence) -> TokenDelta:
        """Ends a sequence whose logits were not finite, and trusts none of what it wrote or read."""
        self.pool.unpublish(seq.table.ids)
        self._end(seq)
        error = TritiumError(Code.INTERNAL, "the model gave logits that are not finite (NaN or infinity)")
        return seq.delta([], FinishReason.ERROR, error=to_wire(error))

    def _learn_service(self, service_ns: int) -> None:
        self._service_ns = (7 * self._service_ns + service_ns) // 8 if self._service_ns else service_ns

    # Leaving ---------------------------------------------------------------------------------------------

    def _end(self, seq: Sequence) -> None:
        """Ends a sequence in any state."""
        del self._sequences[seq.request.id]
        if seq.status is SequenceStatus.RUNNING:
            self._leave(seq, SequenceStatus.FINISHED)
        elif seq.row < 0:
            self._queue.remove(seq)
        seq.status = SequenceStatus.FINISHED

    def _leave(self, seq: Sequence, status: SequenceStatus) -> None:
        """Takes a running sequence out; blocks and row come back once no step in flight uses them."""
        del self._running[bisect_left(self._running, seq.order, key=_order)]
        seq.status = status
        self._queue.release(seq, seq.hashes[seq.table.published :])
        self._release(seq)

    def _release(self, seq: Sequence) -> None:
        if seq.in_flight or seq.row < 0:
            return
        self.pool.free(seq.table.ids)
        self._rows[seq.row] = None
        self._freed.append(seq.row)
        heappush(self._free_rows, seq.row)
        seq.reset()
        if seq.status is SequenceStatus.WAITING:
            self._queue.push(seq)


def _order(seq: Sequence) -> tuple[int, int, int]:
    return seq.order
