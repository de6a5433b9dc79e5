"""Each context's tables are what its migration makes, and its migrations go up and down again."""

from __future__ import annotations

import difflib
import importlib
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import MetaData

import apps
from apps.wiring import app
from duly.runtime.migrate import downgrade, migrate, migrate_all
from duly.testing import TestServer
from tests.migrations.test_schema import COLUMNS, CONSTRAINTS, INDEXES, connect_engine, empty_database
from tests.support import rows

STORES = {
    ".".join(path.relative_to(Path(apps.__path__[0])).with_suffix("").parts)
    for path in Path(apps.__path__[0]).glob("**/store.py")
}
METADATA: dict[str, MetaData] = {}
for _name in sorted(STORES):
    _metadata = importlib.import_module(f"apps.{_name}").metadata
    METADATA[_metadata.schema] = _metadata
TABLES = """
SELECT c.relname, c.oid FROM pg_class c
WHERE c.relnamespace = CAST(%(schema)s AS regnamespace) AND c.relkind IN ('r', 'p')
  AND c.relname !~ '_p[0-9]{8}$' ORDER BY 1
"""
SCHEMAS = "SELECT nspname FROM pg_namespace WHERE nspname !~ '^(pg_|information_schema|public$)' ORDER BY 1"
OWN = app.migrations[0]


def read_catalog(dsn: str, schema: str) -> dict[str, list[str]]:
    """Each table as lines that a person can compare."""
    found = {}
    for name, oid in rows(dsn, TABLES, {"schema": schema}):
        parts: list[list[tuple[Any, ...]]] = [
            rows(dsn, query, {"table": oid}) for query in (COLUMNS, CONSTRAINTS, INDEXES)
        ]
        found[name] = [line for part in parts for (line,) in part]
    return found


@pytest.mark.parametrize("schema", sorted(METADATA))
def test_a_contexts_tables_are_exactly_the_migrated_ones(server: TestServer, schema: str) -> None:
    with empty_database(server) as by_migration, empty_database(server) as by_declaration:
        migrate_all(by_migration, app)
        rows(by_declaration, f"CREATE SCHEMA {schema}")
        METADATA[schema].create_all(connect_engine(by_declaration))
        migrated, declared = read_catalog(by_migration, schema), read_catalog(by_declaration, schema)
    assert sorted(migrated) == sorted(declared)
    for table, lines in migrated.items():
        difference = difflib.unified_diff(lines, declared[table], "migration", "declaration", lineterm="", n=0)
        assert lines == declared[table], "\n".join(["", *difference])


def test_every_schema_belongs_to_a_context_and_goes_with_its_migration(server: TestServer) -> None:
    with empty_database(server) as dsn:
        migrate_all(dsn, app)
        assert {name for (name,) in rows(dsn, SCHEMAS)} == {"duly", *METADATA}
        before = {schema: read_catalog(dsn, schema) for schema in METADATA}
        downgrade(dsn, directory=OWN.directory, table=OWN.table)
        assert rows(dsn, SCHEMAS) == [("duly",)]
        migrate(dsn, directory=OWN.directory, table=OWN.table)
        assert {schema: read_catalog(dsn, schema) for schema in METADATA} == before


def test_no_foreign_key_crosses_schemas(server: TestServer) -> None:
    crossing = """
        SELECT conname FROM pg_constraint k JOIN pg_class a ON a.oid = k.conrelid JOIN pg_class b ON b.oid = k.confrelid
        WHERE contype = 'f' AND a.relnamespace <> b.relnamespace
    """
    with empty_database(server) as dsn:
        migrate_all(dsn, app)
        assert rows(dsn, crossing) == []
