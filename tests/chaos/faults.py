"""The faults: each is done, undone, and says how often it was *reached*, which is more than having been tried.

A killed process counts only if it held work; a lost COMMIT only if the proxy swallowed one of a transaction that wrote.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import httpx2
import psycopg

from tests.chaos.clients import Clients
from tests.chaos.process import LEASE_SECONDS
from tests.chaos.proxy import CLAIM, COMMIT, SETTLE, Trap
from tests.chaos.world import Member, World

PATIENCE_SECONDS = 6.0
PAUSES = {"process": (0.5, 2.0), "database": (2.0, 7.0), "wire": (0.5, 3.0), "poison": (1.0, 4.0)}  # seconds


@dataclass
class Scene:
    """What a fault may touch."""

    world: World
    clients: Clients
    rng: random.Random
    number: int = 0
    reached: int = 0  # for scenarios: how often what they are about really happened

    def next_op(self, kind: str) -> str:
        """A name for an operation of the fault's own."""
        self.number += 1
        return f"{kind}-{self.rng.randrange(10**9)}-{self.number}"


Do = Callable[[Scene], Awaitable[int]]


@dataclass(frozen=True)
class Fault:
    """One kind of fault. Faults of one lane never overlap; those of different lanes do."""

    name: str
    lane: str
    do: Do


FAULTS: dict[str, Fault] = {}


def fault(lane: str) -> Callable[[Do], Do]:
    """Register a fault under its function's name."""

    def register(do: Do) -> Do:
        name = getattr(do, "__name__", "")
        FAULTS[name] = Fault(name, lane, do)
        return do

    return register


# -- processes ----------------------------------------------------------------------------------------------------

LEASED = "SELECT count(*) FROM duly.jobs WHERE leased_by LIKE %s"
TAKEN_OVER = "SELECT count(*) FROM duly.executions WHERE outcome = 'lost' AND worker LIKE %s"


async def holder(scene: Scene) -> Member | None:
    """A worker that holds leases at this moment."""
    for _ in range(40):
        workers = scene.world.role("worker")
        scene.rng.shuffle(workers)
        for member in workers:
            if (await scene.world.ask(LEASED, [f"%:{member.pid}:%"]))[0][0]:
                return member
        await asyncio.sleep(0.05)
    return None


@fault("process")
async def kill_worker(scene: Scene) -> int:
    """kill -9 of a worker that holds leases; reached when another one took a job of its over."""
    member = await holder(scene)
    if member is None:
        return 0
    pid = member.pid
    member.send(signal.SIGKILL)
    return await _taken_over(scene, pid, LEASE_SECONDS + PATIENCE_SECONDS)


@fault("process")
async def stop_worker(scene: Scene) -> int:
    """SIGSTOP past the lease, then SIGCONT; reached when a job was taken over while its holder stood still."""
    member = await holder(scene)
    if member is None:
        return 0
    pid = member.pid
    member.send(signal.SIGSTOP)
    try:
        return await _taken_over(scene, pid, LEASE_SECONDS + PATIENCE_SECONDS)
    finally:
        member.send(signal.SIGCONT)


async def _taken_over(scene: Scene, pid: int, seconds: float) -> int:
    for _ in range(int(seconds / 0.1)):
        taken = (await scene.world.ask(TAKEN_OVER, [f"%:{pid}:%"]))[0][0]
        if taken:
            return int(taken)
        await asyncio.sleep(0.1)
    return 0


POINTS = {
    "worker": (
        "worker.claimed", "worker.before_handler", "worker.handler_done", "worker.before_settle",
        "worker.before_commit", "worker.committed", "worker.settled", "inbox.marked", "heartbeat.before",
    ),
    "relay": ("relay.fetched", "relay.before_commit", "relay.committed"),
    "scheduler": ("tick.chosen", "tick.inserted", "tick.committed"),
    "api": ("idempotency.reserved", "http.before_commit", "http.before_response"),
}  # fmt: skip


async def _kill_at_a_point(scene: Scene, role: str) -> int:
    """A process of this role kills itself at a step; reached when it did."""
    members = scene.world.role(role)
    if not members:
        return 0
    member = scene.rng.choice(members)
    point, hit = scene.rng.choice(POINTS[role]), 1 if role == "api" else scene.rng.randint(1, 3)
    await scene.world.replace(member, failpoints=f"{point}=kill9@{hit}")
    deaths = member.deaths
    reached = await scene.world.until(lambda: member.deaths > deaths, seconds=PATIENCE_SECONDS)
    return int(reached)


@fault("process")
async def kill_worker_at_a_point(scene: Scene) -> int:
    """kill -9 at a failpoint of the worker."""
    return await _kill_at_a_point(scene, "worker")


@fault("process")
async def kill_relay(scene: Scene) -> int:
    """kill -9 at a failpoint of the relay."""
    return await _kill_at_a_point(scene, "relay")


@fault("process")
async def kill_scheduler(scene: Scene) -> int:
    """kill -9 at a failpoint of the scheduler, whose minute is made to come."""
    await scene.world.advance(60)
    return await _kill_at_a_point(scene, "scheduler")


@fault("process")
async def kill_api(scene: Scene) -> int:
    """kill -9 at a failpoint of the api, in the middle of a request."""
    killing = asyncio.create_task(_kill_at_a_point(scene, "api"))
    for _ in range(20):
        if killing.done():
            break
        await scene.clients.order(scene.next_op("order-api"), account=f"a{scene.rng.randint(1, 12)}")
        await asyncio.sleep(0.2)
    return await killing


@fault("process")
async def stop_api(scene: Scene) -> int:
    """SIGSTOP of an api: requests dealt to it hang; reached when one of its transactions stood open."""
    members = scene.world.role("api")
    if not members:
        return 0
    member = scene.rng.choice(members)
    unknown = scene.clients.history.counts["info"]
    member.send(signal.SIGSTOP)
    try:
        await scene.world.until(lambda: scene.clients.history.counts["info"] > unknown, seconds=PATIENCE_SECONDS)
    finally:
        member.send(signal.SIGCONT)
    return int(scene.clients.history.counts["info"] > unknown)


@fault("process")
async def terminate_worker(scene: Scene) -> int:
    """SIGTERM: finish or give back at once; reached when it held leases."""
    member = await holder(scene)
    if member is None:
        return 0
    await scene.world.replace(member)
    return 1


@fault("process")
async def wall_clock_off(scene: Scene) -> int:
    """A worker whose own wall clock is an hour off; reached when it settled jobs."""
    member = scene.rng.choice(scene.world.role("worker") or [None])
    if member is None:
        return 0
    off = scene.rng.choice([-3600.0, 3600.0])
    await scene.world.replace(member, clock_off_seconds=off)
    settled = "SELECT count(*) FROM duly.executions WHERE worker LIKE %s AND outcome = 'done'"
    done = 0
    for _ in range(40):
        done = (await scene.world.ask(settled, [f"%:{member.pid}:%"]))[0][0]
        if done > 5:
            break
        await asyncio.sleep(0.1)
    await scene.world.replace(member, clock_off_seconds=0.0)
    return int(done)


@fault("process")
async def rolling_upgrade(scene: Scene) -> int:
    """One worker goes back to a version that does not know a name, work for that name waits, then it is upgraded."""
    workers = scene.world.role("worker")
    if not workers:
        return 0
    for member in workers:
        await scene.world.replace(member, version=1)
    op = scene.next_op("order-v2")
    await scene.clients.order(op, extra="chaos.v2", timer_ms=100)
    waiting = await scene.world.ask("SELECT count(*) FROM duly.jobs WHERE name = 'chaos.v2'")
    for member in workers:
        await scene.world.replace(member, version=2)
    return int(waiting[0][0] > 0)


# -- the database --------------------------------------------------------------------------------------------------

BUSY = """
SELECT pid, pg_terminate_backend(pid) FROM pg_stat_activity
WHERE datname = current_database() AND application_name LIKE 'duly%%' AND xact_start IS NOT NULL
  AND pid <> pg_backend_pid() AND (backend_xid IS NOT NULL OR random() < 0.05) LIMIT %s
"""


@fault("database")
async def terminate_backends(scene: Scene) -> int:
    """pg_terminate_backend of connections in the middle of a transaction."""
    for _ in range(80):
        found = await scene.world.ask(BUSY, [scene.rng.randint(1, 4)])
        if found:
            return len(found)
        await asyncio.sleep(0.02)
    return 0


@fault("database")
async def kill_backend(scene: Scene) -> int:
    """kill -9 of a backend: PostgreSQL drops every connection and recovers from its log."""
    find = """
        SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE 'duly%%'
        ORDER BY xact_start IS NULL, random() LIMIT 1"""
    found = await scene.world.ask(find)
    if not found:
        return 0
    os.kill(found[0][0], signal.SIGKILL)
    return await _came_back(scene)


@fault("database")
async def crash_postgres(scene: Scene) -> int:
    """pg_ctl -m immediate, a while of nothing, and a start on the same files."""
    await asyncio.to_thread(scene.world.server.crash)
    try:
        await asyncio.sleep(scene.rng.uniform(0.0, 2.0))
    finally:
        await asyncio.to_thread(scene.world.server.restart)
    return await _came_back(scene)


@fault("database")
async def kill_postmaster(scene: Scene) -> int:
    """SIGKILL to the postmaster."""
    scene.world.server.kill_postmaster()
    try:
        await asyncio.sleep(scene.rng.uniform(0.0, 1.0))
    finally:
        await asyncio.to_thread(scene.world.server.restart)
    return await _came_back(scene)


async def _came_back(scene: Scene) -> int:
    """Reached when work went on afterwards."""
    before = (await scene.world.ask("SELECT coalesce(max(seq), 0) FROM chaos.trace"))[0][0]
    for _ in range(100):
        if (await scene.world.ask("SELECT coalesce(max(seq), 0) FROM chaos.trace"))[0][0] > before:
            return 1
        await asyncio.sleep(0.1)
    return 0


PROBE = "INSERT INTO chaos.accounts (id) VALUES ('probe') ON CONFLICT (id) DO UPDATE SET seq = chaos.accounts.seq + 1"


@fault("database")
async def slow_disk(scene: Scene) -> int:
    """Every commit takes a tenth of a second longer; reached when one of ours was that slow."""
    world = scene.world
    await world.ask("ALTER SYSTEM SET commit_delay = 100000")
    await world.ask("ALTER SYSTEM SET commit_siblings = 0")
    try:
        await world.ask("SELECT pg_reload_conf()")
        slow = 0
        for _ in range(scene.rng.randint(8, 20)):
            slow += await asyncio.to_thread(_is_slow, world)
            await asyncio.sleep(0.1)
        return slow
    finally:
        await world.ask("ALTER SYSTEM RESET commit_delay")
        await world.ask("ALTER SYSTEM RESET commit_siblings")
        await world.ask("SELECT pg_reload_conf()")


def _is_slow(world: World) -> bool:
    """Whether the server delays commits, and delayed this one."""
    try:
        with psycopg.connect(world.dsn, autocommit=True, connect_timeout=5) as connection:
            delays = connection.execute("SHOW commit_delay").fetchone() == ("100000",)
            began = time.monotonic()
            connection.execute(PROBE)
            return delays and time.monotonic() - began >= 0.1
    except psycopg.OperationalError:
        return False


@fault("database")
async def clock_jump(scene: Scene) -> int:
    """The business clock jumps forward by minutes; reached when occurrences became due by it."""
    query = "SELECT count(*) FROM chaos.trace WHERE name LIKE 'chaos.every%%' AND what = 'accept'"
    before = (await scene.world.ask(query))[0][0]
    await scene.world.advance(scene.rng.randint(2, 7) * 60)
    for _ in range(60):
        if (after := (await scene.world.ask(query))[0][0]) > before:
            return int(after - before)
        await asyncio.sleep(0.1)
    return 0


# -- the wire ------------------------------------------------------------------------------------------------------


async def _spring(scene: Scene, trap: Trap) -> int:
    wanted = trap.left
    with scene.world.proxy.trap(trap):
        await scene.world.until(lambda: trap.hits.total() >= wanted, seconds=PATIENCE_SECONDS)
    return trap.hits.total()


@fault("wire")
async def lost_commit(scene: Scene) -> int:
    """COMMIT never arrives, of transactions that wrote: the api's, handlers', the relay's, the scheduler's."""
    return await _spring(scene, Trap(COMMIT, "there", scene.rng.randint(2, 6)))


@fault("wire")
async def lost_commit_reply(scene: Scene) -> int:
    """COMMIT takes effect, and nobody is told."""
    return await _spring(scene, Trap(COMMIT, "back", scene.rng.randint(2, 6)))


@fault("wire")
async def lost_claim_reply(scene: Scene) -> int:
    """Jobs are leased to a worker that never hears of it."""
    return await _spring(scene, Trap(CLAIM, "back", 2, frozenset({"duly-worker"})))


@fault("wire")
async def lost_settle_reply(scene: Scene) -> int:
    """A batch of jobs is settled, and its worker does not know."""
    return await _spring(scene, Trap(SETTLE, "back", 1, frozenset({"duly-settle"}), alone=True))


@fault("wire")
async def cut_connections(scene: Scene) -> int:
    """Every connection is cut at once; reached when transactions were open on some."""
    for _ in range(20):
        busy = scene.world.proxy.cut()
        if busy:
            return busy.total()
        await asyncio.sleep(0.1)
    return 0


@fault("wire")
async def half_open(scene: Scene) -> int:
    """Nothing moves on any connection for a while, then all of them are cut."""
    opened = scene.world.proxy.freeze(True)
    try:
        await asyncio.sleep(scene.rng.uniform(1.0, LEASE_SECONDS + 2))
    finally:
        await asyncio.to_thread(scene.world.proxy.cut)
        scene.world.proxy.freeze(False)
    return opened


@fault("wire")
async def slow_commits(scene: Scene) -> int:
    """Each COMMIT is late by some time, so that transactions stay open next to each other."""
    proxy, before = scene.world.proxy, scene.world.proxy.delayed
    proxy.commit_delay_seconds = scene.rng.uniform(0.05, 0.4)
    try:
        await asyncio.sleep(scene.rng.uniform(1.0, 3.0))
    finally:
        proxy.commit_delay_seconds = 0.0
    return proxy.delayed - before


@fault("wire")
async def full_pool(scene: Scene) -> int:
    """Slow requests take every connection of the api; reached when others were told 503 and when to come back."""
    told = scene.world.replies_503
    async with httpx2.AsyncClient(base_url=scene.world.url, timeout=8, trust_env=False, verify=False) as session:
        held = [asyncio.create_task(_hold(session)) for _ in range(24)]
        await scene.world.until(lambda: scene.world.replies_503 > told, seconds=PATIENCE_SECONDS)
        await asyncio.gather(*held)
    return scene.world.replies_503 - told


async def _hold(session: httpx2.AsyncClient) -> None:
    try:
        await session.post("/hold", params={"seconds": 3.5})
    except httpx2.TransportError:
        return


@fault("wire")
async def redelivery(scene: Scene) -> int:
    """Processed events are delivered again, as a broker or an operator does; reached when they were skipped."""
    again = """
        INSERT INTO duly.jobs (name, entity_id, event_id, order_key, run_at, due_at, created_at)
        SELECT 'consumer:' || p.consumer, e.aggregate_id, e.id, NULL, duly.now(), duly.now(), duly.now()
        FROM (SELECT * FROM duly.processed_events ORDER BY processed_at DESC LIMIT 200) p
        JOIN duly.events e ON e.id = p.event_id ORDER BY random() LIMIT 10 RETURNING id"""
    with_ids = await asyncio.to_thread(_once, scene.world, again)
    if not with_ids:
        return 0
    count = "SELECT count(*) FROM duly.executions WHERE outcome = 'duplicate'"
    for _ in range(50):
        if (skipped := (await scene.world.ask(count))[0][0]) > 0:
            return int(skipped)
        await asyncio.sleep(0.1)
    return 0


def _once(world: World, query: str) -> list[tuple[int]]:
    """A statement that may not be repeated blindly; a server that is away makes it none."""
    try:
        with psycopg.connect(world.dsn, autocommit=True, connect_timeout=5) as connection:
            return [(int(row[0]),) for row in connection.execute(query.encode()).fetchall()]
    except psycopg.OperationalError:
        return []
