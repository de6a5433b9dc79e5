"""Where one rule ends and the next begins: times, counts, ranges, and who comes a moment too late."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime, timedelta

import pytest

from duly.testing import BusinessClock, drain
from duly.webhooks import deliveries
from duly.webhooks.admit import DELIVER_JOB, lock
from duly.webhooks.clean import sweep
from duly.webhooks.model import CIRCUIT_FAILURES, Standing, after_failure, circuit_wait
from duly.webhooks.sender import _retry_after
from tests.engine.webhooks.hooks import Hooks
from tests.engine.webhooks.subscriber import subscriber
from tests.support import rows, value

NOW = datetime(2026, 3, 1, 9, tzinfo=UTC)
DAYS = timedelta(days=5)
WAITING = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"


def fail(standing: Standing, now: datetime = NOW) -> Standing:
    return after_failure(standing, now=now, http_status=500, disable_after=DAYS, jitter=0.0)


@pytest.mark.parametrize(("early", "status"), [(timedelta(0), "DISABLED"), (timedelta(microseconds=1), "ACTIVE")])
def test_a_subscriber_is_disabled_when_the_days_are_over_and_not_a_moment_before(early: timedelta, status: str) -> None:
    assert fail(Standing("ACTIVE", 3, NOW - DAYS + early, None)).status == status


def test_the_circuit_opens_at_the_fifth_failure_and_what_was_under_way_says_nothing_new() -> None:
    fourth = fail(Standing("ACTIVE", CIRCUIT_FAILURES - 2, NOW, None))
    assert fourth.open_until is None
    fifth = fail(fourth)
    assert fifth.open_until == NOW + timedelta(seconds=30)
    late = fail(fifth, NOW + timedelta(seconds=29))
    assert (late.failures, late.open_until) == (fifth.failures, fifth.open_until)
    probe = fail(fifth, NOW + timedelta(seconds=30))
    assert (probe.failures, probe.open_until) == (6, NOW + timedelta(seconds=90))


def test_a_circuit_stays_open_for_an_hour_however_many_failures_there_were() -> None:
    assert circuit_wait(1_000_000, 0.0) == timedelta(hours=1)


def test_a_date_to_retry_after_that_is_past_is_now() -> None:
    headers = {"date": "Sun, 01 Mar 2026 09:10:00 GMT", "retry-after": "Sun, 01 Mar 2026 09:00:00 GMT"}
    assert _retry_after(headers) == timedelta(0)


async def test_a_range_has_its_beginning_and_not_its_end_and_goes_on_after_a_number(
    hooks: Hooks, clock: BusinessClock
) -> None:
    clock.freeze(NOW)
    until = NOW + timedelta(seconds=2)
    async with subscriber() as one:
        made = await hooks.subscribe(one.url)
        for second in range(3):
            clock.freeze(NOW + timedelta(seconds=second))
            await hooks.emit()
            await hooks.drain()
        numbers = sorted(delivery.number for delivery in await hooks.deliveries())
        async with hooks.db.transaction() as tx:
            counts = []
            for after in (0, numbers[0], numbers[1]):
                found = await deliveries.count_range(
                    tx, made.id, after=after, since=NOW, until=until, only_failed=False
                )
                counts.append(found.number)
            assert counts == [2, 1, 0]
            sent = await deliveries.redeliver_range(
                tx, hooks.settings, made.id, after=numbers[0], since=NOW, until=until, only_failed=False, actor="test"
            )
        assert sent == (1, None)
        one.requests.clear()
        await hooks.drain()
    again = rows(hooks.dsn, "SELECT redeliveries FROM duly.webhook_deliveries ORDER BY number")
    assert again == [(0,), (1,), (0,)]
    assert len(one.requests) == 1


async def test_what_was_kept_goes_in_the_order_in_which_it_came(hooks: Hooks) -> None:
    async with subscriber() as one:
        made = await hooks.subscribe(one.url, max_in_flight=1)
        await hooks.pause(made.id)
        await hooks.emit(5)
        await hooks.drain()
        await hooks.resume(made.id)
        await hooks.drain()
    assert [json.loads(body)["subject"] for body in one.bodies] == [f"o-{n}" for n in range(5)]


@pytest.mark.parametrize(
    ("meanwhile", "status"),
    [
        ("INSERT INTO duly.jobs OVERRIDING SYSTEM VALUE SELECT * FROM kept", "QUEUED"),
        ("UPDATE duly.webhook_deliveries SET status = 'DELIVERED', finished_at = duly.now()", "DELIVERED"),
    ],
    ids=["its job was made", "it was delivered"],
)
async def test_a_delivery_that_somebody_just_moved_is_no_stray(hooks: Hooks, meanwhile: str, status: str) -> None:
    """Whoever redelivers or records holds the subscription; the sweep that waits for it asks again."""
    made = await hooks.subscribe("http://127.0.0.1:8009/hook")
    await hooks.emit()
    await drain(hooks.db, {name: one for name, one in hooks.handlers.items() if name != DELIVER_JOB})
    rows(hooks.dsn, f"CREATE TABLE kept AS SELECT * FROM duly.jobs WHERE name = '{DELIVER_JOB}'")
    rows(hooks.dsn, f"DELETE FROM duly.jobs WHERE name = '{DELIVER_JOB}'")

    async def look() -> str:
        async with hooks.db.transaction() as tx:
            return await sweep(tx, most=5)

    async with hooks.db.transaction() as tx:
        await lock(tx, [made.id])
        looking = asyncio.create_task(look())
        async with asyncio.timeout(30):
            while not value(hooks.dsn, WAITING):
                await asyncio.sleep(0.01)
        rows(hooks.dsn, meanwhile)
    assert await looking == "took back 0 strays and admitted 0"
    assert (await hooks.delivery()).status == status
