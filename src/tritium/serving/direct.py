"""The short way of a request through a model: one answer, by a callback, without an iterator or a task.

``Model.infer`` is the long way; both count, answer and fail alike.
"""

from __future__ import annotations

from collections.abc import Callable

from tritium.backends.base import Timing
from tritium.errors import Code, TritiumError
from tritium.observability import logs
from tritium.serving.queue import Answer
from tritium.serving.tally import Tally
from tritium.types import InferRequest, InferResponse

Done = Callable[[Answer], None]
Submit = Callable[[InferRequest, Timing, int, Callable[[Answer], None]], Callable[[], None]]

_log = logs.get(__name__)


def too_many(model: str) -> TritiumError:
    """The error of a request for one answer that got more."""
    return TritiumError(
        Code.INVALID_ARGUMENT,
        f"model '{model}' gives more than one answer to this request, expected one; ask for them as a stream, or do "
        "not set 'stream'",
        param="stream",
    )


def none_came(model: str) -> TritiumError:
    """The error of a request for one answer that got none."""
    return TritiumError(Code.INTERNAL, f"model '{model}' gave no answer")


class Direct:
    """One request.

    Args:
        left: called once, when it has ended.
        done: called once, with the answer or the error, unless it was cancelled.
    """

    __slots__ = ("_cancel", "_done", "_found", "_left", "_model", "_over", "_request", "_tally", "_version")

    def __init__(self, request: InferRequest, tally: Tally, left: Callable[[], None], done: Done) -> None:
        self._request = request
        self._tally = tally
        self._left = left
        self._done = done
        self._found: InferResponse | None = None
        self._over = False
        self._cancel: Callable[[], None] | None = None

    def start(self, model: str, version: str, submit: Submit) -> Callable[[], None]:
        """Hands the request over; returns what cancels it.

        Raises:
            TritiumError: it was not taken.
        """
        self._model, self._version = model, version
        try:
            cancel = submit(self._request, self._tally.timing, self._tally.rows, self._take)
        except TritiumError as error:
            self._tally.fail(error.code, error.reason)
            self._end()
            raise
        if not self._over:
            self._cancel = cancel
        return self.cancel

    def cancel(self) -> None:
        """Nobody waits for the answer any more; after the end it does nothing."""
        if not self._over:
            cancel = self._cancel
            self._end(Code.CANCELLED)
            if cancel is not None:
                cancel()

    def _take(self, answer: Answer) -> None:
        """One answer, or the error that ends the request."""
        if self._over:
            return
        if isinstance(answer, TritiumError):
            self._end(answer.code, answer.reason)
            self._tell(answer)
            return
        tally = self._tally
        answer.model, answer.version, answer.id = self._model, self._version, self._request.id
        tally.answered(answer)
        if answer.final:
            tally.succeed()
        if not answer.empty:
            if self._found is not None:
                self.cancel()
                self._tell(too_many(self._model))
                return
            self._found = answer
        if answer.final:
            self._end()
            found = self._found
            self._tell(none_came(self._model) if found is None else found.error or found)

    def _end(self, code: Code | None = None, reason: str | None = None) -> None:
        self._over = True
        self._cancel = None  # it refers to this
        if code is not None:
            self._tally.fail(code, reason)
        self._left()

    def _tell(self, answer: Answer) -> None:
        # It is called where answers of other requests are still to be handed on.
        try:
            self._done(answer)
        except Exception:
            _log.exception("an answer could not be handed on", model=self._model)
