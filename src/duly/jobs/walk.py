"""Where the claims of some names begin (pure).

Usually at the start of the index. A claim that takes long from there has walked over rows which are deleted but cannot
be cleaned away, because somebody keeps an old snapshot open. Then claims begin where the last one got to, and what lies
behind (leases that ended, whatever is due before) is looked through a slice at a time, from the newest to the oldest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

CHEAP_CLAIM_SECONDS = 0.05
COMMIT_SECONDS = 0.2  # how much later than it is due a job may be committed and still be found by the next claim
NEAR_SECONDS = 10.0  # and how much later to be found by one of the next slices
SLICE_SECONDS = 0.02  # what a slice may cost
SLICE_PAUSES = 10  # and how many times that passes before the next one
OLDEST_SECONDS = 4e9  # behind this comes everything else
SHORTEST_SPAN_SECONDS = 0.001
PRIORITIES = (1, 2, 3, 4)
Lane = tuple[str, int]


@dataclass
class Sweep:
    """Looks back from where claims begin, again and again: ``behind`` says how far it got, ``span`` how far it goes."""

    nearest: float
    farthest: float
    behind: float = field(init=False)
    span: float = 1.0
    spent: float = 0.0

    def __post_init__(self) -> None:
        """From the near end."""
        self.behind = self.nearest

    @property
    def until(self) -> float:
        """How far the next slice goes; beyond ``OLDEST_SECONDS`` it goes to the start of the index."""
        until = min(self.behind + self.span, self.farthest)
        return float("inf") if until >= OLDEST_SECONDS else until

    def advance(self, seconds: float) -> float | None:
        """After a slice that found no more than it could take. At the end: what all slices cost together."""
        self.behind = self.until
        self.spent += seconds
        if seconds < SLICE_SECONDS / 2:
            self.span *= 4
        elif seconds > SLICE_SECONDS * 2:
            self.span = max(self.span / 4, SHORTEST_SPAN_SECONDS)
        if self.behind < min(self.farthest, OLDEST_SECONDS):
            return None
        spent, self.behind, self.spent = self.spent, self.nearest, 0.0
        self.span = min(self.span, 1.0)
        return spent


class Walk:
    """The way to the due jobs of some names."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = list(names)
        self.is_long = False
        self._starts: dict[Lane, float] = {}  # where the last claim got to
        self._sweeps = [Sweep(0.0, NEAR_SECONDS), Sweep(NEAR_SECONDS, float("inf"))]
        self._slice_at = float("-inf")

    @property
    def lacks_starts(self) -> bool:
        """Whether some lane is walked from the start of the index, still."""
        return len(self._starts) < len(PRIORITIES) * len(self.names)

    def note_whole(self, seconds: float) -> None:
        """How long a claim from the start of the index took."""
        self.is_long = seconds > CHEAP_CLAIM_SECONDS

    def note_found(self, found: Iterable[tuple[str, int, float]], *, now: float | None) -> None:
        """Name, priority and time of what was claimed; ``now`` (the database's), if nothing else was due."""
        for name, priority, run_epoch in found:
            self._move((name, priority), run_epoch)
        if now is not None:
            for lane in self._lanes():
                self._move(lane, now)

    def onward(self) -> dict[str, Any]:
        """From where the last claim got to."""
        lanes = self._lanes()
        starts = [self._starts.get(lane, float("-inf")) for lane in lanes]
        return _bounds(lanes, starts, [float("inf")] * len(lanes))

    def slice(self, at: float) -> dict[str, Any] | None:
        """What to look through behind that; None while it is too early for the next slice."""
        lanes = [lane for lane in self._lanes() if lane in self._starts]
        if at < self._slice_at or not lanes:
            return None
        sweep = self._sweeps[0]
        starts = [self._starts[lane] for lane in lanes]
        return _bounds(lanes, [start - sweep.until for start in starts], [start - sweep.behind for start in starts])

    def note_slice(self, seconds: float, *, at: float, is_full: bool) -> None:
        """How long the slice took; if it found all that it could take, it is looked through once more."""
        self._slice_at = at + seconds * SLICE_PAUSES
        if is_full:
            return
        sweep, other = self._sweeps
        spent = sweep.advance(seconds)
        self._sweeps = [other, sweep]  # they take turns
        if spent is not None and sweep.farthest > OLDEST_SECONDS and spent <= 2 * CHEAP_CLAIM_SECONDS:
            self.is_long = False  # the old snapshot seems gone, and the rest cleaned away: the next claim tells
            self._starts.clear()

    def _move(self, lane: Lane, run_epoch: float) -> None:
        self._starts[lane] = max(self._starts.get(lane, float("-inf")), run_epoch - COMMIT_SECONDS)

    def _lanes(self) -> list[Lane]:
        """Every priority of every name, in the order of a claim."""
        return [(name, priority) for priority in PRIORITIES for name in self.names]


def _bounds(lanes: Sequence[Lane], starts: list[float], ends: list[float]) -> dict[str, Any]:
    return {
        "names": [name for name, _ in lanes],
        "priorities": [priority for _, priority in lanes],
        "starts": starts,
        "ends": ends,
    }
