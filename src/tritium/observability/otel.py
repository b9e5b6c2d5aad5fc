"""Traces as OpenTelemetry spans, sent with OTLP over HTTP; names and attributes are Triton's.

A request has a span ``InferRequest`` with what its connection saw, below it one that is called like the model, and
below that one ``compute``. The spans of the steps of an ensemble, and of the models that a model calls, lie below
the span of the one that called. Only this module needs the OpenTelemetry SDK.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import Span, SpanKind, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

ROOT, COMPUTE = "InferRequest", "compute"
SERVICE = "triton-inference-server"
# What the receiver may take, in seconds; spans that it does not take are dropped.
TIMEOUT_S = 5.0
_OF_MODEL = ("REQUEST_START", "QUEUE_START", "INFER_RESPONSE_COMPLETE", "REQUEST_END")
_OF_CONNECTION = ("HTTP_", "GRPC_")
_ATTRIBUTES = ("model_name", "model_version", "request_id")

Stamps = Sequence[tuple[int, str]]


class Exporter:
    """Makes spans and sends them from a thread of its own.

    Args:
        url: of the receiver.
        resource: attributes of the server.
        batching: ``bsp_max_queue_size``, ``bsp_schedule_delay`` (ms), ``bsp_max_export_batch_size``; what is not
            given is as the SDK has it.
    """

    def __init__(self, url: str, resource: Mapping[str, str], batching: Mapping[str, int]) -> None:
        about = Resource({"service.name": SERVICE}).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(
            resource=about.merge(Resource(dict(resource))), sampler=ALWAYS_ON, shutdown_on_exit=False
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(
                OTLPSpanExporter(endpoint=url, timeout=TIMEOUT_S),
                max_queue_size=batching.get("bsp_max_queue_size"),
                schedule_delay_millis=batching.get("bsp_schedule_delay"),
                max_export_batch_size=batching.get("bsp_max_export_batch_size"),
            )
        )
        self._tracer = self._provider.get_tracer("tritium")
        # From the steady clock that times are measured with to the one that spans tell.
        self._offset_ns = time.time_ns() - time.monotonic_ns()

    def begin(self, model: str, headers: Mapping[str, str], arrived_ns: int) -> Spans:
        """The spans of a request of a client.

        Args:
            headers: with ``traceparent`` (W3C Trace Context) the spans are part of the client's trace.
        """
        above = TraceContextTextMapPropagator().extract(dict(headers), Context())
        start_ns = arrived_ns + self._offset_ns
        root = self._tracer.start_span(ROOT, above, kind=SpanKind.SERVER, start_time=start_ns)
        return Spans(self._tracer, self._offset_ns, model, set_span_in_context(root, Context()), start_ns, root)

    def close(self) -> None:
        """Sends what is left; takes no more."""
        self._provider.shutdown()


class Spans:
    """The spans of one request to one model.

    Args:
        above: the span that it lies below.
        root: that span, where it is to be ended with this one.
    """

    def __init__(
        self, tracer: Tracer, offset_ns: int, model: str, above: Context, start_ns: int, root: Span | None = None
    ) -> None:
        self._tracer = tracer
        self._offset_ns = offset_ns
        self._root = root
        self._span = tracer.start_span(model, above, kind=SpanKind.SERVER, start_time=start_ns)
        self._context = set_span_in_context(self._span, Context())

    def child(self, model: str) -> Spans:
        """Those of a request that this one makes."""
        return Spans(self._tracer, self._offset_ns, model, self._context, time.monotonic_ns() + self._offset_ns)

    def carrier(self) -> str:
        """The headers that make other spans part of this trace, as a JSON object."""
        found: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(found, self._context)
        return json.dumps(found)

    def end(self, head: Mapping[str, Any], stamps: Stamps) -> None:
        """Ends and sends them.

        Args:
            head: ``id``, ``parent_id`` and what is known of model and request.
            stamps: (nanoseconds of the steady clock, name), ascending.
        """
        for key in _ATTRIBUTES:
            if key in head:
                self._span.set_attribute(f"triton.{key}", head[key])
        self._span.set_attribute("triton.trace_id", head["id"])
        self._span.set_attribute("triton.trace_parent_id", head.get("parent_id", 0))
        stamps = [(ns + self._offset_ns, name) for ns, name in stamps]
        compute = [stamp for stamp in stamps if stamp[1].startswith("COMPUTE_")]
        if compute:
            span = self._tracer.start_span(COMPUTE, self._context, kind=SpanKind.SERVER, start_time=compute[0][0])
            _finish(span, compute)
        _finish(self._span, [stamp for stamp in stamps if stamp[1] in _OF_MODEL])
        if self._root is not None:
            _finish(self._root, [stamp for stamp in stamps if stamp[1].startswith(_OF_CONNECTION)])


def _finish(span: Span, stamps: Stamps) -> None:
    """Ends a span with its last event, or now when it has none."""
    for ns, name in stamps:
        span.add_event(name, timestamp=ns)
    span.end(stamps[-1][0] if stamps else None)
