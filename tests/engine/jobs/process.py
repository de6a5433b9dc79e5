"""Worker processes to kill: real and separate, forked from a server that has imported everything already."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import asdict, dataclass
from multiprocessing.process import BaseProcess
from typing import Any

from sqlalchemy import text

from duly import failpoints
from duly.db import Database, Tx
from duly.jobs.handlers import Handler, JobContext
from duly.jobs.worker import Worker
from duly.settings import Settings
from tests.engine.jobs.witness import EFFECT
from tests.forking import forkserver
from tests.support import handlers

NEVER_REACHED = 77  # the queue ran empty, and nothing had happened to the process


@dataclass(frozen=True)
class Order:
    """What such a process is to do, and how it is to end."""

    dsn: str
    failpoints: str = ""
    limit: int | None = None
    concurrency: int = 2
    forever: bool = True  # until a signal; otherwise until nothing is due


def start(order: Order) -> BaseProcess:
    """The process, running."""
    process = forkserver.Process(target=_main, args=(asdict(order),), daemon=True)
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


def _main(given: dict[str, Any]) -> None:
    order = Order(**given)
    failpoints.arm(order.failpoints)
    os._exit(asyncio.run(_work(order)))


async def _work(order: Order) -> int:
    db = Database(order.dsn, settings=Settings(shutdown_grace_seconds=5, job_timeout_seconds=30))
    stop, signalled = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def receive() -> None:
        signalled.set()
        stop.set()

    loop.add_signal_handler(signal.SIGTERM, receive)
    worker = Worker(db, _handlers(order), concurrency=order.concurrency, lease_seconds=60)
    if order.forever:
        idle = asyncio.create_task(_stop_when_idle(db, stop))
        await worker.run(stop)
        idle.cancel()
        await db.close()
        return 0 if signalled.is_set() else NEVER_REACHED
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


def _handlers(order: Order) -> dict[str, Handler]:
    async def work(ctx: JobContext, tx: Tx) -> None:
        await tx.execute(text(EFFECT), {"entity_id": ctx.entity_id, "run": str(os.getpid())})

    async def poison() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    return handlers(work, poison, backoff_seconds=[0], limit=order.limit)
