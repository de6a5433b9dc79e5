"""What the figures have to reach, each a ratio within one run, and whether they do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.results import Results, Round, Spread, best_of, percentiles, ratio, slope, value_of

DULY = ("duly", "duly-asyncpg")
RAW = ("raw", "raw-overlapped")
SMALL, LARGE = "1000", "10000000"
GROWTH_VARIANTS = ("due", "future", "history")
FLAT_MIB_PER_HOUR = 5.0
WARM_UP_SHARE = 0.2
LAST_WINDOWS = 4
LEAST_HELD_SECONDS = 480.0
LEAST_WATCHED_SECONDS = 3000.0


@dataclass(frozen=True)
class Target:
    """A demand on a ratio; ``at_most`` turns it round."""

    what: str
    need: float
    measure: Callable[[Results], Spread | None]
    at_most: bool = False
    unit: str = "x"


@dataclass(frozen=True)
class Verdict:
    """A target and what was measured; ``met`` is None where nothing was."""

    target: Target
    found: Spread | None

    @property
    def met(self) -> bool | None:
        """Judged by the median."""
        if self.found is None:
            return None
        target = self.target
        return self.found.median <= target.need if target.at_most else self.found.median >= target.need


def judge(results: Results) -> list[Verdict]:
    """Every target."""
    return [Verdict(target, target.measure(results)) for target in TARGETS]


def best_peer(results: Results) -> tuple[str, ...]:
    """Whoever keeps its queue as safe as we do; one that may lose what it was given is only shown."""
    return tuple(name for name, peer in results.peers().items() if peer.get("durable"))


def latency_ratio(share: float) -> Callable[[Results], Spread | None]:
    """Ours to the best peer's, at one percentile."""

    def measure(results: Results) -> Spread | None:
        rounds = percentiles(results.rounds("latency"), share)
        return ratio(rounds, best_of(*DULY, least=True), best_of(*best_peer(results), least=True))

    return measure


def growth_ratio(kind: str) -> Callable[[Results], Spread | None]:
    """How much worse it is at ten million than at a thousand; of the kinds of rows, the worst."""

    def measure(results: Results) -> Spread | None:
        found = [growth_of(results.rounds(f"{kind}:{variant}"), kind) for variant in GROWTH_VARIANTS]
        known = [one for one in found if one is not None]
        return max(known, key=lambda one: one.median, default=None) if len(known) == len(GROWTH_VARIANTS) else None

    return measure


def growth_of(rounds: Sequence[Round], kind: str) -> Spread | None:
    """For rates the smaller the worse, for times the larger."""
    if kind == "throughput":
        return ratio(rounds, value_of(SMALL), value_of(LARGE))
    return ratio(rounds, value_of(LARGE), value_of(SMALL))


def snapshot_ratio(results: Results) -> Spread | None:
    """The last windows under the snapshot to the first minute without it; a short run says nothing."""
    windows = results.rounds("windows")
    before = Spread.of(one["rate"] for one in windows if one.get("phase") == "before")
    held = [one for one in windows if one.get("phase") == "held"]
    if before is None or not held or held[-1]["at"] - held[0]["at"] < LEAST_HELD_SECONDS:
        return None
    return Spread.of(one["rate"] / before.median for one in held[-LAST_WINDOWS:])


def memory_slopes(results: Results) -> dict[str, float]:
    """MiB an hour of each process, after the warm-up."""
    samples = results.rounds("memory")
    found: dict[str, float] = {}
    for name in [key for key in (samples[0] if samples else {}) if key != "seconds"]:
        points = [(one["seconds"] / 3600, one[name]) for one in samples[int(len(samples) * WARM_UP_SHARE) :]]
        gradient = slope(points)
        if gradient is not None:
            found[name] = gradient
    return found


def memory_growth(results: Results) -> Spread | None:
    """Of all processes, the largest; a short run says nothing."""
    found = memory_slopes(results)
    if not found or results.rounds("memory")[-1]["seconds"] < LEAST_WATCHED_SECONDS:
        return None
    return Spread(max(found.values()), min(found.values()), max(found.values()))


def _in(figure: str, above: str | tuple[str, ...], below: str | tuple[str, ...]) -> Callable[[Results], Spread | None]:
    over = best_of(*((above,) if isinstance(above, str) else above))
    under = best_of(*((below,) if isinstance(below, str) else below))
    return lambda results: ratio(results.rounds(figure), over, under)


TARGETS: tuple[Target, ...] = (
    Target("no-op jobs, against PgQueuer", 3.0, _in("noop", DULY, "pgqueuer")),
    Target("no-op jobs, against graphile-worker", 1.3, _in("noop", DULY, "graphile-worker")),
    Target("no-op jobs, against the raw loop that writes the same rows", 0.5, _in("noop", DULY, RAW)),
    Target(
        "a hundred and more transactional jobs in a commit, against a commit each", 10.0,
        _in("transactional", ("group-100", "group-500"), "each"),
    ),
    Target(
        "the same with handlers that write a row", 10.0,
        _in("writing", "write-group-100", "write-each"),
    ),
    Target("commit to start at 50 jobs/s, p50, against the best peer", 1.0, latency_ratio(0.5), at_most=True),
    Target("commit to start at 50 jobs/s, p99, against the best peer", 1.0, latency_ratio(0.99), at_most=True),
    Target("bulk enqueue, against PgQueuer", 2.0, _in("enqueue_bulk", DULY, "pgqueuer")),
    Target("bulk enqueue, against COPY from the same driver", 0.5, _in("enqueue_bulk", DULY, "raw")),
    Target("throughput lost from 10³ to 10⁷ rows", 1.3, growth_ratio("throughput"), at_most=True),
    Target("cost of a claim, from 10³ to 10⁷ rows", 1.3, growth_ratio("claim_ms"), at_most=True),
    Target("throughput under a held snapshot, against before", 0.8, snapshot_ratio),
    Target("memory, growth after warm-up", FLAT_MIB_PER_HOUR, memory_growth, at_most=True, unit=" MiB/h"),
)  # fmt: skip
