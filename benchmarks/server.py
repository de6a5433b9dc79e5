"""The PostgreSQL that everybody is measured on: default durability, reached over loopback TCP, production's clock."""

from __future__ import annotations

import os
import platform
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psycopg
from psycopg import sql

from duly.errors import Refused
from duly.runtime.embedded import EmbeddedPostgres, find_binaries
from duly.runtime.migrate import migrate

TEMPLATE = "bench_template"
PORT_ATTEMPTS = 3
SHOWN_SETTINGS = (
    "fsync", "synchronous_commit", "full_page_writes", "wal_compression", "shared_buffers", "max_wal_size",
    "checkpoint_timeout", "autovacuum", "max_connections",
)  # fmt: skip
SETTINGS = "SELECT name, current_setting(name) FROM unnest(%s::text[]) AS name"


class Databases(Protocol):
    """Whoever gives out fresh databases."""

    @contextmanager
    def database(self) -> Iterator[str]:
        """The address of one with duly's schema, dropped afterwards."""

    @contextmanager
    def empty_database(self) -> Iterator[str]:
        """The address of one with nothing in it, dropped afterwards."""


@dataclass(frozen=True)
class LoopbackPostgres(EmbeddedPostgres):
    """The embedded server, but on a TCP port: some peers speak nothing else, and so all of us do."""

    port: int = 5432

    def dsn(self, database: str = "duly") -> str:
        """The address of one of its databases."""
        return f"postgresql://postgres@127.0.0.1:{self.port}/{database}"


class BenchServer:
    """Started, a migrated template made, stopped. The sandbox's movable clock is never installed here."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.postgres: LoopbackPostgres | None = None

    def start(self) -> None:
        """Start it on a port that the kernel chose; somebody may take it in between, so try again."""
        for attempt in range(PORT_ATTEMPTS):
            port = free_port()
            parameters = ("listen_addresses=127.0.0.1", f"port={port}")
            directory = self._directory.resolve() / "postgres"
            self.postgres = LoopbackPostgres(directory, find_binaries(), parameters, port)
            try:
                self.postgres.start()
                break
            except Refused:
                if attempt == PORT_ATTEMPTS - 1:
                    raise
        self._admin(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(TEMPLATE)))
        migrate(self._dsn(TEMPLATE))

    def stop(self) -> None:
        """Stop it."""
        if self.postgres is not None:
            self.postgres.stop(mode="immediate")

    @contextmanager
    def database(self) -> Iterator[str]:
        """The address of a fresh one with duly's schema, dropped afterwards."""
        with self._made(sql.SQL("CREATE DATABASE {} TEMPLATE {}"), sql.Identifier(TEMPLATE)) as dsn:
            yield dsn

    @contextmanager
    def empty_database(self) -> Iterator[str]:
        """The address of one with nothing in it, dropped afterwards."""
        with self._made(sql.SQL("CREATE DATABASE {}")) as dsn:
            yield dsn

    @contextmanager
    def _made(self, statement: sql.SQL, *more: sql.Identifier) -> Iterator[str]:
        name = f"b_{uuid.uuid4().hex[:12]}"
        self._admin(statement.format(sql.Identifier(name), *more))
        try:
            yield self._dsn(name)
        finally:
            self._admin(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))

    def _admin(self, statement: sql.Composed) -> None:
        with psycopg.connect(self._dsn("postgres"), autocommit=True) as connection:
            connection.execute(statement)

    def _dsn(self, database: str) -> str:
        assert self.postgres is not None, "start() comes first"
        return self.postgres.dsn(database)


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


def settle_down(dsn: str) -> None:
    """Write out what the measurement before left behind, so that nobody pays for another's writes."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("CHECKPOINT")


def describe(dsn: str) -> dict[str, Any]:
    """The machine in general terms, and the server's settings that matter."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        row = connection.execute("SHOW server_version").fetchone()
        settings: dict[str, str] = dict(connection.execute(SETTINGS, [list(SHOWN_SETTINGS)]).fetchall())
    return {
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "architecture": platform.machine(),
        "python": platform.python_version(),
        "postgresql": str(row[0]).split()[0] if row else "unknown",
        "settings": settings,
    }
