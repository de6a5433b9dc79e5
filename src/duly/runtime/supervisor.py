"""Runs a process: its duties, the listener and perhaps an HTTP server, until a signal ends them all."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import Any

import structlog
import uvicorn

from duly.clock import monotonic
from duly.db import Database, Statement, fetch
from duly.duty import Cycle, Duty, Health
from duly.errors import Unavailable
from duly.settings import Settings
from duly.wakeup import Wakeup, wait_for_any

log = structlog.get_logger("duly.supervisor")
SIGNALS = (signal.SIGINT, signal.SIGTERM)
RESTART_SECONDS = (0.5, 10.0)
STEADY_SECONDS = 60.0  # whoever ran this long before it fell starts again without delay
RELEASE_SECONDS = 6.0  # after the grace a worker still gives back what it holds
LEAVE_SECONDS = 2.0
ATTENDANCE_SECONDS = 10.0
PARENT_VARIABLE = "DULY_PARENT_PID"
PARENT_SECONDS = 0.5
KINDS = frozenset({"worker", "relay", "scheduler", "receiver"})

ATTEND = Statement(
    """
    INSERT INTO duly.processes (id, kind, names, version, started_at, seen_at)
    SELECT p.id, p.kind,
           CASE WHEN p.kind = 'worker' THEN CAST(:names AS text[]) WHEN p.via <> '' THEN ARRAY[p.via] ELSE '{}' END,
           :version, clock_timestamp(), clock_timestamp()
    FROM unnest(CAST(:ids AS text[]), CAST(:kinds AS text[]), CAST(:vias AS text[])) AS p(id, kind, via)
    ON CONFLICT (id) DO UPDATE SET names = excluded.names, seen_at = excluded.seen_at
    """
)
FORGET_DEAD = Statement("DELETE FROM duly.processes WHERE seen_at < clock_timestamp() - interval '1 day'")
# PostgreSQL itself ends a transaction that stands idle. One whose process froze between the two halves of a statement
# counts as active there, waits for its client for ever, and would hold its locks as long.
FREE_FROZEN = Statement(
    """
    SELECT pid, pg_terminate_backend(pid) FROM pg_stat_activity
    WHERE datname = current_database() AND usename = current_user AND application_name LIKE 'duly%'
      AND state = 'active' AND wait_event = 'ClientRead' AND xact_start IS NOT NULL
      AND state_change < clock_timestamp() - make_interval(secs => :seconds)
    """
)
LEAVE = Statement("DELETE FROM duly.processes WHERE id = ANY(CAST(:ids AS text[]))")


class Attendance(Duty):
    """Says in ``duly.processes`` that this process's duties are alive, on a connection of its own.

    It also frees what others hold who are frozen.
    """

    name = "attendance"
    poll_seconds = ATTENDANCE_SECONDS

    def __init__(self, db: Database, duties: Sequence[Duty], names: Sequence[str]) -> None:
        super().__init__(db)
        self._duties = [duty for duty in duties if duty.name in KINDS]
        self._names = sorted(names)

    async def cycle(self) -> Cycle:
        """Say so once more."""
        connection = await self.connection()
        await fetch(
            connection, ATTEND, names=self._names, version=version("duly"),
            ids=[duty.identity for duty in self._duties],
            kinds=[duty.name for duty in self._duties],
            vias=[duty.via for duty in self._duties],
        )  # fmt: skip
        await fetch(connection, FORGET_DEAD)
        if freed := await fetch(connection, FREE_FROZEN, seconds=self.db.settings.idle_transaction_seconds):
            log.warning("frozen_sessions_ended", sessions=[pid for pid, _ in freed])
        return Cycle()

    async def leave(self) -> None:
        """Take the rows away; when the database is away too, they grow old instead."""
        try:
            async with asyncio.timeout(LEAVE_SECONDS):
                await fetch(await self.connection(), LEAVE, ids=[duty.identity for duty in self._duties])
        except Exception as error:  # noqa: BLE001 - we are leaving either way
            log.warning("leave_failed", error=type(error).__name__)
        await self.close()


class Server(uvicorn.Server):
    """uvicorn without its own signal handlers: the supervisor decides when it ends."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


def create_server(api: Any, settings: Settings) -> Server:
    """An HTTP server for an ASGI application, quiet and bounded."""
    config = uvicorn.Config(
        api,
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        lifespan="on",
        timeout_graceful_shutdown=max(1, int(settings.shutdown_grace_seconds)),
    )
    return Server(config)


class Supervisor:
    """Keeps everything running that one process has to do."""

    def __init__(
        self,
        db: Database,
        duties: Sequence[Duty],
        *,
        wakeup: Wakeup | None = None,
        names: Sequence[str] = (),
        server: uvicorn.Server | None = None,
        sockets: Sequence[socket.socket] = (),
    ) -> None:
        self._db = db
        self._duties = duties
        self._wakeup = wakeup
        self._attendance = Attendance(db, duties, names) if duties else None
        self._server = server
        self._sockets = list(sockets)

    async def run(self, stop: asyncio.Event) -> None:
        """Run until ``stop``, then let everybody finish; what does not finish in time is cut off."""
        gone = asyncio.Event()
        work = [asyncio.create_task(keep(duty.name, duty.run, stop, duty.health)) for duty in self._duties]
        if self._wakeup is not None:
            work.append(asyncio.create_task(keep("wakeup", self._wakeup.run, stop)))
        if self._server is not None:
            work.append(asyncio.create_task(self._serve(self._server, stop)))
        attending = asyncio.create_task(self._attend(gone))
        log.info("process_up", duties=[duty.name for duty in self._duties], http=self._server is not None)
        await stop.wait()
        log.info("process_stopping")
        try:
            await self._finish(work)
        finally:
            gone.set()
            await asyncio.wait([attending], timeout=2 * LEAVE_SECONDS)
        log.info("process_down")

    async def _serve(self, server: uvicorn.Server, stop: asyncio.Event) -> None:
        serving = asyncio.create_task(self._listen(server))
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait([serving, stopping], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        server.should_exit = True
        stop.set()  # a process without its server has no purpose: whoever started it starts it again
        await serving

    async def _listen(self, server: uvicorn.Server) -> None:
        try:
            await server.serve(sockets=self._sockets)
        except SystemExit as error:  # how uvicorn says that it could not start
            raise Unavailable("the HTTP server did not start; the log says why") from error

    async def _attend(self, gone: asyncio.Event) -> None:
        if self._attendance is not None:
            await keep("attendance", self._attendance.run, gone, self._attendance.health)
            await self._attendance.leave()

    async def _finish(self, work: Sequence[asyncio.Task[None]]) -> None:
        if not work:
            return
        patience = self._db.settings.shutdown_grace_seconds + RELEASE_SECONDS
        done, late = await asyncio.wait(work, timeout=patience)
        for task in late:
            log.error("duty_cut_off", after_seconds=patience)
            task.cancel()
        if late:
            await asyncio.wait(late, timeout=LEAVE_SECONDS)
        for task in done:
            task.result()  # what failed for good is the caller's to know


async def keep(
    name: str,
    run: Callable[[asyncio.Event], Awaitable[None]],
    stop: asyncio.Event,
    health: Health | None = None,
) -> None:
    """Run a loop until ``stop``; when it falls over, say so and start it again after a growing pause."""
    delay = RESTART_SECONDS[0]
    while not stop.is_set():
        began = monotonic()
        try:
            await run(stop)
        except Exception as error:
            log.exception("duty_crashed", duty=name)
            if health is not None:
                health.set(False, type(error).__name__)
        if stop.is_set():
            return
        delay = RESTART_SECONDS[0] if monotonic() - began > STEADY_SECONDS else delay
        log.error("duty_restarting", duty=name, after_seconds=delay)
        await wait_for_any(delay, stop)
        delay = min(delay * 2, RESTART_SECONDS[1])


@contextlib.contextmanager
def stop_on_signals(stop: asyncio.Event) -> Iterator[None]:
    """The first SIGINT or SIGTERM sets ``stop``; the second ends the process at once."""
    loop = asyncio.get_running_loop()

    def receive(number: int) -> None:
        if stop.is_set():
            log.error("process_forced_to_end", signal=signal.Signals(number).name)
            os._exit(128 + number)
        log.info("signal_received", signal=signal.Signals(number).name)
        stop.set()

    for each in SIGNALS:
        loop.add_signal_handler(each, receive, each)
    try:
        yield
    finally:
        for each in SIGNALS:
            loop.remove_signal_handler(each)


# -- several processes ---------------------------------------------------------------------------


def _same_environment(_number: int) -> Mapping[str, str]:
    return {}


async def run_processes(
    count: int,
    argv: Sequence[str],
    *,
    grace_seconds: float,
    stop: asyncio.Event,
    env_of: Callable[[int], Mapping[str, str]] = _same_environment,
) -> int:
    """Run ``count`` children of the same command until ``stop``; a child that dies is started again.

    Returns 0 when every child ended in time after the stop, else 1.
    """
    log.info("children_starting", count=count)
    keepers = [
        asyncio.create_task(_keep_child(number, argv, env_of(number), stop, grace_seconds)) for number in range(count)
    ]
    ends = await asyncio.gather(*keepers)
    return 0 if all(ends) else 1


async def _keep_child(
    number: int, argv: Sequence[str], env: Mapping[str, str], stop: asyncio.Event, grace_seconds: float
) -> bool:
    delay = RESTART_SECONDS[0]
    while not stop.is_set():
        began = monotonic()
        child = await _spawn(argv, env)
        log.info("child_started", child=number, pid=child.pid)
        if await _ended_by_itself(child, stop):
            delay = RESTART_SECONDS[0] if monotonic() - began > STEADY_SECONDS else delay
            log.error("child_died", child=number, pid=child.pid, code=child.returncode, after_seconds=delay)
            await wait_for_any(delay, stop)
            delay = min(delay * 2, RESTART_SECONDS[1])
        else:
            return await _end_child(child, grace_seconds + RELEASE_SECONDS + 2 * LEAVE_SECONDS)
    return True


async def _spawn(argv: Sequence[str], env: Mapping[str, str]) -> asyncio.subprocess.Process:
    """A child in a session of its own: Ctrl-C reaches the parent only, which tells its children once."""
    return await asyncio.create_subprocess_exec(
        *argv, env={**os.environ, **env, PARENT_VARIABLE: str(os.getpid())}, start_new_session=True
    )


async def _ended_by_itself(child: asyncio.subprocess.Process, stop: asyncio.Event) -> bool:
    ended, stopped = asyncio.create_task(child.wait()), asyncio.create_task(stop.wait())
    await asyncio.wait([ended, stopped], return_when=asyncio.FIRST_COMPLETED)
    finished = ended.done()
    ended.cancel()
    stopped.cancel()
    return finished


async def _end_child(child: asyncio.subprocess.Process, patience_seconds: float) -> bool:
    with contextlib.suppress(ProcessLookupError):
        child.terminate()
    try:
        async with asyncio.timeout(patience_seconds):
            return await child.wait() in (0, -signal.SIGTERM, 128 + signal.SIGTERM)
    except TimeoutError:
        log.error("child_killed", pid=child.pid)
        child.kill()
        await child.wait()
        return False


def watch_parent(*, grace_seconds: float) -> None:
    """In a child of ``run_processes``: end when the parent is gone, however it went. Elsewhere: nothing."""
    parent = int(os.environ.pop(PARENT_VARIABLE, "0"))
    if parent:
        patience = grace_seconds + RELEASE_SECONDS
        threading.Thread(target=_watch, args=(parent, patience), name="duly-parent", daemon=True).start()


def _watch(parent: int, patience_seconds: float) -> None:
    # A thread, not a task: a handler that blocks the loop must not keep an orphan alive.
    while os.getppid() == parent:
        time.sleep(PARENT_SECONDS)
    log.error("parent_gone", parent=parent)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(patience_seconds)
    os._exit(1)
