"""Alerts and the audit: E7.1 (alerts; every action audited)."""

from __future__ import annotations

from datetime import timedelta

import pytest

from duly.db import Database
from duly.errors import Conflict, NotFound
from duly.operate import list_alerts, list_audit, resolve_alert
from tests.engine.operate.conftest import NOON, WHO, Make


async def test_a_resolved_alert_leaves_the_open_list_and_the_same_trouble_opens_a_new_one(
    db: Database, make: Make
) -> None:
    make.run("SELECT duly.alert('dead_letter', 'charge', 'boom'), duly.alert('dead_letter', 'charge', 'boom again')")
    async with db.transaction() as tx:
        [alert] = await list_alerts(tx)
        assert (alert.count, alert.message, alert.raised_at) == (2, "boom again", NOON)
        await resolve_alert(tx, alert.id, **WHO)
        assert await list_alerts(tx) == []
    make.clock.advance(minutes=1)
    make.run("SELECT duly.alert('dead_letter', 'charge', 'boom')")
    async with db.transaction() as tx:
        newest, oldest = await list_alerts(tx, open_only=False)
    assert (newest.resolved_at, newest.count) == (None, 1)
    assert oldest.resolved_at == NOON
    [entry] = make.audit()
    assert (entry["action"], entry["subject"], entry["actor"]) == ("alert.resolved", f"alert:{alert.id}", "alice")


async def test_an_alert_is_resolved_once(db: Database, make: Make) -> None:
    make.run("SELECT duly.alert('dead_letter', 'charge', 'boom')")
    id = make.value("SELECT id FROM duly.alerts")
    async with db.transaction() as tx:
        await resolve_alert(tx, id, **WHO)
        with pytest.raises(Conflict):
            await resolve_alert(tx, id, **WHO)
        with pytest.raises(NotFound):
            await resolve_alert(tx, id + 1, **WHO)
    assert len(make.audit()) == 1


async def test_the_audit_is_listed_newest_first_and_by_subject(db: Database, make: Make) -> None:
    for number in range(5):
        make.run(
            "INSERT INTO duly.audit (at, actor, action, subject, after) VALUES"
            " (%(at)s, 'alice', 'job.cancelled', %(subject)s, '{\"price\": 1.10}')",
            at=NOON + timedelta(minutes=number),
            subject=f"job:{number % 2}",
        )
    async with db.transaction() as tx:
        first = await list_audit(tx, limit=2)
        second = await list_audit(tx, before=first[-1].id, limit=2)
        of_subject = await list_audit(tx, subject="job:1")
    assert [entry.at.minute for entry in [*first, *second]] == [4, 3, 2, 1]
    assert [entry.at.minute for entry in of_subject] == [3, 1]
    assert first[0].after == '{"price": 1.10}', "exactly as it was stored"
