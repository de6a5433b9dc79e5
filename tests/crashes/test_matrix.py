"""The fast part of the crash matrix: one cell for each failpoint and workload, the actions and hits in turn.

All of it is ``python -m tests.crashes.matrix`` (E1.6, E2.2, E3.4, E3.5, E3.11, E3.15, E4.3).
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from duly.failpoints import ACTIONS, POINTS
from duly.testing import TestServer
from tests.crashes.cell import HITS, Cell, all_cells, run_cell
from tests.crashes.workloads import LEADS_BY, SENSELESS, WORKLOADS

ROOT = Path(__file__).parents[2]
OUTSIDE = {"handler.mid"}  # for handlers
CALL = re.compile(r"failpoint\(\"([^\"]+)\"\)")
TURNS = [(action, hit) for hit in HITS for action in (*ACTIONS, "kill9")]  # death is the most frequent fault
STEP = 5  # has no divisor in common with the number of turns, so that all of them come


def fast_cells() -> list[Cell]:
    """For each point and workload the next action and hit in turn."""
    pairs = [(point, workload) for point in sorted(POINTS) for workload in LEADS_BY[point]]
    turns = [Cell(*pair, *TURNS[number * STEP % len(TURNS)]) for number, pair in enumerate(pairs)]
    return [cell for cell in turns if (cell.point, cell.action) not in SENSELESS]


@pytest.mark.parametrize("cell", fast_cells(), ids=str)
def test_a_process_that_is_broken_costs_nothing(server: TestServer, tmp_path: Path, cell: Cell) -> None:
    outcome = run_cell(server, cell, tmp_path)
    shown = "\n".join(f"--- {name}\n{text[-4000:]}" for name, text in outcome.logs.items())
    assert outcome.verdict == "ok", "\n".join([outcome.verdict, *outcome.violations, shown])


def test_every_failpoint_has_a_workload_that_leads_by_it() -> None:
    """A new point without one fails here; one whose workload does not reach it fails its cells."""
    assert set(LEADS_BY) == POINTS
    assert {workload for workloads in LEADS_BY.values() for workload in workloads} == set(WORKLOADS)


def test_every_failpoint_that_is_passed_is_known_and_every_known_one_is_passed() -> None:
    """A misspelt point would never be armed."""
    sources = [path.read_text() for path in (ROOT / "src" / "duly").rglob("*.py")]
    passed = {name for text in sources for name in CALL.findall(text)}
    assert passed == POINTS - OUTSIDE


def test_nothing_is_left_out_without_a_reason() -> None:
    pairs = [(point, workload) for point, workloads in LEADS_BY.items() for workload in workloads]
    every = {Cell(*pair, action, hit) for pair in pairs for action in ACTIONS for hit in HITS}
    missing = {(cell.point, cell.action) for cell in every - set(all_cells())}
    assert missing == set(SENSELESS)
    assert all(len(reason) > 20 for reason in SENSELESS.values())


def test_the_fast_part_has_every_action_on_every_hit() -> None:
    """So that none of them is first tried at night."""
    assert {(cell.action, cell.hit) for cell in fast_cells()} == set(TURNS)
