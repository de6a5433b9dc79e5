"""Logs, metrics and traces: one vocabulary for every duty."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from uuid import UUID

import structlog
from opentelemetry import trace
from opentelemetry.trace import SpanKind
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from prometheus_client import Counter, Gauge, Histogram

_PROPAGATOR = TraceContextTextMapPropagator()
_tracer = trace.get_tracer("duly")

JOBS_FINISHED = Counter("duly_jobs_finished_total", "Runs by how they ended", ["name", "outcome"])
JOB_SECONDS = Histogram(
    "duly_job_seconds",
    "How long a handler ran",
    ["name"],
    buckets=(0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 15, 60, 300, 1800),
)
JOB_LATENESS_SECONDS = Histogram(
    "duly_job_lateness_seconds",
    "From the moment a job was due to the moment it was claimed",
    ["name"],
    buckets=(0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 15, 60, 300, 3600),
)
LEASES_LOST = Counter("duly_leases_lost_total", "Settlements refused because another worker held the job", ["name"])
JOBS_RESCUED = Counter("duly_jobs_rescued_total", "Jobs taken over from a worker that died or stalled", ["name"])
EVENTS_PUBLISHED = Counter("duly_events_published_total", "Events published", ["topic"])
PUBLISH_FAILURES = Counter("duly_publish_failures_total", "Failed attempts to publish an event", ["topic"])
OCCURRENCES_FIRED = Counter("duly_occurrences_fired_total", "Cron occurrences turned into jobs", ["name"])
OCCURRENCES_MISSED = Counter("duly_occurrences_missed_total", "Cron occurrences found late", ["name"])
HTTP_REQUESTS = Counter("duly_http_requests_total", "Requests answered", ["method", "route", "status"])
HTTP_SECONDS = Histogram(
    "duly_http_seconds",
    "From the first byte of a request to the last of its answer",
    ["method", "route"],
    buckets=(0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 15, 60),
)
HTTP_RETRIES = Counter("duly_http_retries_total", "Requests run again in a new transaction", ["reason"])
HTTP_REPLAYS = Counter("duly_http_replays_total", "Requests answered from their idempotency key", ["route"])
DUTY_UP = Gauge("duly_duty_up", "1 while a duty does its work, 0 while it waits for the database", ["duty"])


@dataclass(frozen=True)
class Origin:
    """Where the work in progress comes from; written with every event and job it causes."""

    correlation_id: UUID | None = None
    causation_id: UUID | None = None
    traceparent: str | None = None


_NOWHERE = Origin()
_origin: ContextVar[Origin] = ContextVar("duly_origin", default=_NOWHERE)


def current_origin() -> Origin:
    """The origin of whatever runs now, with the current span as its trace parent."""
    origin = _origin.get()
    if not tracing():
        return origin
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier)
    traceparent = carrier.get("traceparent", origin.traceparent)
    return Origin(origin.correlation_id, origin.causation_id, traceparent)


class originating:
    """Everything emitted or scheduled inside the block carries these ids."""

    __slots__ = ("_origin", "_token")

    def __init__(self, origin: Origin) -> None:
        self._origin = origin

    def __enter__(self) -> None:
        self._token = _origin.set(self._origin)

    def __exit__(self, *_: object) -> None:
        _origin.reset(self._token)


class JobMetrics:
    """The metrics of one job name, looked up once."""

    __slots__ = ("_finished", "lateness", "lost", "name", "rescued", "seconds")

    def __init__(self, name: str) -> None:
        self.name = name
        self.seconds = JOB_SECONDS.labels(name)
        self.lateness = JOB_LATENESS_SECONDS.labels(name)
        self.lost = LEASES_LOST.labels(name)
        self.rescued = JOBS_RESCUED.labels(name)
        self._finished: dict[str, Counter] = {}

    def finished(self, outcome: str, seconds: float) -> None:
        """Count one run."""
        counter = self._finished.get(outcome)
        if counter is None:
            counter = self._finished[outcome] = JOBS_FINISHED.labels(self.name, outcome)
        counter.inc()
        self.seconds.observe(seconds)


def tracing() -> bool:
    """Whether anybody records spans; without an SDK they are not even made."""
    return not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider | trace.NoOpTracerProvider)


@contextlib.contextmanager
def span(name: str, *, kind: SpanKind, parent: str | None, attributes: Mapping[str, str | int]) -> Iterator[trace.Span]:
    """A span that continues the trace of ``parent`` (a W3C traceparent), if there is one."""
    if not tracing():
        yield trace.INVALID_SPAN
        return
    context = _PROPAGATOR.extract({"traceparent": parent}) if parent else None
    with _tracer.start_as_current_span(name, context=context, kind=kind, attributes=dict(attributes)) as made:
        yield made


def configure_logging(*, level: str = "info", style: str = "auto") -> None:
    """JSON lines for machines, columns for a person at a terminal; the standard library's logs join in."""
    console = style == "console" or (style == "auto" and sys.stderr.isatty())
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
        structlog.processors.format_exc_info,
    ]
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer(colors=True) if console else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for noisy in ("sqlalchemy.engine", "alembic", "uvicorn.access", "asyncio", "httpx2", "httpcore2"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
