"""What the outside hears of the financial core (F13, E6): signed, once, and nothing that would tip off."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from apps.finance.notices.workers import TOLD
from apps.sandbox.bank import Behaviour
from duly.db import Database
from duly.messages import EventBody, declared_events, is_internal
from duly.webhooks.signing import is_plain, is_standard
from tests.apps.finance.payments.acting import Payers, add_rule
from tests.engine.webhooks.subscriber import Subscriber, answering, subscriber

FINANCE = Path(__file__).parents[4] / "docs" / "architecture" / "finance.md"
SECRET = "a-secret-of-the-subscriber"
ROOT = "/v1/webhooks/subscriptions"
LINE = re.compile(r"^\| `([a-z_.]+)` \| (public|internal) \|.*\|$", re.MULTILINE)


def finance_events() -> dict[str, type[EventBody]]:
    return {kind: one for kind, one in declared_events().items() if one.__module__.startswith("apps.finance.")}


def test_every_event_of_the_financial_core_is_in_the_table() -> None:
    """F13: nobody adds one without deciding who may hear of it."""
    listed = dict(LINE.findall(FINANCE.read_text()))
    declared = {kind: "internal" if is_internal(kind) else "public" for kind in finance_events()}
    assert listed == declared


def test_what_compliance_does_is_internal() -> None:
    """Whatever it is called: alerts, cases, reviews, rules, holds."""
    loud = re.compile(r"^(aml|compliance|decision)\.|^hold\.|review|contradicted|rejected$|reversed$")
    public = [kind for kind in finance_events() if loud.search(kind) and not is_internal(kind)]
    assert public == ["kyc.session.rejected"], "of the person's own check, not of a payment"


def test_what_is_told_has_no_reason_in_it() -> None:
    for internal, public in TOLD.values():
        assert is_internal(internal.event_type)
        assert not is_internal(public.event_type)
        assert not {"reason", "decision_id", "reference", "entries"} & set(public.model_fields)


async def subscribe(payers: Payers, one: Subscriber, *events: str) -> dict[str, Any]:
    headers = payers.api.headers("outside", "webhooks", "WEBHOOK_ADMIN")
    body = {"url": one.url, "events": list(events), "secret": SECRET}
    answer = await payers.api.client.post(ROOT, json=body, headers=headers)
    assert answer.status_code == 201, answer.text
    made: dict[str, Any] = answer.json()
    return made


def heard(one: Subscriber) -> list[str]:
    """What came, each of it properly signed."""
    for request in one.requests:
        given = request.headers
        assert is_plain([SECRET], given["x-signature"], request.body)
        assert is_standard(
            [SECRET], given["webhook-signature"], id=given["webhook-id"], timestamp=given["webhook-timestamp"],
            body=request.body,
        )  # fmt: skip
        assert json.loads(request.body)["type"] == given["x-event-type"]
    return [request.headers["x-event-type"] for request in one.requests]


async def test_a_subscriber_hears_of_payments_from_beginning_to_end(payers: Payers) -> None:
    """F13, E6.1: subscribed over HTTP, paid over HTTP, delivered over HTTP."""
    async with subscriber(answering(200)) as one:
        await subscribe(payers, one, "payment.*")
        made = await payers.pay("10.00")
        await payers.run()
        payers.settle(made["id"])
        await payers.call(made["id"], "SETTLED")
        await payers.run()
        payers.order(Behaviour.DECLINE)
        declined = await payers.pay("5.00")
        await payers.run()
        await payers.try_pay("5000.00")
        await payers.run()
    types = heard(one)
    assert sorted(types) == sorted(
        ["payment.created", "payment.completed", "payment.created", "payment.permanently_failed", "payment.failed"]
    )
    first = json.loads(one.requests[0].body)
    assert (first["data"]["paymentId"], first["subject"], first["data"]["amount"]) == (made["id"], made["id"], "10.00")
    last = {json.loads(body)["type"]: json.loads(body)["data"] for body in one.bodies}
    assert last["payment.permanently_failed"]["paymentId"] == declined["id"]


async def test_a_review_and_a_rejection_tip_nobody_off(payers: Payers, db: Database) -> None:
    """Everything is subscribed to, and every word that arrives is looked at."""
    await add_rule(db, {"field": "amount", "op": "gt", "value": "50.00"}, "REVIEW")
    await add_rule(db, {"field": "amount", "op": "eq", "value": "13.00"}, "REJECT")
    async with subscriber(answering(200)) as one:
        await subscribe(payers, one, "*")
        reviewed = await payers.pay("60.00")
        rejected = await payers.pay("13.00")
        assert (reviewed["state"], rejected["state"]) == ("PENDING_REVIEW", "REJECTED")
        await payers.run()
        assert heard(one) == ["payment.declined"]
        data = json.loads(one.bodies[0])["data"]
        assert data == {"paymentId": rejected["id"], "amount": "13.00", "currency": "PLN"}
        await payers.run(days=7.1)
    assert heard(one) == ["payment.declined"] * 2
    everything = b" ".join(one.bodies).lower()
    for word in (b"review", b"screening", b"rule", b"decision", b"hold", b"case", b"aml", b"reject"):
        assert word not in everything


async def test_a_reversal_is_told_without_its_reason(payers: Payers) -> None:
    async with subscriber(answering(200)) as one:
        await subscribe(payers, one, "transaction.*")
        made = await payers.pay("10.00")
        await payers.run()
        payers.settle(made["id"])
        await payers.call(made["id"], "SETTLED")
        await payers.run()
        reverse = f"/v1/transactions/{made['transactionId']}/reverse"
        headers = payers.api.headers("keeper", "ledger:write", "LEDGER_REVERSER")
        answer = await payers.api.client.post(reverse, json={"reason": "suspicious"}, headers=headers)
        assert answer.status_code == 201, answer.text
        await payers.run()
    assert heard(one) == ["transaction.posted", "transaction.returned"]
    assert b"suspicious" not in b" ".join(one.bodies)


@pytest.mark.parametrize(
    "hidden", ["payment.pending_review", "payment.rejected", "transaction.reversed", "decision.rule.activated"]
)
async def test_nobody_subscribes_to_an_internal_event_by_name(payers: Payers, hidden: str) -> None:
    headers = payers.api.headers("outside", "webhooks", "WEBHOOK_ADMIN")
    body = {"url": "https://hooks.example.com/", "events": ["payment.*", hidden], "secret": SECRET}
    answer = await payers.api.client.post(ROOT, json=body, headers=headers)
    assert (answer.status_code, answer.json()["errors"][0]["path"]) == (422, "$.events[1]")
    assert hidden in answer.json()["detail"]


async def test_a_subscription_belongs_to_its_caller_from_beginning_to_end(payers: Payers) -> None:
    """F13: the whole of its life, and nobody else sees it."""
    headers = payers.api.headers("outside", "webhooks", "WEBHOOK_ADMIN")
    other = payers.api.headers("somebody", "webhooks", "WEBHOOK_ADMIN")
    client = payers.api.client
    async with subscriber(answering(200)) as one:
        path = f"{ROOT}/{(await subscribe(payers, one, 'payment.completed'))['id']}"
        assert (await client.get(path, headers=other)).status_code == 403
        assert (await client.patch(path, json={"events": ["payment.*"]}, headers=other)).status_code == 403
        assert (await client.patch(path, json={"events": ["payment.*"]}, headers=headers)).status_code == 200
        assert (await client.post(f"{path}/pause", headers=headers)).status_code == 200
        await payers.pay("1.00")
        await payers.run()
        assert one.requests == []
        assert (await client.post(f"{path}/resume", headers=headers)).status_code == 200
        await payers.run()
        assert heard(one) == ["payment.created"]
        log = (await client.get(f"{path}/deliveries", headers=headers)).json()["items"]
        assert [(item["eventType"], item["status"]) for item in log] == [("payment.created", "DELIVERED")]
        assert SECRET not in (await client.get(path, headers=headers)).text
        assert (await client.delete(path, headers=headers)).status_code == 204
        await payers.pay("1.00")
        await payers.run()
    assert len(one.requests) == 1
