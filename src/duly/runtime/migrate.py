"""Brings a database to the schema this code was written for, and says when it is not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import psycopg
from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, create_engine, text
from sqlalchemy.pool import NullPool

from duly.db import normal_dsn
from duly.errors import Refused
from duly.failpoints import failpoint

ENGINE_MIGRATIONS = Path(__file__).parents[1] / "migrations"
ADVISORY_KEY = 0x64756C79  # "duly": one migration at a time
WAIT_FOR_TURN = text("SELECT set_config('lock_timeout', '5min', false)")  # another migration may be long, not endless
TAKE_TURN = text("SELECT pg_advisory_lock(:key)")
# Rather fail than queue up behind a long transaction, and everybody else behind us.
LIMIT_WAITING = text("SELECT set_config('lock_timeout', '5s', false)")
# Whoever stands still between two statements (a frozen machine, a dead network) gives up its locks, and its turn.
LIMIT_STANDING_STILL = text("""
SELECT set_config('idle_in_transaction_session_timeout', '60s', false), set_config('idle_session_timeout', '60s', false)
""")
MAKE_SCHEMA = text("CREATE SCHEMA IF NOT EXISTS duly")


class IsMigrations(Protocol):
    """As much of ``duly.app.Migrations`` as is needed here."""

    @property
    def directory(self) -> Path:
        """Where the scripts are."""

    @property
    def table(self) -> str:
        """Which table says how far they ran."""


class HasMigrations(Protocol):
    """As much of an application as is needed here."""

    @property
    def migrations(self) -> Sequence[IsMigrations]:
        """Its own schemas."""


def migrate(
    dsn: str, target: str = "head", *, directory: Path = ENGINE_MIGRATIONS, table: str = "schema_version"
) -> None:
    """Upgrade to ``target``; runs once even when many processes start together."""
    with _connection(dsn) as connection:
        _take_turn(connection)
        failpoint("migrate.turn_taken")
        command.upgrade(_config(connection, directory, table), target)
        failpoint("migrate.committed")


def migrate_all(dsn: str, app: HasMigrations) -> None:
    """The engine's schema, then the application's."""
    migrate(dsn)
    for own in app.migrations:
        migrate(dsn, directory=own.directory, table=own.table)


def check_all(dsn: str, app: HasMigrations) -> None:
    """Refuse what ``check_schema`` refuses, for the engine and for the application."""
    check_schema(dsn)
    for own in app.migrations:
        check_schema(dsn, directory=own.directory, table=own.table)


def downgrade(
    dsn: str, target: str = "base", *, directory: Path = ENGINE_MIGRATIONS, table: str = "schema_version"
) -> None:
    """Go back to an earlier schema."""
    with _connection(dsn) as connection:
        _take_turn(connection)
        command.downgrade(_config(connection, directory, table), target)


def check_schema(dsn: str, *, directory: Path = ENGINE_MIGRATIONS, table: str = "schema_version") -> None:
    """Refuse a schema that is older or newer than this code."""
    with _connection(dsn) as connection:
        present = MigrationContext.configure(
            connection, opts={"version_table": table, "version_table_schema": "duly"}
        ).get_current_revision()
    scripts = ScriptDirectory(str(directory))
    wanted = scripts.get_current_head()
    if present == wanted:
        return
    if present is None:
        raise Refused("the database has no duly schema yet: run `duly migrate`")
    if present not in {script.revision for script in scripts.walk_revisions()}:
        raise Refused(f"the database's schema ({present}) is newer than this code ({wanted}): upgrade duly")
    raise Refused(f"the database's schema ({present}) is older than this code ({wanted}): run `duly migrate`")


@contextmanager
def _connection(dsn: str) -> Iterator[Connection]:
    engine = create_engine(
        "postgresql+psycopg://",
        creator=lambda: psycopg.connect(
            normal_dsn(dsn),
            connect_timeout=10,
            application_name="duly-migrate",
        ),
        poolclass=NullPool,
    )
    with engine.connect() as connection:
        yield connection
    engine.dispose()


def _take_turn(connection: Connection) -> None:
    """One migration at a time: the lock is the session's, and ends with it."""
    with connection.begin():
        connection.execute(WAIT_FOR_TURN)
        connection.execute(TAKE_TURN, {"key": ADVISORY_KEY})
        connection.execute(LIMIT_WAITING)
        connection.execute(LIMIT_STANDING_STILL)
        connection.execute(MAKE_SCHEMA)


def _config(connection: Connection, directory: Path, table: str) -> Config:
    config = Config()
    config.set_main_option("script_location", str(directory))
    config.attributes["connection"] = connection
    config.attributes["version_table"] = table
    return config
