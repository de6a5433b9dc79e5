"""The sweep: deliveries that lost their jobs are found behind any number of others, so many at a time."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest

from duly.webhooks.clean import ADMITTED_AT_ONCE, LOOKED_AT, REST, SWEEP_JOB, Place, forget, sweep
from tests.engine.webhooks.hooks import Hooks
from tests.support import rows, value

NOBODY = "https://example.com/hook"
SUBSCRIBE = """
INSERT INTO duly.webhook_subscriptions (id, owner, url, patterns, created_at, updated_at)
SELECT ('00000000-0000-7000-8000-' || lpad(n::text, 12, '0'))::uuid, 'o', 'https://example.com/', '{*}', duly.now(),
       duly.now() FROM generate_series(1, %(count)s) AS n RETURNING id
"""
# In order of their numbers; those of a subscription that is paused stay where the sweep puts them.
DELIVER = """
INSERT INTO duly.webhook_deliveries (id, subscription_id, event_id, event_type, aggregate_id, event_created_at, status,
                                     attempts, tries, next_attempt_at, created_at)
SELECT gen_random_uuid(), %(id)s, gen_random_uuid(), 'order.placed', 'a', duly.now(), %(status)s, 1, 1,
       CASE WHEN %(status)s = 'RETRYING' THEN duly.now() + interval '1 day' END, duly.now()
FROM generate_series(1, %(count)s) RETURNING id
"""
GIVE_JOBS = """
INSERT INTO duly.jobs (name, entity_id, run_at, due_at, created_at, payload)
SELECT 'duly.deliver-webhook', d.id, duly.now() + interval '1 day', duly.now(), duly.now(), '{"turn": 0}'
FROM duly.webhook_deliveries d WHERE NOT EXISTS (SELECT 1 FROM duly.jobs j WHERE j.entity_id = d.id::text) RETURNING id
"""
PAUSE = "UPDATE duly.webhook_subscriptions SET status = 'PAUSED'"
QUEUED_RUNS = f"SELECT entity_id, payload FROM duly.jobs WHERE name = '{SWEEP_JOB}'"
RUNS = f"SELECT message FROM duly.executions WHERE name = '{SWEEP_JOB}' ORDER BY completed_at, execution_id"


def make(hooks: Hooks, id: UUID, count: int, *, status: str = "RETRYING", with_jobs: bool = False) -> list[UUID]:
    """Deliveries that are under way, with their jobs or without."""
    made = [row[0] for row in rows(hooks.dsn, DELIVER, {"id": id, "status": status, "count": count})]
    if with_jobs:
        rows(hooks.dsn, GIVE_JOBS)
    return made


def waiting(hooks: Hooks) -> set[Any]:
    return {row[0] for row in rows(hooks.dsn, "SELECT id FROM duly.webhook_deliveries WHERE status = 'WAITING'")}


async def test_strays_behind_thousands_of_retries_are_found_by_the_runs_that_follow(hooks: Hooks) -> None:
    """Nobody's retries hide what comes after them: of their own subscription, or of another."""
    first, second = (row[0] for row in rows(hooks.dsn, SUBSCRIBE, {"count": 2}))
    rows(hooks.dsn, PAUSE)
    make(hooks, first, LOOKED_AT + 10, with_jobs=True)
    strays = {*make(hooks, first, 3), *make(hooks, second, 2, status="QUEUED"), *make(hooks, second, 2)}
    rows(hooks.dsn, f"SELECT duly.schedule('{SWEEP_JOB}')")
    await hooks.drain()
    assert waiting(hooks) == strays
    assert [row[0] for row in rows(hooks.dsn, RUNS)] == [
        "took back 0 strays and admitted 0; more are under way, and the next run is queued",
        "took back 7 strays and admitted 0",
    ]
    assert rows(hooks.dsn, QUEUED_RUNS) == []


async def test_a_run_looks_at_so_many_and_says_where_it_stopped(hooks: Hooks) -> None:
    (only,) = (row[0] for row in rows(hooks.dsn, SUBSCRIBE, {"count": 1}))
    rows(hooks.dsn, PAUSE)
    strays = make(hooks, only, 5)
    numbers = [row[0] for row in rows(hooks.dsn, "SELECT number FROM duly.webhook_deliveries ORDER BY number")]
    async with hooks.db.transaction() as tx:
        assert (await sweep(tx, most=5, limit=3)).startswith("took back 3 strays")
    assert waiting(hooks) == set(strays[:3])
    place = {"subscription_id": str(only), "status": "RETRYING", "number": numbers[2]}
    assert rows(hooks.dsn, QUEUED_RUNS) == [(REST, place)]
    async with hooks.db.transaction() as tx:
        assert await sweep(tx, most=5, limit=3, after=Place.read(place)) == "took back 2 strays and admitted 0"
    assert waiting(hooks) == set(strays)


async def test_a_place_passes_over_what_was_looked_at_and_nothing_else(hooks: Hooks) -> None:
    """From the middle of one's retries: not its queued ones, not its first ones, and all of the next one's."""
    first, second = (row[0] for row in rows(hooks.dsn, SUBSCRIBE, {"count": 2}))
    rows(hooks.dsn, PAUSE)
    make(hooks, first, 1, status="QUEUED")
    of_first, of_second = make(hooks, first, 3), make(hooks, second, 1, status="QUEUED")
    number = value(hooks.dsn, "SELECT number FROM duly.webhook_deliveries WHERE id = %(id)s", {"id": of_first[0]})
    async with hooks.db.transaction() as tx:
        await sweep(tx, most=5, after=Place(first, "RETRYING", number))
    assert waiting(hooks) == {*of_first[1:], *of_second}
    assert rows(hooks.dsn, QUEUED_RUNS) == []


async def test_strays_of_more_subscriptions_than_are_locked_at_once_are_all_taken_back(hooks: Hooks) -> None:
    ids = [row[0] for row in rows(hooks.dsn, SUBSCRIBE, {"count": ADMITTED_AT_ONCE + 20})]
    rows(hooks.dsn, PAUSE)
    strays = {id for one in ids for id in make(hooks, one, 1)}
    async with hooks.db.transaction() as tx:
        await sweep(tx, most=5)
    assert len(waiting(hooks)) == ADMITTED_AT_ONCE
    await hooks.drain()
    assert waiting(hooks) == strays


async def test_one_run_at_a_time_goes_on(hooks: Hooks) -> None:
    """A schedule that comes before the rest is done makes no second walk, and does not send the first one back."""
    (only,) = (row[0] for row in rows(hooks.dsn, SUBSCRIBE, {"count": 1}))
    rows(hooks.dsn, PAUSE)
    make(hooks, only, 9, with_jobs=True)
    for limit in (6, 2):
        async with hooks.db.transaction() as tx:
            await sweep(tx, most=5, limit=limit)
    numbers = [row[0] for row in rows(hooks.dsn, "SELECT number FROM duly.webhook_deliveries ORDER BY number")]
    assert [(row[0], row[1]["number"]) for row in rows(hooks.dsn, QUEUED_RUNS)] == [(REST, numbers[5])]


@pytest.mark.parametrize("payload", ["{}", '{"subscription_id": "x", "status": "QUEUED", "number": 1}'])
async def test_a_place_that_cannot_be_read_ends_the_run_and_changes_nothing(hooks: Hooks, payload: str) -> None:
    """An empty payload is the beginning."""
    (only,) = (row[0] for row in rows(hooks.dsn, SUBSCRIBE, {"count": 1}))
    rows(hooks.dsn, PAUSE)
    make(hooks, only, 1)
    rows(hooks.dsn, f"SELECT duly.schedule('{SWEEP_JOB}', payload => '{payload}'::jsonb, max_retries => 0)")
    await hooks.drain()
    assert len(waiting(hooks)) == (1 if payload == "{}" else 0)


async def test_who_waits_and_has_nothing_under_way_is_found(hooks: Hooks) -> None:
    """Whatever was to let it go is lost: its circuit has closed, and nobody has told it."""
    (only,) = (row[0] for row in rows(hooks.dsn, SUBSCRIBE, {"count": 1}))
    make(hooks, only, 3, status="WAITING")
    rows(hooks.dsn, "UPDATE duly.webhook_subscriptions SET failures = 5, failing_since = duly.now(), "
                    "open_until = duly.now() + interval '1 hour'")  # fmt: skip
    said = []
    for shift in ("0", "1 hour"):
        rows(hooks.dsn, f"UPDATE duly.business_clock SET shift = '{shift}'")
        async with hooks.db.transaction() as tx:
            said.append(await sweep(tx, most=5))
    assert said == ["took back 0 strays and admitted 0", "took back 0 strays and admitted 1"]


RECEIVED = """
INSERT INTO duly.received_webhooks SELECT 'payments', n::text, duly.now() - interval '31 days'
FROM generate_series(1, 3) AS n
"""
FORGET_RUNS = "SELECT count(*) FROM duly.jobs WHERE name = 'duly.forget-webhooks'"


@pytest.mark.parametrize("kind", ["received", "deliveries", "of the deleted"])
async def test_a_clean_up_that_reaches_its_limit_is_gone_on_with(hooks: Hooks, kind: str) -> None:
    if kind == "received":
        rows(hooks.dsn, RECEIVED)
    else:
        (only,) = (row[0] for row in rows(hooks.dsn, SUBSCRIBE, {"count": 1}))
        make(hooks, only, 3, status="WAITING" if kind == "deliveries" else "RETRYING")
        rows(hooks.dsn, "UPDATE duly.webhook_deliveries SET created_at = duly.now() - interval '31 days'")
        rows(hooks.dsn, "UPDATE duly.webhook_subscriptions SET status = 'DELETED'")
    queued = []
    for _ in range(2):
        rows(hooks.dsn, "DELETE FROM duly.jobs")
        async with hooks.db.transaction() as tx:
            await forget(tx, days=30, batch=1, batches=2)
        queued.append(value(hooks.dsn, FORGET_RUNS))
    assert queued == [1, 0]
    left = "SELECT (SELECT count(*) FROM duly.received_webhooks) + (SELECT count(*) FROM duly.webhook_deliveries)"
    assert value(hooks.dsn, left) == 0
