"""The log alone gives the same answer again, whatever was changed since (F11); dry runs say what would change."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from apps.finance.decisions import service
from apps.finance.decisions.loading import Cache
from duly.db import Database
from duly.testing import BusinessClock
from tests.apps.finance.decisions import oracle
from tests.apps.finance.decisions.acting import LARGE, Office
from tests.support import rows, value

ACTIONS = st.fixed_dictionaries({"decision": st.sampled_from(["APPROVE", "REVIEW", "REJECT"])})
RULES = st.tuples(oracle.trees(), st.integers(-2, 2), st.booleans(), ACTIONS)


def written(rule: Any) -> dict[str, Any]:
    conditions, priority, terminate, action = rule
    return {"name": "r", "conditions": conditions, "priority": priority, "terminate": terminate, "action": action}


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(
    before=st.lists(RULES, min_size=1, max_size=4), after=st.lists(RULES, max_size=2),
    contexts=st.lists(oracle.contexts(), min_size=1, max_size=4), forget=st.booleans(),
)  # fmt: skip
async def test_a_replay_is_the_same_after_any_edit(
    db: Database, before: Any, after: Any, contexts: Any, forget: bool
) -> None:
    """F11: rules changed and deprecated, settings and lists replaced, another process: the same decision."""
    name = f"set-{uuid4()}"
    async with db.transaction() as tx:
        for list_id, members in oracle.LISTS.items():
            await service.put_list(tx, list_id, members=members, actor="x")
        await service.create_rule_set(
            tx, name, description="d", settings={"fields": oracle.FIELDS}, actor="x"
        )  # fmt: skip
        rules = [(await service.create_rule(tx, name, written=written(rule), actor="x"))[0] for rule in before]
        for rule in rules:
            await activate(tx, rule.id)
    made = []
    for context in contexts:
        async with db.transaction() as tx:
            made.append(await service.evaluate(tx, name, context))
    async with db.transaction() as tx:
        for rule, change in zip(rules, after, strict=False):
            await service.change_rule(tx, rule.id, written=written(change), expected_version=None, actor="x")
            await activate(tx, rule.id)
        await service.deprecate_rule(tx, rules[-1].id, actor="x")
        await service.put_list(tx, "sanctioned", members=["PLN", "a"], actor="x")
    if forget:
        service._cache = Cache()
    for decision in made:
        async with db.transaction() as tx:
            logged, verdict, differences = await service.replay(tx, decision.id)
            _, told = await service.read_decision(tx, decision.id)
        assert (differences, verdict) == ([], decision.verdict)
        assert (logged.facts, logged.at) == (decision.facts, decision.at)
        assert [line["outcome"] for line in told].count("true") == len(decision.verdict.matched)


async def activate(tx: Any, rule_id: UUID) -> None:
    await service.activate_rule(tx, rule_id, version=None, acknowledge_warnings=True, actor="x")


async def test_a_replay_says_same_or_what_differs(office: Office, dsn: str) -> None:
    await office.make_set()
    await office.rule()
    made = await office.evaluate({"amount": "5000"})
    replayed = (await office.ask("POST", f"/decisions/{made['id']}/replay")).json()
    assert (replayed["same"], replayed["differences"], replayed["engineChanged"]) == (True, [], False)
    forged = """
        INSERT INTO decisions.log SELECT %(id)s, rule_set_id, rule_set_version, snapshot_id, '0', subject, at,
            'APPROVE', score, facts, '[]', incomplete, evaluated, latency_us FROM decisions.log
    """
    other = uuid4()
    rows(dsn, forged, {"id": other})
    replayed = (await office.ask("POST", f"/decisions/{other}/replay")).json()
    assert (replayed["same"], replayed["differences"]) == (False, ["decision", "matched"])
    assert (replayed["decision"], replayed["engineChanged"]) == ("REVIEW", True)
    assert (await office.ask("POST", f"/decisions/{uuid4()}/replay")).status_code == 404


async def test_a_replay_looks_into_the_lists_of_then(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    """F11: in another process, too."""
    await office.make_set()
    await office.ask("PUT", "/lists/sanctioned", {"members": ["acc-1"]})
    await office.rule({"field": "to", "op": "in", "list": "sanctioned"}, decision="REJECT")
    made = await office.evaluate({"to": "acc-1"})
    await office.ask("PUT", "/lists/sanctioned", {"members": ["acc-2"]})
    monkeypatch.setattr(service, "_cache", Cache())
    replayed = (await office.ask("POST", f"/decisions/{made['id']}/replay")).json()
    assert (replayed["same"], replayed["decision"]) == (True, "REJECT")


MONEY: dict[str, Any] = {"money": {"amount": "amount", "currency": "currency"}}


async def test_a_dry_run_tells_the_difference_in_decisions_and_in_money(office: Office, dsn: str) -> None:
    await office.make_set(**MONEY)
    await office.rule()
    for amount, currency in (("100", "PLN"), ("200.50", "PLN"), ("300", "EUR"), ("5000", "PLN"), ("1", "PLN")):
        await office.evaluate({"amount": amount, "currency": currency, "to": "x"})
    await office.evaluate({"currency": "PLN"})
    candidate = await office.draft({"field": "amount", "op": "gte", "value": "100"}, decision="REJECT")
    answer = await office.ask("POST", f"/rules/{candidate['id']}/dry-run", {})
    assert answer.status_code == 200, answer.text
    run = answer.json()
    assert (run["examined"], run["unanswered"], run["drifted"], run["next"]) == (6, 1, 0, None)
    assert run["matched"] == {"count": 4, "money": {"EUR": "300", "PLN": "5300.50"}}
    assert run["changes"] == [
        {"before": "APPROVE", "after": "REJECT", "count": 3, "money": {"EUR": "300", "PLN": "300.50"}},
        {"before": "REVIEW", "after": "REJECT", "count": 1, "money": {"PLN": "5000"}},
    ]
    assert len(run["examples"]) == 4
    assert value(dsn, "SELECT count(*) FROM decisions.log") == 6  # nothing was decided
    assert (await office.get(f"/rules/{candidate['id']}"))["status"] == "DRAFT"


async def test_a_dry_run_of_a_change_and_of_taking_a_rule_away(office: Office) -> None:
    await office.make_set(**MONEY)
    rule = await office.rule()
    for amount in ("500", "1500", "2500"):
        await office.evaluate({"amount": amount, "currency": "PLN"})
    body = {"name": "Higher", "conditions": {**LARGE, "value": "2000"}, "action": {"decision": "REVIEW"}}
    await office.ask("PUT", f"/rules/{rule['id']}", body)
    changed = (await office.ask("POST", f"/rules/{rule['id']}/dry-run", {})).json()
    assert (changed["version"], [(one["before"], one["after"], one["count"]) for one in changed["changes"]]) == (
        2, [("REVIEW", "APPROVE", 1)]
    )  # fmt: skip
    without = (await office.ask("POST", f"/rules/{rule['id']}/dry-run", {"without": True})).json()
    assert [(one["count"], one["money"]) for one in without["changes"]] == [(2, {"PLN": "4000"})]
    same = (await office.ask("POST", f"/rules/{rule['id']}/dry-run", {"version": 1})).json()
    assert same["changes"] == []


async def test_a_dry_run_goes_on_where_its_limit_ended_it(
    office: Office, db: Database, clock: BusinessClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("apps.finance.decisions.dry_run.BATCH", 2)
    clock.freeze(datetime(2026, 6, 1, tzinfo=UTC))
    await office.make_set(**MONEY)
    draft = await office.draft()
    for number in range(7):
        clock.advance(hours=1)
        await office.evaluate({"amount": str(1_000 * number + 1), "currency": "PLN"})
    total, before = [], None
    for _ in range(4):
        order = {"limit": 3, **({"before": before} if before else {})}
        run = (await office.ask("POST", f"/rules/{draft['id']}/dry-run", order)).json()
        total.append(run["examined"])
        before = run["next"]
        if before is None:
            break
    assert total == [3, 3, 1]
    since = (clock.now() - timedelta(hours=2, minutes=30)).isoformat()
    recent = (await office.ask("POST", f"/rules/{draft['id']}/dry-run", {"since": since})).json()
    until = (await office.ask("POST", f"/rules/{draft['id']}/dry-run", {"until": since})).json()
    assert (recent["examined"], until["examined"]) == (3, 4)
    clock.advance(days=8)
    assert (await office.ask("POST", f"/rules/{draft['id']}/dry-run", {})).json()["examined"] == 0
    assert (await office.ask("POST", f"/rules/{uuid4()}/dry-run", {})).status_code == 404


async def test_a_dry_run_notes_decisions_that_the_present_rules_would_not_repeat(office: Office) -> None:
    await office.make_set(**MONEY)
    await office.evaluate({"amount": "5000", "currency": "PLN"})
    await office.rule()
    other = await office.draft({"field": "amount", "op": "gt", "value": "1"}, decision="REVIEW")
    run = (await office.ask("POST", f"/rules/{other['id']}/dry-run", {})).json()
    assert (run["drifted"], run["changes"], run["matched"]["count"]) == (1, [], 1)
