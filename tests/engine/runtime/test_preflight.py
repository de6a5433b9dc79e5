"""What duly refuses to start on, against real servers."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from duly.db import Database
from duly.errors import Refused
from duly.runtime import preflight
from duly.runtime.embedded import EmbeddedPostgres
from duly.runtime.migrate import migrate
from duly.settings import Settings
from duly.testing import BusinessClock, TestServer
from tests.engine.cli.commands import free_port, wait_until
from tests.support import rows

GOOD = preflight.Server(
    version_num=180_000,
    version="18.0",
    fsync=True,
    full_page_writes=True,
    read_only=False,
    in_recovery=False,
    encoding="UTF8",
    synchronous_commit="on",
    max_connections=100,
)


async def check(dsn: str, **settings: Any) -> list[str]:
    """The warnings; the test server itself runs without fsync, which is allowed unless a test says otherwise."""
    allowed = settings.setdefault("allow_unsafe_database", True)
    db = Database(dsn, settings=Settings(**settings))
    try:
        found = await preflight.check(db)
    finally:
        await db.close()
    return [warning for warning in found if not (allowed and warning.startswith(("fsync", "full_page_writes")))]


async def refusal(dsn: str, **settings: Any) -> str:
    with pytest.raises(Refused) as refused:
        await check(dsn, **settings)
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.fixture
def postgres() -> Iterator[EmbeddedPostgres]:
    """A server of this test's own, migrated, that may be configured badly."""
    directory = Path(tempfile.mkdtemp(prefix="duly-bad-"))
    server = EmbeddedPostgres.at(directory)
    server.start()
    migrate(server.dsn())
    yield server
    server.stop(mode="immediate")
    shutil.rmtree(directory, ignore_errors=True)


def reconfigure(server: EmbeddedPostgres, **settings: str) -> None:
    """Write postgresql.auto.conf and start the server again."""
    server.stop()
    lines = "".join(f"{name} = '{value}'\n" for name, value in settings.items())
    (server.directory / "postgresql.auto.conf").write_text(lines)
    server.start()


async def test_a_good_server_passes_without_a_word(postgres: EmbeddedPostgres) -> None:
    assert await check(postgres.dsn(), allow_unsafe_database=False) == []


def test_a_server_that_died_is_started_although_somebody_else_has_its_number(postgres: EmbeddedPostgres) -> None:
    """E7.2: after a crash of the machine, the number in its file is soon anybody's."""
    postgres.stop(mode="immediate")
    file = postgres.directory / "postmaster.pid"
    file.write_text(f"{os.getpid()}\n{postgres.directory}\n")
    assert not postgres.is_running()
    assert postgres.start()
    assert postgres.is_running()
    assert not postgres.start()
    assert file.read_text().splitlines()[0] != str(os.getpid())


async def test_a_server_that_may_lose_commits_is_refused_unless_it_is_allowed(postgres: EmbeddedPostgres) -> None:
    reconfigure(postgres, fsync="off", full_page_writes="off", synchronous_commit="off")
    said = await refusal(postgres.dsn(), allow_unsafe_database=False)
    assert said.startswith("fsync is off")
    assert "DULY_ALLOW_UNSAFE_DATABASE=1" in said
    db = Database(postgres.dsn(), settings=Settings(allow_unsafe_database=True))
    warnings = await preflight.check(db)
    await db.close()
    assert [warning.partition(":")[0] for warning in warnings] == [
        "fsync is off",
        "full_page_writes is off",
        "synchronous_commit is off",
    ]
    reconfigure(postgres, full_page_writes="off")
    said = await refusal(postgres.dsn(), allow_unsafe_database=False)
    assert said.startswith("full_page_writes is off")


async def test_a_standby_is_refused(postgres: EmbeddedPostgres) -> None:
    postgres.stop()
    (postgres.directory / "standby.signal").touch()
    postgres.start()
    assert "point DATABASE_URL at the primary" in await refusal(postgres.dsn())


async def test_a_read_only_database_is_refused(dsn: str) -> None:
    name = dsn.rpartition("/")[2].partition("?")[0]
    rows(dsn, f"ALTER DATABASE {name} SET default_transaction_read_only = on")
    assert "read-only" in await refusal(dsn)


async def test_a_database_in_another_encoding_is_refused(server: TestServer) -> None:
    admin = server.postgres.dsn("postgres")
    rows(admin, "CREATE DATABASE ascii_only ENCODING 'SQL_ASCII' TEMPLATE template0")
    try:
        assert "ENCODING 'UTF8'" in await refusal(server.postgres.dsn("ascii_only"))
    finally:
        rows(admin, "DROP DATABASE ascii_only WITH (FORCE)")


def test_a_server_that_is_too_old_is_refused() -> None:
    old = replace(GOOD, version_num=140_012, version="14.12")
    assert preflight.refusals(GOOD, allow_unsafe=False) == []
    assert preflight.refusals(old, allow_unsafe=True) == [
        "PostgreSQL 14.12 is too old: duly needs 15 or later, upgrade the server"
    ]


async def test_a_database_without_the_schema_or_with_a_newer_one_is_refused(dsn: str) -> None:
    rows(dsn, "UPDATE duly.schema_version SET version_num = '9999'")
    assert "newer than this code" in await refusal(dsn)
    rows(dsn, "DROP SCHEMA duly CASCADE")
    assert "run `duly migrate`" in await refusal(dsn)


async def test_a_moved_clock_and_few_connections_are_warnings(dsn: str, clock: BusinessClock) -> None:
    assert any("can be moved" in warning for warning in await check(dsn, env="production"))
    clock.advance(hours=1)
    moved, few = sorted(await check(dsn, pool_size=300), reverse=True)
    assert moved.startswith("the business clock was moved")
    assert few.startswith("max_connections is 200")


async def test_sessions_for_jobs_and_webhooks_count_too(dsn: str) -> None:
    (few,) = await check(dsn, pool_size=10, concurrency=171, webhook_concurrency=100)
    assert "may use 201" in few
    assert await check(dsn, pool_size=10, concurrency=170, webhook_concurrency=100) == []


# -- poolers -------------------------------------------------------------------------------------


class Pool:
    """Lends real sessions for one transaction each, the last one given back first, as PgBouncer does."""

    def __init__(self, sessions: list[Any]) -> None:
        self.free = sessions

    @contextlib.contextmanager
    def lend(self) -> Iterator[Any]:
        session = self.free.pop()
        try:
            yield session
        finally:
            self.free.append(session)


class Client:
    """What a client of such a pool believes to be its connection."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._held: Any = None

    async def fetchval(self, query: str, *values: Any) -> Any:
        if self._held is not None:
            return await self._held.fetchval(query, *values)
        with self._pool.lend() as session:
            return await session.fetchval(query, *values)

    async def add_listener(self, channel: str, callback: Any) -> None:
        with self._pool.lend() as session:
            await session.add_listener(channel, callback)

    @contextlib.asynccontextmanager
    async def transaction(self) -> AsyncIterator[None]:
        with self._pool.lend() as session:
            async with session.transaction():
                self._held = session
                try:
                    yield
                finally:
                    self._held = None


@pytest.fixture
async def sessions(dsn: str) -> AsyncIterator[list[Any]]:
    """Three real connections."""
    made = [await asyncpg.connect(dsn) for _ in range(3)]
    yield made
    for connection in made:
        await connection.close()


async def test_sessions_of_our_own_are_recognised(sessions: list[Any]) -> None:
    assert await preflight.keeps_sessions(sessions[0], sessions[1])


async def test_sessions_lent_out_between_statements_are_recognised(sessions: list[Any]) -> None:
    pool = Pool(sessions)
    assert not await preflight.keeps_sessions(Client(pool), Client(pool), echo_seconds=0.2)


async def test_a_listener_that_hears_nothing_is_recognised(sessions: list[Any], server: TestServer) -> None:
    elsewhere = await asyncpg.connect(server.postgres.dsn("postgres"))  # NOTIFY stays inside a database
    try:
        assert not await preflight.keeps_sessions(sessions[0], elsewhere, echo_seconds=0.2)
    finally:
        await elsewhere.close()


@pytest.mark.pooler
@pytest.mark.parametrize(
    ("mode", "ignored", "said"),
    [
        ("transaction", "", "refuses duly's settings"),
        ("transaction", "all", "lends its sessions out"),
        ("session", "all", ""),
    ],
)
async def test_a_real_pooler_is_recognised(mode: str, ignored: str, said: str, server: TestServer, dsn: str) -> None:
    port = free_port()
    directory = Path(tempfile.mkdtemp(prefix="duly-pooler-"))
    directory.chmod(0o755)  # started by root, it becomes nobody
    names = "duly.notify,statement_timeout,idle_in_transaction_session_timeout,timezone,jit" if ignored else ""
    configuration = directory / "pgbouncer.ini"
    configuration.write_text(
        f"[databases]\n* = host={server.postgres.socket_directory} user=postgres\n"
        f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\nauth_type = any\n"
        f"pool_mode = {mode}\nignore_startup_parameters = {names}\nuser = nobody\n"
    )
    pooler = subprocess.Popen(["pgbouncer", str(configuration)], stderr=subprocess.DEVNULL)
    address = f"postgresql://postgres@127.0.0.1:{port}/{dsn.rpartition('/')[2].partition('?')[0]}"
    try:
        wait_until(lambda: _listens(port), what="PgBouncer listens")
        assert (said in await refusal(address)) if said else (await check(address) == [])
    finally:
        pooler.terminate()
        pooler.wait()
        shutil.rmtree(directory)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
