"""The crash matrix: every failpoint, with every action, on the first and on a later hit, under one checker.

``python -m tests.crashes.matrix [--only POINT] [--workload NAME] [--action ACTION] [--hit HIT] [--jobs N]`` prints a
table and writes ``build/chaos/matrix.json``. It fails when a promise was broken, and when a fault never happened.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from duly.failpoints import ACTIONS
from duly.testing import TestServer
from tests.crashes.cell import HITS, Cell, Outcome, all_cells, run_cell
from tests.crashes.workloads import SENSELESS

REPORT = Path("build/chaos/matrix.json")
MARKS = {"ok": "", "violated": "!", "unknown": "?"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for; 0 if every cell held."""
    given = _arguments(arguments)
    cells = [
        cell
        for cell in all_cells()
        if (not given.only or given.only in cell.point)
        and (not given.workload or given.workload == cell.workload)
        and (not given.action or given.action == cell.action)
        and (not given.hit or given.hit == cell.hit)
    ]
    if not cells:
        print("no such cell", file=sys.stderr)
        return 2
    os.environ["DULY_ALLOW_UNSAFE_DATABASE"] = "1"  # the server runs without fsync
    began = time.monotonic()
    outcomes = run_cells(cells, jobs=given.jobs)
    print(table(outcomes))
    broken = [one for one in outcomes if one.verdict != "ok"]
    for (point, action), reason in SENSELESS.items():
        print(f"not run: {point} with {action}: {reason}")
    seconds = time.monotonic() - began
    print(f"\n{len(outcomes)} cells, {len(broken)} broken, in {seconds:.0f} s")
    write_report(outcomes, seconds)
    return 1 if broken else 0


def run_cells(cells: Sequence[Cell], *, jobs: int) -> list[Outcome]:
    """Run them, some at a time, on one server."""
    home = Path(tempfile.mkdtemp(prefix="duly-matrix-"))
    server = TestServer(home / "postgres")
    server.start()
    try:
        with ThreadPoolExecutor(jobs) as pool:
            numbered = enumerate(cells)
            return list(pool.map(lambda one: _run(server, one[1], home / str(one[0]), len(cells)), numbered))
    finally:
        server.stop()
        shutil.rmtree(home, ignore_errors=True)


def _run(server: TestServer, cell: Cell, directory: Path, count: int) -> Outcome:
    outcome = run_cell(server, cell, directory)
    place = f"[{int(directory.name) + 1}/{count}]"
    print(
        f"{place} {outcome.verdict:8} {outcome.seconds:5.1f} s  {cell}", *outcome.violations, sep="\n    ", flush=True
    )
    shutil.rmtree(directory, ignore_errors=True)
    return outcome


def table(outcomes: Sequence[Outcome]) -> str:
    """Point and workload down, action and hit across; seconds, with ``!`` for broken and ``?`` for not reached."""
    columns = [(action, hit) for action in ACTIONS for hit in HITS]
    found = {one.cell: one for one in outcomes}
    lines = sorted({(one.cell.point, one.cell.workload) for one in outcomes})
    head = f"{'point':28}{'workload':18}" + "".join(f"{action[:5] + ' ' + hit[0]:>9}" for action, hit in columns)
    body = []
    for point, workload in lines:
        cells = [found.get(Cell(point, workload, *column)) for column in columns]
        shown = [f"{MARKS[one.verdict]}{one.seconds:.1f}" if one else "-" for one in cells]
        body.append(f"{point:28}{workload:18}" + "".join(f"{text:>9}" for text in shown))
    return "\n".join([head, *body])


def write_report(outcomes: Sequence[Outcome], seconds: float) -> None:
    """For machines."""
    REPORT.parent.mkdir(parents=True, exist_ok=True)
    cells = [
        {**asdict(one.cell), "verdict": one.verdict, "seconds": round(one.seconds, 2),
         "recovery_seconds": round(one.recovery_seconds, 2), "violations": one.violations, "logs": one.logs}
        for one in outcomes
    ]  # fmt: skip
    senseless = [{"point": point, "action": action, "reason": why} for (point, action), why in SENSELESS.items()]
    report = {"seconds": round(seconds, 1), "cells": cells, "not_run": senseless}
    REPORT.write_text(json.dumps(report, indent=1))


def _arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.crashes.matrix", description=__doc__)
    parser.add_argument("--only", default="", help="points whose name contains this")
    parser.add_argument("--workload", default="")
    parser.add_argument("--action", choices=ACTIONS)
    parser.add_argument("--hit", choices=list(HITS))
    parser.add_argument("--jobs", type=int, default=2, help="cells at a time")
    return parser.parse_args(given)


if __name__ == "__main__":
    sys.exit(main())
