"""What was lost is found again, and what is old is forgotten; what is open never is (F10)."""

from __future__ import annotations

import asyncio
from uuid import UUID

import psycopg
import pytest

from apps.finance.compliance import service, sql, workers
from apps.finance.compliance.model import CaseNotFound
from duly import Duly
from duly.db import Database
from duly.errors import Refused
from tests.apps.finance.compliance.acting import APPROVE, REJECT, Office
from tests.apps.finance.payments.acting import do
from tests.apps.transfers.acting import until_waiting
from tests.support import rows, value

# As payments were that were held before there were cases.
BEFORE_CASES = """
SET session_replication_role = replica;
DELETE FROM compliance.case_events;
DELETE FROM compliance.cases;
DELETE FROM compliance.alerts;
DELETE FROM duly.jobs WHERE name = 'compliance.case-due';
DELETE FROM duly.outbox WHERE topic = 'compliance.events';
DELETE FROM duly.events WHERE topic = 'compliance.events'
"""


def undo(dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        for statement in BEFORE_CASES.split(";\n"):
            connection.execute(statement.encode())


async def test_payments_that_were_held_before_there_were_cases_get_theirs(office: Office, db: Database) -> None:
    """Once, in bounded pages, with the decision that held them."""
    held = [(await office.hold("50.00"))[0]]
    await office.do(office.case_of(held[0]), "resolve", REJECT)
    held.append((await office.hold("51.00"))[0])
    undo(office.dsn)
    assert await do(db, service.recover) == (1, False)
    found = await office.read(office.case_of(held[1]))
    assert (found["status"], [one["name"] for one in found["alert"]["matched"]]) == ("OPEN", ["Large payment"])
    assert await do(db, service.recover) == (0, False)
    office.check()


async def test_one_whose_decision_is_no_longer_kept_gets_a_case_too(office: Office, db: Database) -> None:
    payment, _ = await office.hold("51.00")
    undo(office.dsn)
    with psycopg.connect(office.dsn, autocommit=True) as connection:
        connection.execute("SET session_replication_role = replica")
        connection.execute("DELETE FROM decisions.log WHERE rule_set_id = 'payment-screening'")
    assert await do(db, service.recover) == (1, False)
    found = await office.read(office.case_of(payment))
    assert (found["severity"], found["alert"]["matched"]) == ("MEDIUM", [])
    assert "no longer kept" in found["explanation"]["text"]
    office.check()


async def test_a_payment_that_somebody_works_on_is_left_for_the_next_time(office: Office, db: Database) -> None:
    payment, _ = await office.hold("51.00")
    undo(office.dsn)
    with psycopg.connect(office.dsn) as rival:
        rival.execute("SELECT 1 FROM payments.payments FOR NO KEY UPDATE")
        async with asyncio.timeout(10):
            assert await do(db, service.recover) == (0, False)
    assert await do(db, service.recover) == (1, False)
    assert office.status(office.case_of(payment)) == "OPEN"


async def test_a_timer_that_was_lost_is_set_again(office: Office, db: Database) -> None:
    _, case = await office.hold()
    rows(office.dsn, "DELETE FROM duly.jobs WHERE name = 'compliance.case-due'")
    assert await do(db, service.recover) == (1, False)
    office.check()
    await office.run(hours=73)
    assert office.lines(case) == ["OPENED", "OVERDUE"]
    assert await do(db, service.recover) == (0, False)


async def test_recovery_goes_on_where_it_stopped(office: Office, db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """More pages than one commit looks at: another job follows, and ends."""
    for _ in range(2):
        await office.hold("50.00")
    undo(office.dsn)
    monkeypatch.setattr(service, "PAGE", 1)
    monkeypatch.setattr(service, "PAGES", 1)
    rows(office.dsn, "SELECT duly.schedule('compliance.recover')")
    await office.screen()
    assert office.count("compliance.cases") == 2
    office.check()


async def ended(office: Office, *, years: float = 8) -> str:
    _, case = await office.hold()
    await office.do(case, "resolve", REJECT)
    office.clock.advance(days=365.25 * years)
    return case


async def test_what_ended_long_ago_is_forgotten_with_all_of_it(office: Office, db: Database) -> None:
    await ended(office)
    assert await do(db, lambda tx: service.forget(tx, days=workers.DEFAULT_DAYS)) == (1, False)
    for table in ("cases", "case_events", "alerts"):
        assert office.count(f"compliance.{table}") == 0, table


async def test_what_is_young_or_open_is_kept(office: Office, db: Database) -> None:
    await ended(office, years=6.9)
    _, waiting = await office.hold("50.00")
    office.clock.advance(days=1)
    assert await do(db, lambda tx: service.forget(tx, days=workers.DEFAULT_DAYS)) == (0, False)
    office.clock.advance(days=365 * 20)
    assert await do(db, lambda tx: service.forget(tx, days=workers.DEFAULT_DAYS)) == (1, False)
    assert office.status(waiting) == "OPEN"


async def test_a_case_is_kept_while_another_follows_it(office: Office, db: Database) -> None:
    """And then both go, the later one first; with the last of them the alert."""
    case = await ended(office)
    made = await office.do(case, "reopen", {"reason": "after all"}, expect=201)
    assert await do(db, lambda tx: service.forget(tx, days=1)) == (0, False)
    await office.do(made["id"], "resolve", REJECT)
    office.clock.advance(days=2)
    assert await do(db, lambda tx: service.forget(tx, days=1)) == (1, False)
    assert (office.count("compliance.cases"), office.count("compliance.alerts")) == (1, 1)
    assert await do(db, lambda tx: service.forget(tx, days=1)) == (1, False)
    assert (office.count("compliance.cases"), office.count("compliance.alerts")) == (0, 0)


async def test_forgetting_comes_in_bounded_batches(office: Office, dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(3):
        _, case = await office.hold("50.00")
        await office.do(case, "resolve", REJECT)
    office.clock.advance(days=3_000)
    monkeypatch.setattr(service.forget, "__kwdefaults__", {"limit": 2})
    rows(dsn, "SELECT duly.schedule('compliance.forget')")
    await office.screen()
    assert office.count("compliance.cases") == 0
    said = "SELECT array_agg(message ORDER BY execution_id) FROM duly.executions WHERE name = 'compliance.forget'"
    assert value(dsn, said) == ["forgot 2 cases; the rest follows", "forgot 1 cases"]


async def test_reopening_and_forgetting_at_the_same_moment(office: Office, db: Database) -> None:
    """Whoever is first: the case is kept, or it is not found; never a link to nothing."""
    case = await ended(office)
    with psycopg.connect(office.dsn) as rival:  # somebody is reopening it
        rival.execute("SELECT 1 FROM compliance.cases WHERE id = %s FOR NO KEY UPDATE", [case])
        async with asyncio.timeout(10):
            assert await do(db, lambda tx: service.forget(tx, days=1)) == (0, False)
    async with db.transaction() as tx:
        assert await service.forget(tx, days=1) == (1, False)
        reopening = asyncio.create_task(do(db, lambda own: service.reopen(own, UUID(case), reason="x", actor="olga")))
        await until_waiting(office.dsn, 1)
    with pytest.raises(CaseNotFound):
        await reopening
    assert office.count("compliance.cases") == 0


async def test_one_that_was_reopened_between_look_and_lock_is_kept(office: Office, db: Database) -> None:
    """It was committed after the look began: that nothing follows is asked again under the lock."""
    case = await ended(office)
    async with db.transaction() as tx:
        ids = list((await tx.execute(sql.LOCK_OLD, {"days": 1, "limit": 10})).scalars())
        assert ids == [UUID(case)]
    await office.do(case, "reopen", {"reason": "x"}, expect=201)
    async with db.transaction() as tx:
        await tx.execute(sql.ALLOW_FORGETTING)
        await tx.execute(sql.FORGET_LINES, {"ids": ids})
        assert list((await tx.execute(sql.FORGET_CASES, {"ids": ids})).scalars()) == []
    assert office.lines(case) == ["OPENED", "RESOLVED"]


@pytest.mark.parametrize("given", ["0", "-1", "x", "100000", "1.5"])
def test_a_retention_that_cannot_be_meant_is_refused(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv(workers.KEEP_VARIABLE, given)
    with pytest.raises(Refused):
        workers.kept_days()


async def test_a_released_payments_case_is_forgotten_although_the_payment_stays(office: Office, db: Database) -> None:
    _, case = await office.hold()
    await office.do(case, "resolve", APPROVE)
    office.clock.advance(days=3_000)
    assert await do(db, lambda tx: service.forget(tx, days=workers.DEFAULT_DAYS)) == (1, False)
    assert office.count("payments.payments") == 1


@pytest.mark.parametrize(
    ("name", "given"),
    [("COMPLIANCE_FOUR_EYES", "a lot"), ("COMPLIANCE_SLA_HOURS", "CRITICAL=0"), ("COMPLIANCE_KEEP_DAYS", "0")],
)
def test_a_setting_that_nobody_understands_is_refused_at_the_start(
    monkeypatch: pytest.MonkeyPatch, name: str, given: str
) -> None:
    """And not when the first payment is to be held."""
    monkeypatch.setenv(name, given)
    with pytest.raises(Refused, match=name):
        workers.register(Duly())
