"""What a provider calls to say: once, in any order, never backwards, and only if it is signed (F8, E6.3)."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from apps.finance.kyc import service
from apps.finance.kyc.model import Callback, Status
from apps.sandbox import bank, identity
from apps.sandbox.identity import Behaviour
from duly.db import Database
from duly.settings import Settings
from duly.webhooks import Keyring
from duly.webhooks.receive import add_provider_secret
from duly.webhooks.signing import sign_plain
from tests.apps.finance.kyc.acting import Desk, facts_of, kept_of, subjects_of
from tests.apps.finance.ledger.acting import refused
from tests.apps.transfers.acting import until_waiting
from tests.support import rows, value


async def test_the_same_event_twice_is_200_and_nothing_more(desk: Desk, dsn: str) -> None:
    """E6.3."""
    made = await desk.create()
    event_id = str(uuid4())
    first = await desk.call(made["sessionId"], "APPROVED", event_id=event_id)
    second = await desk.call(made["sessionId"], "APPROVED", event_id=event_id)
    assert (first.json(), second.status_code, second.json()) == ({"status": "applied"}, 200, {"status": "duplicate"})
    assert facts_of(dsn, made["sessionId"]) == ["kyc.session.created", "kyc.session.approved"]
    assert (
        value(dsn, "SELECT count(*) FROM duly.received_webhooks WHERE provider_event_id = %(id)s", {"id": event_id})
        == 0
    )


@pytest.mark.parametrize("outcome", ["APPROVED", "REJECTED"])
@pytest.mark.parametrize("late", ["PENDING", "STARTED", "IN_PROGRESS", "same"])
async def test_late_and_repeated_news_never_moves_a_session_backwards(
    desk: Desk, dsn: str, outcome: str, late: str
) -> None:
    made = await desk.create()
    await desk.call(made["sessionId"], outcome)
    before = await desk.read(made["sessionId"])
    answer = await desk.call(made["sessionId"], outcome if late == "same" else late)
    assert answer.json() == {"status": "ignored"}
    assert await desk.read(made["sessionId"]) == before
    assert kept_of(dsn) == []
    desk.check()


@pytest.mark.parametrize(
    ("first", "then"), [("APPROVED", "REJECTED"), ("REJECTED", "APPROVED"), ("EXPIRED", "APPROVED")]
)
async def test_what_contradicts_the_end_is_for_a_person(desk: Desk, dsn: str, first: str, then: str) -> None:
    made = await desk.create()
    await desk.call(made["sessionId"], first)
    before = await desk.read(made["sessionId"])
    assert (await desk.call(made["sessionId"], then)).json() == {"status": "kept"}
    assert await desk.read(made["sessionId"]) == before
    assert kept_of(dsn) == [("contradicts", made["sessionId"])]
    assert subjects_of(dsn) == [f"kyc.callbacks.sandbox:{made['sessionId']}"]
    desk.check()


async def test_a_call_after_the_end_finds_a_session_that_has_expired(desk: Desk, dsn: str) -> None:
    """Also when the timer has not fired yet; what it says is kept for a person."""
    made = await desk.create()
    desk.clock.advance(hours=24.01)
    assert (await desk.call(made["sessionId"], "APPROVED")).json() == {"status": "kept"}
    assert desk.status(made["sessionId"]) == "EXPIRED"
    assert kept_of(dsn) == [("contradicts", made["sessionId"])]
    desk.check()


async def test_a_late_approval_keeps_where_its_evidence_is(desk: Desk, dsn: str) -> None:
    """Whoever looks into it can ask the provider for it; what is not opaque is not kept there either."""
    made = await desk.create()
    await desk.call(made["sessionId"], "EXPIRED")
    reference = f"ev_{uuid4().hex}"
    await desk.call(made["sessionId"], "APPROVED", evidenceRef=reference)
    await desk.call(made["sessionId"], "APPROVED", evidenceRef="passport of Ann Kowalska")
    listed = (await desk.api.client.get("/v1/kyc/callbacks/unmatched", headers=desk.headers)).json()["items"]
    assert [one["evidenceRef"] for one in listed] == [None, reference]
    with pytest.raises(psycopg.errors.CheckViolation, match="unmatched_evidence_is_opaque"):
        rows(dsn, "UPDATE kyc.unmatched_callbacks SET evidence_ref = 'Ann Kowalska'")


async def dismiss_all(desk: Desk, items: list[dict[str, Any]]) -> None:
    for one in items:
        path = f"/v1/kyc/callbacks/{one['id']}/dismiss"
        answer = await desk.api.client.post(path, json={"handled": "NO_ACTION"}, headers=desk.headers)
        assert answer.status_code == 200, answer.text


async def test_an_alert_closes_with_the_last_callback_of_its_subject(desk: Desk, dsn: str) -> None:
    """Those of other sessions, and of none, are others' business."""
    made, other = [(await desk.create())["sessionId"] for _ in range(2)]
    for session, status in ((made, "EXPIRED"), (made, "APPROVED"), (made, "REJECTED"), (str(uuid4()), "APPROVED"),
                            (other, "MAYBE")):  # fmt: skip
        await desk.call(session, status)
    subjects = ["kyc.callbacks.sandbox", *sorted(f"kyc.callbacks.sandbox:{one}" for one in (made, other))]
    assert subjects_of(dsn) == subjects
    listed = (await desk.api.client.get("/v1/kyc/callbacks/unmatched", headers=desk.headers)).json()["items"]
    mine = [one for one in listed if one["sessionId"] == made]
    await dismiss_all(desk, mine[:1])
    assert subjects_of(dsn) == subjects
    await dismiss_all(desk, mine[1:])
    subjects.remove(f"kyc.callbacks.sandbox:{made}")
    assert subjects_of(dsn) == subjects
    await dismiss_all(desk, [one for one in listed if one["sessionId"] != made])
    assert subjects_of(dsn) == []
    assert value(dsn, "SELECT count(*) FROM duly.audit WHERE action = 'alert.resolved' AND actor = 'agent'") == 3
    await desk.call(made, "APPROVED")
    assert subjects_of(dsn) == [f"kyc.callbacks.sandbox:{made}"], "and opens again"


async def test_a_callback_that_is_kept_meanwhile_keeps_its_alert(desk: Desk, dsn: str) -> None:
    """Whoever closes an alert looks once it is locked: the last one and a new one, at the same moment."""
    made = (await desk.create())["sessionId"]
    await desk.call(made, "EXPIRED")
    await desk.call(made, "APPROVED")
    (listed,) = (await desk.api.client.get("/v1/kyc/callbacks/unmatched", headers=desk.headers)).json()["items"]
    with psycopg.connect(dsn) as rival:  # another process keeps one, and has not committed
        rival.execute("SELECT duly.alert('application', %s, 'another')", [f"kyc.callbacks.sandbox:{made}"])
        rival.execute(
            "INSERT INTO kyc.unmatched_callbacks (id, provider, event_id, problem, session_id, received_at) "
            "VALUES (gen_random_uuid(), 'sandbox', repeat('a', 64), 'contradicts', %s, duly.now())",
            [made],
        )
        dismissing = asyncio.create_task(dismiss_all(desk, [listed]))
        await until_waiting(dsn, 1)
        rival.commit()
    await dismissing
    assert subjects_of(dsn) == [f"kyc.callbacks.sandbox:{made}"]


async def test_an_alert_does_not_outlive_what_it_is_about(desk: Desk, db: Database, dsn: str) -> None:
    await desk.call(str(uuid4()), "APPROVED")
    assert subjects_of(dsn) == ["kyc.callbacks.sandbox"]
    desk.clock.advance(days=401)
    async with db.transaction() as tx:
        assert await service.forget(tx) == (0, 1, False)
    assert subjects_of(dsn) == []


@pytest.mark.parametrize("behaviour", [Behaviour.TWICE, Behaviour.DISORDER, Behaviour.WAVER])
async def test_a_provider_with_bad_manners(desk: Desk, dsn: str, behaviour: Behaviour) -> None:
    """Over real HTTP, from its own page."""
    desk.order(behaviour)
    made = await desk.create()
    await desk.submit(await desk.start(made))
    (check,) = desk.provider.checks.values()
    assert len(check.calls) == 2
    assert desk.status(made["sessionId"]) == "APPROVED"
    assert kept_of(dsn) == ([("contradicts", made["sessionId"])] if behaviour is Behaviour.WAVER else [])
    desk.check()


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ({"status": "MAYBE"}, "unknown_status"),
        ({"evidenceRef": None}, "bad_evidence"),
        ({"evidenceRef": "passport of Ann Kowalska"}, "bad_evidence"),
        ({"evidenceRef": 7}, "bad_evidence"),
        ({"evidenceRef": ["a"]}, "bad_evidence"),
        ({"evidenceRef": "ev_" + "a" * 65}, "bad_evidence"),
        ({"sessionRef": "ses_" + "0" * 32}, "names_differ"),
    ],
)
async def test_what_cannot_be_applied_is_kept_without_a_word_of_it(
    desk: Desk, dsn: str, said: dict[str, Any], problem: str
) -> None:
    made = await desk.create()
    await desk.start(made)
    status = said.pop("status", "APPROVED")
    assert (await desk.call(made["sessionId"], status, **said)).json() == {"status": "kept"}
    assert desk.status(made["sessionId"]) == "IN_PROGRESS"
    ((kept, session),) = kept_of(dsn)
    assert (kept, session) == (problem, None if problem == "names_differ" else made["sessionId"])
    assert "Kowalska" not in str(rows(dsn, "SELECT u::text FROM kyc.unmatched_callbacks u"))
    desk.check()


async def test_an_unknown_session_is_kept_for_an_operator(desk: Desk, dsn: str) -> None:
    """F8: 200, so that the provider stops calling; a person deals with it once."""
    await desk.create()
    unknown = str(uuid4())
    assert (await desk.call(unknown, "APPROVED")).json() == {"status": "kept"}
    assert (await desk.call("nobody", "APPROVED", sessionRef="nothing opaque")).json() == {"status": "kept"}
    assert subjects_of(dsn) == ["kyc.callbacks.sandbox"]
    path = "/v1/kyc/callbacks"
    listed = (await desk.api.client.get(f"{path}/unmatched", headers=desk.headers)).json()["items"]
    assert [(one["clientRef"], one["sessionRef"], one["problem"], one["status"]) for one in listed] == [
        (None, None, "unknown_session", "APPROVED"), (unknown, None, "unknown_session", "APPROVED"),
    ]  # fmt: skip
    dismiss = f"{path}/{listed[0]['id']}/dismiss"
    done = {"handled": "NOT_OURS"}
    answers = await asyncio.gather(*(desk.api.client.post(dismiss, json=done, headers=desk.headers) for _ in range(2)))
    assert sorted(answer.status_code for answer in answers) == [200, 409]
    assert len((await desk.api.client.get(f"{path}/unmatched", headers=desk.headers)).json()["items"]) == 1
    both = (await desk.api.client.get(f"{path}/unmatched?all=true", headers=desk.headers)).json()["items"]
    assert (both[0]["handled"], both[0]["dismissedBy"]) == ("NOT_OURS", "agent")
    gone = await desk.api.client.post(f"{path}/{uuid4()}/dismiss", json=done, headers=desk.headers)
    assert refused(gone)[:2] == (404, "callback-not-found")
    free = await desk.api.client.post(dismiss, json={"handled": "called Ann Kowalska"}, headers=desk.headers)
    assert free.status_code == 422


async def test_a_session_is_found_by_the_providers_own_name(desk: Desk, dsn: str) -> None:
    made = await desk.create()
    await desk.start(made)
    (reference,) = desk.provider.checks
    assert (await desk.call(None or "", "APPROVED", clientRef=None, sessionRef=reference)).json() == {
        "status": "applied"
    }
    other = await desk.create()
    names = {"clientRef": other["sessionId"], "sessionRef": reference}
    assert (await desk.call("", "APPROVED", **names)).json() == {"status": "kept"}
    assert kept_of(dsn) == [("names_differ", None)]
    assert desk.status(other["sessionId"]) == "PENDING"


# -- attacks ---------------------------------------------------------------------------------------------------------


def body_of(session: str, status: str = "APPROVED") -> bytes:
    said = {"providerEventId": str(uuid4()), "clientRef": session, "status": status, "evidenceRef": str(uuid4())}
    return json.dumps(said).encode()


@pytest.mark.parametrize(
    "attack",
    ["none", "empty", "another secret", "the bank's secret", "one byte", "re-serialised", "old", "future", "no time",
     "a word", "body only"],
)  # fmt: skip
async def test_what_is_not_signed_is_401_and_nothing(desk: Desk, dsn: str, attack: str) -> None:
    """E6.3, FAULTS."""
    made = await desk.create()
    now = int(desk.clock.now().timestamp())
    body = body_of(made["sessionId"])
    sent = body
    headers = bank.sign(body, timestamp=now, secret=identity.SECRET)
    match attack:
        case "none":
            headers.pop("X-Provider-Signature")
        case "empty":
            headers["X-Provider-Signature"] = ""
        case "another secret":
            headers = bank.sign(body, timestamp=now, secret="a-secret-of-somebody-else")
        case "the bank's secret":
            headers = bank.sign(body, timestamp=now)
        case "one byte":
            sent = body.replace(b"APPROVED", b"APPROVEd")
        case "re-serialised":
            sent = json.dumps(json.loads(body), indent=1).encode()
        case "old":
            headers = bank.sign(body, timestamp=now - 301, secret=identity.SECRET)
        case "future":
            headers = bank.sign(body, timestamp=now + 400, secret=identity.SECRET)
        case "no time":
            headers.pop("X-Provider-Timestamp")
        case "a word":
            headers["X-Provider-Timestamp"] = "now"
        case "body only":
            headers["X-Provider-Signature"] = sign_plain(identity.SECRET, body)
    answer = await desk.api.client.post("/v1/webhooks/kyc/sandbox", content=sent, headers=headers)
    assert (answer.status_code, desk.status(made["sessionId"])) == (401, "PENDING")
    assert value(dsn, "SELECT count(*) FROM duly.received_webhooks") == 0


async def test_a_provider_decides_nothing_about_the_sessions_of_another(desk: Desk, db: Database, dsn: str) -> None:
    """F8: whoever can sign for one of them approves nobody of another's, by our name of a session or by its own."""
    made = await desk.create()
    await desk.start(made)
    (reference,) = desk.provider.checks
    names: list[tuple[UUID | None, str | None]] = [(UUID(made["sessionId"]), None), (None, reference)]
    for client_ref, session_ref in names:
        evidence = f"ev_{uuid4().hex}"
        callback = Callback("other", uuid4().hex * 2, client_ref, session_ref, Status.APPROVED, evidence)
        async with db.transaction() as tx:
            assert await service.receive(tx, callback) == "kept"
    assert desk.status(made["sessionId"]) == "IN_PROGRESS"
    assert kept_of(dsn) == [("unknown_session", None)] * 2


async def test_in_production_the_secret_that_everybody_knows_signs_nothing(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F8: the sandbox's secret is no secret: whoever has read it approves nobody."""
    made = await desk.create()
    settings: Settings = desk.api.fastapi.state.settings
    monkeypatch.setattr(desk.api.fastapi.state, "settings", settings.model_copy(update={"env": "production"}))
    answer = await desk.call(made["sessionId"], "APPROVED")
    assert (answer.status_code, desk.status(made["sessionId"])) == (401, "PENDING")


async def test_a_bank_of_the_same_name_is_somebody_else(desk: Desk, db: Database, dsn: str) -> None:
    """A secret that somebody added for a bank called ``sandbox`` does not sign checks."""
    made = await desk.create()
    settings: Settings = desk.api.fastapi.state.settings
    async with db.transaction() as tx:
        await add_provider_secret(tx, Keyring.open(settings), "sandbox", secret="of-the-bank-0815-4711", actor="t")
        await add_provider_secret(tx, Keyring.open(settings), "kyc.sandbox", secret="of-the-checks-0815", actor="t")
    body, now = body_of(made["sessionId"]), int(desk.clock.now().timestamp())
    path = "/v1/webhooks/kyc/sandbox"
    theirs = bank.sign(body, timestamp=now, secret="of-the-bank-0815-4711")
    assert (await desk.api.client.post(path, content=body, headers=theirs)).status_code == 401
    ours = bank.sign(body, timestamp=now, secret="of-the-checks-0815")
    assert (await desk.api.client.post(path, content=body, headers=ours)).json() == {"status": "applied"}


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"null", b'"text"', b"{}", b'{"providerEventId": "e"}', b'{"status": "APPROVED"}',
        b'{"providerEventId": "e", "status": 7}', b'{"providerEventId": "e", "status": null}',
        b'{"providerEventId": {"a": 1}, "status": "APPROVED"}', b"[" * 50_000, b'{"a":' * 5_000,
        b'{"providerEventId": "e", "status": "APPROVED", "status": "REJECTED"}', b"\xff\xfe\x00", b'{"a": NaN}',
        b'{"providerEventId": "\\ud800", "status": "APPROVED"}', b'{"providerEventId": "e", "status": "\\u0000"}',
    ],
)  # fmt: skip
async def test_a_body_that_is_none_is_a_clear_problem(desk: Desk, dsn: str, body: bytes) -> None:
    """Never 500, and the session stands."""
    made = await desk.create()
    answer = await desk.call_raw(body)
    assert answer.status_code in (200, 400, 422), answer.text
    if answer.status_code == 200:
        assert answer.json() == {"status": "kept"}
    else:
        assert answer.headers["content-type"] == "application/problem+json"
    assert desk.status(made["sessionId"]) == "PENDING"


async def test_a_large_body_is_refused(desk: Desk) -> None:
    made = await desk.create()
    body = json.dumps({"providerEventId": "e", "clientRef": made["sessionId"], "scan": "x" * 70_000}).encode()
    assert (await desk.call_raw(body)).status_code == 413
    assert (await desk.call_raw(b"x" * 2_000_000)).status_code == 413
    assert (await desk.call_raw(body_of(made["sessionId"]), provider="bank")).status_code == 404
    assert (await desk.call_raw(body_of(made["sessionId"]), provider="nobody")).status_code == 404
