"""For tests, yours and ours: a fresh database from a template, a clock that moves, and facts to assert."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql

from duly.runtime.embedded import EmbeddedPostgres
from duly.runtime.migrate import migrate

TEMPLATE = "duly_template"


class TestServer:
    """An embedded PostgreSQL with a migrated template; each test gets a copy of its own in some 30 ms."""

    __test__ = False

    def __init__(self, directory: Path) -> None:
        self.postgres = EmbeddedPostgres.at(directory)

    def start(self) -> None:
        """Start it and prepare the template."""
        self.postgres.start()
        with self._admin() as admin:
            admin.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(TEMPLATE)))
            admin.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(TEMPLATE)))
        migrate(self.postgres.dsn(TEMPLATE))
        with psycopg.connect(self.postgres.dsn(TEMPLATE), autocommit=True) as connection:
            install_business_clock(connection)

    def stop(self) -> None:
        """Stop it."""
        self.postgres.stop(mode="immediate")

    @contextmanager
    def database(self) -> Iterator[str]:
        """The address of a fresh database, dropped afterwards."""
        name = f"t_{uuid.uuid4().hex[:16]}"
        with self._admin() as admin:
            admin.execute(
                sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(sql.Identifier(name), sql.Identifier(TEMPLATE))
            )
        try:
            yield self.postgres.dsn(name)
        finally:
            with self._admin() as admin:
                admin.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))

    def _admin(self) -> psycopg.Connection[Any]:
        return psycopg.connect(self.postgres.dsn("postgres"), autocommit=True)


_BUSINESS_CLOCK = """
CREATE TABLE IF NOT EXISTS duly.business_clock (
    only_row  boolean PRIMARY KEY DEFAULT true CHECK (only_row),
    frozen_at timestamptz,
    shift     interval NOT NULL DEFAULT '0'
);
INSERT INTO duly.business_clock DEFAULT VALUES ON CONFLICT DO NOTHING;
CREATE OR REPLACE FUNCTION duly.now() RETURNS timestamptz LANGUAGE sql STABLE PARALLEL SAFE
AS $$ SELECT coalesce(frozen_at, statement_timestamp() + shift) FROM duly.business_clock $$;
"""


def install_business_clock(connection: psycopg.Connection[Any]) -> None:
    """Replace ``duly.now()`` by one that a sandbox can move. Never do this to a production database."""
    connection.execute(_BUSINESS_CLOCK)


class BusinessClock:
    """Moves the database's clock; every process that works on the database sees it move."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn

    def now(self) -> datetime:
        """What time the database thinks it is."""
        with psycopg.connect(self._dsn, autocommit=True) as connection:
            row = connection.execute("SELECT duly.now()").fetchone()
        assert row is not None
        return row[0]  # type: ignore[no-any-return]

    def freeze(self, at: datetime) -> None:
        """Stop the clock at an instant."""
        self._set("UPDATE duly.business_clock SET frozen_at = %s", at)

    def advance(self, **delta: float) -> None:
        """Move it forward: ``clock.advance(minutes=15)``. A frozen clock stays frozen, later."""
        self._set(
            "UPDATE duly.business_clock SET frozen_at = frozen_at + %(by)s, shift = shift + %(by)s",
            {"by": timedelta(**delta)},
        )

    def resume(self) -> None:
        """Let it run again, at the real time."""
        self._set("UPDATE duly.business_clock SET frozen_at = NULL, shift = '0'")

    def _set(self, statement: str, value: Any = None) -> None:
        with psycopg.connect(self._dsn, autocommit=True) as connection:
            connection.execute(statement, value if isinstance(value, dict | None) else (value,))
