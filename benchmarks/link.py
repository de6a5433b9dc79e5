"""A measured process and the one that measures it: started, told to go, listened to, ended; a line of JSON a message.

Whoever works never shares a process with whoever watches. A child ends when its standard input does, so that none is
left behind, however the parent went.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from duly.clock import monotonic

ROOT = Path(__file__).parents[1]
READY_SECONDS = 60.0
END_SECONDS = 15.0
TAIL_CHARACTERS = 2_000


class Failed(Exception):
    """A measured process failed or took too long; the figure is missing, the run goes on."""


class Child:
    """The parent's end."""

    def __init__(self, role: str, **arguments: Any) -> None:
        self.role = role
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed when the child is
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.child", role, json.dumps(arguments)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, cwd=ROOT,
            start_new_session=True,
        )  # fmt: skip
        self._messages: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def __enter__(self) -> Child:
        """Wait until it is ready."""
        try:
            self.hear("ready", seconds=READY_SECONDS)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        """End it."""
        self.close()

    def tell(self, **message: Any) -> None:
        """Send it a line; one that is gone hears nothing, and the next ``hear`` says so."""
        with contextlib.suppress(OSError, ValueError):
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()

    def hear(self, wanted: str | None = None, *, seconds: float) -> dict[str, Any]:
        """Its next message, or the next one that has this key."""
        deadline = monotonic() + seconds
        while True:
            try:
                message = self._messages.get(timeout=max(0.0, deadline - monotonic()))
            except queue.Empty:
                what = repr(wanted) if wanted else "answer"
                raise Failed(f"{self.role}: no {what} within {seconds:.0f} s{self._tail()}") from None
            if message is None:
                self._messages.put(None)
                raise Failed(f"{self.role}: ended too early{self._tail()}")
            if wanted is None or wanted in message:
                return message

    def heard(self) -> list[dict[str, Any]]:
        """What it has said since, without waiting."""
        found: list[dict[str, Any]] = []
        while True:
            try:
                message = self._messages.get_nowait()
            except queue.Empty:
                return found
            if message is None:
                self._messages.put(None)
                raise Failed(f"{self.role}: ended too early{self._tail()}")
            found.append(message)

    def has_ended(self) -> bool:
        """Whether the process is gone."""
        return self._process.poll() is not None

    def close(self) -> None:
        """Ask it to end by closing its input; after a while, end it and whatever it started."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(END_SECONDS)
        self._listener.join(END_SECONDS)
        self._errors.close()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout:
            for line in self._process.stdout:
                try:
                    self._messages.put(dict(json.loads(line)))
                except (ValueError, TypeError):  # somebody printed
                    print(f"  {self.role}: {line.rstrip()}", file=sys.stderr)
        self._messages.put(None)

    def _tail(self) -> str:
        if self._errors.closed:
            return ""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0.5)  # its last words may still be on their way
        self._errors.seek(0)
        text = self._errors.read()[-TAIL_CHARACTERS:].strip()
        return f"; it said: {text}" if text else ""


@contextmanager
def children(count: int, role: str, **arguments: Any) -> Iterator[list[Child]]:
    """Several of a kind, started together, all ready."""
    started = [Child(role, **arguments) for _ in range(count)]
    with ExitStack() as stack:
        for child in started:
            stack.callback(child.close)
        for child in started:
            child.hear("ready", seconds=READY_SECONDS)
        yield started


class Link:
    """The child's end."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self._orders: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._listen, daemon=True).start()

    def tell(self, **message: Any) -> None:
        """Send the parent a line."""
        with contextlib.suppress(BrokenPipeError):
            sys.stdout.write(json.dumps(message) + "\n")
            sys.stdout.flush()

    async def order(self) -> dict[str, Any] | None:
        """The parent's next line; None when there will be none."""
        found = await self._orders.get()
        if found is None:
            self._orders.put_nowait(None)
        return found

    async def ready(self) -> bool:
        """Say so, and wait for the word to go; False when it never comes."""
        self.tell(ready=True)
        return await self.order() is not None

    def _listen(self) -> None:
        for line in sys.stdin:
            self._loop.call_soon_threadsafe(self._orders.put_nowait, json.loads(line))
        with contextlib.suppress(RuntimeError):  # the loop is closed: it had ended by itself
            self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        self.ended.set()
        self._orders.put_nowait(None)
