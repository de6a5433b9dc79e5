"""Start-up checks: what would lose data or not work is refused with one sentence that says what to do."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import asyncpg
import structlog

from duly.brokers.checking import BrokerCheck
from duly.db import Database
from duly.errors import Refused, Unavailable
from duly.ids import uuid7
from duly.runtime.migrate import HasMigrations, check_all, check_schema

log = structlog.get_logger("duly.preflight")
OLDEST_SERVER = 150_000
ECHO_SECONDS = 2.0
ECHO_CHANNEL = "duly_preflight"
SPARE_CONNECTIONS = 10  # duties, listener, notifier, health and the operator's psql, beside the pools

READ_SERVER = """
SELECT current_setting('server_version_num')::int AS version_num,
       current_setting('server_version') AS version,
       current_setting('fsync')::bool AS fsync,
       current_setting('full_page_writes')::bool AS full_page_writes,
       current_setting('transaction_read_only')::bool AS read_only,
       pg_is_in_recovery() AS in_recovery,
       current_setting('server_encoding') AS encoding,
       current_setting('synchronous_commit') AS synchronous_commit,
       current_setting('max_connections')::int AS max_connections
"""
READ_CLOCK = """
SELECT to_regclass('duly.business_clock') IS NOT NULL AS installed,
       duly.now() <> statement_timestamp() AS moved, duly.now()::text AS now
"""
READ_BACKEND = "SELECT pg_backend_pid()"
SEND_ECHO = "SELECT pg_notify($1, $2)"

POOLED = (
    "the database address leads through a connection pooler that lends its sessions out between statements, "
    "so wake-ups would be lost: point DATABASE_URL at PostgreSQL itself, or at a pool in session mode"
)


@dataclass(frozen=True)
class Server:
    """What a server says about itself."""

    version_num: int
    version: str
    fsync: bool
    full_page_writes: bool
    read_only: bool
    in_recovery: bool
    encoding: str
    synchronous_commit: str
    max_connections: int


@dataclass
class Findings:
    """Reasons not to start, and things an operator should know."""

    refusals: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    server: Server | None = None


async def check(db: Database, app: HasMigrations | None = None) -> list[str]:
    """Raise ``Refused`` with the first reason not to start; otherwise return the warnings."""
    found = await examine(db, app)
    if found.refusals:
        raise Refused(found.refusals[0])
    for warning in found.warnings:
        log.warning("preflight_warning", warning=warning)
    return found.warnings


async def check_broker(check: BrokerCheck) -> None:
    """Raise ``Refused`` when the broker would lose something; one that is away is asked again before it is used."""
    try:
        await check.require()
    except Unavailable as error:
        log.warning("broker_away", error=str(error)[:300])


async def examine(db: Database, app: HasMigrations | None = None) -> Findings:
    """Look at everything; a server that is refused is not looked at further."""
    found = Findings()
    try:
        async with _session(db) as connection, _session(db) as other:
            found.server = Server(**dict(await connection.fetchrow(READ_SERVER)))
            found.refusals += refusals(found.server, allow_unsafe=db.settings.allow_unsafe_database)
            found.warnings += warnings(found.server, sessions=_sessions(db))
            if not found.refusals and not await keeps_sessions(connection, other):
                found.refusals.append(POOLED)
    except Refused as error:
        found.refusals.append(str(error))
    if not found.refusals:
        await _examine_schema(db, app, found)
    return found


def refusals(server: Server, *, allow_unsafe: bool) -> list[str]:
    """Why duly does not work on such a server."""
    found = []
    if server.version_num < OLDEST_SERVER:
        found.append(f"PostgreSQL {server.version} is too old: duly needs 15 or later, upgrade the server")
    if server.in_recovery:
        found.append("this PostgreSQL is a standby, which cannot be written to: point DATABASE_URL at the primary")
    elif server.read_only:
        found.append(
            "transactions on this database are read-only: "
            "unset default_transaction_read_only for it, or point DATABASE_URL at one that can be written to"
        )
    if server.encoding != "UTF8":
        found.append(
            f"the database is encoded in {server.encoding}: "
            "create one with ENCODING 'UTF8' and point DATABASE_URL at it"
        )
    for name, on in (("fsync", server.fsync), ("full_page_writes", server.full_page_writes)):
        if not on and not allow_unsafe:
            found.append(
                f"{name} is off, so a crash of the server can lose or corrupt what was committed: "
                f"switch it on, or set DULY_ALLOW_UNSAFE_DATABASE=1 for a database that may be lost"
            )
    return found


def _sessions(db: Database) -> int:
    """How many sessions a process that does everything may have: for requests, for jobs, for webhooks, and the rest."""
    return db.pool_size + db.settings.concurrency + db.settings.webhook_sessions + SPARE_CONNECTIONS


def warnings(server: Server, *, sessions: int) -> list[str]:
    """What an operator should know about such a server."""
    found = []
    for name, on in (("fsync", server.fsync), ("full_page_writes", server.full_page_writes)):
        if not on:
            found.append(f"{name} is off: a crash of the server can lose or corrupt what was committed")
    if server.synchronous_commit == "off":
        found.append("synchronous_commit is off: a crash of the server can lose the last commits that were answered")
    if server.max_connections < sessions:
        found.append(
            f"max_connections is {server.max_connections}, and one process of duly may use "
            f"{sessions}: raise it, or lower DULY_POOL_SIZE and DULY_CONCURRENCY"
        )
    return found


async def keeps_sessions(listener: Any, other: Any, *, echo_seconds: float = ECHO_SECONDS) -> bool:
    """Whether ``listener`` stays one session while ``other`` works, and hears what ``other`` notifies.

    A pooler in transaction mode lends the session that was just given back to ``other``'s transaction, and so
    has to find another one for ``listener``.
    """
    token = uuid7().hex
    heard = asyncio.Event()

    def receive(_connection: Any, _pid: int, _channel: str, payload: str) -> None:
        if payload == token:
            heard.set()

    try:
        await listener.add_listener(ECHO_CHANNEL, receive)
        before = await listener.fetchval(READ_BACKEND)
        async with other.transaction():
            await other.fetchval(READ_BACKEND)
            if await listener.fetchval(READ_BACKEND) != before:
                return False
            await other.fetchval(SEND_ECHO, ECHO_CHANNEL, token)
        async with asyncio.timeout(echo_seconds):
            await heard.wait()
    except (TimeoutError, asyncpg.InvalidSQLStatementNameError, asyncpg.DuplicatePreparedStatementError):
        return False
    return True


async def _examine_schema(db: Database, app: HasMigrations | None, found: Findings) -> None:
    try:
        await (asyncio.to_thread(check_all, db.dsn, app) if app else asyncio.to_thread(check_schema, db.dsn))
    except Refused as error:
        found.refusals.append(str(error))
        return
    async with _session(db) as connection:
        clock = await connection.fetchrow(READ_CLOCK)
    if clock["moved"]:
        found.warnings.append(
            f"the business clock was moved, it shows {clock['now']}: `duly clock resume` puts it right"
        )
    elif clock["installed"] and db.settings.env == "production":
        found.warnings.append("a business clock is installed: this database was a sandbox, and its time can be moved")


@contextlib.asynccontextmanager
async def _session(db: Database) -> AsyncIterator[Any]:
    try:
        connection = await db.connect(application="duly-preflight")
    except asyncpg.ProtocolViolationError as error:  # what PgBouncer says to settings it does not know
        raise Refused(
            f"a connection pooler stands in front of PostgreSQL and refuses duly's settings ({error}): "
            "point DATABASE_URL at PostgreSQL itself"
        ) from error
    except (asyncpg.InvalidSQLStatementNameError, asyncpg.DuplicatePreparedStatementError) as error:
        raise Refused(POOLED) from error
    try:
        yield connection
    finally:
        with contextlib.suppress(Exception):
            await connection.close(timeout=2)
