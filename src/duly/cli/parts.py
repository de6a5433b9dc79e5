"""``duly up``, and each of its parts alone: api, worker, relay, scheduler, receive."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from duly.cli.home import database_address, sole_tenant
from duly.cli.process import begin, bind, open_database, run_async, run_forever, run_once
from duly.runtime import preflight
from duly.runtime.discover import find_app
from duly.runtime.migrate import migrate_all
from duly.runtime.supervisor import run_processes, stop_on_signals
from duly.settings import Settings

App = Annotated[str | None, typer.Option(help="The application, as package.module:attribute (DULY_APP).")]
Once = Annotated[bool, typer.Option("--once", help="One bounded cycle, its facts as JSON, then exit.")]
DUTIES = ("worker", "relay", "scheduler")


def register(app: typer.Typer) -> None:
    """Add these commands."""
    for command in (up, api, worker, relay, scheduler, receive):
        app.command()(command)


def up(app: App = None) -> None:
    """Start everything in one process: PostgreSQL unless you have one, api, worker, relay, scheduler, receiver."""
    settings = begin(app=app)
    with bind(settings) as listener, sole_tenant(settings), database_address(settings) as dsn:
        migrate_all(dsn, find_app(settings.app))
        with_samples = settings.env == "development" and settings.wants_embedded()
        duties = (*DUTIES, "receiver") if settings.receive.get_secret_value() else DUTIES
        run_async(run_forever(dsn, settings, duties, listener=listener, with_samples=with_samples))


def api(app: App = None) -> None:
    """Serve the HTTP API alone."""
    settings = begin(app=app)
    with bind(settings) as listener, database_address(settings) as dsn:
        run_async(run_forever(dsn, settings, (), listener=listener))


def worker(
    app: App = None,
    once: Once = False,
    processes: Annotated[int | None, typer.Option(min=1, max=256, help="How many processes.")] = None,
    concurrency: Annotated[int | None, typer.Option(min=1, max=10_000, help="Jobs at once in each.")] = None,
) -> None:
    """Run jobs that are due."""
    settings = begin(app=app, processes=processes, concurrency=concurrency)
    if once or settings.processes == 1:
        _run_duty("worker", settings, once=once)
        return
    with database_address(settings) as dsn:
        run_async(_check(dsn, settings))
        code = run_async(_run_workers(settings))
    raise typer.Exit(code)


def relay(app: App = None, once: Once = False) -> None:
    """Publish events."""
    _run_duty("relay", begin(app=app), once=once)


def scheduler(app: App = None, once: Once = False) -> None:
    """Turn schedules into jobs."""
    _run_duty("scheduler", begin(app=app), once=once)


def receive(app: App = None, once: Once = False) -> None:
    """Receive events from the broker that DULY_RECEIVE names."""
    _run_duty("receiver", begin(app=app), once=once)


def _run_duty(kind: str, settings: Settings, *, once: bool) -> None:
    with contextlib.ExitStack() as held:
        health = None
        if settings.health_port and not once:
            health = held.enter_context(bind(settings, port=settings.health_port))
        dsn = held.enter_context(database_address(settings))
        if once:
            run_async(run_once(dsn, settings, kind))
        else:
            run_async(run_forever(dsn, settings, [kind], listener=health, serves_routes=False))


async def _check(dsn: str, settings: Settings) -> None:
    """What every child would refuse is refused once, by the parent."""
    app = find_app(settings.app)
    async with open_database(dsn, settings) as db:
        await preflight.check(db, app)


async def _run_workers(settings: Settings) -> int:
    stop = asyncio.Event()
    with stop_on_signals(stop):
        return await run_processes(
            settings.processes, _child_command(settings), grace_seconds=settings.shutdown_grace_seconds, stop=stop,
            env_of=functools.partial(_child_environment, settings),
        )  # fmt: skip


def _child_environment(settings: Settings, number: int) -> dict[str, str]:
    """Each child serves its health on a port of its own."""
    return {"DULY_HEALTH_PORT": str(settings.health_port + number)} if settings.health_port else {}


def _child_command(settings: Settings) -> Sequence[str]:
    command = [sys.executable, "-m", "duly.cli.main", "worker", "--processes", "1"]
    command += ["--concurrency", str(settings.concurrency)]
    return [*command, "--app", settings.app] if settings.app else command
