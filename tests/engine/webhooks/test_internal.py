"""Internal events: for consumers here, and never for whoever subscribed from outside (E6.1, F13)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from duly import Duly, Event, EventBody, Tx, emit
from duly.errors import Invalid
from duly.messages import _INTERNAL, declared_events, is_internal
from duly.testing import drain
from duly.webhooks import deliveries, subscriptions
from tests.engine.webhooks.hooks import Hooks
from tests.engine.webhooks.subscriber import answering, subscriber
from tests.engine.webhooks.test_api import NEW, ROOT, Served, api
from tests.support import rows, value

__all__ = ["api"]


class Suspected(EventBody, type="order.suspected", topic="shop", aggregate="order_id", internal=True):
    """Somebody looks at it."""

    order_id: str


class StillSuspected(Suspected, type="order.still_suspected"):
    """What follows from an internal one is internal."""


class Shipped(EventBody, type="order.shipped", topic="shop", aggregate="order_id"):
    """Everybody may know."""

    order_id: str


@pytest.fixture
def becoming_internal() -> Iterator[None]:
    """``order.placed`` is public when a test begins, and again afterwards."""
    yield
    _INTERNAL.discard("order.placed")


def test_a_class_says_so_and_one_function_lists_them() -> None:
    declared = declared_events()
    assert declared["order.suspected"] is Suspected
    assert [kind for kind in ("order.suspected", "order.still_suspected", "order.shipped") if is_internal(kind)] == [
        "order.suspected", "order.still_suspected",
    ]  # fmt: skip
    assert list(declared) == sorted(declared)
    assert not is_internal("never.declared")


@pytest.mark.parametrize("pattern", ["*", "order.*", "shop", "s*", "order.sus*", "order.*ed"])
async def test_no_pattern_fits_an_internal_event(hooks: Hooks, pattern: str) -> None:
    """E6.1: neither by its type nor by its topic; from Python, by name, or from SQL."""
    async with subscriber(answering(200)) as one:
        await hooks.subscribe(one.url, pattern)
        async with hooks.db.transaction() as tx:
            await emit(tx, Suspected(order_id="1"), Shipped(order_id="1"))
        await hooks.emit(type="order.suspected")
        rows(hooks.dsn, "SELECT duly.emit('order.still_suspected', 'shop', '1', '{\"secret\": 1}')")
        await hooks.drain()
    types = [request.headers["x-event-type"] for request in one.requests]
    assert types == ([] if pattern == "order.sus*" else ["order.shipped"])
    assert value(hooks.dsn, "SELECT count(*) FROM duly.webhook_deliveries") == len(types)


async def test_a_consumer_of_ours_hears_it(hooks: Hooks) -> None:
    app, heard = Duly(), []

    @app.consumer("inside", on="order.*")
    async def inside(event: Event, tx: Tx) -> None:
        heard.append(event.type)

    await app.prepare(hooks.db)
    async with hooks.db.transaction() as tx:
        await emit(tx, Suspected(order_id="1"))
    await drain(hooks.db, app.handlers)
    assert heard == ["order.suspected"]


async def test_a_subscription_that_names_one_is_refused(api: Served) -> None:
    """F13: 422, and it says which; at the beginning and at a change."""
    asked = {**NEW, "events": ["order.shipped", "order.suspected"]}
    refused = await api.alice("POST", ROOT, asked)
    assert (refused.status_code, refused.json()["type"]) == (422, "urn:duly:problem:internal-event")
    assert "order.suspected" in refused.json()["detail"]
    assert refused.json()["errors"][0]["path"] == "$.events[1]"
    assert value(api.hooks.dsn, "SELECT count(*) FROM duly.webhook_subscriptions") == 0
    made = (await api.alice("POST", ROOT, NEW)).json()
    changed = await api.alice("PATCH", f"{ROOT}/{made['id']}", {"events": ["order.still_suspected"]})
    assert (changed.status_code, "order.still_suspected" in changed.text) == (422, True)
    assert (await api.alice("GET", f"{ROOT}/{made['id']}")).json()["events"] == NEW["events"]


async def test_an_operator_is_refused_too(hooks: Hooks) -> None:
    with pytest.raises(Invalid, match="order\\.suspected"):
        await hooks.subscribe("https://hooks.example.com/", "order.suspected")


@pytest.mark.usefixtures("becoming_internal")
async def test_what_was_public_when_it_was_queued_is_not_sent_any_more(hooks: Hooks) -> None:
    """A release makes an event internal while deliveries wait: they end, nobody is alerted, and none is sent again."""
    async with subscriber(answering(500)) as one:
        made = await hooks.subscribe(one.url)
        await hooks.emit()
        await hooks.drain()
        assert len(one.requests) == 1
        _INTERNAL.add("order.placed")
        before = await hooks.delivery()
        await hooks.redeliver(before.id)
        await hooks.drain()
        after = await hooks.delivery()
        assert (after.status, after.last_error, len(one.requests)) == ("PERMANENTLY_FAILED", "event_internal", 1)
        await hooks.redeliver(before.id)
        await hooks.drain()
        await hooks.emit()
        await hooks.drain()
    assert len(one.requests) == 1
    assert ("webhook_failed", str(made.id)) not in hooks.alerts()
    async with hooks.db.transaction() as tx:
        assert (await deliveries.find_delivery(tx, before.id)).body is None
        assert (await subscriptions.find_subscription(tx, made.id)).status == "ACTIVE"
