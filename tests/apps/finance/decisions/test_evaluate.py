"""Evaluation: one or two statements whatever the number of rules, a log of everything, velocity facts (F11, F9)."""

from __future__ import annotations

import asyncio
import contextlib
import random
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID, uuid4

import pytest

from apps.finance.decisions import service
from apps.finance.decisions.facts import BadFacts
from apps.finance.decisions.model import Observation, Outcome, RuleSetNotFound
from duly.db import Database
from duly.errors import Invalid, Unavailable
from duly.testing import BusinessClock
from tests.apps.finance.decisions.acting import FIELDS, LARGE, Office
from tests.apps.transfers.acting import counting
from tests.engine.jobs.wire import Cut, breaking_wire
from tests.support import rows, value

SEEN_24H = {"name": "seen24h", "function": "count", "stream": "payments", "by": ["from"], "windowSeconds": 86_400}
PAID_24H = {**SEEN_24H, "name": "paid24h", "function": "sum", "of": "amount", "by": ["from", "currency"]}
MOST_24H = {**SEEN_24H, "name": "most24h", "function": "max", "of": "amount"}
PAYEES_24H = {**SEEN_24H, "name": "payees24h", "function": "distinct", "of": "to"}
VELOCITY = [SEEN_24H, PAID_24H, MOST_24H, PAYEES_24H]


async def test_the_two_known_rule_sets_approve_while_nobody_has_written_rules(db: Database) -> None:
    """F5, F9: payments and compliance can ask from the first day."""
    async with db.transaction() as tx:
        for name, version in (("payment-screening", 1), ("aml-screening", 2)):  # compliance has changed its facts
            decision = await service.evaluate(tx, name, {"amount": Decimal("5"), "currency": "PLN"}, subject="p-1")
            assert (decision.verdict.decision, decision.rule_set_version) == (Outcome.APPROVE, version)


async def test_matched_rules_are_aggregated_explained_and_logged(office: Office, dsn: str) -> None:
    """F11: input, matched rules, versions, latency."""
    await office.make_set()
    large = await office.rule(priority=5, name="Large")
    abroad = {"all": [LARGE, {"not": {"field": "customer.country", "op": "in", "value": ["PL", "DE"]}}]}
    reject = await office.rule(abroad, decision="REJECT", name="Abroad")
    context = {"amount": "2500.50", "currency": "PLN", "customer": {"country": "FR"}, "note": "private"}
    decision = await office.evaluate(context, subject="payment-7")
    assert (decision["decision"], decision["ruleSetVersion"], decision["ignored"]) == ("REJECT", 3, ["note"])
    matched = [(one["ruleId"], one["version"]) for one in decision["matchedRules"]]
    assert matched == [(large["id"], 1), (reject["id"], 1)]
    assert decision["explanation"] == ["Large (version 1): REVIEW", "Abroad (version 1): REJECT"]
    [logged] = rows(
        dsn, "SELECT decision, facts, matched, engine, subject, evaluated, latency_us >= 0, at FROM decisions.log"
    )
    assert logged[:2] == (
        "REJECT",
        {"amount": "2500.50", "currency": "PLN", "customer.country": "FR", "now": logged[7].isoformat()},
    )
    assert logged[2:7] == ([[large["id"], 1], [reject["id"], 1]], "1", "payment-7", 2, True)


async def test_a_decision_can_be_read_with_a_trace_of_every_condition(office: Office) -> None:
    await office.make_set()
    await office.rule({"any": [LARGE, {"field": "count", "op": "gte", "value": 3}]}, name="Either")
    made = await office.evaluate({"amount": "5", "count": None}, trace=True)
    read = await office.get(f"/decisions/{made['id']}")
    assert read["trace"] == made["trace"]
    [told] = read["trace"]
    assert told["outcome"] == "unknown"
    assert told["conditions"]["any"] == [
        {"field": "amount", "op": "gt", "value": "1000.00", "fact": "5", "outcome": "false"},
        {"field": "count", "op": "gte", "value": 3, "outcome": "null", "reason": "null"},
    ]
    assert (read["decision"], read["incomplete"][0]["lacking"]) == ("REVIEW", {"count": "null"})
    assert read["facts"] == {"amount": "5", "count": None, "now": read["facts"]["now"]}
    page = await office.get("/decisions?ruleSetId=screening")
    assert [one["id"] for one in page["items"]] == [made["id"]]
    approved = await office.evaluate({"amount": "5", "count": 1})
    for query, expected in (
        ("", [approved, made]), ("&decision=REVIEW", [made]), ("&decision=APPROVE", [approved]),
        ("&decision=REJECT", []), (f"&before={approved['id']}", [made]), ("&limit=1", [approved]),
    ):  # fmt: skip
        page = await office.get(f"/decisions?ruleSetId=screening{query}")
        assert [one["id"] for one in page["items"]] == [one["id"] for one in expected]
    assert (await office.ask("GET", f"/decisions/{uuid4()}")).status_code == 404


@pytest.mark.parametrize("count", [1, 40])
async def test_an_evaluation_is_two_statements_however_many_rules_and_velocity_facts(
    office: Office, db: Database, count: int
) -> None:
    """F11, F14: no query per rule, per list or per fact."""
    await office.make_set(velocity=VELOCITY)
    await office.ask("PUT", "/lists/some", {"members": ["acc-1"]})
    for number in range(count):
        parts = [{"field": fact["name"], "op": "gte", "value": number} for fact in VELOCITY]
        await office.rule({"any": [*parts, {"field": "to", "op": "in", "list": "some"}]})
    facts = {"amount": "5", "currency": "PLN", "from": "a", "to": "b"}
    async with db.transaction() as tx:
        await service.evaluate(tx, "screening", facts)
    async with db.transaction() as tx, counting(db) as sent:
        await service.evaluate(tx, "screening", facts)
    assert len(sent) == 2, sent
    assert sent[0].startswith("SELECT r.snapshot_id")
    assert sent[1].startswith("INSERT INTO decisions.log")


@pytest.mark.parametrize("count", [0, 1, 40])
async def test_an_evaluation_is_one_statement_where_no_rule_asks_for_the_time_or_the_past(
    office: Office, db: Database, dsn: str, count: int
) -> None:
    """F11, F14: over HTTP, too, and although the rule set has velocity facts that a rule could ask for."""
    await office.make_set(velocity=VELOCITY)
    await office.ask("PUT", "/lists/some", {"members": ["acc-1"]})
    for _ in range(count):
        await office.rule({"any": [LARGE, {"field": "to", "op": "in", "list": "some"}]})
    await office.evaluate({"amount": "5", "to": "acc-1"})
    async with counting(db) as sent:
        decision = await office.evaluate({"amount": "5", "to": "acc-1"}, subject="s")
    assert len(sent) == 1, sent
    assert sent[0].startswith("INSERT INTO decisions.log")
    assert (decision["decision"], len(decision["matchedRules"])) == ("REVIEW" if count else "APPROVE", count)
    assert value(dsn, "SELECT count(*) FROM decisions.log") == 2


@pytest.mark.parametrize(
    "asking",
    [
        {"field": "now", "op": "gt", "value": "2020-01-01T00:00:00Z"},
        {"not": {"field": "now", "op": "lt", "value": "2020-01-01T00:00:00Z"}},
        {"field": "since", "op": "lt", "valueField": "now"},
        {"field": "now", "op": "exists"},
    ],
)
async def test_a_rule_that_asks_for_the_time_gets_it_from_the_database(
    office: Office, db: Database, clock: BusinessClock, asking: dict[str, Any]
) -> None:
    clock.freeze(datetime(2026, 5, 5, tzinfo=UTC))
    await office.make_set(fields={**FIELDS, "since": "instant"})
    await office.rule(asking)
    for _ in range(2):
        async with counting(db) as sent:
            decision = await office.evaluate({"since": "2026-01-01T00:00:00Z"})
        assert (decision["decision"], decision["incomplete"]) == ("REVIEW", [])
    assert len(sent) == 2, sent


@pytest.mark.parametrize("microseconds", [0, 1, 120_000, 999_999])
async def test_the_moment_in_the_facts_is_that_of_the_log_and_the_answer_however_many_statements_it_took(
    office: Office, db: Database, dsn: str, clock: BusinessClock, microseconds: int
) -> None:
    """A replay reads the moment from the log."""
    moment = datetime(2026, 5, 5, 12, 30, 59, microseconds, tzinfo=UTC)
    clock.freeze(moment)
    await office.make_set()
    for _ in range(2):
        async with db.transaction() as tx:
            decision = await service.evaluate(tx, "screening", {"amount": "5"})
        assert (decision.at, decision.facts) == (moment, {"amount": "5", "now": moment.isoformat()})
    logged = rows(dsn, "SELECT at, facts, id FROM decisions.log ORDER BY id")
    assert [row[:2] for row in logged] == [(moment, {"amount": "5", "now": moment.isoformat()})] * 2
    for row in logged:
        assert (await office.ask("POST", f"/decisions/{row[2]}/replay")).json()["same"]


async def test_rules_that_were_replaced_log_nothing_by_their_guess(office: Office, db: Database, dsn: str) -> None:
    """One row a decision, and of the rules in force, also where this process had guessed that others still are."""
    await office.make_set()
    await office.evaluate({"amount": "5000"})
    rule = await office.rule()
    decision = await office.evaluate({"amount": "5000"})
    assert (decision["decision"], decision["ruleSetVersion"]) == ("REVIEW", 2)
    logged = rows(dsn, "SELECT rule_set_version, matched FROM decisions.log ORDER BY id")
    assert logged == [(1, []), (2, [[rule["id"], 1]])]
    async with db.transaction() as tx, counting(db) as sent:
        await service.evaluate(tx, "screening", {"amount": "5000"})
    assert len(sent) == 1, sent


@pytest.mark.parametrize("cut", ["statement", "reply"])
@pytest.mark.parametrize("asked_before", [0, 1])
async def test_a_commit_without_an_answer_is_looked_up_by_the_id_that_came_with_the_log(
    office: Office, dsn: str, cut: Cut, asked_before: int
) -> None:
    """F14: a request is confirmed without a statement more than the decision's own one or two."""
    await office.make_set()
    for _ in range(asked_before):
        await office.evaluate({"amount": "5"})
    async with breaking_wire(dsn) as wire:
        db = Database(wire.dsn)
        outcome = pytest.raises(Unavailable) if cut == "statement" else contextlib.nullcontext()
        with outcome:
            async with db.transaction(confirm=True) as tx:
                await service.evaluate(tx, "screening", {"amount": "5"})
                wire.cut_next = cut
        await db.close()
    assert wire.cuts == 1
    assert value(dsn, "SELECT count(*) FROM decisions.log") == asked_before + (0 if cut == "statement" else 1)
    assert [sent for sent in wire.sent if "pg_current_xact_id_if_assigned" in sent] == []


async def test_what_is_activated_elsewhere_is_in_force_with_the_next_evaluation(office: Office, db: Database) -> None:
    """The cache is by snapshot: nothing has to be told to anybody."""
    await office.make_set()

    async def decide() -> str:
        async with db.transaction() as tx:
            return (await service.evaluate(tx, "screening", {"amount": "5000"})).verdict.decision.value

    assert await decide() == "APPROVE"
    rule = await office.rule()
    assert await decide() == "REVIEW"
    await office.ask("POST", f"/rules/{rule['id']}/deprecate")
    assert await decide() == "APPROVE"


async def test_what_was_rolled_back_was_never_in_force(office: Office, db: Database) -> None:
    await office.make_set()
    rule = await office.draft()

    async def activate_and_fail() -> None:
        async with db.transaction() as tx:
            await service.activate_rule(tx, UUID(rule["id"]), version=None, acknowledge_warnings=False, actor="x")
            inside = await service.evaluate(tx, "screening", {"amount": "5000"})
            assert inside.verdict.decision is Outcome.REVIEW
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await activate_and_fail()
    assert (await office.evaluate({"amount": "5000"}))["decision"] == "APPROVE"
    await office.activate(rule)
    assert (await office.evaluate({"amount": "5000"}))["decision"] == "REVIEW"


async def test_the_decision_and_its_log_are_one_commit_with_the_callers_work(db: Database, dsn: str) -> None:
    async def decide_and_fail() -> None:
        async with db.transaction() as tx:
            await service.evaluate(tx, "payment-screening", {})
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await decide_and_fail()
    assert value(dsn, "SELECT count(*) FROM decisions.log") == 0


async def test_hostile_contexts_are_answered(office: Office, db: Database, dsn: str) -> None:
    await office.make_set()
    await office.rule({"any": [LARGE, {"field": "to", "op": "matches", "value": "(a+)+$"}]})
    hostile: list[Any] = [1.5, True, [], {}, [[[[]]]], {"a": {}}]
    hostile += ["NaN", "-Infinity", "1e999999999", "0x10", "１２", "9" * 400]
    for bad in hostile:
        decision = await office.evaluate({"amount": bad, "to": "a" * 3_000 + "!"})
        assert (decision["decision"], decision["incomplete"][0]["lacking"]) == ("REVIEW", {"amount": "wrong_type"})
    url, headers = "/v1/decision/evaluate", {**office.caller, "Content-Type": "application/json"}
    many = ",".join(f'"k{number}":1' for number in range(501))
    for context, status in (
        ('{"amount": NaN}', 400), ('{"amount": 1e400}', 400), ('{"amount": "1", "amount": "2"}', 400),
        ('{"to": "\\u0000"}', 400), ('{"to": "\\ud800"}', 400), (f'{{"to": "{"x" * 4_001}"}}', 400),
        ("[]", 400), (f'{{"amount": {"9" * 5_000}}}', 400), (f"{{{many}}}", 400), ("[" * 70 + "]" * 70, 400),
        (f'{{"amount": {"9" * 4_000}}}', 200), ('{"customer": {"country": {"x": 1}}}', 200),
    ):  # fmt: skip
        body = f'{{"ruleSetId": "screening", "context": {context}}}'
        answer = await office.api.client.post(url, content=body, headers=headers)
        assert answer.status_code == status, (context[:60], answer.text)
    with pytest.raises(BadFacts):
        async with db.transaction() as tx:
            await service.evaluate(tx, "screening", {"to": "a\x00"})
    with pytest.raises(RuleSetNotFound):
        async with db.transaction() as tx:
            await service.evaluate(tx, "nowhere", {})


# -- velocity ---------------------------------------------------------------------------------------------------------


async def look(office: Office, context: Any, *names: str) -> list[Any]:
    """The velocity facts as they were logged."""
    made = await office.evaluate(context)
    facts = (await office.get(f"/decisions/{made['id']}"))["facts"]
    return [facts.get(name, "missing") for name in names]


async def use_all(office: Office, velocity: list[dict[str, Any]]) -> None:
    """A rule that needs every velocity fact."""
    await office.make_set(velocity=velocity)
    parts = [{"field": fact["name"], "op": "gte", "value": 1_000_000} for fact in velocity]
    await office.rule({"any": parts})


NAMES = ["seen24h", "paid24h", "most24h", "payees24h"]


async def test_velocity_counts_sums_and_tells_apart_within_its_window(
    office: Office, db: Database, clock: BusinessClock
) -> None:
    clock.freeze(datetime(2026, 5, 5, 12, 30, tzinfo=UTC))
    await use_all(office, VELOCITY)
    context = {"amount": "7", "currency": "PLN", "from": "ann", "to": "zed"}
    assert await look(office, context, *NAMES) == [0, "0", "0", 0]
    for amount, currency, to in (("10.10", "PLN", "bob"), ("0.20", "PLN", "bob"), ("99", "EUR", "eve")):
        async with db.transaction() as tx:
            await service.observe(
                tx,
                Observation("payments", ("ann",), Decimal(amount), to),
                Observation("payments", ("ann", currency), Decimal(amount)),
                Observation("payments", ("bert",), Decimal(1_000), "x"),
            )
    assert await look(office, context, *NAMES) == [3, "10.30", "99", 2]
    clock.advance(hours=23, minutes=59)
    assert await look(office, context, *NAMES) == [3, "10.30", "99", 2]
    clock.advance(minutes=2)
    assert await look(office, context, *NAMES) == [0, "0", "0", 0]


async def test_the_current_event_is_included_where_that_is_asked_for(office: Office, db: Database) -> None:
    await use_all(office, [{**fact, "includeCurrent": True} for fact in VELOCITY])
    context = {"amount": "7", "currency": "PLN", "from": "ann", "to": "bob"}
    assert await look(office, context, *NAMES) == [1, "7", "7", 1]
    async with db.transaction() as tx:
        await service.observe(
            tx,
            Observation("payments", ("ann",), Decimal(5), "bob"),
            Observation("payments", ("ann", "PLN"), Decimal(5)),
        )
    assert await look(office, context, *NAMES) == [2, "12", "7", 1]
    assert await look(office, {**context, "to": "eve", "amount": "3"}, *NAMES) == [2, "8", "5", 2]


async def test_a_velocity_fact_without_its_key_is_absent_in_the_same_way(office: Office) -> None:
    await use_all(office, VELOCITY)
    assert await look(office, {"currency": "PLN"}, *NAMES) == ["missing"] * 4
    assert await look(office, {"from": None, "currency": "PLN"}, *NAMES) == [None] * 4
    assert await look(office, {"from": "a", "currency": 5}, *NAMES[:2]) == [0, {"wrongType": "key"}]
    decision = await office.evaluate({"currency": "PLN"})
    assert (decision["decision"], set(decision["incomplete"][0]["lacking"].values())) == ("REVIEW", {"missing"})


async def test_velocity_equals_a_plain_count_over_all_observations(
    office: Office, db: Database, clock: BusinessClock
) -> None:
    """Minutes and hours together are exact, wherever the window begins; it is up to a minute longer than declared."""
    windows = (60, 3_540, 3_600, 5_000, 86_400, 90_061)
    facts = [
        {"name": f"{function}{seconds}", "function": function, "stream": "s", "by": ["from"], "windowSeconds": seconds,
         **({"of": "amount"} if function in {"sum", "max"} else {})}
        for seconds in windows for function in ("count", "sum", "max")
    ]  # fmt: skip
    await use_all(office, facts)
    chance = random.Random(6)
    start = datetime(2026, 3, 29, 0, 0, tzinfo=UTC)
    clock.freeze(start + timedelta(hours=30))
    observed = [
        (start + timedelta(seconds=chance.randrange(30 * 3600)), Decimal(chance.randrange(1, 9_999)) / 100)
        for _ in range(400)
    ]
    async with db.transaction() as tx:
        for place in range(0, 400, 100):
            batch = observed[place : place + 100]
            await service.observe(tx, *(Observation("s", ("ann",), amount, at=at) for at, amount in batch))
    names = [str(fact["name"]) for fact in facts]
    for minutes in (0, 1, 29, 31, 59, 60, 61, 500):
        now = start + timedelta(hours=30, minutes=minutes, seconds=chance.randrange(60))
        clock.freeze(now)
        found = await look(office, {"from": "ann"}, *names)
        expected: list[Any] = []
        for seconds in windows:
            since = (now - timedelta(seconds=seconds)).replace(second=0, microsecond=0)
            amounts = [amount for at, amount in observed if at >= since]
            expected += [len(amounts), sum(amounts, Decimal(0)), max(amounts, default=Decimal(0))]
        assert [Decimal(one) for one in found] == expected


async def test_observers_of_the_same_keys_wait_for_each_other_and_never_in_a_circle(db: Database, dsn: str) -> None:
    """Two hundred observations by eight at a time, in every order."""
    chance = random.Random(8)

    async def one(number: int) -> None:
        keys = ["a", "b", "c", "d"]
        random.Random(number).shuffle(keys)
        async with db.transaction() as tx:
            await service.observe(tx, *(Observation("s", (key,), Decimal(1), str(number % 7)) for key in keys))
            await asyncio.sleep(chance.random() / 1_000)

    for place in range(0, 200, 8):
        await asyncio.gather(*(one(number) for number in range(place, place + 8)))
    counted = rows(dsn, "SELECT key, sum(count)::int FROM decisions.buckets WHERE width = 'hour' GROUP BY 1 ORDER BY 1")
    assert counted == [(f'["{key}"]', 200) for key in "abcd"]
    assert value(dsn, "SELECT count(*) FROM decisions.sightings") == 28


async def test_keys_of_any_length_are_counted(office: Office, db: Database) -> None:
    await use_all(office, [SEEN_24H])
    for key in ("x" * 4_000, "ż" * 150, '"]', "a"):
        async with db.transaction() as tx:
            await service.observe(tx, Observation("payments", (key,), value="v" * 9_000))
        assert await look(office, {"from": key}, "seen24h") == [1]
    assert set(FIELDS) >= {"from"}


@pytest.mark.parametrize(
    "bad",
    [
        Observation("s", ("a",), Decimal("NaN")), Observation("s", ("a",), Decimal("-0.01")),
        Observation("s", ("a",), Decimal("Infinity")), Observation("s", ("a",), Decimal(10**18)),
        Observation("S!", ("a",)), Observation("s", ()), Observation("s", ("a\x00",)),
        Observation("s", ("a",), at=datetime(2026, 1, 1)),  # noqa: DTZ001 - that it has no zone is the point
    ],
)  # fmt: skip
async def test_what_would_spoil_a_sum_is_not_observed(db: Database, bad: Observation) -> None:
    async with db.transaction() as tx:
        with pytest.raises(Invalid):
            await service.observe(tx, Observation("s", ("fine",)), bad)


async def test_what_is_decided_about_reaches_no_log_and_no_error(
    office: Office, capfd: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    await office.make_set()
    await office.rule({"field": "to", "op": "matches", "value": "secret-(rule|payee)"})
    answers = []
    name = "secret-payee"
    for context in ({"to": name}, {"to": name + "\x00"}, {"to": name * 999}, {name: 1}):
        body = {"ruleSetId": "screening", "context": {"amount": "4711.0815", **context}}
        answers.append(await office.api.client.post("/v1/decision/evaluate", json=body, headers=office.caller))
    assert [answer.status_code for answer in answers] == [200, 400, 400, 200]
    captured = capfd.readouterr()
    for text in (answers[1].text, answers[2].text, captured.out, captured.err):
        assert "secret-payee" not in text
        assert "4711" not in text
