"""``python -m tests.brokers``: the suite over all brokers at once, in a process for each that leaves out the others.

What each of them says is printed when it has ended, one after the other. Arguments are pytest's.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType

from tests.brokers.servers import NAMES, chosen

HERE = Path(__file__).parent


def main() -> None:
    """Exit code 1 when the suite failed over one of them."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="duly-suite-") as directory:
        runs = {name: start(name, Path(directory) / name) for name in chosen()}
        signal.signal(signal.SIGTERM, _interrupt)
        try:
            codes = {name: finish(name, run, Path(directory) / name, began) for name, run in runs.items()}
        except KeyboardInterrupt:
            for run in runs.values():
                run.send_signal(signal.SIGINT)  # they end their servers
            for run in runs.values():
                run.wait()
            raise
    failed = [name for name, code in codes.items() if code != 0]
    print(f"brokers: {', '.join(codes)} in {time.monotonic() - began:.0f} s; failed: {', '.join(failed) or 'none'}")
    raise SystemExit(1 if failed else 0)


def start(name: str, log: Path) -> subprocess.Popen[bytes]:
    """One broker's tests; the terminal's signals reach them through us alone."""
    command = [sys.executable, "-m", "pytest", "-m", "brokers", str(HERE), *sys.argv[1:]]
    others = ",".join(other for other in NAMES if other != name)
    with log.open("wb") as output:
        return subprocess.Popen(
            command, env={**os.environ, "LEAVE_OUT": others}, stdout=output, stderr=output, start_new_session=True
        )


def finish(name: str, run: subprocess.Popen[bytes], log: Path, began: float) -> int:
    """Wait for it, and say what it said."""
    code = run.wait()
    print(f"--- {name}: exit code {code} after {time.monotonic() - began:.0f} s")
    print(log.read_text(errors="replace"), flush=True)
    return code


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
