"""What moved on accounts, measured in one pass by the database, beside a plain loop in Python."""

from __future__ import annotations

import random
from collections.abc import Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Any
from uuid import UUID

import pytest

from apps.finance.ledger import service as ledger
from apps.finance.ledger import store_flows
from apps.finance.ledger.model import FlowQuestion, Moved
from duly.db import Database
from duly.testing import BusinessClock
from tests.apps.finance.compliance.acting import open_customer, post
from tests.apps.finance.payments.acting import do
from tests.support import rows

ENTRIES = """
SELECT e.version, e.posted_at, a.side * e.amount, t.reverses_id IS NOT NULL FROM ledger.entries e
JOIN ledger.accounts a ON a.id = e.account_id JOIN ledger.transactions t ON t.id = e.transaction_id
WHERE e.account_id = %(id)s ORDER BY e.version
"""
WINDOWS = {"hour": timedelta(hours=1), "day": timedelta(hours=24), "week": timedelta(hours=168)}


def count(entries: Sequence[Any], version: int, at: datetime, window: timedelta) -> Moved:
    """The loop that it must agree with."""
    mine = [
        amount
        for number, moment, amount, is_reversal in entries
        if number <= version and moment >= at - window and not is_reversal
    ]
    outs, ins = [-one for one in mine if one < 0], [one for one in mine if one > 0]
    return Moved(len(outs), sum(outs), len(ins), sum(ins))


async def test_it_counts_what_a_loop_counts(db: Database, dsn: str, clock: BusinessClock) -> None:
    """Hundreds of entries of few accounts, many of one moment, some reversed; asked about every one of them at once."""
    dice = random.Random(11)
    clock.freeze(clock.now())
    accounts = [await do(db, open_customer) for _ in range(4)]
    for _ in range(150):
        one, two = dice.sample(accounts, 2)
        amount = f"{dice.randint(1, 999)}.{dice.randint(0, 99):02}"
        made = await do(db, partial(post, debit=one, credit=two, amount=amount))
        if dice.random() < 0.1:
            await do(db, partial(ledger.reverse, transaction_id=made, reason="typo"))
        clock.advance(seconds=dice.choice([0, 0, 0, 1, 1800, 3600, 40_000, 86_400]))
    entries = {account: rows(dsn, ENTRIES, {"id": account}) for account in accounts}
    asked = [
        FlowQuestion(account, version, moment) for account, found in entries.items() for version, moment, _, _ in found
    ]
    dice.shuffle(asked)
    answers = await do(db, lambda tx: ledger.read_flows(tx, asked))
    assert len(answers) == len(asked) >= 300
    for question, flow in zip(asked, answers, strict=True):
        for name, window in WINDOWS.items():
            expected = count(entries[question.account_id], question.version, question.at, window)
            assert flow.windows[name] == expected, (question, name)
    for most in (1, 5, 40):
        capped = await do(db, partial(ledger.read_flows, asked=asked, most=most))
        known = 0
        for question, flow in zip(asked, capped, strict=True):
            for name, window in WINDOWS.items():
                mine = entries[question.account_id]
                is_short = sum(1 for number, moment, _, _ in mine if number <= question.version
                               and moment >= question.at - window) <= most  # fmt: skip
                known_window = count(mine, question.version, question.at, window) if is_short else None
                assert flow.windows[name] == known_window, (question, name, most)
                known += is_short
        assert 0 < known < 3 * len(asked)


@pytest.mark.parametrize("at_once", [1, store_flows.MOST_AT_ONCE])
async def test_an_answer_is_the_same_alone_and_among_others(
    db: Database, dsn: str, clock: BusinessClock, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    """At the limit, too: what else is in a batch, and how it is cut into statements, changes nothing."""
    monkeypatch.setattr(store_flows, "MOST_AT_ONCE", at_once)
    clock.freeze(clock.now())
    one, two = [await do(db, open_customer) for _ in range(2)]
    for minutes in (1, 1, 1, 90, 1, 1, 1, 1, 1, 400, 1, 20_000, 1, 1):
        await do(db, lambda tx: post(tx, one, two, "5.00"))
        clock.advance(minutes=minutes)
    asked = [FlowQuestion(one, version, moment) for version, moment, _, _ in rows(dsn, ENTRIES, {"id": one})]
    for most in range(1, 15):
        together = await do(db, partial(ledger.read_flows, asked=asked, most=most))
        alone = [(await do(db, partial(ledger.read_flows, asked=[each], most=most)))[0] for each in asked]
        assert together == alone, most


async def test_what_lies_between_questions_is_not_read(
    db: Database, dsn: str, clock: BusinessClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an event that was held up, and one of today: two stretches, and nothing of the weeks in between."""
    seen: list[Any] = []
    real = store_flows._portions

    def note(found: Sequence[Any]) -> Any:
        seen.extend(found)
        return real(found)

    monkeypatch.setattr(store_flows, "_portions", note)
    one, two = [await do(db, open_customer) for _ in range(2)]
    for _ in range(9):
        await do(db, lambda tx: post(tx, one, two, "5.00"))
        clock.advance(days=4)
    known = rows(dsn, ENTRIES, {"id": one})
    asked = [FlowQuestion(one, version, moment) for version, moment, _, _ in (known[1], known[8])]
    found = await do(db, partial(ledger.read_flows, asked=asked, most=3))
    assert [flow.windows["week"] for flow in found] == [Moved(2, 1000, 0, 0)] * 2
    assert [(each.after, each.last) for each in seen] == [(0, 2), (7, 9)]


async def test_nothing_is_asked_about_nothing(db: Database) -> None:
    assert await do(db, lambda tx: ledger.read_flows(tx, [])) == []
    assert await do(db, lambda tx: ledger.count_receivers(tx, [])) == []


async def test_an_answer_does_not_change_with_what_comes_later(db: Database, dsn: str, clock: BusinessClock) -> None:
    one, two = [await do(db, open_customer) for _ in range(2)]
    await do(db, lambda tx: post(tx, one, two, "5.00"))
    ((version, moment, _, _),) = rows(dsn, ENTRIES, {"id": one})
    asked = [FlowQuestion(UUID(str(one)), version, moment)]
    before = await do(db, lambda tx: ledger.read_flows(tx, asked))
    for _ in range(3):
        clock.advance(minutes=1)
        await do(db, lambda tx: post(tx, one, two, "7.00"))
    assert await do(db, lambda tx: ledger.read_flows(tx, asked)) == before
