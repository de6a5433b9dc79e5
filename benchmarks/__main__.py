"""duly beside hand-written SQL and beside others, in one run on one PostgreSQL with default durability.

    python -m benchmarks                 everybody at everything, in one run
    python -m benchmarks engine          duly and the raw limit alone
    python -m benchmarks peers           the figures that others have too
    python -m benchmarks growth          at a thousand to ten million rows, and 100,000 schedules
    python -m benchmarks snapshot        under a snapshot held for ten minutes
    python -m benchmarks memory          an hour's load
    python -m benchmarks all             all of these
    python -m benchmarks quick           a few hundred jobs, to see that it works
    python -m benchmarks profile         where a worker's time goes
    python -m benchmarks report          write docs/performance.md from what was measured

Results are in build/bench/*.json, kept after every figure; ``report`` keeps the newest of each part beside the page.
Ratios count; rates are this machine's.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import psycopg

from benchmarks import report
from benchmarks.engine import OWN_FIGURES, SHARED_FIGURES, Bench, Sizes
from benchmarks.growth import SIZES, VARIANTS, Growth
from benchmarks.link import ROOT, Failed
from benchmarks.memory import Memory
from benchmarks.peers import PEERS
from benchmarks.queue import drain, fill
from benchmarks.results import Figures, Results
from benchmarks.server import BenchServer, describe
from benchmarks.snapshot import HeldSnapshot
from duly.telemetry import configure_logging

OUT = ROOT / "build" / "bench"
CACHE = ROOT / ".venv" / "peers"
PAGE = ROOT / "docs" / "performance.md"
PLOTS = ROOT / "docs" / "performance"
KEPT = PLOTS / "results"
PROFILED_JOBS = 50_000
QUICK_PHASE_MINUTES = 0.25


class Run:
    """One server, and the parts that were asked for."""

    def __init__(self, server: BenchServer, options: argparse.Namespace) -> None:
        self._server = server
        self._options = options
        self._only = [name for name in (options.only or "").split(",") if name]
        if options.part != "profile" and (
            unknown := set(self._only) - {*SHARED_FIGURES, *OWN_FIGURES, *VARIANTS, *PEERS}
        ):
            raise Failed(f"--only: {', '.join(sorted(unknown))}: no figure, peer or variant has this name")
        with server.database() as dsn:
            self._machine = describe(dsn)

    def bench(self) -> None:
        """Everybody at what all can do, then our own figures."""
        self.peers()
        self._own()

    def _own(self) -> None:
        self._engine(OWN_FIGURES)

    def engine(self) -> None:
        """Without peers."""
        self._engine((*SHARED_FIGURES, *OWN_FIGURES))

    def _engine(self, wanted: Sequence[str]) -> None:
        if chosen := self._chosen(wanted):
            Bench(self._server, self._figures("engine"), self._sizes()).run(chosen)

    def peers(self) -> None:
        """With peers; ``--only`` names figures, peers, or both."""
        figures = self._chosen(SHARED_FIGURES, others=PEERS)
        if figures:
            bench = Bench(self._server, self._figures("peers"), self._sizes(), cache=self._options.cache)
            bench.prepare_peers(self._chosen(PEERS, others=(*SHARED_FIGURES, *OWN_FIGURES)))
            bench.run(figures)

    def growth(self) -> None:
        """By size."""
        sizes = [int(size) for size in self._options.sizes.split(",")] if self._options.sizes else SIZES
        made = Growth(self._server, self._figures("growth"), rounds=self._options.rounds or 3, sizes=sizes)
        if self._options.jobs:
            made = replace(made, drained=self._options.jobs)
        if self._options.sizes:
            made = replace(made, schedules=[size for size in made.schedules if size <= max(sizes)] or [100])
        made.run(self._chosen(VARIANTS))

    def snapshot(self) -> None:
        """Held open."""
        made = HeldSnapshot(self._server, self._figures("snapshot"))
        if self._options.minutes:
            made = replace(made, minutes=self._options.minutes)
        if made.minutes < 3:  # somebody wants to see it work
            made = replace(made, around_minutes=QUICK_PHASE_MINUTES, window_seconds=5.0)
        made.run()

    def memory(self) -> None:
        """For long."""
        Memory(self._server, self._figures("memory"), minutes=self._options.minutes or 60.0).run()

    def everything(self) -> None:
        """One after the other; ``--minutes`` would mean two things here."""
        for part in (self.peers, self._own, self.growth, self.snapshot, self.memory):
            try:
                part()
            except (Failed, psycopg.Error, OSError) as error:
                print(f"{part.__name__}: broken off: {error}", file=sys.stderr)

    def profile(self) -> None:
        """The functions of a worker by their own time."""
        count = self._options.jobs or PROFILED_JOBS
        name = self._only[0] if self._only else "noop"
        self._options.out.mkdir(parents=True, exist_ok=True)
        path = self._options.out / f"profile-{name}.txt"
        with self._server.database() as dsn:
            fill(dsn, name, count)
            rate = drain(dsn, [name], count, seconds=600, profile=str(path.resolve()))
        print(path.read_text())
        print(f"{rate:,.0f} jobs/s under the profiler")

    def _figures(self, part: str) -> Figures:
        return Figures.begin(self._options.out, part, self._machine)

    def _sizes(self) -> Sizes:
        options = self._options
        sizes = Sizes.tiny(options.jobs or 200) if options.part == "quick" else Sizes()
        if options.jobs and options.part != "quick":
            sizes = replace(
                sizes, jobs=options.jobs, each=min(sizes.each, options.jobs), events=min(sizes.events, options.jobs)
            )
        return replace(sizes, rounds=options.rounds or sizes.rounds, timeout_seconds=options.timeout)

    def _chosen(self, known: Sequence[str], *, others: Sequence[str] = ()) -> list[str]:
        """Those of ``--only``, or all when it names none of these and is about others."""
        chosen = [name for name in known if name in self._only]
        return chosen or ([] if self._only and not set(self._only) <= set(others) else list(known))


PARTS: dict[str, Callable[[Run], None]] = {
    "bench": Run.bench, "quick": Run.engine, "engine": Run.engine, "peers": Run.peers, "growth": Run.growth,
    "snapshot": Run.snapshot, "memory": Run.memory, "all": Run.everything, "profile": Run.profile,
}  # fmt: skip


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("part", nargs="?", default="bench", choices=[*PARTS, "report"])
    parser.add_argument("--rounds", type=int, help="how often each figure is measured (3)")
    parser.add_argument("--minutes", type=float, help="how long the snapshot is held (10), or memory is watched (60)")
    parser.add_argument("--only", help="names of figures, peers or variants, with commas")
    parser.add_argument("--jobs", type=int, help="how many jobs a measurement takes (150,000)")
    parser.add_argument("--sizes", help="growth: how many rows, with commas (1000,100000,1000000,10000000)")
    parser.add_argument("--out", type=Path, help="where results are kept (build/bench; of quick, build/bench-quick)")
    parser.add_argument("--cache", type=Path, default=CACHE, help="where peers are installed (.venv/peers)")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds before a measurement is given up (120)")
    options = parser.parse_args(arguments)
    options.out = options.out or (OUT.with_name("bench-quick") if options.part == "quick" else OUT)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Start a PostgreSQL, measure, stop it, say what was found."""
    configure_logging(level="error", style="console")
    options = parse(arguments)
    if options.part == "report":
        Results.load(options.out).keep(KEPT)
        report.write(Results.load(KEPT), PAGE, PLOTS)
        print(f"wrote {PAGE.relative_to(ROOT)}")
        return 0
    signal.signal(signal.SIGTERM, _terminated)
    with tempfile.TemporaryDirectory(prefix="duly-bench-") as directory:
        server = BenchServer(Path(directory))
        try:
            server.start()
            PARTS[options.part](Run(server, options))
        except (Failed, psycopg.Error, OSError) as error:
            print(f"stopped: {error}", file=sys.stderr)
            return 1
        finally:
            server.stop()
    report.print_summary(Results.load(options.out), report.SECTIONS)
    return 0


def _terminated(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)  # so that the server and whoever was started are ended


if __name__ == "__main__":
    sys.exit(main())
