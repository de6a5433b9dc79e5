"""E5.7, E3.15: alive, ready, and what is wrong when not."""

from __future__ import annotations

import asyncio
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx2
import pytest

from duly.app import Duly
from duly.auth.jwks import JwksCache
from duly.auth.tokens import Verifier
from duly.db import Database
from duly.duty import Duty
from duly.errors import Unavailable
from duly.http import health
from duly.http.api import create_api
from duly.http.health import judge_revision
from duly.runtime.embedded import EmbeddedPostgres
from duly.runtime.migrate import migrate
from duly.settings import Settings
from tests.engine.cli.commands import end, environment, free_port, running, status, wait_until
from tests.engine.http.serving import served
from tests.support import rows


@pytest.fixture
def duty(db: Database) -> Duty:
    """A duty that has done its first cycle."""
    made = Duty(db)
    made.health.set(True, "working")
    return made


@pytest.fixture
async def client(db: Database, duty: Duty) -> AsyncIterator[httpx2.AsyncClient]:
    async with served(create_api(db, [duty], Settings(), Duly())) as made:
        yield made


async def test_ready_when_the_database_answers_the_schema_is_current_and_duties_are_up(
    client: httpx2.AsyncClient,
) -> None:
    """E5.7."""
    answer = await client.get("/readyz")
    assert answer.status_code == 200
    assert answer.json()["status"] == "ready"
    assert answer.json()["checks"].keys() == {"database", "schema", "duty"}


@pytest.mark.parametrize("detail", ["starting", "ConnectionRefusedError: the address of a secret place"])
async def test_a_duty_that_is_down_is_named_in_a_problem(client: httpx2.AsyncClient, duty: Duty, detail: str) -> None:
    """E3.15: the health says so, in words that anybody may read."""
    duty.health.set(detail == "starting", detail)
    answer = await client.get("/readyz")
    assert answer.status_code == 503
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["detail"] == f"duty: {detail.partition(':')[0]}"
    assert answer.json()["status"] == 503
    assert "secret place" not in answer.text
    assert (await client.get("/healthz")).status_code == 200


async def test_a_schema_that_is_missing_is_named(client: httpx2.AsyncClient, dsn: str) -> None:
    rows(dsn, "DROP SCHEMA duly CASCADE")
    answer = await client.get("/readyz")
    assert answer.status_code == 503
    assert answer.json()["detail"] == "schema: missing: run `duly migrate`"


def test_a_newer_schema_is_ready_and_an_unknown_past_is_not() -> None:
    """A rolling release migrates first: the processes of the last one go on serving."""
    assert judge_revision("9999").ok
    assert not judge_revision(None).ok


def test_an_older_schema_is_not_ready_and_says_what_to_do() -> None:
    """E5.7: what this code needs is not there yet."""
    check = judge_revision("0001")
    assert not check.ok
    assert check.detail.endswith("run `duly migrate`")


async def test_a_database_that_does_not_answer_in_time_is_an_outage(
    client: httpx2.AsyncClient, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "READ_REVISION", "SELECT pg_sleep(60)::text -- %s")
    monkeypatch.setattr(health, "ANSWER_SECONDS", 0.3)
    answer = await client.get("/readyz")
    assert answer.json()["detail"] == "database: no answer within 0.3 s"


async def test_a_busy_pool_does_not_look_like_an_outage(dsn: str) -> None:
    """The pool's only connection is taken; the probe has its own."""
    db = Database(dsn, pool_size=1)
    async with served(create_api(db, [], Settings(), Duly())) as client, db.transaction() as tx:
        await tx.connection()
        answers = await asyncio.gather(*(client.get("/readyz") for _ in range(20)))
        assert {answer.status_code for answer in answers} == {200}
        probes = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'duly-health'"
        assert rows(dsn, f"{probes} AND datname = current_database()") == [(1,)]
    await db.close()


async def test_a_provider_that_is_away_is_said_and_leaves_the_process_ready(db: Database) -> None:
    """Every process has the same one: taking them all out of service would help nobody."""
    issuer = "http://127.0.0.1:9/realms/x"
    verifier = Verifier(issuer, "duly", JwksCache(issuer))
    async with served(create_api(db, [], Settings(), Duly(), verifier=verifier)) as client:
        with pytest.raises(Unavailable):
            await verifier._jwks.key("any")
        answer = await client.get("/readyz")
        assert (answer.status_code, answer.json()["status"]) == (200, "ready")
        said = answer.json()["checks"]["identity"]
        assert said == {"ok": False, "detail": verifier.look()[1]}
        assert said["detail"].startswith("away, and none of its keys is known")
        assert f'duly_identity_provider_up{{issuer="{issuer}"}} 0.0' in (await client.get("/metrics")).text


async def test_metrics_are_in_the_format_of_prometheus(client: httpx2.AsyncClient) -> None:
    """E5.7."""
    answer = await client.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=")
    assert "# TYPE duly_jobs_finished_total counter" in answer.text


@pytest.fixture
def postgres() -> Iterator[EmbeddedPostgres]:
    """A server of this test's own, to be stopped under everybody's feet."""
    directory = Path(tempfile.mkdtemp(prefix="duly-out-"))
    server = EmbeddedPostgres.at(directory)
    server.start()
    migrate(server.dsn())
    yield server
    server.stop(mode="immediate")
    shutil.rmtree(directory, ignore_errors=True)


@pytest.mark.parametrize("part", ["api", "up"])
def test_an_outage_is_said_and_heals_without_a_restart(part: str, postgres: EmbeddedPostgres, tmp_path: Path) -> None:
    """E3.15: /readyz is 503 while the database is away and 200 when it is back; /healthz is 200 all the time."""
    port = free_port()
    env = environment(DATABASE_URL=postgres.dsn(), DULY_DATA=str(tmp_path), PORT=str(port))
    ready, alive = f"http://127.0.0.1:{port}/readyz", f"http://127.0.0.1:{port}/healthz"
    with running(part, env=env, log=tmp_path / "log") as process:
        wait_until(lambda: status(ready) == 200)
        postgres.stop(mode="immediate")
        wait_until(lambda: status(ready) == 503)
        assert httpx2.get(ready).json()["checks"]["database"]["ok"] is False
        assert status(alive) == 200
        assert status(f"http://127.0.0.1:{port}/console") == 302  # strangers are asked to sign in, as ever
        postgres.start()
        wait_until(lambda: status(ready) == 200)
        assert status(alive) == 200
        assert end(process, signal.SIGTERM) == 0


async def test_metrics_show_the_queue_as_it_is(db: Database, dsn: str) -> None:
    """E5.7: depth, age and dead letters come from the database at the time of the scrape."""
    rows(dsn, "SELECT duly.schedule('waiting', '1'), duly.emit('a.b', 't', '1')")
    api = create_api(db, [], Settings(), Duly())
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(api), base_url="http://duly") as client:
        text = (await client.get("/metrics")).text
    assert 'duly_queue_depth{name="waiting"' in text
    assert "duly_outbox_pending 1.0" in text
