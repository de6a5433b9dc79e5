"""What a handler may return instead of finishing or raising."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from duly.errors import Invalid

MAX_SNOOZE = timedelta(days=3650)


@dataclass(frozen=True)
class Done:
    """It worked; the message goes into the history. Returning nothing means the same without one."""

    message: str | None = None


@dataclass(frozen=True)
class Snooze:
    """Not yet: run again after this long. It does not count as a retry."""

    wait: timedelta
    reason: str | None = None

    def __post_init__(self) -> None:
        """Refuse a wait that is negative or endless."""
        if not timedelta(0) <= self.wait <= MAX_SNOOZE:
            raise Invalid(f"snooze for {self.wait}: give a wait between nothing and ten years")


@dataclass(frozen=True)
class Cancel:
    """It is no longer needed; the job ends here."""

    reason: str


@dataclass(frozen=True)
class Fail:
    """It will never work: to the dead letters at once, whatever retries are left."""

    reason: str


Outcome = Done | Snooze | Cancel | Fail


@dataclass(frozen=True)
class Then:
    """The outside has been called; what follows from its answer and the job's end are one commit, fenced.

    ``work`` gets a transaction (a ``Tx``; in a plain ``def``, a ``Session``), writes, and may return an outcome. When
    that commit is lost or conflicts, ``work`` runs again, and the call is not repeated: let it do nothing but write.
    """

    work: Callable[[Any], Awaitable[Outcome | None] | Outcome | None]


@dataclass(frozen=True)
class ThenTogether:
    """``Then`` for many calls at once: one commit for all whose calls have ended by the time it begins.

    ``work`` gets a ``Tx`` and the items of several jobs, in the order in which their calls ended, and returns as many
    outcomes (or None). When it fails for several, it runs again for each alone. It writes for all of them, so what it
    emits or schedules carries the origin of none.
    """

    work: Callable[[Any, Sequence[Any]], Awaitable[Sequence[Outcome | None]]]
    item: Any


def check_outcome(outcome: Any) -> Outcome:
    """What a transaction came to: inside one there is nothing to put off."""
    if isinstance(outcome, Then | ThenTogether):
        raise Invalid("Then is for handlers without a transaction: inside one, write, and return the outcome")
    if inspect.isawaitable(outcome):
        raise Invalid("a plain def returns Then with a plain function, which gets a Session")
    return outcome if isinstance(outcome, Outcome) else Done()
