"""What batchers, their lanes and the instances use of each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from tritium.serving.execution import Listener, Times
from tritium.serving.queue import Answer, Job
from tritium.types import InferRequest

if TYPE_CHECKING:
    from tritium.serving.lane import Lane


class Running(Protocol):
    """What is used of ``instance.Execution``.

    Attributes:
        times: what it took; None until the model's ``execute`` has returned.
        returned: whether it has.
    """

    times: Times | None
    returned: bool

    def listen(self, listener: Listener) -> None:
        """Replies go to ``listener`` as they come."""
        ...

    def cancel(self, index: int) -> None:
        """Nobody waits for that request any more."""
        ...


class Executor(Protocol):
    """What is used of ``instance.Instance``.

    Attributes:
        name: as error messages show it.
        on_free: called when it has become ready, and whenever a batch has returned.
    """

    name: str
    on_free: Callable[[], None] | None

    @property
    def ready(self) -> bool:
        """Whether it would take a batch, now or once the running one is through."""
        ...

    @property
    def idle(self) -> bool:
        """Whether it would run a batch at once."""
        ...

    @property
    def life(self) -> int:
        """Changes when the model was loaded anew, and knows nothing of what it was told before."""
        ...

    def execute(self, requests: Sequence[InferRequest], *, ahead: bool = False) -> Running:
        """Runs a batch; ``ahead``: as soon as an earlier one is through."""
        ...


class Owner(Protocol):
    """The batcher of a lane."""

    def kick(self) -> None:
        """Something has changed: a batch may be due."""
        ...

    def done(self, lane: Lane, job: Job) -> None:
        """A job has ended, or waits again (``Phase.WAITING``) because its model wants to see it again."""
        ...

    def crashed(self, lane: Lane, jobs: Sequence[Job]) -> None:
        """The instance died; these jobs shall run again."""
        ...

    def deliver(self, job: Job, answer: Answer) -> None:
        """An answer has come."""
        ...
