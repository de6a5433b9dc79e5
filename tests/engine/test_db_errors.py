"""Which errors say that our own database went away; each is made by the driver or the server that it stands for."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import asyncpg
import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from duly.db import Database, is_database_gone, is_disconnect, is_passing
from duly.errors import Unavailable
from duly.settings import Settings
from tests.engine.jobs.witness import terminate_backends
from tests.support import rows

FAIL_WITH = """
CREATE FUNCTION fail_with(state text) RETURNS void LANGUAGE plpgsql
AS $$ BEGIN RAISE EXCEPTION 'as told' USING ERRCODE = state; END $$
"""
GONE = ["08000", "08001", "08003", "08004", "08006", "08P01", "57P01", "57P02", "57P03", "53300"]
NOT_GONE = [
    "53000", "53100", "53200", "53400",  # too little of something for what was asked
    "57000", "57014", "57P04", "57P05",  # cancelled, dropped, idle for too long
    "25P03", "58030", "XX000", "40001", "40P01", "23505", "42601",
]  # fmt: skip

Query = Callable[[str], Awaitable[Any]]
Body = Callable[[Query], Awaitable[None]]


async def through_asyncpg(db: Database, body: Body) -> None:
    connection = await db.connect()
    try:
        await body(connection.fetchval)
    finally:
        connection.terminate()


async def through_session(db: Database, body: Body) -> None:
    async with db.transaction() as tx:

        async def query(statement: str) -> Any:
            return (await tx.execute(text(statement))).scalar()

        await body(query)


async def through_psycopg(db: Database, body: Body) -> None:
    with psycopg.connect(db.dsn, autocommit=True) as connection:

        async def query(statement: str) -> Any:
            return (connection.execute(statement.encode()).fetchone() or [None])[0]

        await body(query)


async def through_sync_session(db: Database, body: Body) -> None:
    with db.transaction_sync() as session:

        async def query(statement: str) -> Any:
            return session.execute(text(statement)).scalar()

        await body(query)


Door = Callable[[Database, Body], Awaitable[None]]
DOORS: list[Door] = [through_asyncpg, through_session, through_psycopg, through_sync_session]
any_door = pytest.mark.parametrize("door", DOORS, ids=lambda door: door.__name__)


async def error_of(work: Awaitable[Any]) -> Exception:
    """The error that this must end with."""
    with pytest.raises(Exception) as raised:  # noqa: PT011 - whichever it is, it is looked at
        await work
    assert isinstance(raised.value, Exception)
    return raised.value


@any_door
async def test_the_state_that_the_server_names_decides(db: Database, dsn: str, door: Door) -> None:
    """E3.15: however the driver and SQLAlchemy wrap it; of class 53 only a server without a free connection is away."""
    rows(dsn, FAIL_WITH)
    found = {}
    for state in GONE + NOT_GONE:

        async def fail(query: Query, state: str = state) -> None:
            await query(f"SELECT fail_with('{state}')")

        found[state] = is_database_gone(await error_of(door(db, fail)))
    assert found == dict.fromkeys(GONE, True) | dict.fromkeys(NOT_GONE, False)


@any_door
async def test_a_backend_that_was_terminated_is_an_outage(db: Database, dsn: str, door: Door) -> None:
    """E3.15: the next statement on it says so."""

    async def use_it_dead(query: Query) -> None:
        assert terminate_backends(dsn, f"pid = {await query('SELECT pg_backend_pid()')}")
        await query("SELECT 1")

    assert is_database_gone(await error_of(door(db, use_it_dead)))


@pytest.mark.parametrize("door", [through_asyncpg, through_psycopg], ids=lambda door: door.__name__)
async def test_so_is_every_statement_after_that(db: Database, dsn: str, door: Door) -> None:
    """E3.15: the driver has noticed, and refuses by itself."""

    async def use_it_twice(query: Query) -> None:
        terminate_backends(dsn, f"pid = {await query('SELECT pg_backend_pid()')}")
        with contextlib.suppress(asyncpg.PostgresError, psycopg.Error):
            await query("SELECT 1")
        await query("SELECT 2")

    error = await error_of(door(db, use_it_twice))
    assert "connection is closed" in str(error)
    assert is_database_gone(error)


@any_door
async def test_a_statement_that_took_too_long_is_no_outage(db: Database, door: Door) -> None:
    """E3.6: it was the statement that was cancelled; the connection is as good as before."""

    async def dawdle(query: Query) -> None:
        await query("SELECT set_config('statement_timeout', '10ms', false)")
        await query("SELECT pg_sleep(10)")

    error = await error_of(door(db, dawdle))
    assert not is_database_gone(error)
    assert not is_disconnect(error)


@any_door
async def test_a_server_that_does_not_answer_is_an_outage(door: Door) -> None:
    """E3.15."""

    async def nothing(query: Query) -> None:
        await query("SELECT 1")

    assert is_database_gone(await error_of(door(Database("postgresql://nobody@127.0.0.1:1/nothing"), nothing)))


@pytest.fixture
def crowded(dsn: str) -> Iterator[str]:
    """An address at which the server has no connection left for us."""
    name = f"crowded_{uuid.uuid4().hex[:12]}"
    rows(dsn, f"CREATE ROLE {name} LOGIN CONNECTION LIMIT 0")
    yield dsn.replace("postgres@", f"{name}@", 1)
    rows(dsn, f"DROP ROLE {name}")


@any_door
async def test_a_server_with_too_many_connections_is_an_outage(crowded: str, door: Door) -> None:
    """E3.15: the transaction never began; it is not for what the handler did."""

    async def nothing(query: Query) -> None:
        await query("SELECT 1")

    error = await error_of(door(Database(crowded), nothing))
    assert isinstance(error, Unavailable) or "too many connections" in str(error)
    assert is_database_gone(error)


async def test_misuse_of_an_open_connection_is_no_outage(db: Database) -> None:
    """E3.6: asyncpg has one class for both."""

    async def two_at_once(query: Query) -> None:
        await asyncio.gather(query("SELECT pg_sleep(0.1)"), query("SELECT 1"))

    error = await error_of(through_asyncpg(db, two_at_once))
    assert isinstance(error, asyncpg.InterfaceError)
    assert not is_database_gone(error)


@pytest.mark.parametrize(
    "error",
    [
        ConnectionResetError("a partner's server"),
        ConnectionRefusedError("a partner's server"),
        TimeoutError("a partner's server"),
        OSError("a full disk"),
        asyncpg.InterfaceError("bare"),
        ValueError("closed"),
    ],
    ids=repr,
)
def test_what_somebody_else_does_is_no_outage(error: Exception) -> None:
    """E3.6: a handler talks to others too; that one of them hung up is its failure."""
    assert not is_database_gone(error)


async def test_an_outage_is_seen_through_what_a_handler_raises_because_of_it(db: Database, dsn: str) -> None:
    """E3.15: wrapped with ``from``, or raised while it was handled; not when it was put aside with ``from None``."""

    async def use_it_dead(query: Query) -> None:
        terminate_backends(dsn, f"pid = {await query('SELECT pg_backend_pid()')}")
        await query("SELECT 1")

    lost = await error_of(through_session(db, use_it_dead))

    async def wrap() -> None:
        raise RuntimeError("could not post") from lost

    async def handle() -> None:
        try:
            raise lost
        except DBAPIError:
            raise RuntimeError("could not post")  # noqa: B904 - this is what is tested

    async def put_aside() -> None:
        try:
            raise lost
        except DBAPIError:
            raise RuntimeError("could not post") from None

    assert is_database_gone(await error_of(wrap()))
    assert is_database_gone(await error_of(handle()))
    assert not is_database_gone(await error_of(put_aside()))


async def test_a_pool_without_a_free_session_passes_and_is_no_outage(dsn: str) -> None:
    """What is not written now can be in a moment: no call to the outside is repeated for it."""
    db = Database(dsn, settings=Settings(connect_timeout_seconds=0.2), pool_size=1)

    async def take_all() -> None:
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(20):  # the pool may have some to spare
                tx = await stack.enter_async_context(db.transaction())
                await tx.execute(text("SELECT 1"))

    try:
        with pytest.raises(Exception, match="QueuePool") as caught:
            await take_all()
    finally:
        await db.close()
    assert is_passing(caught.value)
    assert not is_database_gone(caught.value)
