"""Worker processes to kill: real and separate, forked from a server that has imported everything already."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
import sys
from dataclasses import asdict, dataclass, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

from sqlalchemy import text
from sqlalchemy.orm import Session

from duly import failpoints
from duly.db import Database, Tx
from duly.jobs.handlers import Handler, JobContext
from duly.jobs.worker import Worker
from duly.settings import Settings
from tests.engine.jobs.witness import EFFECT
from tests.support import handlers

Kind = Literal["tx", "sync", "plain"]
NEVER_REACHED = 77  # the queue ran empty, and nothing had happened to the process

_forkserver = multiprocessing.get_context("forkserver")
_forkserver.set_forkserver_preload([__name__])


@dataclass(frozen=True)
class Order:
    """What such a process is to do, and how it is to end."""

    dsn: str
    failpoints: str = ""
    report: str = ""
    kind: Kind = "tx"
    limit: int | None = None
    lease_seconds: float = 60.0
    work_seconds: float = 0.0
    concurrency: int = 2
    stop_at_first_job: bool = False
    forever: bool = True  # until a signal; otherwise until nothing is due


def start(order: Order) -> BaseProcess:
    """The process, running."""
    process = _forkserver.Process(target=_main, args=(asdict(order),), daemon=True)
    process.start()
    return process


def run(order: Order, *, seconds: float = 20.0) -> int | None:
    """Run the process to its end; its exit code (negative: the signal)."""
    process = start(order)
    process.join(seconds)
    if process.is_alive():
        process.kill()
        process.join()
        raise AssertionError(f"the process did not end within {seconds:g} s")
    return process.exitcode


def seen(order: Order) -> int:
    """How often the process, before it ended, came by its failpoint."""
    return int(json.loads(Path(order.report).read_text())["seen"])


def _main(given: dict[str, Any]) -> None:
    order = Order(**given)
    with Path(order.report + ".log" if order.report else os.devnull).open("w") as log:
        os.dup2(log.fileno(), sys.stdout.fileno())
        os.dup2(log.fileno(), sys.stderr.fileno())
    failpoints.arm(order.failpoints)
    code = asyncio.run(_work(order))
    if order.report:
        name = order.failpoints.partition("=")[0]
        Path(order.report).write_text(json.dumps({"seen": failpoints._armed[name].seen}))
    os._exit(code)


async def _work(order: Order) -> int:
    db = Database(order.dsn, settings=Settings(shutdown_grace_seconds=5, job_timeout_seconds=30))
    stop, signalled = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def receive() -> None:
        signalled.set()
        stop.set()

    loop.add_signal_handler(signal.SIGTERM, receive)
    worker = Worker(db, _handlers(db, order, stop), concurrency=order.concurrency, lease_seconds=order.lease_seconds)
    if order.forever:
        idle = asyncio.create_task(_stop_when_idle(db, stop))
        await worker.run(stop)
        idle.cancel()
        await db.close()
        return 0 if signalled.is_set() or order.stop_at_first_job else NEVER_REACHED
    for _ in range(20):
        try:
            if not (await worker.run_once()).done:
                break
        except failpoints.FailpointHit:
            continue
    await db.close()
    return 0


async def _stop_when_idle(db: Database, stop: asyncio.Event) -> None:
    connection = await db.connect(application="idle watch")
    while await connection.fetchval("SELECT count(*) FROM duly.jobs"):
        await asyncio.sleep(0.05)
    await asyncio.sleep(0.3)  # what stands after the last commit is reached by then
    stop.set()


def _handlers(db: Database, order: Order, stop: asyncio.Event) -> dict[str, Handler]:
    def note() -> None:
        if order.stop_at_first_job:
            stop.set()

    async def tx(ctx: JobContext, tx: Tx) -> None:
        note()
        await tx.execute(text(EFFECT), {"entity_id": ctx.entity_id, "run": str(os.getpid())})
        await asyncio.sleep(order.work_seconds)

    def sync(ctx: JobContext, tx: Session) -> None:
        tx.execute(text(EFFECT), {"entity_id": ctx.entity_id, "run": str(os.getpid())})

    async def plain(ctx: JobContext) -> None:
        async with db.transaction() as own:
            await own.execute(text(EFFECT), {"entity_id": ctx.entity_id, "run": str(os.getpid())})

    async def poison() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    made = handlers(tx, sync, plain, poison, backoff_seconds=[0], limit=order.limit)
    return {"work": replace(made[order.kind], name="work"), "poison": made["poison"]}
