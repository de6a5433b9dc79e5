"""What the Python drivers share: the four figures, the clocks, and the proof that every job ran exactly once.

A driver runs inside its peer's own virtual environment, so this file needs nothing but the standard library. The
process that measures enqueues; a second process, started by the first, is the peer's one worker. Both read the
system's monotonic clock, which is the same for all processes of a machine.

noop          all jobs are committed, and the tables analyzed, before the worker process starts. The clock runs from the
              start of the first handler until every handler has run *and* the queue shows no unfinished job (asked
              every 5 ms, only after the last handler has started, so that asking costs the run nothing). The first
              fetch is outside: have at least twenty times as many jobs as a peer fetches at once.
enqueue_one   from before the first call until the last returned, after 20 calls to warm up.
enqueue_bulk  likewise, after one bulk call to warm up.
latency       the worker idles, 20 jobs warm it up one after the other, then one job every 20 ms: from the return of
              the enqueuing call in one process to the first line of the handler in the other. It is below zero where
              the handler was quicker than the answer to the enqueuing process.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, ClassVar

WARM_UP_JOBS = 20
PACE_SECONDS = 0.02  # 50 jobs a second
POLL_SECONDS = 0.005


class Tally:
    """Which handlers started, and when. ``mark`` is the whole body of every no-op handler."""

    def __init__(self, size: int, out: int) -> None:
        self.size = size
        self.starts: list[int] = [0] * size
        self.twice = 0
        self.finished = False
        self.settled_at = 0
        self._out = out
        self._started = itertools.count(1)  # next() is atomic: some peers run handlers on threads

    def mark(self, number: int) -> None:
        """One handler started; a negative number is a warm-up."""
        at = time.monotonic_ns()
        if number < 0:
            say(self._out, warm=number)
            return
        if self.starts[number]:
            self.twice += 1
        self.starts[number] = at
        if next(self._started) == self.size:
            self.finished = True

    def report(self) -> None:
        """Tell the measuring process, and end at once: some peers leave threads behind, but all is settled."""
        say(self._out, starts=self.starts, settled_at=self.settled_at, twice=self.twice)
        os._exit(0)


class Driver(ABC):
    """One peer: how to install it, enqueue and work. ``worker`` must stop its worker when its block ends."""

    tuned: ClassVar[dict[str, dict[str, Any]]] = {}  # the settings found fastest, by figure
    has_bulk = True
    fill = 1_000  # jobs at a time when the queue is filled before the clock starts

    def __init__(self, dsn: str, figure: str, settings: dict[str, Any]) -> None:
        self.dsn = dsn
        self.settings = {**self.tuned.get(figure, {}), **settings}

    @abstractmethod
    async def install(self) -> None:
        """Make the schema, declare the queue."""

    def end(self) -> None:  # noqa: B027 - most drivers have nothing to end
        """End whatever ``install`` started."""

    @abstractmethod
    def producer(self) -> AbstractAsyncContextManager[None]:
        """A block in which jobs can be enqueued over one connection."""

    @abstractmethod
    async def enqueue_one(self, number: int) -> None:
        """One job, one call, committed on return."""

    @abstractmethod
    async def enqueue_many(self, numbers: Sequence[int]) -> None:
        """Many jobs the fastest way there is; a figure only where ``has_bulk``."""

    @abstractmethod
    async def analyze(self) -> None:
        """Let the planner know the filled queue, as autovacuum would by and by."""

    def worker(self, tally: Tally) -> AbstractAsyncContextManager[None]:
        """A block in which one worker runs in this process; one that wants no event loop has its own ``serve``."""
        raise NotImplementedError

    @abstractmethod
    async def remaining(self) -> int:
        """Jobs that the queue does not show as completed."""

    def run(self, main: Any) -> Any:
        """Run a coroutine: on uvloop where the environment has it."""
        try:
            import uvloop
        except ImportError:
            return asyncio.run(main)
        return uvloop.run(main)

    def serve(self, tally: Tally) -> None:
        """Work until all jobs are done and settled."""
        self.run(self._serve(tally))

    async def _serve(self, tally: Tally) -> None:
        async with self.worker(tally):
            while not tally.finished:  # bounded by the process that started this one, which ends it
                await asyncio.sleep(POLL_SECONDS)
            while await self.remaining():
                await asyncio.sleep(POLL_SECONDS)
            tally.settled_at = time.monotonic_ns()


def say(out: int, **facts: Any) -> None:
    """One JSON line to the process that started this one."""
    with os.fdopen(os.dup(out), "w") as file:
        file.write(json.dumps(facts) + "\n")


def main(kind: type[Driver]) -> None:
    """Entry of a driver: the request is the first argument, the answer one JSON line on standard output."""
    request = json.loads(sys.argv[1])
    out = os.dup(1)
    os.dup2(2, 1)  # whatever a library prints goes to standard error
    driver = kind(request["dsn"], request["figure"], request["settings"])
    if request.get("role") == "worker":
        tally = Tally(request["size"], out)
        driver.serve(tally)
        tally.report()
    say(out, values=driver.run(_measure(driver, request)))
    os._exit(0)


async def _measure(driver: Driver, request: dict[str, Any]) -> list[float]:
    size: int = request["size"]
    figures = {"noop": _noop, "enqueue_one": _enqueue_one, "enqueue_bulk": _enqueue_bulk, "latency": _latency}
    try:
        async with asyncio.timeout(request["timeout_seconds"]):
            await driver.install()
            return await figures[request["figure"]](driver, request, size)
    finally:
        driver.end()


async def _noop(driver: Driver, request: dict[str, Any], size: int) -> list[float]:
    async with driver.producer():
        for first in range(0, size, driver.fill):
            await driver.enqueue_many(range(first, min(first + driver.fill, size)))
        await driver.analyze()
    async with _worker_process(request) as worker:
        facts = await _facts(worker)
    starts = _once_each(facts)
    return [size / ((facts["settled_at"] - min(starts)) / 1e9)]


async def _enqueue_one(driver: Driver, request: dict[str, Any], size: int) -> list[float]:
    async with driver.producer():
        for number in range(-WARM_UP_JOBS, 0):
            await driver.enqueue_one(number)
        began = time.monotonic_ns()
        for number in range(size):
            await driver.enqueue_one(number)
        seconds = (time.monotonic_ns() - began) / 1e9
        await _check_queued(driver, size + WARM_UP_JOBS)
    return [size / seconds]


async def _enqueue_bulk(driver: Driver, request: dict[str, Any], size: int) -> list[float]:
    if not driver.has_bulk:
        return []
    batch: int = driver.settings["batch"]
    async with driver.producer():
        await driver.enqueue_many(range(-WARM_UP_JOBS, 0))
        began = time.monotonic_ns()
        for first in range(0, size, batch):
            await driver.enqueue_many(range(first, min(first + batch, size)))
        seconds = (time.monotonic_ns() - began) / 1e9
        await _check_queued(driver, size + WARM_UP_JOBS)
    return [size / seconds]


async def _latency(driver: Driver, request: dict[str, Any], size: int) -> list[float]:
    returned = [0] * size
    async with driver.producer(), _worker_process(request) as worker:
        for number in range(-WARM_UP_JOBS, 0):
            await driver.enqueue_one(number)
            await _facts(worker)
        began = time.monotonic()
        for number in range(size):
            await asyncio.sleep(max(0.0, began + number * PACE_SECONDS - time.monotonic()))
            await driver.enqueue_one(number)
            returned[number] = time.monotonic_ns()
        starts = _once_each(await _facts(worker))
    return [(start - back) / 1e6 for start, back in zip(starts, returned, strict=True)]


async def _check_queued(driver: Driver, expected: int) -> None:
    if (queued := await driver.remaining()) != expected:
        raise SystemExit(f"{queued} jobs are in the queue, not {expected}")


def _once_each(facts: dict[str, Any]) -> list[int]:
    starts: list[int] = facts["starts"]
    if facts["twice"] or not all(starts):
        raise SystemExit(f"{starts.count(0)} jobs never ran, {facts['twice']} ran twice")
    return starts


@asynccontextmanager
async def _worker_process(request: dict[str, Any]) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, *sys.orig_argv[1:-1], json.dumps({**request, "role": "worker"}),
        stdout=asyncio.subprocess.PIPE, limit=64 * 1024 * 1024,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _facts(worker: asyncio.subprocess.Process) -> dict[str, Any]:
    assert worker.stdout is not None
    line = await worker.stdout.readline()
    if not line:
        raise SystemExit(f"the worker ended early, with status {await worker.wait()}")
    facts: dict[str, Any] = json.loads(line)
    return facts
