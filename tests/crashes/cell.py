"""One cell of the crash matrix: a workload, a process that is broken at one point, a healthy one, and the checker."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from duly import Database
from duly.failpoints import ACTIONS, POINTS
from duly.testing import TestServer
from tests.crashes import shop
from tests.crashes.bench import Bench, Overdue, is_stopped, open_bench, until
from tests.crashes.checker import Promise, check, check_halfway
from tests.crashes.process import Order
from tests.crashes.workloads import LEADS_BY, SENSELESS, SMALL_BATCHES, WORKLOADS, Workload

HITS = {"first": 1, "later": 2}
LEASE_SECONDS = 1.0
BOUND_SECONDS = 15.0  # from the fault until all is done: a lease, a poll, a start, on a busy machine
REACH_SECONDS = 20.0
END_SECONDS = 20.0
SLEEP_SECONDS = 1.6  # longer than a lease
MEETING_SECONDS = 0.6  # how long the heir works on a job when the zombie is to come back meanwhile
FREED_AFTER_SECONDS = 1.3  # what PostgreSQL and Attendance do after a minute, we do after a lease
ONCE = {("migrate",), ("requeue",)}
SETTINGS = {
    "lease_seconds": LEASE_SECONDS, "poll_seconds": 0.1, "concurrency": 2, "shutdown_grace_seconds": 5,
    "job_timeout_seconds": 30, "pool_size": 5,
}  # fmt: skip
STANDING = (
    "(state LIKE 'idle in transaction%' OR application_name = 'duly-migrate' AND state = 'idle'"
    " OR state = 'active' AND wait_event = 'ClientRead')"
    f" AND state_change < clock_timestamp() - interval '{FREED_AFTER_SECONDS} seconds'"
)
STANDS = f"SELECT EXISTS (SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND {STANDING})"
TAKEN_OVER = "SELECT EXISTS (SELECT 1 FROM duly.jobs WHERE lost_by IS NOT NULL)"
OUR_CONNECTIONS = (
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE 'duly%'"
)
SESSIONS = """
SELECT pid, application_name, state, round(extract(epoch FROM clock_timestamp() - state_change), 1) AS seconds,
       wait_event_type, wait_event, pg_blocking_pids(pid), left(regexp_replace(query, '\\s+', ' ', 'g'), 100)
FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()
"""
SENT_NOT_NOTED = {"transport.sent", "relay.sent", "relay.before_commit", "relay.parked", "relay.unparked"}


@dataclass(frozen=True, order=True)
class Cell:
    """Point, workload, action and hit."""

    point: str
    workload: str
    action: str
    hit: str

    def __str__(self) -> str:
        return f"{self.point} / {self.workload} / {self.action} / {self.hit}"


@dataclass
class Outcome:
    """How a cell went: ``ok``, ``violated``, or ``unknown`` when its failpoint was never reached."""

    cell: Cell
    verdict: str
    seconds: float
    recovery_seconds: float
    violations: list[str] = field(default_factory=list)
    logs: dict[str, str] = field(default_factory=dict)


def all_cells() -> list[Cell]:
    """Every point with every action on both hits, with each workload that leads by it."""
    return [
        Cell(point, workload, action, hit)
        for point in sorted(POINTS)
        for workload in LEADS_BY.get(point, ())
        for action in ACTIONS
        for hit in HITS
        if (point, action) not in SENSELESS
    ]


def run_cell(server: TestServer, cell: Cell, directory: Path) -> Outcome:
    """Run one cell on a database of its own."""
    began = time.monotonic()
    workload = WORKLOADS[cell.workload]
    directory.mkdir(parents=True, exist_ok=True)
    with open_bench(server, directory, empty=workload.empty_database) as bench:
        trial = Trial(bench, cell, workload)
        promise = trial.promise
        violations = trial.violations
        try:
            trial.run()
        except Overdue as error:
            violations.append(str(error))
            violations += [f"session: {', '.join(map(str, row))}" for row in bench.rows(SESSIONS)]
        facts = bench.read_facts()
        facts.reached, facts.seconds, facts.endings = trial.reached, trial.recovery_seconds, trial.endings
        facts.leftovers = [said for said, question in workload.questions if bench.value(question)]
        violations += check(promise, facts)
    verdict = "ok" if not violations else "violated" if trial.reached else "unknown"
    logs = {log.name: log.read_text() for log in sorted(directory.glob("*.log"))} if violations else {}
    return Outcome(cell, verdict, time.monotonic() - began, trial.recovery_seconds, violations, logs)


class Trial:
    """The course of one cell."""

    def __init__(self, bench: Bench, cell: Cell, workload: Workload) -> None:
        self.bench = bench
        self.cell = cell
        self.workload = workload
        self.reached = False
        self.recovery_seconds = 0.0
        self.endings: dict[str, tuple[int | None, int]] = {}
        self._fault_at = 0.0
        self._log = bench.directory / "victim.log"
        self.violations: list[str] = []
        self.promise = self._prepare()

    def _prepare(self) -> Promise:
        """The workload's work, on a database that knows its consumers."""
        if self.workload.needs_broker:
            self.bench.open_broker()
        if not self.workload.empty_database:
            asyncio.run(_register(self.bench.dsn, self.workload.kind))
        promise = self.workload.prepare(self.bench)
        promise.bound_seconds = BOUND_SECONDS
        promise.is_clean = self._is_calm
        if promise.to_broker and self.cell.action in ("kill9", "term", "raise"):
            again = self.cell.point in SENT_NOT_NOTED and self.cell.action != "term"
            promise.most_repeated = SMALL_BATCHES["relay_batch"] if again else 0
        return promise

    @property
    def _is_calm(self) -> bool:
        """Nobody may lose a lease: an orderly end, or an error in one heartbeat of many."""
        is_heartbeat = self.cell.point.startswith("heartbeat.")
        return self.cell.action == "term" or (self.cell.action == "raise" and is_heartbeat)

    def run(self) -> None:
        """Break the process, let the work be finished, end everybody."""
        armed = replace(self._order("victim"), failpoints=";".join(self._specs()))
        self.bench.start("victim", replace(armed, **self.workload.victim))
        self._await_fault()
        self._fault_at = time.monotonic()
        _COURSES[self.cell.action](self)
        self.recovery_seconds = time.monotonic() - self._fault_at
        self._end_everybody()

    def _specs(self) -> Iterator[str]:
        action = f"sleep:{SLEEP_SECONDS}" if self.cell.action == "sleep" else self.cell.action
        yield f"{self.cell.point}={action}@{HITS[self.cell.hit]}"
        if self.workload.also:
            yield self.workload.also
        if self.cell.action == "stop" and not self.cell.point.startswith("heartbeat."):
            yield f"heartbeat.before=sleep:{SLEEP_SECONDS}"  # a zombie that nobody tells: only the fence is left

    def _order(self, name: str) -> Order:
        lease_seconds = self.workload.clean_lease_seconds if self._is_calm else LEASE_SECONDS
        waits_for_lane = self.cell.action in ("kill9", "stop", "sleep")  # the others must not have to
        return Order(
            dsn=self.bench.dsn,
            log=str(self.bench.directory / f"{name}.log"),
            duties=self.workload.duties,
            kind=self.workload.kind,
            settings=SETTINGS | self.workload.settings | {"lease_seconds": lease_seconds},
            lane_lease_seconds=LEASE_SECONDS if waits_for_lane else 60.0,
            broker_port=self.bench.broker.port if self.bench.broker else 0,
        )

    # -- the fault ----------------------------------------------------------------------------------------------

    def _await_fault(self) -> None:
        victim = self.bench.processes["victim"]
        line = f"failpoint {self.cell.point}: {self.cell.action}\n"

        def has_happened() -> bool:
            self.workload.nudge(self.bench)
            self.reached = line in self._log.read_text()
            return self.reached or not victim.is_alive()

        until(has_happened, REACH_SECONDS, "the failpoint is reached")
        if not self.reached:
            self.reached = line in self._log.read_text()
        if self.cell.action == "stop":
            until(lambda: is_stopped(victim), REACH_SECONDS, "the process stands still")
        if self.cell.action == "kill9":
            self.endings["victim"] = (self.bench.wait("victim", END_SECONDS), -signal.SIGKILL)

    def after_kill9(self) -> None:
        """Another one takes over when the lease is over."""
        self._look_halfway()
        self._send_heir()
        self._await_drained()

    def after_stop(self) -> None:
        """Another one takes over. At the first hit it does everything, and what the zombie has locked is freed by the
        server; at a later one the zombie comes back while the other is at it. What it writes must be refused, or be
        the only one."""
        self._send_heir()
        victim = self.bench.processes["victim"]
        assert victim.pid is not None
        if self.cell.hit == "first":
            self._await_drained(meanwhile=lambda: self.bench.terminate(STANDING))
        else:
            until(lambda: self._is_drained() or self._they_meet(), BOUND_SECONDS, "the two meet")
        os.kill(victim.pid, signal.SIGCONT)
        if self.workload.duties in ONCE:
            until(lambda: not victim.is_alive(), END_SECONDS, "the zombie ends")
        self._await_drained()

    def _they_meet(self) -> bool:
        """Whether the heir holds what the zombie still thinks it holds, or waits for what it has locked."""
        taken_over = not self.workload.empty_database and self.bench.value(TAKEN_OVER)
        return bool(taken_over or self.bench.value(STANDS))

    def after_term(self) -> None:
        """It ends by itself, and leaves nothing that one would have to wait for."""
        code = self.bench.wait("victim", END_SECONDS)
        expected = 128 + signal.SIGTERM if self.workload.duties in ONCE and code else 0
        self.endings["victim"] = (code, expected)
        if not self.workload.empty_database and self.bench.value(
            "SELECT count(*) FROM duly.jobs WHERE leased_by <> ''"
        ):
            self.violations.append("a lease is left behind by a process that was asked to end")
        self._look_halfway()
        self._send_heir()
        self._await_drained()

    def after_error(self) -> None:
        """The same process goes on by itself; one that runs once is run again."""
        if self.workload.duties in ONCE:
            code = self.bench.wait("victim", END_SECONDS)
            self.endings["victim"] = (code, 0 if self.cell.action == "cut" and code == 0 else 1)  # it was done by then
            self._send_heir()
        self._await_drained()

    def after_sleep(self) -> None:
        """Another one comes while it sleeps; both go on."""
        self._send_heir()
        self._await_drained()
        if self.workload.duties in ONCE:
            self.endings["victim"] = (self.bench.wait("victim", END_SECONDS), 0)

    # -- the rest -----------------------------------------------------------------------------------------------

    def _look_halfway(self) -> None:
        """The process is dead; as soon as the server knows, what is there must be whole."""
        until(lambda: not self.bench.value(OUR_CONNECTIONS), BOUND_SECONDS, "PostgreSQL has noticed the end")
        if not self.workload.empty_database:
            self.violations += check_halfway(self.promise, self.bench.read_facts())

    def _send_heir(self) -> None:
        is_met = (self.cell.action, self.cell.hit) == ("stop", "later")
        self.bench.start("heir", replace(self._order("heir"), work_seconds=MEETING_SECONDS if is_met else 0.0))

    def _await_drained(self, meanwhile: Callable[[], Any] = lambda: None) -> None:
        def is_over() -> bool:
            meanwhile()
            self.workload.meanwhile(self.bench)
            return self._is_drained()

        until(is_over, BOUND_SECONDS, "all work is done")

    def _is_drained(self) -> bool:
        if self.workload.duties in ONCE:
            last = self.bench.processes.get("heir")
            if last is None or last.is_alive():
                return False
            self.endings["heir"] = (last.exitcode, 0)
            if self.workload.then and "rest" not in self.bench.processes:
                self.bench.start("rest", replace(self._order("rest"), duties=self.workload.then))
        return self.bench.clients_done and bool(self.bench.value(self.workload.drained))

    def _end_everybody(self) -> None:
        for name in self.bench.processes:
            if name not in self.endings:
                expected = 0
                code = self.bench.end(name, END_SECONDS)
                if self.workload.duties in ONCE and name == "victim" and self.cell.action == "stop":
                    expected = code if code in (0, 1) else 0  # done, or refused: both are right
                self.endings[name] = (code, expected)


_COURSES: dict[str, Callable[[Trial], None]] = {
    "kill9": Trial.after_kill9,
    "stop": Trial.after_stop,
    "term": Trial.after_term,
    "raise": Trial.after_error,
    "cut": Trial.after_error,
    "sleep": Trial.after_sleep,
}


async def _register(dsn: str, kind: str) -> None:
    db = Database(dsn)
    await shop.create(kind, shop.Manner(db)).prepare(db)
    await db.close()
