"""Relays, receivers and workers as real processes: what ``duly relay``, ``duly receive`` and ``duly worker`` run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

import duly.outbox.relay
from duly import failpoints
from duly.cli.process import begin, run_async, run_forever
from duly.errors import DulyError
from tests.forking import forkserver

END_SECONDS = 40.0
LATE = ("duly.inbox.receiver", "duly.jobs.worker", "duly.schedules.tick", "uvloop")  # what commands import when needed


def preload(broker: str) -> None:
    """Let processes start from what these tests need; where no test of a broker runs, nothing changes."""
    forkserver.set_forkserver_preload(["tests.brokers.process", "tests.brokers.shop", f"duly.brokers.{broker}", *LATE])


class Part:
    """One process; its output is in a file."""

    def __init__(self, kinds: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.kinds = tuple(kinds)
        self._log = log
        self._process: BaseProcess = forkserver.Process(
            target=_main, args=(self.kinds, dict(environment), str(log)), daemon=True
        )
        self._process.start()

    @property
    def said(self) -> str:
        """What it wrote."""
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self._process.exitcode is None

    def wait(self, seconds: float = END_SECONDS) -> int:
        """How it ended: negative for a signal."""
        self._process.join(seconds)
        code = self._process.exitcode
        assert code is not None, f"{self.kinds} did not end within {seconds:.0f} seconds: {self.said[-3000:]}"
        return code

    def send(self, number: signal.Signals) -> None:
        """A signal, unless it has ended."""
        if self.is_running:
            assert self._process.pid is not None
            os.kill(self._process.pid, number)

    def kill(self) -> None:
        """The end, at once."""
        self.send(signal.SIGKILL)
        self.wait()

    def stop(self) -> int:
        """An orderly end; how it ended, and not before long."""
        self.send(signal.SIGTERM)
        return self.wait()

    def wait_until_stopped(self, seconds: float = END_SECONDS) -> None:
        """Until it has stopped itself at a failpoint."""
        ends_at = time.monotonic() + seconds
        while self._state() != "T":
            assert self.is_running, f"{self.kinds} has ended: {self.said[-3000:]}"
            assert time.monotonic() < ends_at, f"{self.kinds} did not stop: {self.said[-3000:]}"
            time.sleep(0.02)

    def _state(self) -> str:
        shown = subprocess.run(["ps", "-o", "stat=", "-p", str(self._process.pid)], capture_output=True, text=True)
        return shown.stdout.strip()[:1]


def _main(kinds: tuple[str, ...], environment: dict[str, str], log: str) -> None:
    with Path(log).open("a") as output:
        os.dup2(output.fileno(), sys.stdout.fileno())
        os.dup2(output.fileno(), sys.stderr.fileno())
    os.environ.update(environment)
    failpoints.arm(environment.get("DULY_FAILPOINTS", ""))
    duly.outbox.relay.LANE_LEASE_SECONDS = float(environment.get("LANE_LEASE_SECONDS", "60"))
    settings = begin()
    try:
        run_async(run_forever(settings.database_url, settings, kinds))
    except DulyError as error:  # as the command does
        print(f"duly: {error}", file=sys.stderr, flush=True)
        raise SystemExit(2) from None
