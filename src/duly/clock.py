"""The only place that reads a machine's clock; decisions about time are made by ``duly.now()`` in the database."""

from __future__ import annotations

import time

# Seconds that never jump: for durations and waiting, never for deciding what is due.
monotonic = time.monotonic


def unix_milliseconds() -> int:
    """This machine's wall clock, good enough to order identifiers and nothing else."""
    return time.time_ns() // 1_000_000
