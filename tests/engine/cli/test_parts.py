"""E7.2, E3.13: each part alone, for one bounded cycle or until a signal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import httpx2
import pytest

from tests.engine.cli.commands import children_of, duly, end, free_port, is_alive, running, status, wait_until
from tests.support import rows, value

ALIVE = "SELECT count(*) FROM duly.processes WHERE kind = 'worker' AND seen_at > clock_timestamp() - interval '20 s'"


def facts(done: subprocess.CompletedProcess[str]) -> dict[str, object]:
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    found: dict[str, object] = json.loads(done.stdout)
    return found


def test_one_cycle_of_the_worker_runs_what_is_due_and_says_so(server_env: dict[str, str], dsn: str) -> None:
    """E3.13."""
    rows(dsn, "SELECT duly.schedule('sample.note')")
    said = facts(duly("worker", "--once", env=server_env))
    assert (said["duty"], said["done"]) == ("worker", 1)
    assert value(dsn, "SELECT count(*) FROM duly.jobs WHERE name = 'sample.note'") == 0
    assert facts(duly("worker", "--once", env=server_env))["done"] == 0


def test_one_cycle_of_the_relay_publishes(server_env: dict[str, str], dsn: str) -> None:
    """E3.13."""
    rows(dsn, "SELECT duly.emit('order.paid', 'orders', 'order:1')")
    assert facts(duly("relay", "--once", env=server_env))["published"] == 1
    assert value(dsn, "SELECT status FROM duly.event_log WHERE type = 'order.paid'") == "PUBLISHED"


def test_one_cycle_of_the_scheduler_looks_at_the_schedules(server_env: dict[str, str], dsn: str) -> None:
    """E3.13."""
    assert facts(duly("scheduler", "--once", env=server_env))["duty"] == "scheduler"
    assert value(dsn, "SELECT count(*) FROM duly.schedules WHERE next_run_at IS NULL") == 0


@pytest.mark.parametrize("part", ["worker", "relay", "scheduler"])
def test_a_database_that_is_away_is_one_line_and_exit_code_1(part: str, server_env: dict[str, str]) -> None:
    env = {**server_env, "DATABASE_URL": "postgresql://nobody:secret-word@127.0.0.1:1/nothing"}
    done = duly(part, "--once", env=env)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("duly: the database cannot be reached: ")
    assert done.stderr.count("\n") == 1
    assert "secret-word" not in done.stderr


def test_an_address_that_cannot_be_read_is_not_repeated(server_env: dict[str, str]) -> None:
    for wrong in (
        "mysql://nobody:s3cret-w0rd@host/db",
        "postgresql://nobody:s3cret/w0rd@host/db",
        "host=127.0.0.1 password=s3cret-w0rd",
    ):
        done = duly("relay", "--once", env={**server_env, "DATABASE_URL": wrong})
        assert done.returncode == 1
        assert done.stderr.count("\n") == 1
        assert "s3cret" not in done.stderr
        assert "w0rd" not in done.stderr


def test_a_database_without_the_schema_is_refused(server_env: dict[str, str], dsn: str) -> None:
    rows(dsn, "DROP SCHEMA duly CASCADE")
    done = duly("worker", "--once", env=server_env)
    assert done.returncode == 1
    assert "run `duly migrate`" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_part_on_its_own_uses_the_embedded_server_and_stops_it(env: dict[str, str], home: Path) -> None:
    """E7.2: nothing to install, nothing left running."""
    assert duly("migrate", env=env).returncode == 0
    assert facts(duly("worker", "--once", env=env))["duty"] == "worker"
    assert not (home / "postgres" / "postmaster.pid").exists()


@pytest.mark.parametrize("part", ["worker", "relay", "scheduler"])
def test_a_part_runs_until_a_signal_and_signs_off(
    part: str, server_env: dict[str, str], dsn: str, tmp_path: Path
) -> None:
    with running(part, env=server_env, log=tmp_path / "log") as process:
        wait_until(lambda: rows(dsn, "SELECT kind FROM duly.processes") == [(part,)])
        assert end(process, signal.SIGTERM) == 0
    assert value(dsn, "SELECT count(*) FROM duly.processes") == 0
    assert "Traceback" not in (tmp_path / "log").read_text()


def test_the_api_runs_alone(server_env: dict[str, str], tmp_path: Path) -> None:
    with running("api", env=server_env, log=tmp_path / "log") as process:
        wait_until(lambda: status(f"http://127.0.0.1:{server_env['PORT']}/readyz") == 200)
        assert status(f"http://127.0.0.1:{server_env['PORT']}/sample") == 200
        assert end(process, signal.SIGINT) == 0


def test_a_stop_gives_back_what_does_not_end_in_time(server_env: dict[str, str], dsn: str, tmp_path: Path) -> None:
    rows(dsn, "SELECT duly.schedule('sample.linger')")
    env = {**server_env, "DULY_SHUTDOWN_GRACE_SECONDS": "0.5"}
    for once in ([], ["--once"]):
        with running("worker", *once, env=env, log=tmp_path / "log") as process:
            wait_until(lambda: value(dsn, "SELECT status FROM duly.queue WHERE name = 'sample.linger'") == "Running")
            assert end(process, signal.SIGTERM) == (143 if once else 0)
        assert value(dsn, "SELECT status FROM duly.queue WHERE name = 'sample.linger'") == "Pending"
        assert "Traceback" not in (tmp_path / "log").read_text()


def test_several_processes_are_kept_alive_and_stop_together(
    server_env: dict[str, str], dsn: str, tmp_path: Path
) -> None:
    with running("worker", "--processes", "2", env=server_env, log=tmp_path / "log", fresh=True) as process:
        wait_until(lambda: value(dsn, ALIVE) == 2)
        victim, other = children_of(process.pid)
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: len(children_of(process.pid) - {victim, other}) == 1, what="a new child")
        wait_until(lambda: value(dsn, ALIVE) == 3, what="the new child attends; the dead one's row grows old")
        left = children_of(process.pid)
        assert end(process, signal.SIGTERM) == 0
        assert not any(is_alive(pid) for pid in left)
    assert value(dsn, "SELECT count(*) FROM duly.processes") == 1


def test_children_do_not_outlive_a_parent_that_was_killed(server_env: dict[str, str], dsn: str, tmp_path: Path) -> None:
    with running("worker", "--processes", "2", env=server_env, log=tmp_path / "log", fresh=True) as process:
        wait_until(lambda: value(dsn, ALIVE) == 2)
        children = children_of(process.pid)
        process.kill()
        process.wait(10)
    wait_until(lambda: not any(is_alive(pid) for pid in children), what="the children ended")
    assert value(dsn, "SELECT count(*) FROM duly.processes") == 0  # they left as on any other stop


def test_ctrl_c_at_the_terminal_reaches_each_child_once(server_env: dict[str, str], dsn: str, tmp_path: Path) -> None:
    """A terminal signals the whole group; children that got it twice would drop their work."""
    with running("worker", "--processes", "2", env=server_env, log=tmp_path / "log", fresh=True) as process:
        wait_until(lambda: value(dsn, ALIVE) == 2)
        assert all(os.getpgid(child) != os.getpgid(process.pid) for child in children_of(process.pid))
        assert end(process, signal.SIGINT) == 0
    assert "process_forced_to_end" not in (tmp_path / "log").read_text()


@pytest.mark.parametrize("part", ["worker", "relay", "scheduler"])
def test_a_part_alone_serves_its_health_and_numbers_and_nothing_else(
    part: str, server_env: dict[str, str], tmp_path: Path
) -> None:
    """E5.7: probes and scrapes reach every process, not only the api."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with running(part, env={**server_env, "DULY_HEALTH_PORT": str(port)}, log=tmp_path / "log") as process:
        wait_until(lambda: status(f"{url}/readyz") == 200, what="/readyz is 200")
        assert status(f"{url}/healthz") == 200
        assert f'duly_duty_up{{duty="{part}"}} 1.0' in httpx2.get(f"{url}/metrics").text
        for path in ("/", "/docs", "/openapi.json", "/sample", "/console", "/dev-issuer/jwks"):
            assert status(url + path) == 404, path
        assert end(process, signal.SIGTERM) == 0


def test_each_of_several_worker_processes_serves_its_own(server_env: dict[str, str], tmp_path: Path) -> None:
    port = free_port()
    env = {**server_env, "DULY_HEALTH_PORT": str(port)}
    with running("worker", "--processes", "2", env=env, log=tmp_path / "log"):
        wait_until(
            lambda: {status(f"http://127.0.0.1:{port + number}/readyz") for number in range(2)} == {200},
            what="both are ready",
        )
