"""Ten years of birthdays in a minute or two: a made-up story, lived by the real system, compared with what must come.

``make decade`` or ``python -m tests.apps.birthdays.decade --years 10 --users 1000 --seed 1``. A real PostgreSQL whose
clock jumps from one interesting instant to the next, the real API, Worker, Relay and Scheduler, and messages over HTTP.
Most instants have one message, so a world waits for one thing after another: the people are shared out among as many
worlds as there are cores, each with a process, a database and a clock of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import operator
import os
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import reduce
from pathlib import Path
from typing import Any

import httpx2
from fastapi import FastAPI

from apps.birthdays.gateways import URL_VARIABLE
from apps.sandbox.catcher import PATH, Catcher, create_router
from apps.wiring import app
from duly import Database, Relay, Scheduler, Worker
from duly.auth.issuer import Issuer
from duly.cli.process import build_api, run_async
from duly.clock import monotonic
from duly.runtime.supervisor import create_server
from duly.schedules import disable_schedule, edit_schedule, list_schedules
from duly.settings import Settings
from duly.telemetry import configure_logging
from duly.testing import TestServer, find_place
from duly.wakeup import Wakeup
from duly.zones import zone_names
from tests.apps.birthdays.acting import check_consistent
from tests.apps.birthdays.oracle import Deed, Message, Story, describe_lateness, next_minute, tell_story
from tests.engine.http.serving import listen

FIRST_YEAR = 2008  # in the years from here on, more clocks did odd things than they are expected to
PATIENCE_SECONDS = 60.0
CALLS_AT_ONCE = 8
MOST_OUT_OF_ORDER = 40
COMMON_ZONES = "SELECT name FROM pg_timezone_names ORDER BY name"
FREEZE = "UPDATE duly.business_clock SET frozen_at = $1"
LOOK = """
SELECT EXISTS (SELECT 1 FROM duly.jobs WHERE run_at <= duly.now()) OR EXISTS (SELECT 1 FROM duly.outbox) AS is_busy,
       (SELECT count(*) FROM birthdays.events WHERE status = 'PENDING' AND target_utc <= duly.now()) AS due_now,
       (SELECT min(target_utc) FROM birthdays.events WHERE status = 'PENDING') AS next_due
"""
UNUSUAL = """
SELECT name, outcome, message FROM duly.executions WHERE outcome NOT IN ('done', 'duplicate') ORDER BY completed_at
"""
LEFT_OVER = "SELECT user_id::text, year, target_utc FROM birthdays.events WHERE status = 'PENDING'"
# A few names (MET, EST...) are abbreviations to PostgreSQL before they are zones: those it is not asked about.
DISAGREES = """
SELECT m.zone, m.local, m.due FROM unnest($1::text[], $2::timestamp[], $3::timestamptz[]) AS m(zone, local, due)
WHERE (m.due AT TIME ZONE m.zone < m.local OR (m.due - interval '1 minute') AT TIME ZONE m.zone >= m.local)
  AND upper(m.zone) NOT IN (SELECT upper(abbrev) FROM pg_timezone_abbrevs)
"""
HANDLERS = {name: one for name, one in app.handlers.items() if name.split(":")[-1].startswith("birthdays.")}
# The engine's own clean-up and other contexts stand still; what belongs to birthdays runs, the nightly jobs less often.
LESS_OFTEN = {
    "birthdays.recover": "0 12 * * *", "birthdays.recheck-zones": "0 3 * * 0", "birthdays.forget-events": "0 4 1 * *",
}  # fmt: skip


@dataclass(frozen=True)
class Arrival:
    """A message as the webhook got it, and what time it was."""

    at: datetime
    key: str
    body: dict[str, Any]


class Mailbox(Catcher):
    """The sandbox's catcher, which forgets nothing and knows what time it is."""

    def __init__(self) -> None:
        super().__init__()
        self.now = datetime.min.replace(tzinfo=UTC)
        self.arrivals: list[Arrival] = []
        self._arrived = asyncio.Event()

    async def catch(self, key: str, body: Any) -> int:
        self.arrivals.append(Arrival(self.now, key, body))
        self._arrived.set()
        return await super().catch(key, body)

    async def wait_for(self, count: int) -> None:
        """Until so many have arrived in all."""
        while len(self.arrivals) < count:
            self._arrived.clear()
            await self._arrived.wait()


@dataclass
class Figures:
    """What a run came to."""

    people: int = 0
    zones: int = 0
    deeds: int = 0
    instants: int = 0
    restarts: int = 0
    downtimes: int = 0
    delivered: int = 0
    late: int = 0
    told_in: float = 0.0
    lived_in: float = 0.0
    spent: Counter[str] = field(default_factory=Counter)

    def __add__(self, other: Figures) -> Figures:
        """Those of two worlds that lived at the same time."""
        counted = ("people", "deeds", "instants", "delivered", "late")
        return replace(
            self,
            **{name: getattr(self, name) + getattr(other, name) for name in counted},
            told_in=max(self.told_in, other.told_in),
            lived_in=max(self.lived_in, other.lived_in),
            spent=self.spent + other.spent,
        )

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.spent.most_common())
        return (
            f"{self.people} people in {self.zones} zones, {self.deeds} registrations and changes, {self.restarts} "
            f"restarts, {self.downtimes} downtimes, {self.instants} instants: {self.delivered} messages, {self.late} "
            f"of them late, each exactly once and at its instant; lived in {self.lived_in:.1f} s ({parts}), made up "
            f"in {self.told_in:.1f} s"
        )


class Duties:
    """Worker, relay and scheduler, as ``duly up`` has them; the tick is asked for, since the clock stands still."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._stop = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._scheduler = Scheduler(db)

    @property
    def are_up(self) -> bool:
        return bool(self._tasks)

    def start(self) -> None:
        self._stop = asyncio.Event()
        wakeup = Wakeup(self._db)
        duties = [Worker(self._db, HANDLERS, wakeup=wakeup), Relay(self._db, wakeup=wakeup)]
        runs = [wakeup.run(self._stop), *(duty.run(self._stop) for duty in duties)]
        self._tasks = [asyncio.create_task(run) for run in runs]
        self._scheduler = Scheduler(self._db)

    async def stop(self) -> None:
        self._stop.set()
        await asyncio.gather(*self._tasks)
        await self._scheduler.close()
        self._tasks = []

    async def tick(self) -> None:
        await self._scheduler.cycle()


class World:
    """The system under a clock of ours."""

    def __init__(self, db: Database, connection: Any, client: httpx2.AsyncClient, mailbox: Mailbox) -> None:
        self.connection = connection
        self.mailbox = mailbox
        self.figures = Figures()
        self.ids: dict[int, str] = {}
        self._client = client
        self._duties = Duties(db)
        self._turns = asyncio.Semaphore(CALLS_AT_ONCE)
        self._next_due: datetime | None = None

    async def live(self, story: Story) -> None:
        """From the first instant to the last."""
        steps = _Steps(story)
        self._duties.start()
        while (at := steps.next_instant(self._next_due if self._duties.are_up else None)) is not None:
            await self._step(at, steps)
        await self._duties.stop()

    async def _step(self, at: datetime, steps: _Steps) -> None:
        began = monotonic()
        self.figures.instants += 1
        self.mailbox.now = at
        await self.connection.execute(FREEZE, at)
        if deeds := steps.take_deeds(at):
            await asyncio.gather(*(self._do(deed) for deed in deeds))
            self.figures.deeds += len(deeds)
        began = self._spent("changes", began)
        if steps.goes_down(at):
            await self._duties.stop()
            self.figures.downtimes += 1
            return
        if steps.comes_up(at):
            self._duties.start()
        elif steps.restarts(at):
            await self._duties.stop()
            self._duties.start()
            self.figures.restarts += 1
        if not self._duties.are_up:
            return
        began = self._spent("restarts", began)
        due_now = await self._until_idle()  # what was said is heard before anything is claimed
        began = self._spent("following", began)
        if at != next_minute(at):  # the scheduler ticks at whole and half minutes, and claims are made each minute
            return
        wanted = len(self.mailbox.arrivals) + due_now
        await self._duties.tick()
        began = self._spent("ticks", began)
        async with asyncio.timeout(PATIENCE_SECONDS):  # without asking all the time
            await self.mailbox.wait_for(wanted)
        await self._until_idle()
        self._spent("deliveries", began)

    def _spent(self, what: str, began: float) -> float:
        now = monotonic()
        self.figures.spent[what] += now - began  # type: ignore[assignment]  # a Counter of seconds
        return now

    async def _until_idle(self) -> int:
        """Until nothing is to be done at this instant; how many messages are due by now."""
        deadline = monotonic() + PATIENCE_SECONDS
        while True:
            is_busy, due_now, self._next_due = await self.connection.fetchrow(LOOK)
            if not is_busy:
                return int(due_now)
            assert monotonic() < deadline, "something is due and nobody does it"
            await asyncio.sleep(0.001)

    async def _do(self, deed: Deed) -> None:
        """Over HTTP, as everybody does it."""
        given = {
            "firstName": deed.name,
            "dateOfBirth": deed.born.isoformat() if deed.born else None,
            "timezone": deed.zone,
        }
        body = {name: value for name, value in given.items() if value is not None}
        async with self._turns:
            if deed.kind == "register":
                answer = await self._client.post("/user", json=body | {"lastName": "P"})
                self.ids[deed.person] = answer.json()["user"]["id"]
            elif deed.kind == "leave":
                answer = await self._client.delete(f"/user/{self.ids[deed.person]}")
            else:
                answer = await self._client.put(f"/user/{self.ids[deed.person]}", json=body)
        assert answer.is_success, answer.text


class _Steps:
    """Which instants are interesting: something is done, somebody goes down or comes up, or a message is due."""

    def __init__(self, story: Story) -> None:
        self._story = story
        self._deeds = list(reversed(story.deeds))
        self._downs = {downtime.start for downtime in story.downtimes}
        self._ups = {downtime.end for downtime in story.downtimes}
        self._restarts = set(story.restarts)
        self._planned = sorted({*self._downs, *self._ups, *self._restarts}, reverse=True)
        self._now = story.start - timedelta(seconds=1)

    def next_instant(self, due: datetime | None) -> datetime | None:
        candidates = [self._deeds[-1].at] if self._deeds else []
        candidates += [self._planned[-1]] if self._planned else []
        if due is not None:
            candidates.append(max(due, next_minute(self._now)))
        found = min((at for at in candidates if at < self._story.end), default=None)
        if found is not None:
            assert found > self._now, f"still due at {self._now}, and nobody has claimed it: {due}"
            self._now = found
            while self._planned and self._planned[-1] <= found:
                self._planned.pop()
        return found

    def take_deeds(self, at: datetime) -> list[Deed]:
        found = []
        while self._deeds and self._deeds[-1].at == at:
            found.append(self._deeds.pop())
        return found

    def goes_down(self, at: datetime) -> bool:
        return at in self._downs

    def comes_up(self, at: datetime) -> bool:
        return at in self._ups

    def restarts(self, at: datetime) -> bool:
        return at in self._restarts


# -- checking ---------------------------------------------------------------------------------------------------------


def compare(story: Story, arrivals: list[Arrival], ids: dict[int, str]) -> list[str]:
    """Everything that is wrong, in words."""
    people = {user_id: person for person, user_id in ids.items()}
    wrong: list[str] = []
    times = Counter(arrival.key for arrival in arrivals)
    wrong += [f"the key {key} came {count} times" for key, count in times.items() if count > 1]
    expected = {(message.person, message.year): message for message in story.messages}
    came: Counter[tuple[int, int]] = Counter()
    for arrival in arrivals:
        who = (people.get(arrival.body["userId"], -1), datetime.fromisoformat(arrival.body["targetLocal"]).year)
        came[who] += 1
        if who not in expected:
            wrong.append(f"nobody expected {who} at {arrival.at}: {arrival.body}")
        else:
            wrong += [f"{who} at {arrival.at}: {fault}" for fault in _faults(arrival, expected[who])]
    wrong += [f"{who} came {count} times" for who, count in came.items() if count > 1]
    wrong += [f"{message} never came" for who, message in expected.items() if who not in came]
    return wrong + _out_of_order(arrivals)


def _faults(arrival: Arrival, message: Message) -> list[str]:
    body = arrival.body
    late = message.at - message.due
    words = describe_lateness(late)
    facts = {
        "instant": (arrival.at, message.at),
        "due": (datetime.fromisoformat(body["targetUtc"]), message.due),
        "local": (datetime.fromisoformat(body["targetLocal"]), message.local),
        "zone": (body["timezone"], message.zone),
        "late": (body["lateSeconds"], int(late.total_seconds())),
        "words": (body["message"].rpartition("! Sorry to be ")[2] if "Sorry" in body["message"] else "", words),
    }
    faults = [f"{name} is {found}, not {wanted}" for name, (found, wanted) in facts.items() if found != wanted]
    return faults + (["it came early"] if arrival.at < message.due else [])


def _out_of_order(arrivals: list[Arrival]) -> list[str]:
    """What comes at one instant comes with the oldest first; ten are delivered at a time."""
    by_instant: dict[datetime, list[str]] = {}
    for arrival in arrivals:
        by_instant.setdefault(arrival.at, []).append(arrival.body["targetUtc"])
    return [
        f"at {at} the one of {due} came as number {place} instead of {sorted(dues).index(due)}"
        for at, dues in by_instant.items()
        for place, due in enumerate(dues)
        if place - (sorted(dues).index(due) + dues.count(due)) > MOST_OUT_OF_ORDER
    ]


async def check_plans(world: World, story: Story) -> list[str]:
    """Who is still there expects one message more, and the right one."""
    found = {row[0]: (row[1], row[2]) for row in await world.connection.fetch(LEFT_OVER)}
    wanted = {world.ids[person]: plan for person, plan in story.expecting.items()}
    everybody = found.keys() | wanted.keys()
    return [
        f"{user_id} expects {found.get(user_id)}, not {wanted.get(user_id)}"
        for user_id in everybody
        if found.get(user_id) != wanted.get(user_id)
    ]


# -- running ----------------------------------------------------------------------------------------------------------


async def run_decade(
    dsn: str,
    home: Path,
    *,
    people: int,
    years: int,
    seed: int,
    zones: list[str] | None = None,
    first_year: int = FIRST_YEAR,
    part: int = 0,
    parts: int = 1,
) -> Figures:
    """Tell a story, live one's part of it, compare; AssertionError says everything that was wrong."""
    db = Database(dsn, settings=Settings(concurrency=12))
    connection = await db.connect(application="decade")
    known = {row[0] for row in await connection.fetch(COMMON_ZONES)}
    chosen = zones or sorted(zone_names() & known)
    began = monotonic()
    whole = tell_story(people=people, years=years, seed=seed, zones=chosen, first_year=first_year)
    story = whole.share(part, parts)
    told_in = monotonic() - began
    disagreements = await connection.fetch(
        DISAGREES, [m.zone for m in story.messages], [m.local for m in story.messages], [m.due for m in story.messages]
    )
    assert not disagreements, f"PostgreSQL disagrees with the oracle: {disagreements[:5]}"
    await connection.execute(FREEZE, story.start)
    await prepare(db)
    mailbox = Mailbox()
    async with serving(mailbox, db, home) as client:
        world = World(db, connection, client, mailbox)
        began = monotonic()
        await world.live(story)
        world.figures.lived_in = monotonic() - began
    unusual = [str(tuple(row)) for row in await connection.fetch(UNUSUAL)]
    assert not unusual, f"runs that failed, perhaps because the machine was too busy: {unusual[:10]}"
    wrong = compare(story, mailbox.arrivals, world.ids) + await check_plans(world, story)
    assert not wrong, f"{len(wrong)} faults, among them:\n" + "\n".join(wrong[:20])
    check_consistent(dsn)
    figures = world.figures
    figures.people, figures.told_in = len(world.ids), told_in
    figures.zones = len({deed.zone for deed in whole.deeds if deed.zone})
    figures.delivered = len(mailbox.arrivals)
    figures.late = sum(bool(message.at > message.due) for message in story.messages)
    await connection.close()
    await db.close()
    return figures


async def prepare(db: Database) -> None:
    """Consumers are registered; schedules run from the story's beginning on."""
    await app.prepare(db)
    async with db.transaction() as tx:
        for row in await list_schedules(tx):
            if row.name in LESS_OFTEN:
                await edit_schedule(tx, row.name, cron=LESS_OFTEN[row.name], actor="decade")
            elif not row.name.startswith("birthdays."):
                await disable_schedule(tx, row.name, actor="decade")


@contextlib.asynccontextmanager
async def serving(mailbox: Mailbox, db: Database, home: Path) -> AsyncIterator[httpx2.AsyncClient]:
    """The API and the webhook, each on a socket of its own."""
    settings = Settings(data=home, shutdown_grace_seconds=1)
    hooks, api_listener = listen(), listen()
    port = api_listener.getsockname()[1]
    receiver = FastAPI()
    receiver.include_router(create_router(mailbox))
    servers = [create_server(receiver, settings), create_server(build_api(db, [], settings, app, port=port), settings)]
    tasks = [
        asyncio.create_task(server.serve(sockets=[listener]))
        for server, listener in zip(servers, (hooks, api_listener), strict=True)
    ]
    os.environ[URL_VARIABLE] = f"http://127.0.0.1:{hooks.getsockname()[1]}{PATH}"
    token = Issuer.open(settings, port=port).sign("decade", scopes=["users"], ttl_seconds=36_000)
    try:
        async with httpx2.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", timeout=30, headers={"Authorization": f"Bearer {token}"}
        ) as client:
            yield client
    finally:
        del os.environ[URL_VARIABLE]
        for server in servers:
            server.should_exit = True
        await asyncio.gather(*tasks)


def live_part(part: int, parts: int, dsn: str, home: Path, options: argparse.Namespace) -> Figures:
    """One of the worlds, in a process of its own."""
    configure_logging(level="error")
    home.mkdir()
    given = {"people": options.users, "years": options.years, "seed": options.seed}
    return run_async(run_decade(dsn, home, **given, part=part, parts=parts))


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--years", type=int, default=10)
    parser.add_argument("--users", type=int, default=1_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--worlds", type=int, default=min(os.cpu_count() or 1, 8), choices=range(1, 17), metavar="N")
    options = parser.parse_args()
    os.environ["DULY_ALLOW_UNSAFE_DATABASE"] = "1"
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="duly-decade-", dir=find_place())))
        server = TestServer(directory)
        server.postgres = type(server.postgres).at(
            directory, parameters=("fsync=off", "full_page_writes=off", "synchronous_commit=off")
        )
        server.start()
        stack.callback(server.stop)
        parts = options.worlds
        dsns = [stack.enter_context(server.database(app)) for _ in range(parts)]
        pool = stack.enter_context(ProcessPoolExecutor(parts, multiprocessing.get_context("spawn")))
        worlds = [
            pool.submit(live_part, part, parts, dsn, directory / f"world-{part}", options)
            for part, dsn in enumerate(dsns)
        ]
        figures = reduce(operator.add, (world.result() for world in worlds))
    print(f"{options.years} years, seed {options.seed}, {parts} worlds: {figures}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
