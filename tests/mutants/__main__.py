"""``make mutants``, or ``python -m tests.mutants --only E1,E3.5``: break the code one place at a time, run tests.

Each mutant lives in a copy of the tree, never in the tree itself. It is caught when a test that passes on the code as
it is fails on it. A test that cannot even be collected, or whose fixture fails, has caught nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from duly.clock import monotonic
from duly.testing import TestServer, find_place
from duly.testing.plugin import RUNNING_SERVER
from tests.mutants.lists import MUTANTS
from tests.mutants.mutant import ROOT, Mutant

LEFT_OUT = (".git", ".venv", ".duly", "build", "dist", ".*_cache", ".hypothesis", "node_modules")
MOST_SECONDS = 3_600
TEST_SECONDS = 90
FAILED = re.compile(r"^FAILED (\S+)", re.MULTILINE)
touched = itertools.count(2_000_000_000)  # Python trusts a compiled file by its source's whole seconds


@dataclass(frozen=True)
class Run:
    """How a run of some tests ended."""

    code: int
    failed: str  # the first test that failed, if one did
    seconds: float
    output: str


class Copy:
    """A tree of its own to break things in, with a process that is ready to run tests, and a server for them."""

    def __init__(self, directory: Path) -> None:
        self._root = directory / "tree"
        self._output = directory / "output"
        shutil.copytree(ROOT, self._root, ignore=shutil.ignore_patterns(*LEFT_OUT))
        self._server = TestServer(directory)
        self._warm = subprocess.Popen(
            [sys.executable, "-m", "tests.mutants.warm"], cwd=self._root, text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(self._root / "src")},
        )  # fmt: skip

    def __enter__(self) -> Copy:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._warm.stdin is not None
        self._warm.stdin.close()
        self._warm.wait()
        self._server.stop()

    def run(self, *arguments: str, with_server: bool) -> Run:
        """Run tests on what the copy holds now; ``with_server``: on ours, whose databases have today's schema."""
        options = ["-q", "-rf", "-p", "no:cacheprovider", "--timeout", str(TEST_SECONDS)]
        options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # anyio is a plugin, and imported before
        env = {RUNNING_SERVER: str(self._server.postgres.directory.parent)} if with_server else {}
        self._output.unlink(missing_ok=True)
        given = {"arguments": [*options, *arguments], "env": env, "output": str(self._output), "seconds": MOST_SECONDS}
        assert self._warm.stdin is not None
        assert self._warm.stdout is not None
        began = monotonic()
        self._warm.stdin.write(json.dumps(given) + "\n")
        self._warm.stdin.flush()
        code = int(self._warm.stdout.readline() or 3)
        output = self._output.read_text(errors="replace")
        found = FAILED.search(output)
        return Run(code, found.group(1) if found else "", monotonic() - began, output)

    def run_broken(self, mutant: Mutant) -> Run:
        """Break one place, run the tests that must notice, mend it."""
        path = self._root / mutant.file
        text = path.read_text()
        self._write(path, mutant.apply(text))
        try:
            return self.run("-x", *mutant.tests, with_server="/migrations/" not in mutant.file)
        finally:
            self._write(path, text)

    @staticmethod
    def _write(path: Path, text: str) -> None:
        path.write_text(text)
        stamp = next(touched)
        os.utime(path, (stamp, stamp))


def choose(only: str, each: int) -> list[Mutant]:
    """All, or those of some requirements: E3 is all of E3, E3.1 only that; and of each requirement so many at most."""
    wanted = [one for one in only.split(",") if one]
    chosen = [m for m in MUTANTS if not wanted or any(m.id == one or m.id.startswith(one + ".") for one in wanted)]
    if not each:
        return chosen
    seen: Counter[str] = Counter()
    sample = []
    for mutant in chosen:
        seen[mutant.id] += 1
        sample += [mutant] if seen[mutant.id] <= each else []
    return sample


def try_all(mutants: list[Mutant], *, at_once: int, directory: Path) -> list[tuple[Mutant, str]]:
    """Try each; what is wrong with those that were not caught."""
    waiting: queue.SimpleQueue[Mutant] = queue.SimpleQueue()
    for mutant in mutants:
        waiting.put(mutant)
    wrong: list[tuple[Mutant, str]] = []

    def work(copy: Copy) -> None:
        while True:
            try:
                mutant = waiting.get_nowait()
            except queue.Empty:
                return
            run = copy.run_broken(mutant)
            caught = run.code == 1 and run.failed
            if not caught:
                wrong.append((mutant, run.output[-2000:]))
            verdict = (
                f"caught by {run.failed}" if caught else "SURVIVED" if run.code == 0 else f"no verdict ({run.code})"
            )
            print(f"{mutant.id:6} {mutant.breaks}: {verdict} ({run.seconds:.1f} s)", flush=True)

    with contextlib.ExitStack() as stack:
        copies = [stack.enter_context(Copy(directory / str(number))) for number in range(at_once)]
        workers = [threading.Thread(target=work, args=(copy,)) for copy in copies]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    return wrong


def main() -> int:
    """First see that the tests pass on the code as it is; then break it."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--only", default="", help="some requirements: E1,E3.5")
    parser.add_argument("--each", type=int, default=0, help="so many of each requirement at most; all, if not given")
    parser.add_argument("--at-once", type=int, default=2, choices=range(1, 17), metavar="N")
    given = parser.parse_args()
    mutants = choose(given.only, given.each)
    if not mutants:
        print(f"no mutant for {given.only}")
        return 2
    os.environ["DULY_ALLOW_UNSAFE_DATABASE"] = "1"  # the servers run without fsync
    with tempfile.TemporaryDirectory(prefix="duly-mutants-", dir=find_place()) as name:
        tests = tuple(dict.fromkeys(test for mutant in mutants for test in mutant.tests))
        with Copy(Path(name) / "whole") as copy:
            whole = copy.run("-n", str(given.at_once), *tests, with_server=False)
        if whole.code != 0:
            print(whole.output[-4000:], f"(exit code {whole.code})")
            print("the tests fail on the code as it is: nothing can be said about mutants")
            return 2
        wrong = try_all(mutants, at_once=given.at_once, directory=Path(name))
    for mutant, output in wrong:
        print(f"\n--- {mutant.id} {mutant.breaks} ({mutant.file})\n{output}")
    print(f"{len(mutants) - len(wrong)} passed, {len(wrong)} failed")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
