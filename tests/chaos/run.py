"""One run: start everything, let clients work and faults happen, heal, drain, write down the facts, check."""

from __future__ import annotations

import asyncio
import random
import signal
import sqlite3
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from tests.chaos import facts
from tests.chaos.checker import Violation, check
from tests.chaos.clients import Clients, Mix
from tests.chaos.faults import PAUSES, Scene
from tests.chaos.history import History
from tests.chaos.poison import ALL_FAULTS
from tests.chaos.postgres import Server
from tests.chaos.world import World

READY_SECONDS = 120.0
MAX_DRAIN_SECONDS = 900.0
PROCESSES: Mapping[str, int] = {"worker": 3, "relay": 2, "scheduler": 2, "api": 2}
LEFT = """
SELECT (SELECT count(*) FROM duly.outbox)
     + (SELECT count(*) FROM duly.jobs j WHERE NOT (waits = 'behind' AND EXISTS (
            SELECT 1 FROM duly.dead_letters d WHERE d.name = j.name AND d.order_key = j.order_key)))
"""
Script = Callable[[Scene], Coroutine[Any, Any, None]]


@dataclass(frozen=True)
class Plan:
    """What a run is made of."""

    seed: int = 1
    seconds: float = 60.0
    faults: Sequence[str] = tuple(ALL_FAULTS)
    processes: Mapping[str, int] = field(default_factory=lambda: dict(PROCESSES))
    mix: Mix = field(default_factory=Mix)
    clients: int = 6
    safeguard_off: str = ""
    minute_seconds: float = 4.0  # how often the business clock's minute hand moves
    drain_seconds: float = 100.0  # the stated bound without any progress: sweeps run each minute
    resolve_seconds: float = 45.0  # until every client knows
    script: Script | None = None  # what a scenario does instead of faults by chance
    settings: Mapping[str, Any] = field(default_factory=dict)
    broker: bool = False
    pause: float = 1.0  # between faults, in parts of what each lane is used to


@dataclass
class Outcome:
    """What came of it."""

    violations: list[Violation]
    reached: dict[str, int]
    tried: dict[str, int]
    counts: dict[str, int]
    seconds: float
    drain_seconds: float
    directory: Path

    @property
    def never_reached(self) -> list[str]:
        """Faults that were wanted and never happened: the run proves nothing about them."""
        return sorted(name for name, times in self.reached.items() if not times)

    @property
    def verdict(self) -> str:
        """passed, failed or unknown."""
        return "failed" if self.violations else "unknown" if self.never_reached else "passed"


class Run:
    """One run of a plan on a server."""

    def __init__(self, server: Server, plan: Plan, directory: Path, *, database: str = "chaos") -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.plan, self.directory = plan, directory
        self.world = World(server, database, directory, safeguard_off=plan.safeguard_off)
        self.history = History(directory / "history.jsonl")
        self.clients = Clients(self.world, self.history, seed=plan.seed, mix=plan.mix)
        self.reached = dict.fromkeys(plan.faults, 0)
        self.tried = dict.fromkeys(plan.faults, 0)

    async def execute(self) -> Outcome:
        """All of it; whatever happens, every process ends."""
        began = time.monotonic()
        try:
            self.world.start(self.plan.processes, settings=dict(self.plan.settings), broker=self.plan.broker)
            await self._until_ready()
            minutes = asyncio.create_task(self._move_the_minute_hand())
            self.clients.start(self.plan.clients)
            await self._disturb()
            await self._heal()
            await self.clients.stop()
            minutes.cancel()
            await self._disable_schedules()
            unresolved = await self.clients.resolve(seconds=self.plan.resolve_seconds)
            drained = await self._drain()
        finally:
            await self._heal()
            await self.world.stop()
            self.history.close()
        violations = await asyncio.to_thread(self._check, unresolved)
        counts = dict(self.history.counts) | {"deaths": sum(m.deaths for m in self.world.members.values())}
        return Outcome(
            violations, self.reached, self.tried, counts, time.monotonic() - began, drained, self.directory
        )  # fmt: skip

    async def _until_ready(self) -> None:
        deadline = time.monotonic() + READY_SECONDS
        async with httpx2.AsyncClient(base_url=self.world.url, timeout=2, trust_env=False, verify=False) as session:
            while time.monotonic() < deadline:
                try:
                    if (await session.get("/readyz")).status_code == 200:
                        return
                except httpx2.TransportError:
                    await asyncio.sleep(0.1)
        raise TimeoutError("the api did not become ready")

    async def _move_the_minute_hand(self) -> None:
        while True:
            await asyncio.sleep(self.plan.minute_seconds)
            await self.world.advance(60)

    # -- faults -------------------------------------------------------------------------------------------------

    async def _disturb(self) -> None:
        lanes: dict[str, list[str]] = {}
        for name in self.plan.faults:
            lanes.setdefault(ALL_FAULTS[name].lane, []).append(name)
        until = time.monotonic() + self.plan.seconds
        work = [self._lane(lane, names, until) for lane, names in sorted(lanes.items())]
        scene = self._scene("script")
        if self.plan.script is not None:
            work.append(self.plan.script(scene))
        elif not lanes:
            work.append(asyncio.sleep(self.plan.seconds))
        async with asyncio.TaskGroup() as together:  # when the harness fails, every fault is undone
            for one in work:
                together.create_task(one)
        if self.plan.script is not None:
            self.tried["scenario"], self.reached["scenario"] = 1, scene.reached

    def _scene(self, lane: str) -> Scene:
        return Scene(self.world, self.clients, random.Random(f"{self.plan.seed} {lane}"))

    async def _lane(self, lane: str, names: Sequence[str], until: float) -> None:
        """Rounds of all faults of a lane, each round in an order of its own, until the time is over.

        Each is tried at least once, and once more at the end if it was not reached.
        """
        scene = self._scene(lane)
        chance = random.Random(f"{self.plan.seed} {lane} order")
        while time.monotonic() < until:
            order = list(names)
            chance.shuffle(order)
            for name in order:
                if time.monotonic() < until or not self.tried[name]:
                    await self._try(scene, name)
                    await asyncio.sleep(chance.uniform(*PAUSES[lane]) * self.plan.pause)
        for name in names:
            for _ in range(3):
                if not self.reached[name]:
                    await self._try(scene, name)

    async def _try(self, scene: Scene, name: str) -> None:
        self.tried[name] += 1
        scene.rng = random.Random(f"{self.plan.seed} {name} {self.tried[name]}")
        began = time.monotonic()
        reached = await ALL_FAULTS[name].do(scene)
        self.reached[name] += reached
        self.history.write("fault", name, "fault", reached=reached, seconds=round(time.monotonic() - began, 2))

    # -- the end ------------------------------------------------------------------------------------------------

    async def _heal(self) -> None:
        self.world.proxy.freeze(False)
        await asyncio.to_thread(self.world.server.restart)
        for member in self.world.members.values():
            member.send(signal.SIGCONT)

    async def _disable_schedules(self) -> None:
        """What was due is fired first, so that the last occurrence is a whole one."""
        await asyncio.sleep(1.0 if self.plan.processes.get("scheduler") else 0.0)
        await self.world.ask("UPDATE duly.schedules SET enabled = false")

    async def _drain(self) -> float:
        """Until nothing is left, or for too long no less than before: a backlog takes its time, what is stuck stays."""
        began = progress_at = time.monotonic()
        least = sys.maxsize
        while left := (await self.world.ask(LEFT))[0][0]:
            now = time.monotonic()
            if left < least:
                least, progress_at = left, now
            if now - progress_at > self.plan.drain_seconds or now - began > MAX_DRAIN_SECONDS:
                break
            await asyncio.sleep(0.1 if left < 100 else 0.3)
        return time.monotonic() - began

    def _check(self, unresolved: int) -> list[Violation]:
        path = self.directory / "facts.sqlite"
        facts.collect(
            path, dsn=self.world.dsn, history_path=self.history.path,
            witness_path=self.directory / "witness.log",
            run={"unexpected": self.world.unexpected, "unresolved": unresolved, "seed": self.plan.seed,
                 "calm": not self.plan.faults and self.plan.script is None, "broker": self.plan.broker},
        )  # fmt: skip
        connection = sqlite3.connect(path)
        try:
            return check(connection)
        finally:
            connection.close()
