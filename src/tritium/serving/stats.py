"""Counters of one model version, in Triton's shape, and the same events as metrics.

``ModelStatistics`` of the statistics extension is made from ``ModelStats``; what Prometheus reads is kept by
``observability.metrics`` and told from here, so that both count the same events. It is told when its page is read
(``report``): until then a request costs a few additions.

Who calls what: the server ends each request with ``succeeded`` or ``failed``; a batcher says ``pending`` when
requests begin and cease to wait, and ``executed`` after each execution of the model. A backend that schedules
itself gives shares of executions in ``Timing.executions`` instead.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from tritium.backends.base import Backend, TextBackend, Timing
from tritium.backends.config import ModelConfig
from tritium.errors import LOST, Code
from tritium.observability.metrics import FailureReason, Metrics, ModelMetrics

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
        if ns > 0:
            self.ns += ns


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
        waiting: requests that wait for an execution now.
        failures: failed requests by reason.
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
    waiting: int = 0
    failures: dict[FailureReason, int] = field(default_factory=dict[FailureReason, int])
    _reported: _Reported | None = field(default=None, repr=False)

    def attach(self, metrics: ModelMetrics) -> None:
        """From now on what is counted here is shown there too."""
        self.metrics = metrics
        self._reported = _Reported.of(self)
        metrics.watch_counts(self.report)

    def report(self) -> None:
        """Tells the metrics what was counted since the last time."""
        metrics, before = self.metrics, self._reported
        if metrics is None or before is None:
            return
        now = self._reported = _Reported.of(self)
        metrics.request_success(now.success - before.success)
        metrics.inference(now.inferences - before.inferences)
        metrics.execution(now.executions - before.executions)
        if now.waiting != before.waiting:
            metrics.pending(now.waiting - before.waiting)
        for reason, count in now.failures.items():
            metrics.request_failure(reason, count - before.failures.get(reason, 0))
        if not metrics.summarizes:
            request, queue, first, second, third = (
                (a - b) / 1e3 for a, b in zip(now.durations_ns, before.durations_ns, strict=True)
            )
            metrics.durations_us(
                request=request, queue=queue, compute_input=first, compute_infer=second, compute_output=third
            )

    @property
    def execution_count(self) -> int:
        """Executions of the backend; inferences that ran together share one."""
        return round(self.executions)

    def pending(self, change: int) -> None:
        """Requests that began (positive) or ceased (negative) to wait for an execution."""
        self.waiting += change

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

    def succeeded(self, rows: int, total_ns: int, timing: Timing) -> None:
        """A request of ``rows`` inferences was answered, ``total_ns`` after its arrival."""
        if total_ns < 0:
            total_ns = 0
        success, queue = self.success, self.queue
        success.count += 1
        success.ns += total_ns
        queue.count += 1
        queue.ns += timing.queue_ns
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
                self.metrics.cache_miss(timing.cache_ns / 1e3)
        if self.metrics is not None and self.metrics.summarizes:
            self.metrics.durations_us(
                request=total_ns / 1e3,
                queue=timing.queue_ns / 1e3,
                compute_input=timing.input_ns / 1e3,
                compute_infer=infer_ns / 1e3,
                compute_output=timing.output_ns / 1e3,
            )

    def _from_cache(self, total_ns: int, timing: Timing) -> None:
        self.cache_hit.add(timing.cache_ns)
        if self.metrics is not None:
            if self.metrics.summarizes:
                self.metrics.durations_us(request=total_ns / 1e3, queue=timing.queue_ns / 1e3)
            self.metrics.cache_hit(timing.cache_ns / 1e3)

    def failed(self, code: Code, total_ns: int, timing: Timing, reason: str | None = None) -> None:
        """A request ended with an error of that code and reason, ``total_ns`` after its arrival."""
        self._executed(timing)
        self.fail.add(total_ns)
        counted = "BACKEND" if reason == LOST else _REASONS.get(code, "OTHER")
        self.failures[counted] = self.failures.get(counted, 0) + 1

    def first_answer(self, ns: int) -> None:
        """The first answer to a request of a decoupled model came that long after its arrival."""
        if self.metrics is not None:
            self.metrics.first_response(ns / 1e6)

    def _executed(self, timing: Timing) -> None:
        self.last_inference_ms = time.time_ns() // 1_000_000
        self.executions += timing.executions


@dataclass(frozen=True, slots=True)
class _Reported:
    """How far the metrics have been told."""

    success: int
    inferences: int
    executions: float
    waiting: int
    failures: dict[FailureReason, int]
    durations_ns: tuple[int, int, int, int, int]

    @classmethod
    def of(cls, stats: ModelStats) -> _Reported:
        parts = (stats.success, stats.queue, stats.compute_input, stats.compute_infer, stats.compute_output)
        return cls(
            stats.success.count,
            stats.inference_count,
            stats.executions,
            stats.waiting,
            dict(stats.failures),
            (parts[0].ns, parts[1].ns, parts[2].ns, parts[3].ns, parts[4].ns),
        )


def observe(metrics: Metrics, version: str, config: ModelConfig, backend: Backend) -> ModelMetrics:
    """The series of one version of a model, with those of the engines where it is a language model."""
    found = metrics.add_model(
        config.name,
        version,
        "llm" if isinstance(backend, TextBackend) else "model",
        tags=config.source.metric_tags,
        cached=config.source.response_cache.enable,
        decoupled=config.decoupled,
    )
    if isinstance(backend, TextBackend):
        for index in range(len(backend.engine_stats())):
            found.watch(lambda index=index: backend.engine_stats()[index])
    return found
