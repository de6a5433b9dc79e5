"""Deciding about many at once: as one by one, in a fixed number of statements (F11)."""

from __future__ import annotations

from datetime import UTC, datetime
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
        questions = [many.Question(facts, f"s{number}", in_force.now) for number, facts in enumerate(FACTS)]
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
            asked = [many.Question(facts, "s", in_force.now) for facts in FACTS * times]
            assert len({one.id for one in await many.evaluate_many(tx, in_force, asked)}) == len(asked)
        counts.append(len(sent))
    assert counts[1] == counts[2] <= 4, counts
    assert value(dsn, "SELECT count(*) FROM decisions.log") == 4 * 52


async def test_now_is_when_it_happened(office: Office, db: Database) -> None:
    """However late it is decided: a rule on ``now`` says the same. When that was, the log knows as well."""
    await office.make_set()
    await office.rule(conditions={"field": "now", "op": "lt", "value": "2033-01-01T00:00:00Z"})
    moments = [datetime(2032, 12, 31, tzinfo=UTC), datetime(2033, 1, 2, tzinfo=UTC)]
    async with db.transaction() as tx:
        in_force = await many.find_in_force(tx, "screening")
        made = await many.evaluate_many(tx, in_force, [many.Question(FACTS[0], "s", at) for at in moments])
    assert [len(one.verdict.matched) for one in made] == [1, 0]
    assert [one.facts["now"] for one in made] == [at.isoformat() for at in moments]
    assert {one.at for one in made} == {in_force.now}


async def test_nothing_is_decided_about_nothing(office: Office, db: Database) -> None:
    async with db.transaction() as tx:
        assert await many.evaluate_many(tx, await many.find_in_force(tx, "aml-screening"), []) == []
        with pytest.raises(RuleSetNotFound):
            await many.find_in_force(tx, "nowhere")
