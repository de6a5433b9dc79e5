"""Reversals: the mirror image, once, and the original stays (F4)."""

from __future__ import annotations

from uuid import uuid4

import pytest

from apps.finance.ledger.events import TransactionReversed
from tests.apps.finance.ledger.acting import Books, check_consistent, count, events_of, line, refused
from tests.apps.transfers.acting import made, new_key
from tests.support import rows


async def test_a_reversal_mirrors_its_original(books: Books, dsn: str) -> None:
    """F4: 201, reference and -rev, reverses_id, the original REVERSED, transaction.reversed."""
    cash, fees, customer = await books.open("ASSET"), await books.open("INCOME"), await books.open("LIABILITY")
    entries = [line(cash, "9.99", "DEBIT"), line(fees, "0.99", "CREDIT"), line(customer, "9.00", "CREDIT")]
    original = made(await books.try_post(entries, "inv-1"))
    answer = await books.reverse(original["id"], "sent twice")
    reversal = made(answer)
    assert (reversal["reference"], reversal["reversesId"], reversal["reason"]) == (
        "inv-1-rev", original["id"], "sent twice",
    )  # fmt: skip
    assert [(one["accountId"], one["direction"], one["amount"]) for one in reversal["entries"]] == [
        (cash, "CREDIT", "9.99"), (fees, "DEBIT", "0.99"), (customer, "DEBIT", "9.00"),
    ]  # fmt: skip
    assert (await books.get(answer.headers["location"])).json() == reversal
    after = (await books.get(f"/v1/transactions/{original['id']}")).json()
    assert after == {**original, "status": "REVERSED", "reversedById": reversal["id"]}
    assert [(await books.balance(one))["balance"] for one in (cash, fees, customer)] == ["0.00"] * 3
    assert events_of(dsn, original["id"]) == ["transaction.posted", "transaction.reversed"]
    [(payload,)] = rows(dsn, "SELECT payload FROM duly.outbox WHERE type = 'transaction.reversed'")
    event = TransactionReversed.model_validate(payload)
    assert (str(event.reversal_id), event.reason, event.amount) == (reversal["id"], "sent twice", "9.99")
    check_consistent(dsn)


async def test_what_cannot_be_reversed_says_why(books: Books, dsn: str) -> None:
    """F4: 404, 409 when it was reversed before; a reversal is not reversed."""
    cash, customer = await books.open("ASSET"), await books.open("LIABILITY")
    original = await books.post(cash, customer, "5.00")
    assert refused(await books.reverse(str(uuid4())))[:2] == (404, "transaction-not-found")
    reversal = made(await books.reverse(original["id"]))
    assert refused(await books.reverse(original["id"]))[:2] == (409, "already-reversed")
    assert refused(await books.reverse(reversal["id"]))[:2] == (409, "not-reversible")
    assert count(dsn, "ledger.transactions") == 2
    check_consistent(dsn)


async def test_a_reversal_that_would_overdraw_or_touch_a_closed_account_is_409(books: Books, dsn: str) -> None:
    """F4: the money has gone on; whoever insists posts by hand, from somewhere else."""
    cash, customer = await books.open("ASSET"), await books.open("LIABILITY", mayGoNegative=False)
    original = await books.post(cash, customer, "5.00")
    await books.post(customer, cash, "3.00")
    assert refused(await books.reverse(original["id"]))[:2] == (409, "insufficient-funds")
    await books.post(customer, cash, "2.00")
    await books.send(f"/v1/accounts/{customer}/close")
    assert refused(await books.reverse(original["id"]))[:2] == (409, "account-closed")
    assert (await books.get(f"/v1/transactions/{original['id']}")).json()["status"] == "POSTED"
    check_consistent(dsn)


@pytest.mark.parametrize("reason", ["", " ", "r" * 4_001, 5, None, "nul\x00"])
async def test_a_reversal_has_a_reason(books: Books, reason: object) -> None:
    """F4."""
    original = await books.post(await books.open(), await books.open(), "5.00")
    answer = await books.send(f"/v1/transactions/{original['id']}/reverse", {"reason": reason})
    assert refused(answer) == (422, "invalid", ["$.reason"])


async def test_the_same_key_reverses_once(books: Books, dsn: str) -> None:
    """F4, E4."""
    original = await books.post(await books.open(), await books.open(), "5.00")
    key = {"Idempotency-Key": new_key()}
    first, second = [await books.reverse(original["id"], **key) for _ in range(2)]
    assert (first.status_code, first.content) == (201, second.content)
    check_consistent(dsn)
