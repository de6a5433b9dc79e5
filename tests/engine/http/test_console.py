"""E7.1, a first part: the operator's page is bounded, escaped, and closed outside development."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from html.parser import HTMLParser

import httpx2
import pytest
from sqlalchemy import text

from duly.app import Duly
from duly.console import queries
from duly.console.app import duration, mount_console
from duly.console.queries import capped, read_overview
from duly.db import Database
from duly.http.api import create_api
from duly.settings import Settings
from tests.engine.http.serving import served
from tests.support import rows

HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>{{ 7*7 }}"


@pytest.fixture
async def client(db: Database) -> AsyncIterator[httpx2.AsyncClient]:
    api = create_api(db, [], Settings(), Duly())
    assert mount_console(api, db, Settings())
    async with served(api) as made:
        yield made


def fill(dsn: str, words: str) -> None:
    """Put words wherever a stranger's text can end up."""
    statements = [
        "INSERT INTO duly.jobs (name, entity_id, run_at, due_at, created_at) "
        "VALUES ('shop.remind', %(text)s, now() - interval '5 min', now(), now())",
        "INSERT INTO duly.dead_letters (id, name, entity_id, payload, priority, due_at, created_at, original_delay, "
        "retry_count, source, reason, error, error_kind, buried_at) VALUES (7, 'shop.charge', %(text)s, "
        "jsonb_build_object('note', %(text)s::text), 3, now(), now(), '0', 3, 'Deferred', 'retries_used_up', "
        "%(text)s, 'Error', now())",
        "INSERT INTO duly.executions (execution_id, job_id, name, entity_id, source, started_at, completed_at, "
        "succeeded, outcome, message, retry_count, worker, lease_token) VALUES (gen_random_uuid(), 1, 'shop.remind', "
        "%(text)s, 'Deferred', now(), now(), false, 'retried', %(text)s, 0, %(text)s, 1)",
        "INSERT INTO duly.outbox (id, type, topic, aggregate_id, payload, created_at, attempts, failed_at, last_error) "
        "VALUES (gen_random_uuid(), 'order.paid', 'orders', %(text)s, '{}', now(), 5, now(), %(text)s)",
        "INSERT INTO duly.alerts (kind, subject, message, raised_at, last_at) "
        "VALUES ('dead_letter', %(text)s, %(text)s, now(), now())",
        "INSERT INTO duly.processes (id, kind, version, started_at, seen_at) "
        "VALUES (%(text)s, 'worker', %(text)s, now(), now())",
        "UPDATE duly.schedules SET timezone = %(text)s, last_error = %(text)s WHERE name = 'duly.drop-history'",
    ]
    for statement in statements:
        rows(dsn, statement, {"text": words})


class Elements(HTMLParser):
    """Counts what a browser would make of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.attributes: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.attributes += [name for name, _ in attrs]


async def test_whatever_is_stored_is_shown_and_never_runs(client: httpx2.AsyncClient, dsn: str) -> None:
    """Stored XSS: names, errors, entities, messages."""
    fill(dsn, HOSTILE)
    page = await client.get("/console")
    assert page.status_code == 200
    assert page.text.count("&lt;script&gt;alert(1)&lt;/script&gt;") >= 12
    assert "{{ 7*7 }}" in page.text
    found = Elements(page.text)
    assert {"script", "img", "style"}.isdisjoint(found.names)
    assert not [name for name in found.attributes if name.startswith("on") or name == "style"]


async def test_the_page_allows_no_script_and_only_its_own_stylesheet(client: httpx2.AsyncClient) -> None:
    page = await client.get("/console")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "style-src 'self'" in policy
    assert "unsafe" not in policy
    assert "script-src" not in policy
    (sheet,) = re.findall(r'<link rel="stylesheet" href="([^"]+)">', page.text)
    style = await client.get(sheet)
    assert style.headers["content-type"].startswith("text/css")
    assert style.headers["x-content-type-options"] == "nosniff"
    assert (await client.get("/console/static/../app.py")).status_code == 404
    assert (await client.get("/console/static/%2e%2e%2fapp.py")).status_code == 404


async def test_tables_are_readable_by_a_screen_reader(client: httpx2.AsyncClient, dsn: str) -> None:
    fill(dsn, "plain")
    page = (await client.get("/console")).text
    assert '<html lang="en">' in page
    assert page.count("<table>") == page.count("<thead>") == page.count('role="region"') == 7
    assert "<th>" not in page
    assert page.count("<main") == page.count("<h1>") == 1
    assert len(re.findall(r'id="([^"]+)"', page)) == len(set(re.findall(r'id="([^"]+)"', page)))


async def test_what_needs_attention_comes_first(db: Database, dsn: str) -> None:
    assert [sentence.split(":")[0] for sentence in (await read_overview(db)).attention] == [
        "No worker is alive",
        "No relay is alive",
        "No scheduler is alive",
    ]
    fill(dsn, "plain")
    sentences = (await read_overview(db)).attention
    assert "No worker is alive: jobs wait." not in sentences
    assert "No worker alive has a handler for: shop.remind." in sentences  # E3.10
    assert "1 dead letter waits for a decision." in sentences
    assert "1 event was not published and holds back what follows." in sentences
    assert "Broken schedules: duly.drop-history." in sentences


async def test_jobs_are_counted_by_name_and_state(db: Database, dsn: str) -> None:
    rows(dsn, "SELECT duly.schedule('b.later', run_at => now() + interval '1 hour')")
    rows(dsn, "SELECT duly.schedule('a.now', run_at => now() - interval '90 s') FROM generate_series(1, 3)")
    rows(
        dsn,
        "UPDATE duly.jobs SET lease_token = 1, leased_by = 'w', lease_expires_at = clock_timestamp() + "
        "CASE id %% 2 WHEN 0 THEN interval '1 min' ELSE interval '-1 min' END "
        "WHERE id IN (SELECT id FROM duly.jobs WHERE name = 'a.now' ORDER BY id LIMIT 2)",
        {},
    )
    view = await read_overview(db)
    first, second = view.queue
    assert (first.name, first.pending, first.due, first.running, first.failed) == ("a.now", 1, 1, 1, 1)
    assert 89 < first.oldest_seconds < 120
    assert (second.name, second.pending, second.due) == ("b.later", 1, 0)
    assert second.oldest_seconds < 0
    assert (view.total("pending"), view.total("running")) == (2, 1)


async def test_counts_stop_at_ten_thousand(client: httpx2.AsyncClient, dsn: str) -> None:
    """A page over a long queue costs no more than one over a short one."""
    rows(dsn, "SELECT count(duly.schedule('many.jobs')) FROM generate_series(1, 10100)")
    assert "10,000+" in (await client.get("/console")).text


async def test_the_queries_walk_indexes_whatever_the_size(dsn: str, db: Database) -> None:
    """No scan of the queue or of the history: each name is one step of an index."""
    rows(dsn, "SELECT count(duly.schedule('many.jobs')) FROM generate_series(1, 30000)")
    rows(
        dsn,
        "INSERT INTO duly.executions (execution_id, job_id, name, source, started_at, completed_at, succeeded, "
        "outcome, retry_count, worker, lease_token) SELECT gen_random_uuid(), n, 'many.jobs', 'Deferred', now(), "
        "now(), true, 'done', 0, 'w', 1 FROM generate_series(1, 30000) AS n",
    )
    rows(dsn, "ANALYZE duly.jobs")
    rows(dsn, "ANALYZE duly.executions")
    connection = await db.connect()
    for statement, values in (
        (queries.READ_QUEUE, {"names": 50, "cap": 100}),
        (queries.READ_EXECUTIONS, {"names": 50, "limit": 20}),
    ):
        plan = await connection.fetch(f"EXPLAIN {statement.numbered}", *statement.args(values))
        scans = [line[0] for line in plan if re.search(r"Seq Scan on (jobs|executions_p\d)", line[0])]
        assert not scans, "\n".join(line[0] for line in plan)
    await connection.close()


async def test_a_database_that_is_too_slow_is_said_and_not_waited_for(client: httpx2.AsyncClient, db: Database) -> None:
    async with db.transaction() as tx:
        await tx.execute(text("LOCK TABLE duly.outbox IN ACCESS EXCLUSIVE MODE"))
        page = await client.get("/console")
    assert page.status_code == 503
    assert "The database does not answer" in page.text
    assert "default-src 'none'" in page.headers["content-security-policy"]


async def test_the_console_is_not_there_in_production(db: Database) -> None:
    """Closed until administrators can sign in."""
    settings = Settings(env="production")
    api = create_api(db, [], settings, Duly())
    assert not mount_console(api, db, settings)
    async with served(api) as client:
        assert (await client.get("/console")).status_code == 404


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(None, "–"), (0.0123, "12 ms"), (5.25, "5.2 s"), (61, "1 min 01 s"), (7260, "2 h 01 min"), (-5, "in 5.0 s"),
     (86400 * 3 + 3600, "3 d 01 h")],
)  # fmt: skip
def test_lengths_of_time_are_said_in_one_or_two_units(seconds: float | None, said: str) -> None:
    assert duration(seconds) == said


def test_counts_are_said_with_their_cap() -> None:
    assert [capped(count) for count in (0, 1234, 10_000, 10_001)] == ["0", "1,234", "10,000", "10,000+"]
