"""What every command does around its work: settings, logs, the event loop, and the parts of a process."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import structlog
import typer

from duly.auth.issuer import MOUNT, Issuer, create_issuer_router
from duly.auth.issuer_codes import name_people
from duly.auth.setup import create_verifier
from duly.brokers import Source, Transport, connect
from duly.console.app import mount_console
from duly.db import Database
from duly.duty import Duty
from duly.errors import Refused
from duly.http.api import create_api, create_health_api
from duly.messages import check_name, declared_events
from duly.runtime import preflight
from duly.runtime.discover import find_app
from duly.runtime.supervisor import Supervisor, create_server, stop_on_signals, watch_parent
from duly.settings import Settings
from duly.telemetry import configure_logging
from duly.wakeup import Wakeup, wait_for_any
from duly.webhooks.admit import DELIVER_JOB
from duly.webhooks.deliver import LEASE_SECONDS

if TYPE_CHECKING:
    from fastapi import FastAPI

    from duly.app import Duly
    from duly.runtime.supervisor import Server

log = structlog.get_logger("duly.process")
T = TypeVar("T")
BACKLOG = 2048
LOOPBACK = {"127.0.0.1", "::1", "localhost"}
READY_POLL_SECONDS = 0.1
COLLECTOR_THRESHOLDS = (20_000, 20, 20)


def begin(**changes: Any) -> Settings:
    """Read the settings, apply what the command line says, and set up the logs."""
    settings = Settings().model_copy(update={name: value for name, value in changes.items() if value is not None})
    configure_logging(level=settings.log_level, style=settings.log_format)
    signal.signal(signal.SIGTERM, _terminated)
    return settings


def _terminated(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)  # so that what was opened is closed


def run_async(main: Coroutine[Any, Any, T]) -> T:
    """Run on uvloop where there is one, in a process that is ours alone."""
    spare_collector()
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(main)


def spare_collector() -> None:
    """Let the garbage collector leave alone what was imported, and look less often: it took a fifth of a worker's time.

    What reference counting frees is freed as before; cycles wait for some ten thousand objects more.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECTOR_THRESHOLDS)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop


@contextlib.asynccontextmanager
async def open_database(dsn: str, settings: Settings) -> AsyncIterator[Database]:
    """A Database for the block."""
    db = Database(dsn, settings=settings)
    try:
        yield db
    finally:
        await db.close()


def bind(settings: Settings, *, port: int | None = None) -> socket.socket:
    """Take the port before anything else starts, and listen, so that nobody else can take it."""
    wanted, variable = (settings.port, "PORT") if port is None else (port, "DULY_HEALTH_PORT")
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    taken = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # named, or asyncio sets no TCP_NODELAY
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        taken.bind((settings.host, wanted))
        taken.listen(BACKLOG)
    except OSError as error:
        taken.close()
        raise Refused(
            f"port {wanted} on {settings.host} cannot be used ({error.strerror}): "
            f"stop what uses it, or set {variable} to another one"
        ) from error
    return taken


async def run_once(dsn: str, settings: Settings, kind: str) -> None:
    """One bounded cycle of one duty, and its facts as one line of JSON."""
    app = find_app(settings.app)
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    async with open_database(dsn, settings) as db:
        await preflight.check(db, app)
        await app.prepare(db)
        duties = create_duties(kind, db, app)
        await _check_brokers(duties)
        cycles = [await duty.run_once() for duty in duties]
    facts: dict[str, Any] = {}
    for cycle in cycles:
        for name, fact in cycle.facts.items():
            facts[name] = facts[name] + fact if isinstance(facts.get(name), int) else fact
    typer.echo(json.dumps({"duty": kind, "done": sum(cycle.done for cycle in cycles), **facts}, default=str))


async def run_forever(
    dsn: str,
    settings: Settings,
    kinds: Sequence[str],
    *,
    listener: socket.socket | None = None,
    serves_routes: bool = True,
    with_samples: bool = False,
) -> None:
    """Run these duties until a signal; where there is a listening socket, serve the API on it, or health alone."""
    watch_parent(grace_seconds=settings.shutdown_grace_seconds)
    app = find_app(settings.app)
    stop = asyncio.Event()
    with stop_on_signals(stop):
        async with open_database(dsn, settings) as db:
            await preflight.check(db, app)
            await app.prepare(db)
            if with_samples and app.samples is not None:
                await db.run(app.samples)
            wakeup = Wakeup(db) if kinds else None
            duties = [duty for kind in kinds for duty in create_duties(kind, db, app, wakeup)]
            await _check_brokers(duties)
            server, announcing = None, None
            if listener is not None and serves_routes:
                api = build_api(db, duties, settings, app, port=listener.getsockname()[1], stop=stop)
                server = create_server(api, settings)
                announcing = asyncio.create_task(_announce(api, server, listener, stop))
            elif listener is not None:
                server = create_server(create_health_api(db, duties, settings, app), settings)
            supervisor = Supervisor(
                db,
                duties,
                wakeup=wakeup,
                names=list(app.handlers),
                server=server,
                sockets=[listener] if listener else [],
            )
            await supervisor.run(stop)
            if announcing is not None:
                await announcing


def create_duties(kind: str, db: Database, app: Duly, wakeup: Wakeup | None = None) -> list[Duty]:
    """What one part does: workers are two, as webhooks have slots of their own, so that a slow one delays no job."""
    from duly.inbox.receiver import Receiver
    from duly.jobs.worker import Worker
    from duly.outbox.relay import Relay
    from duly.schedules.tick import Scheduler

    if kind == "relay":
        transport = create_transport(db.settings) if db.settings.broker.get_secret_value() else None
        return [Relay(db, wakeup=wakeup, transport=transport)]
    if kind == "receiver":
        return [Receiver(db, create_source(db.settings))]
    if kind == "scheduler":
        return [Scheduler(db, wakeup=wakeup)]
    sending = {name: handler for name, handler in app.handlers.items() if name == DELIVER_JOB}
    working = {name: handler for name, handler in app.handlers.items() if name not in sending}
    slots = db.settings.webhook_concurrency
    return [
        Worker(db, working, wakeup=wakeup, elsewhere=sending),
        Worker(
            db, sending, wakeup=wakeup, concurrency=slots, lease_seconds=LEASE_SECONDS, name="webhooks",
            pool_size=db.settings.webhook_sessions, elsewhere=working,
        ),
    ]  # fmt: skip


def create_transport(settings: Settings) -> Transport:
    """What the relay publishes to."""
    return connect.transport(settings.broker.get_secret_value())


def create_source(settings: Settings) -> Source:
    """What a receiver reads."""
    url = settings.receive.get_secret_value()
    if not url:
        raise Refused("there is nothing to receive from: set DULY_RECEIVE to a broker's address")
    return connect.source(url, topics=receive_topics(settings), group=settings.receive_group)


def receive_topics(settings: Settings) -> list[str]:
    """The topics that were asked for, or those of every event that the application declares."""
    topics = sorted(settings.receive_topics or {kind.event_topic for kind in declared_events().values()})
    if not topics:
        raise Refused("no event is declared, so there are no topics to receive: set DULY_RECEIVE_TOPICS")
    return [check_name("topic", topic) for topic in topics]


async def _check_brokers(duties: Sequence[Duty]) -> None:
    for duty in duties:
        check = getattr(duty, "broker_check", None)
        if check is not None:
            await preflight.check_broker(check)


def build_api(
    db: Database,
    duties: Sequence[Duty],
    settings: Settings,
    app: Duly,
    *,
    port: int,
    stop: asyncio.Event | None = None,
) -> FastAPI:
    """The application's API, and the console; in development the issuer is served beside them."""
    for check in app.checks:
        check(settings)
    issuer = Issuer.open(settings, port=port) if settings.env == "development" else None
    needs_identity = bool(app.routers or settings.oidc_issuer or issuer)
    verifier = create_verifier(settings, issuer_url=issuer.url if issuer else None) if needs_identity else None
    api = create_api(db, duties, settings, app, verifier=verifier)
    if verifier is not None:
        mount_console(api, db, settings, app, verifier, stop=stop)
    if issuer is not None:
        if settings.host not in LOOPBACK:
            log.warning("development_is_reachable", host=settings.host)
        api.include_router(create_issuer_router(issuer))
        api.state.links["issuer"] = f"{MOUNT}/.well-known/openid-configuration"
    return api


async def _announce(api: FastAPI, server: Server, listener: socket.socket, stop: asyncio.Event) -> None:
    """Print the URLs once, as soon as everything is ready."""
    while not stop.is_set():
        if server.started and all(check.is_fine for check in (await api.state.readiness.check()).values()):
            break
        await wait_for_any(READY_POLL_SECONDS, stop)
    else:
        return
    host, port = listener.getsockname()[:2]
    base = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    width = max(map(len, api.state.links))
    lines = [f"  {name:<{width}}  {base}{path}" for name, path in api.state.links.items()]
    if "issuer" in api.state.links:
        lines.append(f"In the console, sign in as {name_people()}; nobody has a password here.")
    typer.echo("\n".join([f"duly is up at {base}/", *lines, "Ctrl-C stops it."]))
    sys.stdout.flush()
