"""An OTLP/HTTP collector for tests: it decodes what arrives with the protobuf classes of OpenTelemetry."""

import gzip
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


class Collector:
    """What has arrived so far."""

    def __init__(self, port):
        self.url = f"http://127.0.0.1:{port}"
        self.spans = []
        self.metrics = set()

    def take(self, path, body):
        if path == "/v1/metrics":
            request = ExportMetricsServiceRequest.FromString(body)
            for resource in request.resource_metrics:
                for scope in resource.scope_metrics:
                    self.metrics.update(metric.name for metric in scope.metrics)
            return ExportMetricsServiceResponse()
        request = ExportTraceServiceRequest.FromString(body)
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self.spans += scope.spans
        return ExportTraceServiceResponse()

    def named(self, name):
        return [one for one in by_id(self.spans).values() if one.name == name]


def by_id(spans):
    """The spans by their ids; one that arrives twice must be the same one."""
    found = {}
    for one in spans:
        key = (one.trace_id, one.span_id)
        assert found.setdefault(key, one) == one, f"two spans have one id: {found[key]} and {one}"
    return found


def attributes(span):
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}


@contextmanager
def collecting():
    """A collector on a port of its own."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            answer = collector.take(self.path, body).SerializeToString()
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_):
            """Stay silent."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    collector = Collector(server.server_port)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
