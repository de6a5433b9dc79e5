"""E7.1: live numbers, by one reader for everybody, within bounds."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncGenerator
from datetime import UTC, datetime, timedelta
from html import unescape

import httpx2
import pytest
from sqlalchemy import event

from duly.console import live as live_module
from duly.console.rollup import MINUTES, series
from duly.db import Database
from duly.testing import BusinessClock
from tests.console.conftest import Site
from tests.support import rows

NOON = datetime(2026, 3, 2, 12, 0, tzinfo=UTC)


async def events(browser: httpx2.AsyncClient) -> AsyncGenerator[tuple[str, str], None]:
    """The events of a live page, as an EventSource sees them."""
    async with browser.stream("GET", "/console/live", timeout=20) as stream:
        assert stream.status_code == 200
        assert stream.headers["content-type"].startswith("text/event-stream")
        name, data = "", []
        async for line in stream.aiter_lines():
            if line.startswith("event: "):
                name = line[7:]
            elif line.startswith("data: "):
                data.append(line[6:])
            elif not line and data:
                yield name, "\n".join(data)
                name, data = "", []


async def test_numbers_come_by_themselves(site: Site, ada: httpx2.AsyncClient, dsn: str) -> None:
    site.console.live.tick_seconds = 0.05
    seen: dict[str, str] = {}
    async with asyncio.timeout(20):
        async for name, html in events(ada):
            seen[name] = html
            if "chart" in seen and "shop.sell" in seen["queue"]:
                break
            rows(dsn, "SELECT duly.schedule('shop.sell')")
    assert set(seen) == {"pulse", "attention", "queue", "chart"}
    assert "No worker is alive." in seen["attention"]
    assert "Due now" in seen["pulse"]


async def test_a_session_that_is_revoked_ends_its_stream(
    site: Site, ada: httpx2.AsyncClient, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_module, "TICKS", 100_000)  # it does not end by itself
    site.console.live.tick_seconds = 0.05
    count = 0
    async with asyncio.timeout(20):
        async for _ in events(ada):
            count += 1
            if count == 4:
                rows(dsn, "UPDATE duly.console_sessions SET revoked_at = clock_timestamp()")
    assert count >= 4
    async with asyncio.timeout(10):
        while site.console.live.viewers:
            await asyncio.sleep(0.01)


async def test_many_viewers_cost_as_much_as_one(site: Site, ada: httpx2.AsyncClient, db: Database) -> None:
    site.console.live.tick_seconds = 0.2
    reads: list[str] = []
    event.listen(
        db.engine.sync_engine, "before_cursor_execute",
        lambda *given: reads.append("read") if "transaction_read_only" in given[2] else None,
    )  # fmt: skip

    async def watch() -> int:
        seen = 0
        async for name, _ in events(ada):
            seen += name == "pulse"
            if seen == 3:
                break
        return seen

    async with asyncio.timeout(30):
        assert await asyncio.gather(*(watch() for _ in range(10))) == [3] * 10
    assert len(reads) < 30  # by itself each of the ten would have read three times, and counted minutes


async def test_there_is_room_for_a_bounded_number(
    site: Site, ada: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_module, "STREAMS_LIMIT", 0)
    refused = await ada.get("/console/live")
    assert refused.status_code == 503
    assert refused.headers["retry-after"]


async def test_one_session_cannot_take_everybodys_room(
    site: Site, ada: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_module, "OWN_STREAMS_LIMIT", 1)
    other = await site.signed_in("ada")
    async with asyncio.timeout(20):
        async with contextlib.aclosing(events(ada)) as own:
            await anext(own)
            assert (await ada.get("/console/live")).status_code == 503
            async with contextlib.aclosing(events(other)) as beside:
                await anext(beside)


async def test_a_stream_ends_after_its_ticks(
    site: Site, ada: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_module, "TICKS", 2)
    site.console.live.tick_seconds = 0.02
    async with asyncio.timeout(20):
        names = [name async for name, _ in events(ada)]
    assert names.count("pulse") == 2


async def test_minutes_are_counted_by_outcome_with_their_run_times(site: Site, dsn: str, clock: BusinessClock) -> None:
    clock.freeze(NOON)
    rows(
        dsn,
        "INSERT INTO duly.executions (execution_id, job_id, name, source, started_at, completed_at, succeeded, "
        "outcome, retry_count, worker, lease_token) SELECT duly.uuid7(), n, 'n' || n %% 2, 'Deferred', "
        "at - n * interval '1 ms', at, true, CASE n WHEN 100 THEN 'buried' WHEN 99 THEN 'retried' ELSE 'done' END, 0, "
        "'w', 1 "
        "FROM generate_series(1, 100) AS n, (SELECT timestamptz '2026-03-02 11:58:30Z' AS at) AS t",
        {},
    )
    await site.console.rollup.refresh(patience_seconds=10)
    points = site.console.rollup.points(NOON)
    assert len(points) == MINUTES
    assert points[0].at == NOON - timedelta(minutes=60)
    minute = points[-2]
    assert (minute.at, minute.done, minute.failed, minute.buried) == (NOON - timedelta(minutes=2), 98, 1, 1)
    assert minute.p50 == pytest.approx(0.0505, abs=0.001)
    assert minute.p95 == pytest.approx(0.095, abs=0.001)
    assert minute.names == {"n0": 50, "n1": 50}
    assert sum(point.total for point in points) == 100
    assert series(points)["done"][-2] == 98


async def test_a_minute_is_counted_once_and_the_last_one_again(
    site: Site, ada: httpx2.AsyncClient, db: Database, clock: BusinessClock
) -> None:
    clock.freeze(NOON)
    await site.console.rollup.refresh(patience_seconds=10)
    counted: list[tuple[object, ...]] = []
    event.listen(
        db.engine.sync_engine, "before_cursor_execute",
        lambda *given: counted.append(given[3]) if "percentile_cont" in given[2] else None,
    )  # fmt: skip
    await site.console.rollup.refresh(patience_seconds=10)
    assert counted == []
    clock.freeze(NOON + timedelta(minutes=1, seconds=30))
    await site.console.rollup.refresh(patience_seconds=10)
    assert len(counted) == 1
    moments = sorted(one for one in counted[0] if isinstance(one, datetime))
    assert moments[-2:] == [NOON - timedelta(minutes=1), NOON + timedelta(minutes=1)]


async def test_the_page_has_the_numbers_that_the_charts_draw(ada: httpx2.AsyncClient) -> None:
    page = (await ada.get("/console")).text
    found = re.search(r'<data id="series" value="([^"]*)">', page)
    assert found is not None
    drawn = json.loads(unescape(found[1]))
    assert set(drawn) == {"at", "done", "failed", "buried", "p50", "p95"}
