"""Sequences that wait for a row: their order, their deadlines, and what they wait for."""

from __future__ import annotations

from bisect import bisect_left, insort
from heapq import heapify, heappop, heappush

from tritium.llm.core.sequence import Sequence, SequenceStatus


def _turn(seq: Sequence) -> tuple[int, bool, int, int]:
    return seq.turn


class WaitingQueue:
    """Sequences in the order of ``Sequence.turn``, except those parked.

    A parked sequence shares a prefix with a running one that is computing it right now. It stands aside,
    in nobody's way, until ``release`` says that the block is there or will not come.

    Args:
        delay_ns: how long an idle engine collects arrivals.
        preferred: numbers of waiting sequences that end that wait.
        full: as many as can run: ends it too.
    """

    def __init__(self, delay_ns: int, preferred: tuple[int, ...], full: int) -> None:
        self._delay_ns = delay_ns
        self._preferred = frozenset(preferred)
        self._full = full
        self._start_ns: int | None = None
        self._ready: list[Sequence] = []
        self._computing: dict[bytes, Sequence] = {}
        self._parked: dict[bytes, set[Sequence]] = {}
        self._num_parked = 0
        self._deadlines: list[tuple[int, int, Sequence]] = []

    def __len__(self) -> int:
        return len(self._ready) + self._num_parked

    def follow(self, delay_ns: int, preferred: tuple[int, ...]) -> None:
        """Another wait and other sizes from now on; a wait that has begun is over."""
        self._delay_ns, self._preferred, self._start_ns = delay_ns, frozenset(preferred), None

    def arrive(self, seq: Sequence, now_ns: int, *, idle: bool) -> None:
        """Takes a new sequence in; ``idle`` when nothing runs, so that the first one starts the collecting."""
        self.push(seq)
        waiting = len(self)
        if idle and waiting == 1 and self._delay_ns:
            self._start_ns = now_ns + self._delay_ns
        if waiting >= self._full or waiting in self._preferred:
            self._start_ns = None
        if seq.deadline_ns is not None:
            if len(self._deadlines) > 2 * waiting + 64:
                # Entries of sequences that ran or left stay behind: drop them before they add up.
                self._deadlines = [entry for entry in self._deadlines if _may_expire(entry[2])]
                heapify(self._deadlines)
            heappush(self._deadlines, (seq.deadline_ns, seq.serial, seq))

    def push(self, seq: Sequence) -> None:
        """Puts a sequence in its place."""
        insort(self._ready, seq, key=_turn)

    def head(self) -> Sequence | None:
        """The next one that is not parked."""
        return self._ready[0] if self._ready else None

    def pop(self) -> Sequence:
        """Takes the head out."""
        return self._ready.pop(0)

    def claim(self, seq: Sequence, digests: list[bytes]) -> None:
        """Notes that a running sequence is to compute these blocks, so that nobody else has to."""
        for digest in digests:
            self._computing.setdefault(digest, seq)

    def release(self, seq: Sequence, digests: list[bytes]) -> None:
        """Ends claims, done or given up: those that waited for the blocks look again, in their old places."""
        for digest in digests:
            if self._computing.get(digest) is not seq:
                continue
            del self._computing[digest]
            for waiting in self._parked.pop(digest, ()):
                waiting.parked = None
                self._num_parked -= 1
                self.push(waiting)

    def park(self, digests: list[bytes]) -> bool:
        """Moves the head aside when somebody computes the first of ``digests``, until the last such one is there.

        Args:
            digests: the blocks that the head lacks, of those it could share.
        """
        seq = self._ready[0]
        for digest in digests:
            if digest not in self._computing:
                break
            seq.parked = digest
        if seq.parked is None:
            return False
        self._parked.setdefault(seq.parked, set()).add(self._ready.pop(0))
        self._num_parked += 1
        return True

    def remove(self, seq: Sequence) -> None:
        """Takes a waiting sequence out, wherever it stands."""
        if seq.parked is None:
            del self._ready[bisect_left(self._ready, seq.turn, key=_turn)]
        else:
            group = self._parked[seq.parked]
            group.remove(seq)
            if not group:
                del self._parked[seq.parked]
            seq.parked = None
            self._num_parked -= 1
        if not len(self):
            self._start_ns = None

    def expired(self, now_ns: int) -> list[Sequence]:
        """Sequences that never ran and whose deadline is over; each is named once, ``remove`` is the caller's."""
        found: list[Sequence] = []
        while self._deadlines and self._deadlines[0][0] <= now_ns:
            seq = heappop(self._deadlines)[2]
            if _may_expire(seq):
                found.append(seq)
        return found

    def wait_until(self, now_ns: int) -> int | None:
        """While an idle engine collects arrivals: when to look again, for a start or a deadline; else None."""
        if self._start_ns is None or self._start_ns <= now_ns:
            return None
        if self._deadlines:
            return min(self._start_ns, self._deadlines[0][0])
        return self._start_ns

    def collecting(self, now_ns: int) -> bool:
        """Whether an idle engine should not start yet; ends the collecting when its time is over."""
        if self._start_ns is not None and self._start_ns <= now_ns:
            self._start_ns = None
        return self._start_ns is not None

    def check_integrity(self) -> None:
        """Raises AssertionError when somebody is lost or waits for nobody."""
        turns = [seq.turn for seq in self._ready]
        assert turns == sorted(turns), "waiting sequences are out of order"
        parked = [(digest, seq) for digest, group in self._parked.items() for seq in group]
        assert len(parked) == self._num_parked, "parked sequences were miscounted"
        assert all(digest in self._computing and seq.parked == digest for digest, seq in parked), "parked for nobody"
        for seq in [*self._ready, *(seq for _, seq in parked)]:
            assert seq.status is SequenceStatus.WAITING and seq.row < 0, f"{seq.request.id} is not waiting"
        for seq in self._computing.values():
            assert seq.status is SequenceStatus.RUNNING, f"{seq.request.id} computes nothing"


def _may_expire(seq: Sequence) -> bool:
    return seq.status is SequenceStatus.WAITING and not seq.started
