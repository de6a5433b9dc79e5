"""``python -m tests.simulation --steps 1000000 --seed 7``: the nightly run, and how to see a failure again."""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import structlog

from duly.testing import TestServer, find_place
from tests.simulation.events_machine import EventsMachine
from tests.simulation.machine import Machine, Report, hunt, replay
from tests.simulation.pure_machines import CronMachine, LeasesMachine, RetryMachine, RoutesMachine
from tests.simulation.queue_machine import QueueMachine
from tests.simulation.ticks_machine import TicksMachine

PURE: dict[str, type[Machine]] = {one.name: one for one in (RetryMachine, LeasesMachine, CronMachine, RoutesMachine)}
ON_POSTGRES = {one.name: one for one in (QueueMachine, EventsMachine, TicksMachine)}
# How the steps are shared out: what is cheap gets more of them.
SHARES = {"retry": 20, "leases": 20, "routes": 10, "cron": 5, "queue": 20, "events": 20, "ticks": 5}


@contextlib.contextmanager
def machine(name: str, dsn: str) -> Iterator[Machine]:
    """The machine of this name."""
    made = ON_POSTGRES[name](dsn) if name in ON_POSTGRES else PURE[name]()
    try:
        yield made
    finally:
        made.close()


@contextlib.contextmanager
def database(names: list[str]) -> Iterator[str]:
    """A fresh PostgreSQL, if any of these machines needs one."""
    if not set(names) & set(ON_POSTGRES):
        yield ""
        return
    directory = Path(tempfile.mkdtemp(prefix="duly-simulation-", dir=find_place()))
    server = TestServer(directory)
    try:
        server.start()
        with server.database() as dsn:
            yield dsn
    finally:
        server.stop()
        shutil.rmtree(directory, ignore_errors=True)


def silence() -> None:
    """The engine logs what it does; a million times over nobody reads it."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50), cache_logger_on_first_use=False)


def show(report: Report) -> None:
    """One line for each machine, and the failure below it."""
    rate = report.steps / report.seconds if report.seconds else 0.0
    print(f"{report.machine:8} {report.steps:>12,} steps {report.seconds:>8.1f} s {rate:>10,.0f} steps/s", flush=True)
    if report.failure:
        print(report.failure, flush=True)


def main(given: list[str]) -> int:
    """0: all agreed. 1: some did not."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000, help="in total, over all machines")
    parser.add_argument("--seed", type=int, default=None, help="the same seed plays the same steps")
    parser.add_argument("--machine", choices=[*PURE, *ON_POSTGRES], help="this one alone")
    parser.add_argument("--replay", help="the numbers of one example, as a failure printed them")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no machine plays longer than this")
    parser.add_argument("--as-found", action="store_true", help="leave out steps, but do not shrink what is left")
    args = parser.parse_args(given)
    silence()
    os.environ["DULY_ALLOW_UNSAFE_DATABASE"] = "1"  # it need not survive a power cut
    names = [args.machine] if args.machine else list(SHARES)
    with database(names) as dsn:
        if args.replay:
            with machine(names[0], dsn) as one:
                failure = replay(one, [int(number) for number in args.replay.split(",")])
            print(failure or "it agrees")
            return 1 if failure else 0
        seed = random.randrange(1_000_000) if args.seed is None else args.seed
        print(f"seed {seed}", flush=True)
        failed = False
        for name in names:
            steps = args.steps * SHARES[name] // sum(SHARES[one] for one in names)
            with machine(name, dsn) as one:
                report = hunt(one, steps=steps, start=seed, most_seconds=args.seconds, shrink=not args.as_found)
            show(report)
            failed = failed or report.failure is not None
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
