"""Real processes to kill, stop and break: what ``duly worker``, ``relay``, ``scheduler``, ``api``, ``migrate`` run.

They are forked from a server that has imported everything already, so that one starts in some milliseconds.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from dataclasses import asdict, dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import duly.jobs.worker
import duly.outbox.relay
from apps.wiring import app as application
from duly import Database, Relay, Worker, failpoints
from duly.duty import Duty
from duly.errors import NotFound
from duly.inbox.receiver import Receiver
from duly.operate.dead_letters import list_dead_letters, retry_dead_letter
from duly.runtime.migrate import migrate_all
from duly.runtime.supervisor import Supervisor, create_server, stop_on_signals
from duly.schedules.tick import Scheduler
from duly.settings import Settings
from duly.telemetry import configure_logging
from duly.wakeup import Wakeup
from tests.crashes import shop
from tests.engine.http.serving import listen
from tests.engine.idempotency.shop import create_shop
from tests.engine.inbox.source import BrokerSource
from tests.forking import forkserver


@dataclass(frozen=True)
class Order:
    """What a process is to do, and how it is to be broken."""

    dsn: str
    log: str
    duties: tuple[str, ...]
    kind: str = "nothing"
    failpoints: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    work_seconds: float = 0.0
    lane_lease_seconds: float = 60.0
    hoard_seconds: float = 2.0
    broker_port: int = 0

    @property
    def port_file(self) -> Path:
        """Where an api writes its port."""
        return Path(self.log + ".port")


def start(order: Order) -> BaseProcess:
    """The process, running."""
    process = forkserver.Process(target=_main, args=(asdict(order),), daemon=True)
    process.start()
    return process


def _main(given: dict[str, Any]) -> None:
    order = Order(**given)
    with Path(order.log).open("a") as log:
        os.dup2(log.fileno(), sys.stdout.fileno())
        os.dup2(log.fileno(), sys.stderr.fileno())
    configure_logging(style="json")
    signal.signal(signal.SIGTERM, _terminated)
    duly.outbox.relay.LANE_LEASE_SECONDS = order.lane_lease_seconds
    duly.jobs.worker.HOARD_SECONDS = order.hoard_seconds
    failpoints.arm(order.failpoints)
    if order.duties == ("migrate",):
        migrate_all(order.dsn, application)
    elif order.duties == ("requeue",):
        asyncio.run(_requeue(order))
    else:
        asyncio.run(_serve(order))


def _terminated(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


def _database(order: Order) -> Database:
    return Database(order.dsn, settings=Settings(**order.settings))


async def _serve(order: Order) -> None:
    """As ``duly.cli.process.run_forever`` does it, with a broker where one is asked for."""
    db = _database(order)
    app = shop.create(order.kind, shop.Manner(db, order.work_seconds))
    wakeup = Wakeup(db) if order.duties != ("api",) else None
    duties: list[Duty] = []
    server, sockets = None, []
    for duty in order.duties:
        if duty == "worker":
            duties.append(Worker(db, app.handlers, wakeup=wakeup))
        elif duty == "relay":
            transport = shop.Transport(order.broker_port, str(os.getpid())) if order.broker_port else None
            duties.append(Relay(db, wakeup=wakeup, transport=transport))
        elif duty in ("receiver", "group receiver"):
            source = BrokerSource(order.broker_port, keeps_position=duty == "group receiver")
            duties.append(Receiver(db, source))
        elif duty == "scheduler":
            duties.append(Scheduler(db, wakeup=wakeup))
        else:
            sockets = [listen()]
            server = create_server(create_shop(db), db.settings)
            order.port_file.write_text(str(sockets[0].getsockname()[1]))
    stop = asyncio.Event()
    with stop_on_signals(stop):
        names = list(app.handlers)
        await Supervisor(db, duties, wakeup=wakeup, names=names, server=server, sockets=sockets).run(stop)
        await db.close()


async def _requeue(order: Order) -> None:
    """What an operator does with dead letters, one commit each; told to end, it ends between two."""
    db = _database(order)
    async with db.transaction() as tx:
        letters = await list_dead_letters(tx)
    for letter in sorted(letters, key=lambda one: one.id):
        try:
            await db.run(lambda tx, id=letter.id: retry_dead_letter(tx, id, actor="operator"))  # type: ignore[misc]  # mypy knows no lambda defaults
        except NotFound:
            continue  # somebody else was faster
    await db.close()
