"""How the engine stands: E7.1 (what an operator sees first), and the gauges made of it (E5.7)."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest
from prometheus_client import REGISTRY

from duly.db import Database
from duly.operate import Count, status
from duly.operate.counts import CAP, cap_for
from duly.operate.metrics import LABELS_LIMIT, refresh, show
from duly.operate.status import NameStatus, OutboxStatus, Status
from tests.engine.operate.conftest import NOON, Make

ZERO = Count(0)


async def test_an_empty_engine_has_nothing_to_say(db: Database, make: Make) -> None:
    make.run("UPDATE duly.schedules SET next_run_at = NULL")
    async with db.transaction() as tx:
        found = await status(tx)
    assert found == Status(NOON, [], {}, OutboxStatus(ZERO, ZERO, ZERO, None), [], ZERO, [])


async def test_jobs_are_counted_by_name_and_state(db: Database, make: Make) -> None:
    """E3.7: due, not due, behind another, running, and lost by a worker that died."""
    make.job(run_at=NOON - timedelta(minutes=5), priority=1)
    make.job(run_at=NOON - timedelta(minutes=9), priority=4)
    make.job(run_at=NOON + timedelta(seconds=1))
    make.lease(make.job(run_at=NOON - timedelta(minutes=20)))
    make.lease(make.job(run_at=NOON - timedelta(minutes=30)), seconds=-1)
    make.job("consumer:audit", order_key="order-1")
    make.behind("consumer:audit", "order-1")
    make.job("later", run_at=NOON + timedelta(days=1))
    async with db.transaction() as tx:
        found = (await status(tx)).jobs
    one, two = Count(1), Count(2)
    assert found == [
        NameStatus("charge", two, one, ZERO, one, one, 540.0),
        NameStatus("consumer:audit", one, ZERO, one, ZERO, ZERO, 0.0),
        NameStatus("later", ZERO, one, ZERO, ZERO, ZERO, None),
    ]


async def test_counts_stop_at_ten_thousand_and_say_so(db: Database, make: Make) -> None:
    make.run(
        "INSERT INTO duly.jobs (name, run_at, due_at, created_at)"
        " SELECT name, run_at, duly.now(), duly.now() FROM generate_series(1, 10050),"
        " (VALUES ('due', duly.now()), ('later', duly.now() + interval '1 day')) AS n(name, run_at)"
    )
    make.lease(make.value("SELECT id FROM duly.jobs WHERE name = 'due' ORDER BY id LIMIT 1"))
    make.run(
        "INSERT INTO duly.outbox (id, type, topic, aggregate_id, payload, created_at)"
        " SELECT duly.uuid7(), 'order.placed', 'shop', 'order-' || n, '{}', duly.now() FROM generate_series(1, 10050) n"
    )
    async with db.transaction() as tx:
        found = await status(tx)
    due, later = found.jobs
    assert (due.due, due.running) == (Count(10_000, True), Count(1))
    assert str(due.due) == "10,000+"
    assert later.future == Count(CAP, True)
    assert (found.outbox.pending, found.outbox.failed) == (Count(CAP, True), ZERO)


async def test_with_many_names_each_is_counted_less_far(db: Database, make: Make) -> None:
    """All of them together stay within a budget, so that the answer comes at once."""
    assert [cap_for(names) for names in (1, 10, 11, 50, 100, 1_000)] == [10_000, 10_000, 5_000, 2_000, 1_000, 100]
    make.run(
        "INSERT INTO duly.jobs (name, run_at, due_at, created_at)"
        " SELECT 'name-' || n % 11, duly.now(), duly.now(), duly.now() FROM generate_series(1, 110) n"
    )
    make.run(
        "INSERT INTO duly.jobs (name, run_at, due_at, created_at)"
        " SELECT 'name-0', duly.now(), duly.now(), duly.now() FROM generate_series(1, 5001) n"
    )
    async with db.transaction() as tx:
        found = (await status(tx)).jobs
    assert [str(one.due) for one in found] == ["5,000+"] + ["10"] * 10


async def test_more_running_jobs_than_are_looked_at_say_so(db: Database, make: Make) -> None:
    make.run(
        "INSERT INTO duly.jobs (name, run_at, due_at, created_at, lease_token, leased_by, lease_expires_at)"
        " SELECT 'charge', duly.now() - interval '1 minute', duly.now(), duly.now(), n, 'w1',"
        " clock_timestamp() + interval '5 minutes' FROM generate_series(1, 1100) n"
    )
    make.job(run_at=NOON - timedelta(seconds=7))
    async with db.transaction() as tx:
        [found] = (await status(tx)).jobs
    assert (found.running, found.oldest_due_seconds) == (Count(1_000, True), 7.0)


async def test_dead_letters_alerts_and_late_schedules_are_counted(db: Database, make: Make) -> None:
    make.dead(1, "charge")
    make.dead(2, "charge")
    make.dead(3, "refund")
    make.run("SELECT duly.alert('dead_letter', 'charge', 'boom')")
    make.run("UPDATE duly.schedules SET next_run_at = duly.now() + interval '1 hour'")
    make.run(
        "INSERT INTO duly.schedules (name, cron, enabled, next_run_at) VALUES"
        " ('late', '0 9 * * *', true, duly.now() - interval '2 minutes'),"
        " ('in-time', '0 9 * * *', true, duly.now() - interval '20 seconds'),"
        " ('off', '0 9 * * *', false, duly.now() - interval '2 days')"
    )
    async with db.transaction() as tx:
        found = await status(tx)
    assert found.dead_letters == {"charge": Count(2), "refund": Count(1)}
    assert found.alerts_open == Count(1)
    assert [(late.name, late.late_seconds) for late in found.schedules_late] == [("late", 120.0)]


async def test_what_is_held_behind_a_failed_event_says_nothing_about_the_relay(db: Database, make: Make) -> None:
    """E1.4: the lag is that of the oldest event which the relay could publish."""
    make.failed_event("order-1", created_at=NOON - timedelta(days=3))
    make.event("order-1", parked=True, created_at=NOON - timedelta(days=2))
    make.event("order-2", created_at=NOON - timedelta(seconds=30))
    make.event("order-3", created_at=NOON - timedelta(seconds=10))
    async with db.transaction() as tx:
        found = (await status(tx)).outbox
    assert found == OutboxStatus(pending=Count(3), held=Count(1), failed=Count(1), oldest_seconds=30.0)


async def test_a_process_that_was_not_seen_for_half_a_minute_is_not_alive(db: Database, make: Make) -> None:
    make.process("w1", names=("charge",))
    make.process("r1", "relay", silent=5)
    make.process("w2", silent=31)
    async with db.transaction() as tx:
        found = (await status(tx)).processes
    assert [(process.id, process.kind, process.names) for process in found] == [
        ("r1", "relay", []),
        ("w1", "worker", ["charge"]),
    ]


# ----------------------------------------------------------------------------------------------------------- metrics


@pytest.fixture
def _no_gauges_left() -> Iterator[None]:
    yield
    show(Status(NOON, [], {}, OutboxStatus(ZERO, ZERO, ZERO, None), [], ZERO, []))


def gauge(metric: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(metric, labels)


@pytest.mark.usefixtures("_no_gauges_left")
async def test_gauges_follow_the_database_and_forget_names_that_are_gone(db: Database, make: Make) -> None:
    """E5.7."""
    id = make.job(run_at=NOON - timedelta(seconds=90))
    make.dead(99, "refund")
    make.failed_event()
    async with db.transaction() as tx:
        await refresh(tx)
    assert gauge("duly_queue_depth", name="charge", state="due") == 1
    assert gauge("duly_queue_depth", name="charge", state="running") == 0
    assert gauge("duly_queue_oldest_seconds", name="charge") == 90
    assert gauge("duly_dead_letters", name="refund") == 1
    assert (gauge("duly_outbox_pending"), gauge("duly_outbox_failed"), gauge("duly_alerts_open")) == (0, 1, 1)
    make.run("DELETE FROM duly.jobs WHERE id = %(id)s", id=id)
    make.run("DELETE FROM duly.dead_letters")
    async with db.transaction() as tx:
        await refresh(tx)
    assert gauge("duly_queue_depth", name="charge", state="due") is None
    assert gauge("duly_queue_oldest_seconds", name="charge") is None
    assert gauge("duly_dead_letters", name="refund") is None


@pytest.mark.usefixtures("_no_gauges_left")
def test_names_beyond_the_limit_share_one_label() -> None:
    """A name made of an order's number must not grow the metrics without end."""
    jobs = [NameStatus(f"n{number:03}", Count(1), ZERO, ZERO, ZERO, ZERO, float(number)) for number in range(250)]
    jobs.append(NameStatus("zz-large", Count(9), ZERO, ZERO, ZERO, ZERO, 1.0))
    dead = {f"n{number:03}": Count(2) for number in range(203)}
    show(Status(NOON, jobs, dead, OutboxStatus(ZERO, ZERO, ZERO, None), [], ZERO, []))
    shown = {
        sample.labels["name"]
        for metric in REGISTRY.collect()
        if metric.name == "duly_queue_depth"
        for sample in metric.samples
    }
    assert len(shown) == LABELS_LIMIT + 1
    assert gauge("duly_queue_depth", name="zz-large", state="due") == 9, "the largest keep their own"
    assert gauge("duly_queue_depth", name="other", state="due") == 51
    assert gauge("duly_queue_oldest_seconds", name="other") == 249
    assert gauge("duly_dead_letters", name="other") == 6
