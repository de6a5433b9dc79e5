"""E7.2: ``duly up`` is everything in one process, on a data directory of its own."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import httpx2
import pytest

from duly.auth.issuer_codes import PEOPLE
from duly.runtime.embedded import EmbeddedPostgres
from duly.settings import Settings
from tests.engine.cli.commands import duly, end, free_port, running, status, wait_until
from tests.support import rows, value


def base(env: dict[str, str]) -> str:
    return f"http://127.0.0.1:{env['PORT']}"


def wait_ready(env: dict[str, str]) -> None:
    wait_until(lambda: status(f"{base(env)}/readyz") == 200, what="/readyz is 200")


def test_it_is_ready_prints_its_urls_stops_on_ctrl_c_and_keeps_its_data(
    env: dict[str, str], home: Path, tmp_path: Path
) -> None:
    """E7.2."""
    postgres = EmbeddedPostgres.at(home)
    with running("up", env=env, log=tmp_path / "first", fresh=True) as process:
        wait_ready(env)
        wait_until(lambda: "duly is up" in (tmp_path / "first").read_text())
        printed = (tmp_path / "first").read_text()
        issuer = "/dev-issuer/.well-known/openid-configuration"
        for path in ("/docs", "/openapi.json", "/readyz", "/healthz", "/metrics", "/console", issuer, "/sample"):
            assert status(base(env) + path) == (302 if path == "/console" else 200), path
            assert path == "/sample" or base(env) + path in printed
        for id, person in PEOPLE.items():  # whoever can sign in
            assert f" {id} (" in printed, person.name
        kinds = rows(postgres.dsn(), "SELECT kind FROM duly.processes ORDER BY kind")
        assert kinds == [("relay",), ("scheduler",), ("worker",)]
        samples = "SELECT entity_id FROM duly.jobs WHERE name = 'sample.linger'"
        assert rows(postgres.dsn(), samples) == [("sample",)]
        rows(postgres.dsn(), "SELECT duly.schedule('sample.note', 'order:1', now() + interval '1 day')")
        assert end(process, signal.SIGINT) == 0
    assert not postgres.is_running()

    with running("up", env=env, log=tmp_path / "second", fresh=True) as process:
        wait_ready(env)
        assert value(postgres.dsn(), "SELECT entity_id FROM duly.jobs WHERE name = 'sample.note'") == "order:1"
        assert end(process, signal.SIGTERM) == 0
    assert not postgres.is_running()
    assert "Traceback" not in (tmp_path / "first").read_text() + (tmp_path / "second").read_text()


def test_it_listens_on_8000_and_lives_in_the_working_directory_unless_it_is_told_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """E7.2: PORT and DULY_DATA."""
    monkeypatch.delenv("PORT", raising=False)
    monkeypatch.delenv("DULY_DATA", raising=False)
    assert (Settings().port, Settings().data) == (8000, Path(".duly"))
    monkeypatch.setenv("PORT", "8123")
    monkeypatch.setenv("DULY_DATA", "/srv/duly")
    assert (Settings().port, Settings().data) == (8123, Path("/srv/duly"))


def test_killed_with_its_server_it_starts_again_and_stops_what_the_dead_one_left(
    env: dict[str, str], home: Path, tmp_path: Path
) -> None:
    """E7.2: kill -9 loses nothing that was committed, and leaves no server behind for good."""
    postgres = EmbeddedPostgres.at(home)
    for with_server in (True, False):
        with running("up", env=env, log=tmp_path / "log", fresh=True) as process:
            wait_ready(env)
            rows(postgres.dsn(), "SELECT duly.emit('order.paid', 'orders', 'order:1')")
            process.kill()
            process.wait(10)
        if with_server:
            pid = int((postgres.directory / "postmaster.pid").read_text().splitlines()[0])
            os.kill(pid, signal.SIGKILL)
        else:
            assert postgres.is_running()
    with running("up", env=env, log=tmp_path / "log", fresh=True) as process:
        wait_ready(env)
        assert value(postgres.dsn(), "SELECT count(*) FROM duly.event_log WHERE type = 'order.paid'") == 2
        assert end(process, signal.SIGINT) == 0
    assert not postgres.is_running()


def test_a_server_that_is_killed_under_it_is_started_again(env: dict[str, str], home: Path, tmp_path: Path) -> None:
    """E3.15, E7.2: nobody else looks after the embedded server; what was committed is there, and work goes on."""
    postgres = EmbeddedPostgres.at(home)
    with running("up", env=env, log=tmp_path / "log", fresh=True) as process:
        wait_ready(env)
        rows(postgres.dsn(), "SELECT duly.schedule('sample.note', 'order:1', now() + interval '1 day')")
        pid = int((postgres.directory / "postmaster.pid").read_text().splitlines()[0])
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: "embedded_postgres_started" in (tmp_path / "log").read_text().split("duly is up")[-1])
        wait_ready(env)
        assert value(postgres.dsn(), "SELECT entity_id FROM duly.jobs WHERE name = 'sample.note'") == "order:1"
        rows(postgres.dsn(), "SELECT duly.emit('order.paid', 'orders', 'order:1')")
        published = "SELECT count(*) FROM duly.event_log WHERE type = 'order.paid'"
        wait_until(lambda: value(postgres.dsn(), published) == 1, what="the relay is at work again")
        assert end(process, signal.SIGINT) == 0
    assert not postgres.is_running()


def test_a_busy_port_is_refused_before_anything_starts(env: dict[str, str], home: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", int(env["PORT"])))
        taken.listen()
        done = duly("up", env=env)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert f"port {env['PORT']}" in done.stderr
    assert "set PORT" in done.stderr
    assert list(home.iterdir()) == []


def test_a_second_one_on_the_same_data_is_refused(env: dict[str, str], tmp_path: Path) -> None:
    with running("up", env=env, log=tmp_path / "log", fresh=True) as process:
        wait_ready(env)
        done = duly("up", env={**env, "PORT": str(free_port())})
        assert done.returncode == 1
        assert "another `duly up` runs" in done.stderr
        assert "Traceback" not in done.stderr
        once = duly("worker", "--once", env=env)  # the parts may join, and leave without stopping the server
        assert once.returncode == 0, once.stderr
        assert httpx2.get(f"{base(env)}/readyz").status_code == 200
        assert end(process, signal.SIGINT) == 0


def test_a_second_signal_ends_it_at_once(env: dict[str, str], home: Path, tmp_path: Path) -> None:
    postgres = EmbeddedPostgres.at(home)
    with running("up", env=env, log=tmp_path / "log", fresh=True) as process:
        wait_ready(env)
        rows(postgres.dsn(), "SELECT duly.schedule('sample.linger')")
        running_jobs = "SELECT count(*) FROM duly.queue WHERE status = 'Running'"
        wait_until(lambda: value(postgres.dsn(), running_jobs) == 1)
        process.send_signal(signal.SIGINT)
        wait_until(lambda: "process_stopping" in (tmp_path / "log").read_text())
        assert end(process, signal.SIGINT, seconds=5) == 130


def test_production_serves_no_issuer_and_a_closed_console(server_env: dict[str, str], tmp_path: Path) -> None:
    """E5.3: nothing of the sandbox in production."""
    env = {**server_env, "DULY_ENV": "production", "DULY_OIDC_ISSUER": "https://id.example.com/realms/main"}
    with running("api", env=env, log=tmp_path / "log"):
        wait_ready(env)
        assert status(f"{base(env)}/dev-issuer/jwks") == 404
        assert status(f"{base(env)}/console") == 302
        assert httpx2.get(base(env)).json()["links"].keys().isdisjoint({"issuer"})
