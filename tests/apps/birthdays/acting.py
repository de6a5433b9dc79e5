"""People who register, move and leave, a webhook over a real socket, and what must be true whatever happened."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from typing import Any
from uuid import UUID

import psycopg
from starlette.types import Receive, Scope, Send

from apps.birthdays import service as birthdays
from apps.users import service as users
from apps.users.model import Changes, User
from apps.wiring import app
from duly import Database
from duly.runtime.supervisor import create_server
from duly.settings import Settings
from duly.testing import drain
from tests.engine.http.serving import listen
from tests.support import rows, value

CLAIM = "SELECT duly.schedule('birthdays.claim')"
BORN = date(1990, 6, 15)
NINE_IN_WARSAW = datetime(2026, 6, 15, 7, tzinfo=UTC)

# Each of these lists what is wrong; all of them are empty in a database that nobody can complain about.
INVARIANTS = {
    "a message is under way without a job that delivers it": """
        SELECT e.id FROM birthdays.events e WHERE e.status = 'PROCESSING' AND NOT EXISTS (
            SELECT 1 FROM duly.jobs j WHERE j.name = 'birthdays.deliver' AND j.entity_id = e.id::text)""",
    "a person has nothing to expect": """
        SELECT p.user_id FROM birthdays.people p WHERE NOT EXISTS (
            SELECT 1 FROM birthdays.events e
            WHERE e.user_id = p.user_id AND e.status IN ('PENDING', 'PROCESSING'))""",
    "a message is pending for nobody": """
        SELECT e.id FROM birthdays.events e WHERE e.status = 'PENDING' AND NOT EXISTS (
            SELECT 1 FROM birthdays.people p WHERE p.user_id = e.user_id)""",
    "the copy of a user differs": """
        SELECT u.id FROM users.users u FULL JOIN birthdays.people p ON p.user_id = u.id
        WHERE (u.first_name, u.last_name, u.date_of_birth, u.timezone)
              IS DISTINCT FROM (p.first_name, p.last_name, p.date_of_birth, p.timezone)""",
    "a pending message is not planned by the person's zone": """
        SELECT e.id FROM birthdays.events e JOIN birthdays.people p USING (user_id)
        WHERE e.status = 'PENDING' AND e.timezone <> p.timezone""",
}


def check_consistent(dsn: str) -> None:
    """B1 to B6, once everything that was said has been heard."""
    wrong = {rule: found for rule, query in INVARIANTS.items() if (found := rows(dsn, query))}
    assert not wrong, wrong


# -- the webhook ------------------------------------------------------------------------------------------------------


@dataclass
class Answer:
    """What the webhook says to one call."""

    status: int = 202
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    hold: asyncio.Event | None = None  # no answer before this is set
    endless: bool = False
    cut: bool = False  # the connection breaks instead
    unfinished: bool = False  # the body begins, and never goes on


@dataclass
class Seen:
    """One call."""

    key: str
    body: dict[str, Any]
    headers: dict[str, str]


class Receiver:
    """A webhook. It answers what it was told to, one after the other, and then 202."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self.always: Answer | None = None
        self.seen: list[Seen] = []
        self.arrived = asyncio.Event()
        self.most_at_once = 0
        self.takes_seconds = 0.0
        self._now = 0
        self.url = ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        self._now += 1
        self.most_at_once = max(self.most_at_once, self._now)
        try:
            await self._answer(scope, receive, send)
        finally:
            self._now -= 1

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        message = await receive()
        raw = message.get("body", b"")
        while message.get("more_body"):
            message = await receive()
            raw += message.get("body", b"")
        headers = {name.decode(): content.decode() for name, content in scope["headers"]}
        self.seen.append(Seen(headers.get("x-idempotency-key", ""), json.loads(raw), headers))
        self.arrived.set()
        answer = self.always or (self.answers.pop(0) if self.answers else Answer())
        if answer.hold is not None:
            await answer.hold.wait()
        await asyncio.sleep(self.takes_seconds)
        if answer.cut:  # before anything was sent the server would answer 500 for us
            await send({"type": "http.response.start", "status": 202, "headers": [(b"content-length", b"9")]})
            raise ConnectionResetError("cut on purpose")
        told = [(name.lower().encode(), content.encode()) for name, content in answer.headers.items()]
        await send({"type": "http.response.start", "status": answer.status, "headers": told})
        while answer.endless:
            await send({"type": "http.response.body", "body": b"x" * 65_536, "more_body": True})
            await asyncio.sleep(0)
        if answer.unfinished:
            await send({"type": "http.response.body", "body": b"x", "more_body": True})
            await receive()  # until the other side hangs up
            return
        await send({"type": "http.response.body", "body": answer.body})

    @property
    def keys(self) -> list[str]:
        return [one.key for one in self.seen]


@contextlib.asynccontextmanager
async def receiving(receiver: Receiver) -> AsyncIterator[Receiver]:
    """Serve it on a real socket."""
    listener = listen()
    server = create_server(receiver, Settings(shutdown_grace_seconds=1))
    server.config.lifespan = "off"
    receiver.url = f"http://127.0.0.1:{listener.getsockname()[1]}/hook"
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield receiver
    finally:
        server.should_exit = True
        await task


# -- users, without HTTP ----------------------------------------------------------------------------------------------


async def register(
    db: Database, *, born: date = BORN, timezone: str = "Europe/Warsaw", name: str = "Ada"
) -> tuple[UUID, UUID]:
    """A user's id, and that of the first event."""
    async with db.transaction() as tx:
        user, event = await users.register_user(
            tx, first_name=name, last_name="Lovelace", date_of_birth=born, timezone=timezone, tell=birthdays.plan_first
        )
    return user.id, event.id


async def change(db: Database, user_id: UUID, **changes: Any) -> User:
    """Correct something."""
    async with db.transaction() as tx:
        return await users.change_user(tx, user_id, Changes(**changes))


async def delete(db: Database, user_id: UUID) -> None:
    """Leave."""
    async with db.transaction() as tx:
        await users.delete_user(tx, user_id, tell=birthdays.drop)


def fill(dsn: str, count: int, *, due: datetime = NINE_IN_WARSAW, every: timedelta = timedelta(0)) -> list[UUID]:
    """People in Warsaw with a pending event each, the first due then and the others one after the other."""
    made = rows(
        dsn,
        """
        WITH numbered AS (
            SELECT n, duly.uuid7(duly.now() + n * interval '1 ms') AS id FROM generate_series(0, %(count)s - 1) AS n
        ), people AS (
            INSERT INTO birthdays.people SELECT id, 'P' || n, 'Q', '1990-06-15', 'Europe/Warsaw' FROM numbered
        ), users AS (
            INSERT INTO users.users SELECT id, 'P' || n, 'Q', '1990-06-15', 'Europe/Warsaw', 1, duly.now(), duly.now()
            FROM numbered
        )
        INSERT INTO birthdays.events (id, user_id, year, target_local, timezone, target_utc, created_at, updated_at)
        SELECT duly.uuid7(duly.now() + n * interval '1 ms'), id, date_part('year', at),
               date_trunc('day', at AT TIME ZONE 'Europe/Warsaw') + '09:00',
               'Europe/Warsaw', at, duly.now(), duly.now()
        FROM numbered CROSS JOIN LATERAL (SELECT %(due)s + n * %(every)s AS at) AS target
        ORDER BY n
        RETURNING id
        """,
        {"count": count, "due": due, "every": every},
    )
    return [event_id for (event_id,) in made]


# -- looking ----------------------------------------------------------------------------------------------------------


def events_of(dsn: str, user_id: UUID) -> list[tuple[int, str]]:
    """A user's years and how they stand."""
    query = "SELECT year, status FROM birthdays.events WHERE user_id = %(id)s ORDER BY year"
    return [(year, status) for year, status in rows(dsn, query, {"id": user_id})]


def pending_of(dsn: str, user_id: UUID) -> tuple[datetime, str, datetime]:
    """When the pending one is due: local, zone, UTC."""
    query = """
        SELECT target_local, timezone, target_utc FROM birthdays.events
        WHERE user_id = %(id)s AND status = 'PENDING'"""
    ((local, zone, at),) = rows(dsn, query, {"id": user_id})
    return local, zone, at


def statuses(dsn: str) -> dict[str, int]:
    return dict(rows(dsn, "SELECT status, count(*)::int FROM birthdays.events GROUP BY 1"))


def status_of(dsn: str, event_id: UUID) -> str:
    return str(value(dsn, "SELECT status FROM birthdays.events WHERE id = %(id)s", {"id": event_id}))


async def claim(db: Database, dsn: str) -> None:
    """What happens every minute, and whatever follows from it."""
    rows(dsn, CLAIM)
    await drain(db, app.handlers)


async def claim_only(db: Database) -> birthdays.Claim:
    """The claim alone, without any delivery."""
    async with db.transaction() as tx:
        return await birthdays.claim_ready(tx, looks_for_missed=True)


@contextlib.contextmanager
def holding(dsn: str, *event_ids: UUID) -> Iterator[psycopg.Connection[Any]]:
    """Events that somebody else has locked; the lock ends with the block, or with a rollback."""
    with psycopg.connect(dsn) as rival:
        rival.execute("SELECT 1 FROM birthdays.events WHERE id = ANY(%s) ORDER BY id FOR UPDATE", [list(event_ids)])
        yield rival
        rival.rollback()


def expire_leases(dsn: str) -> None:
    """As if the workers that hold jobs had been dead for long; what they left is due."""
    rows(dsn, "UPDATE duly.jobs SET lease_expires_at = clock_timestamp() WHERE lease_token IS NOT NULL")


def logged(lines: Sequence[Any], name: str) -> list[dict[str, Any]]:
    """The log's entries of one name."""
    return [dict(line) for line in lines if line["event"] == name]
