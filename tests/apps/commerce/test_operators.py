"""What an administrator sees of these jobs: in the console and on the command line (C4)."""

from __future__ import annotations

from pathlib import Path

import pytest

from apps.wiring import app
from duly.db import Database
from duly.testing import BusinessClock, drain
from tests.apps.commerce.acting import Customers, run_job
from tests.console.conftest import serving
from tests.engine.cli.commands import duly, environment
from tests.support import rows

RECURRING = ["CartAbandonment", "CurrencyRateSync", "PaymentExpiration", "TokenCleanup", "commerce.forget-carts"]


@pytest.fixture
def env(dsn: str, tmp_path: Path) -> dict[str, str]:
    """Commands of the real application on this test's database."""
    return environment(
        DULY_APP="apps.wiring:app", DATABASE_URL=dsn, DULY_DATA=str(tmp_path), DULY_ALLOW_UNSAFE_DATABASE="1",
        COLUMNS="200",
    )  # fmt: skip


def said(*arguments: str, env: dict[str, str]) -> str:
    done = duly(*arguments, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


async def test_the_console_shows_the_schedules_and_what_waits(shop: Customers, db: Database, tmp_path: Path) -> None:
    """C4."""
    order_id = await shop.place()
    async with serving(db, tmp_path, app) as site:
        ada = await site.signed_in("ada")
        schedules = (await ada.get("/console/schedules")).text
        timeline = (await ada.get("/console/entity", params={"id": order_id})).text
    for name in RECURRING:
        assert name in schedules
    assert "PaymentTimeout" in timeline


async def test_the_command_line_lists_previews_and_runs_the_schedules(
    db: Database, dsn: str, env: dict[str, str]
) -> None:
    """C4, E7.1: never run shows, too; the daily fetch is at a quarter past noon in Warsaw, summer and winter."""
    await app.prepare(db)
    listed = said("schedules", "list", env=env)
    for name in RECURRING:
        assert name in listed
    assert "12:15" in said("schedules", "preview", "CurrencyRateSync", env=env)
    said("schedules", "trigger", "PaymentExpiration", "--reason", "to see it run", env=env)
    await drain(db, app.handlers)
    assert rows(dsn, "SELECT source, outcome FROM duly.executions WHERE name = 'PaymentExpiration'") == [
        ("Manual", "done")
    ]
    said("schedules", "disable", "CartAbandonment", "--reason", "a test", env=env)
    assert rows(dsn, "SELECT enabled FROM duly.schedules WHERE name = 'CartAbandonment'") == [(False,)]


async def test_history_and_why_tell_the_story_of_an_order(
    shop: Customers, db: Database, dsn: str, clock: BusinessClock, env: dict[str, str]
) -> None:
    """C4: by the job's name, and by the order's id."""
    waiting, expired = await shop.place(), await shop.place()
    assert "PaymentTimeout" in said("why", waiting, env=env)
    clock.advance(minutes=16)
    await drain(db, app.handlers)
    await run_job(db, dsn, "PaymentExpiration")
    assert "the order and its payment have expired" in said("history", "--entity", expired, env=env)
    assert "PaymentTimeout" in said("history", "--name", "PaymentTimeout", env=env)
    story = said("why", expired, env=env)
    assert "PaymentTimeout" in story
    assert "OrderExpired" in story or "expired" in story
