"""A clock that tests move."""

from __future__ import annotations


class MovedClock:
    """Seconds that pass only when a test says so."""

    def __init__(self, start: float = 1_000.0) -> None:
        self.seconds = start

    def __call__(self) -> float:
        return self.seconds

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.seconds += seconds
