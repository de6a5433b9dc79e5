"""Where the claims of some names begin (pure).

Usually at the start of the index. Claims that take long from there, two in a row, have walked over rows which are
deleted but cannot be cleaned away, because somebody keeps an old snapshot open. Then claims begin where the last one
got to, and the whole walk (it finds leases that ended, and whatever is due before) gets a twentieth of the time. One
slow claim alone was a hiccup of the machine, and says nothing. Where claims from there are hardly quicker, the machine
is busy and the way is not long: then nothing is passed over for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

CHEAP_CLAIM_SECONDS = 0.05
WALK_PAUSES = 20
WORTHWHILE = 1.5  # times as quick as the whole walk, or it is not the way that takes the time
MAX_WALK_PAUSE_SECONDS = 120.0
COMMIT_SECONDS = 0.2  # how much later than it is due a job may be committed and still be found without a walk
PRIORITIES = (1, 2, 3, 4)
Lane = tuple[str, int]


class Walk:
    """The way to the due jobs of some names."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = list(names)
        self._starts: dict[Lane, float] = {}  # where the last claim got to
        self._whole_at = float("-inf")  # until then, claims begin there
        self._last_whole_seconds = 0.0

    def is_whole(self, at: float) -> bool:
        """Whether a claim now begins at the start of the index."""
        return at >= self._whole_at

    @property
    def lacks_starts(self) -> bool:
        """Whether some lane is walked from the start of the index although it is a long way."""
        return len(self._starts) < len(PRIORITIES) * len(self.names)

    def note_whole(self, seconds: float, *, at: float) -> None:
        """How long a claim from the start of the index took."""
        usual = min(seconds, self._last_whole_seconds)
        self._last_whole_seconds = seconds
        if usual > CHEAP_CLAIM_SECONDS:
            self._whole_at = at + min(usual * WALK_PAUSES, MAX_WALK_PAUSE_SECONDS)
        else:
            self._starts.clear()

    def note_onward(self, seconds: float) -> None:
        """How long a claim from where the last one got to took."""
        if seconds * WORTHWHILE > self._last_whole_seconds:
            self._whole_at = float("-inf")
            self._last_whole_seconds = 0.0
            self._starts.clear()

    def note_found(self, found: Iterable[tuple[str, int, float]]) -> None:
        """Name, priority and time of what was claimed."""
        for name, priority, run_epoch in found:
            self._move((name, priority), run_epoch)

    def note_nothing_due(self, began: float) -> None:
        """When the claim that found no more began, by the database's clock: what came after that it has not seen."""
        for lane in self._lanes():
            self._move(lane, began)

    def onward(self) -> dict[str, Any]:
        """Every lane, and where its last claim got to."""
        lanes = self._lanes()
        return {
            "names": [name for name, _ in lanes],
            "priorities": [priority for _, priority in lanes],
            "starts": [self._starts.get(lane, float("-inf")) for lane in lanes],
        }

    def _move(self, lane: Lane, run_epoch: float) -> None:
        self._starts[lane] = max(self._starts.get(lane, float("-inf")), run_epoch - COMMIT_SECONDS)

    def _lanes(self) -> list[Lane]:
        """Every priority of every name, in the order of a claim."""
        return [(name, priority) for priority in PRIORITIES for name in self.names]
