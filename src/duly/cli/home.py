"""The data directory: who may use it, and the embedded PostgreSQL that lives in it.

A command that needs the embedded server starts it when it does not run, and again when it dies meanwhile; the last one
that leaves stops it, unless somebody else started it. Locks are the kernel's (flock): a process that is killed holds
none.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import psycopg.conninfo
import structlog

from duly.clock import monotonic
from duly.db import normal_dsn
from duly.errors import Refused
from duly.runtime.embedded import EmbeddedPostgres
from duly.settings import Settings

log = structlog.get_logger("duly.home")
GATE_SECONDS = 120.0
ANSWER_SECONDS = 10.0
WATCH_SECONDS = 1.0
MOST_WATCH_SECONDS = 30.0


@contextlib.contextmanager
def sole_tenant(settings: Settings) -> Iterator[None]:
    """Refuse a second ``duly up`` on the same data directory."""
    with _locked(settings.data / "up.lock") as file:
        if not _try_lock(file, fcntl.LOCK_EX):
            raise Refused(
                f"another `duly up` runs on {settings.data.resolve()}: stop it, or set DULY_DATA to another directory"
            )
        yield


@contextlib.contextmanager
def database_address(settings: Settings) -> Iterator[str]:
    """Where the database is: the address that was given, or the embedded server, kept up for the block."""
    if not settings.wants_embedded():
        yield _checked_address(settings.database_url)
        return
    postgres = EmbeddedPostgres.at(settings.data)
    with _locked(settings.data / "postgres.users") as users:
        with _gate(settings):
            _try_lock(users, fcntl.LOCK_SH)
            _start(postgres, settings.data)
        try:
            with _kept_up(postgres, settings):
                yield postgres.dsn()
        finally:
            with _gate(settings):
                fcntl.flock(users, fcntl.LOCK_UN)
                if _try_lock(users, fcntl.LOCK_EX):
                    _stop(postgres, settings.data)


def _checked_address(address: str) -> str:
    """Refuse what cannot be read, in words of our own: those of the drivers repeat the password."""
    try:
        ports = str(psycopg.conninfo.conninfo_to_dict(normal_dsn(address)).get("port") or "")
    except psycopg.ProgrammingError:
        ports = "unknown"
    is_url = not address or normal_dsn(address).startswith("postgresql://")  # empty: the PG* variables say it
    if not is_url or not all(port.isdigit() for port in ports.split(",") if port):
        raise Refused(
            "DATABASE_URL cannot be read: write it as postgresql://user:password@host:5432/database, "
            "with special characters of the password percent-encoded"
        )
    return address


def _start(postgres: EmbeddedPostgres, home: Path) -> None:
    """Start it unless it answers. One that was just killed looks alive for a moment, and answers nobody."""
    is_new = not (postgres.directory / "PG_VERSION").exists()
    deadline = monotonic() + ANSWER_SECONDS
    while not _answers(postgres):
        try:
            if postgres.start():
                _mark(home).write_text(_postmaster(postgres))
                log.info("embedded_postgres_started", directory=str(postgres.directory))
                return
        except Refused:
            if is_new or monotonic() > deadline:
                raise
        if monotonic() > deadline:
            raise Refused(f"the PostgreSQL in {postgres.directory} runs but does not answer: see server.log there")
        time.sleep(0.1)


@contextlib.contextmanager
def _kept_up(postgres: EmbeddedPostgres, settings: Settings) -> Iterator[None]:
    """Look after it, in a thread: nobody else would start it again if it were killed."""
    over = threading.Event()
    thread = threading.Thread(target=_watch, args=(postgres, settings, over), name="embedded-postgres", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(ANSWER_SECONDS)


def _watch(postgres: EmbeddedPostgres, settings: Settings, over: threading.Event) -> None:
    wait = WATCH_SECONDS
    while not over.wait(wait):
        wait = WATCH_SECONDS
        if postgres.is_alive():
            continue
        log.warning("embedded_postgres_gone", directory=str(postgres.directory))
        try:
            with _gate(settings):
                if not over.is_set():
                    _start(postgres, settings.data)
        # A full disk, for example: it may have room later.
        except (Refused, OSError, psycopg.Error, subprocess.SubprocessError) as error:
            log.error("embedded_postgres_not_started", error=str(error))
            wait = MOST_WATCH_SECONDS


def _answers(postgres: EmbeddedPostgres) -> bool:
    try:
        psycopg.connect(postgres.dsn(), connect_timeout=2).close()
    except psycopg.OperationalError:
        return False
    return True


def _stop(postgres: EmbeddedPostgres, home: Path) -> None:
    mark = _mark(home)
    with contextlib.suppress(OSError):
        if mark.read_text() == _postmaster(postgres):  # one of us started it, perhaps one that was killed since
            postgres.stop()
            mark.unlink()
            log.info("embedded_postgres_stopped")


def _mark(home: Path) -> Path:
    return home / "postgres.started"


def _postmaster(postgres: EmbeddedPostgres) -> str:
    """Which server runs: its process id, its directory, and when it started."""
    return "\n".join((postgres.directory / "postmaster.pid").read_text().splitlines()[:3])


@contextlib.contextmanager
def _gate(settings: Settings) -> Iterator[None]:
    """One process at a time starts or stops the server."""
    with _locked(settings.data / "postgres.gate") as gate:
        deadline = monotonic() + GATE_SECONDS
        while not _try_lock(gate, fcntl.LOCK_EX):
            if monotonic() > deadline:
                raise Refused(f"another process has been starting or stopping PostgreSQL for {GATE_SECONDS:.0f} s")
            time.sleep(0.05)
        yield


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[int]:
    """A file to lock; whatever is locked on it ends with the block."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise Refused(f"the data directory {path.parent} cannot be used: {error.strerror}; set DULY_DATA") from error
    try:
        yield file
    finally:
        os.close(file)


def _try_lock(file: int, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
