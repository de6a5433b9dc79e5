"""The log's days are made ahead and dropped whole; what no replay can ask for is forgotten."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal

import pytest

from apps.finance.decisions import service
from apps.finance.decisions.model import Observation
from apps.finance.decisions.workers import kept_days
from apps.wiring import app
from duly.db import Database
from duly.errors import Refused
from duly.testing import BusinessClock, drain
from tests.apps.finance.decisions.acting import LARGE, Office
from tests.support import rows, value

PARTITIONS = """
SELECT count(*)::int FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
WHERE i.inhparent = 'decisions.log'::regclass AND c.relname ~ '_p[0-9]{8}$'
"""


async def run(db: Database, dsn: str, name: str) -> str:
    """One run of a job, as its schedule would start it; what it said."""
    rows(dsn, "SELECT duly.schedule(%(name)s)", {"name": name})
    await drain(db, app.handlers)
    said = "SELECT message FROM duly.executions WHERE name = %(name)s ORDER BY completed_at DESC, job_id DESC LIMIT 1"
    return str(value(dsn, said, {"name": name}))


async def test_partitions_are_made_ahead_and_take_what_was_in_the_default_one(
    office: Office, db: Database, dsn: str, clock: BusinessClock
) -> None:
    assert value(dsn, PARTITIONS) == 9
    clock.freeze(datetime(2031, 7, 1, 12, tzinfo=UTC))
    await office.make_set()
    made = await office.evaluate({"amount": "1"})
    assert value(dsn, "SELECT count(*) FROM decisions.log_default") == 1
    assert await run(db, dsn, "decisions.keep-partitions") == "made 8 partitions of the decision log"
    assert value(dsn, "SELECT count(*) FROM decisions.log_default") == 0
    assert (await office.get(f"/decisions/{made['id']}"))["id"] == made["id"]
    with pytest.raises(Exception, match="insert-only"):
        rows(dsn, "DELETE FROM decisions.log")


async def test_the_log_is_dropped_by_day_and_old_rules_with_it(
    office: Office, db: Database, dsn: str, clock: BusinessClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever can still be read can be replayed."""
    monkeypatch.setenv("DECISIONS_KEEP_DAYS", "10")
    clock.freeze(datetime(2031, 7, 1, 12, tzinfo=UTC))
    await run(db, dsn, "decisions.keep-partitions")
    await office.make_set()
    await office.ask("PUT", "/lists/some", {"members": ["a"]})
    rule = await office.rule({"field": "to", "op": "in", "list": "some"})
    old = await office.evaluate({"to": "a"})
    clock.advance(days=8)
    await office.ask("PUT", "/lists/some", {"members": ["b"]})
    young = await office.evaluate({"to": "b"})
    clock.advance(days=5)
    await run(db, dsn, "decisions.forget")
    assert (await office.ask("GET", f"/decisions/{old['id']}")).status_code == 404
    replayed = await office.ask("POST", f"/decisions/{young['id']}/replay")
    assert (replayed.status_code, replayed.json()["same"]) == (200, True)
    assert rows(dsn, "SELECT list_id, version FROM decisions.list_versions") == [("some", 1), ("some", 2)]
    clock.advance(days=10)
    said = await run(db, dsn, "decisions.forget")
    assert "list versions" in said
    assert rows(dsn, "SELECT list_id, version FROM decisions.list_versions") == [("some", 2)]
    kept = "SELECT version FROM decisions.snapshots WHERE rule_set_id = 'screening'"
    assert rows(dsn, kept) == [(3,)]
    assert (await office.evaluate({"to": "b"}))["decision"] == "REVIEW"
    assert (await office.get(f"/rules/{rule['id']}/versions"))["items"][0]["version"] == 1


async def test_observations_are_forgotten_when_no_window_reaches_them(
    db: Database, dsn: str, clock: BusinessClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("apps.finance.decisions.service.FORGET_BATCH", 3)
    clock.freeze(datetime(2031, 7, 1, 12, tzinfo=UTC))
    async with db.transaction() as tx:
        await service.observe(tx, *(Observation("s", (str(n),), Decimal(1), "v") for n in range(5)))
    clock.advance(days=32)
    await run(db, dsn, "decisions.forget")
    assert value(dsn, "SELECT count(*) FROM decisions.buckets") == 10
    clock.advance(days=2)
    await run(db, dsn, "decisions.forget")  # a run is bounded, and the rest follows at once
    assert value(dsn, "SELECT count(*) FROM decisions.buckets") == 0
    assert value(dsn, "SELECT count(*) FROM decisions.sightings") == 0
    assert LARGE["op"] == "gt"


@pytest.mark.parametrize("bad", ["x", "0", "-1", "1.5", "123456"])
def test_a_retention_that_is_no_number_of_days_is_refused(monkeypatch: pytest.MonkeyPatch, bad: str) -> None:
    monkeypatch.setenv("DECISIONS_KEEP_DAYS", bad)
    with pytest.raises(Refused):
        kept_days()
