"""Many at once, on real connections: each case ends once, and its money moves once (F10, FAULTS).

A rival session that holds a lock is the barrier: everybody queues behind it, and runs when it lets go.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any
from uuid import UUID

import psycopg
import pytest

from apps.finance.compliance import resolving, service
from apps.finance.compliance.model import ReasonCode, Verdict
from apps.finance.ledger import service as ledger
from apps.finance.payments import service as payments
from duly.db import Database
from duly.errors import Conflict
from duly.settings import Settings
from tests.apps.finance.compliance.acting import APPROVE, REJECT, Office, open_customer
from tests.apps.finance.compliance.test_aml import screen
from tests.apps.finance.ledger.test_races import DEADLOCKS
from tests.apps.finance.payments.acting import do
from tests.apps.transfers.acting import new_key, until_waiting
from tests.support import value

REVERSALS = "SELECT count(*) FROM ledger.transactions WHERE reverses_id IS NOT NULL"


@contextlib.contextmanager
def holding(dsn: str, table: str, row_id: str) -> Iterator[None]:
    """A row that somebody else has locked, until the block ends."""
    with psycopg.connect(dsn) as rival:
        rival.execute(f"SELECT 1 FROM {table} WHERE id = %s FOR NO KEY UPDATE".encode(), [row_id])
        yield
        rival.rollback()


@pytest.fixture
async def wide(dsn: str) -> Any:
    """A database with a connection for everybody."""
    db = Database(dsn, settings=Settings(pool_size=24))
    yield db
    await db.close()


def decide(case: str, decision: str, actor: str = "olga") -> Any:
    code = ReasonCode.FRAUD if decision == "REJECT" else ReasonCode.KNOWN_CUSTOMER
    return lambda tx: resolving.resolve(
        tx, UUID(case), decision=Verdict(decision), reason_code=code, reason="x", actor=actor
    )


async def test_one_of_many_who_resolve_wins(office: Office) -> None:
    payment, case = await office.hold()
    with holding(office.dsn, "payments.payments", payment):
        bodies = [(APPROVE, "olga"), (REJECT, "otto")] * 3
        trying = [asyncio.create_task(office.ask("POST", f"/{case}/resolve", body, who=who)) for body, who in bodies]
        await until_waiting(office.dsn, 6)
    answers = [await one for one in trying]
    assert Counter(answer.status_code for answer in answers) == {200: 1, 409: 5}
    (won,) = [answer.json()["resolution"]["effect"] for answer in answers if answer.status_code == 200]
    assert office.payers.state(payment) == ("PROCESSING" if won == "RELEASED" else "REJECTED")
    assert office.lines(case) == ["OPENED", "RESOLVED"]
    office.check()


async def test_one_key_resolves_once_however_often_it_comes(office: Office) -> None:
    _, case = await office.flag()
    key = {"Idempotency-Key": new_key()}
    answers = await asyncio.gather(*(office.ask("POST", f"/{case}/resolve", REJECT, **key) for _ in range(8)))
    assert {(answer.status_code, answer.content) for answer in answers} == {(200, answers[0].content)}
    assert value(office.dsn, REVERSALS) == 1
    office.check()


@pytest.mark.parametrize("first", ["resolve", "expire"])
@pytest.mark.parametrize("decision", ["APPROVE", "REJECT"])
async def test_a_decision_and_the_end_of_the_review(office: Office, wide: Database, first: str, decision: str) -> None:
    """In each order: one of them, and neither waits for the other for ever."""
    payment, case = await office.hold()
    await office.run(days=3.1)  # so that it is overdue already
    office.clock.advance(days=4)
    works: dict[str, Any] = {
        "resolve": decide(case, decision),
        "expire": lambda tx: payments.expire_review(tx, UUID(payment), tell=service.close_expired),
    }
    tasks = []
    with holding(office.dsn, "payments.payments", payment):
        for waiting, name in enumerate([first, *(one for one in works if one != first)], 1):
            tasks.append(asyncio.create_task(do(wide, works[name])))
            await until_waiting(office.dsn, waiting)
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert not isinstance(ended[0], Exception), ended
    if first == "resolve":
        assert (office.status(case), ended[1]) == ("RESOLVED", None)
    else:
        assert (office.status(case), isinstance(ended[1], Conflict)) == ("EXPIRED", True)
    assert value(office.dsn, DEADLOCKS) == 0
    office.check()


async def race(office: Office, wide: Database, table: str, row_id: str, *works: Any) -> list[Any]:
    """Each in this order behind a lock, then all of them; what came of each."""
    tasks = []
    with holding(office.dsn, table, row_id):
        for waiting, work in enumerate(works, 1):
            tasks.append(asyncio.create_task(do(wide, work)))
            await until_waiting(office.dsn, waiting)
    return await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("is_decided_first", [True, False])
@pytest.mark.parametrize("how", ["claim", "assign"])
async def test_a_decision_and_a_claim(office: Office, wide: Database, how: str, is_decided_first: bool) -> None:
    """Who has it first keeps others from deciding; who decides first leaves nothing to have."""
    _, case = await office.flag()
    take: Any = {
        "claim": lambda tx: service.claim(tx, UUID(case), actor="otto"),
        "assign": lambda tx: service.assign(tx, UUID(case), assignee="otto", actor="ida"),
    }[how]
    works = [decide(case, "REJECT"), take]
    ended = await race(office, wide, "compliance.cases", case, *(works if is_decided_first else works[::-1]))
    assert not isinstance(ended[0], Exception), ended
    assert isinstance(ended[1], Conflict)
    assert office.status(case) == ("RESOLVED" if is_decided_first else "OPEN")
    assert value(office.dsn, REVERSALS) == int(is_decided_first)
    office.check()


@pytest.mark.parametrize("is_late_first", [True, False])
@pytest.mark.parametrize("how", ["resolve", "confirm", "expire"])
async def test_that_it_is_late_and_how_it_ends(
    office: Office, wide: Database, monkeypatch: pytest.MonkeyPatch, how: str, is_late_first: bool
) -> None:
    """F10: the timer of a case, and what ends it: told before the end or not at all, and no alert outlives the case."""
    if how == "confirm":
        monkeypatch.setenv("COMPLIANCE_FOUR_EYES", "*=1")
    payment, case = await office.hold()
    if how == "confirm":
        await office.do(case, "resolve", REJECT, who="otto")
    office.clock.advance(days=7.1 if how == "expire" else 3.1)
    end: Any = {
        "resolve": decide(case, "REJECT"),
        "confirm": lambda tx: resolving.confirm(tx, UUID(case), actor="olga"),
        "expire": lambda tx: payments.expire_review(tx, UUID(payment), tell=service.close_expired),
    }[how]
    works = [lambda tx: service.come_due(tx, UUID(case)), end]
    ended = await race(office, wide, "compliance.cases", case, *(works if is_late_first else works[::-1]))
    assert [one for one in ended if isinstance(one, Exception)] == []
    begun = ["OPENED", "PROPOSED"] if how == "confirm" else ["OPENED"]
    last = "EXPIRED" if how == "expire" else "RESOLVED"
    assert office.lines(case) == [*begun, *(["OVERDUE"] if is_late_first else []), last]
    assert office.payers.state(payment) == "REJECTED"
    assert value(office.dsn, "SELECT count(*) FROM duly.alerts WHERE resolved_at IS NULL") == 0
    assert value(office.dsn, DEADLOCKS) == 0
    office.check()


@pytest.mark.parametrize("is_confirmed_first", [True, False])
@pytest.mark.parametrize("body", [APPROVE, REJECT], ids=["release", "void"])
async def test_a_confirmation_and_the_end_of_the_review(
    office: Office, wide: Database, monkeypatch: pytest.MonkeyPatch, body: dict[str, str], is_confirmed_first: bool
) -> None:
    """Four eyes, at the last moment: one of them, and the money moves as that one says."""
    monkeypatch.setenv("COMPLIANCE_FOUR_EYES", "*=1")
    payment, case = await office.hold()
    await office.do(case, "resolve", body)
    office.clock.advance(days=7.1)
    works: list[Any] = [
        lambda tx: resolving.confirm(tx, UUID(case), actor="otto"),
        lambda tx: payments.expire_review(tx, UUID(payment), tell=service.close_expired),
    ]
    ended = await race(office, wide, "payments.payments", payment, *(works if is_confirmed_first else works[::-1]))
    assert not isinstance(ended[0], Exception), ended
    if is_confirmed_first:
        assert (office.status(case), ended[1]) == ("RESOLVED", None)
        assert office.payers.state(payment) == ("PROCESSING" if body is APPROVE else "REJECTED")
    else:
        assert (office.status(case), isinstance(ended[1], Conflict)) == ("EXPIRED", True)
        assert office.payers.state(payment) == "REJECTED"
    released = is_confirmed_first and body is APPROVE
    assert await office.payers.both() == (("40.00", "0.00") if released else ("100.00", "0.00"))
    assert value(office.dsn, DEADLOCKS) == 0
    office.check()


async def test_many_claim_and_one_has_it(office: Office) -> None:
    _, case = await office.hold()
    with holding(office.dsn, "compliance.cases", case):
        trying = [asyncio.create_task(office.ask("POST", f"/{case}/claim", who=f"officer{n}")) for n in range(6)]
        await until_waiting(office.dsn, 6)
    assert Counter([(await one).status_code for one in trying]) == {200: 1, 409: 5}
    assert office.lines(case) == ["OPENED", "CLAIMED"]


async def test_many_reopen_and_one_case_follows(office: Office) -> None:
    _, case = await office.hold()
    await office.do(case, "resolve", REJECT)
    with holding(office.dsn, "compliance.cases", case):
        body = {"reason": "x"}
        trying = [asyncio.create_task(office.ask("POST", f"/{case}/reopen", body, who=f"o{n}")) for n in range(6)]
        await until_waiting(office.dsn, 6)
    assert Counter([(await one).status_code for one in trying]) == {201: 1, 409: 5}
    assert office.count("compliance.cases") == 2
    office.check()


@pytest.mark.parametrize("decision", ["REJECT", "APPROVE"])
@pytest.mark.parametrize("first", ["resolve", "reverse"])
async def test_a_decision_and_a_bookkeepers_reversal(office: Office, wide: Database, first: str, decision: str) -> None:
    """F4, F10: there is one reversal, and the case says whose it was; or that there was none when it was decided."""
    transaction, case = await office.flag()
    works: dict[str, Any] = {
        "resolve": decide(case, decision),
        "reverse": lambda tx: ledger.reverse(tx, UUID(transaction), reason="typo"),
    }
    tasks = []
    with holding(office.dsn, "ledger.transactions", transaction):
        for waiting, name in enumerate([first, *(one for one in works if one != first)], 1):
            tasks.append(asyncio.create_task(do(wide, works[name])))
            await until_waiting(office.dsn, waiting)
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert not isinstance(ended[0], Exception), ended
    decided_first = {"REJECT": "REVERSED", "APPROVE": "MONEY_STAYS"}[decision]
    assert office.effect(case) == (decided_first if first == "resolve" else "ALREADY_REVERSED")
    assert value(office.dsn, REVERSALS) == 1
    assert await office.payers.both() == ("100.00", "0.00")
    office.check()


@pytest.mark.parametrize("second", ["confirm", "refuse"])
async def test_one_of_two_confirms_or_refuses(
    office: Office, wide: Database, monkeypatch: pytest.MonkeyPatch, second: str
) -> None:
    monkeypatch.setenv("COMPLIANCE_FOUR_EYES", "*=1")
    _, case = await office.flag()
    await office.do(case, "resolve", REJECT)
    works: list[Any] = [
        lambda tx: resolving.confirm(tx, UUID(case), actor="otto"),
        (lambda tx: resolving.confirm(tx, UUID(case), actor="ida"))
        if second == "confirm"
        else (lambda tx: resolving.refuse(tx, UUID(case), reason="x", actor="ida")),
    ]
    tasks = []
    with holding(office.dsn, "compliance.cases", case):
        for waiting, work in enumerate(works, 1):
            tasks.append(asyncio.create_task(do(wide, work)))
            await until_waiting(office.dsn, waiting)
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert [isinstance(one, Conflict) for one in ended] == [False, True]
    assert (office.status(case), value(office.dsn, REVERSALS)) == ("RESOLVED", 1)
    office.check()


async def test_two_cases_of_one_payment_are_decided_at_the_same_moment(office: Office, wide: Database) -> None:
    """The review was reopened, and what it posted was flagged: both want it back, and it goes back once."""
    payment, held = await office.hold()
    await office.do(held, "resolve", APPROVE)
    again = (await office.do(held, "reopen", {"reason": "x"}, expect=201))["id"]
    await screen(wide)  # and the payment is not sent meanwhile
    flagged = office.case_of_transaction(str(value(office.dsn, "SELECT transaction_id FROM payments.payments")))
    with holding(office.dsn, "payments.payments", payment):
        trying = [asyncio.create_task(do(wide, decide(case, "REJECT"))) for case in (again, flagged)]
        await until_waiting(office.dsn, 2)
    await asyncio.gather(*trying)
    assert {office.effect(again), office.effect(flagged)} == {"ALREADY_REVERSED", "REVERSED"}
    assert value(office.dsn, REVERSALS) == 1
    assert await office.payers.both() == ("100.00", "0.00")
    office.check()


async def test_decisions_in_opposite_directions_never_deadlock(office: Office, wide: Database) -> None:
    """Many cases over the same three accounts, resolved at once."""
    accounts = [await do(wide, open_customer) for _ in range(3)]
    pairs = [(accounts[n % 3], accounts[(n + 1 + n // 3 % 2) % 3]) for n in range(12)]
    posted = [await office.post("50.00", debit=one, credit=two) for one, two in pairs]
    await office.screen()
    cases = [office.case_of_transaction(one) for one in posted]
    await asyncio.gather(*(do(wide, decide(case, "REJECT", f"o{n}")) for n, case in enumerate(cases)))
    assert {office.effect(case) for case in cases} == {"REVERSED"}
    assert value(office.dsn, DEADLOCKS) == 0
    office.check()
