"""What a bank calls to say: once, in any order, and never backwards (F6, E6.3)."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from uuid import UUID, uuid4

import pytest

from apps.finance.payments import service
from apps.finance.payments.api import Receivers
from apps.finance.payments.gateways import CALLBACK_PATH, CALLBACK_VARIABLE
from apps.finance.payments.model import Callback, Heard, Report, Source
from apps.sandbox import bank as sandbox
from apps.sandbox.bank import Behaviour
from duly.db import Database
from duly.settings import Settings
from duly.webhooks import Keyring
from duly.webhooks.receive import add_provider_secret
from tests.apps.finance.ledger.acting import refused
from tests.apps.finance.payments.acting import Payers, alerts_of, do, facts_of, history_of, subjects_of
from tests.apps.transfers.acting import counting
from tests.support import rows, value


async def test_the_same_event_twice_is_200_and_nothing_more(payers: Payers, dsn: str) -> None:
    """E6.3."""
    made = await payers.pay("10.00")
    await payers.run()
    event_id = str(uuid4())
    first = await payers.call(made["id"], "SETTLED", event_id=event_id)
    before = rows(dsn, "SELECT version, updated_at FROM payments.payments")
    second = await payers.call(made["id"], "SETTLED", event_id=event_id)
    assert (first.json(), second.status_code, second.json()) == ({"status": "applied"}, 200, {"status": "duplicate"})
    assert rows(dsn, "SELECT version, updated_at FROM payments.payments") == before
    assert facts_of(dsn, made["id"]) == ["payment.created", "payment.completed"]


async def test_the_same_news_under_another_id_changes_nothing(payers: Payers, dsn: str) -> None:
    made = await payers.pay("10.00")
    await payers.run()
    answers = [(await payers.call(made["id"], "SETTLED")).json()["status"] for _ in range(3)]
    assert answers == ["applied", "ignored", "ignored"]
    payers.settle(made["id"])
    payers.check()


@pytest.mark.parametrize("late", ["PENDING", "PROCESSING", "SETTLED", "COMPLETED"])
async def test_late_news_never_moves_a_payment_backwards(payers: Payers, dsn: str, late: str) -> None:
    """F6."""
    made = await payers.pay("10.00")
    await payers.run()
    payers.settle(made["id"])
    await payers.call(made["id"], "SETTLED")
    assert (await payers.call(made["id"], late)).json() == {"status": "ignored"}
    assert (payers.state(made["id"]), alerts_of(dsn)) == ("COMPLETED", [])
    payers.check()


async def test_pending_after_a_final_failure_is_old_news(payers: Payers, dsn: str) -> None:
    made = await payers.pay("10.00")
    await payers.run()
    payers.settle(made["id"], "DECLINED")
    await payers.call(made["id"], "FAILED", reason="no_such_payee")
    assert (await payers.call(made["id"], "PENDING")).json() == {"status": "ignored"}
    assert (payers.state(made["id"]), alerts_of(dsn)) == ("PERMANENTLY_FAILED", [])
    assert await payers.both() == ("100.00", "0.00")
    payers.check()


@pytest.mark.parametrize(("first", "then"), [("SETTLED", "FAILED"), ("FAILED", "SETTLED")])
async def test_what_contradicts_the_end_is_for_a_person_and_not_applied(
    payers: Payers, dsn: str, first: str, then: str
) -> None:
    """F6: no money moves a second time."""
    made = await payers.pay("10.00")
    await payers.run()
    await payers.call(made["id"], first)
    before, spendable = payers.state(made["id"]), await payers.both()
    assert (await payers.call(made["id"], then)).status_code == 200
    assert (payers.state(made["id"]), await payers.both()) == (before, spendable)
    assert history_of(dsn, made["id"])[-1] == (before, "contradiction")
    assert alerts_of(dsn) == ["payments.contradiction"]
    assert facts_of(dsn, made["id"])[-1] == "payment.contradicted"


async def test_a_call_that_comes_before_our_request_was_answered(
    payers: Payers, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of order: the payment is complete, and the answer that comes then changes nothing."""
    made = await payers.pay("10.00")
    payers.order(Behaviour.EARLY, calls=True)
    monkeypatch.setenv(CALLBACK_VARIABLE, payers.api.url + CALLBACK_PATH)
    await payers.run()
    assert payers.state(made["id"]) == "COMPLETED"
    assert payers.bank.charges[payers.key(made["id"])].calls == ["SETTLED"]
    assert facts_of(dsn, made["id"]) == ["payment.created", "payment.completed"]
    payers.check()


async def test_a_call_before_it_was_sent_at_all_means_it_is_not_sent(payers: Payers) -> None:
    """Should the bank know of it, it has it."""
    made = await payers.pay("10.00")
    assert (await payers.call(made["id"], "PENDING")).json() == {"status": "applied"}
    await payers.run()
    assert payers.bank.log == []
    assert payers.state(made["id"]) == "PROCESSING"
    payers.check()


async def test_a_failure_that_may_be_tried_again_is_asked_about_first(payers: Payers) -> None:
    """It may speak of an earlier try: only an answer to our question is believed."""
    made = await payers.pay("10.00")
    await payers.run()
    await payers.call(made["id"], "FAILED", retryable=True)
    assert payers.state(made["id"]) == "UNKNOWN"
    await payers.run(minutes=2)
    assert payers.state(made["id"]) == "PROCESSING", "the bank has it"
    payers.check()


async def test_a_late_settlement_ends_the_retries(payers: Payers, dsn: str) -> None:
    """FAILED and waiting, and the bank calls: it has it after all."""
    payers.order(Behaviour.BUSY)
    made = await payers.pay("10.00")
    await payers.run()
    assert payers.state(made["id"]) == "FAILED"
    await payers.call(made["id"], "SETTLED")
    await payers.run(hours=2)
    await payers.retry()
    assert (payers.state(made["id"]), len(payers.bank.log)) == ("COMPLETED", 1)
    assert await payers.both() == ("90.00", "10.00")
    payers.check()


async def test_an_unknown_reference_is_kept_for_a_person(payers: Payers, dsn: str) -> None:
    """F6: 200, so that the bank stops calling."""
    body = json.dumps({"providerEventId": "e1", "paymentRef": "nobody", "status": "SETTLED"}).encode()
    answer = await payers.call_raw(body)
    assert (answer.status_code, answer.json()) == (200, {"status": "kept"})
    assert (await payers.call_raw(body)).json() == {"status": "duplicate"}
    assert alerts_of(dsn) == ["payments.callbacks.bank"]
    listed = await payers.api.client.get("/v1/payments/callbacks/unmatched", headers=payers.headers)
    (item,) = listed.json()["items"]
    assert (item["paymentRef"], item["problem"], item["matchedAt"]) == ("nobody", "unknown_reference", None)


async def test_a_reference_that_we_learn_later_is_matched_then(payers: Payers, dsn: str) -> None:
    """The bank's own reference came before its answer told us of it: the bank is asked, soon and not in an hour."""
    made = await payers.pay("10.00")
    charge = sandbox.Charge("bank-ref-1", "PENDING", "10.00", "PLN")
    payers.bank.charges[payers.key(made["id"])] = charge
    body = json.dumps({"providerEventId": "e1", "paymentRef": "bank-ref-1", "status": "SETTLED"}).encode()
    assert (await payers.call_raw(body)).json() == {"status": "kept"}
    await payers.run()
    assert payers.state(made["id"]) == "UNKNOWN"
    assert value(dsn, "SELECT payment_id::text FROM payments.unmatched_callbacks") == made["id"]
    charge.status = "SETTLED"
    await payers.run(minutes=2)
    assert payers.state(made["id"]) == "COMPLETED"
    payers.check()


async def test_an_early_call_does_not_hide_another_amount(payers: Payers, dsn: str) -> None:
    """The answer that tells us of the reference also names another amount: that is for a person, not for a question."""
    made = await payers.pay("10.00")
    payers.bank.charges[payers.key(made["id"])] = sandbox.Charge("bank-ref-1", "PENDING", "9.99", "PLN")
    body = json.dumps({"providerEventId": "e1", "paymentRef": "bank-ref-1", "status": "SETTLED"}).encode()
    assert (await payers.call_raw(body)).json() == {"status": "kept"}
    await payers.run()
    assert history_of(dsn, made["id"])[-1] == ("PROCESSING", "contradiction")
    assert (await payers.read(made["id"]))["contradictedAt"] is not None


async def test_a_status_that_nobody_knows_is_kept(payers: Payers, dsn: str) -> None:
    made = await payers.pay("10.00")
    await payers.run()
    assert (await payers.call(made["id"], "MAYBE")).json() == {"status": "kept"}
    assert payers.state(made["id"]) == "PROCESSING"
    assert rows(dsn, "SELECT problem, payment_id::text FROM payments.unmatched_callbacks") == [
        ("unknown_status", made["id"])
    ]


@pytest.mark.parametrize("wrong", [{"amount": "9.99", "currency": "PLN"}, {"amount": "10.00", "currency": "EUR"}])
async def test_a_settlement_of_another_amount_is_not_applied(payers: Payers, dsn: str, wrong: dict[str, str]) -> None:
    made = await payers.pay("10.00")
    await payers.run()
    assert (await payers.call(made["id"], "SETTLED", **wrong)).json() == {"status": "kept"}
    assert payers.state(made["id"]) == "PROCESSING"
    query = "SELECT problem, amount::text, currency, payment_id::text FROM payments.unmatched_callbacks"
    assert rows(dsn, query) == [("amount_differs", wrong["amount"], wrong["currency"], made["id"])]
    assert subjects_of(dsn) == [f"payments.callbacks.bank:{made['id']}"]
    payers.check()


@pytest.mark.parametrize("when", ["due", "failed"])
async def test_what_the_bank_calls_about_strangely_is_asked_about_and_not_sent(payers: Payers, when: str) -> None:
    """It may have it, whatever it means."""
    payers.order(Behaviour.BUSY if when == "failed" else Behaviour.ACCEPT)
    made = await payers.pay("10.00")
    if when == "failed":
        await payers.run()
    assert (await payers.call(made["id"], "SETTLED", amount="9.99", currency="PLN")).json() == {"status": "kept"}
    assert payers.state(made["id"]) == "UNKNOWN"
    await payers.retry()
    assert [what for what, _ in payers.bank.log] == (["send"] if when == "failed" else [])
    await payers.run(minutes=2)
    assert payers.bank.log[-1][0] == "ask"
    payers.check()


async def test_a_request_is_not_believed_to_be_lost_once_the_bank_has_called(payers: Payers, db: Database) -> None:
    """Out of order: the call that it has it overtakes the answer that it is busy."""
    made = await payers.pay("10.00")
    order = await do(db, lambda tx: service.begin_sending(tx, UUID(made["id"])))
    await payers.call(made["id"], "PENDING")
    busy = Heard(Report.NOT_TAKEN, Source.SEND, attempt=order.attempt)
    await do(db, lambda tx: service.note_answer(tx, UUID(made["id"]), busy))
    assert payers.state(made["id"]) == "UNKNOWN"
    payers.check()


async def test_while_an_amount_is_disputed_a_settlement_must_name_it(payers: Payers, dsn: str) -> None:
    """A person dismisses the callback, or the bank names the right amount."""
    made = await payers.pay("10.00")
    await payers.run()
    await payers.call(made["id"], "SETTLED", amount="9.99", currency="PLN")
    assert (await payers.call(made["id"], "SETTLED")).json() == {"status": "ignored"}
    assert payers.state(made["id"]) == "PROCESSING"
    assert f"payments.amount:{made['id']}" in subjects_of(dsn)
    await payers.call(made["id"], "SETTLED", amount="10.00", currency="PLN")
    payers.settle(made["id"])
    assert payers.state(made["id"]) == "COMPLETED"
    assert f"payments.amount:{made['id']}" not in subjects_of(dsn)
    payers.check()


async def test_a_kept_callback_is_dealt_with_once(payers: Payers, dsn: str) -> None:
    """It leaves the list of those that are open, and no longer stands in the way."""
    made = await payers.pay("10.00")
    await payers.run()
    await payers.call(made["id"], "SETTLED", amount="9.99", currency="PLN")
    path = "/v1/payments/callbacks"
    (item,) = (await payers.api.client.get(f"{path}/unmatched", headers=payers.headers)).json()["items"]
    dismiss = f"{path}/{item['id']}/dismiss"
    why = {"reason": "their mistake"}
    assert (await payers.api.client.post(dismiss, json=why, headers=payers.headers)).status_code == 403
    answers = await asyncio.gather(*(payers.api.client.post(dismiss, json=why, headers=payers.admin) for _ in range(2)))
    assert sorted(answer.status_code for answer in answers) == [200, 409]
    assert (await payers.api.client.get(f"{path}/unmatched", headers=payers.headers)).json()["items"] == []
    listed = await payers.api.client.get(f"{path}/unmatched?all=true", headers=payers.headers)
    (item,) = listed.json()["items"]
    assert (item["dismissedBy"], item["dismissReason"], item["amount"]) == ("boss", "their mistake", "9.99")
    gone = await payers.api.client.post(f"{path}/{uuid4()}/dismiss", json=why, headers=payers.admin)
    assert refused(gone)[:2] == (404, "callback-not-found")
    await payers.call(made["id"], "SETTLED")
    assert payers.state(made["id"]) == "COMPLETED"


async def test_names_of_two_payments_apply_to_none(payers: Payers, dsn: str) -> None:
    one, two = [(await payers.pay("10.00"))["id"] for _ in range(2)]
    await payers.run()
    theirs = payers.bank.charges[payers.key(one)].reference
    pairs = [(theirs, payers.key(two)), (payers.key(one), payers.key(two)), (theirs, str(uuid4())), (theirs, "x")]
    for number, (theirs_, ours) in enumerate(pairs):
        event = {"providerEventId": str(number), "paymentRef": theirs_, "clientRef": ours, "status": "SETTLED"}
        assert (await payers.call_raw(json.dumps(event).encode())).json() == {"status": "kept"}
    assert [payers.state(one), payers.state(two)] == ["PROCESSING"] * 2
    found = rows(dsn, "SELECT problem, payment_ref, client_ref FROM payments.unmatched_callbacks ORDER BY id")
    assert found == [("names_differ", *pair) for pair in pairs]


async def test_a_second_reference_of_a_payment_is_kept_and_told(payers: Payers, dsn: str) -> None:
    """It may be charged twice: for a person."""
    made = await payers.pay("10.00")
    await payers.run()
    event = {"providerEventId": "e", "paymentRef": "second", "clientRef": payers.key(made["id"]), "status": "SETTLED"}
    assert (await payers.call_raw(json.dumps(event).encode())).json() == {"status": "kept"}
    assert payers.state(made["id"]) == "PROCESSING"
    assert value(dsn, "SELECT problem FROM payments.unmatched_callbacks") == "reference_differs"
    assert f"payments.reference:{made['id']}" in subjects_of(dsn)
    payers.bank.charges[payers.key(made["id"])].reference = "third"
    payers.settle(made["id"])
    await payers.run(hours=1.1)
    found = await payers.read(made["id"])
    assert found["state"] == "COMPLETED"
    assert found["providerRef"].startswith("bank-"), "the first stays"


@pytest.mark.parametrize(
    "more",
    [
        {"retryable": None}, {"reason": 7}, {"reason": {"a": []}}, {"reason": None}, {"paymentRef": "Überweisung №7"},
        {"paymentRef": "r" * 200}, {"retryable": False},
    ],
)  # fmt: skip
async def test_what_banks_say_in_their_own_way_is_understood(payers: Payers, more: dict[str, Any]) -> None:
    made = await payers.pay("10.00")
    said = {"providerEventId": "e", "paymentRef": payers.key(made["id"]), "clientRef": payers.key(made["id"])}
    answer = await payers.call_raw(json.dumps(said | {"status": "SETTLED"} | more).encode())
    assert (answer.status_code, payers.state(made["id"])) == (200, "COMPLETED"), answer.text


async def test_a_stranger_settles_nothing(payers: Payers, dsn: str) -> None:
    """E6.3: wrong, missing and old signatures, changed bodies, another provider."""
    made = await payers.pay("10.00")
    body = json.dumps({"providerEventId": "e", "paymentRef": payers.key(made["id"]), "status": "SETTLED"}).encode()
    now = int(payers.clock.now().timestamp())
    right = sandbox.sign(body, timestamp=now)
    attempts = {
        "no signature": {"Content-Type": "application/json"},
        "another secret": sandbox.sign(body, timestamp=now, secret="x" * 32),
        "another body": sandbox.sign(body + b" ", timestamp=now),
        "old": sandbox.sign(body, timestamp=now - 301),
        "another time": right | {"X-Provider-Timestamp": str(now + 1)},
        "no time": {name: text for name, text in right.items() if name != "X-Provider-Timestamp"},
    }
    for what, headers in attempts.items():
        answer = await payers.api.client.post("/v1/webhooks/payments/bank", content=body, headers=headers)
        assert (what, answer.status_code) == (what, 401)
    nobody = await payers.api.client.post("/v1/webhooks/payments/other", content=body, headers=right)
    assert refused(nobody)[:2] == (404, "unknown-provider")
    assert (payers.state(made["id"]), value(dsn, "SELECT count(*) FROM duly.received_webhooks")) == ("PROCESSING", 0)


async def test_a_provider_cannot_name_another_providers_payment(payers: Payers, db: Database, dsn: str) -> None:
    """Whoever can sign for one bank settles nothing of another."""
    made = await payers.pay("10.00")
    callback = Callback("other", "e", payers.key(made["id"]), "SETTLED")
    async with db.transaction() as tx:
        assert await service.receive(tx, callback) == "kept"
    assert payers.state(made["id"]) == "PROCESSING"


async def test_a_secret_in_the_database_is_accepted(payers: Payers, db: Database) -> None:
    """As in production: `duly webhooks provider-secret bank`."""
    made = await payers.pay("10.00")
    secret = "of-the-real-bank-0123456789"
    async with db.transaction() as tx:
        keyring = Keyring.open(db.settings)
        await add_provider_secret(tx, keyring, "bank", secret=secret, actor="tests")
    body = json.dumps({"providerEventId": "e", "paymentRef": payers.key(made["id"]), "status": "SETTLED"}).encode()
    headers = sandbox.sign(body, timestamp=int(payers.clock.now().timestamp()), secret=secret)
    answer = await payers.api.client.post("/v1/webhooks/payments/bank", content=body, headers=headers)
    assert (answer.status_code, payers.state(made["id"])) == (200, "COMPLETED")


def test_the_secret_that_everybody_knows_is_one_of_development_only() -> None:
    receivers = Receivers({"bank": sandbox.SECRET})
    in_development = receivers.find("bank", Settings(env="development"))
    in_production = receivers.find("bank", Settings(env="production"))
    assert [len(one._secrets) for one in (in_development, in_production)] == [1, 0]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400), (b"[]", 400), (b"{}", 400), (b'{"providerEventId": "e"}', 422),
        (b'{"providerEventId": "e", "paymentRef": "", "status": "SETTLED"}', 422),
        (b'{"providerEventId": "e", "paymentRef": 7, "status": "SETTLED"}', 422),
        (b'{"providerEventId": "e", "paymentRef": "a\\u0000b", "status": "SETTLED"}', 422),
        (b'{"providerEventId": "e", "paymentRef": "' + b"r" * 201 + b'", "status": "SETTLED"}', 422),
        (b'{"providerEventId": "e", "paymentRef": "r", "status": "SETTLED", "amount": 1.5}', 422),
        (b'{"providerEventId": "e", "paymentRef": "r", "status": "SETTLED", "amount": NaN}', 400),
        (b'{"providerEventId": "e", "paymentRef": "r", "status": "SETTLED", "retryable": "yes"}', 422),
        (b'{"providerEventId": "' + b"e" * 300 + b'", "paymentRef": "r", "status": "SETTLED"}', 422),
        (b'{"providerEventId": "e", "paymentRef": "\\ud800", "status": "SETTLED"}', 400),
    ],
)  # fmt: skip
async def test_a_signed_call_that_says_nothing_is_refused_and_not_remembered(
    payers: Payers, dsn: str, body: bytes, status: int
) -> None:
    """Never a 500."""
    answer = await payers.call_raw(body)
    assert answer.status_code == status, answer.text
    assert value(dsn, "SELECT count(*) FROM duly.received_webhooks") == 0


async def test_what_a_call_says_besides_is_nobodys_business(payers: Payers, dsn: str) -> None:
    """No personal data reaches the tables."""
    made = await payers.pay("10.00")
    await payers.call(made["id"], "SETTLED", cardholder="Canary Person", reason="<script>alert(1)</script>")
    dumped = str(rows(dsn, "SELECT h::text FROM payments.history h"))
    assert "Canary" not in dumped
    assert "script" not in dumped


async def test_old_callbacks_are_forgotten(payers: Payers, dsn: str) -> None:
    body = json.dumps({"providerEventId": "e1", "paymentRef": "nobody", "status": "SETTLED"}).encode()
    await payers.call_raw(body)
    payers.clock.advance(days=401)
    rows(dsn, "SELECT duly.schedule('payments.forget-callbacks')")
    await payers.run()
    assert value(dsn, "SELECT count(*) FROM payments.unmatched_callbacks") == 0


async def test_the_cost_of_a_callback_is_known(payers: Payers, db: Database) -> None:
    """F14."""
    made = await payers.pay("10.00")
    await payers.run()
    async with counting(db) as sent:
        await payers.call(made["id"], "SETTLED")
    assert len(sent) == 13, sent  # one of them asks what a person was told of it
    async with counting(db) as sent:
        await payers.call(made["id"], "SETTLED")
    assert len(sent) == 4, sent
