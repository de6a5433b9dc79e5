"""The dossier of a payment over HTTP and from the command: everything of one moment, and what is gone is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from apps.finance.compliance import store
from apps.finance.dossier import command, reading
from apps.finance.dossier.model import SECTIONS, Outcome, check, read_public_key
from apps.finance.dossier.signing import Signer
from apps.sandbox.bank import Behaviour
from apps.shared.canonical import encode
from apps.wiring import app
from duly.db import Database
from duly.operate import discard_event
from duly.webhooks import look
from tests.apps.finance.ledger.acting import refused
from tests.apps.finance.notices.test_notices import heard, subscribe
from tests.apps.finance.payments.acting import Payers, add_rule
from tests.apps.transfers.acting import counting
from tests.console.conftest import serving
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


def exports(dsn: str) -> list[tuple[Any, ...]]:
    """Who got which dossier, as the audit has it."""
    return rows(
        dsn,
        """SELECT actor, subject, after->>'head', (after->>'complete')::boolean FROM duly.audit
           WHERE action = 'dossier.exported' ORDER BY id""",
    )


async def hold(payers: Payers, db: Database) -> tuple[str, str]:
    """A payment that waits for an officer, and its case."""
    await add_rule(db, {"field": "amount", "op": "gt", "value": "50.00"}, "REVIEW")
    payment = (await payers.pay("60.00"))["id"]
    found = value(payers.dsn, "SELECT id FROM compliance.cases WHERE payment_id = %(id)s", {"id": payment})
    return str(payment), str(found)


async def act(payers: Payers, case: str, what: str, body: dict[str, str]) -> None:
    path = f"/v1/compliance/cases/{case}/{what}"
    answer = await payers.api.client.post(path, json=body, headers=officer(payers))
    assert answer.status_code < 300, answer.text


APPROVE = {"decision": "APPROVE", "reasonCode": "FALSE_POSITIVE", "reason": "an invoice"}


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
    (case,) = records(dossier, "cases")
    assert (case["id"], case["status"]) == (case_id, "RESOLVED")
    (alert,) = records(dossier, "alerts")
    assert alert["id"] == case["alertId"]
    timeline = rows(dsn, "SELECT case_id::text, number, kind FROM compliance.case_events ORDER BY number")
    assert [(line["caseId"], line["number"], line["kind"]) for line in records(dossier, "timelines")] == timeline
    assert [kind for _, _, kind in timeline] == ["OPENED", "COMMENTED", "RESOLVED"]
    assert b"called them" in content
    types = [event["type"] for event in records(dossier, "events")]
    assert {"compliance.case.opened", "compliance.case.resolved", "payment.created"} <= set(types)
    assert [one["id"] for one in records(dossier, "decisions")] == [alert["decisionId"]]


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
    assert "timelines" not in gaps(dossier)
    monkeypatch.setattr(store, "MOST_LINES_OF_A_FILE", 3)
    dossier, _ = await fetch(payers, made["id"])
    assert section(dossier, "timelines")["missing"] == [{"what": f"lines of case {case} after 3", "why": "limit"}]
    assert section(dossier, "cases")["complete"], "the case itself is there"


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
    assert gaps(dossier) == {"decisions": ["absent"], "events": ["absent"], "deliveries": ["absent"]}


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
    assert gaps(dossier)["events"] == gaps(dossier)["deliveries"] == ["limit"]


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
    assert await asyncio.to_thread(command.run, ["export", payment, "--out", str(out), "--actor", "rita"]) == 0
    assert exports(dsn) == [("rita", f"dossier:{payment}", json.loads(out.read_bytes())["manifest"]["head"], False)]
    assert await asyncio.to_thread(command.run, ["key"]) == 0
    key = capsys.readouterr().out.strip().splitlines()[-1]
    monkeypatch.setenv("DATABASE_URL", "postgresql://nobody.invalid/none")
    assert command.run(["verify", str(out), "--trust", key]) == 0
    out.write_bytes(out.read_bytes().replace(b'"10.00"', b'"99.00"', 1))
    assert command.run(["verify", str(out), "--trust", key]) == 1
    monkeypatch.setenv("DATABASE_URL", dsn)
    assert await asyncio.to_thread(command.run, ["export", str(uuid4())]) == 2
    assert len(exports(dsn)) == 1


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


# -- what is left out is said -----------------------------------------------------------------------------------------


async def test_deliveries_outlive_the_subscription_that_they_went_to(payers: Payers, dsn: str) -> None:
    """A subscriber who leaves takes no part of the story along."""
    async with subscriber(answering(200)) as one:
        made = await subscribe(payers, one, "payment.*", "transaction.*")
        payment = await settle(payers)
        before, _ = await fetch(payers, payment)
        assert len(records(before, "deliveries")) == len(heard(one)) >= 3
        headers = payers.api.headers("outside", "webhooks", "WEBHOOK_ADMIN")
        gone = await payers.api.client.delete(f"/v1/webhooks/subscriptions/{made['id']}", headers=headers)
        assert gone.status_code == 204, gone.text
        assert value(dsn, "SELECT count(*) FROM duly.webhook_secrets") == 0
    rows(dsn, "SELECT duly.schedule('duly.forget-webhooks')")
    await payers.run(days=20)
    after, _ = await fetch(payers, payment)
    assert records(after, "deliveries") == records(before, "deliveries")
    assert "deliveries" not in gaps(after)
    payers.clock.advance(days=11)
    rows(dsn, "SELECT duly.schedule('duly.forget-webhooks')")
    await payers.run()
    later, _ = await fetch(payers, payment)
    assert (records(later, "deliveries"), gaps(later)["deliveries"]) == ([], ["retention"])


async def test_deliveries_of_events_that_are_gone_are_missing(
    payers: Payers, db: Database, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever keeps webhooks longer than events has deliveries that nothing leads to."""
    monkeypatch.setattr(db, "settings", db.settings.model_copy(update={"keep_webhooks_days": 90}))
    async with subscriber(answering(200)) as one:
        await subscribe(payers, one, "payment.*")
        payment = await settle(payers)
    payers.clock.advance(days=45)
    rows(dsn, "DELETE FROM duly.events")
    dossier, _ = await fetch(payers, payment)
    assert value(dsn, "SELECT count(*) FROM duly.webhook_deliveries") > 0
    assert (records(dossier, "deliveries"), gaps(dossier)["deliveries"]) == ([], ["retention"])


async def test_among_thousands_of_subscribers_no_delivery_is_dropped_in_silence(
    payers: Payers, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More pairs of event and subscriber than are looked up at once; and where there are far too many, it is said."""
    async with subscriber(answering(200)) as one:
        await subscribe(payers, one, "payment.*", "transaction.*")
        payment = await settle(payers)
        delivered = len(heard(one))
    rows(
        dsn,
        """INSERT INTO duly.webhook_subscriptions (id, owner, url, patterns, created_at, updated_at)
           SELECT gen_random_uuid(), 'owner' || n, 'https://example.com/', '{order.*}', duly.now(), duly.now()
           FROM generate_series(1, 9000) AS n""",
    )
    dossier, _ = await fetch(payers, payment)
    assert 9_000 * len(records(dossier, "events")) > 2 * look.PROBES
    assert (len(records(dossier, "deliveries")), "deliveries" in gaps(dossier)) == (delivered, False)
    monkeypatch.setattr(look, "PROBES", 1_000)
    cut, _ = await fetch(payers, payment)
    assert gaps(cut)["deliveries"] == ["limit"]


async def test_attempts_that_are_too_many_are_not_called_all(payers: Payers, dsn: str) -> None:
    async with subscriber(answering(200)) as one:
        await subscribe(payers, one, "payment.completed")
        payment = await settle(payers)
    rows(
        dsn,
        """INSERT INTO duly.webhook_attempts (delivery_id, number, subscription_id, started_at, latency_ms, outcome,
               http_status, request_headers, request_bytes, response_headers, response_excerpt, worker)
           SELECT id, n, subscription_id, created_at, 1, 'DELIVERED', 200, '{}', 1, '{}', '', 'w'
           FROM duly.webhook_deliveries, generate_series(2, 101) AS n""",
    )
    rows(dsn, "UPDATE duly.webhook_deliveries SET attempts = 101")
    dossier, _ = await fetch(payers, payment)
    (delivery,) = records(dossier, "deliveries")
    assert [attempt["number"] for attempt in delivery["log"]] == list(range(2, 102))
    assert gaps(dossier)["deliveries"] == ["limit"]


async def test_an_event_that_was_discarded_is_missed(payers: Payers, db: Database, dsn: str) -> None:
    """An operator gave it up: nobody was told, and nobody is told that everything is here."""
    made = await payers.pay("10.00")
    held = value(dsn, "SELECT incoming_hold_id::text FROM payments.payments")
    found = rows(
        dsn,
        """UPDATE duly.outbox SET attempts = 20, failed_at = duly.now(), last_error = 'no' WHERE aggregate_id = %(id)s
           RETURNING id, type""",
        {"id": held},
    )
    assert [kind for _, kind in found] == ["hold.placed"]
    before, _ = await fetch(payers, made["id"])
    assert "events" not in gaps(before)
    async with db.transaction() as tx:
        await discard_event(tx, found[0][0], actor="otto", reason="it was in the way")
    await payers.run()
    after, _ = await fetch(payers, made["id"])
    assert section(after, "events")["missing"] == [
        {"what": f"event {found[0][0]} (hold.placed), which was discarded", "why": "absent"}
    ]
    assert "deliveries" not in gaps(after), "what was never published was never sent"


async def test_what_an_officer_writes_pushes_no_case_out(payers: Payers, db: Database) -> None:
    """Commas: they are text, and not parts of the file."""
    payment, case = await hold(payers, db)
    for _ in range(10):
        await act(payers, case, "comments", {"text": "," * 4_000})
    await act(payers, case, "resolve", APPROVE)
    dossier, _ = await fetch(payers, payment)
    assert not {"alerts", "cases", "timelines"} & set(gaps(dossier))
    assert [one["id"] for one in records(dossier, "cases")] == [case]
    assert [line["number"] for line in records(dossier, "timelines")] == list(range(1, 13))


async def test_of_a_timeline_that_is_too_large_the_largest_lines_are_left_out(
    payers: Payers, db: Database, dsn: str
) -> None:
    payment, case = await hold(payers, db)
    rows(
        dsn,
        """SET session_replication_role = replica;
           INSERT INTO compliance.case_events (case_id, number, at, actor, kind, detail)
           SELECT id, n, created_at, 'olga', 'COMMENTED', jsonb_build_object('text', repeat('x', 4000))
           FROM compliance.cases, generate_series(2, 601) AS n""",
    )
    rows(dsn, "SET session_replication_role = replica; UPDATE compliance.cases SET version = 601")
    await act(payers, case, "comments", {"text": "called them"})
    await act(payers, case, "resolve", APPROVE)
    dossier, _ = await fetch(payers, payment)
    assert {name: whys for name, whys in gaps(dossier).items() if name in ("alerts", "cases", "timelines")} == {
        "timelines": ["limit"]
    }
    assert [(one["id"], one["status"], one["version"]) for one in records(dossier, "cases")] == [
        (case, "RESOLVED", 603)
    ]
    lines = records(dossier, "timelines")
    assert (lines[0]["kind"], lines[-2]["detail"], lines[-1]["kind"]) == ("OPENED", {"text": "called them"}, "RESOLVED")
    assert 300 < len(lines) < 603


async def test_more_cases_than_a_dossier_holds_are_not_called_all(payers: Payers, db: Database, dsn: str) -> None:
    """Reopened a hundred times; what else there is of them is missing, too."""
    payment, case = await hold(payers, db)
    await act(payers, case, "resolve", APPROVE)
    columns = """kind, status, severity, alert_id, payment_id, amount, currency, initiated_by, needs_two, due_at,
                 decision, reason_code, reason, effect, resolved_by, ended_at, version, created_at, updated_at"""
    rows(
        dsn,
        f"""SET session_replication_role = replica;
            INSERT INTO compliance.cases (id, reopens_id, reopened_by, {columns})
            SELECT ('f0000000-0000-7000-8000-' || lpad(n::text, 12, '0'))::uuid,
                   CASE n WHEN 1 THEN id ELSE ('f0000000-0000-7000-8000-' || lpad((n - 1)::text, 12, '0'))::uuid END,
                   'olga', {columns} FROM compliance.cases, generate_series(1, 100) AS n""",
    )
    rows(
        dsn,
        """SET session_replication_role = replica;
           INSERT INTO compliance.case_events SELECT c.id, n, c.created_at, 'olga',
               CASE n WHEN 1 THEN 'OPENED' ELSE 'RESOLVED' END, '{}'
           FROM compliance.cases c, generate_series(1, 2) AS n WHERE c.reopens_id IS NOT NULL""",
    )
    dossier, _ = await fetch(payers, payment)
    assert len(records(dossier, "cases")) == 100
    assert len(records(dossier, "alerts")) == 1, "however often it was reopened"
    cut = ("events", "deliveries", "alerts", "cases", "timelines")
    assert [gaps(dossier).get(name) for name in cut] == [["limit"]] * len(cut)
    last = "f0000000-0000-7000-8000-" + "100".zfill(12)
    for statement in (
        "DELETE FROM compliance.case_events WHERE case_id = ",
        "DELETE FROM compliance.cases WHERE id = ",
    ):
        rows(dsn, f"SET session_replication_role = replica; {statement}'{last}'")
    dossier, _ = await fetch(payers, payment)
    assert len(records(dossier, "cases")) == 100
    assert not set(cut) & set(gaps(dossier)), "as many as it holds"


# -- who got one ------------------------------------------------------------------------------------------------------


async def test_who_got_a_dossier_is_in_the_audit(payers: Payers, db: Database, dsn: str, tmp_path: Path) -> None:
    """With the head of it; whoever got none is not there. The console shows it like everything that was done."""
    made = await payers.pay("10.00")
    path = f"/v1/payments/{made['id']}/dossier"
    own = payers.api.headers("teller", "compliance:resolve", "COMPLIANCE_OFFICER")
    assert (await payers.api.client.get(path, headers=own)).status_code == 403
    assert (await payers.api.client.get(path, headers=payers.headers)).status_code == 403
    assert (await payers.api.client.get(f"/v1/payments/{uuid4()}/dossier", headers=officer(payers))).status_code == 404
    assert exports(dsn) == []
    first, _ = await fetch(payers, made["id"])
    second, _ = await fetch(payers, made["id"])
    assert exports(dsn) == [
        ("olga", f"dossier:{made['id']}", one["manifest"]["head"], gaps(one) == {}) for one in (first, second)
    ]
    async with serving(db, tmp_path / "console", app) as site:
        page = await (await site.signed_in("ada")).get("/console/audit")
    assert ("dossier.exported" in page.text, "olga" in page.text, made["id"] in page.text) == (True, True, True)


async def test_no_dossier_leaves_that_is_not_in_the_audit(payers: Payers, dsn: str) -> None:
    made = await payers.pay("10.00")
    rows(dsn, "ALTER TABLE duly.audit ADD CONSTRAINT nothing CHECK (action <> 'dossier.exported')")
    answer = await payers.api.client.get(f"/v1/payments/{made['id']}/dossier", headers=officer(payers))
    assert (answer.is_success, b"manifest" in answer.content) == (False, False)


async def test_one_session_is_enough(payers: Payers, db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits with a session in hand for another: many who ask at once would wait for each other."""
    made = await payers.pay("10.00")
    single = db.with_pool(1)
    monkeypatch.setattr(payers.api.fastapi.state, "db", single)
    try:
        await fetch(payers, made["id"])
    finally:
        await single.close()
