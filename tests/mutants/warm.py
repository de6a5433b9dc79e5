"""A process that has imported what is not ours, and forks itself for each run of tests: that saves seconds each time.

Run in a copy of the tree, it reads a line of JSON for each run, and answers with pytest's exit code.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
import traceback
from typing import Any

import pytest

NOT_OURS = (
    "alembic.command", "alembic.config", "asyncpg", "fastapi.testclient", "httpx2", "jinja2",
    "joserfc.jwt", "opentelemetry.sdk.trace", "prometheus_client", "psycopg", "pydantic_settings",
    "sqlalchemy.dialects.postgresql.asyncpg",
    "sqlalchemy.dialects.postgresql.psycopg", "sqlalchemy.ext.asyncio", "sqlalchemy.orm", "structlog", "typer",
    "uvicorn",
)  # fmt: skip
LOOK_SECONDS = 0.05


def main() -> None:
    """Until there are no more lines."""
    for name in NOT_OURS:
        importlib.import_module(name)
    assert not [name for name in sys.modules if name.split(".")[0] in {"duly", "apps"}], "what may be broken is loaded"
    for line in sys.stdin:
        given = json.loads(line)
        child = os.fork()
        if child == 0:
            _be(given)
        print(_wait(child, given["seconds"]), flush=True)


def _be(given: dict[str, Any]) -> None:
    """In the child: a session of its own, so that whatever it started can be ended with it."""
    code = 3
    try:
        os.setsid()
        nothing, output = os.open(os.devnull, os.O_RDONLY), os.open(given["output"], os.O_WRONLY | os.O_CREAT)
        for mine, theirs in ((nothing, 0), (output, 1), (output, 2)):
            os.dup2(mine, theirs)
        os.environ.update(given["env"])
        code = int(pytest.main(given["arguments"]))
    except BaseException:  # noqa: BLE001 - the end of a process: whoever reads the output is to know why
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(child: int, seconds: float) -> int:
    deadline = time.monotonic() + seconds
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.killpg(child, signal.SIGKILL)
            deadline += seconds
        time.sleep(LOOK_SECONDS)


if __name__ == "__main__":
    main()
