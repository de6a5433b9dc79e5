"""E7.2, E5.3: tokens of the development issuer, and a clock that moves; both refused outside development."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from joserfc import jwt
from joserfc.jwk import KeySet

from duly.runtime.migrate import migrate
from tests.engine.cli.commands import duly
from tests.support import rows, value


def test_token_prints_one_that_the_issuers_key_verifies(env: dict[str, str], home: Path) -> None:
    """E7.2, E5.3: without a server, and without a database."""
    arguments = ["--sub", "alice", "--scope", "ledger:write ledger:read", "--role", "LEDGER_WRITER", "--ttl", "60"]
    done = duly("token", *arguments, env=env)
    assert done.returncode == 0, done.stderr
    keys = KeySet.import_key_set(json.loads((home / "issuer.json").read_text()))
    claims = jwt.decode(done.stdout.strip(), keys, algorithms=["RS256"]).claims
    assert claims["iss"] == f"http://127.0.0.1:{env['PORT']}/dev-issuer"
    assert (claims["sub"], claims["aud"], claims["scope"]) == ("alice", "duly", "ledger:write ledger:read")
    assert claims["realm_access"] == {"roles": ["LEDGER_WRITER"]}
    assert claims["exp"] - claims["iat"] == 60
    assert (home / "issuer.json").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in home.iterdir()] == ["issuer.json"]


@pytest.mark.parametrize("arguments", [["token", "--sub", "alice"], ["clock", "show"], ["clock", "advance", "1h"]])
def test_the_sandbox_is_refused_in_production(arguments: list[str], server_env: dict[str, str], home: Path) -> None:
    """E5.3."""
    done = duly(*arguments, env={**server_env, "DULY_ENV": "production"})
    assert done.returncode == 1
    assert "development" in done.stderr
    assert done.stdout == ""
    assert list(home.iterdir()) == []


def test_the_clock_is_shown_moved_stopped_and_put_right(server_env: dict[str, str], dsn: str) -> None:
    rows(dsn, "DROP SCHEMA duly CASCADE")  # the template's own clock would be in the way
    migrate(dsn)

    def clock(*arguments: str) -> str:
        done = duly("clock", *arguments, env=server_env)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    assert clock("show").endswith("(the real time)")
    assert value(dsn, "SELECT to_regclass('duly.business_clock')") is None
    assert clock("advance", "1d12h").endswith("(shifted by 1 day, 12:00:00)")
    assert value(dsn, "SELECT duly.now() - now() > interval '35 hours'")
    assert clock("freeze", "2026-03-01T09:00:00+01:00") == "2026-03-01T08:00:00+00:00 (frozen)"
    assert clock("advance", "15m") == "2026-03-01T08:15:00+00:00 (frozen)"
    shown = datetime.fromisoformat(clock("resume").split(" ")[0])
    assert abs(value(dsn, "SELECT now()") - shown) < timedelta(minutes=1)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["advance", "tomorrow"], "'tomorrow' is not a length of time"),
        (["freeze", "noon"], "'noon' is not an instant"),
        (["freeze", "2026-03-01T09:00:00"], "does not say its offset"),
    ],
)
def test_a_time_that_cannot_be_read_is_a_sentence(arguments: list[str], said: str, server_env: dict[str, str]) -> None:
    done = duly("clock", *arguments, env=server_env)
    assert done.returncode == 1
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
