"""The transaction boundary."""

from __future__ import annotations

import pytest
from sqlalchemy import text

from duly.db import Database
from tests.support import rows


async def test_a_block_that_ends_commits_and_one_that_raises_rolls_back(db: Database) -> None:
    async with db.transaction() as tx:
        await tx.execute(text("SELECT duly.schedule('A')"))

    async def fail() -> None:
        async with db.transaction() as tx:
            await tx.execute(text("SELECT duly.schedule('B')"))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()
    async with db.transaction() as tx:
        assert (await tx.execute(text("SELECT name FROM duly.jobs"))).scalars().all() == ["A"]


async def test_a_raw_block_that_raises_rolls_back_too(db: Database, dsn: str) -> None:
    """E2.2: whatever raises; here nothing that PostgreSQL knows of."""
    async with db.raw_transaction() as connection:
        await connection.execute("SELECT duly.schedule('A')")

    async def fail() -> None:
        async with db.raw_transaction() as connection:
            await connection.execute("SELECT duly.schedule('B')")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()
    assert rows(dsn, "SELECT name FROM duly.jobs") == [("A",)]
