"""Real processes of the command line, and bounded waiting for what they do.

Unless they are asked for ``fresh`` (a new Python, from its first instruction), they are forked from a server that has
imported everything already: that takes milliseconds, and not the two seconds that a new one needs on a small machine.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Protocol

import httpx2

from duly.cli import main as command_line
from tests.forking import Forked

ROOT = Path(__file__).parents[3]
COMMAND = [sys.executable, "-m", "duly.cli.main"]
PATIENCE_SECONDS = 45.0


def environment(**settings: str) -> dict[str, str]:
    """This process's environment without anything that points at a database, plus ``settings``."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("DULY_", "PG", "DATABASE_URL"))}
    return {**kept, "DULY_APP": "tests.engine.cli.sample:app", **settings}


class Process(Protocol):
    """What tests do with one; ``subprocess.Popen`` is one, and so is what was forked."""

    pid: int

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def send_signal(self, number: int) -> None: ...

    def kill(self) -> None: ...


def _run_command(arguments: list[str], log: str) -> None:
    if log:
        opened = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(opened, 1)
        os.dup2(opened, 2)
        os.close(opened)
    sys.argv = ["duly", *arguments]
    command_line.run()


def duly(*arguments: str, env: Mapping[str, str], cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    process = Forked(_run_command, list(arguments), "", env=env, cwd=str(cwd))
    try:
        out, err = process.communicate(PATIENCE_SECONDS)
    finally:
        process.kill()
    return subprocess.CompletedProcess(list(arguments), process.wait(), out, err)


@contextlib.contextmanager
def running(*arguments: str, env: Mapping[str, str], log: Path, fresh: bool = False) -> Iterator[Process]:
    """A command that runs for the block; whatever happens, it does not outlive it. Its output is in ``log``."""
    with log.open("a") as file:
        process: Process = (
            _spawn(arguments, env, file)
            if fresh
            else Forked(_run_command, list(arguments), str(log), env=env, cwd=str(ROOT))
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(15)
                process.kill()
            process.wait()


def _spawn(arguments: tuple[str, ...], env: Mapping[str, str], file: IO[str]) -> subprocess.Popen[str]:
    return subprocess.Popen([*COMMAND, *arguments], env=env, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, text=True)


def wait_until(fact: Callable[[], object], *, seconds: float = PATIENCE_SECONDS, what: str = "") -> None:
    """Poll an outside process until the fact holds."""
    deadline = time.monotonic() + seconds
    while not fact():
        if time.monotonic() > deadline:
            raise AssertionError(f"did not happen within {seconds} s: {what or fact}")
        time.sleep(0.05)


def status(url: str) -> int:
    """The status code of a GET; 0 while nobody answers."""
    try:
        return httpx2.get(url, timeout=10).status_code
    except httpx2.TransportError:
        return 0


def end(process: Process, number: signal.Signals, *, seconds: float = 20) -> int:
    """Send a signal and wait for the exit code."""
    process.send_signal(number)
    return process.wait(seconds)


def children_of(pid: int) -> set[int]:
    """The living children of a process."""
    listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,stat="], capture_output=True, text=True, check=True).stdout
    found = (line.split() for line in listed.splitlines())
    return {int(child) for child, parent, state in found if int(parent) == pid and not state.startswith("Z")}


def is_alive(pid: int) -> bool:
    """Whether a process lives; one that nobody has collected yet does not."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout.strip()
    return bool(state) and not state.startswith("Z")


def free_port() -> int:
    """A port nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
