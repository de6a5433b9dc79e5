"""Transactions: double entry that cannot be wrong (F3)."""

from __future__ import annotations

from decimal import Decimal
from typing import Any
from uuid import UUID, uuid4

import pytest

from apps.finance.ledger import service, store
from apps.finance.ledger.events import TransactionPosted
from apps.finance.ledger.model import AccountType, Direction, InsufficientFunds, NewEntry, Posting, ReferenceTaken
from duly.db import Database
from duly.errors import Invalid
from duly.http.problems import translate
from tests.apps.finance.ledger.acting import Books, check_consistent, count, line, move, refused
from tests.apps.transfers.acting import counting, made, new_key
from tests.engine.cli.commands import wait_until
from tests.support import rows, value


async def test_a_transaction_is_posted_with_its_entries_balances_and_event(books: Books, dsn: str) -> None:
    """F3: 201; the heading, the lines in their order, the balances after them, and transaction.posted."""
    cash, fees, customer = await books.open("ASSET"), await books.open("INCOME"), await books.open("LIABILITY")
    entries = [line(cash, "100.00", "DEBIT"), line(fees, "1.50", "CREDIT"), line(customer, "98.50", "CREDIT")]
    answer = await books.try_post(entries, "inv-1")
    posted = made(answer)
    assert (posted["reference"], posted["amount"], posted["status"]) == ("inv-1", "100.00", "POSTED")
    assert [(one["accountId"], one["direction"], one["amount"]) for one in posted["entries"]] == [
        (cash, "DEBIT", "100.00"), (fees, "CREDIT", "1.50"), (customer, "CREDIT", "98.50"),
    ]  # fmt: skip
    assert [one["balanceAfter"] for one in posted["entries"]] == ["100.00", "1.50", "98.50"]
    assert answer.headers["location"] == f"/v1/transactions/{posted['id']}"
    assert (await books.get(answer.headers["location"])).json() == posted
    [(payload, headers)] = rows(dsn, "SELECT payload, headers FROM duly.outbox WHERE type = 'transaction.posted'")
    event = TransactionPosted.model_validate(payload)
    assert (str(event.transaction_id), event.amount, event.currency) == (posted["id"], "100.00", "PLN")
    assert sorted(map(str, event.account_ids)) == sorted([cash, fees, customer])
    assert [(str(one.account_id), one.amount, one.direction, one.version) for one in event.entries] == [
        (cash, "100.00", "DEBIT", 1), (fees, "1.50", "CREDIT", 1), (customer, "98.50", "CREDIT", 1),
    ]  # fmt: skip
    assert event.posted_at.isoformat().replace("+00:00", "Z") == posted["postedAt"]
    assert headers["correlation_id"] == answer.headers["x-correlation-id"]
    assert event.envelope().payload.keys() == payload.keys()
    check_consistent(dsn)


@pytest.mark.parametrize(
    ("currency", "amount"), [("JPY", "7"), ("PLN", "0.01"), ("KWD", "1.234"), ("PLN", "999999999999.99"), ("PLN", "5")]
)
async def test_amounts_have_the_digits_of_their_currency(books: Books, currency: str, amount: str) -> None:
    """F3: and are exact."""
    a, b = await books.open("ASSET", currency), await books.open("LIABILITY", currency)
    posted = await books.post(a, b, amount)
    assert Decimal(posted["amount"]) == Decimal(amount)
    assert (await books.balance(b))["balance"] == posted["amount"]


BAD: list[tuple[str, Any, int, str, str]] = [
    ("a float", 10.5, 422, "invalid", "$.entries[0].amount"),
    ("an integer", 10, 422, "invalid", "$.entries[0].amount"),
    ("a negative", "-1.00", 422, "invalid", "$.entries[0].amount"),
    ("zero", "0.00", 422, "invalid", "$.entries[0].amount"),
    ("NaN", "NaN", 422, "invalid", "$.entries[0].amount"),
    ("infinity", "Infinity", 422, "invalid", "$.entries[0].amount"),
    ("an exponent", "1e2", 422, "invalid", "$.entries[0].amount"),
    ("spaces", " 1.00", 422, "invalid", "$.entries[0].amount"),
    ("a comma", "1,00", 422, "invalid", "$.entries[0].amount"),
    ("other digits", "١.٠٠", 422, "invalid", "$.entries[0].amount"),
    ("too many digits", "1000000000000", 422, "invalid", "$.entries[0].amount"),
    ("four decimals", "1.0000", 422, "invalid", "$.entries[0].amount"),
    ("more than the currency has", "1.005", 422, "bad-amount", "$.entries[0].amount"),
    ("true", True, 422, "invalid", "$.entries[0].amount"),
    ("null", None, 422, "invalid", "$.entries[0].amount"),
    ("a list", ["1"], 422, "invalid", "$.entries[0].amount"),
]


@pytest.mark.parametrize(("amount", "status", "kind", "path"), [one[1:] for one in BAD], ids=[one[0] for one in BAD])
async def test_an_amount_that_is_none_is_refused_with_its_path(
    books: Books, dsn: str, amount: Any, status: int, kind: str, path: str
) -> None:
    """F3: decimal strings, in the currency's digits; binary floats are refused."""
    a, b = await books.open(), await books.open()
    other = amount if isinstance(amount, str) and kind == "bad-amount" else "1.00"
    entries = [{**line(a, "1.00", "DEBIT"), "amount": amount}, line(b, other, "CREDIT")]
    found = refused(await books.try_post(entries))
    assert (found[0], found[1], found[2][0]) == (status, kind, path)
    assert count(dsn, "ledger.transactions") == 0


async def test_entries_that_are_no_transaction_are_refused_with_their_path(books: Books, dsn: str) -> None:
    """F3: one entry, unbalanced, two currencies, unknown accounts."""
    a, b, euros = await books.open(), await books.open(), await books.open(currency="EUR")
    nobody = str(uuid4())
    cases: list[tuple[list[dict[str, Any]], tuple[int, str, list[str]]]] = [
        ([], (422, "invalid", ["$.entries"])),
        ([line(a, "1.00", "DEBIT")], (422, "invalid", ["$.entries"])),
        ([line(a, "1.00", "DEBIT"), line(b, "0.99", "CREDIT")], (422, "unbalanced", ["$.entries"])),
        ([line(a, "1.00", "DEBIT"), line(b, "1.00", "DEBIT")], (422, "unbalanced", ["$.entries"])),
        (move(a, euros, "1.00"), (422, "mixed-currencies", ["$.entries[1].accountId"])),
        (move(a, nobody, "1.00"), (422, "unknown-account", ["$.entries[1].accountId"])),
        (move(nobody, b, "1.00"), (422, "unknown-account", ["$.entries[0].accountId"])),
        (move("x", b, "1.00"), (422, "invalid", ["$.entries[0].accountId"])),
        ([{**move(a, b, "1")[0], "direction": "UP"}, move(a, b, "1")[1]], (422, "invalid", ["$.entries[0].direction"])),
        ([{**move(a, b, "1")[0], "currency": "PLN"}, move(a, b, "1")[1]], (422, "invalid", ["$.entries[0].currency"])),
        (move(a, b, "1.00") * 251, (422, "invalid", ["$.entries"])),
    ]  # fmt: skip
    for entries, expected in cases:
        assert refused(await books.try_post(entries)) == expected
    assert (count(dsn, "ledger.transactions"), count(dsn, "ledger.entries")) == (0, 0)
    assert value(dsn, "SELECT count(*) FROM duly.outbox WHERE type LIKE 'transaction%'") == 0


@pytest.mark.parametrize("reference", ["", " x", "x ", "a\nb", "r" * 201, 7, None, "nul\x00"])
async def test_a_reference_is_one_line_and_not_too_long(books: Books, reference: Any) -> None:
    """F3."""
    a, b = await books.open(), await books.open()
    answer = await books.send("/v1/transactions", {"reference": reference, "entries": move(a, b, "1.00")})
    assert refused(answer) == (422, "invalid", ["$.reference"])


async def test_a_reference_is_used_once_and_does_not_pass_for_a_reversal(books: Books, dsn: str) -> None:
    """F3, F4: or nobody could reverse what somebody has so named."""
    a, b = await books.open(), await books.open()
    await books.post(a, b, "1.00", "inv-1")
    assert refused(await books.try_post(move(a, b, "2.00"), "inv-1")) == (409, "reference-taken", ["$.reference"])
    assert refused(await books.try_post(move(a, b, "2.00"), "inv-1-rev")) == (422, "bad-posting", ["$.reference"])
    assert count(dsn, "ledger.transactions") == 1
    check_consistent(dsn)


async def test_an_account_may_be_in_several_entries_of_one_transaction(books: Books, dsn: str) -> None:
    """F3: each has its version, and what counts is where the account ends."""
    customer, cash = await books.open_with("10.00"), await books.open()
    entries = [
        line(customer, "12.00", "DEBIT"), line(cash, "15.00", "CREDIT"), line(customer, "5.00", "CREDIT"),
        line(cash, "8.00", "DEBIT"),
    ]  # fmt: skip
    posted = made(await books.try_post(entries))
    assert [one["balanceAfter"] for one in posted["entries"]] == ["-2.00", "-15.00", "3.00", "-7.00"]
    assert (await books.balance(customer))["balance"] == "3.00"
    check_consistent(dsn)


async def test_an_account_that_may_not_go_negative_does_not(books: Books, dsn: str) -> None:
    """F3: 409, with the entry; to the last cent it may."""
    customer, cash = await books.open_with("10.00"), await books.open()
    overdrawing = [line(cash, "10.01", "CREDIT"), line(customer, "10.01", "DEBIT")]
    assert refused(await books.try_post(overdrawing)) == (409, "insufficient-funds", ["$.entries[1].amount"])
    await books.post(customer, cash, "10.00")
    assert (await books.balance(customer))["balance"] == "0.00"
    check_consistent(dsn)


async def test_a_balance_that_cannot_be_kept_is_422(books: Books, dsn: str) -> None:
    """F3: what would overflow is the caller's error, not ours; a whole batch of it, too."""
    a, b = await books.open("ASSET", "KWD"), await books.open("LIABILITY", "KWD")
    largest = "999999999999.999"
    batch = [{"reference": f"r{n}", "entries": move(a, b, largest)} for n in range(1_001)]
    answer = await books.send("/v1/transactions/batch", {"transactions": batch})
    assert refused(answer) == (422, "invalid", ["$.transactions"])
    made(await books.send("/v1/transactions/batch", {"transactions": batch[:1_000]}))
    assert (await books.balance(a))["balance"] == "999999999999999.000"
    assert made(await books.try_post(move(a, b, "1.000")))["entries"][0]["balanceAfter"] == "1000000000000000.000"
    assert refused(await books.try_post(move(a, b, "0.001"))) == (422, "balance-too-large", ["$.entries[0].amount"])
    check_consistent(dsn)


async def test_the_database_refuses_at_commit_what_does_not_balance(db: Database, books: Books, dsn: str) -> None:
    """F3: whatever Python let through, the deferred trigger does not; and that is a 422."""
    a, b = UUID(await books.open()), UUID(await books.open())
    posting = Posting("x", [NewEntry(a, Decimal(2), Direction.DEBIT), NewEntry(b, Decimal(1), Direction.CREDIT)])

    async def post_unchecked(tx: Any) -> None:
        await store.post(tx, [posting], [uuid4()], posted_by=None)

    with pytest.raises(Exception, match="does not balance") as caught:
        await db.run(post_unchecked)
    problem = translate(caught.value)
    assert problem is not None
    assert problem.status == 422
    assert count(dsn, "ledger.transactions") == 0


async def test_posting_is_one_statement(books: Books, db: Database) -> None:
    """One round trip, event included; and one more for each of: the key, the stored answer, the outcome of COMMIT."""
    a, b = await books.open(), await books.open()
    posting = Posting(
        "x", [NewEntry(UUID(a), Decimal(2), Direction.DEBIT), NewEntry(UUID(b), Decimal(2), Direction.CREDIT)]
    )
    async with db.transaction() as tx, counting(db) as sent:
        transaction = await service.post(tx, posting)
    assert len(sent) == 1, sent
    async with db.transaction() as tx, counting(db) as sent:
        await service.reverse(tx, transaction.id, reason="typo")
    assert len(sent) == 1, sent
    async with counting(db) as sent:
        made(await books.try_post(move(a, b, "1.00"), **{"Idempotency-Key": new_key()}))
    assert len(sent) == 3, sent
    async with counting(db) as sent:
        made(await books.try_post(move(a, b, "1.00")))
    assert len(sent) == 2, sent
    many = [{"reference": str(uuid4()), "entries": move(a, b, "1.00")} for _ in range(100)]
    async with counting(db) as sent:
        made(await books.send("/v1/transactions/batch", {"transactions": many}))
    assert len(sent) == 2, sent


async def test_what_is_refused_leaves_the_callers_transaction_usable(db: Database, dsn: str) -> None:
    """F5 needs it: the refusal is recorded in the same transaction. Nothing of what was refused is there."""
    async with db.transaction() as tx:
        poor = await service.create_account(
            tx, name="Poor", kind=AccountType.LIABILITY, currency="PLN", may_go_negative=False
        )
        cash = await service.create_account(tx, name="Cash", kind=AccountType.ASSET, currency="PLN")

        def paying(reference: str, amount: str = "1.00", *, covered: bool = False) -> Posting:
            amount_ = Decimal(amount)
            return Posting(
                reference,
                [NewEntry(poor.id, amount_, Direction.DEBIT, covered), NewEntry(cash.id, amount_, Direction.CREDIT)],
            )

        with pytest.raises(InsufficientFunds) as short:
            await service.post(tx, paying("a"))
        assert short.value.account_id == poor.id
        back = [NewEntry(cash.id, Decimal(1), Direction.DEBIT), NewEntry(poor.id, Decimal(1), Direction.CREDIT)]
        await service.post(tx, Posting("b", back))
        with pytest.raises(ReferenceTaken):
            await service.post(tx, paying("b"))
        with pytest.raises(InsufficientFunds):
            await service.place_hold(tx, poor.id, amount=Decimal(2), reference="h")
        await service.post(tx, paying("c"))
    assert [one for (one,) in rows(dsn, "SELECT reference FROM ledger.transactions ORDER BY 1")] == ["b", "c"]
    check_consistent(dsn)


@pytest.mark.parametrize("amount", ["NaN", "Infinity", "-1", "0", "1000000000000000", "0.0001"])
async def test_python_callers_are_refused_as_well(db: Database, amount: str) -> None:
    """F5: who calls the service has not been through the API's checks."""
    async with db.transaction() as tx:
        a = await service.create_account(tx, name="A", kind=AccountType.ASSET, currency="PLN")
        b = await service.create_account(tx, name="B", kind=AccountType.ASSET, currency="PLN")
        number = Decimal(amount)
        entries = [NewEntry(a.id, number, Direction.DEBIT), NewEntry(b.id, number, Direction.CREDIT)]
        with pytest.raises(Invalid):
            await service.post(tx, Posting("x", entries))
        with pytest.raises((Invalid, InsufficientFunds)):
            await service.place_hold(tx, a.id, amount=number, reference="h")
        with pytest.raises(Invalid):
            await service.post(tx, Posting("x-rev", entries))


async def test_a_covered_entry_does_not_overdraw_even_where_the_account_may(db: Database, dsn: str) -> None:
    """F5: who pays needs cover, whatever the account allows others."""
    async with db.transaction() as tx:
        a = await service.create_account(tx, name="A", kind=AccountType.LIABILITY, currency="PLN")
        b = await service.create_account(tx, name="B", kind=AccountType.LIABILITY, currency="PLN")
        amount = Decimal("5.00")
        with pytest.raises(InsufficientFunds):
            await service.post(
                tx,
                Posting("p", [NewEntry(a.id, amount, Direction.DEBIT, True), NewEntry(b.id, amount, Direction.CREDIT)]),
            )
        await service.post(
            tx, Posting("q", [NewEntry(a.id, amount, Direction.DEBIT), NewEntry(b.id, amount, Direction.CREDIT)])
        )
        await service.post(
            tx, Posting("r", [NewEntry(b.id, amount, Direction.DEBIT, True), NewEntry(a.id, amount, Direction.CREDIT)])
        )
        assert (await service.get_balance(tx, b.id)).balance == 0
    check_consistent(dsn)


async def test_a_batch_is_posted_whole_or_not_at_all(books: Books, dsn: str) -> None:
    """All or nothing; each account's balance is written once, and the refusal names the entry."""
    cash, customer = await books.open(), await books.open("LIABILITY", mayGoNegative=False)
    good = [{"reference": f"g{n}", "entries": move(cash, customer, "1.00")} for n in range(50)]
    posted = made(await books.send("/v1/transactions/batch", {"transactions": good}))["transactions"]
    assert [one["reference"] for one in posted] == [one["reference"] for one in good]
    assert (await books.balance(customer))["balance"] == "50.00"
    spend = [{"reference": f"s{n}", "entries": move(customer, cash, "20.00")} for n in range(3)]
    refill = [{"reference": "late", "entries": move(cash, customer, "20.00")}]
    cases = [
        (spend + refill, (409, "insufficient-funds", ["$.transactions[2].entries[0].amount"])),
        ([*spend[:2], good[3]], (409, "reference-taken", ["$.transactions[2].reference"])),
        ([*spend[:1], *spend[:1]], (409, "reference-taken", ["$.transactions[1].reference"])),
        ([{"reference": "u", "entries": [line(cash, "1", "DEBIT"), line(customer, "2", "CREDIT")]}],
         (422, "unbalanced", ["$.transactions[0].entries"])),
        ([*spend[:1], {"reference": "v", "entries": move(cash, str(uuid4()), "1.00")}],
         (422, "unknown-account", ["$.transactions[1].entries[1].accountId"])),
    ]  # fmt: skip
    for transactions, expected in cases:
        assert refused(await books.send("/v1/transactions/batch", {"transactions": transactions})) == expected
    assert count(dsn, "ledger.transactions") == 50
    made(await books.send("/v1/transactions/batch", {"transactions": [*spend[:2], *refill, *spend[2:]]}))
    assert (await books.balance(customer))["balance"] == "10.00"
    check_consistent(dsn)


async def test_the_same_key_posts_once(books: Books, dsn: str) -> None:
    """F3, E4: key, effect and answer are one commit; a refusal keeps nothing."""
    a, b = await books.open(), await books.open()
    key = {"Idempotency-Key": new_key()}
    first, second = [await books.try_post(move(a, b, "1.00"), "once", **key) for _ in range(2)]
    assert (first.content, second.headers["idempotent-replayed"]) == (second.content, "true")
    assert count(dsn, "ledger.transactions") == 1
    refused_key = {"Idempotency-Key": new_key()}
    assert (await books.try_post(move(a, b, "1.00"), "once", **refused_key)).status_code == 409
    assert value(dsn, "SELECT count(*) FROM duly.idempotency_keys") == 1


async def test_balances_are_updated_in_place(books: Books, db: Database, dsn: str) -> None:
    """HOT: no index is touched, however often an account is posted to."""
    accounts = [await books.open() for _ in range(20)]
    for round_ in range(15):
        many = [{"reference": f"{round_}-{n}", "entries": move(accounts[n], accounts[0], "1.00")} for n in range(1, 20)]
        made(await books.send("/v1/transactions/batch", {"transactions": many}))
    await db.engine.dispose()  # backends tell what they did when they end, at the latest

    def updates() -> tuple[int, int]:
        query = "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relid = 'ledger.balances'::regclass"
        [(updated, hot)] = rows(dsn, query)
        return updated, hot

    wait_until(lambda: updates()[0] >= 300, what="300 updates are counted")
    updated, hot = updates()
    assert hot / updated > 0.95, f"{hot} of {updated}"
