"""The hourly task's client against the real API: what is tried again, what is not, and that it happens once (T6)."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from apps.transfers import gateways
from apps.transfers.gateways import ExpiryClient, ExpiryFailed, ExpiryRefused, pause_seconds
from apps.transfers.service import EXPIRE_LIMIT
from apps.transfers.workers import expire_all
from apps.wiring import app
from duly.auth.setup import create_service_tokens, create_verifier
from duly.clock import monotonic
from duly.db import Database
from duly.schedules.tick import Scheduler
from duly.settings import Settings
from duly.telemetry import Origin, originating
from duly.testing import BusinessClock, drain
from tests.apps.conftest import Api
from tests.apps.transfers.acting import EXPIRE, check_consistent, fill
from tests.engine.cli.commands import environment, free_port, running, status, wait_until
from tests.support import rows, value

SHORT = (0.01, 0.01, 0.01)
EXPIRED = "SELECT count(*) FROM transfers.transfers WHERE status = 'Expired'"
CORRELATED = """
SELECT DISTINCT headers->>'correlation_id' FROM duly.event_log WHERE type = 'OwnershipTransferExpired'"""


class Balancer:
    """Stands before the API as a load balancer does: answers some calls by itself, and writes down what it saw."""

    def __init__(self, behind: ASGIApp, answers: Sequence[int] = (), *, retry_after: str = "") -> None:
        self._behind = behind
        self._answers = list(answers)
        self._retry_after = retry_after
        self.seen: list[dict[str, str]] = []
        self.bodies: list[bytes] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != EXPIRE:
            await self._behind(scope, receive, send)
            return
        self.seen.append({name.decode(): content.decode() for name, content in scope["headers"]})
        if not self._answers:
            await self._behind(scope, receive, send)
            return
        headers = [(b"retry-after", self._retry_after.encode())] if self._retry_after else []
        await send({"type": "http.response.start", "status": self._answers.pop(0), "headers": headers})
        await send({"type": "http.response.body", "body": b"<html>not today</html>"})

    def headers(self, name: str) -> list[str]:
        return [headers[name] for headers in self.seen]


def put_before(api: Api, *answers: int, retry_after: str = "") -> Balancer:
    """From now on the server answers through it."""
    stack = api.fastapi.middleware_stack
    assert stack is not None
    balancer = Balancer(stack, answers, retry_after=retry_after)
    api.fastapi.middleware_stack = balancer
    return balancer


@contextlib.asynccontextmanager
async def opened(tmp_path: Path, **changes: Any) -> AsyncIterator[ExpiryClient]:
    """The client as the settings of this data directory describe it, and impatient."""
    waits_seconds = changes.pop("waits_seconds", SHORT)
    async with ExpiryClient.open(Settings(data=tmp_path, **changes), waits_seconds=waits_seconds) as client:
        yield client


async def test_it_expires_with_a_token_of_its_own(api: Api, dsn: str, tmp_path: Path) -> None:
    """T6: client credentials, the smallest client that has the scope."""
    fill(dsn, 3)
    balancer = put_before(api)
    async with opened(tmp_path, client_id="transfers-worker") as client:
        assert await expire_all(client) == 3
        assert await expire_all(client) == 0
    assert value(dsn, EXPIRED) == 3
    assert len(set(balancer.headers("authorization"))) == 1  # fetched once, used twice
    assert len(set(balancer.headers("idempotency-key"))) == 2
    check_consistent(dsn)


async def test_it_carries_the_correlation_id(api: Api, dsn: str, tmp_path: Path) -> None:
    """T4, E5.4: from whatever caused it to every event."""
    fill(dsn, 2)
    correlation_id = uuid4()
    async with opened(tmp_path) as client:
        with originating(Origin(correlation_id)):
            assert await expire_all(client) == 2
    assert rows(dsn, CORRELATED) == [(str(correlation_id),)]


@pytest.mark.parametrize("answer", [500, 502, 503, 504])
async def test_three_server_errors_are_tried_again(api: Api, dsn: str, tmp_path: Path, answer: int) -> None:
    """T6: the same key each time, so that whatever did happen happens once."""
    fill(dsn, 4)
    balancer = put_before(api, answer, answer, answer)
    async with opened(tmp_path) as client:
        assert await expire_all(client) == 4
    assert len(balancer.seen) == 4
    assert len(set(balancer.headers("idempotency-key"))) == 1


async def test_the_fourth_server_error_is_the_last(api: Api, dsn: str, tmp_path: Path) -> None:
    """T6."""
    fill(dsn, 4)
    balancer = put_before(api, 503, 503, 503, 503)
    async with opened(tmp_path) as client:
        with pytest.raises(ExpiryFailed, match="gave up after 4 tries: the API answered 503"):
            await expire_all(client)
    assert (len(balancer.seen), value(dsn, EXPIRED)) == (4, 0)


@pytest.mark.parametrize("answer", [400, 403, 404, 409, 422, 429, 302, 204])
async def test_any_other_answer_is_final(api: Api, dsn: str, tmp_path: Path, answer: int) -> None:
    """T6: 4xx is not tried again, a redirect is not followed."""
    balancer = put_before(api, answer)
    async with opened(tmp_path) as client:
        with pytest.raises(ExpiryRefused, match=f"the API answered {answer}"):
            await expire_all(client)
    assert len(balancer.seen) == 1


async def test_a_page_of_somebody_else_is_no_answer(api: Api, tmp_path: Path) -> None:
    """T6: a 200 that does not say how many is not success."""
    put_before(api, 200)
    async with opened(tmp_path) as client:
        with pytest.raises(ExpiryRefused, match="does not say how many"):
            await expire_all(client)


async def test_a_token_that_the_api_does_not_accept_is_final(api: Api, tmp_path: Path) -> None:
    """T6: 401; one fresh token is tried, and no more."""
    strict = Settings(data=tmp_path, oidc_audience="somebody-else")
    api.fastapi.state.verifier = create_verifier(strict, issuer_url=api.issuer.url)
    balancer = put_before(api)
    async with opened(tmp_path) as client:
        with pytest.raises(ExpiryRefused, match="the API answered 401"):
            await expire_all(client)
    assert len(balancer.seen) == 2
    await api.fastapi.state.verifier.close()


async def test_a_client_that_the_issuer_refuses_is_final_and_names_no_secret(api: Api, tmp_path: Path) -> None:
    """T6."""
    balancer = put_before(api)
    async with opened(tmp_path, client_secret="canary-secret") as client:
        with pytest.raises(ExpiryRefused, match="refused the client service") as refused:
            await expire_all(client)
    assert "canary" not in str(refused.value)
    assert balancer.seen == []


async def test_an_issuer_that_is_away_is_tried_again(api: Api, tmp_path: Path) -> None:
    """T6: that may pass."""
    nobody = f"http://127.0.0.1:{free_port()}/nobody"
    async with opened(tmp_path, oidc_issuer=nobody, client_secret="any", api_url=api.url) as client:
        with pytest.raises(ExpiryFailed, match="gave up after 4 tries: the identity provider"):
            await expire_all(client)


async def test_refused_connections_and_timeouts_are_tried_again(api: Api, tmp_path: Path) -> None:
    """T6: nobody listens; somebody listens and never answers."""
    async with opened(tmp_path, api_url=f"http://127.0.0.1:{free_port()}") as client:
        with pytest.raises(ExpiryFailed, match=r"gave up after 4 tries: the API cannot be reached \(ConnectError\)"):
            await expire_all(client)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        settings = Settings(data=tmp_path, api_url=f"http://127.0.0.1:{silent.getsockname()[1]}")
        tokens = create_service_tokens(settings, scope=gateways.EXPIRE_SCOPE)
        client = ExpiryClient(settings.api_url, tokens, waits_seconds=SHORT, try_seconds=0.2)
        async with client:
            with pytest.raises(ExpiryFailed, match="gave up after 4 tries"):
                await expire_all(client)


async def test_an_address_that_is_none_is_final(api: Api, tmp_path: Path) -> None:
    """T6: and is not repeated, it might hold a password."""
    for address in ("ftp://user:canary@nowhere", "canary"):
        async with opened(tmp_path, api_url=address) as client:
            with pytest.raises(ExpiryRefused) as refused:
                await expire_all(client)
        assert "canary" not in str(refused.value)


def test_a_wait_grows_by_up_to_half_and_by_what_was_asked_for_up_to_ten_seconds() -> None:
    """T6."""
    assert gateways.WAITS_SECONDS == (0.5, 1.0, 2.0)
    waits = [pause_seconds(2.0) for _ in range(200)]
    assert min(waits) >= 2.0
    assert max(waits) <= 3.0
    assert len(set(waits)) > 100
    assert pause_seconds(0.5, asked_seconds=7) == 7
    assert pause_seconds(0.5, asked_seconds=3600) == 10


@pytest.mark.parametrize(("said", "at_least"), [("1", 1.0), ("Wed, 21 Oct 2065 07:28:00 GMT", 0.0), ("-5", 0.0)])
async def test_the_api_may_ask_for_a_longer_wait(api: Api, tmp_path: Path, said: str, at_least: float) -> None:
    """T6: Retry-After in seconds; anything else leaves it at our own wait."""
    put_before(api, 503, retry_after=said)
    began = monotonic()
    async with opened(tmp_path) as client:
        assert await expire_all(client) == 0
    assert at_least <= monotonic() - began < at_least + 5


async def test_more_than_one_call_can_take_is_asked_for_again(api: Api, dsn: str, tmp_path: Path) -> None:
    """T3: so many in one call and one commit, the header says that there is more; a new key for each call."""
    due = EXPIRE_LIMIT + 20
    fill(dsn, due, requests=0)
    balancer = put_before(api)
    async with opened(tmp_path) as client:
        assert await expire_all(client) == due
    assert len(set(balancer.headers("idempotency-key"))) == 2
    commits = rows(dsn, "SELECT count(*) FROM transfers.transfers GROUP BY xmin::text ORDER BY 1")
    assert commits == [(20,), (EXPIRE_LIMIT,)]
    assert value(dsn, "SELECT count(*) FROM duly.outbox WHERE type = 'OwnershipTransferExpired'") == due


async def test_the_rounds_are_bounded(api: Api, dsn: str, tmp_path: Path) -> None:
    """A limit on everything: an API that always says more does not keep the task for ever."""
    api.fastapi.middleware_stack = always_more(api.fastapi.middleware_stack)
    async with opened(tmp_path) as client:
        assert await expire_all(client, most_rounds=3) == 21


def always_more(behind: ASGIApp | None) -> ASGIApp:
    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        assert behind is not None
        if scope["type"] != "http" or scope["path"] != EXPIRE:
            await behind(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": [(b"duly-more", b"true")]})
        await send({"type": "http.response.body", "body": b'{"expiredCount": 7}'})

    return answer


# -- an API that dies ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("point", "kept"), [("http.before_commit", 0), ("http.before_response", 6)])
async def test_an_api_that_is_killed_at_commit_is_asked_again_and_each_expires_once(
    dsn: str, tmp_path: Path, point: str, kept: int
) -> None:
    """T3, T6: kill -9 right before COMMIT, and right after it; the retry runs, or gets the answer that was lost."""
    fill(dsn, 6)
    port = free_port()
    env = environment(
        DULY_APP="apps.wiring:app", DATABASE_URL=dsn, DULY_DATA=str(tmp_path), PORT=str(port),
        DULY_ALLOW_UNSAFE_DATABASE="1",
    )  # fmt: skip
    ready = f"http://127.0.0.1:{port}/readyz"
    async with opened(tmp_path, PORT=port, waits_seconds=[0.5] * 90) as client:
        with running("api", env={**env, "DULY_FAILPOINTS": f"{point}=kill9"}, log=tmp_path / "log") as killed:
            await asyncio.to_thread(wait_until, lambda: status(ready) == 200, what="/readyz is 200")
            asking = asyncio.create_task(expire_all(client))
            assert await asyncio.to_thread(killed.wait, 20) == -signal.SIGKILL
        assert value(dsn, EXPIRED) == kept
        with running("api", env=env, log=tmp_path / "log"):
            assert await asking == 6
    assert value(dsn, "SELECT count(*) FROM duly.event_log WHERE type = 'OwnershipTransferExpired'") == 6
    check_consistent(dsn)


# -- the job ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def as_configured(api: Api, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The settings of a worker beside this API."""
    monkeypatch.setenv("DULY_DATA", str(tmp_path))


@pytest.mark.usefixtures("as_configured")
async def test_the_schedule_runs_the_job_and_the_job_calls_the_api(
    db: Database, dsn: str, clock: BusinessClock
) -> None:
    """T6: at the full hour; how many it was is in the history, and its correlation id in the events."""
    fill(dsn, 3)
    await Scheduler(db).run_once()
    clock.advance(hours=1)
    await Scheduler(db).run_once()
    assert value(dsn, "SELECT count(*) FROM duly.jobs WHERE name = 'transfers.expire-pending'") == 1
    await drain(db, {"transfers.expire-pending": app.handlers["transfers.expire-pending"]})
    run = "SELECT message, correlation_id::text FROM duly.executions WHERE name = 'transfers.expire-pending'"
    ((message, correlation_id),) = rows(dsn, run)
    assert message == "expired 3"
    assert rows(dsn, CORRELATED) == [(correlation_id,)]


@pytest.mark.usefixtures("as_configured")
async def test_a_job_that_is_refused_is_a_dead_letter_at_once(api: Api, db: Database, dsn: str) -> None:
    """T6: nobody retries a 4xx; an operator sees why."""
    put_before(api, 403)
    rows(dsn, "SELECT duly.schedule('transfers.expire-pending')")
    await drain(db, app.handlers)
    query = "SELECT reason, error FROM duly.dead_letters WHERE name = 'transfers.expire-pending'"
    assert rows(dsn, query) == [("failed_for_good", "the API answered 403")]


async def test_a_worker_without_credentials_leaves_it_to_the_cronjob_and_says_so(
    db: Database, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T6, T8: where the CronJob has the credentials, the seeded schedule makes no dead letter every hour."""
    for name, content in {"DULY_ENV": "production", "DULY_OIDC_ISSUER": "https://id.example.com/x"}.items():
        monkeypatch.setenv(name, content)
    rows(dsn, "SELECT duly.schedule('transfers.expire-pending')")
    await drain(db, app.handlers)
    assert rows(dsn, "SELECT 1 FROM duly.dead_letters") == []
    ((outcome, message),) = rows(dsn, "SELECT outcome, message FROM duly.executions")
    assert outcome == "cancelled"
    assert "left to the command transfers-expire" in message
    assert "DULY_CLIENT_SECRET" in message


@pytest.mark.usefixtures("as_configured")
async def test_a_job_whose_api_is_away_is_tried_again_later(api: Api, db: Database, dsn: str) -> None:
    """T6: after its own three retries the queue's begin."""
    put_before(api, *[503] * 4)
    rows(dsn, "SELECT duly.schedule('transfers.expire-pending')")
    await drain(db, app.handlers)
    query = "SELECT retry_count, last_error FROM duly.jobs WHERE name = 'transfers.expire-pending'"
    ((retries, error),) = rows(dsn, query)
    assert retries == 1
    assert error.endswith("gave up after 4 tries: the API answered 503")
