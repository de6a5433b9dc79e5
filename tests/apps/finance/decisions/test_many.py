"""Deciding about many at once: as one by one, in a fixed number of statements (F11)."""

from __future__ import annotations

from decimal import Decimal

import pytest

from apps.finance.decisions import many, service
from apps.finance.decisions.model import RuleSetNotFound
from duly.db import Database
from tests.apps.finance.decisions.acting import Office
from tests.apps.transfers.acting import counting
from tests.support import value

FACTS = [{"amount": Decimal(amount), "currency": "PLN"} for amount in ("5", "5000", "999.99", "1000.01")]


async def test_it_decides_as_one_by_one_and_each_can_be_replayed(office: Office, db: Database) -> None:
    await office.make_set()
    await office.rule()
    async with db.transaction() as tx:
        in_force = await many.find_in_force(tx, "screening")
        questions = [many.Question(facts, f"s{number}") for number, facts in enumerate(FACTS)]
        together = await many.evaluate_many(tx, in_force, questions)
        alone = [await service.evaluate(tx, "screening", facts) for facts in FACTS]
    assert [one.verdict for one in together] == [one.verdict for one in alone]
    assert [one.subject for one in together] == ["s0", "s1", "s2", "s3"]
    async with db.transaction() as tx:
        for decision in together:
            logged, verdict, differences = await service.replay(tx, decision.id)
            assert (logged.subject, verdict, differences) == (decision.subject, decision.verdict, [])
    assert in_force.names == {"amount"}
    assert in_force.trace(together[1])[0]["outcome"] == "true"


async def test_statements_do_not_depend_on_how_many_there_are(office: Office, db: Database, dsn: str) -> None:
    await office.make_set()
    await office.rule()
    counts = []
    for times in (1, 1, 50):
        async with counting(db) as sent, db.transaction() as tx:
            in_force = await many.find_in_force(tx, "screening")
            asked = [many.Question(facts, "s") for facts in FACTS * times]
            assert len({one.id for one in await many.evaluate_many(tx, in_force, asked)}) == len(asked)
        counts.append(len(sent))
    assert counts[1] == counts[2] <= 4, counts
    assert value(dsn, "SELECT count(*) FROM decisions.log") == 4 * 52


async def test_nothing_is_decided_about_nothing(office: Office, db: Database) -> None:
    async with db.transaction() as tx:
        assert await many.evaluate_many(tx, await many.find_in_force(tx, "aml-screening"), []) == []
        with pytest.raises(RuleSetNotFound):
            await many.find_in_force(tx, "nowhere")
