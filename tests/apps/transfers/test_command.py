"""The command ``transfers-expire`` as Kubernetes runs it: a process, its exit code and its log (T6)."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from duly.auth.setup import create_verifier
from duly.clock import monotonic
from duly.settings import Settings
from tests.apps.conftest import Api
from tests.apps.transfers.acting import fill, holding, until_waiting
from tests.apps.transfers.test_gateway import EXPIRED, Balancer, put_before
from tests.engine.cli.commands import ROOT, environment, free_port
from tests.support import value

COMMAND = [sys.executable, "-c", "from apps.transfers.workers import main; main()"]


async def start(tmp_path: Path, **settings: str) -> asyncio.subprocess.Process:
    env = environment(DULY_DATA=str(tmp_path), DULY_LOG_FORMAT="json", **settings)
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(*COMMAND, env=env, cwd=ROOT, stdout=pipe, stderr=pipe)


async def run(tmp_path: Path, **settings: str) -> tuple[int, list[dict[str, Any]]]:
    """The exit code and the log; whatever is not a line of JSON fails the test."""
    process = await start(tmp_path, **settings)
    async with asyncio.timeout(60):
        out, err = await process.communicate()
    assert out == b""
    assert process.returncode is not None
    return process.returncode, [json.loads(line) for line in err.decode().splitlines()]


def test_the_command_is_declared() -> None:
    """T6."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts["transfers-expire"] == "apps.transfers.workers:main"


async def test_success_is_0_and_says_how_many(api: Api, dsn: str, tmp_path: Path) -> None:
    """T6."""
    fill(dsn, 5)
    code, log = await run(tmp_path, DULY_CLIENT_ID="transfers-worker")
    assert code == 0
    (line,) = log
    assert (line["event"], line["level"], line["count"]) == ("transfers_expired", "info", 5)
    query = "SELECT DISTINCT headers->>'correlation_id' FROM duly.outbox WHERE type = 'OwnershipTransferExpired'"
    assert value(dsn, query) == line["correlation_id"]
    assert value(dsn, EXPIRED) == 5


async def test_nothing_to_do_is_0_too(api: Api, tmp_path: Path) -> None:
    """T6."""
    code, log = await run(tmp_path)
    assert (code, log[-1]["count"]) == (0, 0)


async def test_503_three_times_and_then_200_is_0(api: Api, dsn: str, tmp_path: Path) -> None:
    """T6: after at least half a second, one and two."""
    fill(dsn, 2)
    balancer = put_before(api, 503, 503, 503)
    began = monotonic()
    code, log = await run(tmp_path)
    assert monotonic() - began >= 3.5
    assert (code, len(balancer.seen)) == (0, 4)
    assert [line["event"] for line in log] == ["transfers_expire_retried"] * 3 + ["transfers_expired"]
    assert [line["level"] for line in log] == ["warning"] * 3 + ["info"]
    assert [line["retry"] for line in log[:3]] == [1, 2, 3]
    assert log[-1]["count"] == 2
    assert len(set(balancer.headers("x-correlation-id"))) == 1


def assert_failed(code: int, log: list[dict[str, Any]], reason: str) -> None:
    assert code == 1
    assert (log[-1]["event"], log[-1]["level"]) == ("transfers_expire_failed", "critical")
    assert reason in log[-1]["reason"]
    assert not any("exception" in line for line in log)


async def test_retries_that_are_used_up_are_critical_and_1(api: Api, dsn: str, tmp_path: Path) -> None:
    """T6."""
    fill(dsn, 2)
    balancer = put_before(api, *[503] * 10)
    code, log = await run(tmp_path)
    assert_failed(code, log, "gave up after 4 tries: the API answered 503")
    assert (len(balancer.seen), value(dsn, EXPIRED)) == (4, 0)


async def test_401_is_critical_and_1_at_once(api: Api, tmp_path: Path) -> None:
    """T6: the API does not accept the token."""
    strict = Settings(data=tmp_path, oidc_audience="somebody-else")
    api.fastapi.state.verifier = create_verifier(strict, issuer_url=api.issuer.url)
    code, log = await run(tmp_path)
    assert_failed(code, log, "the API answered 401")
    assert len(log) == 1
    await api.fastapi.state.verifier.close()


async def test_404_is_critical_and_1_at_once(api: Api, tmp_path: Path) -> None:
    """T6: a wrong address."""
    code, log = await run(tmp_path, DULY_API_URL=f"{api.url}/nowhere")
    assert_failed(code, log, "the API answered 404")
    assert len(log) == 1


async def test_a_scope_that_the_client_may_not_have_is_critical_and_1_at_once(api: Api, tmp_path: Path) -> None:
    """T6: the issuer refuses."""
    code, log = await run(tmp_path, DULY_CLIENT_ID="operator")
    assert_failed(code, log, "the identity provider refused the client operator (invalid_scope)")


async def test_nobody_listening_is_critical_and_1_after_the_retries(api: Api, tmp_path: Path) -> None:
    """T6."""
    code, log = await run(tmp_path, DULY_API_URL=f"http://127.0.0.1:{free_port()}")
    assert_failed(code, log, "gave up after 4 tries: the API cannot be reached")
    assert [line["event"] for line in log[:-1]] == ["transfers_expire_retried"] * 3


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"DULY_POOL_SIZE": "canary"}, "the setting pool_size cannot be used"),
        ({"DULY_ENV": "production"}, "DULY_OIDC_ISSUER"),
        ({"DULY_OIDC_ISSUER": "http://canary@10.0.0.1/"}, "DULY_OIDC_ISSUER must hold no user"),
    ],
)
async def test_settings_that_cannot_be_used_are_critical_and_1(
    tmp_path: Path, settings: dict[str, str], reason: str
) -> None:
    """T6: in a sentence, without what was given."""
    code, log = await run(tmp_path, **settings)
    assert_failed(code, log, reason)
    assert "canary" not in json.dumps(log)


@contextmanager
def remembering_tokens(balancer: Balancer) -> Iterator[set[str]]:
    """The tokens that passed by, once the block has ended."""
    tokens: set[str] = set()
    yield tokens
    tokens |= {header.removeprefix("Bearer ") for header in balancer.headers("authorization")}


@pytest.mark.parametrize("answers", [[], [503, 503, 503, 503], [403]])
async def test_neither_secret_nor_token_is_in_the_log_even_at_debug_level(
    api: Api, dsn: str, tmp_path: Path, answers: list[int]
) -> None:
    """T6."""
    with remembering_tokens(put_before(api, *answers)) as tokens:
        address = api.url.replace("http://", "http://user:canary-password@")
        process = await start(
            tmp_path, DULY_LOG_LEVEL="debug", DULY_CLIENT_SECRET="service-secret", DULY_API_URL=address
        )
        out, err = await process.communicate()
    (token,) = tokens
    written = (out + err).decode()
    assert "service-secret" not in written
    assert "canary-password" not in written
    assert "c2VydmljZTpzZXJ2aWNlLXNlY3JldA" not in written  # the same in HTTP Basic
    assert not any(part in written for part in token.split("."))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_it_promptly(api: Api, dsn: str, tmp_path: Path, number: signal.Signals) -> None:
    """T6: in the middle of a call; what the API does with it is the API's affair, all or nothing."""
    (product,) = fill(dsn, 1)
    with holding(dsn, product):
        process = await start(tmp_path)
        await until_waiting(dsn, 1, seconds=40)
        process.send_signal(number)
        async with asyncio.timeout(5):
            _, err = await process.communicate()
    assert process.returncode == 143
    assert json.loads(err.decode().splitlines()[-1])["event"] == "transfers_expire_stopped"


async def test_a_signal_ends_a_wait_promptly(api: Api, tmp_path: Path) -> None:
    """T6: between two tries."""
    put_before(api, 503, retry_after="10")
    process = await start(tmp_path)
    assert process.stderr is not None
    async with asyncio.timeout(40):
        assert json.loads(await process.stderr.readline())["event"] == "transfers_expire_retried"
    process.send_signal(signal.SIGTERM)
    async with asyncio.timeout(5):
        await process.communicate()
    assert process.returncode == 143
