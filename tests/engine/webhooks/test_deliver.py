"""What a subscriber gets, and when it is tried again (E6.1, E6.2)."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest

from duly.errors import Conflict
from duly.testing import BusinessClock, drain
from duly.webhooks import deliveries, subscriptions
from duly.webhooks.model import MOST_TRIES, RETRY_WAITS
from tests.engine.jobs.witness import until
from tests.engine.webhooks.hooks import SECRET, Hooks, make_settings
from tests.engine.webhooks.subscriber import Request, answering, subscriber
from tests.support import rows, value

START = datetime(2026, 3, 1, 9, tzinfo=UTC)
WAITING = """
SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'
"""
WAITS = [60, 300, 1800, 6 * 3600, 24 * 3600, 3 * 86400, 7 * 86400]


def standard_signatures(secret: str, request: Request) -> str:
    """What the Standard Webhooks specification says, written anew."""
    key = base64.b64decode(secret.removeprefix("whsec_"))
    signed = f"{request.headers['webhook-id']}.{request.headers['webhook-timestamp']}.".encode() + request.body
    return "v1," + base64.b64encode(hmac.digest(key, signed, "sha256")).decode()


async def test_a_matching_event_is_delivered_signed_and_recorded(hooks: Hooks, clock: BusinessClock) -> None:
    """E6.1: body, both kinds of headers, and the attempt's row."""
    clock.freeze(START)
    async with subscriber(answering(202, body=b"thanks")) as one:
        made = await hooks.subscribe(one.url)
        (event_id,) = await hooks.emit()
        await hooks.emit(type="parcel.sent")
        await hooks.drain()
    (request,) = one.requests
    body = json.loads(request.body)
    assert (body["specversion"], body["id"], body["type"], body["data"]) == (
        "1.0", str(event_id), "order.placed", {"n": 0, "price": "1.50"},
    )  # fmt: skip
    delivery = await hooks.delivery()
    headers = request.headers
    assert (request.method, request.target) == ("POST", "/hook")
    assert headers["x-signature"] == hmac.new(SECRET.encode(), request.body, hashlib.sha256).hexdigest()
    assert headers["webhook-signature"] == standard_signatures(SECRET, request)
    assert headers["webhook-timestamp"] == str(int(START.timestamp()))
    assert headers["x-event-id"] == headers["webhook-id"] == str(event_id)
    assert (headers["x-event-type"], headers["x-delivery-id"]) == ("order.placed", str(delivery.id))
    assert headers["x-correlation-id"] == body["correlationid"]
    assert headers["user-agent"].startswith("duly/")
    assert "x-signature-previous" not in headers
    assert (delivery.status, delivery.attempts, delivery.last_http_status) == ("DELIVERED", 1, 202)
    assert delivery.finished_at == START
    (attempt,) = await hooks.attempts(delivery.id)
    assert (attempt.outcome, attempt.http_status, attempt.error, attempt.address) == (
        "DELIVERED", 202, None, "127.0.0.1",
    )  # fmt: skip
    assert (attempt.response_excerpt, attempt.request_bytes) == ("thanks", len(request.body))
    assert attempt.request_headers["X-Signature"] == headers["x-signature"]
    assert (made.status, hooks.jobs()) == ("ACTIVE", [])


async def test_an_event_that_any_of_the_patterns_fits_is_delivered_once(hooks: Hooks) -> None:
    """E6.1: the first pattern or the last, or all of them."""
    async with subscriber() as one:
        await hooks.subscribe(one.url, "parcel.*", "order.*", "order.placed")
        for kind in ("order.placed", "parcel.sent", "shop.closed"):
            await hooks.emit(type=kind)
        await hooks.drain()
    assert sorted(request.headers["x-event-type"] for request in one.requests) == ["order.placed", "parcel.sent"]


async def test_there_are_eight_tries_at_the_promised_moments_and_then_an_alert(
    hooks: Hooks, clock: BusinessClock
) -> None:
    """E6.2: seven waits, so seven retries after the first try; the same bytes and ids each time."""
    clock.freeze(START)
    assert [wait.total_seconds() for wait in RETRY_WAITS] == WAITS
    async with subscriber(answering(500)) as one:
        made = await hooks.subscribe(one.url)
        await hooks.emit()
        await hooks.drain()
        for count, wait in enumerate(WAITS, 1):
            assert len(one.requests) == count
            delivery = await hooks.delivery()
            assert (delivery.status, delivery.tries) == ("RETRYING", count)
            assert delivery.next_attempt_at == clock.now() + timedelta(seconds=wait)
            clock.advance(seconds=wait - 1)
            await hooks.drain()
            assert len(one.requests) == count
            clock.advance(seconds=1)
            if count >= 5:  # the circuit is open since the fifth failure, for less than the wait
                await hooks.drain()
            await hooks.drain()
        assert len(one.requests) == MOST_TRIES == 8
        assert len(set(one.bodies)) == 1
        assert len({request.headers["x-delivery-id"] for request in one.requests}) == 1
        assert len({request.headers["webhook-id"] for request in one.requests}) == 1
    delivery = await hooks.delivery()
    assert (delivery.status, delivery.attempts, delivery.last_error) == ("PERMANENTLY_FAILED", 8, "status")
    assert [attempt.number for attempt in await hooks.attempts(delivery.id)] == list(range(1, 9))
    assert ("webhook_failed", str(made.id)) in hooks.alerts()
    assert hooks.jobs() == []


async def test_every_try_is_signed_with_its_own_time(hooks: Hooks, clock: BusinessClock) -> None:
    """E6.1: a receiver refuses what was signed more than a few minutes ago, and retries come days later."""
    clock.freeze(START)
    async with subscriber(answering(500)) as one:
        await hooks.subscribe(one.url)
        await hooks.emit()
        await hooks.drain()
        clock.advance(minutes=1)
        await hooks.drain()
    assert [request.headers["webhook-timestamp"] for request in one.requests] == [
        str(int(START.timestamp())), str(int(START.timestamp()) + 60),
    ]  # fmt: skip
    for request in one.requests:
        assert request.headers["webhook-signature"] == standard_signatures(SECRET, request)


@pytest.mark.parametrize(
    ("status", "header", "seconds"),
    [
        (429, "Retry-After: 3600\r\n", 3600),
        (503, "Retry-After: 30\r\n", 60),
        (503, "Retry-After: 9999999\r\n", 86400),
        (500, "Retry-After: 3600\r\n", 60),
        (429, "Date: Sun, 01 Mar 2026 09:00:00 GMT\r\nRetry-After: Sun, 01 Mar 2026 09:10:00 GMT\r\n", 600),
        (429, "Retry-After: soon\r\n", 60),
    ],
)
async def test_retry_after_may_lengthen_a_wait_up_to_a_day(
    hooks: Hooks, clock: BusinessClock, status: int, header: str, seconds: int
) -> None:
    clock.freeze(START)
    async with subscriber(answering(status, headers=header)) as one:
        await hooks.subscribe(one.url)
        await hooks.emit()
        await hooks.drain()
    assert (await hooks.delivery()).next_attempt_at == START + timedelta(seconds=seconds)


async def test_five_failures_in_a_row_open_the_circuit_and_one_probe_closes_it(
    hooks: Hooks, clock: BusinessClock
) -> None:
    """E6.2: while it is open nothing is sent; then one; when that one is taken, all the others follow."""
    clock.freeze(START)
    async with subscriber(answering(500)) as one:
        made = await hooks.subscribe(one.url)
        await hooks.emit(40)
        await hooks.drain()
        assert len(one.requests) == 5
        standing = await hooks.subscription(made.id)
        assert standing.failures == 5
        assert standing.open_until is not None
        assert 30 <= (standing.open_until - START).total_seconds() <= 37.5
        clock.advance(seconds=29)
        await hooks.drain()
        assert len(one.requests) == 5
        clock.advance(seconds=9)
        await hooks.drain()
        assert len(one.requests) == 6
        standing = await hooks.subscription(made.id)
        assert standing.open_until is not None
        assert 60 <= (standing.open_until - clock.now()).total_seconds() <= 75
        one.behave = answering(200)
        clock.advance(seconds=76)
        await hooks.drain()
        standing = await hooks.subscription(made.id)
        assert (standing.failures, standing.open_until, standing.failing_since) == (0, None, None)
    assert {delivery.status for delivery in await hooks.deliveries()} == {"DELIVERED"}
    assert len(one.requests) == 46


async def test_the_circuit_stays_open_for_an_hour_at_most(hooks: Hooks, clock: BusinessClock) -> None:
    clock.freeze(START)
    async with subscriber(answering(500)) as one:
        made = await hooks.subscribe(one.url)
        await hooks.emit(100)
        await hooks.drain()
        waits = []
        for _ in range(12):
            standing = await hooks.subscription(made.id)
            assert standing.open_until is not None
            waits.append((standing.open_until - clock.now()).total_seconds())
            clock.advance(seconds=waits[-1] + 1)
            seen = len(one.requests)
            await hooks.drain()
            assert len(one.requests) == seen + 1
    assert max(waits) <= 4500
    assert waits[-1] >= 3600


async def test_days_of_nothing_but_failures_disable_and_enabling_replays_in_order(
    hooks: Hooks, clock: BusinessClock
) -> None:
    """E6.2: events go on being kept; whoever enables it again gets all of them, oldest first."""
    clock.freeze(START)
    async with subscriber(answering(500)) as one:
        made = await hooks.subscribe(one.url, max_in_flight=1)
        await hooks.emit(10, aggregate="before")
        await hooks.drain()
        for _ in range(6 * 24):
            clock.advance(hours=1, minutes=20)
            await hooks.drain()
            if (await hooks.subscription(made.id)).status == "DISABLED":
                break
        standing = await hooks.subscription(made.id)
        assert standing.status == "DISABLED"
        assert standing.disabled_reason == "nothing but failures for 5 days"
        # With the first failure after five days; by then the deliveries are tried hours apart, a day at most.
        assert timedelta(days=5) <= clock.now() - START <= timedelta(days=6)
        assert ("webhook_disabled", str(made.id)) in hooks.alerts()
        seen = len(one.requests)
        await hooks.emit(10, aggregate="after")
        await hooks.drain()
        clock.advance(days=8)
        await hooks.drain()
        assert len(one.requests) == seen
        assert len(await hooks.deliveries(status="WAITING")) == 20
        one.behave = answering(200)
        one.requests.clear()
        await hooks.resume(made.id)
        await hooks.drain()
    sent = [json.loads(body)["subject"] for body in one.bodies]
    assert sent == [f"before-{n}" for n in range(10)] + [f"after-{n}" for n in range(10)]
    assert ("webhook_disabled", str(made.id)) not in hooks.alerts()
    assert (await hooks.subscription(made.id)).status == "ACTIVE"


async def test_gone_disables_at_once_and_keeps_the_event(hooks: Hooks, clock: BusinessClock) -> None:
    clock.freeze(START)
    async with subscriber(answering(410)) as one:
        made = await hooks.subscribe(one.url)
        await hooks.emit()
        await hooks.drain()
        assert (await hooks.subscription(made.id)).status == "DISABLED"
        assert (await hooks.delivery()).status == "WAITING"
        one.behave = answering(200)
        await hooks.resume(made.id)
        await hooks.drain()
        assert (await hooks.delivery()).status == "DELIVERED"
    assert len(one.requests) == 2


async def test_while_paused_nothing_new_is_sent_and_everything_is_kept(hooks: Hooks, clock: BusinessClock) -> None:
    clock.freeze(START)
    async with subscriber(answering(500)) as one:
        made = await hooks.subscribe(one.url)
        await hooks.emit()
        await hooks.drain()
        await hooks.pause(made.id)
        with pytest.raises(Conflict):
            await hooks.pause(made.id)
        await hooks.emit(3)
        clock.advance(days=1)
        await hooks.drain()
        assert len(one.requests) == 1
        assert {delivery.status for delivery in await hooks.deliveries()} == {"WAITING"}
        one.behave = answering(200)
        await hooks.resume(made.id)
        await hooks.drain()
    assert len(one.requests) == 5
    first = (await hooks.deliveries())[-1]
    assert (first.status, first.attempts, first.tries) == ("DELIVERED", 2, 2)


async def test_redelivery_sends_what_is_over_again_with_eight_tries_of_its_own(
    hooks: Hooks, clock: BusinessClock
) -> None:
    clock.freeze(START)
    async with subscriber() as one:
        await hooks.subscribe(one.url)
        await hooks.emit()
        await hooks.drain()
        delivery = await hooks.delivery()
        assert (await hooks.redeliver(delivery.id)).status == "QUEUED"
        with pytest.raises(Conflict):
            await hooks.redeliver(delivery.id)
        one.behave = answering(500)
        await hooks.drain()
        again = await hooks.delivery()
        assert (again.status, again.attempts, again.tries, again.redeliveries) == ("RETRYING", 2, 1, 1)
        one.behave = answering(200)
        assert (await hooks.redeliver(delivery.id)).status == "QUEUED"  # now, not in a minute
        await hooks.drain()
        again = await hooks.delivery()
        assert (again.status, again.tries) == ("DELIVERED", 2)  # one that waited for its retry goes on counting
        clock.advance(days=1)
        await hooks.drain()
    assert len(one.requests) == 3
    assert [attempt.number for attempt in await hooks.attempts(delivery.id)] == [1, 2, 3]


async def test_a_range_of_failures_is_redelivered_in_batches(hooks: Hooks, clock: BusinessClock) -> None:
    clock.freeze(START)
    async with subscriber() as one:
        made = await hooks.subscribe(one.url)
        await hooks.emit(7)
        await hooks.drain()
        rows(hooks.dsn, "UPDATE duly.webhook_deliveries SET status = 'PERMANENTLY_FAILED' WHERE number % 2 = 1")
        one.requests.clear()
        found = []
        after: int | None = 0
        while after is not None:
            async with hooks.db.transaction() as tx:
                count, after = await deliveries.redeliver_range(
                    tx, hooks.settings, made.id, since=START, until=START + timedelta(seconds=1), after=after or 0,
                    limit=2, actor="test",
                )  # fmt: skip
            found.append(count)
        await hooks.drain()
    assert found == [2, 2, 0]
    assert len(one.requests) == 4
    assert {delivery.status for delivery in await hooks.deliveries()} == {"DELIVERED"}


async def test_an_alert_is_over_when_the_last_of_what_failed_is_sent_again(hooks: Hooks) -> None:
    made = await hooks.subscribe("http://127.0.0.1:8009/hook")
    await hooks.emit(2)
    handlers = {name: handler for name, handler in hooks.handlers.items() if name != "duly.deliver-webhook"}
    await drain(hooks.db, handlers)
    rows(hooks.dsn, "UPDATE duly.webhook_deliveries SET status = 'PERMANENTLY_FAILED', finished_at = duly.now()")
    rows(hooks.dsn, "SELECT duly.alert('webhook_failed', %(id)s, 'm')", {"id": str(made.id)})
    first, second = await hooks.deliveries()
    await hooks.redeliver(first.id)
    assert hooks.alerts() == [("webhook_failed", str(made.id))]
    await hooks.redeliver(second.id)
    assert hooks.alerts() == []


async def test_a_test_event_goes_to_one_subscription_and_to_nobody_else(hooks: Hooks) -> None:
    async with subscriber() as one, subscriber() as other:
        made = await hooks.subscribe(one.url, "parcel.sent")
        await hooks.subscribe(other.url, "*")
        async with hooks.db.transaction() as tx:
            await deliveries.send_test(tx, hooks.settings, made.id, actor="test")
        await hooks.drain()
    assert [request.headers["x-event-type"] for request in one.requests] == ["webhook.test"]
    assert other.requests == []


async def test_while_two_secrets_are_valid_both_sign(hooks: Hooks, clock: BusinessClock) -> None:
    """E6.1: a receiver may change its secret without losing anything."""
    clock.freeze(START)
    newer = "a-secret-that-is-no-base64!"
    async with subscriber() as one:
        made = await hooks.subscribe(one.url)
        async with hooks.db.transaction() as tx:
            await subscriptions.rotate_secret(tx, hooks.keyring, made.id, secret=newer, overlap_hours=2, actor="test")
        await hooks.emit()
        await hooks.drain()
        clock.advance(hours=1, minutes=59)
        await hooks.emit()
        await hooks.drain()
        clock.advance(minutes=1)
        await hooks.emit()
        await hooks.drain()
    both, still, alone = one.requests
    old_mac = standard_signatures(SECRET, both)
    signed = f"{both.headers['webhook-id']}.{both.headers['webhook-timestamp']}.".encode() + both.body
    new_mac = "v1," + base64.b64encode(hmac.digest(newer.encode(), signed, "sha256")).decode()
    assert both.headers["webhook-signature"] == f"{new_mac} {old_mac}"
    assert both.headers["x-signature"] == hmac.new(newer.encode(), both.body, hashlib.sha256).hexdigest()
    assert both.headers["x-signature-previous"] == hmac.new(SECRET.encode(), both.body, hashlib.sha256).hexdigest()
    assert "x-signature-previous" in still.headers
    assert " " not in alone.headers["webhook-signature"]
    assert "x-signature-previous" not in alone.headers


async def test_a_third_secret_ends_the_first_at_once(hooks: Hooks) -> None:
    made = await hooks.subscribe("http://127.0.0.1:8009/hook")
    for _ in range(2):
        async with hooks.db.transaction() as tx:
            created = await subscriptions.rotate_secret(tx, hooks.keyring, made.id, actor="test")
    assert created.secret is not None
    assert created.subscription.secrets == [3, 2]


async def test_a_deleted_subscription_gets_nothing_and_its_secrets_are_gone(hooks: Hooks, clock: BusinessClock) -> None:
    clock.freeze(START)
    async with subscriber(answering(500)) as one:
        made = await hooks.subscribe(one.url)
        await hooks.emit(2)
        await hooks.drain()
        async with hooks.db.transaction() as tx:
            await subscriptions.delete_subscription(tx, hooks.settings, made.id, actor="test")
        assert value(hooks.dsn, "SELECT count(*) FROM duly.webhook_secrets") == 0
        assert value(hooks.dsn, "SELECT enabled FROM duly.consumers WHERE name = 'duly.webhooks'") is False
        await hooks.emit(2)
        clock.advance(days=1)
        await hooks.drain()
        assert len(one.requests) == 2
    assert {delivery.status for delivery in await hooks.deliveries()} == {"CANCELLED"}


async def test_an_event_of_before_the_subscription_is_not_for_it(hooks: Hooks, clock: BusinessClock) -> None:
    clock.freeze(START)
    async with subscriber() as one, subscriber() as late:
        await hooks.subscribe(one.url)
        await hooks.emit()
        clock.advance(seconds=1)
        await hooks.subscribe(late.url)
        await hooks.drain()
    assert (len(one.requests), late.requests) == (1, [])


async def test_events_that_nobody_wants_make_no_job(hooks: Hooks) -> None:
    """A database without subscriptions pays nothing for webhooks."""
    await hooks.emit(3)
    assert await hooks.drain() == 0
    await hooks.subscribe("http://127.0.0.1:8009/hook", "parcel.*")
    await hooks.emit(3)
    assert await hooks.drain() == 0


async def test_an_event_that_left_the_history_is_given_up(hooks: Hooks, clock: BusinessClock) -> None:
    clock.freeze(START)
    async with subscriber(answering(500)) as one:
        made = await hooks.subscribe(one.url)
        await hooks.emit()
        await hooks.drain()
        rows(hooks.dsn, "DELETE FROM duly.events")
        clock.advance(minutes=1)
        await hooks.drain()
    delivery = await hooks.delivery()
    assert (delivery.status, delivery.last_error, len(one.requests)) == ("PERMANENTLY_FAILED", "event_gone", 1)
    assert ("webhook_failed", str(made.id)) in hooks.alerts()


async def test_an_event_that_left_the_history_is_nobodys_alert_when_its_subscription_is_just_being_deleted(
    hooks: Hooks,
) -> None:
    made = await hooks.subscribe("https://nobody.example/hook")
    await hooks.emit()
    handlers = {name: handler for name, handler in hooks.handlers.items() if name != "duly.deliver-webhook"}
    await drain(hooks.db, handlers)
    rows(hooks.dsn, "DELETE FROM duly.events")
    async with hooks.db.transaction() as tx:
        await subscriptions.delete_subscription(tx, hooks.settings, made.id, actor="test")
        draining = asyncio.create_task(hooks.drain())
        await until(lambda: value(hooks.dsn, WAITING) == 1, what="the delivery's end waits for the deletion")
    await draining
    assert rows(hooks.dsn, "SELECT last_error FROM duly.webhook_deliveries") == [("event_gone",)]
    assert hooks.alerts() == []


async def test_a_lost_job_is_found_by_the_sweep(hooks: Hooks) -> None:
    """An operator who cancels a delivery's job does not lose the delivery."""
    async with subscriber() as one:
        await hooks.subscribe(one.url)
        await hooks.emit(3)
        handlers = {name: handler for name, handler in hooks.handlers.items() if name != "duly.deliver-webhook"}
        await drain(hooks.db, handlers)
        rows(hooks.dsn, "DELETE FROM duly.jobs")
        await hooks.drain()
        assert one.requests == []
        rows(hooks.dsn, "SELECT duly.schedule('duly.sweep-webhooks')")
        await hooks.drain()
    assert len(one.requests) == 3


@pytest.mark.parametrize("is_deleted", [False, True])
async def test_a_delivery_whose_job_is_a_dead_letter_is_given_up_and_somebody_hears_of_it(
    hooks: Hooks, is_deleted: bool
) -> None:
    """Its worker died over it time and again: another job would only die again. Nobody can repair what is deleted."""
    async with subscriber() as one:
        made = await hooks.subscribe(one.url)
        await hooks.emit()
        handlers = {name: handler for name, handler in hooks.handlers.items() if name != "duly.deliver-webhook"}
        await drain(hooks.db, handlers)
        rows(
            hooks.dsn,
            """WITH gone AS (DELETE FROM duly.jobs WHERE name = 'duly.deliver-webhook' RETURNING *)
            INSERT INTO duly.dead_letters (id, name, entity_id, payload, priority, due_at, created_at, original_delay,
                                           retry_count, source, reason, error, error_kind, buried_at)
            SELECT id, name, entity_id, payload, priority, duly.now(), duly.now(), '0', 20, 'Deferred', 'worker_died',
                   'died', 'WorkerDied', duly.now() FROM gone RETURNING id""",
        )
        if is_deleted:
            async with hooks.db.transaction() as tx:
                await subscriptions.delete_subscription(tx, hooks.settings, made.id, actor="test")
        rows(hooks.dsn, "SELECT duly.schedule('duly.sweep-webhooks')")
        await hooks.drain()
    assert one.requests == []
    ended = rows(hooks.dsn, "SELECT status, last_error FROM duly.webhook_deliveries")
    assert ended == [("PERMANENTLY_FAILED", "dead_letter")]
    assert (("webhook_failed", str(made.id)) in hooks.alerts()) != is_deleted


async def test_what_is_old_is_forgotten_and_what_is_under_way_is_not(hooks: Hooks, clock: BusinessClock) -> None:
    clock.freeze(START)
    async with subscriber() as one:
        made = await hooks.subscribe(one.url)
        await hooks.emit(5)
        await hooks.drain()
        one.behave = answering(500)
        await hooks.emit()
        await hooks.drain()
        rows(hooks.dsn, "UPDATE duly.webhook_deliveries SET next_attempt_at = 'infinity' WHERE status = 'RETRYING'")
        rows(hooks.dsn, "UPDATE duly.jobs SET run_at = 'infinity'")
        clock.advance(days=31)
        rows(hooks.dsn, "SELECT duly.schedule('duly.forget-webhooks')")
        await hooks.drain()
        assert [delivery.status for delivery in await hooks.deliveries()] == ["RETRYING"]
        assert value(hooks.dsn, "SELECT count(*) FROM duly.webhook_attempts") == 1
        async with hooks.db.transaction() as tx:
            await subscriptions.delete_subscription(tx, hooks.settings, made.id, actor="test")
        rows(hooks.dsn, "SELECT duly.schedule('duly.forget-webhooks')")
        await hooks.drain()
    assert value(hooks.dsn, "SELECT count(*) FROM duly.webhook_subscriptions") == 0
    assert value(hooks.dsn, "SELECT count(*) FROM duly.webhook_attempts") == 0


async def test_the_log_of_a_deleted_subscription_is_kept_as_long_as_any(hooks: Hooks, clock: BusinessClock) -> None:
    """A subscriber decides that nothing is sent, not what is remembered; its secrets are gone at once."""
    clock.freeze(START)
    async with subscriber() as one:
        made, empty = await hooks.subscribe(one.url), await hooks.subscribe(one.url, "parcel.*")
        stays = await hooks.subscribe(one.url, "parcel.*")
        await hooks.emit(3)
        await hooks.drain()
        one.behave = answering(500)
        await hooks.emit()
        await hooks.drain()
        async with hooks.db.transaction() as tx:
            for subscription in (made, empty):
                await subscriptions.delete_subscription(tx, hooks.settings, subscription.id, actor="test")
    assert value(hooks.dsn, "SELECT array_agg(subscription_id) FROM duly.webhook_secrets") == [stays.id]

    async def clean() -> tuple[int, int, list[UUID]]:
        rows(hooks.dsn, "UPDATE duly.jobs SET run_at = 'infinity'")
        rows(hooks.dsn, "SELECT duly.schedule('duly.forget-webhooks')")
        await hooks.drain()
        attempts = value(hooks.dsn, "SELECT count(*) FROM duly.webhook_attempts")
        left = [id for (id,) in rows(hooks.dsn, "SELECT id FROM duly.webhook_subscriptions ORDER BY id")]
        return len(await hooks.deliveries()), attempts, left

    assert await clean() == (4, 4, [made.id, stays.id])
    clock.advance(days=29)
    assert await clean() == (4, 4, [made.id, stays.id])
    clock.advance(days=2)
    assert await clean() == (0, 0, [stays.id]), "also what was under way when it was deleted"


async def test_what_is_old_and_just_being_sent_again_is_not_forgotten(hooks: Hooks, clock: BusinessClock) -> None:
    clock.freeze(START)
    async with subscriber() as one:
        await hooks.subscribe(one.url)
        await hooks.emit()
        await hooks.drain()
        clock.advance(days=31)
        id = (await hooks.delivery()).id
        rows(hooks.dsn, "SELECT duly.schedule('duly.forget-webhooks')")
        async with hooks.db.transaction() as tx:
            await deliveries.redeliver(tx, hooks.settings, id, actor="test")
            await hooks.drain()  # the clean-up: it sees the delivery as it was, and does not wait for it
            assert value(hooks.dsn, "SELECT outcome FROM duly.executions WHERE name = 'duly.forget-webhooks'") == "done"
        await hooks.drain()
        assert len(one.requests) == 2
    assert (await hooks.delivery()).redeliveries == 1


async def test_attempts_cannot_be_changed_or_deleted(hooks: Hooks) -> None:
    async with subscriber() as one:
        await hooks.subscribe(one.url)
        await hooks.emit()
        await hooks.drain()
    for statement in ("UPDATE duly.webhook_attempts SET number = 9", "DELETE FROM duly.webhook_attempts"):
        with pytest.raises(Exception, match="insert-only"):
            rows(hooks.dsn, statement)


async def test_two_changes_of_who_wants_what_at_once_keep_both(hooks: Hooks) -> None:
    """Each must see the other's patterns in the union that the relay reads."""
    await asyncio.gather(
        *(hooks.subscribe("http://127.0.0.1:8009/hook", f"kind{n}.*", secret=SECRET) for n in range(8))
    )
    patterns = value(hooks.dsn, "SELECT patterns FROM duly.consumers WHERE name = 'duly.webhooks'")
    assert sorted(patterns) == sorted(f"kind{n}.*" for n in range(8))


async def test_more_patterns_than_a_consumer_may_have_become_all(hooks: Hooks) -> None:
    for n in range(3):
        await hooks.subscribe("http://127.0.0.1:8009/hook", *(f"k{n}.{m}" for m in range(40)))
    assert value(hooks.dsn, "SELECT patterns FROM duly.consumers WHERE name = 'duly.webhooks'") == ["*"]


async def test_disabling_days_are_a_setting(hooks: Hooks, clock: BusinessClock) -> None:
    hooks = Hooks(hooks.db, hooks.dsn, make_settings(webhook_disable_days=0.01))
    clock.freeze(START)
    async with subscriber(answering(500)) as one:
        made = await hooks.subscribe(one.url)
        await hooks.emit()
        await hooks.drain()
        clock.advance(minutes=15)
        await hooks.drain()
    assert (await hooks.subscription(made.id)).status == "DISABLED"
