"""One process of the chaos: a worker, relay, scheduler or api, forked from a server that has imported everything."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import multiprocessing.connection
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from duly import Duly, Event, failpoints
from duly.db import Database, is_disconnect
from duly.duty import Duty
from duly.http.api import create_api
from duly.jobs.worker import Worker
from duly.outbox import relay as duly_relay
from duly.outbox.relay import Relay
from duly.runtime.supervisor import Supervisor, create_server, stop_on_signals
from duly.schedules.tick import Scheduler
from duly.settings import Settings
from duly.telemetry import configure_logging
from duly.wakeup import Wakeup
from tests.chaos import safeguards
from tests.chaos.app import Witness, chance, create_app
from tests.forking import forkserver

START_SECONDS = 60.0
LEASE_SECONDS = 3.0


@dataclass(frozen=True)
class Order:
    """What a process is to be."""

    role: str
    dsn: str
    log: str
    witness: str
    version: int = 2
    failpoints: str = ""
    safeguard_off: str = ""
    clock_off_seconds: float = 0.0
    port: int = 0
    cron: bool = True
    broker: bool = False  # relays send the events outside, too
    settings: dict[str, Any] = field(default_factory=dict)


def start(order: Order) -> BaseProcess:
    """The process, running; it ends when we do, however we end."""
    process = forkserver.Process(target=_main, args=(asdict(order),), daemon=True)
    process.start()
    return process


def _main(given: dict[str, Any]) -> None:
    order = Order(**given)
    with Path(order.log).open("a") as log:
        os.dup2(log.fileno(), sys.stdout.fileno())
        os.dup2(log.fileno(), sys.stderr.fileno())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    configure_logging(level="info", style="json")
    if order.clock_off_seconds:
        _set_wall_clock(order.clock_off_seconds)
    safeguards.switch_off(order.safeguard_off)
    failpoints.arm(order.failpoints)
    asyncio.run(_run(order))
    os._exit(0)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)


def _set_wall_clock(off_seconds: float) -> None:
    """This process believes in another time of day; nothing of duly's may care."""
    true_time, true_ns = time.time, time.time_ns
    time.time = lambda: true_time() + off_seconds
    time.time_ns = lambda: true_ns() + int(off_seconds * 1e9)


async def _run(order: Order) -> None:
    values: dict[str, Any] = {
        "lease_seconds": LEASE_SECONDS, "poll_seconds": 0.25, "concurrency": 5, "pool_size": 5,
        "connect_timeout_seconds": 1.5, "statement_timeout_seconds": 6.0, "shutdown_grace_seconds": 3.0,
        "job_timeout_seconds": 20.0, "relay_batch": 20,
    }  # fmt: skip
    settings = Settings(**(values | order.settings))
    app = create_app(version=order.version, witness=order.witness, cron=order.cron)
    stop = asyncio.Event()
    db = Database(order.dsn, settings=settings)
    with stop_on_signals(stop):
        await _prepare(app, db)
        wakeup = Wakeup(db) if order.role != "api" else None
        duties = [_create_duty(order, db, app, wakeup)] if wakeup else []
        server, sockets = None, []
        if order.role == "api":
            server = create_server(create_api(db, [], settings, app), settings)
            sockets = [listen(order.port)]
        names = list(app.handlers)
        await Supervisor(db, duties, wakeup=wakeup, names=names, server=server, sockets=sockets).run(stop)
    await db.close()


async def _prepare(app: Duly, db: Database) -> None:
    """Write down consumers and schedules as soon as the database is there."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            return await app.prepare(db)
        except Exception as error:
            if not is_disconnect(error) and type(error).__name__ != "OutcomeUnknown":
                raise
            if time.monotonic() > deadline:
                raise
        await asyncio.sleep(0.1)


def _create_duty(order: Order, db: Database, app: Duly, wakeup: Wakeup) -> Duty:
    if order.role == "worker":
        return Worker(db, app.handlers, wakeup=wakeup)
    if order.role == "relay" and order.broker:
        duly_relay.LANE_LEASE_SECONDS = LEASE_SECONDS
        return Relay(db, wakeup=wakeup, transport=Broker(Witness(order.witness)))
    if order.role == "relay":
        return Relay(db, wakeup=wakeup)
    scheduler = Scheduler(db, wakeup=wakeup)
    scheduler.poll_seconds = scheduler.deaf_poll_seconds = 0.4  # minutes pass in seconds here
    return scheduler


class Broker:
    """The outside: it writes down what it gets before it says so, and refuses some events when they first come."""

    name = "witness"

    def __init__(self, out: Witness) -> None:
        self._out = out
        self._refused: set[str] = set()

    async def check(self) -> None:
        """It is always there."""

    async def publish(self, events: Sequence[Event]) -> Sequence[str | None]:
        """Each is acknowledged, or refused once."""
        await asyncio.sleep(0.02)
        return [self._take(event) for event in events]

    def _take(self, event: Event) -> str | None:
        op = str(event.payload["op"])
        if event.type == "order.placed" and op not in self._refused and chance(op, 8, "broker"):
            self._refused.add(op)
            return "refused, this once"
        self._out.note("sent", op if event.type == "order.placed" else f"{event.type}:{op}", event.id)
        return None

    async def close(self) -> None:
        """There is nothing to hang up."""


def listen(port: int) -> socket.socket:
    """A socket on a port that several processes share; the kernel deals out the connections."""
    listener = bind(port)
    listener.listen(512)
    return listener


def bind(port: int = 0) -> socket.socket:
    """Bound, and not listening: it keeps the port for those who will."""
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    with contextlib.suppress(OSError):
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind(("127.0.0.1", port))
    return bound
