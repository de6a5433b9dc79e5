"""The migrations and the declared tables say the same, and migrating is safe to repeat, to undo and to race."""

from __future__ import annotations

import difflib
import importlib
import shutil
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from alembic import command
from psycopg import sql
from sqlalchemy import create_engine
from sqlalchemy.exc import OperationalError
from sqlalchemy.pool import NullPool

import duly
from duly.clock import monotonic
from duly.errors import Refused
from duly.runtime.migrate import ENGINE_MIGRATIONS, check_schema, downgrade, migrate
from duly.tables import metadata
from duly.testing import TestServer
from tests.support import finish, python, rows, value

for _module in sorted(Path(duly.__path__[0]).glob("*/tables.py")):
    importlib.import_module(f"duly.{_module.parent.name}.tables")

# What the declared defaults call; everything else in the schema is a table, or not the tables' business.
PREREQUISITES = """
CREATE SCHEMA duly;
CREATE FUNCTION duly.now() RETURNS timestamptz LANGUAGE sql STABLE AS $$ SELECT statement_timestamp() $$;
"""

TABLES = """
SELECT c.relname, c.oid,
       concat_ws(' ', 'kind', c.relkind, pg_get_partkeydef(c.oid), pg_get_expr(c.relpartbound, c.oid)),
       'options ' || coalesce(array_to_string(ARRAY(SELECT unnest(c.reloptions) ORDER BY 1), ', '), 'none')
FROM pg_class c
WHERE c.relnamespace = 'duly'::regnamespace AND c.relkind IN ('r', 'p')
  AND c.relname !~ '_p[0-9]{8}$' AND c.relname <> 'schema_version'
ORDER BY c.relname
"""
COLUMNS = """
SELECT concat_ws(' ', 'column', a.attname, format_type(a.atttypid, a.atttypmod),
                 CASE WHEN a.attnotnull THEN 'not null' END,
                 CASE a.attidentity WHEN 'a' THEN 'identity always' WHEN 'd' THEN 'identity by default' END,
                 CASE a.attgenerated WHEN 's' THEN 'generated stored' WHEN 'v' THEN 'generated virtual' END,
                 'default ' || pg_get_expr(d.adbin, d.adrelid), nullif(a.attcollation::regcollation::text, '"default"'))
FROM pg_attribute a LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
WHERE a.attrelid = %(table)s AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum
"""
CONSTRAINTS = """
SELECT concat_ws(' ', 'constraint', conname, contype, pg_get_constraintdef(oid),
                 CASE WHEN NOT convalidated THEN 'not valid' END)
FROM pg_constraint WHERE conrelid = %(table)s AND contype <> 't' ORDER BY conname
"""  # no triggers: a declared table has none; what they refuse is tested as attacks
INDEXES = """
SELECT concat_ws(' ', 'index', pg_get_indexdef(i.indexrelid), 'options ' || array_to_string(c.reloptions, ', '),
                 CASE WHEN NOT i.indisvalid THEN 'invalid' END)
FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid WHERE i.indrelid = %(table)s ORDER BY c.relname
"""
# Every object that the schema holds, of whatever kind: what a downgrade has to take away.
OBJECTS = """
SELECT 'relation ' || relname FROM pg_class WHERE relnamespace = 'duly'::regnamespace
UNION ALL SELECT 'function ' || oid::regprocedure FROM pg_proc WHERE pronamespace = 'duly'::regnamespace
UNION ALL SELECT 'type ' || typname FROM pg_type WHERE typnamespace = 'duly'::regnamespace
UNION ALL SELECT 'outside ' || relname FROM pg_class WHERE relnamespace = 'public'::regnamespace
ORDER BY 1
"""
VERSION_TABLE = [
    "relation schema_version",
    "relation schema_version_pkc",
    "type _schema_version",
    "type schema_version",
]

GATE = 4711
Catalog = dict[str, list[str]]


@contextmanager
def empty_database(server: TestServer) -> Iterator[str]:
    """A database without anything in it."""
    name = f"s_{uuid4().hex[:16]}"
    with psycopg.connect(server.postgres.dsn("postgres"), autocommit=True) as admin:
        admin.execute(sql.SQL("CREATE DATABASE {} TEMPLATE template0").format(sql.Identifier(name)))
        try:
            yield server.postgres.dsn(name)
        finally:
            admin.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


@pytest.fixture
def empty(server: TestServer) -> Iterator[str]:
    """The address of such a database."""
    with empty_database(server) as address:
        yield address


def read_catalog(dsn: str) -> Catalog:
    """Each table as lines that a person can compare."""
    found: Catalog = {}
    for name, oid, kind, options in rows(dsn, TABLES):
        parts = [rows(dsn, query, {"table": oid}) for query in (COLUMNS, CONSTRAINTS, INDEXES)]
        found[name] = [kind, options, *(line for part in parts for (line,) in part)]
    return found


def connect_engine(dsn: str) -> Any:
    return create_engine("postgresql+psycopg://", creator=lambda: psycopg.connect(dsn), poolclass=NullPool)


@pytest.fixture(scope="module")
def catalogs(server: TestServer) -> tuple[Catalog, Catalog]:
    """The same schema made twice: by the migrations, and from what the modules declare."""
    with empty_database(server) as by_migration, empty_database(server) as by_declaration:
        migrate(by_migration)
        rows(by_declaration, PREREQUISITES)
        metadata.create_all(connect_engine(by_declaration))
        return read_catalog(by_migration), read_catalog(by_declaration)


def test_every_table_of_the_migrations_is_declared_and_no_other(catalogs: tuple[Catalog, Catalog]) -> None:
    """STYLE: the tables modules are the schema as code sees it."""
    migrated, declared = catalogs
    assert sorted(declared) == sorted(migrated)


@pytest.mark.parametrize("table", sorted(table.name for table in metadata.tables.values()))
def test_a_declared_table_is_exactly_the_migrated_one(catalogs: tuple[Catalog, Catalog], table: str) -> None:
    """Columns, types, defaults, constraints, indexes and storage options, line by line."""
    migrated, declared = (catalog.get(table, []) for catalog in catalogs)
    difference = difflib.unified_diff(migrated, declared, "migration", "declaration", lineterm="", n=0)
    assert migrated == declared, "\n".join(["", *difference])


# -- up, again, down -------------------------------------------------------------------------------------------------


def test_migrating_twice_changes_nothing(empty: str) -> None:
    """E7.2: every start migrates; what is there stays as it is."""
    migrate(empty)
    before = (read_catalog(empty), rows(empty, OBJECTS), rows(empty, "SELECT * FROM duly.schedules ORDER BY name"))
    event = value(empty, "SELECT duly.emit('order.placed', 'shop', 'o1')")
    migrate(empty)
    after = (read_catalog(empty), rows(empty, OBJECTS), rows(empty, "SELECT * FROM duly.schedules ORDER BY name"))
    assert after == before
    assert rows(empty, "SELECT id FROM duly.outbox") == [(event,)]
    assert rows(empty, "SELECT count(*) FROM duly.lanes") == [(64,)]


def test_going_down_leaves_nothing_behind_and_up_again_is_the_same(empty: str) -> None:
    """A downgrade takes away everything, also with rows in every table; alembic's own table stays, empty."""
    migrate(empty)
    before = (read_catalog(empty), rows(empty, OBJECTS))
    rows(empty, "SELECT duly.emit('order.placed', 'shop', 'o1')")
    rows(empty, "SELECT duly.schedule('shop.remind', 'o1')")
    downgrade(empty)
    assert [name for (name,) in rows(empty, OBJECTS)] == VERSION_TABLE
    assert rows(empty, "SELECT * FROM duly.schema_version") == []
    migrate(empty)
    assert (read_catalog(empty), rows(empty, OBJECTS)) == before
    assert rows(empty, "SELECT count(*) FROM duly.outbox") == [(0,)]


def test_many_processes_may_migrate_at_once(empty: str) -> None:
    """E3.4: several processes start together; one migrates, the others find it done."""
    code = f"""
        import os, psycopg
        from duly.runtime.migrate import migrate
        with psycopg.connect(os.environ["DATABASE_URL"], autocommit=True) as gate:
            print("ready", flush=True)
            gate.execute("SELECT pg_advisory_lock_shared({GATE})")
            migrate(os.environ["DATABASE_URL"])
        """
    with psycopg.connect(empty, autocommit=True) as gate:
        gate.execute("SELECT pg_advisory_lock(%s)", [GATE])
        processes = [python(empty, code) for _ in range(3)]
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
    # The gate is open, and all of them are past their imports: now they race.
    assert [finish(process) for process in processes] == [(0, "")] * 3
    assert rows(empty, "SELECT version_num FROM duly.schema_version") == [("0010",)]
    check_schema(empty)


# -- the check at the start ------------------------------------------------------------------------------------------


def write_migrations(directory: Path, statement: str) -> Path:
    """The engine's migrations, and one more that runs ``statement``."""
    shutil.copytree(ENGINE_MIGRATIONS, directory, ignore=shutil.ignore_patterns("__pycache__"))
    source = f"""
    from alembic import op

    revision, down_revision, branch_labels, depends_on = "next", "0010", None, None


    def upgrade() -> None:
        op.get_bind().exec_driver_sql({statement!r})
    """
    (directory / "versions" / "next.py").write_text(textwrap.dedent(source))
    return directory


def test_the_schema_this_code_was_written_for_is_accepted(dsn: str) -> None:
    """E7.2: nothing to say, nothing raised."""
    check_schema(dsn)


def test_a_database_without_the_schema_is_refused_with_what_to_do(empty: str) -> None:
    """E7.2."""
    with pytest.raises(Refused, match="no duly schema yet: run `duly migrate`"):
        check_schema(empty)


def test_an_older_schema_is_refused_with_what_to_do(dsn: str, tmp_path: Path) -> None:
    """E7.2: this code brings a migration that the database has not seen."""
    directory = write_migrations(tmp_path / "migrations", "SELECT 1")
    with pytest.raises(Refused, match=r"schema \(0010\) is older than this code \(next\): run `duly migrate`"):
        check_schema(dsn, directory=directory)


def test_a_newer_schema_is_refused_with_what_to_do(dsn: str, tmp_path: Path) -> None:
    """E7.2: a later version has migrated, and this process is the old one."""
    migrate(dsn, directory=write_migrations(tmp_path / "migrations", "SELECT 1"))
    with pytest.raises(Refused, match=r"schema \(next\) is newer than this code \(0010\): upgrade duly"):
        check_schema(dsn)


def test_without_brokers_what_still_waits_keeps_its_event(empty: str) -> None:
    """0008 down: a job for an event that a broker brought finds it in the history; the rest is gone."""
    migrate(empty)
    needed, other = uuid4(), uuid4()
    for id_ in (needed, other):
        rows(
            empty,
            "INSERT INTO duly.received"
            " VALUES (%(id)s, 'nats', 't', 'shop', 'a1', '{\"n\": 1}', '{}', now(), now(), '')",
            {"id": id_},
        )
    rows(
        empty,
        "INSERT INTO duly.jobs (name, event_id, run_at, due_at, created_at)"
        " VALUES ('consumer:a', %(id)s, now(), now(), now())",
        {"id": needed},
    )
    downgrade(empty, "0007")
    assert rows(empty, "SELECT id, payload FROM duly.events") == [(needed, {"n": 1})]
    migrate(empty)


# -- locks -----------------------------------------------------------------------------------------------------------


def test_a_migration_behind_a_lock_gives_up_within_seconds_and_leaves_no_trace(dsn: str, tmp_path: Path) -> None:
    """FAULTS: lock_timeout instead of a queue behind a lock; the same migration works once the lock is gone."""
    directory = write_migrations(tmp_path / "migrations", "ALTER TABLE duly.outbox ADD COLUMN note text")
    with psycopg.connect(dsn) as reader:
        reader.execute("SELECT count(*) FROM duly.outbox")  # a report that is still open holds ACCESS SHARE
        began = monotonic()
        with pytest.raises(OperationalError) as raised:
            migrate(dsn, directory=directory)
        assert monotonic() - began < 15
        assert isinstance(raised.value.orig, psycopg.errors.LockNotAvailable)
        check_schema(dsn)
    migrate(dsn, directory=directory)
    assert rows(dsn, "SELECT note FROM duly.outbox") == []


def test_a_migration_that_stands_still_gives_up_its_locks(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """FAULTS: SIGSTOP while holding a lock; its session says after how long, like every other one of ours."""
    seen: list[tuple[Any, ...]] = []

    def look(config: Any, _target: str) -> None:
        settings = (
            "SELECT current_setting('idle_in_transaction_session_timeout'), current_setting('idle_session_timeout')"
        )
        seen.append(tuple(config.attributes["connection"].exec_driver_sql(settings).one()))

    monkeypatch.setattr(command, "upgrade", look)
    migrate(dsn)
    assert seen == [("1min", "1min")]


def test_a_downgrade_behind_a_lock_gives_up_within_seconds_and_drops_nothing(dsn: str) -> None:
    """FAULTS: each step is one transaction."""
    downgrade(dsn, "0009")
    before = rows(dsn, OBJECTS)
    with psycopg.connect(dsn) as writer:
        writer.execute("SELECT 1 FROM duly.audit")  # what the next step takes an index from
        with pytest.raises(OperationalError) as raised:
            downgrade(dsn)
        assert isinstance(raised.value.orig, psycopg.errors.LockNotAvailable)
    assert rows(dsn, OBJECTS) == before


def test_a_fresh_schema_has_partitions_for_a_week_ahead_and_yesterday(empty: str) -> None:
    """E1.8: the clock of a machine that is an hour behind finds its partition too."""
    today = "SELECT (statement_timestamp() AT TIME ZONE 'UTC')::date"
    first = value(empty, today)
    migrate(empty)
    days = {first, value(empty, today)}  # it may be midnight
    query = """
    SELECT min(right(c.relname, 8)::date), max(right(c.relname, 8)::date)
    FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
    WHERE i.inhparent = 'duly.{}'::regclass AND c.relname ~ '_p[0-9]{{8}}$'
    """
    for parent in ("events", "executions"):
        [(oldest, newest)] = rows(empty, query.format(parent))
        assert oldest + timedelta(days=1) in days
        assert newest - timedelta(days=7) in days
        assert newest - oldest == timedelta(days=8)
