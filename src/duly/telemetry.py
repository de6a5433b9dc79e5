"""Logs, metrics and traces: one vocabulary for every duty."""

from __future__ import annotations

import contextlib
import logging
import sys
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar, Protocol, cast
from uuid import UUID

import structlog
from opentelemetry import trace
from opentelemetry.trace import SpanKind
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from prometheus_client import REGISTRY, Counter, Gauge, Histogram, Metric
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

_PROPAGATOR = TraceContextTextMapPropagator()
_tracer = trace.get_tracer("duly")
_SILENT_PROVIDERS = (trace.ProxyTracerProvider, trace.NoOpTracerProvider)

EVENTS_PUBLISHED = Counter("duly_events_published_total", "Events published", ["topic"])
PUBLISH_FAILURES = Counter("duly_publish_failures_total", "Failed attempts to publish an event", ["topic"])
EVENTS_POSTPONED = Counter(
    "duly_events_postponed_total", "Events put off because their topic could not be had", ["topic"]
)
MESSAGES_RECEIVED = Counter("duly_messages_received_total", "Messages of a broker that were stored", ["via"])
MESSAGES_KNOWN = Counter("duly_messages_known_total", "Messages of a broker that had come before", ["via"])
MESSAGES_UNREADABLE = Counter("duly_messages_unreadable_total", "Messages of a broker that were buried", ["via"])
SOURCE_LAG = Gauge("duly_source_lag", "Messages that wait at the broker to be read", ["via"])
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
WEBHOOK_ATTEMPTS = Counter("duly_webhook_attempts_total", "Webhooks sent, by how that went", ["outcome"])
WEBHOOK_SECONDS = Histogram(
    "duly_webhook_seconds",
    "How long a receiver took to answer",
    buckets=(0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 15, 30),
)
WEBHOOKS_REFUSED = Counter("duly_webhooks_refused_total", "Webhooks that came with no valid signature", ["provider"])
MESSAGES_MISSING = Counter(
    "duly_messages_missing_total", "Messages that a broker dropped before they were read", ["via"]
)
PROVIDER_UP = Gauge("duly_identity_provider_up", "1 if it gave its keys when last asked, 0 if not", ["issuer"])
DUTY_UP = Gauge("duly_duty_up", "1 while a duty does its work, 0 while it waits for the database", ["duty"])


@dataclass(frozen=True)
class Origin:
    """Where the work in progress comes from; written with every event and job it causes."""

    correlation_id: UUID | None = None
    causation_id: UUID | None = None
    traceparent: str | None = None


class HasOrigin(Protocol):
    """Something that knows its origin when it is asked: most work causes nothing, and is never asked."""

    @property
    def origin(self) -> Origin:
        """Where it comes from."""


_NOWHERE = Origin()
_origin: ContextVar[Origin | HasOrigin] = ContextVar("duly_origin", default=_NOWHERE)


def current_origin() -> Origin:
    """The origin of whatever runs now, with the current span as its trace parent."""
    found = _origin.get()
    origin = found if isinstance(found, Origin) else found.origin
    if not tracing():
        return origin
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier)
    traceparent = carrier.get("traceparent", origin.traceparent)
    return Origin(origin.correlation_id, origin.causation_id, traceparent)


class originating:
    """Everything emitted or scheduled inside the block carries these ids."""

    __slots__ = ("_origin", "_token")

    def __init__(self, origin: Origin | HasOrigin) -> None:
        self._origin = origin

    def __enter__(self) -> None:
        self._token = _origin.set(self._origin)

    def __exit__(self, *_: object) -> None:
        _origin.reset(self._token)


class Buckets:
    """A histogram without locks: only the event loop writes, and a reader may be one value behind."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def cumulative(self) -> list[tuple[str, float]]:
        """How many were at most each bound, as Prometheus wants it."""
        labels = [*(str(float(bound)) for bound in self.bounds), "+Inf"]
        return list(zip(labels, accumulate(self.counts), strict=True))


class JobMetrics:
    """The metrics of one job name, written for every run: plain numbers, which a scrape turns into metrics."""

    __slots__ = ("finished", "lateness", "lost", "rescued", "seconds")
    _by_name: ClassVar[dict[str, JobMetrics]] = {}

    def __init__(self) -> None:
        self.finished: dict[str, int] = {}
        self.seconds = Buckets((0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 15, 60, 300, 1800))
        self.lateness = Buckets((0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 15, 60, 300, 3600))
        self.lost = 0
        self.rescued = 0

    @classmethod
    def of(cls, name: str) -> JobMetrics:
        """The one of this process for a name."""
        return cls._by_name.setdefault(name, cls())

    def ended(self, outcome: str, seconds: float) -> None:
        """Count one run."""
        self.finished[outcome] = self.finished.get(outcome, 0) + 1
        self.seconds.observe(seconds)

    @classmethod
    def collect(cls) -> Iterator[Metric]:
        """What a scrape reads."""
        finished = CounterMetricFamily("duly_jobs_finished", "Runs by how they ended", labels=["name", "outcome"])
        seconds = HistogramMetricFamily("duly_job_seconds", "How long a handler ran", labels=["name"])
        lateness = HistogramMetricFamily(
            "duly_job_lateness_seconds", "From the moment a job was due to the moment it was claimed", labels=["name"]
        )
        lost = CounterMetricFamily(
            "duly_leases_lost", "Settlements refused because another worker held the job", labels=["name"]
        )
        rescued = CounterMetricFamily(
            "duly_jobs_rescued", "Jobs taken over from a worker that died or stalled", labels=["name"]
        )
        for name, one in sorted(cls._by_name.items()):
            for outcome, count in one.finished.items():
                finished.add_metric([name, outcome], count)
            seconds.add_metric([name], one.seconds.cumulative(), one.seconds.total)
            lateness.add_metric([name], one.lateness.cumulative(), one.lateness.total)
            lost.add_metric([name], one.lost)
            rescued.add_metric([name], one.rescued)
        yield from (finished, seconds, lateness, lost, rescued)

    describe = collect  # nothing is counted yet when it is registered


REGISTRY.register(cast(Collector, JobMetrics))


def tracing() -> bool:
    """Whether anybody records spans; without an SDK they are not even made."""
    return type(trace.get_tracer_provider()) not in _SILENT_PROVIDERS


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
        # What nobody will read is dropped first, before it has cost anything.
        processors=[structlog.stdlib.filter_by_level, *shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
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
