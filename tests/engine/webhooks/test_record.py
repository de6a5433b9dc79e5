"""What is written of an attempt when somebody else has the delivery meanwhile; and who gets nothing at all."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from duly.testing import drain
from duly.webhooks import subscriptions
from duly.webhooks.admit import DELIVER_JOB
from duly.webhooks.record import SUPERSEDED, Sent, Task, record
from duly.webhooks.sender import Answer
from tests.engine.webhooks.hooks import Hooks
from tests.engine.webhooks.subscriber import answering, subscriber
from tests.support import rows, value

NOBODY = "http://127.0.0.1:8009/hook"
NOW = datetime(2026, 5, 4, tzinfo=UTC)
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


async def test_a_deleted_subscription_gets_no_delivery_while_others_do(hooks: Hooks) -> None:
    gone, stays = await hooks.subscribe(NOBODY), await hooks.subscribe(NOBODY)
    async with hooks.db.transaction() as tx:
        await subscriptions.delete_subscription(tx, hooks.settings, gone.id, actor="test")
    await fan_out(hooks)
    assert rows(hooks.dsn, "SELECT subscription_id FROM duly.webhook_deliveries") == [(stays.id,)]


async def test_while_the_circuit_is_open_nothing_is_admitted(hooks: Hooks) -> None:
    """Not even the one at a time that somebody who fails may have."""
    await hooks.subscribe(NOBODY)
    rows(hooks.dsn, "UPDATE duly.webhook_subscriptions SET failures = 5, failing_since = duly.now(), "
                    "open_until = duly.now() + interval '1 hour'")  # fmt: skip
    await fan_out(hooks)
    assert (await hooks.delivery()).status == "WAITING"
    assert value(hooks.dsn, f"SELECT count(*) FROM duly.jobs WHERE name = '{DELIVER_JOB}'") == 0
