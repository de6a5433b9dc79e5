"""The history: one JSON line before and after each call, written by the clients, outside everything that fails.

``invoke`` comes first. ``ok`` has the answer, ``fail`` means that certainly nothing was kept, ``info`` that nobody
knows; what is unknown stays unknown unless a later ``ok`` or ``fail`` of the same operation settles it.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any


class History:
    """Streams to a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.counts: Counter[str] = Counter()
        self._file: IO[str] = path.open("a", buffering=1)

    def write(self, type_: str, op: str, kind: str, **more: Any) -> None:
        """One line."""
        self.counts[type_] += 1
        self._file.write(json.dumps({"t": time.monotonic(), "type": type_, "op": op, "kind": kind, **more}) + "\n")

    def close(self) -> None:
        """No more of it."""
        self._file.close()


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Its lines; a torn last one, of a run that was killed, is left out."""
    with path.open() as file:
        for line in file:
            if line.endswith("\n"):
                yield json.loads(line)
