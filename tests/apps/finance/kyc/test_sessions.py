"""Sessions: how they begin, where a person goes, and how they end (F8, UC-10)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import httpx2
import psycopg
import pytest

from apps.finance.kyc import service
from apps.finance.kyc.gateways import (
    HOSTS_VARIABLE,
    URL_VARIABLE,
    NoProvider,
    Opening,
    _is_page,
    check_addresses,
    find_callback_url,
    find_hosted_url,
)
from apps.finance.kyc.gateways import HttpProvider as Gateway
from apps.sandbox import identity
from apps.sandbox.identity import Behaviour
from duly.cli.process import build_api
from duly.db import Database
from duly.errors import Refused
from duly.settings import Settings
from tests.apps.finance.kyc.acting import Desk, facts_of, subjects_of
from tests.apps.finance.ledger.acting import refused
from tests.apps.transfers.acting import new_key
from tests.support import rows, value

JOBS = "SELECT count(*) FROM duly.jobs WHERE name = 'kyc.expire'"


async def test_a_person_is_checked_from_beginning_to_end(desk: Desk, dsn: str) -> None:
    """F8: 201 with the three members, a page that speaks HTTP, a signed call, and an opaque reference."""
    user = str(uuid4())
    made = await desk.create(user)
    assert (made["status"], made["userId"], made["providerId"]) == ("PENDING", user, "sandbox")
    page = await desk.start(made)
    assert desk.status(made["sessionId"]) == "IN_PROGRESS"
    form = await desk.api.client.get(page)
    assert (form.status_code, form.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert "Date of birth" in form.text
    done = await desk.submit(page, fullName="Ann Canary", birthDate="1990-01-02")
    assert "APPROVED" in done.text
    found = await desk.read(made["sessionId"])
    (check,) = desk.provider.checks.values()
    assert (found["status"], found["evidenceRef"]) == ("APPROVED", check.evidence)
    assert [line["cause"] for line in found["history"]] == ["create", "open", "callback"]
    assert facts_of(dsn, made["sessionId"]) == ["kyc.session.created", "kyc.session.approved"]
    assert value(dsn, JOBS) == 0, "the timer is withdrawn"
    desk.check()


async def test_a_rejection_has_its_evidence_too(desk: Desk, dsn: str) -> None:
    made = await desk.create()
    await desk.submit(await desk.start(made), "REJECTED")
    found = await desk.read(made["sessionId"])
    assert (found["status"], found["evidenceRef"][:3]) == ("REJECTED", "ev_")
    assert facts_of(dsn, made["sessionId"])[-1] == "kyc.session.rejected"
    desk.check()


async def test_a_session_is_made_once_for_a_key(desk: Desk, dsn: str) -> None:
    """E4."""
    key, body = new_key(), {"userId": "user-42"}
    answers = await asyncio.gather(*(desk.try_create(body, **{"Idempotency-Key": key}) for _ in range(5)))
    assert {(answer.status_code, answer.content) for answer in answers} == {(201, answers[0].content)}
    assert value(dsn, "SELECT count(*) FROM kyc.sessions") == 1
    assert answers[0].headers["location"] == f"/v1/kyc/sessions/{answers[0].json()['sessionId']}"


@pytest.mark.parametrize(
    "user_id",
    [
        "ann@example.com", "Ann Kowalska", "ann-kowalska", "kowalski-1990", "jan_kowalski1990", "1990-01-02",
        "90010212345", "ABC123456", "user-90010212345", "user-kowalski", "+48600100200", "", "u" * 100, "user-1\n",
        "user-1 ", "\N{FULLWIDTH DIGIT ONE}", "user-\N{ARABIC-INDIC DIGIT ONE}", None, 7, ["user-1"], {"a": 1},
    ],
)  # fmt: skip
async def test_what_may_be_a_person_is_no_user_id(desk: Desk, dsn: str, user_id: object) -> None:
    """F8: an address, a name, a birthday, a number of a document; and the answer does not repeat it."""
    answer = await desk.try_create({"userId": user_id})
    assert (answer.status_code, answer.json()["errors"][0]["path"]) == (422, "$.userId")
    if isinstance(user_id, str) and len(user_id) > 3:
        assert user_id not in answer.text
    assert value(dsn, "SELECT count(*) FROM kyc.sessions") == 0


@pytest.mark.parametrize(
    "user_id",
    [
        "5f1d7a52-3c1e-4b7e-9d57-0f3f5f7d2c11", "user-42", "u1", "usr_" + "0a" * 12, "customer_000123456", "id7",
        "sub-" + "f" * 64,
    ],
)  # fmt: skip
async def test_opaque_ids_are_user_ids(desk: Desk, user_id: str) -> None:
    assert (await desk.create(user_id))["userId"] == user_id


async def test_the_database_refuses_a_person_whoever_writes(desk: Desk, dsn: str) -> None:
    """F8: a courtesy of Python is not enough."""
    made = await desk.create()
    columns = {
        "user_id": "ann@example.com", "evidence_ref": "passport of Ann Kowalska", "provider_ref": "Ann Kowalska",
    }  # fmt: skip
    for column, person in columns.items():
        copy = {"evidence_ref": "'APPROVED'"}.get(column, "status")
        with pytest.raises(Exception, match=r"is_opaque|decided_have_evidence"):
            rows(
                dsn,
                f"""INSERT INTO kyc.sessions (id, {column}, status, provider, token, requested_by, created_at,
                    expires_at, updated_at {"" if column == "user_id" else ", user_id"})
                    SELECT gen_random_uuid(), '{person}', {copy}, 'sandbox', token, 'x', created_at, expires_at,
                    updated_at {"" if column == "user_id" else ", user_id"} FROM kyc.sessions""",
            )
    await desk.call(made["sessionId"], "APPROVED")
    for change in ("status = 'REJECTED'", "user_id = 'user-7'", "version = version + 1"):
        with pytest.raises(Exception, match="this never changes"):
            rows(dsn, f"UPDATE kyc.sessions SET {change}")
    with pytest.raises(Exception, match="is refused"):
        rows(dsn, "UPDATE kyc.history SET cause = 'open'")


async def test_only_a_provider_that_is_plugged_in_checks(desk: Desk) -> None:
    answer = await desk.try_create({"userId": "user-1", "providerId": "nobody"})
    assert refused(answer)[:2] == (422, "unknown-provider")
    assert answer.json()["errors"][0]["path"] == "$.providerId"
    assert (await desk.try_create({"userId": "user-1", "providerId": "sandbox"})).status_code == 201
    assert (await desk.try_create({"userId": "user-1", "name": "Ann"})).status_code == 422


async def test_a_member_that_nobody_knows_is_refused_without_its_name(desk: Desk, dsn: str) -> None:
    """F8: somebody's name may be the name of a member, too; the answer repeats neither."""
    for wrong in ({"Ann Kowalska": 7}, {"Ann Kowalska": {"born": "1990-01-02"}}, {"name": "Ann Kowalska"}):
        answer = await desk.try_create({"userId": "user-1", **wrong})
        assert answer.status_code == 422
        assert not {word for word in ("Kowalska", "1990-01-02") if word in answer.text}
    assert value(dsn, "SELECT count(*) FROM kyc.sessions") == 0


async def test_sessions_are_listed_by_person_and_by_status(desk: Desk) -> None:
    ids = [(await desk.create(f"user-{number % 2}"))["sessionId"] for number in range(4)]
    await desk.call(ids[0], "APPROVED")

    async def listed(**query: str) -> tuple[list[str], str | None]:
        answer = await desk.api.client.get("/v1/kyc/sessions", params=query, headers=desk.headers)
        assert answer.status_code == 200, answer.text
        page = answer.json()
        return [one["sessionId"] for one in page["items"]], page["next"]

    assert await listed() == (ids[::-1], None)
    assert await listed(userId="user-1") == ([ids[3], ids[1]], None)
    assert await listed(status="APPROVED") == ([ids[0]], None)
    assert await listed(limit="2") == ([ids[3], ids[2]], ids[2])
    assert await listed(limit="2", before=ids[2]) == ([ids[1], ids[0]], None)
    assert await listed(status="PENDING", limit="1", before=ids[3]) == ([ids[2]], ids[2])
    both = await desk.api.client.get("/v1/kyc/sessions?userId=user-1&status=PENDING", headers=desk.headers)
    assert both.status_code == 422
    absent = await desk.api.client.get(f"/v1/kyc/sessions/{uuid4()}", headers=desk.headers)
    assert refused(absent)[:2] == (404, "session-not-found")


# -- the provider, who may be away -----------------------------------------------------------------------------------


async def test_a_lost_answer_makes_no_second_session(desk: Desk, dsn: str) -> None:
    """F8: the same key, the same page, however often the person tries."""
    made = await desk.create()
    for behaviour in (Behaviour.LOSE, Behaviour.GARBLE, Behaviour.LOSE):
        desk.order(behaviour)
        away = await desk.visit(made["hostedUrl"])
        assert (away.status_code, away.headers["retry-after"]) == (503, "60")
        assert desk.status(made["sessionId"]) == "PENDING"
    desk.order(Behaviour.NORMAL)
    pages = {await desk.start(made) for _ in range(3)}
    assert (len(pages), len(desk.provider.checks), set(desk.provider.log)) == (1, 1, {made["sessionId"]})
    assert value(dsn, "SELECT provider_ref FROM kyc.sessions") == next(iter(desk.provider.checks))
    desk.check()


async def test_while_the_provider_is_away_sessions_are_made_and_expire(
    desk: Desk, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F8: also when there is no provider at all."""
    monkeypatch.setenv(URL_VARIABLE, "http://127.0.0.1:1")
    made = await desk.create()
    assert (await desk.visit(made["hostedUrl"])).status_code == 503
    desk.order(Behaviour.BUSY)
    await desk.run(hours=23.9)
    assert desk.status(made["sessionId"]) == "PENDING"
    await desk.run(hours=0.2)
    assert (await desk.read(made["sessionId"]))["status"] == "EXPIRED"
    assert facts_of(dsn, made["sessionId"]) == ["kyc.session.created", "kyc.session.expired"]
    over = await desk.visit(made["hostedUrl"])
    assert (over.status_code, over.headers["cache-control"]) == (410, "no-store")
    desk.check()


async def test_a_provider_that_never_calls_is_waited_for_until_the_end(desk: Desk, dsn: str) -> None:
    desk.order(Behaviour.SILENT)
    made = await desk.create()
    await desk.submit(await desk.start(made))
    assert desk.status(made["sessionId"]) == "IN_PROGRESS"
    await desk.run(hours=24.1)
    assert desk.status(made["sessionId"]) == "EXPIRED"
    desk.check()


async def test_whoever_comes_after_the_end_says_so_before_the_timer_does(desk: Desk, dsn: str) -> None:
    made = await desk.create()
    desk.clock.advance(hours=24.1)
    assert (await desk.visit(made["hostedUrl"])).status_code == 410
    assert desk.status(made["sessionId"]) == "EXPIRED"
    assert desk.provider.log == []
    await desk.run()
    desk.check()


async def test_the_sweep_expires_what_timers_missed(desk: Desk, db: Database, dsn: str) -> None:
    """Twice finds nothing the second time; and it stops at its limit."""
    made = [(await desk.create())["sessionId"] for _ in range(3)]
    rows(dsn, "DELETE FROM duly.jobs WHERE name = 'kyc.expire'")
    desk.clock.advance(hours=25)
    async with db.transaction() as tx:
        assert await service.sweep(tx, limit=2) == (2, True)
    rows(dsn, "SELECT duly.schedule('kyc.sweep')")
    await desk.run()
    assert {desk.status(one) for one in made} == {"EXPIRED"}
    desk.check()


async def test_old_sessions_are_forgotten_and_open_ones_are_not(desk: Desk, dsn: str) -> None:
    """Five years after they ended; callbacks that nobody could match after 400 days."""
    old = (await desk.create())["sessionId"]
    await desk.call(old, "APPROVED")
    await desk.call(str(uuid4()), "APPROVED")
    await desk.run(hours=24 * 401)
    rows(dsn, "SELECT duly.schedule('kyc.forget')")
    await desk.run()
    assert value(dsn, "SELECT count(*) FROM kyc.unmatched_callbacks") == 0
    assert desk.status(old) == "APPROVED"
    desk.clock.advance(hours=24 * 1_430)
    fresh = (await desk.create())["sessionId"]
    rows(dsn, "SELECT duly.schedule('kyc.forget')")
    await desk.run()
    assert rows(dsn, "SELECT id::text FROM kyc.sessions") == [(fresh,)]
    assert value(dsn, "SELECT count(*) FROM kyc.history") == 1


async def test_what_opens_the_page_is_told_once_and_kept_nowhere(desk: Desk, dsn: str) -> None:
    """Neither in lists nor in what is read later, nor in the database: there is a digest, which opens nothing."""
    answer = await desk.try_create({"userId": "user-1"})
    made = answer.json()
    token = made["hostedUrl"].rpartition("/")[2]
    reads = [await desk.api.client.get(f"/v1/kyc/sessions{path}", headers=desk.headers)
             for path in ("", f"/{made['sessionId']}", "?userId=user-1", "?status=PENDING")]  # fmt: skip
    for one in reads:
        assert one.status_code == 200
        assert made["sessionId"] in one.text
        assert token not in one.text
        assert "hostedUrl" not in one.text
    assert {one.headers["cache-control"] for one in (answer, *reads)} == {"no-store"}
    tables = ("kyc.sessions", "kyc.history", "duly.outbox", "duly.events", "duly.jobs", "duly.audit")
    assert token not in str([rows(dsn, f"SELECT t::text FROM {table} t") for table in tables])
    kept = value(dsn, "SELECT token FROM kyc.sessions")
    assert (await desk.api.client.get(f"/v1/kyc/start/{made['sessionId']}/{kept}")).status_code == 404
    assert await desk.start(made)


async def test_a_session_of_the_release_before_can_be_begun(desk: Desk, dsn: str) -> None:
    """It kept tokens as they are; for the day that such a session lasts, they open it."""
    made = await desk.create()
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("SET session_replication_role = replica")
        connection.execute("UPDATE kyc.sessions SET token = repeat('t', 32)")
    path = f"/v1/kyc/start/{made['sessionId']}"
    assert (await desk.api.client.get(f"{path}/{'t' * 31}")).status_code == 404
    assert (await desk.api.client.get(f"{path}/{'t' * 32}")).status_code == 303


@pytest.mark.parametrize("token", ["x", "", "../../healthz", "\N{SNOWMAN}" * 20])
async def test_nobody_begins_without_the_token(desk: Desk, token: str) -> None:
    """The address is the credential: somebody who knows the session's id has nothing."""
    made = await desk.create()
    answer = await desk.api.client.get(f"/v1/kyc/start/{made['sessionId']}/{httpx2.URL(path=token).path or 'x'}")
    assert answer.status_code == 404
    assert desk.provider.log == []


async def test_a_second_name_of_a_session_is_told(desk: Desk, dsn: str) -> None:
    """A provider that forgets keys: the first name counts, and a person looks."""
    desk.order(Behaviour.NORMAL, forgets_keys=True)
    made = await desk.create()
    await desk.start(made)
    await desk.start(made)
    assert len(desk.provider.checks) == 2
    assert value(dsn, "SELECT provider_ref FROM kyc.sessions") == next(iter(desk.provider.checks))
    assert subjects_of(dsn) == [f"kyc.reference:{made['sessionId']}"]
    desk.check()


async def test_one_name_for_two_sessions_is_told(desk: Desk, db: Database, dsn: str) -> None:
    one, two = [await desk.create() for _ in range(2)]
    await desk.start(one)
    taken = next(iter(desk.provider.checks))
    async with db.transaction() as tx:
        await service.note_opened(tx, UUID(two["sessionId"]), reference=taken)
    assert subjects_of(dsn) == [f"kyc.reference:{two['sessionId']}"]
    assert value(dsn, "SELECT count(*) FROM kyc.sessions WHERE provider_ref IS NOT NULL") == 1
    desk.check()


PAGES = {
    "https://provider.example/page?x=1": True, "https://provider.example:8443/p": False,
    "http://provider.example/": True, "https://pages.example/p": True, "https://evil.example/p": False,
    "javascript:alert(1)": False, "//evil.example": False,
    "https://user:pw@provider.example/": False, "https://provider.example.evil.example/": False, "/sandbox": False,
    "https://provider.example/\r\nSet-Cookie: a=b": False, "https://provider.example/" + "a" * 2_000: False,
    "https://[": False, "data:text/html,x": False, "https://provider.example@evil.example/": False,
}  # fmt: skip


@pytest.mark.parametrize("page", PAGES)
def test_people_are_sent_to_the_providers_hosts_only(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An open redirect would send them to whoever can write the provider's answers."""
    monkeypatch.setenv(HOSTS_VARIABLE, "pages.example")
    assert _is_page(page, "https://provider.example", Settings()) is PAGES[page]


@pytest.mark.parametrize(
    ("variable", "given"),
    [
        (URL_VARIABLE, "http://provider.example"), (URL_VARIABLE, "provider"), (URL_VARIABLE, "https://a:b@c.example"),
        ("KYC_PROVIDER_TOKEN", "two words"), (URL_VARIABLE, ""),
    ],
)  # fmt: skip
async def test_in_production_a_wrong_setting_asks_nobody(
    monkeypatch: pytest.MonkeyPatch, variable: str, given: str
) -> None:
    monkeypatch.setenv(URL_VARIABLE, "https://provider.example")
    monkeypatch.setenv(variable, given)
    with pytest.raises(NoProvider, match="nobody can be checked"):
        await Gateway("p").open(Opening(uuid4(), 60, "https://us.example"), Settings(env="production"))


def test_a_provider_is_told_where_to_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KYC_CALLBACK_URL", "https://duly.example/v1/webhooks/kyc/")
    assert find_callback_url("sandbox", Settings(env="production")) == "https://duly.example/v1/webhooks/kyc/sandbox"
    monkeypatch.setenv("KYC_CALLBACK_URL", "http://duly.example/v1/webhooks/kyc")
    with pytest.raises(NoProvider):
        find_callback_url("sandbox", Settings(env="production"))


PRODUCTION: dict[str, Any] = {
    "env": "production", "oidc_issuer": "https://id.example.com/realms/main", "oidc_client_id": "c",
    "oidc_client_secret": "s", "host": "127.0.0.1",
}  # fmt: skip


@pytest.mark.parametrize("variable", ["KYC_HOSTED_URL", "KYC_CALLBACK_URL", URL_VARIABLE])
@pytest.mark.parametrize("given", ["http://duly.example/start", "duly.example", "https://a:b@duly.example"])
async def test_in_production_a_wrong_address_is_refused_at_the_start(
    monkeypatch: pytest.MonkeyPatch, db: Database, tmp_path: Path, variable: str, given: str
) -> None:
    """The address that people get holds a secret: it goes to nobody over http, and not only from the first check on."""
    from apps.wiring import app

    monkeypatch.setenv(variable, given)
    with pytest.raises(Refused, match=variable):
        build_api(db, [], Settings(data=tmp_path, **PRODUCTION), app, port=1)


def test_people_get_an_address_over_https_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(env="production")
    check_addresses(settings)  # nothing is set, and nobody is checked
    with pytest.raises(NoProvider, match="KYC_HOSTED_URL"):
        find_hosted_url(settings)
    monkeypatch.setenv("KYC_HOSTED_URL", "https://duly.example/start/")
    check_addresses(settings)
    assert find_hosted_url(settings) == "https://duly.example/start"
    assert find_hosted_url(Settings(env="production", api_url="https://api.example/")) == "https://duly.example/start"


async def test_the_sandbox_is_not_served_in_production() -> None:
    from apps.wiring import app

    routes = [route for router in app.routers for route in router.routes]
    assert not [route for route in routes if str(getattr(route, "path", "")).startswith(identity.PATH)]
