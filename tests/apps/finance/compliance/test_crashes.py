"""Crashes at every step: opening, screening, resolving, reversing, releasing, coming due, expiring (F9, F10, FAULTS).

kill -9 of real processes, exceptions in ours, and COMMITs that are lost, or whose answers are.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx2
import pytest

from apps.finance.compliance import resolving, service
from apps.finance.compliance.model import ReasonCode, Verdict
from apps.sandbox.bank import Behaviour
from duly import failpoints
from duly.auth.issuer import Issuer
from duly.db import Database
from duly.failpoints import FailpointHit
from duly.outbox.relay import Relay
from duly.settings import Settings
from tests.apps.conftest import serving
from tests.apps.finance.compliance.acting import APPROVE, REJECT, ROLE, SCOPE, Office
from tests.apps.finance.compliance.test_aml import screen
from tests.apps.finance.compliance.test_upkeep import undo
from tests.apps.finance.payments.acting import do
from tests.apps.finance.payments.test_crashes import armed
from tests.apps.transfers.acting import new_key
from tests.engine.cli.commands import environment, free_port, running, status, wait_until
from tests.engine.jobs.wire import Cut, breaking_wire
from tests.engine.jobs.witness import expire_leases
from tests.support import finish, python, rows, value

pytestmark = pytest.mark.timeout(240)
REVERSALS = "SELECT count(*) FROM ledger.transactions WHERE reverses_id IS NOT NULL"
WORK = """
    import asyncio, os
    from apps.wiring import app
    from duly.db import Database
    from duly.jobs.worker import Worker

    async def main():
        db = Database(os.environ["DATABASE_URL"])
        ours = {name: one for name, one in app.handlers.items() if name.startswith(tuple(os.environ["NAMES"].split()))}
        await Worker(db, ours).run_once()
        await db.close()

    asyncio.run(main())
"""


@pytest.fixture
def disarmed() -> Iterator[None]:
    """Whatever a test arms in this process."""
    yield
    failpoints.arm("")


async def kill_worker(dsn: str, point: str, *names: str) -> None:
    """A worker of its own for these jobs that dies there."""
    process = python(dsn, WORK, failpoints=armed(point), env={"NAMES": " ".join(names)})
    code, output = await asyncio.to_thread(finish, process, 90)
    assert code == -signal.SIGKILL, output


async def heal(office: Office) -> None:
    """Others take over what died."""
    for _ in range(3):
        expire_leases(office.dsn)
        rows(office.dsn, "UPDATE duly.jobs SET run_at = duly.now() WHERE waits = 'retry'")
        await office.screen()


class Process:
    """A real ``duly api`` with failpoints, and people who may use it."""

    def __init__(self, dsn: str, home: Path) -> None:
        self.env = environment(
            DULY_APP="apps.wiring:app", DATABASE_URL=dsn, DULY_DATA=str(home), PORT=str(free_port()),
            DULY_ALLOW_UNSAFE_DATABASE="1",
        )  # fmt: skip
        self.url = f"http://127.0.0.1:{self.env['PORT']}"
        self.log = home.with_suffix(".log")
        issuer = Issuer.open(Settings(data=home), port=int(self.env["PORT"]))
        self.officer = issuer.sign("olga", scopes=[SCOPE], roles=[ROLE])
        self.teller = issuer.sign("teller", scopes=["payments:initiate"], roles=["PAYMENTS_INITIATOR"])

    def run(self, failpoints: str = "") -> Any:
        return running("api", env={**self.env, "DULY_FAILPOINTS": failpoints}, log=self.log)

    def wait(self) -> None:
        wait_until(lambda: status(f"{self.url}/readyz") == 200, what="/readyz is 200")

    def post(self, path: str, body: Any, key: str, token: str) -> httpx2.Response:
        """A client that comes again, with its key, while the server is too busy to fetch the issuer's keys."""
        headers = {"Authorization": f"Bearer {token}", "Idempotency-Key": key}
        for _ in range(10):
            answer = httpx2.post(self.url + path, json=body, headers=headers, timeout=60)
            if answer.status_code != 503:
                break
        return answer


async def kill_api(process: Process, point: str, path: str, body: Any, key: str, token: str) -> None:
    """A request that its server does not survive."""
    with process.run(armed(point)) as api:
        await asyncio.to_thread(process.wait)
        with pytest.raises(httpx2.TransportError):
            await asyncio.to_thread(process.post, path, body, key, token)
        assert api.wait(10) == -signal.SIGKILL


async def repeat(process: Process, path: str, body: Any, key: str, token: str) -> httpx2.Response:
    """The same request to a server that lives."""
    with process.run():
        await asyncio.to_thread(process.wait)
        return await asyncio.to_thread(process.post, path, body, key, token)


# -- opening ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("point", "kept"),
    [
        ("handler.mid", 0),  # screened
        ("handler.mid@2", 0),  # held, and the payment is written
        ("handler.mid@3", 0),  # the case is written, too; no timer, no fact
        ("http.before_commit", 0),
        ("http.before_response", 1),
    ],
)
async def test_a_held_payment_and_its_case_begin_together_or_not_at_all(
    office: Office, tmp_path: Path, point: str, kept: int
) -> None:
    """F5: the client comes again with its key."""
    process = Process(office.dsn, tmp_path / "api")
    ends = {"from": str(office.payers.ann), "to": str(office.payers.ben)}
    given = ("/v1/payments", {**ends, "amount": "60.00", "currency": "PLN"}, new_key(), process.teller)
    await kill_api(process, point, *given)
    assert (office.count("payments.payments"), office.count("compliance.cases")) == (kept, kept)
    office.check()
    again = await repeat(process, *given)
    assert (again.status_code, again.json()["state"]) == (202, "PENDING_REVIEW")
    assert (office.count("payments.payments"), office.count("compliance.cases")) == (1, 1)
    office.check()


# -- screening --------------------------------------------------------------------------------------------------------

SCREENING = [
    "worker.claimed",
    "worker.before_handler",
    "inbox.marked",
    "handler.mid",  # measured
    "handler.mid@2",  # decided, and logged
    "handler.mid@3",  # alerts and cases are written; no timers, no facts
    "worker.handler_done",
    "settle.written",
    "worker.before_commit",
    "worker.committed",
]


@pytest.mark.parametrize("point", SCREENING)
async def test_wherever_the_screening_is_killed_each_transaction_is_screened_once(office: Office, point: str) -> None:
    """F9: alert, case, fact, timer and inbox row are one commit; never twice, never missed."""
    posted = [await office.post(amount) for amount in ("10.00", "50.00", "5.00")]
    await Relay(office.db).run_once()
    await kill_worker(office.dsn, point, "consumer:aml-screening")
    office.check()
    assert office.count("compliance.cases") == (1 if point == "worker.committed" else 0)
    await heal(office)
    assert (office.count("compliance.alerts"), office.count("compliance.cases")) == (1, 1)
    assert office.facts(posted[1]) == ["aml.flagged"]
    logged = "SELECT count(*) FROM decisions.log WHERE subject = ANY(%(ids)s)"
    assert value(office.dsn, logged, {"ids": posted}) == 3
    office.check()


@pytest.mark.usefixtures("disarmed")
@pytest.mark.parametrize("point", ["handler.mid", "handler.mid@2", "handler.mid@3"])
async def test_an_exception_while_screening_leaves_nothing(office: Office, point: str) -> None:
    transaction = await office.post("60.00")
    failpoints.arm(armed(point, "raise"))
    await screen(office.db)
    failpoints.arm("")
    office.check()
    await heal(office)
    assert (office.count("compliance.cases"), office.facts(transaction)) == (1, ["aml.flagged"])
    office.check()


# -- resolving --------------------------------------------------------------------------------------------------------

HELD = ("handler.mid", "handler.mid@2", "handler.mid@3", "http.before_commit", "http.before_response")


@pytest.mark.parametrize("point", HELD)
@pytest.mark.parametrize("body", [APPROVE, REJECT], ids=["release", "void"])
async def test_an_api_killed_while_it_ends_a_review_has_ended_it_once_or_not_at_all(
    office: Office, tmp_path: Path, point: str, body: dict[str, str]
) -> None:
    """F10: the hold, the posting, the payment, the case, the facts and the key are one commit."""
    payment, case = await office.hold()
    process = Process(office.dsn, tmp_path / "api")
    given = (f"/v1/compliance/cases/{case}/resolve", body, new_key(), process.officer)
    await kill_api(process, point, *given)
    is_kept = point == "http.before_response"
    over = "PROCESSING" if body is APPROVE else "REJECTED"
    assert (office.status(case), office.payers.state(payment)) == (
        ("RESOLVED", over) if is_kept else ("OPEN", "PENDING_REVIEW")
    )
    office.check()
    again = await repeat(process, *given)
    assert (again.status_code, again.headers.get("idempotent-replayed", "false")) == (200, str(is_kept).lower())
    assert (office.status(case), office.payers.state(payment)) == ("RESOLVED", over)
    assert await office.payers.both() == (("40.00", "0.00") if body is APPROVE else ("100.00", "0.00"))
    office.check()
    office.payers.check()


@pytest.mark.parametrize("point", HELD)
async def test_an_api_killed_while_a_second_officer_confirms_has_done_so_once_or_not_at_all(
    office: Office, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    """F10, four eyes: what is proposed stays proposed, or it is done with both names."""
    monkeypatch.setenv("COMPLIANCE_FOUR_EYES", "*=1")
    payment, case = await office.hold()
    await office.do(case, "resolve", APPROVE, who="otto")
    process = Process(office.dsn, tmp_path / "api")
    process.env["COMPLIANCE_FOUR_EYES"] = "*=1"
    given = (f"/v1/compliance/cases/{case}/confirm", None, new_key(), process.officer)
    await kill_api(process, point, *given)
    is_kept = point == "http.before_response"
    assert (office.status(case), office.payers.state(payment)) == (
        ("RESOLVED", "PROCESSING") if is_kept else ("PROPOSED", "PENDING_REVIEW")
    )
    office.check()
    again = await repeat(process, *given)
    assert (again.status_code, again.headers.get("idempotent-replayed", "false")) == (200, str(is_kept).lower())
    resolution = again.json()["resolution"]
    assert (resolution["resolvedBy"], resolution["confirmedBy"], resolution["effect"]) == ("otto", "olga", "RELEASED")
    assert office.lines(case) == ["OPENED", "PROPOSED", "RESOLVED"]
    assert await office.payers.both() == ("40.00", "0.00")
    office.check()
    office.payers.check()


@pytest.mark.parametrize("point", ["handler.mid", "handler.mid@2", "http.before_commit", "http.before_response"])
async def test_an_api_killed_while_it_reverses_has_reversed_once_or_not_at_all(
    office: Office, tmp_path: Path, point: str
) -> None:
    """F10: reversed and not resolved, or resolved and not told, is never seen."""
    _, case = await office.flag()
    process = Process(office.dsn, tmp_path / "api")
    given = (f"/v1/compliance/cases/{case}/resolve", REJECT, new_key(), process.officer)
    await kill_api(process, point, *given)
    is_kept = point == "http.before_response"
    assert value(office.dsn, REVERSALS) == int(is_kept)
    office.check()
    again = await repeat(process, *given)
    assert (again.status_code, again.json()["resolution"]["effect"]) == (200, "REVERSED")
    assert value(office.dsn, REVERSALS) == 1
    assert await office.payers.both() == ("100.00", "0.00")
    office.check()


@pytest.mark.usefixtures("disarmed")
@pytest.mark.parametrize("point", ["handler.mid", "handler.mid@2", "handler.mid@3", "handler.mid@4"])
async def test_an_exception_while_a_payment_is_called_back_leaves_it(office: Office, point: str) -> None:
    """The hold was let go, and nothing reversed; reversed, and the payment not changed; all but the case."""
    payment, held = await office.hold()
    await office.do(held, "resolve", APPROVE)
    office.payers.order(Behaviour.BUSY)
    await office.screen()
    case = office.case_of_transaction(str(value(office.dsn, "SELECT transaction_id FROM payments.payments")))
    work: Any = lambda tx: resolving.resolve(  # noqa: E731 - said twice
        tx, UUID(case), decision=Verdict.REJECT, reason_code=ReasonCode.FRAUD, reason="x", actor="olga"
    )
    failpoints.arm(armed(point, "raise"))
    with pytest.raises(FailpointHit):
        await do(office.db, work)
    failpoints.arm("")
    assert (office.status(case), office.payers.state(payment), value(office.dsn, REVERSALS)) == ("OPEN", "FAILED", 0)
    office.check()
    office.payers.check()
    await do(office.db, work)
    assert (office.effect(case), office.payers.state(payment)) == ("REVERSED", "PERMANENTLY_FAILED")
    office.check()
    office.payers.check()


@pytest.mark.usefixtures("disarmed")
async def test_an_exception_while_a_case_is_reopened_leaves_it(office: Office) -> None:
    _, case = await office.hold()
    await office.do(case, "resolve", REJECT)
    failpoints.arm(armed("handler.mid", "raise"))
    with pytest.raises(FailpointHit):
        await do(office.db, lambda tx: service.reopen(tx, UUID(case), reason="x", actor="olga"))
    failpoints.arm("")
    assert office.count("compliance.cases") == 1
    office.check()
    await office.do(case, "reopen", {"reason": "x"}, expect=201)
    office.check()


@pytest.mark.parametrize("cut", ["statement", "reply"])
@pytest.mark.parametrize("has_key", [True, False])
async def test_a_decision_whose_commit_got_no_answer_was_made_once(
    office: Office, tmp_path: Path, cut: Cut, has_key: bool
) -> None:
    """E5.6: the officer sees 200, or that it is decided; and the money went back once."""
    _, case = await office.flag()
    async with breaking_wire(office.dsn) as wire:
        db = Database(wire.dsn, settings=Settings(connect_timeout_seconds=2))
        async with serving(db, tmp_path / "cut") as api:
            headers = api.headers("olga", SCOPE, ROLE)
            assert (await api.client.get("/v1/compliance/cases", headers=headers)).status_code == 200
            wire.cut_next = cut
            headers |= {"Idempotency-Key": new_key()} if has_key else {}
            path = f"/v1/compliance/cases/{case}/resolve"
            answer = await api.client.post(path, json=REJECT, headers=headers)
        await db.close()
    assert (wire.cuts, answer.status_code) == (1, 200), answer.text
    assert (office.effect(case), value(office.dsn, REVERSALS)) == ("REVERSED", 1)
    office.check()


# -- because it is time -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("point", ["handler.mid", "worker.before_commit", "worker.committed"])
async def test_that_a_case_is_late_is_told_once_although_the_worker_is_killed(office: Office, point: str) -> None:
    _, case = await office.hold()
    office.clock.advance(hours=73)
    await kill_worker(office.dsn, point, "compliance.case-due")
    office.check()
    await heal(office)
    assert office.lines(case) == ["OPENED", "OVERDUE"]
    assert office.facts(case).count("compliance.case.overdue") == 1
    assert value(office.dsn, "SELECT count FROM duly.alerts WHERE subject LIKE 'compliance.overdue:%%'", {}) == 1
    office.check()


@pytest.mark.parametrize("point", ["handler.mid", "handler.mid@2", "worker.before_commit", "worker.committed"])
async def test_a_review_and_its_case_expire_together_although_the_worker_is_killed(office: Office, point: str) -> None:
    """F10: the payment is rejected, and the case not; or the case, and nobody told: never seen."""
    payment, case = await office.hold()
    office.clock.advance(days=7.1)
    await kill_worker(office.dsn, point, "payments.expire-review")
    is_over = point == "worker.committed"
    assert (office.payers.state(payment), office.status(case)) == (
        ("REJECTED", "EXPIRED") if is_over else ("PENDING_REVIEW", "OPEN")
    )
    await heal(office)
    assert (office.payers.state(payment), office.status(case)) == ("REJECTED", "EXPIRED")
    office.check()
    office.payers.check()


@pytest.mark.parametrize("point", ["handler.mid", "worker.before_commit", "worker.committed"])
async def test_a_recovery_that_is_killed_opens_each_case_once(office: Office, point: str) -> None:
    payment, _ = await office.hold()
    undo(office.dsn)
    rows(office.dsn, "SELECT duly.schedule('compliance.recover')")
    await kill_worker(office.dsn, point, "compliance.recover")
    assert office.count("compliance.cases") == (1 if point == "worker.committed" else 0)
    await heal(office)
    rows(office.dsn, "SELECT duly.schedule('compliance.recover')")
    await office.screen()
    assert office.status(office.case_of(payment)) == "OPEN"
    assert office.count("compliance.cases") == 1
    office.check()
