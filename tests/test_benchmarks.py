"""The speed harness: its arithmetic, its verdicts, its page; and that it measures real workers on a real database."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from benchmarks import report
from benchmarks.engine import OWN_FIGURES, SHARED_FIGURES, Bench, Sizes
from benchmarks.link import Child, Failed
from benchmarks.results import Figures, Results, Spread, best_of, percentile, ratio, slope, spread_of, value_of
from benchmarks.targets import judge

from duly.testing import TestServer

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "performance.md"
MACHINE = {
    "cores": 2, "memory_gib": 8.0, "architecture": "x86_64", "python": "3.11", "postgresql": "18", "settings": {},
}  # fmt: skip


def part(name: str, figures: dict[str, list[dict[str, Any]]], **more: Any) -> dict[str, Any]:
    """What a run leaves behind."""
    rounds = {figure: {"rounds": found} for figure, found in figures.items()}
    return {"part": name, "at": "2030-01-02T03:04:05+00:00", "machine": MACHINE, "figures": rounds, **more}


def windows(held_rate: float, seconds: float = 600.0) -> list[dict[str, Any]]:
    """A run with a snapshot held, in windows of half a minute."""
    facts = {"dead": 10, "bytes": 1}
    before = [{"phase": "before", "rate": 100.0, "at": at, **facts} for at in (0.0, 30.0)]
    before[-1] |= {"claim_ms": 1.0, "claim_buffers": 1}
    return before + [
        {"phase": "held", "rate": held_rate, "at": 60.0 + 30.0 * n, **facts} for n in range(int(seconds / 30))
    ]


@pytest.fixture
def sample() -> Results:
    """Everything measured, some targets met and some not."""
    sizes = {"1000": 1000.0, "10000000": 900.0}
    costs = {"1000": 2.0, "10000000": 5.0}
    peers = {"pgqueuer": {"version": "1", "durable": True}, "celery-redis": {"version": "5", "durable": False}}
    return Results({
        "peers": part(
            "peers",
            {
                "noop": [
                    {"duly": 3500.0, "raw": 5000.0, "raw-overlapped": 6000.0, "pgqueuer": 1000.0},
                    {"duly": 1750.0, "raw": 2500.0, "raw-overlapped": 2000.0, "pgqueuer": 500.0},
                ],
                "enqueue_bulk": [{"duly": 10.0, "duly-asyncpg": 30.0, "raw": 50.0, "pgqueuer": 20.0}],
                "latency": [{"duly": [2.0] * 99 + [9.0], "pgqueuer": [3.0] * 99 + [8.0], "celery-redis": [1.0] * 100}],
            },
            peers=peers,
            missing={"oban": "no Elixir | here", "noop, dbos": "it hung"},
        ),
        "engine": part("engine", {"transactional": [{"each": 100.0, "group-100": 900.0, "group-500": 1200.0}]}),
        "growth": part(
            "growth",
            {f"throughput:{variant}": [sizes] for variant in ("due", "future", "history")}
            | {f"claim_ms:{variant}": [costs] for variant in ("due", "future", "history")},
        ),
        "snapshot": part("snapshot", {"windows": windows(held_rate=79.0)}),
        "memory": part("memory", {"memory": [{"seconds": 60.0 * n, "worker": 90.0 + n / 60} for n in range(61)]}),
    })  # fmt: skip


def test_a_ratio_is_taken_within_each_round() -> None:
    rounds = [{"a": 10.0, "b": 5.0}, {"a": 1000.0, "b": 200.0}, {"a": 3.0}, {"b": 1.0, "c": 9.0}]
    assert ratio(rounds, value_of("a"), value_of("b")) == Spread(3.5, 2.0, 5.0)
    assert ratio(rounds, value_of("a"), value_of("nobody")) is None
    assert ratio(rounds, best_of("b", "c"), value_of("b")) == Spread(1.0, 1.0, 9.0)
    assert spread_of(rounds, "a") == Spread(10.0, 3.0, 1000.0)


def test_percentiles_and_slopes() -> None:
    values = [float(n) for n in range(100, 0, -1)]
    assert [percentile(values, share) for share in (0.5, 0.95, 0.99)] == [50.0, 95.0, 99.0]
    assert percentile([7.0], 0.99) == 7.0
    assert slope([(0.0, 1.0), (1.0, 3.0), (2.0, 5.0)]) == pytest.approx(2.0)
    assert slope([(0.0, 1.0), (1.0, 3.0)]) is None


def test_every_target_is_judged_by_its_median(sample: Results) -> None:
    found = {verdict.target.what: verdict for verdict in judge(sample)}
    met = {what: verdict.met for what, verdict in found.items()}
    assert met == {
        "no-op jobs, against PgQueuer": True,
        "no-op jobs, against graphile-worker": None,
        "no-op jobs, against the raw loop that writes the same rows": True,
        "a hundred and more transactional jobs in a commit, against a commit each": True,
        "the same with handlers that write a row": None,
        "commit to start at 50 jobs/s, p50, against the best peer": True,
        "commit to start at 50 jobs/s, p99, against the best peer": True,
        "bulk enqueue, against PgQueuer": False,
        "bulk enqueue, against COPY from the same driver": True,
        "throughput lost from 10³ to 10⁷ rows": True,
        "cost of a claim, from 10³ to 10⁷ rows": False,
        "throughput under a held snapshot, against before": False,
        "memory, growth after warm-up": True,
    }
    raw = found["no-op jobs, against the raw loop that writes the same rows"].found
    assert raw is not None
    assert (raw.low, raw.high) == (3500 / 6000, 1750 / 2500)  # in each round the better of the two raw loops


def test_what_was_not_measured_or_too_short_is_not_judged() -> None:
    assert {verdict.met for verdict in judge(Results({}))} == {None}
    short = Results({"snapshot": part("snapshot", {"windows": windows(held_rate=99.0, seconds=60.0)})})
    assert {verdict.met for verdict in judge(short)} == {None}


def test_the_page_has_a_place_for_every_section_and_nothing_else() -> None:
    names = [found[2] for found in report.MARKERS.finditer(PAGE.read_text())]
    assert sorted(names) == sorted(report.SECTIONS)
    assert {*SHARED_FIGURES, *OWN_FIGURES} <= set(names)


def test_the_report_is_written_from_results_alone(sample: Results, tmp_path: Path) -> None:
    page, plots = tmp_path / "performance.md", tmp_path / "performance"
    page.write_text(PAGE.read_text())
    report.write(sample, page, plots)
    text = page.read_text()
    assert "| no-op jobs, against PgQueuer | ≥ 3x | 3.50x (3.50 to 3.50) | met |" in text
    assert "| bulk enqueue, against PgQueuer | ≥ 2x | 1.50x (1.50 to 1.50) | **not met** |" in text
    assert "| no-op jobs, against graphile-worker | ≥ 1.3x | - | not measured |" in text
    assert "left out: no Elixir / here" in text
    assert "Left out: dbos (it hung)." in text
    assert "![noop](performance/noop.svg)" in text
    assert report.NOT_MEASURED in text  # the relay was not measured
    for drawn in plots.glob("*.svg"):
        assert ElementTree.parse(drawn).getroot().tag.endswith("svg")
        assert "prefers-color-scheme: dark" in drawn.read_text()
    assert {drawn.stem for drawn in plots.glob("*.svg")} >= {"noop", "latency", "growth", "snapshot", "memory"}

    report.write(Results({}), page, plots)  # nothing is left of it when there are no results
    assert not list(plots.glob("*.svg"))
    assert "3.50x" not in page.read_text()
    assert (
        page.read_text().count(report.NOT_MEASURED) == len(report.SECTIONS) - 1
    )  # the targets are listed all the same


def test_what_was_measured_earlier_is_kept_until_it_is_measured_again(sample: Results, tmp_path: Path) -> None:
    sample.keep(tmp_path)
    later = Results({"growth": part("growth", {"throughput:due": [{"1000": 1.23456789}]})})
    later.keep(tmp_path)
    kept = Results.load(tmp_path)
    assert set(kept.parts) == set(sample.parts) | {"growth"}
    assert kept.rounds("throughput:due") == [{"1000": 1.23457}]
    assert kept.rounds("noop") == sample.rounds("noop")


def test_every_number_of_the_page_is_of_the_results_beside_it() -> None:
    """Whoever edits a table by hand, or forgets to write the page anew, is found out."""
    results = Results.load(PAGE.parent / "performance" / "results")
    drawn = report.draw(results)
    assert report.fill(PAGE.read_text(), results, set(drawn)) == PAGE.read_text()
    for name, content in drawn.items():
        assert (PAGE.parent / "performance" / f"{name}.svg").read_text() == content


def test_each_figure_is_on_disk_as_soon_as_it_is_measured(tmp_path: Path) -> None:
    figures = Figures.begin(tmp_path, "engine", MACHINE)
    figures.add("noop", 1, "duly", 5.0)
    figures.note("missing", "noop, raw", "it hung")
    kept = Results.load(tmp_path)
    assert kept.rounds("noop") == [{}, {"duly": 5.0}]
    assert kept.missing() == {"noop, raw": "it hung"}
    assert json.loads((tmp_path / "engine.json").read_text())["machine"]["cores"] == 2


def test_a_process_that_dies_says_why() -> None:
    with pytest.raises(Failed, match="KeyError: 'nobody'"), Child("nobody"):
        pass


class TestDatabases:
    """The test server, as the harness wants it."""

    __test__ = False

    def __init__(self, server: TestServer) -> None:
        self._server = server

    @contextmanager
    def database(self) -> Iterator[str]:
        """With duly's schema."""
        with self._server.database() as dsn:
            yield dsn

    empty_database = database


def test_a_quick_run_measures_duly_and_raw(server: TestServer, tmp_path: Path) -> None:
    figures = Figures.begin(tmp_path, "engine", MACHINE)
    Bench(TestDatabases(server), figures, Sizes.tiny(200)).run(["noop"])
    results = Results.load(tmp_path)
    assert results.missing() == {}
    assert set(results.rounds("noop")[0]) == {"duly", "raw", "raw-overlapped"}
    assert all(rate > 0 for rate in results.rounds("noop")[0].values())
