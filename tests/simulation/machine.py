"""What all machines share: a tape of numbers, one for each step, played against duly and against a model.

Hypothesis draws the tape as one string of bytes, which costs next to nothing for each step, and shrinks it when a step
disagrees. A step is one number: its remainders choose the rule and what the rule is given. Zero is no step at all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings
from hypothesis import strategies as st

T = TypeVar("T")
STEP_BYTES = 8
EXAMPLES_IN_ROUND = 100
MAX_DROPS = 400
SHRINK_SECONDS = 60.0


class Pick:
    """The choices of one step, taken from its number."""

    __slots__ = ("left",)

    def __init__(self, number: int) -> None:
        self.left = number

    def below(self, count: int) -> int:
        """A number from 0 to count - 1."""
        self.left, chosen = divmod(self.left, count)
        return chosen

    def of(self, things: Sequence[T]) -> T:
        """One of them."""
        self.left, chosen = divmod(self.left, len(things))
        return things[chosen]

    def some(self, things: Sequence[T], most: int) -> list[T]:
        """One to ``most`` of them, in any order, the same one possibly twice."""
        return [self.of(things) for _ in range(1 + self.below(most))] if things else []


class Disagreement(AssertionError):
    """duly did not do what the model says."""


class Machine:
    """One world and its model. Each rule does the same to both; ``check`` compares them after every step."""

    name: ClassVar[str]
    steps_in_example: ClassVar[int] = 60
    rules: ClassVar[tuple[Callable[[Any, Pick], None], ...]]  # a rule that is listed twice is chosen twice as often

    def __init__(self) -> None:
        self.told: list[str] = []
        self.telling = False
        self.played = 0

    def begin(self) -> None:
        """A new, empty world."""

    def check(self) -> None:
        """Compare world and model."""

    def end(self) -> None:
        """Leave nothing behind."""

    def close(self) -> None:
        """Nothing more will be played."""

    def tell(self, rule: str, *given: Any) -> None:
        """Say what a step does; written only when somebody will read it."""
        if self.telling:
            self.told.append(f"{rule}({', '.join(str(one) for one in given)})")

    def agree(self, what: str, found: Any, expected: Any) -> None:
        """They are equal, or the run ends here."""
        if found != expected:
            raise Disagreement(f"{what}\n    duly:  {found}\n    model: {expected}")

    def play(self, numbers: Sequence[int], *, telling: bool = False) -> None:
        """Play one tape from an empty world."""
        self.told, self.telling, self.played = [], telling, 0
        self.begin()
        try:
            for number in numbers:
                if number:
                    self.played += 1
                    pick = Pick(number)
                    pick.of(self.rules)(self, pick)
                    self.check()
        finally:
            self.end()


@dataclass
class Failure:
    """The smallest tape found on which world and model disagree."""

    machine: str
    numbers: list[int]
    told: list[str]
    error: str
    after_steps: int
    after_seconds: float

    def __str__(self) -> str:
        """What happened, and how to see it again."""
        steps = "\n".join(f"  {place}. {line}" for place, line in enumerate(self.told, 1))
        tape = ",".join(str(number) for number in self.numbers)
        return (
            f"{self.machine}: disagreed after {self.after_steps:,} steps ({self.after_seconds:.1f} s). The smallest "
            f"example:\n{steps}\n  {self.error}\n"
            f"Reproduce: python -m tests.simulation --machine {self.machine} --replay {tape}"
        )


@dataclass
class Report:
    """What one hunt did."""

    machine: str
    steps: int = 0
    seconds: float = 0.0
    failure: Failure | None = None


def hunt(
    machine: Machine, *, steps: int, start: int, most_seconds: float = float("inf"), shrink: bool = True
) -> Report:
    """Play until so many steps agreed, or some did not; the seed ``start`` decides which."""
    report = Report(machine.name)
    began = time.perf_counter()
    for number in range(steps):  # bounded: every round plays at least one step, or nothing is left to play
        left = -(-(steps - report.steps) // machine.steps_in_example)
        examples = 1 + min(EXAMPLES_IN_ROUND, left)  # the first one is Hypothesis's simplest tape: no step at all
        _round(machine, report, began, start=start * 1_000_003 + number, shrink=shrink, examples=examples)
        report.seconds = time.perf_counter() - began
        if report.failure or report.steps >= steps or report.seconds >= most_seconds:
            break
    return report


def _round(machine: Machine, report: Report, began: float, *, start: int, shrink: bool, examples: int) -> None:
    size = machine.steps_in_example * STEP_BYTES
    found: list[tuple[list[int], int, float]] = []  # the tapes that failed, and when

    @seed(start)
    @settings(
        max_examples=examples,
        phases=[Phase.generate, Phase.shrink] if shrink else [Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        verbosity=Verbosity.quiet,
    )
    @given(st.binary(min_size=size, max_size=size))
    def play(tape: bytes) -> None:
        numbers, now = read_tape(tape), time.perf_counter() - began
        if found and now - found[0][2] > SHRINK_SECONDS:
            return  # small enough
        try:
            machine.play(numbers)
        except Exception:
            found.append((numbers, report.steps + machine.played, now))
            raise
        if not found:
            report.steps += machine.played

    try:
        play()
    except Exception:
        if not found:
            raise
    if found:
        smallest = min((numbers for numbers, _, _ in found), key=lambda numbers: (_weight(numbers), numbers))
        report.steps = found[0][1]
        report.failure = _describe(machine, _drop_steps(machine, smallest), found[0][1], found[0][2])


def _weight(numbers: list[int]) -> int:
    return sum(number > 0 for number in numbers)


def read_tape(tape: bytes) -> list[int]:
    """The numbers on a tape."""
    return [int.from_bytes(tape[place : place + STEP_BYTES], "big") for place in range(0, len(tape), STEP_BYTES)]


def _drop_steps(machine: Machine, numbers: list[int]) -> list[int]:
    """Leave out whole steps, which is easier here than in a string of bytes."""
    kept = [number for number in numbers if number]
    place = len(kept) - 1
    for _ in range(MAX_DROPS):
        if place < 0:
            break
        fewer = kept[:place] + kept[place + 1 :]
        if _fails(machine, fewer) is not None:
            kept = fewer
        place -= 1
    return kept


def _fails(machine: Machine, numbers: list[int], *, telling: bool = False) -> Exception | None:
    try:
        machine.play(numbers, telling=telling)
    except Exception as error:  # noqa: BLE001 - whatever it was, it is what we look for
        return error
    return None


def _describe(machine: Machine, numbers: list[int], after_steps: int, after_seconds: float) -> Failure:
    error = _fails(machine, numbers, telling=True)
    said = f"{type(error).__name__}: {error}" if error else "it agreed when it was played again: not deterministic"
    return Failure(machine.name, numbers, list(machine.told), said, after_steps, after_seconds)


def replay(machine: Machine, numbers: list[int]) -> Failure | None:
    """Play one tape once more, telling what happens."""
    if _fails(machine, numbers) is None:
        return None
    return _describe(machine, numbers, len(numbers), 0.0)
