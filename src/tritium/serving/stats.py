"""Counters of one model version, in Triton's shape, and the same events as metrics.

``ModelStatistics`` of the statistics extension is made from ``ModelStats``; what Prometheus reads is kept by
``observability.metrics`` and told from here, so that both count the same events.

Who calls what: the server ends each request with ``succeeded`` or ``failed``; a batcher says ``pending`` when
requests begin and cease to wait, and ``executed`` after each execution of the model. A backend that schedules
itself gives shares of executions in ``Timing.executions`` instead.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from tritium.backends.base import Timing
from tritium.errors import LOST, Code
from tritium.observability.metrics import FailureReason, ModelMetrics

# How Triton files failures; a code that is not named here is OTHER.
_REASONS: dict[Code, FailureReason] = {
    Code.CANCELLED: "CANCELED",
    Code.UNAVAILABLE: "REJECTED",
    Code.DEADLINE_EXCEEDED: "REJECTED",
    Code.RESOURCE_EXHAUSTED: "REJECTED",
    Code.INTERNAL: "BACKEND",
    Code.UNKNOWN: "BACKEND",
}


@dataclass(slots=True)
class Duration:
    """How often something happened and how long it took in all, in nanoseconds."""

    count: int = 0
    ns: int = 0

    def add(self, ns: int) -> None:
        """One more, of that length."""
        self.count += 1
        self.ns += max(0, ns)


@dataclass(slots=True)
class BatchStats:
    """Executions of one batch size, and their parts."""

    compute_input: Duration = field(default_factory=Duration)
    compute_infer: Duration = field(default_factory=Duration)
    compute_output: Duration = field(default_factory=Duration)


@dataclass(slots=True)
class ModelStats:
    """What happened to one version of a model since it was loaded.

    Attributes:
        inference_count: inferences that succeeded; a request counts its batch size, one from the cache nothing.
        last_inference_ms: end of the last request that reached the backend, in ms since the epoch; 0 for none.
        success: requests that were answered, from arrival to the last answer, also those from the cache.
        fail: requests that the backend or its queue ended with an error, and those whose client left.
            Requests that never came so far (unknown input, wrong shape) count nowhere.
        queue, compute_input, compute_infer, compute_output: the parts of the successful requests.
        cache_hit, cache_miss: what the response cache took for requests that asked it.
        batches: executions by batch size, also of requests that failed.
        executions: executions and shares of them, summed; see ``execution_count``.
    """

    model: str
    version: str
    metrics: ModelMetrics | None = field(default=None, repr=False)
    inference_count: int = 0
    last_inference_ms: int = 0
    success: Duration = field(default_factory=Duration)
    fail: Duration = field(default_factory=Duration)
    queue: Duration = field(default_factory=Duration)
    compute_input: Duration = field(default_factory=Duration)
    compute_infer: Duration = field(default_factory=Duration)
    compute_output: Duration = field(default_factory=Duration)
    cache_hit: Duration = field(default_factory=Duration)
    cache_miss: Duration = field(default_factory=Duration)
    batches: dict[int, BatchStats] = field(default_factory=dict[int, BatchStats])
    executions: float = 0.0

    @property
    def execution_count(self) -> int:
        """Executions of the backend; inferences that ran together share one."""
        return round(self.executions)

    def pending(self, change: int) -> None:
        """Requests that began (positive) or ceased (negative) to wait for an execution."""
        if self.metrics is not None:
            self.metrics.pending(change)

    def executed(self, rows: int, *, input_ns: int = 0, infer_ns: int = 0, output_ns: int = 0) -> None:
        """The model ran once, over a batch of ``rows`` inferences."""
        self.last_inference_ms = time.time_ns() // 1_000_000
        self.executions += 1
        batch = self.batches.get(rows)
        if batch is None:
            batch = self.batches[rows] = BatchStats()
        batch.compute_input.add(input_ns)
        batch.compute_infer.add(infer_ns)
        batch.compute_output.add(output_ns)
        if self.metrics is not None:
            self.metrics.execution(1)

    def succeeded(self, rows: int, total_ns: int, timing: Timing) -> None:
        """A request of ``rows`` inferences was answered, ``total_ns`` after its arrival."""
        total_ns = max(0, total_ns)
        self.success.add(total_ns)
        self.queue.add(timing.queue_ns)
        if timing.cache == "hit":
            self._from_cache(total_ns, timing)
            return
        infer_ns = timing.infer_ns or max(0, total_ns - timing.queue_ns - timing.input_ns - timing.output_ns)
        self._executed(timing)
        self.inference_count += rows
        self.compute_input.add(timing.input_ns)
        self.compute_infer.add(infer_ns)
        self.compute_output.add(timing.output_ns)
        if timing.cache == "miss":
            self.cache_miss.add(timing.cache_ns)
        if self.metrics is not None:
            self.metrics.request_success()
            self.metrics.inference(rows)
            self.metrics.durations_us(
                request=total_ns / 1e3,
                queue=timing.queue_ns / 1e3,
                compute_input=timing.input_ns / 1e3,
                compute_infer=infer_ns / 1e3,
                compute_output=timing.output_ns / 1e3,
            )
            if timing.cache == "miss":
                self.metrics.cache_miss(timing.cache_ns / 1e3)

    def _from_cache(self, total_ns: int, timing: Timing) -> None:
        self.cache_hit.add(timing.cache_ns)
        if self.metrics is not None:
            self.metrics.request_success()
            self.metrics.durations_us(request=total_ns / 1e3, queue=timing.queue_ns / 1e3)
            self.metrics.cache_hit(timing.cache_ns / 1e3)

    def failed(self, code: Code, total_ns: int, timing: Timing, reason: str | None = None) -> None:
        """A request ended with an error of that code and reason, ``total_ns`` after its arrival."""
        self._executed(timing)
        self.fail.add(total_ns)
        if self.metrics is not None:
            self.metrics.request_failure("BACKEND" if reason == LOST else _REASONS.get(code, "OTHER"))

    def first_answer(self, ns: int) -> None:
        """The first answer to a request of a decoupled model came that long after its arrival."""
        if self.metrics is not None:
            self.metrics.first_response(ns / 1e6)

    def _executed(self, timing: Timing) -> None:
        self.last_inference_ms = time.time_ns() // 1_000_000
        if timing.executions:
            self.executions += timing.executions
            if self.metrics is not None:
                self.metrics.execution(timing.executions)
