"""One request on its way through a model: its counters, its trace, its end."""

from __future__ import annotations

import time
from dataclasses import dataclass

from tritium.backends.base import Timing
from tritium.errors import Code
from tritium.observability.tracing import Trace
from tritium.serving.stats import ModelStats
from tritium.types import InferResponse


@dataclass(slots=True)
class RequestRun:
    """One request that is running, until it is ended once, well or badly."""

    stats: ModelStats
    rows: int
    arrived_ns: int
    timing: Timing
    trace: Trace | None = None
    answers: int = 0
    ended: bool = False

    def answered(self, answer: InferResponse) -> None:
        """One answer came; also the last."""
        if not self.answers:
            self.stats.first_answer(time.monotonic_ns() - self.arrived_ns)
        self.answers += 1
        if self.trace is not None:
            self.trace.stamp("INFER_RESPONSE_COMPLETE")
            self.trace.hold("TENSOR_BACKEND_OUTPUT", answer.outputs)

    def succeed(self) -> None:
        """The final answer came."""
        self._end(None)

    def fail(self, code: Code) -> None:
        """It ended in an error, unless it has ended before."""
        if not self.ended:
            self._end(code)

    def _end(self, code: Code | None) -> None:
        self.ended = True
        now = time.monotonic_ns()
        if code is None:
            self.stats.succeeded(self.rows, now - self.arrived_ns, self.timing)
        else:
            self.stats.failed(code, now - self.arrived_ns, self.timing)
        if self.trace is not None:
            t = self.timing
            parts_ns = None if t.cache == "hit" else (t.queue_ns, t.input_ns, t.output_ns)
            self.trace.served(self.stats.version, self.arrived_ns, now, parts_ns)
