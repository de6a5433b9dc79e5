"""The probes, asked of real processes that run as the manifests say."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx2
import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from duly.cli.parts import DUTIES
from tests.deploy.manifests import SERVERS, Workload
from tests.engine.cli.commands import end, environment, free_port, running, status, wait_until

each_server = pytest.mark.parametrize("work", SERVERS, ids=lambda work: work.name)


@pytest.fixture
def port() -> int:
    """Stands for the container's port, which may be taken on this machine."""
    return free_port()


@pytest.fixture
def env(work: Workload, port: int, dsn: str, tmp_path: Path) -> dict[str, str]:
    """The pod's own environment, but for that port, the host and the database."""
    (served,) = {str(each["containerPort"]) for each in work.container["ports"]}
    given = {name: str(port) if value == served else value for name, value in work.environment.items()}
    here = {"DULY_HOST": "127.0.0.1", "DULY_DATA": str(tmp_path), "DULY_ALLOW_UNSAFE_DATABASE": "1"}
    return environment(**{**given, **here, "DATABASE_URL": dsn})


def probe(work: Workload, name: str, port: int) -> bool:
    """What the kubelet does: any answer from 200 to 399 is a yes."""
    return 200 <= status(f"http://127.0.0.1:{port}{work.container[name]['httpGet']['path']}") < 400


@each_server
def test_a_part_is_ready_while_it_runs(work: Workload, port: int, env: dict[str, str], tmp_path: Path) -> None:
    """E5.7."""
    probes = ("startupProbe", "livenessProbe", "readinessProbe")
    assert not any(probe(work, name, port) for name in probes)
    with running(*work.container["command"][1:], env=env, log=tmp_path / "log") as process:
        for name in probes:
            wait_until(partial(probe, work, name, port), what=f"{name} of {work.name}")
        assert [status(f"http://127.0.0.1:{port}{path}") for path in ("/healthz", "/readyz", "/metrics")] == [200] * 3
        text = httpx2.get(f"http://127.0.0.1:{port}/metrics").text
        assert "\nduly_schedules_late " in text
        for duty in DUTIES:
            up = f'duly_duty_up{{duty="{duty}"}} 1.0' in text
            assert up == (duty == work.component), "one part does not speak for another"
        assert end(process, signal.SIGTERM) == 0
    assert not any(probe(work, name, port) for name in probes)


@pytest.fixture
def outage(dsn: str) -> Iterator[psycopg.Connection]:
    """A connection of the operator's to the same server; it lets everybody in again when the test is over."""
    with psycopg.connect(make_conninfo(dsn, dbname="postgres"), autocommit=True) as connection:
        yield connection
        let_in(connection, dsn, yes=True)


def let_in(operator: psycopg.Connection, dsn: str, *, yes: bool) -> None:
    """Open a database, or close it and throw everybody out."""
    name = str(conninfo_to_dict(dsn)["dbname"])
    operator.execute(sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS {}").format(sql.Identifier(name), sql.Literal(yes)))
    if not yes:
        operator.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", [name])


@each_server
def test_an_outage_of_the_database_makes_a_part_unready_and_restarts_nothing(
    work: Workload, port: int, env: dict[str, str], dsn: str, outage: psycopg.Connection, tmp_path: Path
) -> None:
    """E3.15: it heals by itself."""
    with running(*work.container["command"][1:], env=env, log=tmp_path / "log") as process:
        wait_until(lambda: probe(work, "readinessProbe", port), what="it is ready")
        let_in(outage, dsn, yes=False)
        wait_until(lambda: not probe(work, "readinessProbe", port), what="it is not ready")
        assert probe(work, "livenessProbe", port)
        if work.component in DUTIES:
            down = f'duly_duty_up{{duty="{work.component}"}} 0.0'
            wait_until(lambda: down in httpx2.get(f"http://127.0.0.1:{port}/metrics").text, what=down)
        assert probe(work, "livenessProbe", port)
        let_in(outage, dsn, yes=True)
        wait_until(lambda: probe(work, "readinessProbe", port), what="it is ready again")
        assert process.poll() is None
