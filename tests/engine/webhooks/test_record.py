"""What is written of an attempt when somebody else has the delivery meanwhile; and who gets nothing at all."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from duly.errors import Conflict
from duly.testing import drain
from duly.webhooks import subscriptions
from duly.webhooks.admit import DELIVER_JOB
from duly.webhooks.record import SUPERSEDED, Sent, Task, record
from duly.webhooks.sender import Answer
from tests.engine.webhooks.hooks import OWNER, Hooks
from tests.engine.webhooks.subscriber import answering, subscriber
from tests.support import rows, value

NOBODY = "http://127.0.0.1:8009/hook"
NOW = datetime(2026, 5, 4, tzinfo=UTC)
OPEN_CIRCUIT = """
UPDATE duly.webhook_subscriptions SET failures = 5, failing_since = duly.now(),
    open_until = duly.now() + interval '1 hour'
"""
SEEN = "SELECT status, turn, attempts, last_error, finished_at FROM duly.webhook_deliveries"


async def fan_out(hooks: Hooks) -> None:
    """An event, and its deliveries; nothing is sent."""
    await hooks.emit()
    await drain(hooks.db, {name: one for name, one in hooks.handlers.items() if name != DELIVER_JOB})


@pytest.mark.parametrize("is_gone", [True, False], ids=["its event is gone", "it was sent"])
async def test_nothing_is_written_of_a_delivery_that_somebody_else_has(hooks: Hooks, is_gone: bool) -> None:
    """Its job ends without having done anything: it is another job's turn."""
    made = await hooks.subscribe(NOBODY)
    await fan_out(hooks)
    delivery, before = await hooks.delivery(), rows(hooks.dsn, SEEN)
    task = Task(delivery.id, before[0][1] - 1, 0, made.id, NOBODY, 15, NOW, None, [])
    sent = Sent(task, NOW, {"X-Event-Type": "order.placed"}, 10, Answer("status", 1, 500))
    async with hooks.db.transaction() as tx:
        outcomes = await record(tx, [task if is_gone else sent], most=5, disable_after=timedelta(days=5))
    assert outcomes == [SUPERSEDED]
    assert rows(hooks.dsn, SEEN) == before
    assert value(hooks.dsn, "SELECT count(*) FROM duly.webhook_attempts") == 0
    assert hooks.alerts() == []
    assert (await hooks.subscription(made.id)).failures == 0


async def test_a_delivery_that_is_over_is_not_given_up_because_its_event_is_gone(hooks: Hooks) -> None:
    made = await hooks.subscribe(NOBODY)
    await fan_out(hooks)
    rows(hooks.dsn, "UPDATE duly.webhook_deliveries SET status = 'DELIVERED', finished_at = duly.now()")
    delivery, before = await hooks.delivery(), rows(hooks.dsn, SEEN)
    task = Task(delivery.id, before[0][1], 0, made.id, NOBODY, 15, NOW, None, [])
    async with hooks.db.transaction() as tx:
        assert await record(tx, [task], most=5, disable_after=timedelta(days=5)) == [SUPERSEDED]
    assert rows(hooks.dsn, SEEN) == before
    assert hooks.alerts() == []


async def test_whom_we_disable_is_in_the_audit(hooks: Hooks) -> None:
    """Nobody has clicked, and still everybody can see who did it, and why."""
    async with subscriber(answering(410)) as one:
        made = await hooks.subscribe(one.url)
        await hooks.emit()
        await hooks.drain()
    found = rows(
        hooks.dsn, "SELECT actor, subject, reason FROM duly.audit WHERE action = 'webhook_subscription.disabled'"
    )
    assert found == [("duly", f"webhook_subscription:{made.id}", "the receiver answered 410 Gone")]


async def test_what_one_subscriber_does_is_counted_for_nobody_else(hooks: Hooks) -> None:
    """E6.2: their attempts share a commit, and nothing but that."""
    dead, well = await hooks.subscribe(NOBODY), await hooks.subscribe(NOBODY)
    await fan_out(hooks)
    found = dict(rows(hooks.dsn, "SELECT subscription_id, id FROM duly.webhook_deliveries"))
    sent = [
        Sent(
            Task(found[one.id], 1, 0, one.id, NOBODY, 15, NOW, None, []), NOW, {"X-Event-Type": "order.placed"}, 10,
            answer,
        )
        for one, answer in ((well, Answer(None, 1, 200)), (dead, Answer("status", 1, 500)))
    ]  # fmt: skip
    async with hooks.db.transaction() as tx:
        await record(tx, sent, most=5, disable_after=timedelta(days=5))
    assert [(await hooks.subscription(one.id)).failures for one in (dead, well)] == [1, 0]


async def test_a_deleted_subscription_gets_no_delivery_while_others_do(hooks: Hooks) -> None:
    gone, stays = await hooks.subscribe(NOBODY), await hooks.subscribe(NOBODY)
    async with hooks.db.transaction() as tx:
        await subscriptions.delete_subscription(tx, hooks.settings, gone.id, actor="test")
    await fan_out(hooks)
    assert rows(hooks.dsn, "SELECT subscription_id FROM duly.webhook_deliveries") == [(stays.id,)]


async def test_who_fails_gets_one_at_a_time(hooks: Hooks) -> None:
    """E6.2: whether somebody is well again is asked by one delivery, and not by a handful."""
    await hooks.subscribe(NOBODY, max_in_flight=5)
    rows(hooks.dsn, "UPDATE duly.webhook_subscriptions SET failures = 1, failing_since = duly.now()")
    await hooks.emit(4)
    await fan_out(hooks)
    assert sorted(delivery.status for delivery in await hooks.deliveries()) == ["QUEUED", *["WAITING"] * 4]


async def test_an_attempts_row_says_all_that_happened(hooks: Hooks) -> None:
    """E6.1: status, HTTP status, latency and error, each of its own attempt."""
    made = await hooks.subscribe(NOBODY)
    await hooks.emit()
    await fan_out(hooks)
    answers = (Answer("status", 1234, 500, "192.0.2.1", {"via": "x"}, "no"), Answer(None, 56, 204, "192.0.2.2"))
    sent = [
        Sent(
            Task(delivery.id, 1, 0, made.id, NOBODY, 15, NOW, None, []), NOW, {"X-Event-Type": "order.placed"}, 10,
            answer,
        )
        for delivery, answer in zip(await hooks.deliveries(), answers, strict=True)
    ]  # fmt: skip
    async with hooks.db.transaction() as tx:
        await record(tx, sent, most=5, disable_after=timedelta(days=5))
    found = rows(
        hooks.dsn,
        "SELECT delivery_id, number, outcome, http_status, error, latency_ms, address, response_excerpt, started_at "
        "FROM duly.webhook_attempts ORDER BY latency_ms DESC",
    )
    assert found == [
        (sent[0].task.id, 1, "FAILED", 500, "status", 1234, "192.0.2.1", "no", NOW),
        (sent[1].task.id, 1, "DELIVERED", 204, None, 56, "192.0.2.2", "", NOW),
    ]


async def test_while_the_circuit_is_open_nothing_is_admitted(hooks: Hooks) -> None:
    """Not even the one at a time that somebody who fails may have."""
    await hooks.subscribe(NOBODY)
    rows(hooks.dsn, OPEN_CIRCUIT)
    await fan_out(hooks)
    assert (await hooks.delivery()).status == "WAITING"
    assert value(hooks.dsn, f"SELECT count(*) FROM duly.jobs WHERE name = '{DELIVER_JOB}'") == 0


async def test_what_was_admitted_before_the_circuit_opened_waits_until_it_closes(hooks: Hooks) -> None:
    async with subscriber() as one:
        made = await hooks.subscribe(one.url)
        await fan_out(hooks)
        rows(hooks.dsn, OPEN_CIRCUIT)
        await hooks.drain()
        assert ((await hooks.delivery()).status, one.requests) == ("WAITING", [])
        await hooks.resume(made.id)
        await hooks.drain()
        assert ((await hooks.delivery()).status, len(one.requests)) == ("DELIVERED", 1)


async def test_a_new_url_starts_with_a_clean_record_and_nothing_else_does(hooks: Hooks) -> None:
    made = await hooks.subscribe(NOBODY)
    rows(hooks.dsn, OPEN_CIRCUIT)
    failures = []
    edits: list[dict[str, Any]] = [{"max_in_flight": 2}, {"url": NOBODY}, {"url": f"{NOBODY}/new"}]
    for changes in edits:
        async with hooks.db.transaction() as tx:
            after = await subscriptions.edit_subscription(tx, hooks.settings, made.id, actor="test", **changes)
        failures.append(after.failures)
    assert failures == [5, 5, 0]
    assert (after.failing_since, after.open_until) == (None, None)


async def test_who_is_deleted_leaves_no_alert_and_whoever_stays_keeps_theirs(hooks: Hooks) -> None:
    gone, stays = await hooks.subscribe(NOBODY), await hooks.subscribe(NOBODY)
    kinds = ("webhook_disabled", "webhook_failed")
    for id in (gone.id, stays.id):
        for kind in kinds:
            rows(hooks.dsn, "SELECT duly.alert(%(kind)s, %(id)s, 'm')", {"kind": kind, "id": str(id)})
    async with hooks.db.transaction() as tx:
        await subscriptions.delete_subscription(tx, hooks.settings, gone.id, actor="test")
    assert sorted(hooks.alerts()) == [(kind, str(stays.id)) for kind in kinds]


async def test_one_caller_has_so_many_subscriptions_and_no_more(hooks: Hooks) -> None:
    """Those that are deleted do not count, and nobody else's do."""
    rows(
        hooks.dsn,
        """INSERT INTO duly.webhook_subscriptions (id, owner, url, patterns, created_at, updated_at)
        SELECT gen_random_uuid(), %(owner)s, 'https://example.com/', '{*}', duly.now(), duly.now()
        FROM generate_series(1, %(count)s)""",
        {"owner": OWNER, "count": subscriptions.MOST_OWN - 1},
    )
    last = await hooks.subscribe(NOBODY)
    with pytest.raises(Conflict, match="at most 1000"):
        await hooks.subscribe(NOBODY)
    await hooks.subscribe(NOBODY, owner="somebody else")
    async with hooks.db.transaction() as tx:
        await subscriptions.delete_subscription(tx, hooks.settings, last.id, actor="test")
    await hooks.subscribe(NOBODY)
