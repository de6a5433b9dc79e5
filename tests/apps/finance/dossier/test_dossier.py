"""The dossier of a payment over HTTP and from the command: everything of one moment, and what is gone is said."""

from __future__ import annotations

import json
from typing import Any
from uuid import uuid4

import pytest

from apps.finance.compliance import store
from apps.finance.dossier import command, reading
from apps.finance.dossier.model import SECTIONS, Outcome, check, read_public_key
from apps.finance.dossier.signing import Signer
from apps.sandbox.bank import Behaviour
from apps.shared.canonical import encode
from duly.db import Database
from tests.apps.finance.ledger.acting import refused
from tests.apps.finance.notices.test_notices import heard, subscribe
from tests.apps.finance.payments.acting import Payers, add_rule
from tests.apps.transfers.acting import counting
from tests.engine.webhooks.subscriber import answering, subscriber
from tests.support import rows, value


def officer(payers: Payers) -> dict[str, str]:
    return payers.api.headers("olga", "compliance:resolve", "COMPLIANCE_OFFICER")


def keys_of(payers: Payers) -> list[bytes]:
    signer = Signer.open(payers.api.fastapi.state.settings)
    return [read_public_key(key) for key in signer.public_keys().values()]


async def fetch(payers: Payers, payment: str) -> tuple[dict[str, Any], bytes]:
    """The dossier, which is valid."""
    answer = await payers.api.client.get(f"/v1/payments/{payment}/dossier", headers=officer(payers))
    assert answer.status_code == 200, answer.text
    verdict = check(answer.content, trusted=keys_of(payers))
    assert verdict.outcome is Outcome.VALID, verdict.reason
    return answer.json(), answer.content


def section(dossier: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any]
    (found,) = [one for one in dossier["sections"] if one["name"] == name]
    return found


def records(dossier: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [link["record"] for link in section(dossier, name)["records"]]


def gaps(dossier: dict[str, Any]) -> dict[str, list[str]]:
    return {one["name"]: [gap["why"] for gap in one["missing"]] for one in dossier["sections"] if one["missing"]}


async def settle(payers: Payers, amount: str = "10.00") -> str:
    made = await payers.pay(amount)
    await payers.run()
    payers.settle(made["id"])
    await payers.call(made["id"], "SETTLED")
    await payers.run()
    return str(made["id"])


async def test_everything_of_a_payment_is_in_it(payers: Payers, db: Database, dsn: str) -> None:
    """Decision with trace and rules, posting with its seal, events, deliveries, callbacks: linked, listed, signed."""
    await add_rule(db, {"field": "amount", "op": "lt", "value": "50.00"}, "APPROVE")
    async with subscriber(answering(200)) as one:
        await subscribe(payers, one, "payment.*", "transaction.*")
        payment = await settle(payers)
        await payers.call(payment, "MAYBE")
        rows(dsn, "SELECT duly.schedule('ledger.seal')")
        await payers.run()
        assert len(heard(one)) >= 3
    found = await payers.read(payment)
    dossier, content = await fetch(payers, payment)
    assert [part["name"] for part in dossier["sections"]] == list(SECTIONS)
    assert gaps(dossier) == {}
    (shown,) = records(dossier, "payment")
    assert (shown["id"], shown["amount"], shown["state"]) == (payment, "10.00", "COMPLETED")
    assert [line["number"] for line in records(dossier, "history")] == list(range(1, found["version"] + 1))
    (decision,) = records(dossier, "decisions")
    assert decision["id"] == found["decisionId"]
    assert decision["rules"][0]["conditions"]["field"] == "amount"
    assert decision["rules"][0]["version"] == 1
    assert (decision["replayDiffersIn"], bool(decision["trace"])) == ([], True)
    (posting,) = records(dossier, "postings")
    assert (posting["id"], len(posting["entries"])) == (found["transactionId"], 2)
    link = rows(dsn, "SELECT number, encode(hash, 'hex') FROM ledger.seals ORDER BY number DESC LIMIT 1")[0]
    assert (posting["seal"]["number"], posting["seal"]["hash"]) == link
    assert [hold["status"] for hold in records(dossier, "holds")] == ["VOIDED"]
    types = [event["type"] for event in records(dossier, "events")]
    assert {"payment.created", "payment.completed", "transaction.posted", "hold.placed", "hold.voided"} <= set(types)
    assert all("payload" in event for event in records(dossier, "events"))
    delivered = records(dossier, "deliveries")
    assert {one["eventType"] for one in delivered} >= {"payment.created", "payment.completed", "transaction.posted"}
    assert {(one["status"], one["log"][0]["httpStatus"]) for one in delivered} == {("DELIVERED", 200)}
    assert b"/hook" not in content, "the path of a subscriber's address may be a secret"
    (kept,) = records(dossier, "callbacks")
    assert (kept["problem"], kept["paymentId"]) == ("unknown_status", payment)


async def test_a_payment_that_came_back_has_its_reversal(payers: Payers) -> None:
    payers.order(Behaviour.DECLINE)
    made = await payers.pay("10.00")
    await payers.run()
    dossier, _ = await fetch(payers, made["id"])
    found = await payers.read(made["id"])
    assert [one["id"] for one in records(dossier, "postings")] == [found["transactionId"], found["reversalId"]]
    assert records(dossier, "postings")[1]["reversesId"] == found["transactionId"]
    assert gaps(dossier) == {"postings": ["not_yet", "not_yet"]}, "nobody has sealed them yet"


async def test_what_was_never_posted_has_a_dossier_too(payers: Payers, db: Database) -> None:
    await add_rule(db, {"field": "amount", "op": "gt", "value": "50.00"}, "REVIEW")
    await add_rule(db, {"field": "amount", "op": "eq", "value": "13.00"}, "REJECT")
    reviewed, rejected = await payers.pay("60.00"), await payers.pay("13.00")
    uncovered = (await payers.try_pay("5000.00")).json()["paymentId"]
    for payment in (reviewed["id"], rejected["id"], uncovered):
        dossier, _ = await fetch(payers, payment)
        assert (gaps(dossier), records(dossier, "postings")) == ({}, [])
    held, _ = await fetch(payers, reviewed["id"])
    assert [one["status"] for one in records(held, "holds")] == ["ACTIVE"]


async def test_what_officers_did_is_in_it_line_by_line(payers: Payers, db: Database, dsn: str) -> None:
    """F10: the case that a review opened, its timeline, its events, and what became of the payment."""
    await add_rule(db, {"field": "amount", "op": "gt", "value": "50.00"}, "REVIEW")
    made = await payers.pay("60.00")
    case_id = str(value(dsn, "SELECT id FROM compliance.cases WHERE payment_id = %(id)s", {"id": made["id"]}))
    path = f"/v1/compliance/cases/{case_id}"
    client, headers = payers.api.client, officer(payers)
    assert (await client.post(f"{path}/comments", json={"text": "called them"}, headers=headers)).status_code < 300
    body = {"decision": "APPROVE", "reasonCode": "FALSE_POSITIVE", "reason": "an invoice"}
    resolved = await client.post(f"{path}/resolve", json=body, headers=headers)
    assert resolved.status_code == 200, resolved.text
    await payers.run()
    dossier, content = await fetch(payers, made["id"])
    (file,) = records(dossier, "cases")
    assert (file["case"]["id"], file["case"]["status"]) == (case_id, "RESOLVED")
    assert len(file["timeline"]) == value(
        dsn, "SELECT count(*) FROM compliance.case_events WHERE case_id = %(id)s", {"id": case_id}
    )
    assert b"called them" in content
    types = [event["type"] for event in records(dossier, "events")]
    assert {"compliance.case.opened", "compliance.case.resolved", "payment.created"} <= set(types)
    assert [one["id"] for one in records(dossier, "decisions")] == [file["alert"]["decisionId"]]


async def test_an_officer_gets_no_dossier_of_a_payment_of_their_own(payers: Payers, db: Database) -> None:
    """Nobody is tipped off: what other officers think of it would be in it. It is refused whether they do or not."""
    await add_rule(db, {"field": "amount", "op": "gt", "value": "50.00"}, "REVIEW")
    own = payers.api.headers("teller", "compliance:resolve", "COMPLIANCE_OFFICER")
    for amount in ("60.00", "10.00"):
        path = f"/v1/payments/{(await payers.pay(amount))['id']}/dossier"
        assert refused(await payers.api.client.get(path, headers=own))[:2] == (403, "own-payment")
        assert (await payers.api.client.get(path, headers=officer(payers))).status_code == 200


async def test_a_timeline_that_is_too_long_is_not_called_complete(
    payers: Payers, db: Database, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await add_rule(db, {"field": "amount", "op": "gt", "value": "50.00"}, "REVIEW")
    made = await payers.pay("60.00")
    case = value(dsn, "SELECT id FROM compliance.cases WHERE payment_id = %(id)s", {"id": made["id"]})
    for _ in range(3):
        said = await payers.api.client.post(
            f"/v1/compliance/cases/{case}/comments", json={"text": "so"}, headers=officer(payers)
        )
        assert said.status_code == 201, said.text
    dossier, _ = await fetch(payers, made["id"])
    assert "cases" not in gaps(dossier)
    monkeypatch.setattr(store, "MOST_LINES_OF_A_FILE", 3)
    dossier, _ = await fetch(payers, made["id"])
    assert section(dossier, "cases")["missing"] == [{"what": f"lines of case {case} after 3", "why": "limit"}]


async def test_what_retention_has_taken_is_stated(payers: Payers, dsn: str) -> None:
    """Not called whole, and not called forged."""
    payment = await settle(payers)
    rows(dsn, "SELECT duly.schedule('ledger.seal')")
    await payers.run()
    payers.clock.advance(days=45)
    rows(dsn, "DELETE FROM duly.events")
    dossier, _ = await fetch(payers, payment)
    assert gaps(dossier) == {"events": ["retention"], "deliveries": ["retention"]}
    payers.clock.advance(days=500)
    rows(dsn, "SET session_replication_role = replica; DELETE FROM decisions.log")
    rows(dsn, "DELETE FROM ledger.holds WHERE status <> 'ACTIVE'")
    dossier, _ = await fetch(payers, payment)
    assert gaps(dossier) == {
        "decisions": ["retention"], "holds": ["retention"], "events": ["retention"], "deliveries": ["retention"],
        "callbacks": ["retention"],
    }  # fmt: skip
    assert section(dossier, "decisions")["complete"] is False
    assert records(dossier, "history"), "payments and their history are kept for ever"


async def test_what_should_be_there_and_is_not_is_said_to_be_absent(payers: Payers, dsn: str) -> None:
    """Somebody took it away: that is no retention, and a person should look."""
    payment = await settle(payers)
    rows(dsn, "SELECT duly.schedule('ledger.seal')")
    await payers.run()
    rows(dsn, "DELETE FROM duly.events")
    rows(dsn, "SET session_replication_role = replica; DELETE FROM decisions.log")
    dossier, _ = await fetch(payers, payment)
    assert gaps(dossier) == {"decisions": ["absent"], "events": ["absent"]}


async def test_a_dossier_of_yesterday_stays_valid(payers: Payers) -> None:
    """And differs from today's; each is of one moment."""
    made = await payers.pay("10.00")
    before, content = await fetch(payers, made["id"])
    await payers.run(hours=1)
    after, _ = await fetch(payers, made["id"])
    assert before["manifest"]["head"] != after["manifest"]["head"]
    assert check(content, trusted=keys_of(payers)).outcome is Outcome.VALID


async def test_who_may_not_read_it_and_what_is_not_there(payers: Payers, monkeypatch: pytest.MonkeyPatch) -> None:
    made = await payers.pay("10.00")
    path = f"/v1/payments/{made['id']}/dossier"
    assert (await payers.api.client.get(path, headers=payers.headers)).status_code == 403
    assert (await payers.api.client.get(path)).status_code == 401
    absent = await payers.api.client.get(f"/v1/payments/{uuid4()}/dossier", headers=officer(payers))
    assert refused(absent)[:2] == (404, "payment-not-found")
    answer = await payers.api.client.get(path, headers=officer(payers))
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["content-disposition"].startswith("attachment")
    monkeypatch.setenv("DOSSIER_SIGNING_KEYS", "nonsense-secret")
    broken = await payers.api.client.get(path, headers=officer(payers))
    assert (broken.status_code, "nonsense-secret" in broken.text) == (503, False)


async def test_a_long_life_fits_and_costs_a_bounded_number_of_statements(
    payers: Payers, db: Database, dsn: str
) -> None:
    made = await payers.pay("10.00")
    rows(
        dsn,
        """INSERT INTO payments.history (payment_id, number, at, from_state, to_state, cause, detail)
           SELECT id, n, created_at, 'PROCESSING', 'PROCESSING', 'ask', repeat('x', 400)
           FROM payments.payments, generate_series(version + 1, 6000) AS n""",
    )
    rows(dsn, "ALTER TABLE payments.payments DISABLE TRIGGER USER; UPDATE payments.payments SET version = 6000")
    rows(
        dsn,
        """SELECT duly.emit('payment.retried', 'payments.events', id::text, jsonb_build_object('n', n))
           FROM payments.payments, generate_series(1, 700) AS n""",
    )
    async with counting(db) as sent:
        dossier, content = await fetch(payers, made["id"])
    assert len(sent) < 40, sent
    assert len(content) < 20_000_000
    assert "limit" in gaps(dossier)["history"]
    assert gaps(dossier)["events"] == ["limit"]


async def test_the_command_exports_what_the_command_verifies(
    payers: Payers, dsn: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the database into a file, and back with nothing but the file."""
    import asyncio

    payment = await settle(payers)
    monkeypatch.setenv("DATABASE_URL", dsn)
    monkeypatch.setenv("DULY_DATA", str(tmp_path / "home"))
    monkeypatch.setenv("DULY_ALLOW_UNSAFE_DATABASE", "1")
    out = tmp_path / "out.json"
    assert await asyncio.to_thread(command.run, ["export", payment, "--out", str(out)]) == 0
    assert await asyncio.to_thread(command.run, ["key"]) == 0
    key = capsys.readouterr().out.strip().splitlines()[-1]
    monkeypatch.setenv("DATABASE_URL", "postgresql://nobody.invalid/none")
    assert command.run(["verify", str(out), "--trust", key]) == 0
    out.write_bytes(out.read_bytes().replace(b'"10.00"', b'"99.00"', 1))
    assert command.run(["verify", str(out), "--trust", key]) == 1
    monkeypatch.setenv("DATABASE_URL", dsn)
    assert await asyncio.to_thread(command.run, ["export", str(uuid4())]) == 2


async def test_it_is_read_as_of_one_moment(payers: Payers, db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody pays while it is read: what is in it belongs together."""
    made = await payers.pay("10.00")
    await payers.run()
    payers.settle(made["id"])
    usual = reading.read_history

    async def slow(tx: Any, subject: Any) -> Any:
        assert (await payers.call(made["id"], "SETTLED")).json() == {"status": "applied"}
        return await usual(tx, subject)

    monkeypatch.setattr(reading, "read_history", slow)
    dossier, _ = await fetch(payers, made["id"])
    (shown,) = records(dossier, "payment")
    assert shown["state"] == "PROCESSING"
    assert records(dossier, "history")[-1]["number"] == shown["version"]
    assert json.loads(encode(dossier)) == dossier
    assert payers.state(made["id"]) == "COMPLETED"
    assert value(payers.dsn, "SELECT count(*) FROM payments.payments") == 1
