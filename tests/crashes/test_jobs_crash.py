"""The worker killed, failed, stopped and asked to end at every step: each effect once, nothing lost, nothing stuck.

A process whose failpoint was never reached ends with a code of its own, and fails its test (E3.4, E3.5, E3.11).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from duly.db import Database, Tx
from duly.jobs.handlers import Handler, JobContext
from duly.jobs.worker import Worker
from tests.engine.jobs.process import Order, seen, start
from tests.engine.jobs.witness import (
    EFFECT,
    each_once,
    effects,
    expire_leases,
    is_empty,
    make_effects,
    outcomes,
    schedule_numbers,
    until,
    working,
)  # fmt: skip
from tests.support import handlers, rows, value

JOBS = 6
PATIENCE_SECONDS = 20
IN_TRANSACTION = [
    "worker.before_claim", "worker.claimed", "worker.before_handler", "worker.handler_done", "worker.before_settle",
    "worker.before_commit", "worker.committed",
]  # fmt: skip
IN_THREAD = ["worker.before_handler", "worker.handler_done", "worker.before_commit", "worker.committed"]
KINDS_AND_POINTS = [("tx", point) for point in IN_TRANSACTION] + [("sync", point) for point in IN_THREAD]
SETTLED_LATER = ["worker.before_handler", "worker.handler_done", "worker.before_settle", "worker.settled"]
HEARTBEAT = ["heartbeat.before", "heartbeat.after"]
each_hit = pytest.mark.parametrize("hit", [1, 2])

Prepare = Callable[..., Order]


@pytest.fixture
def prepare(dsn: str, tmp_path: Path) -> Iterator[Prepare]:
    """Makes the effects table and the jobs, and the order for a process over them."""
    make_effects(dsn)
    schedule_numbers(dsn, "work", JOBS)

    def make(failpoint: str, **more: Any) -> Order:
        return Order(dsn, failpoint, str(tmp_path / "report"), **more)

    yield make
    for log in tmp_path.glob("*.log"):
        print(log.read_text())


async def work(ctx: JobContext, tx: Tx) -> None:
    """What the process does, done by its successor."""
    await tx.execute(text(EFFECT), {"entity_id": ctx.entity_id, "run": "successor"})


def work_sync(ctx: JobContext, tx: Session) -> None:
    """The same in a thread."""
    tx.execute(text(EFFECT), {"entity_id": ctx.entity_id, "run": "successor"})


async def drain(db: Database, known: dict[str, Handler]) -> None:
    """A second worker works off everything that is due and not held."""
    while (await Worker(db, known).run_once()).done:
        pass


async def ends(order: Order, *, with_code: int) -> None:
    """Run the process to its end, which must be the expected one."""
    process = start(order)
    try:
        await until(lambda: not process.is_alive(), seconds=PATIENCE_SECONDS, what="the process ends")
    finally:
        if process.is_alive():
            process.kill()
        process.join()
    assert process.exitcode == with_code
    gone = (
        "SELECT count(*) = 0 FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE 'duly%'"
    )
    await until(lambda: value(order.dsn, gone), what="PostgreSQL has noticed")


def check(dsn: str) -> None:
    """Every effect once, no row left, nobody's run lost without a trace."""
    assert effects(dsn) == each_once(JOBS)
    assert is_empty(dsn)
    assert value(dsn, "SELECT count(*) FROM duly.dead_letters") == 0
    assert sorted(entity for entity, outcome, _ in outcomes(dsn) if outcome == "done") == sorted(each_once(JOBS))


# -- kill -9 -------------------------------------------------------------------------------------------------------


@each_hit
@pytest.mark.parametrize("point", IN_TRANSACTION)
async def test_a_killed_worker_is_replaced_and_each_effect_happens_once(
    db: Database, dsn: str, prepare: Prepare, point: str, hit: int
) -> None:
    """E3.5, E3.11: killed at any step; after its leases have ended, another worker does the rest."""
    await ends(prepare(f"{point}=kill9@{hit}"), with_code=-signal.SIGKILL)
    expire_leases(dsn)
    await drain(db, handlers(work))
    check(dsn)


async def test_another_worker_takes_over_by_itself_when_the_lease_ends(
    db: Database, dsn: str, prepare: Prepare
) -> None:
    """E3.5: nobody expires anything by hand here: a running worker finds the job within lease and poll."""
    await ends(prepare("worker.before_handler=kill9", lease_seconds=1.0), with_code=-signal.SIGKILL)
    async with working(Worker(db, handlers(work))):
        await until(lambda: is_empty(dsn), seconds=10, what="the dead worker's jobs are taken over")
    check(dsn)
    assert "lost" in {outcome for _, outcome, _ in outcomes(dsn)}


@pytest.mark.parametrize("point", IN_THREAD)
async def test_a_killed_worker_of_synchronous_handlers_is_replaced(
    db: Database, dsn: str, prepare: Prepare, point: str
) -> None:
    """E3.5, E3.11: the same in threads."""
    await ends(prepare(f"{point}=kill9", kind="sync"), with_code=-signal.SIGKILL)
    expire_leases(dsn)
    known = handlers(work_sync)
    await drain(db, {"work": known["work_sync"]})
    check(dsn)


@each_hit
@pytest.mark.parametrize("point", HEARTBEAT)
async def test_a_worker_killed_in_its_heartbeat_is_replaced(
    db: Database, dsn: str, prepare: Prepare, point: str, hit: int
) -> None:
    """E3.5: killed while it renews; what it was doing is rolled back and done by another."""
    order = prepare(f"{point}=kill9@{hit}", lease_seconds=0.9, work_seconds=5)
    await ends(order, with_code=-signal.SIGKILL)
    expire_leases(dsn)
    await drain(db, handlers(work))
    check(dsn)


@each_hit
@pytest.mark.parametrize("point", SETTLED_LATER)
async def test_a_killed_worker_without_transactions_loses_nothing(
    db: Database, dsn: str, prepare: Prepare, point: str, hit: int
) -> None:
    """E3.5: without a transaction an effect happens at least once; twice only for a run that was never settled."""
    await ends(prepare(f"{point}=kill9@{hit}", kind="plain"), with_code=-signal.SIGKILL)
    settled = {entity for entity, outcome, _ in outcomes(dsn) if outcome == "done"}
    if point == "worker.settled":
        assert settled
    expire_leases(dsn)
    await drain(db, handlers(work))
    assert is_empty(dsn)
    found = effects(dsn)
    assert set(found) == set(each_once(JOBS))
    assert all(found[entity] == 1 for entity in settled)
    assert max(found.values()) <= 2


async def test_a_worker_killed_after_it_gave_back_leaves_those_jobs_free(
    db: Database, dsn: str, prepare: Prepare
) -> None:
    """E3.5: what was released is nobody's; only the one that ran waits for its lease."""
    order = prepare("worker.released=kill9", stop_at_first_job=True, concurrency=1, work_seconds=5)
    await ends(order, with_code=-signal.SIGKILL)
    assert rows(dsn, "SELECT count(*) FROM duly.jobs WHERE lease_token IS NOT NULL") == [(1,)]
    await drain(db, handlers(work))
    assert sum(effects(dsn).values()) == JOBS - 1
    expire_leases(dsn)
    await drain(db, handlers(work))
    check(dsn)


# -- an error ------------------------------------------------------------------------------------------------------


@each_hit
@pytest.mark.parametrize(("kind", "point"), KINDS_AND_POINTS)
async def test_an_error_at_any_step_costs_no_effect(
    db: Database, dsn: str, prepare: Prepare, point: str, hit: int, kind: Any
) -> None:
    """E3.9, E3.11: the process survives it; what it dropped is picked up; each effect happens once."""
    order = prepare(f"{point}=raise@{hit}", forever=False, kind=kind)
    await ends(order, with_code=0)
    assert seen(order) >= hit
    expire_leases(dsn)
    await drain(db, handlers(work))
    check(dsn)


@each_hit
@pytest.mark.parametrize("point", HEARTBEAT)
async def test_an_error_in_the_heartbeat_does_not_end_it(
    db: Database, dsn: str, prepare: Prepare, point: str, hit: int
) -> None:
    """E3.5: the next beat renews; nobody loses a lease for it."""
    order = prepare(f"{point}=raise@{hit}", forever=False, lease_seconds=1.5, work_seconds=1.9, concurrency=JOBS)
    await ends(order, with_code=0)
    assert seen(order) > hit
    check(dsn)
    assert [retry_count for _, _, retry_count in outcomes(dsn)] == [0] * JOBS


@each_hit
@pytest.mark.parametrize("point", SETTLED_LATER)
async def test_an_error_around_a_settlement_without_transactions_loses_nothing(
    db: Database, dsn: str, prepare: Prepare, point: str, hit: int
) -> None:
    """E3.5: settling goes on after any error; the worker neither hangs nor forgets."""
    order = prepare(f"{point}=raise@{hit}", forever=False, kind="plain")
    await ends(order, with_code=0)
    assert seen(order) >= hit
    assert is_empty(dsn)
    found = effects(dsn)
    assert set(found) == set(each_once(JOBS))
    assert sum(found.values()) <= JOBS + 1


async def test_an_error_while_giving_back_does_not_hold_up_the_stop(db: Database, dsn: str, prepare: Prepare) -> None:
    """E3.5: the stop ends in its time all the same."""
    order = prepare("worker.released=raise", stop_at_first_job=True, concurrency=1, work_seconds=0.1)
    await ends(order, with_code=0)
    assert seen(order) == 1
    expire_leases(dsn)
    await drain(db, handlers(work))
    check(dsn)


# -- SIGTERM -------------------------------------------------------------------------------------------------------


@each_hit
@pytest.mark.parametrize("point", IN_TRANSACTION)
async def test_a_worker_asked_to_end_at_any_step_leaves_no_lease_behind(
    db: Database, dsn: str, prepare: Prepare, point: str, hit: int
) -> None:
    """E3.5: it finishes or gives back at once; the next worker waits for no lease, and counts no attempt."""
    await ends(prepare(f"{point}=term@{hit}"), with_code=0)
    assert rows(dsn, "SELECT count(*) FROM duly.jobs WHERE lease_token IS NOT NULL") == [(0,)]
    await drain(db, handlers(work))
    check(dsn)
    assert {retry_count for _, _, retry_count in outcomes(dsn)} == {0}


@pytest.mark.parametrize("point", [*HEARTBEAT, "worker.settled"])
async def test_a_worker_asked_to_end_beside_its_handlers_leaves_no_lease_behind(
    db: Database, dsn: str, prepare: Prepare, point: str
) -> None:
    """E3.5: also when the request comes while it renews or settles."""
    if point == "worker.settled":
        order = prepare(f"{point}=term", kind="plain")
    else:
        order = prepare(f"{point}=term", lease_seconds=0.9, work_seconds=0.6)
    await ends(order, with_code=0)
    assert rows(dsn, "SELECT count(*) FROM duly.jobs WHERE lease_token IS NOT NULL") == [(0,)]
    await drain(db, handlers(work))
    check(dsn)


# -- SIGSTOP, past the lease, then SIGCONT -------------------------------------------------------------------------


def is_stopped(pid: int) -> bool:
    """Whether the process stands still, as Linux sees it."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@pytest.mark.parametrize(("kind", "point"), KINDS_AND_POINTS[1:])
async def test_a_worker_that_stood_still_past_its_lease_is_fenced(
    db: Database, dsn: str, prepare: Prepare, point: str, kind: Any
) -> None:
    """E3.5: its jobs were done by another meanwhile; what it still writes for them rolls back."""
    process = start(prepare(f"{point}=stop", kind=kind))
    try:
        pid = process.pid
        assert pid is not None
        await until(lambda: is_stopped(pid), seconds=PATIENCE_SECONDS, what="the process stands still")
        expire_leases(dsn)
        await drain(db, handlers(work))
        os.kill(pid, signal.SIGCONT)
        await until(lambda: is_empty(dsn), what="the rest is done")
        os.kill(pid, signal.SIGTERM)
        await until(lambda: not process.is_alive(), what="the process ends")
    finally:
        if process.is_alive():
            process.kill()
        process.join()
    assert process.exitcode == 0
    check(dsn)
