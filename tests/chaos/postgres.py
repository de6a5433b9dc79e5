"""A PostgreSQL that can crash in several ways and come back on the same files."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql

from duly.errors import Refused
from duly.runtime.embedded import EmbeddedPostgres
from duly.runtime.migrate import migrate
from duly.testing import install_business_clock
from tests.chaos.schema import TABLES, TRIGGERS

TEMPLATE = "chaos_template"
RESTART_SECONDS = 60.0
SMALL = ("shared_buffers=64MB", "max_wal_size=512MB", "autovacuum_naptime=5s", "log_min_messages=fatal")


class Server:
    """The server of one run, or of many short ones: each has a database of its own."""

    def __init__(self, directory: Path, *, durable: bool) -> None:
        """Without ``durable`` it survives its own crashes, not those of the machine: for short runs."""
        fast = () if durable else ("fsync=off", "full_page_writes=off")
        self.postgres = EmbeddedPostgres.at(directory, parameters=SMALL + fast)
        self.directory = directory

    def start(self) -> None:
        """Start it and prepare the template."""
        self.postgres.start()
        with self.admin() as admin:
            if admin.execute("SELECT 1 FROM pg_database WHERE datname = %s", [TEMPLATE]).fetchone():
                return
            admin.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(TEMPLATE)))
        migrate(self.postgres.dsn(TEMPLATE))
        with psycopg.connect(self.postgres.dsn(TEMPLATE), autocommit=True) as connection:
            install_business_clock(connection)
            connection.execute(TABLES.encode())
            connection.execute(TRIGGERS.encode())

    def create_database(self, name: str) -> str:
        """A fresh database; its address."""
        with self.admin() as admin:
            admin.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))
            made = sql.SQL("CREATE DATABASE {} TEMPLATE {}")
            admin.execute(made.format(sql.Identifier(name), sql.Identifier(TEMPLATE)))
        return self.postgres.dsn(name)

    def drop_database(self, name: str) -> None:
        """Away with it."""
        with self.admin() as admin:
            admin.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))

    def crash(self) -> None:
        """What ``pg_ctl -m immediate`` does: nobody is told, nothing is written down."""
        self.postgres.stop(mode="immediate")

    def kill_postmaster(self) -> int:
        """SIGKILL to the postmaster itself; its children find out and end."""
        pid = int((self.postgres.directory / "postmaster.pid").read_text().splitlines()[0])
        os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + RESTART_SECONDS
        while _is_alive(pid):  # on a busy machine it has yet to be given the processor that it dies on
            if time.monotonic() > deadline:
                raise TimeoutError("the postmaster survives SIGKILL")
            time.sleep(0.01)
        return pid

    def restart(self) -> float:
        """Start it again on the same files; how many seconds that took."""
        began = time.monotonic()
        while True:
            self._forget_the_dead()
            with contextlib.suppress(Refused, psycopg.Error):  # what the last one left behind is still in use
                self.postgres.start()
                self.admin().close()
                return time.monotonic() - began
            if time.monotonic() - began > RESTART_SECONDS:
                raise TimeoutError("PostgreSQL did not come back")
            time.sleep(0.1)

    def stop(self, *, remove: bool) -> None:
        """End it."""
        self.postgres.stop(mode="immediate")
        if remove:
            shutil.rmtree(self.directory, ignore_errors=True)

    def admin(self) -> psycopg.Connection[Any]:
        """A superuser's connection, past the proxy."""
        return psycopg.connect(self.postgres.dsn("postgres"), autocommit=True, connect_timeout=5)

    def _forget_the_dead(self) -> None:
        """A killed postmaster that nobody has waited for looks alive to pg_ctl."""
        file = self.postgres.directory / "postmaster.pid"
        with contextlib.suppress(OSError, ValueError, IndexError):
            if not _is_alive(int(file.read_text().splitlines()[0])):
                file.unlink()


def _is_alive(pid: int) -> bool:
    """Whether it runs: neither gone nor waiting for somebody to notice that it ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False
