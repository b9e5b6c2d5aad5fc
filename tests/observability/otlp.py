"""A small receiver of OpenTelemetry traces over HTTP, as a collector would be."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass
class Received:
    """A span.

    Attributes:
        resource: attributes of the server that sent it.
        events: (name, nanoseconds since the epoch).
    """

    name: str
    trace_id: str
    id: str
    parent_id: str
    begin_ns: int
    end_ns: int
    attributes: dict[str, Any]
    events: list[tuple[str, int]]
    resource: dict[str, Any]


@dataclass
class Collector:
    """What has come."""

    url: str = ""
    paths: list[str] = field(default_factory=list)
    spans: list[Received] = field(default_factory=list)

    def take(self, path: str, body: bytes) -> None:
        self.paths.append(path)
        message = ExportTraceServiceRequest.FromString(body)
        for group in message.resource_spans:
            resource = _plain(group.resource.attributes)
            for span in (span for scope in group.scope_spans for span in scope.spans):
                self.spans.append(
                    Received(
                        span.name,
                        span.trace_id.hex(),
                        span.span_id.hex(),
                        span.parent_span_id.hex(),
                        span.start_time_unix_nano,
                        span.end_time_unix_nano,
                        _plain(span.attributes),
                        [(event.name, event.time_unix_nano) for event in span.events],
                        resource,
                    )
                )

    def tree(self) -> list[tuple[str, ...]]:
        """Names from the outermost span to each, sorted."""
        by_id = {span.id: span for span in self.spans}

        def path(span: Received) -> tuple[str, ...]:
            above = by_id.get(span.parent_id)
            return (*(path(above) if above is not None else ()), span.name)

        return sorted(path(span) for span in self.spans)


def _plain(attributes: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}


@contextmanager
def collecting() -> Iterator[Collector]:
    """A receiver that listens on a port of its own."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            collector.take(self.path, self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    collector.url = f"127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
