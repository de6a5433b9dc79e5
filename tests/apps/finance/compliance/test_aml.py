"""Screening what was posted (F9): once each, with the facts of its own moment, in a fixed number of statements."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from decimal import Decimal
from functools import partial
from typing import Any
from uuid import UUID, uuid4

import pytest

from apps.finance.compliance import aml
from apps.finance.decisions import service as decisions
from apps.finance.ledger import service as ledger
from apps.finance.ledger.events import TransactionPosted
from apps.finance.ledger.model import AccountType, Direction, FlowQuestion, NewEntry, Posting
from apps.wiring import app
from duly import Tx
from duly.db import Database
from duly.jobs.worker import Worker
from duly.messages import Event
from duly.outbox.relay import Relay
from duly.settings import Settings
from duly.testing import BusinessClock
from tests.apps.finance.compliance.acting import AML, Office, add_rule, check_cases, open_customer, post
from tests.apps.finance.payments.acting import do
from tests.apps.transfers.acting import counting
from tests.support import rows, value

SCREENING = {AML: app.handlers[AML]}
FACTS_OF = "SELECT facts FROM decisions.log WHERE rule_set_id = 'aml-screening' AND subject = %(id)s"


def facts_of(dsn: str, transaction: Any) -> dict[str, Any]:
    found: dict[str, Any] = value(dsn, FACTS_OF, {"id": str(transaction)})
    return found


async def events_of(db: Database, dsn: str) -> list[Event]:
    """Everything that was posted, as the consumer gets it."""
    query = """SELECT id, type, topic, aggregate_id, payload, headers, created_at FROM duly.event_log
               WHERE type = 'transaction.posted' ORDER BY seq"""
    return [Event(*row) for row in rows(dsn, query)]


@pytest.fixture
async def ready(db: Database) -> Database:
    """The consumer is known, and rules ask for all that is measured."""
    await app.prepare(db)
    for name in ("moved1h", "moved24h", "moved7d", "received1h", "received24h", "received7d"):
        await add_rule(db, {"field": name, "op": "gt", "value": "900000.00"})
    for name in (
        "transactions1h", "transactions24h", "transactions7d", "receipts1h", "receipts24h", "receipts7d",
        "counterparties7d",
    ):  # fmt: skip
        await add_rule(db, {"field": name, "op": "gt", "value": 900_000})
    return db


async def screen(db: Database) -> None:
    """Relay, and run the consumer alone, until there is nothing left."""
    for _ in range(50):
        relayed = await Relay(db).run_once()
        worked = await Worker(db, SCREENING).run_once()
        if not relayed.done and not worked.done:
            return
    raise AssertionError("there is always more")


async def test_a_match_is_alert_case_fact_and_timer(office: Office) -> None:
    transaction, case = await office.flag("60.00")
    found = await office.read(case)
    assert (found["kind"], found["transactionId"], found["amount"]) == ("AML", transaction, "60.00")
    assert (found["alert"]["outcome"], found["alert"]["ruleSetId"]) == ("REVIEW", "aml-screening")
    assert [rule["name"] for rule in found["alert"]["matched"]] == ["Large transaction"]
    assert len(found["transaction"]["entries"]) == 2
    assert office.facts(transaction) == ["aml.flagged"]
    logged = value(office.dsn, "SELECT id FROM decisions.log WHERE subject = %(id)s", {"id": transaction})
    assert found["alert"]["decisionId"] == str(logged)
    office.check()


async def test_what_no_rule_matches_is_logged_and_left(office: Office) -> None:
    transaction = await office.post("10.00")
    await office.screen()
    assert facts_of(office.dsn, transaction)["amount"] == "10.00"
    assert office.count("compliance.cases") == 0
    office.check()


async def test_an_event_that_comes_again_changes_nothing(office: Office, db: Database) -> None:
    """E2.2; and when the inbox has forgotten it, too."""
    await office.flag("60.00")
    found = (await events_of(db, office.dsn))[-1:]
    rows(office.dsn, "DELETE FROM duly.processed_events")
    cases = await do(db, lambda tx: aml.screen(tx, found))
    assert cases == []
    assert (office.count("compliance.alerts"), office.count("compliance.cases")) == (1, 1)


async def test_the_same_event_at_the_same_moment_is_one_case(office: Office, db: Database) -> None:
    """Two workers, of which one should not have it: the alert's key decides."""
    await office.post("60.00")
    found = (await events_of(db, office.dsn))[-1:]
    made = await asyncio.gather(*(do(db, lambda tx: aml.screen(tx, found)) for _ in range(4)))
    assert sorted(len(cases) for cases in made) == [0, 0, 0, 1]
    assert (office.count("compliance.cases"), office.facts(found[0].aggregate_id)) == (1, ["aml.flagged"])


async def test_statements_do_not_depend_on_how_many_events_there_are(ready: Database, dsn: str) -> None:
    """F9: it keeps up because a batch costs what one does."""
    await add_rule(ready, {"field": "amount", "op": "gte", "value": "50.00"})
    counts = {}
    one, two = [await do(ready, open_customer) for _ in range(2)]
    for number in (1, 40):
        for _ in range(number):
            await do(ready, lambda tx: post(tx, one, two, "60.00"))
        found = (await events_of(ready, dsn))[-number:]
        await do(ready, lambda tx: decisions.read_rule_set(tx, "aml-screening"))
        async with counting(ready) as sent:
            cases = await do(ready, partial(aml.screen, events=found))
        assert len(cases) == number
        counts[number] = len(sent)
    assert counts[40] <= counts[1], counts
    assert counts[40] <= 12, counts


async def test_a_poison_event_stands_alone(ready: Database, dsn: str) -> None:
    """E2.3: its neighbours are screened, and it is told to an operator."""
    one, two = [await do(ready, open_customer) for _ in range(2)]
    await do(ready, lambda tx: post(tx, one, two, "60.00"))
    rows(dsn, "SELECT duly.emit('transaction.posted', 'ledger.events', 'poison', '{\"transactionId\": 1}')")
    await do(ready, lambda tx: post(tx, one, two, "61.00"))
    await screen(ready)
    assert value(dsn, "SELECT count(*) FROM decisions.log WHERE rule_set_id = 'aml-screening'") == 2
    assert value(dsn, "SELECT count(*) FROM duly.jobs WHERE name = %(name)s", {"name": AML}) == 1


# -- facts of the moment ----------------------------------------------------------------------------------------------


async def test_facts_are_of_the_events_own_moment(ready: Database, dsn: str, clock: BusinessClock) -> None:
    """Screened a month late, in any order: the same facts as if it had been screened at once."""
    one, two = [await do(ready, open_customer) for _ in range(2)]
    posted = []
    for amount in ("10.00", "20.00", "30.00"):
        posted.append(await do(ready, partial(post, debit=one, credit=two, amount=amount)))
        clock.advance(hours=5)
    clock.advance(days=30)
    found = await events_of(ready, dsn)
    await do(ready, lambda tx: aml.screen(tx, found[::-1]))
    assert [facts_of(dsn, one)["transactions24h"] for one in posted] == [1, 2, 3]
    assert [facts_of(dsn, one)["moved24h"] for one in posted] == ["10.00", "30.00", "60.00"]
    assert [facts_of(dsn, one)["moved1h"] for one in posted] == ["10.00", "20.00", "30.00"]
    assert [facts_of(dsn, one)["received24h"] for one in posted] == ["10.00", "30.00", "60.00"]
    assert all(facts_of(dsn, one)["now"] == facts_of(dsn, one)["postedAt"] for one in posted)


async def test_facts_do_not_depend_on_the_batch(
    ready: Database, dsn: str, monkeypatch: pytest.MonkeyPatch, clock: BusinessClock
) -> None:
    """At the limit of what is read: alone, with those after it, or with all; the last is too many in any company."""
    real = ledger.read_flows
    monkeypatch.setattr(ledger, "read_flows", lambda tx, asked: real(tx, asked, most=4))
    one, two = [await do(ready, open_customer) for _ in range(2)]
    for _ in range(5):
        await do(ready, lambda tx: post(tx, one, two, "1.00"))
        clock.advance(minutes=1)
    found = await events_of(ready, dsn)

    async def gather(tx: Tx, some: Sequence[Event]) -> list[dict[str, Any]]:
        screened = await aml._read(tx, [one.body(TransactionPosted) for one in some])
        return await aml.gather(tx, screened, aml.MEASURED_NAMES)

    seen = [
        [facts for some in batches for facts in await do(ready, partial(gather, some=some))]
        for batches in ([[each] for each in found], [found[:3], found[3:]], [found])
    ]
    assert seen[0] == seen[1] == seen[2]
    assert [facts.get("transactions1h") for facts in seen[0]] == [1, 2, 3, 4, None]


async def test_windows_end_where_they_should(ready: Database, dsn: str, clock: BusinessClock) -> None:
    """An hour and a day, to the second: what is exactly as old still counts."""
    clock.freeze(clock.now())
    one, two = [await do(ready, open_customer) for _ in range(2)]
    await do(ready, lambda tx: post(tx, one, two, "1.00"))
    clock.advance(hours=24)
    at_the_edge = await do(ready, lambda tx: post(tx, one, two, "2.00"))
    clock.advance(seconds=1)
    past_it = await do(ready, lambda tx: post(tx, one, two, "4.00"))
    await screen(ready)
    assert [facts_of(dsn, one)["moved24h"] for one in (at_the_edge, past_it)] == ["3.00", "6.00"]
    assert [facts_of(dsn, one)["moved1h"] for one in (at_the_edge, past_it)] == ["2.00", "6.00"]
    assert [facts_of(dsn, one)["moved7d"] for one in (at_the_edge, past_it)] == ["3.00", "7.00"]


async def test_reversals_do_not_count(ready: Database, dsn: str) -> None:
    """What went back and forth by a correction is nobody's business."""
    one, two = [await do(ready, open_customer) for _ in range(2)]
    first = await do(ready, lambda tx: post(tx, one, two, "10.00"))
    await do(ready, lambda tx: ledger.reverse(tx, first, reason="typo"))
    back = await do(ready, lambda tx: post(tx, two, one, "5.00"))
    await screen(ready)
    found = facts_of(dsn, back)
    assert (found["transactions24h"], found["moved24h"]) == (1, "5.00")
    assert (found["receipts24h"], found["received24h"]) == (1, "5.00")
    assert value(dsn, "SELECT count(*) FROM decisions.log") == 2, "and are not screened"


async def test_money_that_was_corrected_had_no_receiver(ready: Database, dsn: str) -> None:
    """F9: what went back by a reversal was paid to nobody."""
    one, two, three = [await do(ready, open_customer) for _ in range(3)]
    first = await do(ready, lambda tx: post(tx, one, two, "10.00"))
    await do(ready, lambda tx: ledger.reverse(tx, first, reason="typo"))
    paid = await do(ready, lambda tx: post(tx, two, three, "5.00"))
    await screen(ready)
    assert facts_of(dsn, paid)["counterparties7d"] == 1


async def test_customers_are_measured_and_not_the_cash(ready: Database, dsn: str) -> None:
    """Of a deposit, what the customer received; the cash account, through which all of it goes, is too busy to say."""
    cash = await do(ready, lambda tx: open_customer(tx, kind=AccountType.ASSET))
    fees = await do(ready, lambda tx: open_customer(tx, kind=AccountType.INCOME))
    one, two = [await do(ready, open_customer) for _ in range(2)]
    await do(ready, lambda tx: post(tx, cash, one, "100.00"))
    deposit = await do(ready, lambda tx: post(tx, cash, two, "7.00"))
    fee = await do(ready, lambda tx: post(tx, two, fees, "1.00"))
    await screen(ready)
    found = facts_of(dsn, deposit)
    assert (found["received24h"], found["moved24h"], found["toAccount"]) == ("7.00", "0.00", str(two))
    assert "fromAccount" not in found, "nobody's account was lowered"
    paid = facts_of(dsn, fee)
    assert (paid["moved24h"], paid["received24h"], paid["fromAccount"]) == ("1.00", "0.00", str(two))
    assert paid["toAccount"] == str(fees)


async def test_nothing_is_read_of_the_cash(ready: Database, dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its entries are everybody's, and no fact is about them; but where only the house takes part, they are its own."""
    asked: list[FlowQuestion] = []

    def noting(real: Any) -> Any:
        def note(tx: Any, given: Sequence[FlowQuestion]) -> Any:
            asked.extend(given)
            return real(tx, given)

        return note

    for name in ("read_flows", "count_receivers"):
        monkeypatch.setattr(ledger, name, noting(getattr(ledger, name)))
    cash, fees = [
        await do(ready, partial(open_customer, kind=kind)) for kind in (AccountType.ASSET, AccountType.INCOME)
    ]
    customers = [await do(ready, open_customer) for _ in range(3)]
    for one in customers:
        await do(ready, partial(post, debit=cash, credit=one, amount="7.00"))
    await screen(ready)
    assert {one.account_id for one in asked} == set(customers)
    asked.clear()
    await do(ready, lambda tx: post(tx, cash, fees, "1.00"))
    await screen(ready)
    assert {one.account_id for one in asked} == {cash, fees}


async def test_nothing_of_the_past_is_read_while_no_rule_asks_for_it(
    office: Office, db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    with monkeypatch.context() as patched:
        for name in ("read_flows", "count_receivers"):
            patched.setattr(ledger, name, lambda *_given, name=name: asked.append(name))
        transaction, _ = await office.flag("50.00")
    facts = facts_of(office.dsn, transaction)
    assert (asked, facts["fromAccount"]) == ([], str(office.payers.ann))
    assert not {name for name in facts if name in aml.MEASURED_NAMES | {aml.RECEIVERS}}
    await add_rule(db, {"field": "receipts1h", "op": "gt", "value": 100})
    transaction, _ = await office.flag("50.00")
    facts = facts_of(office.dsn, transaction)
    assert set(facts) >= aml.MEASURED_NAMES
    assert aml.RECEIVERS not in facts


async def test_customers_of_one_transaction_share_what_is_read_for_it(ready: Database, dsn: str) -> None:
    """However many events there are, a batch reads no more than so much for each; two customers have all of theirs."""
    accounts = [await do(ready, open_customer) for _ in range(5)]
    cash = await do(ready, lambda tx: open_customer(tx, kind=AccountType.ASSET))

    def legs(debit: UUID, credits: Sequence[UUID]) -> list[NewEntry]:
        given = [NewEntry(one, Decimal(1), Direction.CREDIT) for one in credits]
        return [NewEntry(debit, Decimal(len(credits)), Direction.DEBIT), *given]

    for entries in (legs(accounts[0], accounts[1:2]), legs(cash, accounts[:1]), legs(accounts[0], accounts[1:])):
        await do(ready, partial(ledger.post, posting=Posting(str(uuid4()), entries)))
    posted = [one.body(TransactionPosted) for one in await events_of(ready, dsn)]
    found = await do(ready, partial(aml._read, posted=posted))
    assert [{leg.question.most for leg in one.legs} for one in found] == [{20_000}, {20_000}, {8_000}]
    assert ledger.MOST_FLOW_ENTRIES * 2 == aml.MOST_ENTRIES


async def test_receivers_are_counted_once_each(ready: Database, dsn: str, clock: BusinessClock) -> None:
    one, *others = [await do(ready, open_customer) for _ in range(4)]
    posted = [
        await do(ready, partial(post, debit=one, credit=other, amount="1.00"))
        for other in (others[0], others[1], others[0], others[2])
    ]
    clock.advance(days=7.1)
    posted.append(await do(ready, lambda tx: post(tx, one, others[0], "1.00")))
    await screen(ready)
    assert [facts_of(dsn, one)["counterparties7d"] for one in posted] == [1, 2, 2, 3, 1]


async def test_what_would_take_too_long_is_missing_and_never_wrong(
    ready: Database, dsn: str, monkeypatch: pytest.MonkeyPatch, clock: BusinessClock
) -> None:
    """An account with more entries than are read: a shorter window is still exact, a longer one is absent."""
    real = ledger.read_flows
    monkeypatch.setattr(ledger, "read_flows", lambda tx, asked: real(tx, asked, most=4))
    receivers = ledger.count_receivers
    monkeypatch.setattr(ledger, "count_receivers", lambda tx, asked: receivers(tx, asked, most=4))
    one, two = [await do(ready, open_customer) for _ in range(2)]
    for _ in range(3):
        await do(ready, lambda tx: post(tx, one, two, "1.00"))
        clock.advance(minutes=1)
    clock.advance(hours=2)
    for _ in range(3):
        last = await do(ready, lambda tx: post(tx, one, two, "1.00"))
        clock.advance(minutes=1)
    found = (await events_of(ready, dsn))[-1:]
    await do(ready, lambda tx: aml.screen(tx, found))
    facts = facts_of(dsn, last)
    assert (facts["transactions1h"], facts["moved1h"]) == (3, "3.00")
    assert not {"transactions24h", "moved24h", "received24h", "moved7d", "counterparties7d"} & set(facts)
    assert value(dsn, "SELECT decision FROM decisions.log") == "REVIEW", "the rules see that something is missing"
    alert = rows(dsn, "SELECT severity, matched, incomplete FROM compliance.alerts")[0]
    assert (alert[0], alert[1]) == ("LOW", [])
    assert {name for one in alert[2] for name in one["lacking"]} >= {"moved24h", "counterparties7d"}


async def test_a_transaction_of_many_accounts_is_not_measured(ready: Database, dsn: str) -> None:
    accounts = [await do(ready, open_customer) for _ in range(aml.MOST_ACCOUNTS + 1)]
    lines = [NewEntry(one, Decimal(1), Direction.CREDIT) for one in accounts[1:]]
    lines.append(NewEntry(accounts[0], Decimal(aml.MOST_ACCOUNTS), Direction.DEBIT))
    posted = (await do(ready, lambda tx: ledger.post(tx, Posting(str(uuid4()), lines)))).id
    await screen(ready)
    facts = facts_of(dsn, posted)
    assert (facts["entryCount"], facts["amount"]) == (aml.MOST_ACCOUNTS + 1, "20.00")
    assert "moved24h" not in facts
    check_cases(dsn)


async def test_several_lines_of_one_account_are_one_account(ready: Database, dsn: str) -> None:
    one, two = [await do(ready, open_customer) for _ in range(2)]
    lines = [
        NewEntry(one, Decimal(5), Direction.DEBIT), NewEntry(one, Decimal(2), Direction.CREDIT),
        NewEntry(two, Decimal(3), Direction.CREDIT),
    ]  # fmt: skip
    posted = (await do(ready, lambda tx: ledger.post(tx, Posting(str(uuid4()), lines)))).id
    await screen(ready)
    facts = facts_of(dsn, posted)
    assert (facts["fromAccount"], facts["toAccount"]) == (str(one), str(two))
    assert (facts["transactions24h"], facts["moved24h"], facts["amount"]) == (1, "5.00", "5.00")


async def test_of_several_customers_the_busiest_is_measured_and_who_moved_most_is_named(
    ready: Database, dsn: str
) -> None:
    """F9: nobody hides behind somebody quiet who pays, or is paid, in the same transaction."""
    busy, quiet, payee, fresh, other = [await do(ready, open_customer) for _ in range(5)]
    await do(ready, lambda tx: post(tx, busy, other, "70.00"))
    await do(ready, lambda tx: post(tx, busy, payee, "1.00"))
    lines = [
        NewEntry(busy, Decimal(1), Direction.DEBIT), NewEntry(quiet, Decimal(9), Direction.DEBIT),
        NewEntry(payee, Decimal(2), Direction.CREDIT), NewEntry(fresh, Decimal(8), Direction.CREDIT),
    ]  # fmt: skip
    posted = (await do(ready, lambda tx: ledger.post(tx, Posting(str(uuid4()), lines)))).id
    await screen(ready)
    facts = facts_of(dsn, posted)
    assert (facts["fromAccount"], facts["toAccount"]) == (str(quiet), str(fresh))
    assert (facts["transactions24h"], facts["moved24h"], facts["counterparties7d"]) == (3, "72.00", 3)
    assert (facts["receipts24h"], facts["received24h"]) == (2, "8.00")


async def test_an_upgrade_keeps_rules_that_ask_for_the_same_names(db: Database, dsn: str) -> None:
    """The names that were counts of a stream are fields now, and none of them is both."""
    settings = value(
        dsn,
        "SELECT s.settings FROM decisions.rule_sets r JOIN decisions.snapshots s ON s.id = r.snapshot_id "
        "WHERE r.id = 'aml-screening'",
    )
    assert settings["velocity"] == []
    kinds = {name: settings["fields"][name] for name in ("transactions24h", "moved24h", "counterparties7d")}
    assert kinds == {"transactions24h": "integer", "moved24h": "decimal", "counterparties7d": "integer"}
    measured = {base + suffix for base in aml.MEASURED.values() for suffix in aml.SUFFIXES.values()}
    assert measured | {aml.RECEIVERS} <= set(settings["fields"])


async def test_severity_follows_the_rules_and_the_amount(
    office: Office, db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMPLIANCE_FOUR_EYES", "*=80")
    await add_rule(db, {"field": "amount", "op": "gte", "value": "70.00"}, "REJECT")
    third = await do(db, open_customer)
    found = {}
    for amount in ("60.00", "75.00", "90.00"):
        posted = await office.post(amount, debit=third)
        await office.screen()
        found[amount] = (await office.read(office.case_of_transaction(posted)))["severity"]
    assert found == {"60.00": "MEDIUM", "75.00": "HIGH", "90.00": "CRITICAL"}


async def test_a_batch_of_the_settings_size_is_one_transaction(dsn: str, ready: Database) -> None:
    """Hundreds of events are a handful of commits."""
    one, two = [await do(ready, open_customer) for _ in range(2)]
    for _ in range(30):
        await do(ready, lambda tx: post(tx, one, two, "60.00"))
    await screen(ready)
    xids = value(dsn, "SELECT count(DISTINCT xmin::text) FROM decisions.log WHERE rule_set_id = 'aml-screening'")
    assert (value(dsn, "SELECT count(*) FROM decisions.log"), xids <= 3) == (30, True)
    check_cases(dsn)


async def test_many_workers_screen_each_transaction_once(office: Office, dsn: str) -> None:
    """Four workers at once, and everything else goes on."""
    wide = Database(dsn, settings=Settings(pool_size=16))
    third = await do(wide, open_customer)
    for _ in range(40):
        await do(wide, lambda tx: post(tx, third, office.payers.ben, "60.00"))
    await Relay(wide).run_once()
    await asyncio.gather(*(Worker(wide, SCREENING).run_once() for _ in range(4)))
    await screen(wide)
    await wide.close()
    assert (office.count("compliance.alerts"), office.count("compliance.cases")) == (40, 40)
    office.check()
