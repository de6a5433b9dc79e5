"""The peers of ``make bench``: every one has a driver and a lock that pins by hash and names no registry."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from benchmarks import peers

HERE = Path(peers.__file__).parent
LOCKS = sorted(path for path in (HERE / "locks").rglob("*") if path.is_file())


def driver_of(name: str) -> Path:
    node, python = HERE / "drivers" / f"{name}.mjs", HERE / "drivers" / f"{name.replace('-', '_')}.py"
    return node if node.exists() else python


def test_the_peers_and_figures_are_those_that_the_report_knows() -> None:
    assert peers.PEERS == (
        "pgqueuer", "procrastinate", "chancy", "dbos", "oban", "celery-redis", "graphile-worker", "pg-boss",
    )  # fmt: skip
    assert peers.FIGURES == ("noop", "enqueue_one", "enqueue_bulk", "latency")


@pytest.mark.parametrize("name", peers.PEERS)
def test_a_peer_has_a_driver_and_a_lock(name: str) -> None:
    assert driver_of(name).is_file()
    lock = HERE / "locks" / (name if driver_of(name).suffix == ".mjs" else f"{name}.txt")
    assert lock.exists()


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: str(lock.relative_to(HERE / "locks")))
def test_a_lock_names_no_registry(lock: Path) -> None:
    assert "http" not in lock.read_text()


@pytest.mark.parametrize("lock", [lock for lock in LOCKS if lock.suffix == ".txt"], ids=lambda lock: lock.stem)
def test_a_python_lock_pins_every_package_by_hash(lock: Path) -> None:
    entries = re.split(r"\n(?=\w)", lock.read_text().strip())
    assert entries
    assert all("==" in entry and "--hash=sha256:" in entry for entry in entries)


@pytest.mark.parametrize("lock", sorted(HERE.glob("locks/*/package-lock.json")), ids=lambda lock: lock.parent.name)
def test_a_node_lock_pins_every_package_by_hash(lock: Path) -> None:
    packages = {name: entry for name, entry in json.loads(lock.read_text())["packages"].items() if name}
    assert packages
    assert all(entry["integrity"].startswith("sha512-") for entry in packages.values())


def test_a_figure_that_does_not_exist_is_refused_before_anything_is_started(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no speed of pgqueuer"):
        peers.measure("pgqueuer", "speed", dsn="", cache=tmp_path, size=1, timeout_seconds=1)


def test_a_driver_that_fails_is_told_with_its_last_lines(tmp_path: Path) -> None:
    python = tmp_path / "pgqueuer" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\necho no such module >&2\nexit 3\n")
    python.chmod(0o755)
    with pytest.raises(peers.Failed, match="status 3:\nno such module"):
        peers.measure("pgqueuer", "noop", dsn="", cache=tmp_path, size=1, timeout_seconds=10)
