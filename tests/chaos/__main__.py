"""``python -m tests.chaos run | safeguards | check``.

Exit codes: 0 passed, 1 a violation (or a safeguard whose absence nobody noticed), 2 the harness itself failed, 3
unknown: nothing was violated, but some fault that was asked for was never reached.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sqlite3
import sys
import tempfile
import traceback
from pathlib import Path

from tests.chaos.checker import check
from tests.chaos.poison import ALL_FAULTS
from tests.chaos.postgres import Server
from tests.chaos.run import Outcome, Plan, Run

BUILD = Path("build/chaos")
CODES = {"passed": 0, "failed": 1, "unknown": 3}


def main() -> int:
    """Read the command line, do it, and say how it went."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="faults by seed, then heal, drain, check")
    run.add_argument("--seed", type=int, default=1)
    run.add_argument("--minutes", type=float, default=2.0)
    run.add_argument("--faults", default="all", help=f"all, none, or some of: {', '.join(ALL_FAULTS)}")
    run.add_argument("--broker", choices=("yes", "no", "seed"), default="seed", help="relays send outside, too")
    run.add_argument("--directory", type=Path, help="where history, logs and facts go; kept")
    guards = commands.add_parser("safeguards", help="switch each safeguard off, and see that it is noticed")
    guards.add_argument("--only", default="", help="some of them, by name")
    guards.add_argument("--seed", type=int, default=1)
    again = commands.add_parser("check", help="check the facts of a run again")
    again.add_argument("file", type=Path)
    given = parser.parse_args()
    if given.command == "check":
        return recheck(given.file)
    if given.command == "safeguards":
        from tests.chaos.scenarios import prove

        return prove(given.only.split(",") if given.only else [], seed=given.seed, build=BUILD)
    broker = given.broker == "yes" or (given.broker == "seed" and given.seed % 2 == 0)
    return chaos(given.seed, given.minutes, given.faults, given.directory, broker=broker)


def chaos(seed: int, minutes: float, faults: str, directory: Path | None, *, broker: bool) -> int:
    """One run; its directory stays if anything was wrong."""
    names = tuple(ALL_FAULTS) if faults == "all" else () if faults == "none" else tuple(faults.split(","))
    if unknown := set(names) - set(ALL_FAULTS):
        print(f"no such faults: {', '.join(sorted(unknown))}")
        return 2
    home = directory or Path(tempfile.mkdtemp(prefix="duly-chaos-"))
    home.mkdir(parents=True, exist_ok=True)
    server = Server(home / "postgres", durable=True)
    code = 2
    try:
        server.start()
        plan = Plan(seed=seed, seconds=minutes * 60, faults=names, broker=broker)
        outcome = asyncio.run(Run(server, plan, home / "run").execute())
        report(outcome, seed=seed)
        code = CODES[outcome.verdict]
    except Exception:  # noqa: BLE001 - whatever it was, it was not the engine that failed
        traceback.print_exc()
    finally:
        server.stop(remove=code == 0)
        if code != 0:
            print(f"kept: {home / 'run'} (history, logs, facts)")
            given = f"--seed {seed} --minutes {minutes:g} --faults {faults} --broker {'yes' if broker else 'no'}"
            print(f"again:    python -m tests.chaos run {given}")
            print(f"re-check: python -m tests.chaos check {home / 'run' / 'facts.sqlite'}")
        elif directory is None:
            shutil.rmtree(home, ignore_errors=True)
    return code


def report(outcome: Outcome, *, seed: int) -> None:
    """The verdict in words, and in JSON for machines."""
    print(f"{'fault':<24} {'tried':>6} {'reached':>8}")
    for name, times in outcome.reached.items():
        print(f"{name:<24} {outcome.tried[name]:>6} {times:>8}{'   never reached' if not times else ''}")
    print(" ".join(f"{name}={value}" for name, value in outcome.counts.items()))
    for violation in outcome.violations:
        print(f"VIOLATION {violation}")
    print(f"{outcome.verdict}: seed {seed}, {outcome.seconds:.0f} s, drained in {outcome.drain_seconds:.1f} s")
    BUILD.mkdir(parents=True, exist_ok=True)
    facts = {
        "seed": seed, "verdict": outcome.verdict, "seconds": round(outcome.seconds, 1), "counts": outcome.counts,
        "drain_seconds": round(outcome.drain_seconds, 1), "reached": outcome.reached, "tried": outcome.tried,
        "violations": [str(violation) for violation in outcome.violations],
    }  # fmt: skip
    (BUILD / "run.json").write_text(json.dumps(facts, indent=2) + "\n")


def recheck(file: Path) -> int:
    """The checker alone, on saved facts."""
    connection = sqlite3.connect(f"file:{file}?mode=ro", uri=True)
    violations = check(connection)
    connection.close()
    for violation in violations:
        print(f"VIOLATION {violation}")
    print("failed" if violations else "no violation")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
