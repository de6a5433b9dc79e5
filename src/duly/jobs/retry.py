"""When a failed job runs again: pure arithmetic, and the only place that decides it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

MAX_BACKOFF = timedelta(minutes=60)
SHARE_OF_DELAY = 0.1
FIRST_WAIT_SECONDS = 1.0  # for work that had no delay of its own to be proportional to


def backoff(retry_count: int, *, original_delay: timedelta, fixed_seconds: Sequence[int] | None = None) -> timedelta:
    """How long to wait before retry number ``retry_count`` (1 is the first).

    A fixed list wins; its last entry repeats. Otherwise a tenth of the original delay for each retry, 60 minutes at
    most: a 15 minute timer waits 1.5 minutes, then 3. Work that was due at once has no delay to be proportional to and
    doubles from one second.
    """
    if retry_count < 1:
        raise ValueError("the first retry is number 1")
    if fixed_seconds:
        return timedelta(seconds=fixed_seconds[min(retry_count, len(fixed_seconds)) - 1])
    if original_delay > timedelta(0):
        return min(original_delay * (SHARE_OF_DELAY * retry_count), MAX_BACKOFF)
    return min(timedelta(seconds=FIRST_WAIT_SECONDS * 2 ** min(retry_count - 1, 20)), MAX_BACKOFF)
