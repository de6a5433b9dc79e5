"""E4 without HTTP: the guard on every kind of connection, and what its table makes impossible."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import psycopg
import pytest

from duly.db import Database
from duly.errors import DulyError, KeyReused
from duly.idempotency import sql
from duly.idempotency.guard import LARGEST_ANSWER_BYTES, Answer, Keyed, fingerprint, reserve, store
from duly.operate import maintenance
from duly.testing import BusinessClock
from tests.engine.jobs.witness import until
from tests.support import rows, value

ASKED = Keyed("alice", "k", fingerprint("POST", "/a", b"", is_json=False))
OTHER = Keyed("alice", "k", fingerprint("POST", "/b", b"", is_json=False))
ANSWER = Answer(201, [("Location", "/a/1"), ("Link", "<é>"), ("Link", "%")], b"\x00\xff any bytes")
Open = Callable[[Database], AbstractAsyncContextManager[Any]]


def session(db: Database) -> AbstractAsyncContextManager[Any]:
    return db.transaction()


def asyncpg(db: Database) -> AbstractAsyncContextManager[Any]:
    return db.raw_transaction()


@asynccontextmanager
async def psycopg_connection(db: Database) -> AsyncIterator[Any]:
    async with await psycopg.AsyncConnection.connect(db.dsn) as connection:
        yield connection


any_connection = pytest.mark.parametrize("begin", [session, asyncpg, psycopg_connection], ids=lambda f: f.__name__)


@any_connection
async def test_the_answer_comes_back_as_it_was_stored(db: Database, begin: Open) -> None:
    """E4.2: status, headers in their order, and any bytes."""
    async with begin(db) as tx:
        assert await reserve(tx, ASKED) is None
        await store(tx, ASKED, ANSWER)
    async with begin(db) as tx:
        assert await reserve(tx, ASKED) == ANSWER


@any_connection
async def test_a_key_with_another_request_is_refused(db: Database, begin: Open) -> None:
    """E4.2."""
    async with begin(db) as tx:
        await reserve(tx, ASKED)
        await store(tx, ASKED, ANSWER)
    with pytest.raises(KeyReused, match="use a new key"):
        async with begin(db) as tx:
            await reserve(tx, OTHER)


@any_connection
async def test_a_transaction_that_fails_leaves_no_key(db: Database, dsn: str, begin: Open) -> None:
    """E4.3."""

    async def fail() -> None:
        async with begin(db) as tx:
            await reserve(tx, ASKED)
            await store(tx, ASKED, ANSWER)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()
    assert value(dsn, "SELECT count(*) FROM duly.idempotency_keys") == 0


def blocked(dsn: str) -> int:
    query = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'transactionid'"
    return int(value(dsn, query))


@pytest.mark.parametrize("commits", [True, False])
async def test_whoever_comes_second_waits_for_the_first(db: Database, dsn: str, commits: bool) -> None:
    """E4.4: it gets the answer of the first, or, when that rolled back, the work."""
    first_may_end = asyncio.Event()

    async def work() -> None:
        async with db.transaction() as tx:
            assert await reserve(tx, ASKED) is None
            await first_may_end.wait()
            await store(tx, ASKED, ANSWER)
            if not commits:
                raise ZeroDivisionError

    async def ask() -> Answer | None:
        async with db.transaction() as tx:
            return await reserve(tx, ASKED)

    first = asyncio.create_task(work())
    await until(lambda: value(dsn, "SELECT count(*) FROM pg_locks WHERE locktype = 'transactionid'"))
    second = asyncio.create_task(ask())
    await until(lambda: blocked(dsn) == 1)
    first_may_end.set()
    assert await second == (ANSWER if commits else None)
    await asyncio.gather(first, return_exceptions=True)


async def test_of_many_that_find_an_expired_key_one_takes_it_over(db: Database, dsn: str, clock: BusinessClock) -> None:
    """E4.4, E4.5: the others get its new answer, and the old one is gone."""
    async with db.transaction() as tx:
        await reserve(tx, OTHER)
        await store(tx, OTHER, Answer(200, [], b"old"))
    clock.advance(hours=24)
    ran: list[int] = []

    async def ask(number: int) -> Answer:
        async with db.transaction() as tx:
            answer = await reserve(tx, ASKED)
            if answer is None:
                ran.append(number)
                answer = Answer(200, [], b"new")
                await store(tx, ASKED, answer)
            return answer

    answers = await asyncio.gather(*(ask(number) for number in range(8)))
    assert len(ran) == 1
    assert {answer.body for answer in answers} == {b"new"}


async def test_an_expired_key_that_is_being_used_again_is_not_cleaned_up_under_its_user(
    db: Database, dsn: str, clock: BusinessClock
) -> None:
    """E4.5: the clean-up passes by what is locked, and what was renewed while it looked."""
    async with db.transaction() as tx:
        await reserve(tx, ASKED)
        await store(tx, ASKED, ANSWER)
    clock.advance(hours=25)
    async with db.transaction() as tx:
        assert await reserve(tx, ASKED) is None
        async with db.transaction() as other:
            assert await maintenance.forget_idempotency_keys(other) == "forgot 0 idempotency keys"
        await store(tx, ASKED, ANSWER)
    async with db.transaction() as tx:
        assert await maintenance.forget_idempotency_keys(tx) == "forgot 0 idempotency keys"
        assert await reserve(tx, ASKED) == ANSWER


async def test_a_key_that_was_committed_without_an_answer_is_said_to_be_so(db: Database) -> None:
    """A mistake of whoever reserved it: not a made-up answer, and not a second effect either."""
    async with db.transaction() as tx:
        await reserve(tx, ASKED)
    with pytest.raises(DulyError, match="committed without an answer"):
        async with db.transaction() as tx:
            await reserve(tx, ASKED)


async def test_an_answer_is_bounded_and_stored_once(db: Database) -> None:
    async with db.transaction() as tx:
        await reserve(tx, ASKED)
        with pytest.raises(DulyError, match="not more"):
            await store(tx, ASKED, Answer(200, [], b"x" * (LARGEST_ANSWER_BYTES + 1)))
        await store(tx, ASKED, ANSWER)
        with pytest.raises(DulyError, match="lost before its answer"):
            await store(tx, ASKED, ANSWER)


@pytest.mark.parametrize(
    ("change", "constraint"),
    [
        ("caller = repeat('x', 1001)", "caller_is_short"),
        ("key = ''", "key_is_short"),
        ("key = repeat('x', 256)", "key_is_short"),
        ("fingerprint = '\\x00'", "fingerprint_is_sha256"),
        ("status = 199", "status_is_http"),
        ("status = 500", "status_is_http"),
        ("body = NULL", "answer_is_whole"),
        ("status = NULL", "answer_is_whole"),
    ],
)
async def test_the_table_says_what_is_impossible(db: Database, dsn: str, change: str, constraint: str) -> None:
    """E4: a server error, half an answer, or a key that nobody could have sent."""
    async with db.transaction() as tx:
        await reserve(tx, ASKED)
        await store(tx, ASKED, ANSWER)
    with pytest.raises(psycopg.errors.CheckViolation, match=constraint):
        rows(dsn, f"UPDATE duly.idempotency_keys SET {change}")


async def test_a_key_is_not_kept_as_it_came(db: Database, dsn: str) -> None:
    """Somebody's address, perhaps: what is kept is a digest, and another for each caller."""
    for caller in ("alice", "bob"):
        asked = Keyed(caller, "ann@example.org", ASKED.fingerprint)
        async with db.transaction() as tx:
            assert await reserve(tx, asked) is None
            await store(tx, asked, ANSWER)
        async with db.transaction() as tx:
            assert await reserve(tx, asked) == ANSWER
    kept = [key for (key,) in rows(dsn, "SELECT key FROM duly.idempotency_keys")]
    assert len(set(kept)) == 2
    assert all(re.fullmatch("[0-9a-f]{64}", key) for key in kept)


@any_connection
async def test_a_key_that_the_release_before_has_kept_is_known(
    db: Database, dsn: str, begin: Open, clock: BusinessClock
) -> None:
    """E4: an upgrade between two tries of a request is no second effect; once it has expired, it is a key like any."""
    rows(
        dsn,
        """INSERT INTO duly.idempotency_keys
           VALUES ('alice', 'k', %(print)s, 201, '[]', 'done', duly.now(), duly.now() + interval '24 hours')""",
        {"print": ASKED.fingerprint},
    )
    async with begin(db) as tx:
        assert await reserve(tx, ASKED) == Answer(201, [], b"done")
    with pytest.raises(KeyReused):
        async with begin(db) as tx:
            await reserve(tx, OTHER)
    clock.advance(hours=25)
    async with begin(db) as tx:
        assert await reserve(tx, ASKED) is None
        await store(tx, ASKED, ANSWER)
    async with begin(db) as tx:
        assert await reserve(tx, ASKED) == ANSWER


async def test_the_clean_up_walks_an_index(db: Database, dsn: str) -> None:
    """E4.5: with a hundred thousand keys of which few are old, it reads few."""
    rows(
        dsn,
        """INSERT INTO duly.idempotency_keys
           SELECT 'alice', n::text, sha256(n::text::bytea), 200, '[]', '', duly.now(),
                  duly.now() + make_interval(secs => n - 100) FROM generate_series(1, 100000) AS n""",
    )
    rows(dsn, "ANALYZE duly.idempotency_keys")
    plan = "\n".join(row[0] for row in rows(dsn, f"EXPLAIN {sql.FORGET_KEYS.sql.replace(':batch', '50')}"))
    assert "idempotency_keys_age" in plan
    assert "Seq Scan" not in plan
