"""What was true at the end: tables of the database, the history and the outside witness, streamed into one SQLite file.

The checker sees nothing else, so a run can be checked again, by another checker, long after it.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psycopg

from tests.chaos import history

BATCH = 2_000
# Times are seconds since the epoch. The first word is the table; what follows the dash reads it.
TABLES: Mapping[str, tuple[str, str]] = {
    "orders": ("id op account seq extra poison", "SELECT id, op, account, seq, extra, poison::int FROM chaos.orders"),
    "cancels": ("id op target n", "SELECT id, op, target, n FROM chaos.cancels"),
    "nudges": (
        "id op entity job_id run_at pending",
        "SELECT id, op, entity, job_id, extract(epoch FROM run_at)::float8, pending FROM chaos.nudges",
    ),
    "notes": ("id op", "SELECT id, op FROM chaos.notes"),
    "effects": (
        "id kind key aggregate seq saw job_id began_at due_at business_at at",
        """SELECT id, kind, key, aggregate, seq, saw, job_id, extract(epoch FROM began_at)::float8,
                  extract(epoch FROM due_at)::float8, extract(epoch FROM business_at)::float8,
                  extract(epoch FROM at)::float8 FROM chaos.effects""",
    ),
    "trace": (
        "seq what job_id name token old_token was_live is_early worker outcome",
        """SELECT seq, what, job_id, name, token, old_token, was_live::int, is_early::int, worker, outcome
           FROM chaos.trace""",
    ),
    "jobs": (
        "id name entity_id waits leased order_key retry_count event_id",
        """SELECT id, name, entity_id, waits, (lease_token IS NOT NULL)::int, order_key, retry_count, event_id::text
           FROM duly.jobs""",
    ),
    "dead_letters": (
        "id name entity_id reason order_key event_id",
        "SELECT id, name, entity_id, reason, order_key, event_id::text FROM duly.dead_letters",
    ),
    "executions": (
        "job_id name entity_id outcome token retry_count event_id message",
        """SELECT job_id, name, entity_id, outcome, lease_token, retry_count, event_id::text, message
           FROM duly.executions""",
    ),
    "events": (
        "id seq type aggregate_id op n state",
        """SELECT id::text, seq, type, aggregate_id, payload->>'op', (payload->>'seq')::int, 'published'
           FROM duly.events
           UNION ALL SELECT id::text, seq, type, aggregate_id, payload->>'op', (payload->>'seq')::int,
                  CASE WHEN parked THEN 'parked' WHEN failed_at IS NOT NULL THEN 'failed' ELSE 'pending' END
           FROM duly.outbox""",
    ),
    "processed": ("consumer event_id", "SELECT consumer, event_id::text FROM duly.processed_events"),
    "keys": ("key status", "SELECT key, status FROM duly.idempotency_keys"),
    "schedules": (
        "name misfire next_run_at last_run_at error",
        """SELECT name, misfire, extract(epoch FROM next_run_at)::float8, extract(epoch FROM last_run_at)::float8,
                  last_error FROM duly.schedules WHERE name LIKE 'chaos.%'""",
    ),
    "lanes": ("lane", "SELECT lane FROM duly.lanes WHERE lease_token IS NOT NULL"),
}
HISTORY = "type op kind key extra account poison target entity body status t"
WITNESS = "kind key mark at pid"
RUN = "name value"
INDEXES = (
    "history (op, type)", "orders (op)", "effects (kind, key)", "effects (job_id)", "trace (job_id, what, seq)",
    "executions (job_id, outcome)", "events (op, type)", "events (aggregate_id, n)", "witness (kind, key)",
    "cancels (target)", "executions (event_id, name)", "executions (entity_id, name)", "processed (event_id, consumer)",
)  # fmt: skip


def create(path: Path | str) -> sqlite3.Connection:
    """An empty set of facts."""
    facts = sqlite3.connect(path)
    facts.execute("PRAGMA synchronous = off")
    columns = {name: words for name, (words, _) in TABLES.items()}
    for name, words in (columns | {"history": HISTORY, "witness": WITNESS, "run": RUN}).items():
        facts.execute(f"DROP TABLE IF EXISTS {name}")
        facts.execute(f"CREATE TABLE {name} ({', '.join(words.split())})")
    for index in INDEXES:
        facts.execute(f"CREATE INDEX ix_{index.translate(str.maketrans(' (,)', '____'))} ON {index}")
    return facts


def add(facts: sqlite3.Connection, table: str, rows: Iterable[Iterable[Any]], *, columns: str = "") -> None:
    """Rows into a table; ``columns`` names those given, all of them otherwise."""
    for row in rows:
        values = list(row)
        into = f"({', '.join(columns.split())})" if columns else ""
        facts.execute(f"INSERT INTO {table} {into} VALUES ({', '.join('?' * len(values))})", values)


def collect(path: Path, *, dsn: str, history_path: Path, witness_path: Path, run: Mapping[str, Any]) -> None:
    """Write down everything the checker needs."""
    facts = create(path)
    with psycopg.connect(dsn) as connection:
        for name, (_, query) in TABLES.items():
            with connection.cursor(name=f"read_{name}") as cursor:
                cursor.itersize = BATCH
                cursor.execute(query.encode())
                add(facts, name, cursor)
    add_history(facts, history.read(history_path))
    add(facts, "witness", _witnessed(witness_path))
    add(facts, "run", [(name, json.dumps(value)) for name, value in run.items()])
    facts.commit()
    facts.close()


def add_history(facts: sqlite3.Connection, lines: Iterable[Mapping[str, Any]]) -> None:
    """The history's lines, as rows."""
    names = HISTORY.split()
    add(facts, "history", ([line.get(name) for name in names] for line in lines))


def _witnessed(path: Path) -> Iterator[list[Any]]:
    if path.exists():
        with path.open() as file:
            for line in file:
                yield line.split()
