"""The three failure cases of the quality document, with real processes that are really killed (Q3)."""

from __future__ import annotations

import signal
from pathlib import Path
from uuid import uuid4

import httpx2
import pytest

from duly.auth.issuer import Issuer
from duly.settings import Settings
from tests.engine.cli.commands import duly, environment, free_port, running, status, wait_until
from tests.support import rows, value

NEW = {"supplier_id": "ACME-7", "severity": "HIGH", "description": "Burrs on the flange"}
AUDITED = "SELECT count(*) FROM quality.audit_log"
WAITING = "SELECT (SELECT count(*) FROM duly.outbox) + (SELECT count(*) FROM duly.jobs)"


@pytest.fixture
def env(dsn: str, tmp_path: Path) -> dict[str, str]:
    """Commands of the real application on this test's database; a dead worker is noticed after a second."""
    return environment(
        DULY_APP="apps.wiring:app", DATABASE_URL=dsn, DULY_DATA=str(tmp_path), PORT=str(free_port()),
        DULY_ALLOW_UNSAFE_DATABASE="1", DULY_LEASE_SECONDS="1",
    )  # fmt: skip


def post(env: dict[str, str], key: str) -> httpx2.Response:
    issuer = Issuer.open(Settings(data=Path(env["DULY_DATA"])), port=int(env["PORT"]))
    token = issuer.sign("erin", scopes=["quality"], roles=["QUALITY_ENGINEER"])
    headers = {"Authorization": f"Bearer {token}", "Idempotency-Key": key}
    return httpx2.post(f"http://127.0.0.1:{env['PORT']}/ncs", json=NEW, headers=headers, timeout=20)


def wait_ready(env: dict[str, str]) -> None:
    wait_until(lambda: status(f"http://127.0.0.1:{env['PORT']}/readyz") == 200, what="/readyz is 200")


@pytest.mark.parametrize("point", ["idempotency.reserved", "http.before_commit"])
def test_an_api_that_dies_before_commit_leaves_nothing_and_the_retry_runs(
    env: dict[str, str], dsn: str, tmp_path: Path, point: str
) -> None:
    """Case A."""
    key = str(uuid4())
    with running("api", env={**env, "DULY_FAILPOINTS": f"{point}=kill9"}, log=tmp_path / "log") as api:
        wait_ready(env)
        with pytest.raises(httpx2.TransportError):
            post(env, key)
        assert api.wait(10) == -signal.SIGKILL
    counts = "SELECT (SELECT count(*) FROM quality.nonconformities), (SELECT count(*) FROM duly.outbox)"
    assert rows(dsn, counts) == [(0, 0)]
    with running("api", env=env, log=tmp_path / "log"):
        wait_ready(env)
        assert post(env, key).status_code == 201
    assert rows(dsn, counts) == [(1, 1)]


def test_an_api_that_dies_after_commit_answers_the_retry_with_what_it_did(
    env: dict[str, str], dsn: str, tmp_path: Path
) -> None:
    """Case A, a moment later: the client cannot know, the key does."""
    key = str(uuid4())
    with running("api", env={**env, "DULY_FAILPOINTS": "http.before_response=kill9"}, log=tmp_path / "log") as api:
        wait_ready(env)
        with pytest.raises(httpx2.TransportError):
            post(env, key)
        assert api.wait(10) == -signal.SIGKILL
    with running("api", env=env, log=tmp_path / "log"):
        wait_ready(env)
        replayed = post(env, key)
    assert (replayed.status_code, replayed.headers["idempotent-replayed"]) == (201, "true")
    assert rows(dsn, "SELECT id::text FROM quality.nonconformities") == [(replayed.json()["id"],)]
    assert value(dsn, "SELECT count(*) FROM duly.outbox") == 1


@pytest.mark.parametrize(
    ("duty", "point", "audited"),
    [
        ("relay", "relay.fetched", 0),
        ("relay", "relay.before_commit", 0),
        ("worker", "worker.claimed", 0),  # case B: dies before processing
        ("worker", "worker.before_handler", 0),
        ("worker", "worker.handler_done", 0),  # case C: has processed, dies before marking
        ("worker", "worker.before_commit", 0),
        ("worker", "worker.committed", 1),
    ],
)
def test_wherever_a_worker_dies_the_trail_gets_one_row(
    env: dict[str, str], dsn: str, tmp_path: Path, duty: str, point: str, audited: int
) -> None:
    """Cases B and C."""
    with running("api", env=env, log=tmp_path / "log"):
        wait_ready(env)
        assert post(env, str(uuid4())).status_code == 201
    if duty == "worker":
        assert duly("relay", "--once", env=env).returncode == 0
    killed = duly(duty, "--once", env={**env, "DULY_FAILPOINTS": f"{point}=kill9"})
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert value(dsn, AUDITED) == audited

    def work_off() -> bool:
        for again in ("relay", "worker"):
            assert duly(again, "--once", env=env).returncode == 0
        return bool(value(dsn, WAITING) == 0)

    wait_until(work_off, what="everything is worked off")
    assert value(dsn, AUDITED) == 1
    assert value(dsn, "SELECT count(*) FROM duly.processed_events") == 1
