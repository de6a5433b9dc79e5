"""The registry that an application makes: its jobs, its consumers, the schedules it starts out with."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar
from uuid import UUID

from fastapi import APIRouter

from duly.brokers.connect import broker_names
from duly.db import Database, Statement, Tx, fetch
from duly.errors import Invalid
from duly.inbox.receive import JOB_PREFIX, Consumer, check_consumer
from duly.inbox.store import RECEIVE_PREFIX, create_receive_handler
from duly.jobs.handlers import DEFAULT_MAX_RETRIES, Handler, JobContext, TxKind, read_signature
from duly.jobs.outcomes import Done
from duly.jobs.schedule import backoff_seconds
from duly.messages import Event, check_name
from duly.operate import maintenance
from duly.operate.actions import Action
from duly.schedules.cron import Cron
from duly.schedules.edit import seed_schedule
from duly.settings import Settings
from duly.webhooks import clean as clean_webhooks
from duly.webhooks.admit import RESUME_JOB as RESUME_WEBHOOKS
from duly.webhooks.admit import create_consumer as create_webhook_consumer
from duly.webhooks.admit import share_of
from duly.webhooks.deliver import Deliverer

F = TypeVar("F", bound=Callable[..., Any])
CONSUMER_RETRIES = 5
ADVISORY_KEY = 0x64756C7A

REGISTER_CONSUMERS = Statement("""
INSERT INTO duly.consumers (name, patterns, ordered, registered_at)
SELECT c.name, string_to_array(c.patterns, ' '), c.ordered, duly.now()
FROM unnest(CAST(:names AS text[]), CAST(:patterns AS text[]), CAST(:ordered AS boolean[]))
     AS c(name, patterns, ordered)
ON CONFLICT (name) DO UPDATE SET patterns = excluded.patterns, ordered = excluded.ordered
WHERE (duly.consumers.patterns, duly.consumers.ordered) IS DISTINCT FROM (excluded.patterns, excluded.ordered)
""")
LOCK_REGISTRATION = Statement("SELECT pg_advisory_xact_lock(CAST(:key AS bigint))")


@dataclass(frozen=True)
class Seed:
    """A schedule that is inserted when it is absent; afterwards the database decides."""

    name: str
    cron: Cron
    max_retries: int
    misfire: str
    payload: Mapping[str, Any]


@dataclass(frozen=True)
class Migrations:
    """An application's own schema: Alembic scripts, and the table in schema ``duly`` that says how far they ran."""

    directory: Path
    table: str


@dataclass(frozen=True)
class Section:
    """Pages of an application in the console: where they hang, what the navigation says, and their routes.

    The router is a ``duly.console.Pages``: its routes are closed to strangers, and what it POSTs is for administrators.
    ``roles`` are the application's own: whoever has one of them sees this section, if nothing else, and acts in it;
    to administer the engine is then not enough to act. One that ``is_closed`` is not shown to anybody else.
    ``actions`` have a form here and nothing more: the application's API has routes of its own for them.
    """

    name: str
    title: str
    router: APIRouter
    group: str = "Applications"
    templates: Path | None = None
    roles: tuple[str, ...] = ()
    is_closed: bool = False
    actions: tuple[Action, ...] = ()

    def __post_init__(self) -> None:
        """The name is part of an address."""
        if not re.fullmatch(r"[a-z][a-z0-9-]{0,39}", self.name) or not self.title.strip():
            raise Invalid(f"{self.name!r} cannot name a section of the console: lower-case letters, digits and dashes")
        if self.is_closed and not self.roles:
            raise Invalid(f"the section {self.name!r} is closed to everybody: say which roles it is for")


@dataclass
class Duly:
    """What an application registers. Handlers know their name and what to do, and nothing of schedules."""

    handlers: dict[str, Handler] = field(default_factory=dict)
    seeds: list[Seed] = field(default_factory=list)
    routers: list[APIRouter] = field(default_factory=list)
    development_routers: list[APIRouter] = field(default_factory=list)
    sections: list[Section] = field(default_factory=list)
    migrations: list[Migrations] = field(default_factory=list)
    checks: list[Callable[[Settings], None]] = field(default_factory=list)
    samples: Callable[[Tx], Awaitable[None]] | None = None
    """Writes sample data, if there is none; ``duly up`` calls it on an embedded server."""

    def __post_init__(self) -> None:
        """The engine's own clean-up jobs, its webhooks and its brokers come with every application."""
        register_maintenance(self)
        register_webhooks(self)
        for name in broker_names():
            self._add(create_receive_handler(name))

    @property
    def consumers(self) -> list[Consumer]:
        """The consumers among the handlers."""
        return [handler for handler in self.handlers.values() if isinstance(handler, Consumer)]

    def job(
        self,
        name: str,
        *,
        max_retries: int = DEFAULT_MAX_RETRIES,
        backoff: Sequence[float | timedelta] | None = None,
        timeout: float | timedelta | None = None,
        limit: int | None = None,
        group: int = 1,
    ) -> Callable[[F], F]:
        """Register a job. ``limit`` is how many of this name may run at once, in all processes together.

        ``group`` lets as many jobs share one transaction, called one after the other: ten times the throughput, and
        the same promises. When one fails, nothing of the group is kept; that one is retried later, the others run
        again at once without it.

        The function may be ``async def`` or ``def``. It may take a JobContext, and a transaction (``tx: Tx``): its
        writes and the job's completion are then one commit. Without one, do calls to the outside.
        """
        check_name("job name", name)
        if name.startswith((JOB_PREFIX, RECEIVE_PREFIX)) or len(name) > 100:
            raise Invalid(
                f"{name!r} cannot name a job: at most 100 characters, and not starting with {JOB_PREFIX!r} or "
                f"{RECEIVE_PREFIX!r}"
            )
        if not 1 <= group <= 1_000:
            raise Invalid(f"job {name!r}: group={group}, give 1 to 1000")
        if limit is not None and not 1 <= limit <= 10_000:
            raise Invalid(f"job {name!r}: limit={limit}, give 1 to 10000")

        def register(function: F) -> F:
            asked = read_signature(function, argument_types=[JobContext], what=f"job {name!r}")
            handler = Handler(
                name, function, asked.tx_kind, asked.is_async, asked.takes_argument, max_retries,
                backoff_seconds(backoff), _seconds(timeout), limit, tx_position=asked.tx_position, group=group,
            )  # fmt: skip
            if group > 1 and (not handler.is_in_tx or asked.tx_kind is TxKind.SYNC):
                raise Invalid(f"job {name!r}: a group is one transaction: `async def` with a parameter tx: Tx")
            self._add(handler)
            return function

        return register

    def consumer(
        self,
        name: str,
        *,
        on: str | Sequence[str],
        ordered: bool = False,
        batch: int = 1,
        max_retries: int = CONSUMER_RETRIES,
        backoff: Sequence[float | timedelta] | None = None,
        timeout: float | timedelta | None = None,
    ) -> Callable[[F], F]:
        """Register a consumer of the events whose type or topic matches ``on``.

        ``ordered`` keeps the order within each aggregate: a later event waits for an earlier one, through retries and
        until a dead letter is retried or discarded. ``batch`` gives the function a list of events in one transaction.
        """
        patterns = [on] if isinstance(on, str) else list(on)
        check_consumer(name, patterns)
        if not 1 <= batch <= 10_000:
            raise Invalid(f"consumer {name!r}: batch={batch}, give 1 to 10000")

        def register(function: F) -> F:
            wanted = [list[Event], Sequence[Event]] if batch > 1 else [Event]
            asked = read_signature(function, argument_types=wanted, what=f"consumer {name!r}")
            if batch > 1 and asked.tx_kind in (TxKind.NONE, TxKind.OWN):
                raise Invalid(f"consumer {name!r}: a batch is one transaction, so the function must take one (tx: Tx)")
            handler = Consumer(
                JOB_PREFIX + name, function, asked.tx_kind, asked.is_async, asked.takes_argument, max_retries,
                backoff_seconds(backoff), _seconds(timeout), None, batch, asked.tx_position,
                consumer=name, patterns=patterns, ordered=ordered,
            )  # fmt: skip
            self._add(handler)
            return function

        return register

    def cron(
        self,
        name: str,
        expression: str,
        *,
        timezone: str = "UTC",
        max_retries: int = DEFAULT_MAX_RETRIES,
        misfire: str = "run_once",
        payload: Mapping[str, Any] | None = None,
    ) -> None:
        """Seed a schedule for the job ``name``: inserted if absent; afterwards it is edited in the database."""
        self.seeds.append(Seed(name, Cron(expression, timezone), max_retries, misfire, payload or {}))

    def include_router(self, router: APIRouter, *, development_only: bool = False) -> None:
        """Serve these routes in ``duly api`` and ``duly up``; a sandbox's own in development only."""
        (self.development_routers if development_only else self.routers).append(router)

    def check_settings(self, check: Callable[[Settings], None]) -> None:
        """Call this before the API is served: it raises Refused when something is set that cannot be meant."""
        self.checks.append(check)

    def include_console(self, section: Section) -> None:
        """Show these pages in the console, with an entry in its navigation."""
        if any(known.name == section.name for known in self.sections):
            raise Invalid(f"the console has a section {section.name!r} already")
        self.sections.append(section)

    def include_migrations(self, directory: Path, *, name: str) -> None:
        """Run these Alembic scripts after the engine's, in ``duly up``, ``duly migrate`` and test databases."""
        if not (directory / "env.py").is_file() or not name.isidentifier() or len(name) > 40:
            raise Invalid(f"{directory} must hold Alembic's env.py, and {name!r} must be a short identifier")
        self.migrations.append(Migrations(directory, f"schema_version_{name}"))

    async def prepare(self, db: Database) -> None:
        """Write down the consumers and seed the schedules; many processes may do so at once."""
        async with db.transaction() as tx:
            await fetch(tx, LOCK_REGISTRATION, key=ADVISORY_KEY)
            declared = [consumer for consumer in self.consumers if not consumer.keeps_patterns]
            await fetch(
                tx, REGISTER_CONSUMERS,
                names=[consumer.consumer for consumer in declared],
                patterns=[" ".join(consumer.patterns) for consumer in declared],
                ordered=[consumer.ordered for consumer in declared],
            )  # fmt: skip
            for seed in self.seeds:
                await seed_schedule(
                    tx, name=seed.name, cron=seed.cron.expression, timezone=seed.cron.timezone,
                    max_retries=seed.max_retries, misfire=seed.misfire, payload=seed.payload, actor="seed",
                )  # fmt: skip

    def _add(self, handler: Handler) -> None:
        if handler.name in self.handlers:
            raise Invalid(f"{handler.name!r} is registered twice: a name has one handler")
        self.handlers[handler.name] = handler


def register_maintenance(app: Duly) -> None:
    """The engine's own schedules (seeded by its migration) need handlers like any other."""
    settings = Settings()

    @app.job("duly.create-partitions")
    async def create_partitions(tx: Tx) -> Done:
        return Done(await maintenance.create_partitions(tx))

    @app.job("duly.drop-history")
    async def drop_history(tx: Tx) -> Done:
        return Done(
            await maintenance.drop_history(
                tx, events_days=settings.keep_events_days, executions_days=settings.keep_executions_days
            )
        )

    @app.job("duly.forget-processed-events")
    async def forget_processed_events(tx: Tx) -> Done:
        return Done(await maintenance.forget_processed_events(tx, days=settings.keep_processed_days))

    @app.job("duly.forget-received")
    async def forget_received(tx: Tx) -> Done:
        days = max(settings.keep_events_days, settings.keep_processed_days)
        return Done(await maintenance.forget_received(tx, days=days))

    @app.job("duly.forget-idempotency-keys")
    async def forget_idempotency_keys(tx: Tx) -> Done:
        return Done(await maintenance.forget_idempotency_keys(tx))

    @app.job("duly.forget-console-sessions")
    async def forget_console_sessions(tx: Tx) -> Done:
        return Done(await maintenance.forget_console_sessions(tx))

    @app.job("duly.forget-dead-letters")
    async def forget_dead_letters(tx: Tx) -> Done:
        return Done(await maintenance.forget_dead_letters(tx, days=settings.keep_dead_letters_days))

    @app.job("duly.forget-audit")
    async def forget_audit(tx: Tx) -> Done:
        return Done(await maintenance.forget_audit(tx, days=settings.keep_audit_days))


def register_webhooks(app: Duly) -> None:
    """The consumer that fans events out, the delivery job, and what keeps both tidy."""
    settings = Settings()
    deliverer = Deliverer(settings)
    app._add(create_webhook_consumer(settings.webhook_concurrency))
    app._add(deliverer.create_handler())

    @app.job(RESUME_WEBHOOKS)
    async def resume_webhooks(ctx: JobContext, tx: Tx) -> Done:
        return Done(f"admitted {await deliverer.resume(tx, UUID(ctx.entity_id or ''))}")

    @app.job(clean_webhooks.SWEEP_JOB)
    async def sweep_webhooks(ctx: JobContext, tx: Tx) -> Done:
        after = clean_webhooks.Place.read(ctx.payload)
        return Done(await clean_webhooks.sweep(tx, most=share_of(settings.webhook_concurrency), after=after))

    @app.job("duly.forget-webhooks")
    async def forget_webhooks(tx: Tx) -> Done:
        return Done(await clean_webhooks.forget(tx, days=settings.keep_webhooks_days))


def _seconds(timeout: float | timedelta | None) -> float | None:
    return timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
