"""Real processes that start in milliseconds: forked from a server that has imported whatever any of them needs.

A new Python needs two seconds for that on a small machine. It is what a process *does* that these are for; whoever is
interested in how one starts, starts a fresh one.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import IO, Any

from duly import failpoints

forkserver = multiprocessing.get_context("forkserver")
forkserver.set_forkserver_preload(
    ["tests.crashes.process", "tests.engine.jobs.process", "tests.engine.cli.commands", "tests.chaos.process"]
)


class Forked:
    """As ``subprocess.Popen`` with pipes, as far as tests use it; the exit code is negative when a signal ended it."""

    def __init__(self, work: Callable[..., None], *arguments: Any, env: Mapping[str, str], cwd: str = "") -> None:
        (out, to_out), (err, to_err) = (multiprocessing.Pipe(duplex=False) for _ in range(2))
        given = (work, arguments, dict(env), cwd, to_out, to_err)
        self._process: BaseProcess = forkserver.Process(target=_be, args=given, daemon=True)
        self._process.start()
        to_out.close()
        to_err.close()
        assert self._process.pid is not None
        self.pid = self._process.pid
        self.stdout, self.stderr = _open(out), _open(err)

    @property
    def returncode(self) -> int | None:
        """How it ended, if it did."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """The same."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end."""
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        return code

    def wait_until_stopped(self, seconds: float = 20.0) -> None:
        """Until it has stopped itself."""
        deadline = time.monotonic() + seconds
        while not self._state().startswith("T"):
            assert self.poll() is None, f"it has ended: {self.poll()}"
            assert time.monotonic() < deadline, "it did not stop"
            time.sleep(0.01)

    def _state(self) -> str:
        return subprocess.run(["ps", "-o", "stat=", "-p", str(self.pid)], capture_output=True, text=True).stdout

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for its end; what it wrote."""
        said: dict[str, str] = {}
        readers = [
            threading.Thread(target=lambda file=file, name=name: said.update({name: file.read()}), daemon=True)
            for name, file in (("out", self.stdout), ("err", self.stderr))
        ]
        for reader in readers:
            reader.start()
        self.wait(timeout)
        for reader in readers:
            reader.join(timeout)
        return said.get("out", ""), said.get("err", "")

    def send_signal(self, number: int) -> None:
        """Unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it."""
        self.send_signal(signal.SIGKILL)


def _open(pipe: Connection[Any, Any]) -> IO[str]:
    with pipe:
        return os.fdopen(os.dup(pipe.fileno()), "r", errors="replace")


def _be(
    work: Callable[..., None],
    arguments: tuple[Any, ...],
    env: dict[str, str],
    cwd: str,
    out: Connection[Any, Any],
    err: Connection[Any, Any],
) -> None:
    os.dup2(out.fileno(), 1)
    os.dup2(err.fileno(), 2)
    out.close()
    err.close()
    os.environ.clear()
    os.environ.update(env)
    if cwd:
        os.chdir(cwd)
    failpoints.arm(env.get("DULY_FAILPOINTS", ""))
    work(*arguments)


def execute(code: str) -> None:
    """What ``python -c`` does."""
    sys.argv = ["-c"]
    exec(compile(code, "<test>", "exec"), {"__name__": "__main__"})
