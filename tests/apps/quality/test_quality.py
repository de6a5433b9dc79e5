"""Non-conformities: created, closed, audited and read over HTTP (Q1 to Q4)."""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from apps.quality.events import NonConformityClosed, NonConformityCreated
from apps.wiring import app
from duly.db import Database
from duly.testing import assert_emitted, drain
from tests.apps.conftest import Api
from tests.support import rows, value

NEW = {"supplier_id": "ACME-7", "severity": "HIGH", "description": "Burrs on the flange,\nlot 4711"}


async def create(api: Api, *, sub: str = "erin", **changes: Any) -> dict[str, Any]:
    """One more non-conformity."""
    answer = await api.client.post("/ncs", json=NEW | changes, headers=api.headers(sub, "quality", "QUALITY_ENGINEER"))
    assert answer.status_code == 201, answer.text
    made: dict[str, Any] = answer.json()
    return made


def manager(api: Api, sub: str = "mona") -> dict[str, str]:
    """The headers of somebody who may close."""
    return api.headers(sub, "quality", "QUALITY_MANAGER")


async def test_creating_writes_the_row_and_its_event_in_one_commit(api: Api, db: Database, dsn: str) -> None:
    answer = await api.client.post("/ncs", json=NEW, headers=api.headers("erin", "quality", "QUALITY_ENGINEER"))
    assert answer.status_code == 201
    made = answer.json()
    assert answer.headers["location"] == f"/ncs/{made['id']}"
    assert (made["status"], made["created_by"], made["closed_at"]) == ("OPEN", "erin", None)
    assert {name: made[name] for name in NEW} == NEW
    assert rows(dsn, "SELECT id, xmin::text FROM quality.nonconformities") == [
        (UUID(made["id"]), value(dsn, "SELECT xmin::text FROM duly.outbox"))
    ]
    async with db.transaction() as tx:
        await assert_emitted(tx, NonConformityCreated, nc_id=UUID(made["id"]), severity="HIGH", actor="erin")


@pytest.mark.parametrize("severity", ["LOW", "MEDIUM", "HIGH", "CRITICAL"])
async def test_each_severity_is_stored_and_told(api: Api, db: Database, dsn: str, severity: str) -> None:
    """Q1."""
    made = await create(api, severity=severity)
    assert (made["severity"], value(dsn, "SELECT severity FROM quality.nonconformities")) == (severity, severity)
    async with db.transaction() as tx:
        await assert_emitted(tx, NonConformityCreated, nc_id=UUID(made["id"]), severity=severity)


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"severity": "BAD"}, "$.severity"),
        ({"severity": None}, "$.severity"),
        ({"supplier_id": ""}, "$.supplier_id"),
        ({"supplier_id": "a\nb"}, "$.supplier_id"),
        ({"supplier_id": "x" * 201}, "$.supplier_id"),
        ({"description": "   "}, "$.description"),
        ({"description": "nul \x00"}, "$.description"),
        ({"description": 7}, "$.description"),
        ({"status": "CLOSED"}, "$.status"),
    ],
)
async def test_bad_input_is_a_problem_that_says_where(api: Api, dsn: str, changes: dict[str, Any], path: str) -> None:
    answer = await api.client.post("/ncs", json=NEW | changes, headers=manager(api))
    assert answer.status_code == 422
    assert answer.headers["content-type"] == "application/problem+json"
    assert [error["path"] for error in answer.json()["errors"]] == [path]
    assert value(dsn, "SELECT count(*) FROM duly.outbox") == 0


async def test_closing_an_open_one_emits_its_event(api: Api, db: Database) -> None:
    """Q2: 200."""
    made = await create(api)
    answer = await api.client.patch(f"/ncs/{made['id']}/close", headers=manager(api))
    assert (answer.status_code, answer.json()["status"], answer.json()["closed_by"]) == (200, "CLOSED", "mona")
    async with db.transaction() as tx:
        await assert_emitted(tx, NonConformityClosed, nc_id=UUID(made["id"]), actor="mona")


async def test_closing_what_is_not_there_is_404_and_emits_nothing(api: Api, dsn: str) -> None:
    """Q2: 404."""
    answer = await api.client.patch(f"/ncs/{uuid4()}/close", headers=manager(api))
    assert (answer.status_code, answer.json()["type"]) == (404, "urn:duly:problem:non-conformity-not-found")
    assert value(dsn, "SELECT count(*) FROM duly.outbox") == 0


async def test_closing_twice_is_409_and_emits_once(api: Api, dsn: str) -> None:
    """Q2: 409."""
    made = await create(api)
    assert (await api.client.patch(f"/ncs/{made['id']}/close", headers=manager(api))).status_code == 200
    again = await api.client.patch(f"/ncs/{made['id']}/close", headers=manager(api))
    assert (again.status_code, again.json()["type"]) == (409, "urn:duly:problem:already-closed")
    assert value(dsn, "SELECT count(*) FROM duly.outbox WHERE type = 'quality.nc.closed'") == 1


async def test_of_twenty_who_close_at_once_one_succeeds(api: Api, dsn: str) -> None:
    made = await create(api)
    answers = await asyncio.gather(
        *(api.client.patch(f"/ncs/{made['id']}/close", headers=manager(api, f"m{n}")) for n in range(20))
    )
    assert sorted(answer.status_code for answer in answers) == [200] + [409] * 19
    assert value(dsn, "SELECT count(*) FROM duly.outbox WHERE type = 'quality.nc.closed'") == 1


async def test_an_engineer_may_create_and_read_but_not_close(api: Api) -> None:
    made = await create(api)
    engineer = api.headers("erin", "quality", "QUALITY_ENGINEER")
    assert (await api.client.get(f"/ncs/{made['id']}", headers=engineer)).status_code == 200
    refused = await api.client.patch(f"/ncs/{made['id']}/close", headers=engineer)
    assert refused.status_code == 403
    assert "QUALITY_MANAGER" in refused.json()["detail"]


async def test_each_event_becomes_one_row_of_the_trail(api: Api, db: Database, dsn: str) -> None:
    made = await create(api)
    await api.client.patch(f"/ncs/{made['id']}/close", headers=manager(api))
    await drain(db, app.handlers)
    trail = (await api.client.get(f"/ncs/{made['id']}", headers=manager(api))).json()["audit"]
    assert [(step["actor"], step["action"], step["entity_type"], step["entity_id"]) for step in trail] == [
        ("erin", "quality.nc.created", "nonconformity", made["id"]),
        ("mona", "quality.nc.closed", "nonconformity", made["id"]),
    ]
    assert trail[0]["meta_json"] == {"supplier_id": "ACME-7", "severity": "HIGH"}
    assert value(dsn, "SELECT count(*) FROM duly.processed_events WHERE consumer = 'quality.audit'") == 2


async def test_an_event_that_is_delivered_again_adds_nothing_to_the_trail(api: Api, db: Database, dsn: str) -> None:
    await create(api)
    await drain(db, app.handlers)
    rows(
        dsn,
        """INSERT INTO duly.jobs (name, event_id, run_at, due_at, created_at, source, entity_id)
           SELECT 'consumer:quality.audit', id, duly.now(), duly.now(), duly.now(), 'Deferred', aggregate_id
           FROM duly.events""",
    )
    assert await drain(db, app.handlers) == 1
    assert value(dsn, "SELECT count(*) FROM quality.audit_log") == 1
    assert value(dsn, "SELECT outcome FROM duly.executions ORDER BY completed_at DESC LIMIT 1") == "duplicate"


async def test_the_table_holds_one_row_for_an_event(api: Api, db: Database, dsn: str) -> None:
    """Q3: also long after the inbox has forgotten the event."""
    await create(api)
    await drain(db, app.handlers)
    again = """
        INSERT INTO quality.audit_log (event_id, actor, action, entity_type, entity_id, meta_json, at)
        SELECT event_id, actor, action, entity_type, entity_id, meta_json, at FROM quality.audit_log"""
    with pytest.raises(psycopg.errors.UniqueViolation):
        rows(dsn, again)


async def test_pages_are_filtered_and_follow_each_other(api: Api) -> None:
    made = [await create(api, supplier_id=f"S{n % 2}", severity=("LOW", "HIGH")[n % 2]) for n in range(5)]
    await api.client.patch(f"/ncs/{made[0]['id']}/close", headers=manager(api))

    async def page(**query: Any) -> tuple[list[str], str | None]:
        answer = (await api.client.get("/ncs", params=query, headers=manager(api))).json()
        return [item["id"] for item in answer["items"]], answer["next"]

    newest_first = [item["id"] for item in reversed(made)]
    assert await page() == (newest_first, None)
    first, following = await page(limit=2)
    second, after = await page(limit=2, before=following)
    last, end = await page(limit=2, before=after)
    assert ([*first, *second, *last], end) == (newest_first, None)
    assert (await page(status="CLOSED"))[0] == [made[0]["id"]]
    assert (await page(supplier_id="S1", severity="HIGH"))[0] == [made[3]["id"], made[1]["id"]]
    for wrong in ({"limit": 0}, {"limit": 201}, {"status": "x"}, {"before": "x"}, {"supplier_id": "\x00"}):
        assert (await api.client.get("/ncs", params=wrong, headers=manager(api))).status_code == 422, wrong


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ({"severity": "HIGH"}, [3, 1, 0]),
        ({"supplier_id": "S1"}, [3, 2, 1]),
        ({"status": "OPEN"}, [3, 2, 0]),
        ({"severity": "HIGH", "supplier_id": "S1", "status": "OPEN"}, [3]),
        ({"severity": "CRITICAL"}, []),
    ],
)
async def test_each_filter_counts_by_itself_and_with_the_others(
    api: Api, query: dict[str, str], found: list[int]
) -> None:
    """Q4."""
    kinds = [("S0", "HIGH"), ("S1", "HIGH"), ("S1", "LOW"), ("S1", "HIGH")]
    made = [await create(api, supplier_id=supplier, severity=severity) for supplier, severity in kinds]
    await api.client.patch(f"/ncs/{made[1]['id']}/close", headers=manager(api))
    page = (await api.client.get("/ncs", params=query, headers=manager(api))).json()
    assert [item["id"] for item in page["items"]] == [made[number]["id"] for number in found]


async def test_a_trail_is_of_one_alone(api: Api, db: Database) -> None:
    """Q4: what happened to another one is not in it."""
    one, other = await create(api, sub="erin"), await create(api, sub="emil")
    await drain(db, app.handlers)
    for made, actor in ((one, "erin"), (other, "emil")):
        trail = (await api.client.get(f"/ncs/{made['id']}", headers=manager(api))).json()["audit"]
        assert [(step["actor"], step["entity_id"]) for step in trail] == [(actor, made["id"])]


async def test_reading_what_is_not_there_is_404(api: Api) -> None:
    assert (await api.client.get(f"/ncs/{uuid4()}", headers=manager(api))).status_code == 404
    assert (await api.client.get("/ncs/7", headers=manager(api))).status_code == 422
