"""The audit of the ledger: seals over the journal, and checks of every rule on what is stored."""

from __future__ import annotations

import re
from dataclasses import dataclass
from uuid import UUID

from apps.finance.ledger import store_audit as store
from apps.finance.ledger.events import JournalSealed
from apps.finance.ledger.model import GENESIS, ChainHash, CheckResult, Seal, Violation, at_path
from duly import Tx, emit
from duly.errors import Invalid, Refused

SEAL_LIMIT = 5_000  # transactions of one seal, and one commit
LINES_AT_ONCE = 1_000  # transactions whose lines are in memory
SEALS_AT_ONCE = 100
CHECK_LIMIT = 50_000  # rows in one call
MOST_ROWS = 200_000
_PLACE = re.compile(r"(transactions|balances|entries|totals):([0-9a-f-]{36}(/[0-9]{1,18})?)?")


class BadPlace(Invalid):
    """This is not where a page of a check begins."""


@dataclass(frozen=True)
class Verified:
    """What the whole audit has looked at, and the first thing that is wrong."""

    rows: int
    seals: int
    sealed_transactions: int
    first_violation: Violation | None


# -- checks ----------------------------------------------------------------------------------------------------------


async def check(tx: Tx, *, after: str | None = None, limit: int = CHECK_LIMIT) -> CheckResult:
    """Look at so many rows from there on, all of one moment; stops at the first that breaks a rule.

    A ledger that is posted to meanwhile gives no false alarm: rows of the journal do not change, and a balance is
    compared with what the same moment shows.
    """
    await store.begin_snapshot(tx)
    return await _check(tx, after=after, limit=limit)


async def _check(tx: Tx, *, after: str | None, limit: int) -> CheckResult:
    table, place = _read_place(after)
    tables = list(store.CHECKS)
    checked = 0
    for name in tables[tables.index(table) :]:
        rows, last, wrong = await store.check_page(tx, name, after=place, limit=limit - checked)
        checked += rows
        if wrong:
            return CheckResult(False, checked, wrong, None)
        if checked >= limit and last is not None:
            return CheckResult(True, checked, None, f"{name}:{last}")
        place = ""
    return CheckResult(True, checked, None, None)


def _read_place(after: str | None) -> tuple[str, str]:
    if after is None:
        return "transactions", ""
    found = _PLACE.fullmatch(after)
    try:
        if found and found[2]:
            UUID(found[2].partition("/")[0])
    except ValueError:
        found = None
    if not found or bool(found[3]) != (found[1] == "entries" and bool(found[2])):
        raise at_path(BadPlace("give what the last page called next"), "$.after")
    return found[1], found[2] or ""


# -- seals -----------------------------------------------------------------------------------------------------------


async def seal_journal(tx: Tx, *, limit: int = SEAL_LIMIT) -> tuple[Seal | None, bool]:
    """Add one link over what can no longer change; the link, if there was anything, and whether there is more."""
    await store.lock_seals(tx)
    last = await store.find_last_seal(tx)
    first_xid = last.next_xid if last else 0
    horizon = await store.find_horizon(tx)
    if last and horizon < last.next_xid:
        raise Refused(
            "the journal is sealed up to a database transaction that this server has not reached: it was restored "
            "from a dump; see docs/architecture/finance.md"
        )
    end, count = await store.find_end(tx, first_xid=first_xid, horizon=horizon, limit=limit)
    if end is None:
        return None, False
    draft = Seal(last.number + 1 if last else 1, first_xid, end, 0, 0, last.hash if last else GENESIS, b"")
    chain = await _hash(tx, draft)
    seal = Seal(draft.number, first_xid, end, chain.transactions, chain.entries, draft.previous_hash, chain.digest())
    await store.insert_seal(tx, seal)
    await emit(
        tx,
        JournalSealed(number=seal.number, hash=seal.hash.hex(), transactions=seal.transactions, entries=seal.entries),
    )
    return seal, count >= limit


async def verify(tx: Tx) -> Verified:
    """Everything: each rule on each row, and each seal; in one snapshot, a page at a time."""
    await store.begin_snapshot(tx)
    rows, place = 0, None
    while True:  # each page is behind the one before: it ends with the ledger
        result = await _check(tx, after=place, limit=CHECK_LIMIT)
        rows += result.checked
        if result.first_violation:
            return Verified(rows, 0, 0, result.first_violation)
        if result.next is None:
            break
        place = result.next
    seals, covered, wrong = await _verify_seals(tx)
    return Verified(rows, seals, covered, wrong)


async def _verify_seals(tx: Tx) -> tuple[int, int, Violation | None]:
    number, covered, previous, next_xid = 0, 0, GENESIS, 0
    while page := await store.list_seals(tx, after=number, limit=SEALS_AT_ONCE):
        for seal in page:
            wrong = None
            if (seal.number, seal.previous_hash, seal.first_xid) != (number + 1, previous, next_xid):
                wrong = "a seal follows the one before it"
            else:
                chain = await _hash(tx, seal)
                if (chain.digest(), chain.transactions, chain.entries) != (seal.hash, seal.transactions, seal.entries):
                    wrong = "a seal is the hash of what it covers"
            if wrong:
                return number, covered, Violation(wrong, "seals", str(seal.number))
            number, previous, next_xid = seal.number, seal.hash, seal.next_xid
            covered += seal.transactions
    return number, covered, None


async def _hash(tx: Tx, seal: Seal) -> ChainHash:
    """Over the lines that the seal covers, a page at a time."""
    chain = ChainHash(seal.previous_hash, seal.format)
    xid, transaction_id = seal.first_xid, store.NIL
    while lines := await store.read_lines(
        tx, xid=xid, transaction_id=transaction_id, next_xid=seal.next_xid, limit=LINES_AT_ONCE
    ):
        chain.add(lines)
        xid, transaction_id = lines[-1].xid, lines[-1].transaction_id
    return chain
