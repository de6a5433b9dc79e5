"""What every broker's server can do for a test, what a stranger's client is, and which brokers there are.

A broker is a module ``tests.brokers.server_<name>`` with a ``KIND``; whatever cannot be had here (no wheel, no package,
no Java) raises ``Absent`` with a sentence that says how to get it. ``LEAVE_OUT=kafka,rabbitmq`` leaves some out.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

NAMES = ("nats", "kafka", "rabbitmq", "sqs")
START_SECONDS = 60.0
STOP_SECONDS = 20.0


class Absent(RuntimeError):
    """This server cannot be had here; the message says what to install."""


class Server(Protocol):
    """A real server. Its port and its data stay the same from start to start, until it is closed."""

    @property
    def port(self) -> int:
        """Where it listens; known from the beginning."""
        ...

    def start(self) -> None:
        """Start it, and return when it answers."""
        ...

    def stop(self) -> None:
        """An orderly end."""
        ...

    def kill(self) -> None:
        """SIGKILL, to all of it."""
        ...

    def pause(self) -> None:
        """SIGSTOP: nothing is answered, and no connection is closed."""
        ...

    def resume(self) -> None:
        """SIGCONT."""
        ...

    def close(self) -> None:
        """The end of it, in whatever state it is."""
        ...


@dataclass(frozen=True)
class Raw:
    """A message as a stranger sees or sends it."""

    headers: Mapping[str, str]  # names in lower case when read
    body: bytes
    key: str = ""  # what order is kept by, where the broker knows such a thing


class Foreign(Protocol):
    """A client of the broker that knows nothing of duly: its own library, its own connection."""

    async def watch(self, topic: str) -> None:
        """See from now on what is published to a topic; called once, before anything is."""
        ...

    async def read(self, count: int, *, seconds: float = 30.0) -> list[Raw]:
        """What was seen since, in order and with repetitions, when it is at least so many (or the time is over)."""
        ...

    async def write(self, topic: str, type_: str, messages: Sequence[Raw]) -> None:
        """Send them in this order, acknowledged by the broker; headers and body go as they are."""
        ...

    async def flood(self, topic: str, type_: str, messages: Sequence[Raw]) -> None:
        """Send them as fast as the library can, in any order, each acknowledged: what a benchmark compares with."""
        ...

    async def close(self) -> None:
        """Hang up."""
        ...


@dataclass(frozen=True)
class Kind:
    """One broker: how to have a server of it, the address for duly, and a stranger to talk to it."""

    name: str
    make: Callable[[Path], Server]  # in an empty directory that is the server's own
    url: Callable[[Server], str]
    foreign: Callable[[Server], Foreign]
    binding: str  # what CloudEvents attributes are called as headers: "ce-", "ce_", ...; "" in structured mode
    carries_bytes: bool = True  # a body need not be text
    refuses_absent_topics: bool = True  # what was never set up can be told from what is empty
    shows_repetitions: bool = True  # a stranger sees what was sent twice; otherwise the broker knows it, and drops it
    lose_acknowledgement: Callable[[Server], None] | None = None  # the next one, where cutting the line does not do it
    restart_seconds: float = 30.0  # how long a server may need to serve again after it was killed
    environment: Mapping[str, str] = field(default_factory=dict)  # for processes that use it (credentials, say)


def find(name: str) -> Kind:
    """The broker of this name."""
    try:
        kind = importlib.import_module(f"tests.brokers.server_{name}").KIND
    except ImportError as error:
        raise Absent(f"{name}: {error}; `make test-brokers` installs what its tests need") from error
    assert isinstance(kind, Kind)
    return kind


def chosen() -> list[str]:
    """The brokers to test: all but those in LEAVE_OUT."""
    left_out = {name.strip() for name in os.environ.get("LEAVE_OUT", "").split(",") if name.strip()}
    if unknown := sorted(left_out - set(NAMES)):
        raise SystemExit(f"LEAVE_OUT names {', '.join(unknown)}; there are: {', '.join(NAMES)}")
    return [name for name in NAMES if name not in left_out]


class ProcessServer:
    """A server that is one program: for most of them this is all there is to write."""

    name = "server"
    start_seconds = START_SECONDS

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    def command(self) -> Sequence[str]:
        """What to run."""
        raise NotImplementedError

    def answers(self) -> bool:
        """Whether it serves by now."""
        return listens(self.port)

    def start(self) -> None:
        """Start it, and return when it answers."""
        assert self._process is None, f"{self.name} runs already"
        with (self.directory / "output.log").open("ab") as output:
            self._process = subprocess.Popen(
                self.command(), stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
        wait_until(self._came, self.start_seconds, f"{self.name} does not start")

    def stop(self) -> None:
        """An orderly end."""
        process = self._process
        if process is None:
            return
        self._signal(signal.SIGCONT)
        self._signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
        self.kill()

    def kill(self) -> None:
        """SIGKILL."""
        if self._process is not None:
            self._signal(signal.SIGKILL)
            self._process.wait(STOP_SECONDS)
            self._process = None

    def pause(self) -> None:
        """SIGSTOP, in effect when this returns: on a busy machine that takes a moment."""
        assert self._process is not None, f"{self.name} is not running"
        self._signal(signal.SIGSTOP)
        threads = Path(f"/proc/{self._process.pid}/task")
        wait_until(lambda: all(_is_stopped(one) for one in threads.iterdir()), STOP_SECONDS, f"{self.name} goes on")

    def resume(self) -> None:
        """SIGCONT."""
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        """The end of it."""
        self.kill()

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None, f"{self.name} is not running"
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _came(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            said = (self.directory / "output.log").read_text(errors="replace")[-2000:]
            raise RuntimeError(f"{self.name} ended with {self._process.returncode}: {said}")
        return self.answers()


def _is_stopped(thread: Path) -> bool:
    return (thread / "stat").read_text().rpartition(")")[2].split()[0] == "T"


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as line:
        return int(line.getsockname()[1])


def listens(port: int) -> bool:
    """Whether somebody takes connections there."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


def wait_until(fact: Callable[[], bool], seconds: float, otherwise: str) -> None:
    """Wait for something to become true."""
    ends_at = time.monotonic() + seconds
    while not fact():
        assert time.monotonic() < ends_at, f"{otherwise} within {seconds:.0f} seconds"
        time.sleep(0.02)
