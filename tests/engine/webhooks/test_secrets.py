"""Secrets at rest, and nowhere else (E6.4, FAULTS: canaries)."""

from __future__ import annotations

import base64
import json
import stat
from datetime import UTC, datetime
from pathlib import Path

import psycopg
import pytest
from pydantic import SecretStr
from structlog.testing import capture_logs

from duly.errors import Refused
from duly.settings import Settings
from duly.testing import BusinessClock
from duly.webhooks import add_provider_secret, subscriptions
from duly.webhooks.clean import forget
from duly.webhooks.deliver import Deliverer
from duly.webhooks.receive import read_secrets
from duly.webhooks.sealing import FILE, Keyring, Sealed
from tests.engine.webhooks.hooks import Hooks, make_settings
from tests.engine.webhooks.subscriber import answering, subscriber
from tests.support import rows, value

CANARY = "whsec_" + base64.b64encode(b"canary-canary-canary-canary-1234").decode()
OTHER_KEY = "k2:" + base64.b64encode(b"2" * 32).decode()
TABLES = """
SELECT format('%I.%I', schemaname, tablename) FROM pg_tables WHERE schemaname = 'duly' ORDER BY 1
"""


def everything_in(dsn: str) -> str:
    """Every row of every table as text, bytes as they are."""
    said = []
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("SET bytea_output = 'escape'")
        for (table,) in connection.execute(TABLES.encode()).fetchall():
            found = connection.execute(f"SELECT t::text FROM {table} AS t".encode()).fetchall()
            said += [str(row[0]) for row in found]
    return "\n".join(said)


async def test_a_canary_secret_is_in_no_log_no_error_and_no_table_in_clear(hooks: Hooks) -> None:
    with capture_logs() as logs:
        async with subscriber(answering(500, body=b"no")) as one:
            made = await hooks.subscribe(one.url, secret=CANARY)
            await hooks.emit()
            await hooks.drain()
            async with hooks.db.transaction() as tx:
                again = await subscriptions.rotate_secret(tx, hooks.keyring, made.id, secret=CANARY + "", actor="test")
            await hooks.emit(3)
            await hooks.drain()
    assert again.secret is None
    raw = base64.b64decode(CANARY.removeprefix("whsec_")).decode()
    for said in (everything_in(hooks.dsn), json.dumps(logs, default=str), repr(made), repr(again), repr(hooks.keyring)):
        assert CANARY not in said
        assert raw not in said


async def test_a_made_secret_is_shown_once_and_not_in_its_repr(hooks: Hooks) -> None:
    async with hooks.db.transaction() as tx:
        made = await subscriptions.create_subscription(
            tx, hooks.settings, hooks.keyring, owner="o", url="https://example.com/", patterns=["*"], actor="test"
        )
    assert made.secret is not None
    assert made.secret not in repr(made)
    assert made.secret not in everything_in(hooks.dsn)


async def test_a_secret_opens_in_its_own_place_only(hooks: Hooks) -> None:
    """A row that is copied to another subscription is refused: whoever can write the table cannot choose secrets."""
    one = await hooks.subscribe("https://example.com/a")
    other = await hooks.subscribe("https://example.com/b")
    rows(
        hooks.dsn,
        "UPDATE duly.webhook_secrets SET sealed = (SELECT sealed FROM duly.webhook_secrets WHERE subscription_id ="
        " %(one)s) WHERE subscription_id = %(other)s",
        {"one": one.id, "other": other.id},
    )
    sealed = bytes(value(hooks.dsn, "SELECT sealed FROM duly.webhook_secrets LIMIT 1"))
    assert hooks.keyring.unseal(Sealed("k1", sealed), place=f"webhook_secrets {one.id} 1")
    with pytest.raises(Refused, match="cannot be decrypted"):
        hooks.keyring.unseal(Sealed("k1", sealed), place=f"webhook_secrets {other.id} 1")
    with pytest.raises(Refused, match="cannot be decrypted"):
        hooks.keyring.unseal(Sealed("k1", sealed[:-1] + bytes([sealed[-1] ^ 1])), place=f"webhook_secrets {one.id} 1")


async def test_resealing_moves_to_the_newest_key_and_the_old_one_can_go(hooks: Hooks) -> None:
    async with subscriber() as one:
        await hooks.subscribe(one.url)
        both = Keyring.open(make_settings(encryption_keys=SecretStr(f"{OTHER_KEY},{_key_one()}")))
        async with hooks.db.transaction() as tx:
            assert await subscriptions.reseal_secrets(tx, both) == 1
        async with hooks.db.transaction() as tx:
            assert await subscriptions.reseal_secrets(tx, both) == 0
        assert value(hooks.dsn, "SELECT key_id FROM duly.webhook_secrets") == "k2"
        later = Hooks(hooks.db, hooks.dsn, make_settings(encryption_keys=SecretStr(OTHER_KEY)))
        await later.emit()
        await later.drain()
        assert len(one.requests) == 1


async def test_resealing_moves_the_secrets_of_providers_too(hooks: Hooks) -> None:
    async with hooks.db.transaction() as tx:
        await add_provider_secret(tx, hooks.keyring, "payments", secret=CANARY, actor="test")
        both = Keyring.open(make_settings(encryption_keys=SecretStr(f"{OTHER_KEY},{_key_one()}")))
        assert await subscriptions.reseal_secrets(tx, both) == 1
        assert await subscriptions.reseal_secrets(tx, both) == 0
        newest = Keyring.open(make_settings(encryption_keys=SecretStr(OTHER_KEY)))
        assert (await read_secrets(tx, "payments", newest))[1] == [CANARY]


@pytest.mark.parametrize("table", ["webhook_secrets", "webhook_provider_secrets"])
async def test_a_secret_is_forgotten_when_its_overlap_is_over_and_not_before(
    hooks: Hooks, clock: BusinessClock, table: str
) -> None:
    """E6.4: what signs or opens nothing any more is nobody's to lose."""
    clock.freeze(datetime(2026, 3, 1, 9, tzinfo=UTC))
    made = await hooks.subscribe("https://example.com/")
    async with hooks.db.transaction() as tx:
        await subscriptions.rotate_secret(tx, hooks.keyring, made.id, overlap_hours=2, actor="test")
        for _ in range(2):
            await add_provider_secret(tx, hooks.keyring, "payments", overlap_hours=2, actor="test")
    left = []
    for hours in (0, 2, 1):
        clock.advance(hours=hours)
        async with hooks.db.transaction() as tx:
            await forget(tx, days=30)
        left.append([row[0] for row in rows(hooks.dsn, f"SELECT number FROM duly.{table} ORDER BY number")])
    assert left == [[1, 2], [1, 2], [2]]


def _key_one() -> str:
    return make_settings().encryption_keys.get_secret_value()


async def test_without_the_key_nothing_is_sent_and_no_try_is_used_up(hooks: Hooks) -> None:
    async with subscriber() as one:
        await hooks.subscribe(one.url)
        await hooks.emit()
        blind = Hooks(hooks.db, hooks.dsn, make_settings(encryption_keys=SecretStr(OTHER_KEY)))
        await blind.drain()
        delivery = await hooks.delivery()
        assert (delivery.status, delivery.attempts, one.requests) == ("QUEUED", 0, [])
        error = value(hooks.dsn, "SELECT last_error FROM duly.jobs")
        assert "k1" in error
        assert isinstance(blind.handlers["duly.deliver-webhook"].function.__self__, Deliverer)  # type: ignore[attr-defined]  # a bound method


@pytest.mark.parametrize("keys", ["nonsense", "k1:AAAA", "k1:" + "A" * 43, ":" + "A" * 44, f"{OTHER_KEY},{OTHER_KEY}"])
def test_keys_that_cannot_be_read_are_refused_without_being_repeated(keys: str) -> None:
    with pytest.raises(Refused) as refusal:
        Keyring.open(make_settings(encryption_keys=SecretStr(keys)))
    assert keys not in str(refusal.value)


def test_development_makes_a_key_for_its_owner_alone(tmp_path: Path) -> None:
    settings = Settings(data=tmp_path / "new", encryption_keys=SecretStr(""))
    sealed = Keyring.open(settings).seal("a secret", place="p")
    assert Keyring.open(settings).unseal(sealed, place="p") == "a secret"
    assert stat.S_IMODE((tmp_path / "new" / FILE).stat().st_mode) == 0o600
    assert "a secret" not in repr(sealed)


def test_the_same_secret_is_never_sealed_into_the_same_bytes(tmp_path: Path) -> None:
    """A nonce that comes twice gives the key away."""
    keyring = Keyring.open(make_settings())
    sealed = {keyring.seal("a secret", place="p").sealed for _ in range(100)}
    assert len({one[:12] for one in sealed}) == 100


def test_production_without_a_key_says_what_to_set(tmp_path: Path) -> None:
    keyring = Keyring.open(Settings(env="production", data=tmp_path, encryption_keys=SecretStr("")))
    with pytest.raises(Refused, match="DULY_ENCRYPTION_KEYS"):
        keyring.seal("s", place="p")
    assert list(tmp_path.iterdir()) == []
