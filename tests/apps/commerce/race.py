"""Paying and timing out at the same moment, time and again: exactly one wins (C2).

``python -m tests.apps.commerce.race --times 1000`` says who won how often. Payments come over HTTP, timers from a real
Worker, each with connections of its own. In half of the rounds a rival holds the locks of all orders until everybody
stands in line, in a random order; in the other half they run freely, after a random moment each, such that neither side
is always first.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import httpx2

from apps.wiring import app
from duly.clock import monotonic
from duly.db import Database
from duly.jobs.worker import Worker
from duly.settings import Settings
from duly.testing import BusinessClock, TestServer, find_place
from tests.apps.commerce.acting import Customers, check_consistent, holding, runs_of, statuses, until_waiting
from tests.apps.conftest import serving

TOGETHER = 8  # orders raced at once
FIRST_HEAD_START_SECONDS = 0.05
EXPIRED_TYPE = "urn:duly:problem:already-expired"
PAID, EXPIRED = ("PAID", "PAID"), ("EXPIRED", "EXPIRED")


class Race:
    """Rounds of orders that are paid and time out at once, and who won."""

    def __init__(self, shop: Customers, worker_db: Database, dsn: str, clock: BusinessClock, *, seed: int) -> None:
        self._shop = shop
        self._db = worker_db
        self._dsn = dsn
        self._clock = clock
        self._random = random.Random(seed)
        self._head_start_seconds = FIRST_HEAD_START_SECONDS  # a worker needs a moment to begin
        self.wins: Counter[tuple[str, str]] = Counter()

    async def run(self, times: int) -> None:
        """So many races; AssertionError as soon as one has not exactly one winner."""
        self._clock.freeze(self._clock.now())
        for number in range(0, times, TOGETHER):
            kind = "in line" if number // TOGETHER % 2 else "free"
            await self._round(kind, min(TOGETHER, times - number))
        check_consistent(self._dsn)

    async def _round(self, kind: str, count: int) -> None:
        orders = [await self._shop.place() for _ in range(count)]
        self._clock.advance(minutes=15)
        answers = await (self._in_line(orders) if kind == "in line" else self._free(orders))
        for order, answer in zip(orders, answers, strict=True):
            found = statuses(self._dsn, order)
            assert found in (PAID, EXPIRED), f"{order} is {found}"
            if found == PAID:
                assert answer.status_code == 200, answer.text
            else:
                assert (answer.status_code, answer.json()["type"]) == (409, EXPIRED_TYPE), answer.text
            self.wins[kind, found[0]] += 1
        check_consistent(self._dsn)

    async def _in_line(self, orders: Sequence[str]) -> list[httpx2.Response]:
        """Some pay before the timers, some after them; all of them wait until the rival lets go."""
        early = set(self._random.sample(orders, self._random.randint(0, len(orders))))
        paying: dict[str, asyncio.Task[httpx2.Response]] = {}
        with holding(self._dsn, *orders):
            for order in early:
                paying[order] = asyncio.create_task(self._shop.pay(order))
            await until_waiting(self._dsn, len(early))
            working = asyncio.create_task(self._work())
            await until_waiting(self._dsn, len(early) + len(orders))
            for order in set(orders) - early:
                paying[order] = asyncio.create_task(self._shop.pay(order))
            await until_waiting(self._dsn, 2 * len(orders))
        await working
        return [await paying[order] for order in orders]

    async def _free(self, orders: Sequence[str]) -> list[httpx2.Response]:
        """Nobody is in the way; whoever is first is first. Who won too often gives the others a longer head start."""

        async def pay(order: str) -> httpx2.Response:
            await asyncio.sleep(self._random.uniform(0, 2) * self._head_start_seconds)
            return await self._shop.pay(order)

        working = asyncio.create_task(self._work())
        answers = await asyncio.gather(*map(pay, orders))
        await working
        paid = sum(answer.status_code == 200 for answer in answers)
        self._head_start_seconds = min(
            max(self._head_start_seconds * (2.0 if 2 * paid > len(orders) else 0.5), 0.001), 4.0
        )
        return answers

    async def _work(self) -> None:
        await Worker(self._db, app.handlers, concurrency=TOGETHER).run_once()

    def report(self) -> str:
        """Who won how often, and what the timers found that did not win."""
        lines = [f"{kind:<8} {winner:<8} {count:>6}" for (kind, winner), count in sorted(self.wins.items())]
        lines += [
            f"{'all':<8} {winner:<8} {sum(count for (_, who), count in self.wins.items() if who == winner):>6}"
            for winner in ("PAID", "EXPIRED")
        ]
        found = Counter(message for _, message in runs_of(self._dsn, "PaymentTimeout"))
        return "\n".join([*lines, *(f"timer: {message}: {count}" for message, count in sorted(found.items()))])


async def _main(times: int, seed: int) -> None:
    with tempfile.TemporaryDirectory(prefix="duly-race-", dir=find_place()) as directory:
        server = TestServer(Path(directory) / "postgres")
        server.start()
        try:
            with server.database(app) as dsn:
                db, worker_db = (Database(dsn, settings=Settings(pool_size=2 * TOGETHER)) for _ in range(2))
                async with serving(db, Path(directory)) as api:
                    race = Race(Customers(api), worker_db, dsn, BusinessClock(dsn), seed=seed)
                    began = monotonic()
                    await race.run(times)
                    seconds = monotonic() - began
                await worker_db.close()
                await db.close()
                print(race.report())
                print(f"{times} races, seed {seed}, {seconds:.0f} s: each had exactly one winner, and all agree")
        finally:
            server.stop()


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=1_000)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    asyncio.run(_main(given.times, given.seed))


if __name__ == "__main__":
    import os

    import structlog

    os.environ["DULY_ALLOW_UNSAFE_DATABASE"] = "1"  # the test server runs without fsync
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(30))
    main()
