"""The audit: a live check that names the first bad row, and a chain of seals that shows what was changed (F3, F4)."""

from __future__ import annotations

import asyncio
import json
import sys
import tomllib
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from apps.finance.ledger import audit, store_audit
from apps.finance.ledger.events import JournalSealed
from apps.finance.ledger.model import GENESIS, ChainHash, JournalLine
from apps.wiring import app
from duly.db import Database
from duly.errors import Refused
from duly.testing import drain
from tests.apps.finance.ledger.acting import Books, count, move, refused
from tests.apps.transfers.acting import made
from tests.engine.cli.commands import ROOT, environment
from tests.support import rows, value

COMMAND = [sys.executable, "-c", "from apps.finance.ledger.workers import main; main()"]


@pytest.fixture
async def ledger(books: Books) -> dict[str, Any]:
    """A small ledger with everything in it."""
    cash, customer, shop = await books.open("ASSET"), await books.open("LIABILITY"), await books.open("LIABILITY")
    first = await books.post(cash, customer, "50.00", "first")
    reversed_ = await books.post(cash, customer, "5.00", "second")
    made(await books.reverse(reversed_["id"]))
    hold = await books.hold(customer, "20.00")
    made(await books.capture(hold["id"], shop, amount="7.00", final=False))
    return {"cash": cash, "customer": customer, "shop": shop, "first": first["id"], "hold": hold["id"]}


def corrupt(dsn: str, *statements: str) -> None:
    """What somebody with every right, and the triggers out of the way, might do."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("SET session_replication_role = replica")
        for constraint in ("transactions_amount_is_positive", "balances_are_covered", "balances_version_has_its_time"):
            table = constraint.partition("_")[0]
            connection.execute(f"ALTER TABLE ledger.{table} DROP CONSTRAINT IF EXISTS {constraint}".encode())
        for statement in statements:
            connection.execute(statement.encode())


async def seal(db: Database, **options: Any) -> Any:
    async with db.transaction() as tx:
        return (await audit.seal_journal(tx, **options))[0]


async def verify(db: Database) -> audit.Verified:
    async with db.transaction() as tx:
        return await audit.verify(tx)


async def test_a_sound_ledger_is_sound_in_pages_of_any_size(books: Books, ledger: dict[str, Any], dsn: str) -> None:
    """Every row is looked at, whatever the size of the pages."""
    whole = (await books.get("/v1/ledger/check")).json()
    everything = sum(count(dsn, f"ledger.{table}") for table in ("transactions", "entries", "accounts")) + 1
    assert whole == {"isSound": True, "checked": everything, "firstViolation": None, "next": None}
    for limit in (1, 2, 3, 7):
        checked, after = 0, ""
        for _ in range(everything + 5):
            page = (await books.get(f"/v1/ledger/check?limit={limit}{after}")).json()
            assert page["isSound"], page
            checked += page["checked"]
            if page["next"] is None:
                break
            after = f"&after={page['next']}"
        assert checked == everything, limit


CORRUPTIONS = [
    ("UPDATE ledger.entries SET amount = amount + 1 WHERE version = 1 AND account_id = '{cash}'",
     "debits equal credits", "{first}"),
    ("DELETE FROM ledger.entries WHERE transaction_id = '{first}' AND line = 2",
     "a transaction has two entries or more", "{first}"),
    ("UPDATE ledger.transactions SET amount = 1 WHERE id = '{first}'",
     "the amount of a transaction is the sum of its debits", "{first}"),
    ("UPDATE ledger.transactions SET currency = 'EUR' WHERE id = '{first}'",
     "entries have the currency and the time of their transaction", "{first}"),
    ("UPDATE ledger.transactions SET status = 'REVERSED' WHERE id = '{first}'",
     "what is marked as reversed has a reversal", "{first}"),
    ("UPDATE ledger.transactions SET reverses_id = '{first}' WHERE reverses_id IS NOT NULL; "
     "UPDATE ledger.transactions SET status = CASE id WHEN '{first}' THEN 'REVERSED' ELSE 'POSTED' END",
     "a reversal mirrors its original", None),
    ("DELETE FROM ledger.transactions WHERE id = '{first}'", "an entry belongs to a transaction", None),
    ("UPDATE ledger.entries SET version = version + 10 WHERE version = 2 AND account_id = '{cash}'",
     "versions have no gaps", "{cash}/3"),
    ("UPDATE ledger.entries SET balance_after = balance_after + 1 WHERE version = 2 AND account_id = '{cash}'",
     "the balance after an entry is the one before it, and its amount", "{cash}/2"),
    ("UPDATE ledger.entries e SET posted_at = posted_at + interval '1 hour' WHERE transaction_id = '{first}'; "
     "UPDATE ledger.transactions SET posted_at = posted_at + interval '1 hour' WHERE id = '{first}'",
     "time does not run backwards along an account", None),
    ("UPDATE ledger.balances SET balance = balance + 1 WHERE account_id = '{cash}'",
     "a balance is the one after the last entry", "{cash}"),
    ("UPDATE ledger.balances SET version = 7 WHERE account_id = '{cash}'",
     "a balance is the one after the last entry", "{cash}"),
    ("UPDATE ledger.balances SET held = 1 WHERE account_id = '{shop}'",
     "what is held is the sum of the active holds", "{shop}"),
    ("UPDATE ledger.holds SET amount = amount + 1", "what is held is the sum of the active holds", "{customer}"),
    ("DELETE FROM ledger.balances WHERE account_id = '{shop}'", "an account has a balance", "{shop}"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "rule", "row"), CORRUPTIONS, ids=[rule for _, rule, _ in CORRUPTIONS])
async def test_the_check_names_the_first_row_that_breaks_a_rule(
    books: Books, ledger: dict[str, Any], dsn: str, change: str, rule: str, row: str | None
) -> None:
    """Whatever was changed behind the ledger's back."""
    corrupt(dsn, *change.format(**ledger).split("; "))
    found = (await books.get("/v1/ledger/check")).json()
    assert (found["isSound"], found["firstViolation"]["rule"]) == (False, rule)
    if row:
        assert found["firstViolation"]["row"] == row.format(**ledger)


async def test_balances_that_do_not_sum_to_zero_are_found(books: Books, ledger: dict[str, Any], dsn: str) -> None:
    """Money from nowhere, with entries and balances that agree with each other."""
    corrupt(
        dsn,
        "INSERT INTO ledger.accounts SELECT gen_random_uuid(), name, type, currency, digits, side, may_go_negative, "
        "created_at FROM ledger.accounts LIMIT 1",
    )
    lone = value(
        dsn, "SELECT id FROM ledger.accounts a WHERE NOT EXISTS (SELECT 1 FROM ledger.balances WHERE account_id = a.id)"
    )
    corrupt(
        dsn,
        "INSERT INTO ledger.balances SELECT id, currency, digits, side, may_go_negative, 'ACTIVE', 5, 0, 1, "
        f"created_at FROM ledger.accounts WHERE id = '{lone}'",
        f"INSERT INTO ledger.entries SELECT '{lone}', 1, id, 9, 5, 5, posted_at FROM ledger.transactions LIMIT 1",
    )
    violation = await _totals(dsn)
    assert violation is not None
    assert (violation.rule, violation.row) == ("all balances of a currency sum to zero", "PLN")


async def _totals(dsn: str) -> Any:
    db = Database(dsn)
    try:
        async with db.transaction() as tx:
            return (await store_audit.check_page(tx, "totals", after="", limit=1))[2]
    finally:
        await db.close()


async def test_a_check_sees_one_moment_while_others_post(books: Books, db: Database) -> None:
    """No false alarm: the sum of balances is looked at in the same snapshot as everything else."""
    a, b = await books.open(), await books.open()
    stop = False

    async def post() -> None:
        while not stop:
            await books.post(a, b, "0.01")

    posting = [asyncio.create_task(post()) for _ in range(3)]
    try:
        for _ in range(15):
            assert (await books.get("/v1/ledger/check")).json()["isSound"]
    finally:
        stop = True
        await asyncio.gather(*posting)


@pytest.mark.parametrize(
    "after",
    ["x", "accounts:", "entries:zz", "transactions:00000000-0000-0000-0000-00000000000", "totals:1",
     "transactions:------------------------------------", "entries:00000000-0000-0000-0000-000000000000",
     "balances:00000000-0000-0000-0000-000000000000/3"],
)  # fmt: skip
async def test_a_page_that_is_none_is_422(books: Books, after: str) -> None:
    answer = await books.get(f"/v1/ledger/check?after={after}")
    assert refused(answer)[:2] == (422, "bad-place")


async def test_seals_follow_each_other_and_cover_everything_once(
    books: Books, ledger: dict[str, Any], db: Database, dsn: str
) -> None:
    """In small links, and again when there is something new."""
    while await seal(db, limit=2):
        pass
    a, b = await books.open(), await books.open()
    await books.post(a, b, "1.00")
    last = await seal(db)
    assert await seal(db) is None
    assert value(dsn, "SELECT sum(transactions) FROM ledger.seals") == count(dsn, "ledger.transactions")
    assert value(dsn, "SELECT sum(entries) FROM ledger.seals") == count(dsn, "ledger.entries")
    found = await verify(db)
    assert (found.first_violation, found.seals) == (None, last.number)
    [(payload,)] = rows(dsn, "SELECT payload FROM duly.outbox WHERE type = 'journal.sealed' ORDER BY seq DESC LIMIT 1")
    assert JournalSealed.model_validate(payload).hash == last.hash.hex()


async def test_what_is_not_committed_yet_is_sealed_later_and_in_its_place(books: Books, db: Database, dsn: str) -> None:
    """Ids are given before COMMIT: a transaction that began earlier and ends later must not be missed."""
    a, b, c, d = [await books.open() for _ in range(4)]
    with psycopg.connect(dsn) as slow:
        slow.execute(
            """SELECT ledger.post(ARRAY[gen_random_uuid()], ARRAY['slow'], ARRAY[1, 1], ARRAY[%s, %s]::uuid[],
               ARRAY[1, -1]::numeric[], ARRAY[false, false], '{}', false)""",
            [a, b],
        )
        await books.post(c, d, "1.00", "quick")
        assert await seal(db) is None
        slow.commit()
    assert (await seal(db)).transactions == 2
    assert (await verify(db)).first_violation is None


async def test_a_journal_from_another_server_is_not_sealed_blindly(
    books: Books, ledger: dict[str, Any], db: Database, dsn: str
) -> None:
    """Restored from a dump: what is new cannot be told by its database transaction, and that is said."""
    corrupt(dsn, "INSERT INTO ledger.seals VALUES (1, '0', '900000000', 1, 2, decode(repeat('00', 32), 'hex'), "
                 "decode(repeat('11', 32), 'hex'), duly.now())")  # fmt: skip
    with pytest.raises(Refused, match="restored from a dump"):
        await db.run(audit.seal_journal)
    rows(dsn, "SELECT duly.schedule('ledger.seal')")
    await drain(db, app.handlers)
    assert value(dsn, "SELECT count(*) FROM duly.dead_letters WHERE error LIKE '%restored from a dump%'") == 1


TAMPERINGS = [
    ("UPDATE ledger.transactions SET reference = 'forged' WHERE reference = 'first'", "1"),
    ("UPDATE ledger.transactions SET reason = 'forged' WHERE reverses_id IS NOT NULL", "1"),
    ("UPDATE ledger.transactions SET posted_by = 'another' WHERE reference = 'first'", "1"),
    ("UPDATE ledger.transactions SET posted_by = NULL WHERE reference = 'first'", "1"),
    ("UPDATE ledger.seals SET format = 1 WHERE number = 1", "1"),
    ("UPDATE ledger.seals SET hash = sha256(hash) WHERE number = 2", "2"),
    ("DELETE FROM ledger.seals WHERE number = 1", "2"),
    ("UPDATE ledger.transactions SET xid = (xid::text::bigint + 1000)::text::xid8 WHERE reference = 'first'", "1"),
    # A whole transaction, with lines and balances that agree: every rule holds, and only the seal knows.
    ("DELETE FROM ledger.entries e USING ledger.transactions t WHERE t.id = e.transaction_id AND t.reference = 'last'; "
     "DELETE FROM ledger.transactions WHERE reference = 'last'; "
     "UPDATE ledger.balances b SET version = e.version, balance = e.balance_after, posted_at = e.posted_at FROM ("
     "SELECT DISTINCT ON (account_id) * FROM ledger.entries ORDER BY account_id, version DESC) AS e "
     "WHERE e.account_id = b.account_id", "2"),
]  # fmt: skip


LINE = JournalLine(
    7, UUID(int=1), "first", "PLN", 1250, None, UUID(int=2), None, datetime(2033, 1, 1, tzinfo=UTC), 1, UUID(int=3), 4,
    1250, -99, "clerk",
)  # fmt: skip


def test_a_line_of_an_older_seal_is_hashed_as_it_was() -> None:
    """A known answer, from before the journal said who posted."""
    assert LINE.digest(1).hex() == "b04b87e13920e1df616f0ef96c9e1c9133c4df29e7530eded843462d91b51fdc"
    assert len({LINE.digest(1), LINE.digest(2), replace(LINE, posted_by=None).digest(2)}) == 3
    assert replace(LINE, posted_by=None).digest(1) == LINE.digest(1)


def test_a_seal_covers_the_one_before_it() -> None:
    """F4: whoever rewrites a link must rewrite all that follow it."""
    seals = [ChainHash(GENESIS, 2), ChainHash(bytes([1] * 32), 2)]
    for one in seals:
        one.add([LINE])
    assert seals[0].digest() != seals[1].digest()


async def test_seals_of_the_release_before_stay_valid_and_are_followed(
    books: Books, ledger: dict[str, Any], db: Database, dsn: str
) -> None:
    """It seals without who posted, also what this release has posted; both are verified, each as it was made."""
    end, number = await db.run(partial(store_audit.find_end, first_xid=0, horizon=await horizon(db), limit=99))
    assert end is not None
    lines = await db.run(
        partial(store_audit.read_lines, xid=0, transaction_id=store_audit.NIL, next_xid=end, limit=99)
    )  # fmt: skip
    chain = ChainHash(GENESIS, 1)
    chain.add(lines)
    insert = """INSERT INTO ledger.seals (number, first_xid, next_xid, transactions, entries, previous_hash, hash,
                                          sealed_at)
                VALUES (1, '0', %(end)s, %(number)s, %(entries)s, %(genesis)s, %(hash)s, duly.now())"""
    values = {"end": str(end), "number": number, "entries": len(lines), "genesis": GENESIS, "hash": chain.digest()}
    rows(dsn, insert, values)
    await books.post(ledger["cash"], ledger["customer"], "3.00")
    await seal(db)
    assert rows(dsn, "SELECT format FROM ledger.seals ORDER BY number") == [(1,), (2,)]
    assert (await verify(db)).first_violation is None


async def horizon(db: Database) -> int:
    return await db.run(store_audit.find_horizon)


@pytest.mark.parametrize(("change", "number"), TAMPERINGS)
async def test_what_was_changed_after_it_was_sealed_shows(
    books: Books, ledger: dict[str, Any], db: Database, dsn: str, change: str, number: str
) -> None:
    """F4: also what breaks no other rule."""
    await seal(db)
    await books.post(ledger["cash"], ledger["customer"], "3.00", "last")
    await seal(db)
    assert (await verify(db)).first_violation is None
    corrupt(dsn, *change.split("; "))
    violation = (await verify(db)).first_violation
    assert violation is not None
    assert (violation.table, violation.row) == ("seals", number)


async def test_the_schedule_seals_in_bounded_runs(
    books: Books, ledger: dict[str, Any], db: Database, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One link a commit; what is left follows at once."""
    monkeypatch.setattr(audit.seal_journal, "__kwdefaults__", {"limit": 1})
    rows(dsn, "SELECT duly.schedule('ledger.seal')")
    await drain(db, app.handlers)
    assert count(dsn, "ledger.seals") == count(dsn, "ledger.transactions")
    assert value(dsn, "SELECT cron FROM duly.schedules WHERE name = 'ledger.seal'") == "* * * * *"
    assert value(dsn, "SELECT count(*) FROM duly.dead_letters") == 0


async def run_command(dsn: str, tmp_path: Path) -> tuple[int | None, dict[str, Any]]:
    env = environment(DULY_DATA=str(tmp_path), DULY_LOG_FORMAT="json", DATABASE_URL=dsn, DULY_ALLOW_UNSAFE_DATABASE="1")
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*COMMAND, env=env, cwd=ROOT, stdout=pipe, stderr=pipe)
    async with asyncio.timeout(60):
        _, err = await process.communicate()
    return process.returncode, json.loads(err.decode().splitlines()[-1])


async def test_the_command_says_0_or_1_and_names_the_row(
    books: Books, ledger: dict[str, Any], db: Database, dsn: str, tmp_path: Path
) -> None:
    """As an operator or a CronJob runs it."""
    await seal(db)
    code, log = await run_command(dsn, tmp_path)
    assert (code, log["event"], log["seals"]) == (0, "ledger_verified", 1)
    corrupt(dsn, f"UPDATE ledger.balances SET balance = 1 WHERE account_id = '{ledger['shop']}'")
    code, log = await run_command(dsn, tmp_path)
    assert (code, log["event"], log["row"]) == (1, "ledger_broken", ledger["shop"])
    code, log = await run_command("postgresql://127.0.0.1:1/nowhere", tmp_path)
    assert (code, log["event"]) == (1, "ledger_not_verified")
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts["ledger-verify"] == "apps.finance.ledger.workers:main"


async def test_a_check_is_one_read_only_moment(books: Books, ledger: dict[str, Any], db: Database) -> None:
    """What others commit meanwhile is not seen by its later statements; and it cannot write."""
    async with db.transaction() as tx:
        await audit.check(tx)
        made(await books.try_post(move(ledger["cash"], ledger["shop"], "1.00")))
        seen = (await tx.execute(text("SELECT count(*) FROM ledger.transactions"))).scalar_one()
    assert seen == 4

    async def check_and_write(tx: Any) -> None:
        await audit.check(tx)
        await tx.execute(text("SELECT duly.emit('x.y', 'z', '1')"))

    with pytest.raises(DBAPIError, match="read-only"):
        await db.run(check_and_write)
