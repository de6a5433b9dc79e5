"""Celery on a Redis of its own: append-only file flushed every second, no results, a deep prefetch."""

from __future__ import annotations

import os
import subprocess
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import redis
from celery import Celery
from drivers.frame import POLL_SECONDS, Driver, Tally, main

app = Celery("peer")
TALLY: list[Tally] = []
START_POLLS = 2_000


@app.task(name="noop", ignore_result=True)
def noop(number: int) -> None:
    """The task: it runs in the worker's own process."""
    TALLY[0].mark(number)


class CeleryDriver(Driver):
    """There is no call that enqueues many: a group sends its messages one by one."""

    has_bulk = False
    tuned = {  # noqa: RUF012 - never changed
        "noop": {"pool": "solo", "concurrency": 1, "prefetch": 128},
        "latency": {"pool": "solo", "concurrency": 1, "prefetch": 1},
    }

    async def install(self) -> None:
        self.start_redis()
        self.connect()

    def start_redis(self) -> None:
        """A server of our own on a unix socket; both processes find it by the environment."""
        self.directory = Path(tempfile.mkdtemp(prefix="redis-"))  # in TMPDIR, which goes with the measurement
        os.environ["PEER_REDIS"] = socket = str(self.directory / "redis.sock")
        self.server = subprocess.Popen(
            ["redis-server", "--port", "0", "--unixsocket", socket, "--dir", str(self.directory),
             "--appendonly", "yes", "--appendfsync", "everysec", "--save", ""],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        for _ in range(START_POLLS):
            if os.path.exists(socket):
                return
            time.sleep(POLL_SECONDS)
        raise SystemExit("redis-server did not start")

    def end(self) -> None:
        self.server.kill()
        self.server.wait()

    def connect(self) -> None:
        """Both processes speak to the same socket."""
        app.conf.update(
            broker_url=f"redis+socket://{os.environ['PEER_REDIS']}",
            broker_connection_retry_on_startup=True,
            task_ignore_result=True,
            worker_enable_remote_control=False,
            worker_prefetch_multiplier=self.settings.get("prefetch", 1),
        )
        self.redis = redis.Redis(unix_socket_path=os.environ["PEER_REDIS"])

    @asynccontextmanager
    async def producer(self) -> AsyncIterator[None]:
        yield

    async def enqueue_one(self, number: int) -> None:
        noop.delay(number)

    async def enqueue_many(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            noop.delay(number)

    async def analyze(self) -> None:
        """Nothing to do."""

    def serve(self, tally: Tally) -> None:
        TALLY.append(tally)
        self.connect()
        worker = app.Worker(
            pool=self.settings["pool"], concurrency=self.settings["concurrency"], loglevel="WARNING",
            without_gossip=True, without_mingle=True, without_heartbeat=True,
        )  # fmt: skip
        threading.Thread(target=self.watch, args=(tally,), daemon=True).start()
        worker.start()

    def watch(self, tally: Tally) -> None:
        """Beside the worker, which needs the main thread: see all tasks started and the queue settled."""
        while not tally.finished:
            time.sleep(POLL_SECONDS)
        while self.count():
            time.sleep(POLL_SECONDS)
        tally.settled_at = time.monotonic_ns()
        tally.report()

    def count(self) -> int:
        """Messages that wait, or were taken and not acknowledged."""
        return int(self.redis.llen("celery")) + int(self.redis.hlen("unacked"))

    async def remaining(self) -> int:
        return self.count()


if __name__ == "__main__":
    main(CeleryDriver)
