"""FAULTS (Attacks): a receiver that does its worst costs its own delivery a try, and nobody anything else."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import time
from collections.abc import Awaitable, Callable

import pytest
from sqlalchemy import text

from duly import NewEvent, emit
from duly.testing import BusinessClock, drain
from duly.webhooks import subscriptions
from duly.webhooks.addresses import Allowed
from duly.webhooks.admit import DELIVER_JOB, lock
from duly.webhooks.sender import Answer, Sender
from tests.engine.jobs.witness import until
from tests.engine.webhooks.hooks import Hooks
from tests.engine.webhooks.subscriber import Request, answering, subscriber
from tests.support import rows, value

LOOPBACK = Allowed.read((), development=True, http=True)
WAITING = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
LAG_SECONDS, SPENT_SECONDS = 0.25, 3.0


async def send(url: str, *, seconds: float = 5.0, body: bytes = b"{}") -> Answer:
    return await Sender(LOOPBACK).send(url, headers={"X-Event-Type": "t"}, body=body, timeout_seconds=seconds)


async def worst_lag(stop: asyncio.Event) -> float:
    """For how long at most everybody else in this process had to wait, as if nothing else ran on the machine."""
    worst = 0.0
    while not stop.is_set():
        began = time.thread_time()
        await asyncio.sleep(0.002)
        worst = max(worst, time.thread_time() - began)
    return worst


def flooding(head: bytes, piece: bytes) -> Callable[[Request, asyncio.StreamWriter], Awaitable[None]]:
    """Answers with one thing, and then with another without end."""

    async def behave(_request: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(head)
        while not writer.is_closing():
            writer.write(piece)
            await writer.drain()

    return behave


@pytest.mark.parametrize(
    ("head", "piece"),
    [(b"", b"HTTP/1.1 100 Go\r\n\r\n" * 3_000), (b"", b"HTTP/1.1 103 Hints\r\nLink: a\r\n\r\n" * 2_000),
     (b"HTTP/1.1 200 OK\r\n", b"a:\r\n" * 10_000),
     (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1;" + b"x" * 20_000 + b"\r\nx\r\n"),
     (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n" * 5_000),
     (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n", b"a: b\r\n" * 5_000)],
    ids=["100", "103", "headers", "extensions", "pieces", "trailers"],
)  # fmt: skip
async def test_a_flood_ends_early_and_blocks_nobody(head: bytes, piece: bytes) -> None:
    """What comes beyond what anybody needs is not waited for, let alone parsed for the length of the time-out."""
    stop = asyncio.Event()
    lag = asyncio.create_task(worst_lag(stop))
    began = time.thread_time()
    async with subscriber(flooding(head, piece)) as one:
        answer = await send(one.url, seconds=20)
    assert time.thread_time() - began < SPENT_SECONDS, answer
    stop.set()
    assert answer.error in (None, "protocol", "connection_lost")
    assert await lag < LAG_SECONDS


@pytest.mark.parametrize(
    "raw",
    [b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n", b"HTTP/1.1 000 X\r\n\r\n",
     b"HTTP/1.1 099 X\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
     b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nx",
     b"HTTP/1.1 200 OK\r\nX: \x00\r\n\r\n", b"HTTP/1.1 200 OK\r\n X: y\r\n\r\n",
     b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffffffffff\r\n",
     b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\nxx", b"\x16\x03\x01\x02\x00\x01", b"HTTP/1.1 200 OK",
     b"HTTP/1.1 100 Continue\r\n\r\n"],
)  # fmt: skip
async def test_whatever_is_no_answer_is_a_failure_with_a_word(raw: bytes) -> None:
    async def behave(_request: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(raw)

    async with subscriber(behave) as one:
        answer = await send(one.url, seconds=1)
    assert answer.error in ("protocol", "connection_lost", "status", "timeout"), answer


async def test_a_compressed_answer_is_not_unpacked() -> None:
    bomb = gzip.compress(b"\0" * 10_000_000)
    async with subscriber(answering(200, headers="Content-Encoding: gzip\r\n", body=bomb)) as one:
        answer = await send(one.url)
        assert one.requests[0].headers["accept-encoding"] == "identity"
    assert answer.delivered
    assert len(answer.response_excerpt) <= 2_048


async def test_a_receiver_that_answers_before_it_has_read_anything_is_heard() -> None:
    """And one that closes at once is a failure, not an error of ours: a body larger than any socket's buffer."""

    async def early(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(10)
        writer.write(b"HTTP/1.1 413 Large\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        await writer.drain()
        await asyncio.sleep(0.2)
        writer.close()

    async def rude(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()

    for behave, expected in ((early, {"status", "connection_lost"}), (rude, {"connection_lost", "protocol"})):
        server = await asyncio.start_server(behave, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            answer = await send(f"http://127.0.0.1:{port}/", body=b"x" * 20_000_000)
        assert answer.error in expected


@pytest.mark.parametrize(
    "greeting", [b"", b"HTTP/1.1 200 OK\r\n\r\n", b"\x15\x03\x03\x00\x02\x02\x28", b"\x16\x03\x03\xff\xff"]
)
async def test_tls_that_is_none_is_a_failure(greeting: bytes) -> None:
    async def behave(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting)
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        if greeting:
            writer.close()
        else:
            await asyncio.sleep(5)

    server = await asyncio.start_server(behave, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        answer = await send(f"https://127.0.0.1:{port}/", seconds=0.5)
        server.close_clients() if hasattr(server, "close_clients") else None
    assert answer.error in ("tls", "connect", "timeout", "connection_lost"), answer


async def test_answers_that_are_hard_to_store_are_recorded(hooks: Hooks) -> None:
    """NUL, halves of characters, and headers in no encoding: the attempt has its row, whatever was said."""
    said = b"\x00\xff\xed\xa0\x80" * 2_000
    async with subscriber(answering(500, headers="Server: \xff\xfe\r\nVia: \xe4\r\n", body=said)) as one:
        await hooks.subscribe(one.url)
        await hooks.emit()
        await hooks.drain()
    delivery = await hooks.delivery()
    assert (delivery.status, delivery.attempts) == ("RETRYING", 1)
    (attempt,) = await hooks.attempts(delivery.id)
    assert len(attempt.response_excerpt) == 2_048
    assert attempt.response_headers["server"]


@pytest.mark.parametrize("origin", ["a\r\nX-Evil: b", "\x1b", "é"])
async def test_an_origin_that_is_no_header_is_left_out(hooks: Hooks, origin: str) -> None:
    """Whoever emits may write anything into it: the event goes all the same, and nothing else with it."""
    async with subscriber() as one:
        await hooks.subscribe(one.url)
        async with hooks.db.transaction() as tx:
            await emit(tx, NewEvent("order.placed", "shop", "o", {}, headers={"traceparent": origin}))
        await hooks.drain()
    (request,) = one.requests
    assert not {"traceparent", "x-evil"} & set(request.headers)
    assert (await hooks.delivery()).status == "DELIVERED"


async def test_pausing_resuming_redelivering_and_editing_at_once_lose_and_double_nothing(hooks: Hooks) -> None:
    """A storm of clicks by several people, while everything fails and then works."""
    async with subscriber(answering(500)) as one:
        made = await hooks.subscribe(one.url, max_in_flight=3)
        await hooks.emit(20)
        await hooks.drain()

        async def storm(turn: int) -> None:
            for n in range(6):
                with contextlib.suppress(Exception):
                    if (turn + n) % 3 == 0:
                        await hooks.pause(made.id)
                    elif (turn + n) % 3 == 1:
                        await hooks.resume(made.id)
                    else:
                        async with hooks.db.transaction() as tx:
                            await subscriptions.edit_subscription(
                                tx, hooks.settings, made.id, max_in_flight=1 + n, actor="test"
                            )  # fmt: skip
                for delivery in (await hooks.deliveries(made.id))[turn::4]:
                    with contextlib.suppress(Exception):
                        await hooks.redeliver(delivery.id)

        async with asyncio.timeout(60):
            await asyncio.gather(*(storm(turn) for turn in range(4)), hooks.drain())
        one.behave = answering(200)
        one.requests.clear()
        with contextlib.suppress(Exception):
            await hooks.resume(made.id)
        rows(hooks.dsn, "UPDATE duly.business_clock SET shift = '2 hours'")
        for _ in range(10):
            await hooks.drain()
            rows(hooks.dsn, "SELECT duly.schedule('duly.sweep-webhooks')")
    assert {one.status for one in await hooks.deliveries(made.id)} == {"DELIVERED"}
    assert hooks.jobs() == []
    assert value(hooks.dsn, "SELECT max(n) FROM (SELECT count(*) AS n FROM duly.jobs WHERE name LIKE 'duly.deliver%' "
                            "GROUP BY entity_id) AS c") is None  # fmt: skip
    counted = value(hooks.dsn, "SELECT count(*) FROM duly.webhook_deliveries d WHERE d.attempts <> "
                               "(SELECT count(*) FROM duly.webhook_attempts a WHERE a.delivery_id = d.id)")  # fmt: skip
    assert counted == 0


async def test_a_delivery_that_is_sent_again_twice_at_once_goes_once(hooks: Hooks) -> None:
    async with subscriber() as one:
        await hooks.subscribe(one.url)
        await hooks.emit()
        await hooks.drain()
        id = (await hooks.delivery()).id
        outcomes = await asyncio.gather(*(hooks.redeliver(id) for _ in range(8)), return_exceptions=True)
        assert sum(not isinstance(outcome, BaseException) for outcome in outcomes) == 1
        await hooks.drain()
        assert len(one.requests) == 2
    assert (await hooks.delivery()).redeliveries == 1


@pytest.mark.parametrize("status", [500, 410])
async def test_a_subscription_that_is_deleted_while_its_last_try_is_under_way_leaves_no_alert(
    hooks: Hooks, status: int
) -> None:
    """Nobody could ever repair it; and it stays deleted, whatever its receiver says."""
    gate = asyncio.Event()

    async def behave(_request: Request, writer: asyncio.StreamWriter) -> None:
        await gate.wait()
        writer.write(f"HTTP/1.1 {status} No\r\nContent-Length: 0\r\n\r\n".encode())

    async with subscriber(behave) as one:
        made = await hooks.subscribe(one.url)
        await hooks.emit()
        rows(hooks.dsn, "ALTER TABLE duly.webhook_deliveries ALTER COLUMN tries SET DEFAULT 7, "
                        "ALTER COLUMN attempts SET DEFAULT 7")  # fmt: skip
        draining = asyncio.create_task(hooks.drain())
        async with asyncio.timeout(20):
            await one.arrived.wait()
        async with hooks.db.transaction() as tx:
            await subscriptions.delete_subscription(tx, hooks.settings, made.id, actor="test")
        gate.set()
        await draining
    assert hooks.alerts() == []
    assert value(hooks.dsn, "SELECT status FROM duly.webhook_subscriptions") == "DELETED"


@pytest.mark.parametrize("overtaken", ["turn = turn + 1", "status = 'CANCELLED', finished_at = duly.now()"])
async def test_an_attempt_whose_delivery_has_moved_on_records_nothing(hooks: Hooks, overtaken: str) -> None:
    """The last fence: whoever else took the delivery meanwhile, its state and its log are theirs."""
    gate = asyncio.Event()

    async def behave(_request: Request, writer: asyncio.StreamWriter) -> None:
        await gate.wait()
        writer.write(b"HTTP/1.1 200 Yes\r\nContent-Length: 0\r\n\r\n")

    async with subscriber(behave) as one:
        await hooks.subscribe(one.url)
        await hooks.emit()
        draining = asyncio.create_task(hooks.drain())
        async with asyncio.timeout(20):
            await one.arrived.wait()
        rows(hooks.dsn, f"UPDATE duly.webhook_deliveries SET {overtaken}")
        before = rows(hooks.dsn, "SELECT status, turn, attempts, finished_at FROM duly.webhook_deliveries")
        gate.set()
        await draining
    assert rows(hooks.dsn, "SELECT status, turn, attempts, finished_at FROM duly.webhook_deliveries") == before
    assert value(hooks.dsn, "SELECT count(*) FROM duly.webhook_attempts") == 0


async def test_a_job_of_an_earlier_turn_does_nothing(hooks: Hooks) -> None:
    """Its worker died after it had put the delivery back, and before it could say so: somebody else has it now."""
    async with subscriber(answering(500)) as one:
        made = await hooks.subscribe(one.url)
        await hooks.emit()
        handlers = {name: handler for name, handler in hooks.handlers.items() if name != DELIVER_JOB}
        await drain(hooks.db, handlers)
        old = rows(hooks.dsn, f"SELECT entity_id, payload::text FROM duly.jobs WHERE name = '{DELIVER_JOB}'")
        await hooks.pause(made.id)
        await hooks.drain()
        assert [delivery.status for delivery in await hooks.deliveries()] == ["WAITING"]
        await hooks.resume(made.id)
        rows(hooks.dsn, f"SELECT duly.schedule('{DELIVER_JOB}', %(id)s, payload => %(payload)s::jsonb, "
                        "on_conflict => 'allow')",
             {"id": old[0][0], "payload": old[0][1]})  # fmt: skip
        await hooks.drain()
        assert len(one.requests) == 1
    assert (await hooks.delivery()).status == "RETRYING"


@pytest.mark.parametrize(
    "overtaken", ["turn = turn + 1", "status = 'CANCELLED', next_attempt_at = NULL, finished_at = duly.now()"]
)
async def test_a_retry_asks_for_its_place_again_once_it_holds_the_subscription(
    hooks: Hooks, clock: BusinessClock, overtaken: str
) -> None:
    """Whoever held it may have sent the delivery again, or ended it: the retry finds that it is too late."""
    async with subscriber(answering(500)) as one:
        made = await hooks.subscribe(one.url)
        await hooks.emit()
        await hooks.drain()
        clock.advance(minutes=1)
        async with hooks.db.transaction() as tx:
            await lock(tx, [made.id])
            draining = asyncio.create_task(hooks.drain())
            await until(lambda: value(hooks.dsn, WAITING) == 1, what="the retry waits for the subscription")
            rows(hooks.dsn, f"UPDATE duly.webhook_deliveries SET {overtaken}")
            before = rows(hooks.dsn, "SELECT status, turn, next_attempt_at, finished_at FROM duly.webhook_deliveries")
        await draining
    assert rows(hooks.dsn, "SELECT status, turn, next_attempt_at, finished_at FROM duly.webhook_deliveries") == before
    assert len(one.requests) == 1


async def test_whoever_admits_holds_the_subscription(hooks: Hooks) -> None:
    """Two who count free places at once would both find the last one."""
    made = await hooks.subscribe("http://127.0.0.1:8009/hook")

    async def hold() -> None:
        async with hooks.db.transaction() as tx:
            await tx.execute(text("SET LOCAL lock_timeout = '200ms'"))
            await lock(tx, [made.id])

    async with hooks.db.transaction() as tx:
        await lock(tx, [made.id])
        with pytest.raises(Exception, match="lock timeout"):
            await hold()
    await hold()
