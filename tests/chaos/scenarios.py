"""Short, focused runs: each shows the absence of some safeguard within seconds, and passes while they are all there."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tests.chaos.clients import Mix
from tests.chaos.faults import Scene
from tests.chaos.postgres import Server
from tests.chaos.proxy import COMMIT, Trap
from tests.chaos.run import Outcome, Plan, Run, Script
from tests.chaos.safeguards import SAFEGUARDS, Safeguard

FEW = {"worker": 2, "relay": 1, "api": 1}
QUIET = Mix(order=1, cancel=0, nudge=0, note=0, reuse=0, explode=0, extras=(), duplicates=0.0, pause_seconds=0.3)
RESCUED = "SELECT count(*) FROM duly.executions WHERE name = %s AND outcome = 'lost'"


# -- what happens ------------------------------------------------------------------------------------------------------


def zombie(extra: str, *, times: int = 2) -> Script:
    """A worker is stopped in the middle of this job, another takes over, and the first wakes up too late."""

    async def script(scene: Scene) -> None:
        world = scene.world
        for _ in range(times):
            op = scene.next_op("order-stall")
            await scene.clients.order(op, extra=extra)
            rescued = (await world.ask(RESCUED, [extra]))[0][0]
            pid = await _stalling(scene, op)
            member = next((m for m in world.role("worker") if m.pid == pid), None)
            if member is None:
                continue
            member.send(signal.SIGSTOP)
            try:
                for _ in range(100):
                    if (await world.ask(RESCUED, [extra]))[0][0] > rescued:
                        scene.reached += 1
                        break
                    await asyncio.sleep(0.05)
            finally:
                member.send(signal.SIGCONT)
            await asyncio.sleep(0.5)

    return script


async def _stalling(scene: Scene, op: str) -> int:
    """The process in which this job's handler has begun, as the witness has it."""
    path = scene.world.directory / "witness.log"
    for _ in range(200):
        lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
        if found := [int(line[4]) for line in lines if line[:2] == ["stalls", op]]:
            return found[0]
        await asyncio.sleep(0.02)
    return 0


def dies_at(role: str, point: str, *, minutes: int = 0) -> Script:
    """Each process of a role in turn kills itself at a step."""

    async def script(scene: Scene) -> None:
        for hit, member in enumerate(scene.world.role(role), 1):
            deaths = member.deaths
            await scene.world.replace(member, failpoints=f"{point}=kill9@{hit}")
            for _ in range(60):
                if member.deaths > deaths:
                    scene.reached += 1
                    break
                if minutes:
                    await scene.world.advance(60 * minutes)
                await asyncio.sleep(0.1 if not minutes else 0.5)
        await asyncio.sleep(1.0)

    return script


async def burst(scene: Scene) -> None:
    """Many timers become due at one instant, and every worker is told."""
    for _ in range(3):
        for _ in range(4):
            accounts = [f"a{number}" for number in range(1, 9)]
            calls = [scene.clients.order(scene.next_op("order-b"), account=a, timer_ms=60_000) for a in accounts]
            await asyncio.gather(*calls)
        await scene.world.advance(61)
        scene.reached += 1
        await asyncio.sleep(0.7)


async def jumps(scene: Scene) -> None:
    """The clock jumps by minutes, several times."""
    for minutes in (3, 1, 5, 2):
        await scene.world.advance(60 * minutes)
        scene.reached += 1
        await asyncio.sleep(1.2)


async def minutes_pass(scene: Scene) -> None:
    """Minute after minute, each of them told to all schedulers at once."""
    for _ in range(24):
        await scene.world.advance(60)
        scene.reached += 1
        await asyncio.sleep(0.25)


def loses(way: str, *, times: int) -> Script:
    """COMMITs of the api, lost on the way there or back."""

    async def script(scene: Scene) -> None:
        trap = Trap(COMMIT, way, times, frozenset({"duly"}))
        with scene.world.proxy.trap(trap):
            await scene.world.until(lambda: trap.hits.total() >= times, seconds=10)
        scene.reached += trap.hits.total()
        await asyncio.sleep(0.5)

    return script


def orders(*extras: str) -> Script:
    """These, and nothing else."""

    async def script(scene: Scene) -> None:
        for start in range(0, len(extras), 6):
            calls = [
                scene.clients.order(scene.next_op("order-x"), extra=extra, account=f"a{number}")
                for number, extra in enumerate(extras[start : start + 6], 1)
            ]
            await asyncio.gather(*calls)
        scene.reached += len(extras)
        await asyncio.sleep(1.0)

    return script


async def held(scene: Scene) -> None:
    """A poison event with others of its aggregate behind it, and a job that always fails."""
    await scene.clients.order(scene.next_op("order-held"), account="held1", poison=True, extra="chaos.raise")
    for _ in range(3):
        await scene.clients.order(scene.next_op("order-behind"), account="held1")
    scene.reached += 1
    await asyncio.sleep(1.0)


async def slow_commits(scene: Scene) -> None:
    """Each COMMIT is a little late, so that transactions on the same aggregate overlap."""
    scene.world.proxy.commit_delay_seconds = 0.04
    await asyncio.sleep(6.0)
    scene.world.proxy.commit_delay_seconds = 0.0
    scene.reached += scene.world.proxy.delayed


# -- the scenarios -----------------------------------------------------------------------------------------------------

_BASE = Plan(
    seconds=3.0,
    faults=(),
    processes=FEW,
    mix=QUIET,
    clients=2,
    drain_seconds=15.0,
    resolve_seconds=8.0,
    minute_seconds=3600.0,
)
_BUSY = Mix(pause_seconds=0.1)
SCENARIOS: Mapping[str, Plan] = {
    "busy": replace(_BASE, mix=_BUSY, clients=3, seconds=5.0, processes={"worker": 3, "relay": 1, "api": 2}),
    "zombie_done": replace(_BASE, clients=0, script=zombie("stall.done")),
    "zombie_raise": replace(_BASE, clients=0, script=zombie("stall.raise"), drain_seconds=25.0),
    "zombie_fail": replace(_BASE, clients=0, script=zombie("stall.fail")),
    "burst": replace(_BASE, clients=0, script=burst, processes={"worker": 4, "relay": 1, "api": 2}),
    "killer": replace(_BASE, script=orders("chaos.kill"), drain_seconds=30.0),
    "limited": replace(_BASE, clients=0, script=orders(*["chaos.limited"] * 24)),
    "dies_before_settling": replace(_BASE, clients=0, script=orders(*["chaos.settle"] * 4)),
    "long": replace(_BASE, clients=0, script=orders("stall.long", "stall.long"), drain_seconds=30.0),
    "poisoned": replace(_BASE, clients=0, script=held),
    "redelivered": replace(_BASE, faults=("redelivery",), seconds=4.0),
    "exploding": replace(_BASE, mix=replace(QUIET, explode=1)),
    "hot": replace(_BASE, script=slow_commits, clients=6, mix=replace(QUIET, accounts=2, pause_seconds=0.01),
                   processes={"worker": 3, "relay": 2, "api": 1}),
    "warm": replace(_BASE, script=slow_commits, clients=5, mix=replace(QUIET, accounts=8, pause_seconds=0.05)),
    "broker": replace(_BASE, mix=replace(QUIET, accounts=3, pause_seconds=0.02), clients=4, seconds=5.0, broker=True,
                      processes={"worker": 2, "relay": 3, "api": 1}, drain_seconds=25.0),
    "duplicated": replace(_BASE, mix=replace(QUIET, duplicates=1.0), processes={**FEW, "api": 2}),
    "api_dies": replace(_BASE, script=dies_at("api", "http.before_commit"), processes={**FEW, "api": 2}),
    "commit_reply_lost": replace(_BASE, mix=replace(QUIET, order=0, note=1), script=loses("back", times=4)),
    "commit_lost": replace(_BASE, script=loses("there", times=8)),
    "nudged": replace(_BASE, mix=replace(QUIET, order=0, nudge=1, entities=1, pause_seconds=0.05), clients=5,
                      script=slow_commits),
    "cancelled": replace(_BASE, mix=replace(QUIET, cancel=2, timer_ms=(1500, 2500), pause_seconds=0.1)),
    "cron": replace(_BASE, clients=0, script=minutes_pass, processes={**FEW, "scheduler": 3}),
    "cron_dies": replace(_BASE, clients=0, script=dies_at("scheduler", "tick.inserted", minutes=1),
                         processes={**FEW, "scheduler": 2}),
    "cron_jumps": replace(_BASE, clients=0, script=jumps, processes={**FEW, "scheduler": 2}),
}  # fmt: skip


# -- the proof ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Proof:
    """What came of switching one safeguard off."""

    safeguard: str
    promise: str
    scenario: str
    caught_by: list[str]
    seconds: float
    with_it: str  # the verdict of the same run with the safeguard on
    error: str = ""

    @property
    def holds(self) -> bool:
        """Whether its absence was noticed, and its presence was not."""
        return bool(self.caught_by) and self.with_it == "passed" and not self.error


class Bench:
    """Runs scenarios on one server, each in a database of its own."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.server = Server(home / "postgres", durable=False)
        self._calm: dict[str, Outcome] = {}
        self._number = 0

    def run(self, scenario: str, *, off: str = "", seed: int = 1) -> Outcome:
        """One scenario, once."""
        self._number += 1
        name = f"s{self._number}"
        plan = replace(SCENARIOS[scenario], safeguard_off=off, seed=seed)
        outcome = asyncio.run(Run(self.server, plan, self.home / f"{scenario}-{off or 'on'}", database=name).execute())
        self.server.drop_database(name)
        return outcome

    def with_all(self, scenario: str, *, seed: int = 1) -> Outcome:
        """The scenario with every safeguard on; the same for all that share it."""
        if scenario not in self._calm:
            self._calm[scenario] = self.run(scenario, seed=seed)
        return self._calm[scenario]

    def prove(self, safeguard: Safeguard, *, seed: int = 1) -> Proof:
        """On: passes. Off: caught."""
        calm = self.with_all(safeguard.scenario, seed=seed)
        began = time.monotonic()
        off = self.run(safeguard.scenario, off=safeguard.name, seed=seed)
        caught = [violation.check for violation in off.violations]
        error = "; ".join(map(str, calm.violations))
        return Proof(
            safeguard.name, safeguard.promise, safeguard.scenario, caught, round(time.monotonic() - began, 1),
            calm.verdict, error,
        )  # fmt: skip


def prove(names: Sequence[str], *, seed: int, build: Path) -> int:
    """All of them, or some; a table for people and one for machines."""
    home = Path(tempfile.mkdtemp(prefix="duly-safeguards-"))
    bench = Bench(home)
    proofs: list[Proof] = []
    try:
        bench.server.start()
        for safeguard in [SAFEGUARDS[name] for name in names] or SAFEGUARDS.values():
            proof = bench.prove(safeguard, seed=seed)
            proofs.append(proof)
            print(_line(proof), flush=True)
    finally:
        bench.server.stop(remove=True)
    build.mkdir(parents=True, exist_ok=True)
    table = "\n".join(_line(proof) for proof in proofs)
    (build / "safeguards.txt").write_text(table + "\n")
    (build / "safeguards.json").write_text(
        json.dumps([asdict(p) | {"holds": p.holds} for p in proofs], indent=2) + "\n"
    )
    missed = [proof.safeguard for proof in proofs if not proof.holds]
    print(f"{len(proofs) - len(missed)} of {len(proofs)} safeguards: off is caught, on passes")
    if missed:
        print(f"not proven: {', '.join(missed)}; the directories are in {home}")
        return 1
    shutil.rmtree(home, ignore_errors=True)
    return 0


def _line(proof: Proof) -> str:
    caught = ", ".join(proof.caught_by) or "NOT CAUGHT"
    on = "" if proof.with_it == "passed" else f"   ON: {proof.with_it} {proof.error}"
    return f"{proof.safeguard:<24} {proof.scenario:<22} {proof.seconds:>6.1f} s  {caught}{on}"
