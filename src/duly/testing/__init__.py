"""For tests, yours and ours: a fresh database from a template, a clock that moves, and facts to assert.

With pytest, ``pytest_plugins = ["duly.testing.plugin"]`` gives the fixtures ``duly_dsn``, ``duly_db``, ``duly_clock``.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, LiteralString

import psycopg
from psycopg import sql

from duly.app import Duly
from duly.db import Database, Statement, fetch, load_json
from duly.jobs.handlers import Handler
from duly.jobs.worker import Worker
from duly.messages import EventBody
from duly.outbox.relay import Relay
from duly.runtime.embedded import EmbeddedPostgres
from duly.runtime.migrate import migrate, migrate_all

TEMPLATE = "duly_template"
MAX_DRAIN_ROUNDS = 1_000
MEMORY = Path("/dev/shm")  # noqa: S108 - the directory in it is made by tempfile, for us alone
MEMORY_BYTES = 4 * 2**30


def find_place() -> str | None:
    """Where a test server's files go: into memory, if Linux offers it and there is room; None for the usual place.

    A test run makes and drops thousands of databases of some hundred files each. On a disk's file system that was a
    third of all its time.
    """
    try:
        has_room = os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free >= MEMORY_BYTES
    except OSError:
        return None
    return str(MEMORY) if has_room else None


class TestServer:
    """An embedded PostgreSQL with a migrated template; each test gets a copy of its own in some 30 ms."""

    __test__ = False

    def __init__(self, directory: Path, *, durable: bool = False, is_running: bool = False) -> None:
        """Not durable by default: a test database need not survive a power cut, and fsync costs most of the time.

        ``is_running``: somebody started it before; the templates that are there are as good as new ones.
        """
        parameters = () if durable else ("fsync=off", "full_page_writes=off")
        self.postgres = EmbeddedPostgres.at(directory, parameters=parameters)
        self._templates: set[str] = set()
        self._is_running = is_running
        self._strategy: LiteralString = "WAL_LOG" if durable else "FILE_COPY"  # five times as fast, without fsync

    def start(self) -> None:
        """Start it and prepare the template."""
        self.postgres.start()
        with self._admin() as admin:
            admin.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(TEMPLATE)))
            admin.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(TEMPLATE)))
        migrate(self.postgres.dsn(TEMPLATE))
        with psycopg.connect(self.postgres.dsn(TEMPLATE), autocommit=True) as connection:
            install_business_clock(connection)
            connection.execute("VACUUM duly.jobs, duly.outbox, duly.dead_letters")
        self._templates = set()

    def stop(self) -> None:
        """Stop it."""
        self.postgres.stop(mode="immediate")

    @contextmanager
    def database(self, app: Duly | None = None) -> Iterator[str]:
        """The address of a fresh database, dropped afterwards; with the application's own schema, if it has one."""
        name = f"t_{uuid.uuid4().hex[:16]}"
        self._copy(self._template_of(app), name)
        try:
            yield self.postgres.dsn(name)
        finally:
            with self._admin() as admin:
                admin.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))

    def _template_of(self, app: Duly | None) -> str:
        if app is None or not app.migrations:
            return TEMPLATE
        digest = hashlib.sha256(repr(app.migrations).encode()).hexdigest()
        name = f"{TEMPLATE}_{digest[:16]}"
        if name not in self._templates:
            self._prepare_template(name, app)
            self._templates.add(name)
        return name

    def _prepare_template(self, name: str, app: Duly) -> None:
        with self._admin() as admin:
            if self._is_running and admin.execute("SELECT 1 FROM pg_database WHERE datname = %s", [name]).fetchone():
                return
            admin.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))
        self._copy(TEMPLATE, name)
        migrate_all(self.postgres.dsn(name), app)

    def _copy(self, template: str, name: str) -> None:
        with self._admin() as admin:
            admin.execute(
                sql.SQL("CREATE DATABASE {} TEMPLATE {} STRATEGY {}").format(
                    sql.Identifier(name), sql.Identifier(template), sql.SQL(self._strategy)
                )
            )

    def _admin(self) -> psycopg.Connection[Any]:
        return psycopg.connect(self.postgres.dsn("postgres"), autocommit=True)


_BUSINESS_CLOCK = """
CREATE TABLE IF NOT EXISTS duly.business_clock (
    only_row  boolean PRIMARY KEY DEFAULT true CHECK (only_row),
    frozen_at timestamptz,
    shift     interval NOT NULL DEFAULT '0'
);
INSERT INTO duly.business_clock DEFAULT VALUES ON CONFLICT DO NOTHING;
CREATE OR REPLACE FUNCTION duly.now() RETURNS timestamptz LANGUAGE sql STABLE PARALLEL SAFE
AS $$ SELECT coalesce(frozen_at, statement_timestamp() + shift) FROM duly.business_clock $$;
"""


def install_business_clock(connection: psycopg.Connection[Any]) -> None:
    """Replace ``duly.now()`` by one that a sandbox can move. Never do this to a production database."""
    connection.execute(_BUSINESS_CLOCK)


class BusinessClock:
    """Moves the database's clock; every process that works on the database sees it move."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn

    def now(self) -> datetime:
        """What time the database thinks it is."""
        with psycopg.connect(self._dsn, autocommit=True) as connection:
            row = connection.execute("SELECT duly.now()").fetchone()
        assert row is not None
        moment: datetime = row[0]
        return moment

    def freeze(self, at: datetime) -> None:
        """Stop the clock at an instant."""
        self._set("UPDATE duly.business_clock SET frozen_at = %s", at)

    def advance(self, **delta: float) -> None:
        """Move it forward: ``clock.advance(minutes=15)``. A frozen clock stays frozen, later."""
        self._set(
            "UPDATE duly.business_clock SET frozen_at = frozen_at + %(by)s, shift = shift + %(by)s",
            {"by": timedelta(**delta)},
        )

    def resume(self) -> None:
        """Let it run again, at the real time."""
        self._set("UPDATE duly.business_clock SET frozen_at = NULL, shift = '0'")

    def _set(self, statement: str, value: Any = None) -> None:
        with psycopg.connect(self._dsn, autocommit=True) as connection:
            connection.execute(statement, value if isinstance(value, dict | None) else (value,))


async def drain(db: Database, handlers: Mapping[str, Handler]) -> int:
    """Relay and run whatever is due now, and what follows from it, until nothing is; how many jobs ran.

    Time does not move by itself: what waits for a later time waits still. Move the clock, and drain again.
    """
    ran = 0
    for _ in range(MAX_DRAIN_ROUNDS):
        relayed = await Relay(db).run_once()
        worked = await Worker(db, handlers).run_once()
        ran += worked.done
        if not relayed.done and not worked.done:
            return ran
    raise AssertionError(f"still not drained after {MAX_DRAIN_ROUNDS} rounds: does a job schedule itself for now?")


_FIND_EVENTS = Statement("""
SELECT payload FROM duly.event_log
WHERE type = CAST(:type AS text) AND topic = CAST(:topic AS text) ORDER BY seq DESC LIMIT 1000
""")
_FIND_JOBS = Statement("""
SELECT name, entity_id, run_at FROM duly.jobs
WHERE name = CAST(:name AS text) AND (CAST(:entity_id AS text) IS NULL OR entity_id = CAST(:entity_id AS text))
ORDER BY id LIMIT 1000
""")


async def assert_emitted(tx: Any, kind: type[EventBody], **expected: Any) -> EventBody:
    """The newest event of this kind whose fields are as expected; AssertionError lists what was emitted instead."""
    rows = await fetch(tx, _FIND_EVENTS, type=kind.event_type, topic=kind.event_topic)
    bodies = [kind.model_validate(load_json(row[0]) if isinstance(row[0], str) else row[0]) for row in rows]
    for body in bodies:
        if all(getattr(body, name) == wanted for name, wanted in expected.items()):
            return body
    raise AssertionError(f"no {kind.__name__} with {expected} was emitted, but these: {bodies[:10]}")


async def assert_scheduled(tx: Any, name: str, entity_id: Any = None, *, run_at: datetime | None = None) -> datetime:
    """That the job waits, for this entity and time if given; the time it waits for."""
    rows = await fetch(tx, _FIND_JOBS, name=name, entity_id=None if entity_id is None else str(entity_id))
    for _, _, at in rows:
        if run_at is None or at == run_at:
            found: datetime = at
            return found
    raise AssertionError(
        f"{name} for {entity_id} at {run_at} is not scheduled; these are: {[tuple(r) for r in rows[:10]]}"
    )
