"""What was measured: kept as JSON after every figure, summed up as medians, spreads and ratios within a round."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

MAX_REASON = 400
Round = dict[str, Any]
"""One round of a figure: a value for each contestant that finished."""


@dataclass(frozen=True)
class Spread:
    """A median with the smallest and the largest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread | None:
        """None of nothing."""
        found = sorted(values)
        return cls(statistics.median(found), found[0], found[-1]) if found else None


@dataclass
class Figures:
    """One part's results; each change is on disk at once, so that a run that breaks off loses nothing."""

    path: Path
    content: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def begin(cls, directory: Path, part: str, machine: Mapping[str, Any]) -> Figures:
        """A new file, dated now."""
        directory.mkdir(parents=True, exist_ok=True)
        at = datetime.now(UTC).isoformat(timespec="seconds")
        figures = cls(directory / f"{part}.json", {"part": part, "at": at, "machine": dict(machine), "figures": {}})
        figures.save()
        return figures

    def add(self, figure: str, number: int, contestant: str, value: Any) -> None:
        """Keep one measurement of one round."""
        rounds = self.content["figures"].setdefault(figure, {"rounds": []})["rounds"]
        while len(rounds) <= number:
            rounds.append({})
        rounds[number][contestant] = value
        self.save()

    def note(self, key: str, name: str, value: Any) -> None:
        """Keep a fact: a peer's version, or why something is missing."""
        self.content.setdefault(key, {})[name] = value
        self.save()

    def rounds(self, figure: str) -> list[Round]:
        """The rounds of a figure so far."""
        return list(self.content["figures"].get(figure, {}).get("rounds", []))

    def save(self) -> None:
        """Replace the file as a whole: a reader never sees half of it."""
        draft = self.path.with_suffix(".tmp")
        draft.write_text(json.dumps(self.content, indent=1))
        draft.replace(self.path)


@dataclass(frozen=True)
class Results:
    """Every part that was measured."""

    parts: Mapping[str, Mapping[str, Any]]

    @classmethod
    def load(cls, directory: Path) -> Results:
        """What is there; nothing, if nothing was measured."""
        found = {path.stem: json.loads(path.read_text()) for path in sorted(directory.glob("*.json"))}
        return cls(found)

    def keep(self, directory: Path) -> None:
        """Put each part in the place of an older one, so that the page can be written again without measuring."""
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in self.parts.items():
            (directory / f"{name}.json").write_text(json.dumps(_rounded(content), separators=(",", ":")) + "\n")

    def part_of(self, figure: str) -> str | None:
        """Which part has the figure; one with peers in it comes first."""
        for name in ("peers", "engine", "growth", "snapshot", "memory"):
            if self.parts.get(name, {}).get("figures", {}).get(figure, {}).get("rounds"):
                return name
        return None

    def rounds(self, figure: str) -> list[Round]:
        """The rounds of a figure; none, if it was not measured."""
        part = self.part_of(figure)
        return [] if part is None else list(self.parts[part]["figures"][figure]["rounds"])

    def peers(self) -> dict[str, dict[str, Any]]:
        """The peers that could be prepared."""
        return dict(self.parts.get("peers", {}).get("peers", {}))

    def missing(self) -> dict[str, str]:
        """Why something has no figure, by what it is."""
        found: dict[str, str] = {}
        for part in self.parts.values():
            found.update(part.get("missing", {}))
        return found


def _rounded(content: Any) -> Any:
    """Six significant digits are more than any of these figures is worth."""
    if isinstance(content, float):
        return float(f"{content:.6g}")
    if isinstance(content, dict):
        return {key: _rounded(value) for key, value in content.items()}
    if isinstance(content, list):
        return [_rounded(value) for value in content]
    return content


def short(reason: str) -> str:
    """The beginning and the end: the end of a traceback says what went wrong."""
    line = " ".join(reason.split())
    return line if len(line) <= MAX_REASON else f"{line[: MAX_REASON // 3]} ... {line[-MAX_REASON * 2 // 3 :]}"


def spread_of(rounds: Sequence[Round], contestant: str) -> Spread | None:
    """One contestant's values over the rounds."""
    return Spread.of(one[contestant] for one in rounds if contestant in one)


def contestants(rounds: Sequence[Round]) -> list[str]:
    """Whoever finished at least once, in the order of appearance."""
    return list(dict.fromkeys(name for one in rounds for name in one))


Value = Callable[[Round], float | None]


def value_of(name: str) -> Value:
    """One contestant's value in a round."""
    return lambda one: one.get(name)


def best_of(*names: str, least: bool = False) -> Value:
    """The best value among these in a round: the largest, or the least."""
    choose = min if least else max
    return lambda one: choose((one[name] for name in names if name in one), default=None)


def ratio(rounds: Sequence[Round], above: Value, below: Value) -> Spread | None:
    """Divided within each round, so that what disturbs a round disturbs both; then the median."""
    pairs = [(above(one), below(one)) for one in rounds]
    return Spread.of(a / b for a, b in pairs if a is not None and b)


def percentile(values: Sequence[float], share: float) -> float:
    """By the nearest rank: a value that was really measured."""
    ordered = sorted(values)
    return ordered[max(0, min(len(ordered) - 1, int(len(ordered) * share + 0.999999) - 1))]


def percentiles(rounds: Sequence[Round], share: float) -> list[Round]:
    """Rounds of samples as rounds of one percentile each."""
    return [{name: percentile(values, share) for name, values in one.items() if values} for one in rounds]


def slope(points: Sequence[tuple[float, float]]) -> float | None:
    """The least-squares slope of y over x; None of fewer than three points."""
    if len(points) < 3 or len({x for x, _ in points}) < 2:
        return None
    return statistics.linear_regression([x for x, _ in points], [y for _, y in points]).slope
