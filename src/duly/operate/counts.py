"""Numbers that stop at ten thousand at the latest, so that counting costs the same with a million rows."""

from __future__ import annotations

from dataclasses import dataclass

CAP = 10_000
STEPS = (CAP, 5_000, 2_000, 1_000, 500, 200, 100)
BUDGET = 100_000
NAMES_LIMIT = 1_000


def cap_for(names: int) -> int:
    """How far to count each of so many names: all of them together stay within a budget."""
    return next((step for step in STEPS if step * names <= BUDGET), STEPS[-1])


@dataclass(frozen=True)
class Count:
    """How many there are; ``more`` says that there are more than were counted."""

    number: int
    more: bool = False

    @classmethod
    def of(cls, counted: int, *, cap: int = CAP, more: bool = False) -> Count:
        """From a count that stopped one past the cap."""
        return cls(min(int(counted), cap), more or counted > cap)

    def __str__(self) -> str:
        return f"{self.number:,}{'+' if self.more else ''}"
