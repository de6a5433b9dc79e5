"""The declared tables are what the migration makes, to the last default."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.pool import NullPool

from duly.operate import tables
from tests.engine.operate.conftest import Make

COLUMNS = """
SELECT a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull, a.attidentity, pg_get_expr(d.adbin, d.adrelid)
FROM pg_attribute a LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
WHERE a.attrelid = CAST(%(table)s AS regclass) AND a.attnum > 0 ORDER BY a.attnum
"""
CONSTRAINTS = """
SELECT conname, pg_get_constraintdef(oid) FROM pg_constraint
WHERE conrelid = CAST(%(table)s AS regclass) ORDER BY conname
"""
INDEXES = """
SELECT replace(pg_get_indexdef(indexrelid), 'declared.', 'duly.') FROM pg_index
WHERE indrelid = CAST(%(table)s AS regclass) ORDER BY 1
"""


@pytest.mark.parametrize("table", [tables.alerts, tables.audit, tables.processes], ids=lambda table: table.name)
def test_a_declared_table_equals_the_migrated_one(dsn: str, make: Make, table: Any) -> None:
    engine = create_engine(dsn.replace("postgresql://", "postgresql+psycopg://"), poolclass=NullPool)
    with engine.begin() as connection:
        connection.execute(text("CREATE SCHEMA declared"))
        moved = connection.execution_options(schema_translate_map={"duly": "declared"})
        table.create(moved)
    for query in (COLUMNS, CONSTRAINTS, INDEXES):
        declared = make.run(query, table=f"declared.{table.name}")
        assert declared == make.run(query, table=f"duly.{table.name}")
        assert declared
