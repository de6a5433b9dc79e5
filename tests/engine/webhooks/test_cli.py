"""``duly webhooks`` and ``duly catch`` as real commands."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from pathlib import Path

import httpx2
import pytest

from duly.webhooks.signing import sign_plain
from tests.engine.cli.commands import COMMAND, ROOT, duly, end, environment, free_port, running, wait_until
from tests.support import rows, value

SECRET = "a-secret-of-sixteen"


@pytest.fixture
def env(dsn: str, tmp_path: Path) -> dict[str, str]:
    return environment(
        DATABASE_URL=dsn, DULY_DATA=str(tmp_path), DULY_ALLOW_UNSAFE_DATABASE="1", DULY_LOG_LEVEL="error"
    )


def say(env: dict[str, str], *arguments: str, stdin: str = "") -> str:
    """Run a command that must go well; what it says."""
    done = subprocess.run(
        [*COMMAND, "webhooks", *arguments], env=env, cwd=ROOT, input=stdin, capture_output=True, text=True, timeout=45
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.timeout(240)
def test_a_subscription_on_the_command_line_delivers_to_the_catcher(
    env: dict[str, str], dsn: str, tmp_path: Path
) -> None:
    """The how-to, command by command: a subscription, a test event, the worker's single cycle, and what arrived."""
    port = free_port()
    log = tmp_path / "catch.log"
    with running("catch", "--port", str(port), "--secret", SECRET, "--headers", env=env, log=log) as catching:
        wait_until(lambda: "listening" in log.read_text(), what="the catcher listens")
        said = say(
            env, "add", f"http://127.0.0.1:{port}/", "--event", "order.*", "--secret-stdin", "--actor", "ann",
            stdin=SECRET + "\n",
        )  # fmt: skip
        found = re.search(r"subscription (\S+) is ACTIVE", said)
        assert found is not None
        assert SECRET not in said
        id = found[1]
        assert "is QUEUED" in say(env, "test", id)
        once = duly("worker", "--once", env=env)
        assert once.returncode == 0, once.stderr
        assert json.loads(once.stdout)["done"] == 1
        wait_until(lambda: "webhook.test" in log.read_text(), what="it arrived")
        assert "verified   webhook.test" in log.read_text()
        assert re.search(r"^    x-delivery-id: [0-9a-f-]{36}$", log.read_text(), re.MULTILINE)
        (delivery,) = json.loads(say(env, "deliveries", "--json"))
        assert delivery["status"] == "DELIVERED"
        assert "is QUEUED" in say(env, "redeliver", delivery["id"])
        assert json.loads(say(env, "delivery", delivery["id"]))["log"][0]["http_status"] == 200
        assert end(catching, signal.SIGTERM) == 0
    assert "PAUSED" in say(env, "pause", id, "--reason", "a test")
    assert "ACTIVE" in say(env, "resume", id)
    assert "ACTIVE" in say(env, "edit", id, "--event", "parcel.*", "--max-in-flight", "3")
    assert "secret, shown once: whsec_" in say(env, "rotate", id)
    assert json.loads(say(env, "show", id))["patterns"] == ["parcel.*"]
    assert "parcel" in say(env, "list")
    assert "sent again: 0" in say(env, "redeliver", "--subscription", id, "--since", "2020-01-01T00:00:00Z")
    assert "has a new secret" in say(env, "provider-secret", "payments", "--secret-stdin", stdin=SECRET + "\n")
    assert "encrypted anew with development: 0" in say(env, "reseal")
    assert "deleted" in say(env, "delete", id, "--yes")
    audit = [row[0] for row in rows(dsn, "SELECT action FROM duly.audit WHERE action LIKE 'webhook%' ORDER BY id")]
    assert audit[0] == "webhook_subscription.created"
    assert audit[-1] == "webhook_subscription.deleted"
    assert value(dsn, "SELECT actor FROM duly.audit WHERE action = 'webhook_subscription.created'") == "ann"
    stored = b"".join(bytes(row[0]) for row in rows(dsn, "SELECT sealed FROM duly.webhook_provider_secrets"))
    assert SECRET.encode() not in stored


def test_what_cannot_be_is_one_sentence(env: dict[str, str]) -> None:
    refused = duly("webhooks", "add", "https://10.0.0.1/", "--event", "*", env=env)
    assert (refused.returncode, refused.stderr) == (1, "duly: the address is not public\n")
    missing = duly("webhooks", "pause", "00000000-0000-0000-0000-000000000000", env=env)
    assert (missing.returncode, missing.stderr.count("\n")) == (1, 1)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("options", "status"), [((), 200), (("--status", "503"), 503), (("--refuse",), 410), (("--stall", "0.4"), 200)]
)
def test_the_catcher_answers_as_it_is_told(tmp_path: Path, options: tuple[str, ...], status: int) -> None:
    port, log = free_port(), tmp_path / "catch.log"
    url = f"http://127.0.0.1:{port}/anything"
    with running("catch", "--port", str(port), "--secret", SECRET, *options, env=environment(), log=log):
        wait_until(lambda: "listening" in log.read_text(), what="the catcher listens")
        headers = {"X-Event-Type": "order\x1b[31m.placed".replace("\x1b", ""), "X-Signature": sign_plain(SECRET, b"{}")}
        answer = httpx2.post(url, content=b"{}", headers=headers, timeout=10)
        assert answer.status_code == status
        assert answer.elapsed.total_seconds() >= (0.4 if "--stall" in options else 0)
        httpx2.post(url, content=b'"\x1b[2J"', headers={**headers, "X-Signature": "0" * 64}, timeout=10)
        wait_until(lambda: "UNVERIFIED" in log.read_text(), what="the second arrived")
        httpx2.post(url, content=b"x" * 2_500, headers=headers, timeout=10)
        wait_until(lambda: "... and 500 characters more" in log.read_text(), what="the third arrived, and was cut")
    said = log.read_text()
    assert "verified  " in said
    assert "\x1b" not in said
