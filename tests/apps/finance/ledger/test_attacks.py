"""What the database itself refuses, said in raw SQL by somebody who bypasses the application (F3, F4)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from psycopg import errors

from tests.apps.finance.ledger.acting import Books, check_consistent, count
from tests.support import rows, value

ROLES_FILE = Path(__file__).parents[4] / "deploy" / "sql" / "roles.sql"
HEADING = """
INSERT INTO ledger.transactions (id, reference, currency, amount, posted_at)
VALUES (%(id)s::uuid, %(id)s::text, 'PLN', %(amount)s, duly.now())
"""
ENTRY = """
INSERT INTO ledger.entries (account_id, version, transaction_id, line, amount, balance_after, posted_at)
SELECT %(account)s, b.version + %(ahead)s, %(id)s, %(line)s, %(amount)s, b.balance + %(amount)s + %(off)s,
       t.posted_at
FROM ledger.balances b, ledger.transactions t WHERE b.account_id = %(account)s AND t.id = %(id)s
"""


@pytest.fixture
async def posted(books: Books) -> dict[str, Any]:
    """Two accounts and a transaction between them."""
    a, b = await books.open("ASSET"), await books.open("LIABILITY")
    return {"a": a, "b": b, "id": (await books.post(a, b, "5.00"))["id"]}


@pytest.fixture
def raw(dsn: str) -> Iterator[psycopg.Connection[Any]]:
    """A connection that can do whatever the owner can."""
    with psycopg.connect(dsn) as connection:
        yield connection
        connection.rollback()


def write(connection: psycopg.Connection[Any], amount: int = 100) -> str:
    """A heading by hand."""
    made = str(uuid4())
    connection.execute(HEADING, {"id": made, "amount": amount})
    return made


def enter(
    connection: psycopg.Connection[Any], id: str, account: str, amount: int, line: int, ahead: int = 1, off: int = 0
) -> None:
    """A line by hand."""
    values = {"id": id, "account": account, "amount": amount, "line": line, "ahead": ahead, "off": off}
    connection.execute(ENTRY, values)


@pytest.mark.parametrize(
    "attack",
    [
        "UPDATE ledger.entries SET amount = amount * 2",
        "UPDATE ledger.entries SET posted_at = posted_at - interval '1 day'",
        "DELETE FROM ledger.entries",
        "TRUNCATE ledger.entries",
        "UPDATE ledger.transactions SET reference = 'x'",
        "UPDATE ledger.transactions SET amount = amount + 1",
        "UPDATE ledger.transactions SET xid = pg_current_xact_id()",
        "UPDATE ledger.transactions SET status = 'REVERSED'",
        "DELETE FROM ledger.transactions",
        "TRUNCATE ledger.transactions",
        "TRUNCATE ledger.transactions, ledger.entries, ledger.accounts, ledger.balances, ledger.holds CASCADE",
        "UPDATE ledger.accounts SET currency = 'EUR'",
        "UPDATE ledger.accounts SET may_go_negative = NOT may_go_negative",
        "DELETE FROM ledger.accounts",
        "DELETE FROM ledger.balances",
        "TRUNCATE ledger.seals",
    ],
)
async def test_what_was_written_is_never_changed(
    raw: psycopg.Connection[Any], posted: dict[str, Any], attack: str
) -> None:
    """F4: for everybody, the owner included; a mark of a reversal needs the reversal."""
    with pytest.raises(errors.RestrictViolation):
        raw.execute(attack.encode())


async def test_a_reversal_marks_its_original_and_changes_nothing_else(
    books: Books, raw: psycopg.Connection[Any], posted: dict[str, Any]
) -> None:
    """F4: nor can the mark be taken away."""
    await books.reverse(posted["id"])
    for change in ("status = 'POSTED'", "status = 'REVERSED', reason = 'x'", "status = 'REVERSED'"):
        with pytest.raises(errors.RestrictViolation):
            raw.execute(f"UPDATE ledger.transactions SET {change} WHERE reverses_id IS NULL".encode())
        raw.rollback()


async def test_with_the_mark_of_a_reversal_nothing_else_is_changed(
    raw: psycopg.Connection[Any], posted: dict[str, Any]
) -> None:
    """F4: in the transaction that reverses, either."""
    raw.execute(
        """INSERT INTO ledger.transactions (id, reference, currency, amount, reverses_id, reason, posted_at)
           VALUES (gen_random_uuid(), 'by hand', 'PLN', 500, %(id)s, 'typo', duly.now())""",
        posted,
    )
    for change in ("amount = 1", "reference = 'x'", "reason = 'x'", "posted_at = posted_at - interval '1 day'"):
        with pytest.raises(errors.RestrictViolation), raw.transaction():
            raw.execute(
                f"UPDATE ledger.transactions SET status = 'REVERSED', {change} WHERE id = %(id)s".encode(), posted
            )
    raw.execute("UPDATE ledger.transactions SET status = 'REVERSED' WHERE id = %(id)s", posted)


async def test_an_entry_cannot_join_an_older_transaction(
    raw: psycopg.Connection[Any], posted: dict[str, Any], dsn: str
) -> None:
    """F3: not even a pair that sums to zero."""
    with pytest.raises(errors.CheckViolation, match="being posted"):
        enter(raw, posted["id"], posted["a"], 100, 3)
    raw.rollback()
    with pytest.raises(errors.CheckViolation, match="being posted"):
        raw.execute(
            """INSERT INTO ledger.entries SELECT e.account_id, e.version + 1, e.transaction_id, e.line + 2, e.amount,
               e.balance_after + e.amount, e.posted_at FROM ledger.entries e"""
        )
    raw.rollback()
    check_consistent(dsn)


async def test_a_transaction_by_hand_is_proved_at_commit_too(
    raw: psycopg.Connection[Any], posted: dict[str, Any], dsn: str
) -> None:
    """F3: no lines, one line, lines that do not sum to zero, a heading that says something else."""
    wrong: list[list[tuple[str, int]]] = [[], [("a", 100)], [("a", 100), ("b", -99)], [("a", 50), ("b", -50)]]
    for lines in wrong:
        heading = write(raw)
        for number, (account, amount) in enumerate(lines, 1):
            enter(raw, heading, posted[account], amount, number)
        with pytest.raises(errors.CheckViolation, match="does not balance"):
            raw.commit()
    assert count(dsn, "ledger.transactions") == 1
    heading = write(raw)
    enter(raw, heading, posted["a"], 100, 1)
    enter(raw, heading, posted["b"], -100, 2)
    raw.commit()  # what is right is not refused; that the balances were forgotten, the check finds
    with pytest.raises(AssertionError, match="not the fold"):
        check_consistent(dsn)


@pytest.mark.parametrize(("ahead", "off"), [(2, 0), (2, -500), (0, 0), (-1, 0), (1, 1), (1, -1)])
async def test_an_entry_follows_the_last_one_without_a_gap(
    raw: psycopg.Connection[Any], posted: dict[str, Any], ahead: int, off: int
) -> None:
    """F2: or statements and balances of the past would lie."""
    heading = write(raw)
    with pytest.raises((errors.CheckViolation, errors.UniqueViolation)):
        enter(raw, heading, posted["a"], 100, 1, ahead, off)


async def test_an_entry_is_not_older_than_the_last_one(raw: psycopg.Connection[Any], posted: dict[str, Any]) -> None:
    """F2: a balance of the past is found by halving."""
    heading = str(uuid4())
    yesterday = HEADING.replace("duly.now()", "duly.now() - interval '1 day'")
    raw.execute(yesterday.encode(), {"id": heading, "amount": 100})
    with pytest.raises(errors.CheckViolation, match="follows nothing"):
        enter(raw, heading, posted["a"], 100, 1)


async def test_an_entry_has_the_currency_of_its_transaction_and_an_account(
    books: Books, raw: psycopg.Connection[Any], posted: dict[str, Any]
) -> None:
    """F3: one currency."""
    heading = write(raw)
    with pytest.raises(errors.CheckViolation, match="being posted"):
        enter(raw, heading, await books.open(currency="EUR"), 100, 1)
    raw.rollback()
    heading = write(raw)
    with pytest.raises(errors.CheckViolation, match="being posted"):
        raw.execute(
            """INSERT INTO ledger.entries SELECT %(a)s, 1, t.id, 1, 5, 5, t.posted_at
               FROM ledger.transactions t WHERE t.id = %(id)s""",
            {"a": str(uuid4()), "id": heading},
        )


@pytest.mark.parametrize(
    "attack",
    [
        "UPDATE ledger.balances SET held = -1",
        "UPDATE ledger.balances SET balance = 1000000000000000001",
        "UPDATE ledger.balances SET status = 'CLOSED', closed_at = duly.now()",
        "UPDATE ledger.balances SET version = 0",
        "UPDATE ledger.balances SET may_go_negative = false",
        "INSERT INTO ledger.transactions (id, reference, currency, amount, posted_at) VALUES "
        "(gen_random_uuid(), '', 'PLN', 1, duly.now())",
        "INSERT INTO ledger.seals VALUES (1, '1', '1', 1, 2, '', '', duly.now())",
    ],
)
async def test_the_schema_says_what_is_impossible(
    raw: psycopg.Connection[Any], posted: dict[str, Any], attack: str
) -> None:
    """F3."""
    with pytest.raises((errors.CheckViolation, errors.ForeignKeyViolation)):
        raw.execute(attack.encode())


@pytest.mark.parametrize("attack", ["held = 501", "balance = -499, held = 500", "balance = 1"])
async def test_an_account_that_may_not_is_never_overdrawn(
    books: Books, raw: psycopg.Connection[Any], attack: str
) -> None:
    """F5: nor is more on hold than there is."""
    account = await books.open_with("5.00")
    with pytest.raises(errors.CheckViolation, match="balances_are_covered"):
        raw.execute(f"UPDATE ledger.balances SET {attack} WHERE account_id = %s".encode(), [account])


async def test_the_applications_role_posts_and_cannot_write_the_journal(
    raw: psycopg.Connection[Any], posted: dict[str, Any], dsn: str
) -> None:
    """FAULTS: least privilege, as deploy/sql/roles.sql grants it."""
    role = f"app_{uuid4().hex[:12]}"
    rows(dsn, f"CREATE ROLE {role} NOLOGIN")
    try:
        rows(dsn, ROLES_FILE.read_text().replace("duly_app", role))
        for attack in (
            "UPDATE ledger.entries SET amount = 1", "DELETE FROM ledger.entries", "TRUNCATE ledger.entries",
            "UPDATE ledger.transactions SET status = 'REVERSED'", "DELETE FROM ledger.transactions",
            "INSERT INTO ledger.transactions (id) VALUES (gen_random_uuid())",
            "INSERT INTO ledger.entries (account_id) VALUES (gen_random_uuid())",
            "UPDATE ledger.balances SET balance = 0", "UPDATE ledger.accounts SET name = 'x'",
            "INSERT INTO ledger.balances (account_id) VALUES (gen_random_uuid())",
            "DELETE FROM ledger.holds", "UPDATE ledger.seals SET entries = 0", "DELETE FROM ledger.seals",
            "DROP TRIGGER entries_keep ON ledger.entries", "ALTER TABLE ledger.entries DISABLE TRIGGER ALL",
        ):  # fmt: skip
            raw.execute(f"SET ROLE {role}".encode())
            with pytest.raises(errors.InsufficientPrivilege):
                raw.execute(attack.encode())
            raw.rollback()
        raw.execute(f"SET ROLE {role}".encode())
        answer = raw.execute(
            """SELECT outcome FROM ledger.post(ARRAY[gen_random_uuid()], ARRAY['by role'], ARRAY[1, 1],
               ARRAY[%(a)s, %(b)s]::uuid[], ARRAY[1, -1]::numeric[], ARRAY[false, false], '{}', false, 'clerk')""",
            posted,
        ).fetchone()
        assert answer == ("posted",)
        assert raw.execute("SELECT count(*) FROM ledger.entries").fetchone() == (4,)
        raw.commit()
        raw.execute("RESET ROLE")
        raw.commit()
        check_consistent(dsn)
    finally:
        raw.rollback()
        rows(dsn, f"DROP OWNED BY {role}")
        rows(dsn, f"DROP ROLE {role}")


async def test_nobody_else_may_call_the_functions(raw: psycopg.Connection[Any], dsn: str) -> None:
    """They run with the owner's rights: PUBLIC has no right to them."""
    granted = """
        SELECT p.proname FROM pg_proc p, aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) AS a
        WHERE p.pronamespace = 'ledger'::regnamespace AND a.grantee = 0"""
    assert rows(dsn, granted) == []
    unpinned = """
        SELECT p.proname FROM pg_proc p WHERE p.pronamespace = 'ledger'::regnamespace AND p.prosecdef
          AND NOT coalesce(p.proconfig::text, '') LIKE '%search_path%'"""
    assert rows(dsn, unpinned) == []
    assert value(dsn, "SELECT count(*) FROM pg_proc WHERE pronamespace = 'ledger'::regnamespace AND prosecdef") >= 6
