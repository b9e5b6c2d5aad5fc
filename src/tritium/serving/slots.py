"""Sequences and the places that they take on the instances of a model."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from tritium.errors import invalid
from tritium.serving.lane import Lane
from tritium.serving.queue import Job
from tritium.serving.state import States
from tritium.types import InferRequest

# How many ids of sequences are remembered that were lost with their instance.
MAX_LOST = 10_000


@dataclass(slots=True, eq=False)
class Run:
    """One sequence.

    Attributes:
        jobs: its requests that wait, in order.
        running: the one that an instance has.
        slot: its place; None while it waits for one.
        ended: its last request has come.
        states: what the server keeps for the model.
        used_ns: when it last had something to do.
        life: the ``Executor.life`` in which its model was told that it begins.
    """

    id: int | str
    used_ns: int
    life: int = -1
    jobs: deque[Job] = field(default_factory=deque[Job])
    running: Job | None = None
    slot: Slot | None = None
    ended: bool = False
    states: States = field(default_factory=States)


@dataclass(slots=True, eq=False)
class Slot:
    """A place for a sequence on an instance."""

    lane: Lane
    index: int
    run: Run | None = None

    @property
    def job(self) -> Job | None:
        """The request that may run next."""
        run = self.run
        return run.jobs[0] if run is not None and run.jobs and run.running is None else None


class Lost:
    """Ids of sequences that ended with their instance, the latest ``MAX_LOST`` of them."""

    def __init__(self) -> None:
        self._ids: dict[int | str, None] = {}

    def __contains__(self, id: int | str) -> bool:
        return id in self._ids

    def add(self, id: int | str) -> None:
        """One more."""
        self._ids[id] = None
        while len(self._ids) > MAX_LOST:
            self._ids.pop(next(iter(self._ids)))

    def discard(self, id: int | str) -> None:
        """The id stands for a new sequence."""
        self._ids.pop(id, None)


def check_sequence(model: str, request: InferRequest, rows: int, *, optional: bool) -> None:
    """Checks what every request of a sequence must have.

    Args:
        optional: a request without an id is a sequence of its own.

    Raises:
        TritiumError: INVALID_ARGUMENT when it has more than one row, or no id.
    """
    if rows != 1:
        raise invalid(
            f"inference request to model '{model}' must specify batch-size 1 due to requirements of sequence batcher"
        )
    if not optional and (request.sequence is None or not request.sequence.id):
        raise invalid(
            f"inference request to model '{model}' must specify a non-zero or non-empty correlation ID",
            param="sequence_id",
        )
