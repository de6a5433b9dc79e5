"""Everything of one run that lives: processes, who starts them again, the proxy, questions to the database."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psycopg

from tests.chaos import process, safeguards
from tests.chaos.postgres import Server
from tests.chaos.process import Order
from tests.chaos.proxy import Proxy

RESTART_AFTER_SECONDS = 0.3
STOP_SECONDS = 14.0
ASK_SECONDS = 120.0  # a server that recovers on a busy machine


@dataclass
class Member:
    """One process that is kept running: when it dies it is started anew, without what was armed."""

    name: str
    order: Order
    process: BaseProcess
    deaths: int = 0
    wanted: bool = True
    expected: set[int] = field(default_factory=set)  # process ids whose death a fault asked for

    @property
    def pid(self) -> int:
        """The process it is now."""
        return int(self.process.pid or 0)

    def is_alive(self) -> bool:
        """Whether it runs."""
        return self.process.is_alive()

    def send(self, number: signal.Signals) -> None:
        """A signal, if it is still there."""
        if number in (signal.SIGKILL, signal.SIGTERM):
            self.expected.add(self.pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)


class World:
    """The processes of one run around one database."""

    def __init__(self, server: Server, database: str, directory: Path, *, safeguard_off: str = "") -> None:
        self.server = server
        self.directory = directory
        self.dsn = server.create_database(database)
        self.database = database
        self.safeguard_off = safeguard_off
        safeguards.switch_off_in_database(safeguard_off, self.dsn)
        self.proxy = Proxy(server.postgres.socket_directory / ".s.PGSQL.5432")
        self.members: dict[str, Member] = {}
        self.unexpected: list[str] = []
        self.replies_503 = 0  # with Retry-After; counted by the clients
        self._port_keeper = process.bind()
        self._watch: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """Where the api answers, whichever process takes the connection."""
        return f"http://127.0.0.1:{self._port_keeper.getsockname()[1]}"

    # -- life ---------------------------------------------------------------------------------------------------

    def start(self, counts: Mapping[str, int], **common: Any) -> None:
        """Start so many processes of each role."""
        self.proxy.start()
        for role, count in counts.items():
            for number in range(1, count + 1):
                self.add(f"{role}{number}", role, **common)
        self._watch = asyncio.create_task(self._keep())

    def add(self, name: str, role: str, **more: Any) -> Member:
        """Start one process and keep it."""
        order = Order(
            role=role,
            dsn=f"postgresql://postgres@127.0.0.1:{self.proxy.port}/{self.database}?sslmode=disable",
            log=str(self.directory / f"{name}.log"),
            witness=str(self.directory / "witness.log"),
            port=self._port_keeper.getsockname()[1],
            safeguard_off=self.safeguard_off,
            **more,
        )
        self.members[name] = Member(name, order, process.start(order))
        return self.members[name]

    async def stop(self) -> None:
        """End everything; whoever does not end is killed."""
        if self._watch is not None:
            self._watch.cancel()
        for member in self.members.values():
            member.wanted = False
            member.send(signal.SIGCONT)
            member.send(signal.SIGTERM)
        deadline = time.monotonic() + STOP_SECONDS
        for member in self.members.values():
            await asyncio.to_thread(member.process.join, max(0.0, deadline - time.monotonic()))
            if member.is_alive():
                self.unexpected.append(f"{member.name} did not end within {STOP_SECONDS:g} s of SIGTERM")
                member.process.kill()
                await asyncio.to_thread(member.process.join, 5)
        self.proxy.stop()
        self._port_keeper.close()

    def role(self, *roles: str) -> list[Member]:
        """The members of these roles that run."""
        return [member for member in self.members.values() if member.order.role in roles and member.is_alive()]

    async def replace(self, member: Member, **changes: Any) -> None:
        """Stop a process in order, and start another version of it in its place."""
        member.wanted = False
        member.send(signal.SIGTERM)
        await asyncio.to_thread(member.process.join, STOP_SECONDS)
        if member.is_alive():
            member.send(signal.SIGKILL)
            await asyncio.to_thread(member.process.join, 5)
        self.start_again(member, **changes)
        member.wanted = True

    def start_again(self, member: Member, **changes: Any) -> None:
        """A new process in the place of a dead one."""
        if changes:
            member.order = replace(member.order, **changes)
        member.process = process.start(member.order)

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(RESTART_AFTER_SECONDS)
            for member in list(self.members.values()):
                if member.wanted and not member.is_alive():
                    self._note_death(member)
                    self.start_again(member, failpoints="")

    def _note_death(self, member: Member) -> None:
        """A process may die by a fault, by an armed failpoint or by poison: all of these are SIGKILL."""
        member.deaths += 1
        if member.process.exitcode != -signal.SIGKILL and member.pid not in member.expected:
            self.unexpected.append(f"{member.name} ended by itself with {member.process.exitcode}: see its log")

    # -- questions ----------------------------------------------------------------------------------------------

    async def ask(self, query: str, values: Sequence[Any] = (), *, seconds: float = ASK_SECONDS) -> list[Any]:
        """Rows, past the proxy; asked again while the server is away. For questions and what may be repeated."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                return await asyncio.to_thread(self._ask, query, values)
            except psycopg.OperationalError:
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(0.1)

    def _ask(self, query: str, values: Sequence[Any]) -> list[Any]:
        with psycopg.connect(self.dsn, autocommit=True, connect_timeout=5) as connection:
            cursor = connection.execute(query.encode(), values)
            return cursor.fetchall() if cursor.description else []

    async def until(self, condition: Callable[[], Any], *, seconds: float) -> bool:
        """Poll a fact of ours; whether it came true in time."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(0.03)
        return True

    async def advance(self, seconds: float) -> None:
        """Move the business clock forward, and tell the schedulers."""
        await self.ask("UPDATE duly.business_clock SET shift = shift + make_interval(secs => %s)", [seconds])
        await self.ask("SELECT pg_notify('duly', 'schedules'), pg_notify('duly', 'jobs')")
