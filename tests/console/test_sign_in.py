"""E7.1, FAULTS (Console): who gets in, how, and what happens to those who try otherwise."""

from __future__ import annotations

import base64
import hashlib
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import httpx2
import pytest

from duly.console.sessions import REFUSALS_AN_HOUR, Session
from duly.console.sign_in import Attempt, local_path
from duly.db import Database
from duly.testing import BusinessClock
from tests.console.conftest import Site, ask, choose, csrf_of, post, serving, sign_in
from tests.console.world import EVENT, PAGES, PUBLISHED, fill
from tests.support import rows, value


def replaced(url: str, **changes: str | None) -> str:
    """The same address with other parameters."""
    parts = urlsplit(url)
    query = {name: values[0] for name, values in parse_qs(parts.query).items()} | changes
    return parts._replace(query=urlencode({name: value for name, value in query.items() if value is not None})).geturl()


async def test_a_stranger_is_sent_to_sign_in_and_comes_back_to_the_page(site: Site) -> None:
    browser = await site.browser()
    answer = await browser.get("/console/history?name=a.b")
    assert answer.status_code == 302
    assert answer.headers["location"] == "/console/sign-in?return_to=%2Fconsole%2Fhistory%3Fname%3Da.b"
    back = await sign_in(browser, "ada", "/console/history%3Fname%3Da.b")
    assert (back.status_code, back.headers["location"]) == (303, "/console/history?name=a.b")
    page = await browser.get(back.headers["location"])
    assert "Ada Kowalska" in page.text


async def test_every_page_is_closed_to_strangers(site: Site, dsn: str) -> None:
    fill(dsn)
    browser = await site.browser()
    for path in (*PAGES, "/console/live", "/console/nowhere", "/console/actions/jobs.cancel?id=1"):
        assert (await browser.get(path)).status_code == 302, path
    refused = await browser.post("/console/actions/jobs.cancel", data={"id": "1", "confirmed": "yes"})
    assert refused.status_code == 401
    assert value(dsn, "SELECT count(*) FROM duly.jobs") == 2


async def test_without_a_role_there_is_a_page_and_no_session(site: Site, dsn: str) -> None:
    browser = await site.browser()
    answer = await sign_in(browser, "nora")
    assert answer.status_code == 403
    assert "no role that the console asks for" in answer.text
    assert "duly" not in browser.cookies
    assert value(dsn, "SELECT count(*) FROM duly.console_sessions") == 0


async def test_the_browser_holds_an_opaque_id_and_the_database_its_hash(site: Site, dsn: str) -> None:
    browser = await site.browser()
    answer = await sign_in(browser, "otto")
    cookie = next(line for line in answer.headers.get_list("set-cookie") if line.startswith("duly="))
    assert "HttpOnly" in cookie
    assert "SameSite=lax" in cookie
    assert "Path=/" in cookie
    id = browser.cookies["duly"]
    assert rows(dsn, "SELECT id_hash, subject, name, roles FROM duly.console_sessions") == [
        (hashlib.sha256(id.encode()).digest(), "otto", "Otto Lindqvist", ["OPERATOR"])
    ]
    assert "eyJ" not in "".join(answer.headers.get_list("set-cookie"))  # no token


@pytest.mark.parametrize("url", ["https://ops.example", ""])
async def test_in_production_the_cookie_is_for_this_host_and_tls_only(db: Database, tmp_path: Path, url: str) -> None:
    """FAULTS: __Host-, Secure, HttpOnly, SameSite; and the console is served there."""
    async with serving(db, tmp_path) as development:
        settings: dict[str, Any] = {
            "env": "production",
            "oidc_issuer": development.issuer.url,
            "console_url": url,
        }
        async with serving(db, tmp_path / "other", **settings) as site:
            browser = await site.browser()
            begun = await browser.get("/console/sign-in")
            assert begun.status_code == 302
            back = urlencode({"redirect_uri": f"{url or site.url}/console/sign-in/callback"})
            assert back in begun.headers["location"]
            (cookie,) = begun.headers.get_list("set-cookie")
            assert cookie.startswith("__Host-duly-sign-in=")
            assert "Secure" in cookie
            assert "Domain" not in cookie


@pytest.mark.parametrize("state", [None, "", "other"])
async def test_a_missing_or_wrong_state_is_refused(site: Site, dsn: str, state: str | None) -> None:
    browser = await site.browser()
    target, fields = await ask(browser)
    back = await choose(browser, target, fields, "ada")
    answer = await browser.get(replaced(back, state=state))
    assert answer.status_code == 400
    assert value(dsn, "SELECT count(*) FROM duly.console_sessions") == 0


async def test_an_answer_that_another_browser_began_is_refused(site: Site, dsn: str) -> None:
    """Login CSRF: the attacker's code in the victim's browser."""
    attacker, victim = await site.browser(), await site.browser()
    target, fields = await ask(attacker)
    back = await choose(attacker, target, fields, "ada")
    assert (await victim.get(back)).status_code == 400
    await ask(victim)
    assert (await victim.get(back)).status_code == 400
    assert value(dsn, "SELECT count(*) FROM duly.console_sessions") == 0


async def test_a_code_is_good_once(site: Site, dsn: str) -> None:
    browser = await site.browser()
    target, fields = await ask(browser)
    back = await choose(browser, target, fields, "ada")
    kept = browser.cookies["duly-sign-in"]
    assert (await browser.get(back)).status_code == 303
    again = await browser.get(back, headers={"Cookie": f"duly-sign-in={kept}"})
    assert again.status_code == 400
    assert value(dsn, "SELECT count(*) FROM duly.console_sessions") == 1


async def test_a_code_of_another_provider_is_refused(site: Site) -> None:
    """RFC 9207: a mix-up."""
    browser = await site.browser()
    target, fields = await ask(browser)
    back = await choose(browser, target, fields, "ada")
    assert (await browser.get(replaced(back, iss="https://evil.example"))).status_code == 400


async def test_a_code_needs_the_verifier_it_was_asked_with(site: Site) -> None:
    browser = await site.browser()
    target, fields = await ask(browser)
    code = parse_qs(urlsplit(await choose(browser, target, fields, "ada")).query)["code"][0]
    form = {"grant_type": "authorization_code", "client_id": "duly-console", "code": code}
    form |= {"redirect_uri": fields["redirect_uri"], "code_verifier": "x" * 43}
    answer = await browser.post("/dev-issuer/token", data=form)
    assert (answer.status_code, answer.json()["error"]) == (400, "invalid_grant")


@pytest.mark.parametrize("change", ["client_id", "redirect_uri", "code_challenge", "response_type"])
async def test_the_issuer_refuses_what_it_cannot_answer_safely(site: Site, change: str) -> None:
    browser = await site.browser()
    target, fields = await ask(browser)
    wrong = {"redirect_uri": "https://evil.example/console/sign-in/callback"}.get(change, "wrong")
    answer = await browser.post(target, data={**fields, change: wrong, "person": "ada"})
    assert answer.status_code == 400
    assert "location" not in answer.headers


@pytest.mark.parametrize(
    "given",
    ["https://evil.example", "//evil.example", "/\\evil.example", "/console//evil.example", "/console\\@evil.example",
     "javascript:alert(1)", "/elsewhere", "/console/\r\nSet-Cookie: a=b", "/console/" + "a" * 2000, "/consoleevil",
     "/console/../elsewhere", "/console/./../elsewhere"],
)  # fmt: skip
async def test_after_signing_in_only_pages_of_the_console_are_gone_to(site: Site, given: str) -> None:
    """Open redirect."""
    assert local_path(given) == "/console"
    browser = await site.browser()
    back = await sign_in(browser, "ada", urlencode({"x": given})[2:])
    assert (back.status_code, back.headers["location"]) == (303, "/console")


async def test_a_sign_in_cookie_that_was_changed_leads_nowhere_else(site: Site) -> None:
    """Whoever can set a cookie of ours must not choose where people land."""
    browser = await site.browser()
    target, fields = await ask(browser)
    begun = json.loads(base64.urlsafe_b64decode(browser.cookies["duly-sign-in"]))
    changed = base64.urlsafe_b64encode(json.dumps({**begun, "return_to": "https://evil.example"}).encode()).decode()
    back = await choose(browser, target, fields, "ada")
    answer = await browser.get(back, headers={"Cookie": f"duly-sign-in={changed}"})
    assert (answer.status_code, answer.headers["location"]) == (303, "/console")


@pytest.mark.parametrize(
    ("access", "identity", "status"),
    [({"sub": "ada"}, {"sub": "ada"}, 303), ({"sub": "ada"}, {"sub": "otto"}, 401),
     ({"sub": "ada", "scopes": ["users"]}, {"sub": "ada"}, 403),
     ({"sub": "ada", "roles": ["NOBODY"]}, {"sub": "ada"}, 403),
     ({"sub": "ada", "audience": "others"}, {"sub": "ada"}, 401), ({"sub": "ada"}, {"sub": "ada", "nonce": "old"}, 401),
     ({"sub": "ada"}, {"sub": "ada", "client_id": "another"}, 401)],
)  # fmt: skip
async def test_what_the_provider_says_must_fit_together(
    site: Site, dsn: str, monkeypatch: pytest.MonkeyPatch, access: dict[str, Any], identity: dict[str, Any], status: int
) -> None:
    """Two tokens about one person, for us, for this sign-in, with our scope and a role."""

    async def redeem(_code: str, attempt: Attempt, _redirect_uri: str) -> dict[str, str]:
        about = {"name": "Ada", "client_id": "duly-console", "nonce": attempt.nonce, **identity}
        rights = {"scopes": ["console"], "roles": ["ADMINISTRATOR"], **access}
        return {"access_token": site.issuer.sign(**rights), "id_token": site.issuer.sign_identity(**about)}

    monkeypatch.setattr(site.console.sign_in, "_redeem", redeem)
    answer = await sign_in(await site.browser(), "ada")
    assert answer.status_code == status, answer.text[-300:]
    assert value(dsn, "SELECT count(*) FROM duly.console_sessions") == (status == 303)
    said = {303: [("ada", "console.signed_in")], 403: [("ada", "console.sign_in_refused")], 401: []}
    assert rows(dsn, "SELECT actor, action FROM duly.audit") == said[status]


async def test_the_session_is_new_at_each_sign_in(site: Site, dsn: str) -> None:
    """Session fixation: an id from before is not kept, and the old session ends."""
    browser = await site.browser()
    browser.cookies.set("duly", "chosen-by-the-attacker", domain="127.0.0.1")
    await sign_in(browser, "ada")
    first = browser.cookies["duly"]
    assert first != "chosen-by-the-attacker"
    await sign_in(browser, "ada")
    assert browser.cookies["duly"] != first
    assert value(dsn, "SELECT count(*) FROM duly.console_sessions WHERE revoked_at IS NULL") == 1
    other = await site.browser()
    other.cookies.set("duly", first, domain="127.0.0.1")
    assert (await other.get("/console")).status_code == 302


@pytest.mark.parametrize(
    "ended",
    ["expires_at = clock_timestamp() - interval '1 s', created_at = clock_timestamp() - interval '2 s'",
     "seen_at = clock_timestamp() - interval '61 minutes'", "revoked_at = clock_timestamp()"],
)  # fmt: skip
async def test_a_session_that_ended_was_left_alone_or_revoked_is_over_at_once(
    site: Site, ada: httpx2.AsyncClient, dsn: str, ended: str
) -> None:
    assert (await ada.get("/console/processes")).status_code == 200
    rows(dsn, f"UPDATE duly.console_sessions SET {ended}")
    assert (await ada.get("/console/processes")).status_code == 302


async def test_being_seen_is_written_once_a_minute(ada: httpx2.AsyncClient, dsn: str) -> None:
    before = value(dsn, "SELECT xmin::text FROM duly.console_sessions")
    await ada.get("/console/processes")
    assert value(dsn, "SELECT xmin::text FROM duly.console_sessions") == before
    rows(dsn, "UPDATE duly.console_sessions SET seen_at = clock_timestamp() - interval '2 minutes'")
    await ada.get("/console/processes")
    assert value(dsn, "SELECT seen_at > clock_timestamp() - interval '1 minute' FROM duly.console_sessions")


async def test_a_page_that_asks_by_itself_keeps_no_session_alive(ada: httpx2.AsyncClient, dsn: str) -> None:
    rows(dsn, "UPDATE duly.console_sessions SET seen_at = clock_timestamp() - interval '59 minutes'")
    before = value(dsn, "SELECT seen_at FROM duly.console_sessions")
    page = await ada.get("/console/processes", headers={"HX-Request": "true"})
    assert (page.status_code, "hx-refresh" in page.headers) == (200, False)
    assert value(dsn, "SELECT seen_at FROM duly.console_sessions") == before
    rows(dsn, "UPDATE duly.console_sessions SET seen_at = clock_timestamp() - interval '61 minutes'")
    page = await ada.get("/console/processes", headers={"HX-Request": "true"})
    assert (page.status_code, page.headers["hx-refresh"]) == (401, "true")


async def test_signing_out_ends_the_session_here_and_in_the_database(ada: httpx2.AsyncClient, dsn: str) -> None:
    id = ada.cookies["duly"]
    refused = await ada.post("/console/sign-out", data={"csrf": "wrong"})
    assert refused.status_code == 403
    answer = await ada.post("/console/sign-out", data={"csrf": await csrf_of(ada)})
    assert answer.headers["location"] == "/console/signed-out"
    assert (await ada.get("/console/signed-out")).status_code == 200
    ada.cookies.set("duly", id, domain="127.0.0.1")
    assert (await ada.get("/console")).status_code == 302
    assert value(dsn, "SELECT count(*) FROM duly.console_sessions WHERE revoked_at IS NULL") == 0


async def test_signing_in_and_out_is_in_the_audit_by_subject_alone(
    site: Site, ada: httpx2.AsyncClient, dsn: str
) -> None:
    """E7.1: who came and went, and when; no name, no session, and nothing of it among what people did."""
    await ada.post("/console/sign-out", data={"csrf": await csrf_of(ada)})
    otto = await site.signed_in("otto")
    assert rows(dsn, "SELECT action, actor, subject, reason, before, after FROM duly.audit ORDER BY id") == [
        (f"console.signed_{way}", person, "console:session", None, None, None)
        for way, person in (("in", "ada"), ("out", "ada"), ("in", "otto"))
    ]
    page = (await otto.get("/console/audit?who=ada")).text
    assert (page.count("console.signed_in"), page.count("console.signed_out")) == (1, 1)
    assert "Nobody has done anything yet." in (await otto.get("/console")).text


async def test_who_signs_in_anew_has_gone_before(ada: httpx2.AsyncClient, dsn: str) -> None:
    await sign_in(ada, "otto")
    said = rows(dsn, "SELECT actor, action FROM duly.audit ORDER BY id")
    assert said[1:] == [("ada", "console.signed_out"), ("otto", "console.signed_in")]


async def test_coming_and_going_and_their_record_are_one_commit(site: Site, ada: httpx2.AsyncClient, dsn: str) -> None:
    """When the record cannot be written, nobody is signed in, and nobody out."""
    token = await csrf_of(ada)
    rows(dsn, "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS "
              "$$ BEGIN RAISE EXCEPTION 'no' USING ERRCODE = '23514'; END $$")  # fmt: skip
    rows(dsn, "CREATE TRIGGER refuse BEFORE INSERT ON duly.audit FOR EACH ROW EXECUTE FUNCTION refuse()")
    assert (await sign_in(await site.browser(), "otto")).status_code == 400
    assert (await ada.post("/console/sign-out", data={"csrf": token})).status_code == 422
    assert rows(dsn, "SELECT subject, revoked_at FROM duly.console_sessions") == [("ada", None)]


async def test_a_refused_sign_in_is_in_the_audit_once_an_hour(site: Site, dsn: str, clock: BusinessClock) -> None:
    """Only of whom the provider knows; and one who tries all night does not fill the record."""
    clock.freeze(datetime(2026, 3, 2, 12, tzinfo=UTC))
    counted = []
    for seconds in (0, 1, 3_598, 1):
        clock.advance(seconds=seconds)
        assert (await sign_in(await site.browser(), "nora")).status_code == 403
        counted.append(value(dsn, "SELECT count(*) FROM duly.audit"))
    assert counted == [1, 1, 1, 2]
    ada = await site.signed_in("ada")
    assert (await ada.get("/console/audit?who=nora")).text.count("console.sign_in_refused") == 2


@pytest.mark.parametrize(("others", "written"), [(REFUSALS_AN_HOUR - 1, 1), (REFUSALS_AN_HOUR, 0)])
async def test_refused_sign_ins_of_many_people_are_so_many_an_hour(
    site: Site, dsn: str, others: int, written: int
) -> None:
    rows(
        dsn,
        "INSERT INTO duly.audit (at, actor, action, subject) SELECT duly.now(), 'p' || n, 'console.sign_in_refused', "
        "'console:sign-in' FROM generate_series(1, %(others)s) AS n",
        {"others": others},
    )
    assert (await sign_in(await site.browser(), "nora")).status_code == 403
    assert value(dsn, "SELECT count(*) FROM duly.audit WHERE actor = 'nora'") == written


async def test_a_form_needs_the_token_of_its_session_and_our_origin(
    site: Site, ada: httpx2.AsyncClient, otto: httpx2.AsyncClient, dsn: str
) -> None:
    """CSRF: no token, a wrong one, another session's; another site's form, whatever it knows."""
    fill(dsn)
    path, fields = "/console/actions/jobs.run-now", {"id": "1"}
    for token in ("", "0" * 64, await csrf_of(otto)):
        assert (await ada.post(path, data={**fields, "csrf": token})).status_code == 403
    right = {**fields, "csrf": await csrf_of(ada)}
    for headers in ({"Origin": "https://evil.example"}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"},
                    {"Sec-Fetch-Site": "same-site"}):  # fmt: skip
        assert (await ada.post(path, data=right, headers=headers)).status_code == 403, headers
    assert (await ada.post(path, json=right)).status_code == 400
    assert value(dsn, "SELECT count(*) FROM duly.audit WHERE action = 'job.run_now'") == 0
    for headers in ({"Origin": site.url}, {"Origin": site.url, "Sec-Fetch-Site": "same-origin"},
                    {"Origin": "null", "Sec-Fetch-Site": "same-origin"}):  # fmt: skip
        assert (await ada.post(path, data=right, headers=headers)).status_code == 303  # the last is what Chromium sends
    by_header = await ada.post(path, data=fields, headers={"X-CSRF-Token": right["csrf"]})
    assert by_header.status_code == 303
    assert value(dsn, "SELECT count(*) FROM duly.audit WHERE action = 'job.run_now'") == 4


async def test_an_operator_may_look_and_is_refused_at_the_handler(otto: httpx2.AsyncClient, dsn: str) -> None:
    """FAULTS: authorise the handler, not the button."""
    fill(dsn)
    page = await otto.get("/console/jobs/1")
    assert "/console/actions/" not in page.text
    assert "Payload" not in page.text
    for event in (EVENT, PUBLISHED):
        page = await otto.get(f"/console/events/{event}")
        assert page.status_code == 200
        assert "Payload" not in page.text
        assert "&#34;note&#34;" not in page.text
    assert (await post(otto, "jobs.cancel", id="1")).status_code == 403
    assert (await otto.get("/console/actions/jobs.cancel?id=1")).status_code == 403
    assert value(dsn, "SELECT count(*) FROM duly.jobs") == 2
    assert value(dsn, "SELECT count(*) FROM duly.audit WHERE actor LIKE 'Otto%%'", {}) == 0


async def test_a_provider_that_is_away_is_said(db: Database, tmp_path: Path) -> None:
    async with serving(db, tmp_path, oidc_issuer="http://127.0.0.1:9/realms/x") as site:
        answer = await (await site.browser()).get("/console/sign-in")
        assert answer.status_code == 503
        assert "identity provider cannot be reached" in answer.text


def test_the_audit_names_the_person_and_stays_short() -> None:
    session = Session(b"", "ada", "Ada", frozenset(), "")
    assert session.actor == "Ada (ada)"
    assert Session(b"", "x", "y" * 255, frozenset(), "").actor == "x"


async def test_ended_sessions_are_forgotten_at_night(
    db: Database, dsn: str, site: Site, ada: httpx2.AsyncClient
) -> None:
    from duly.operate import maintenance

    await site.signed_in("otto")
    rows(
        dsn,
        "UPDATE duly.console_sessions SET created_at = created_at - interval '9 hours', "
        "expires_at = expires_at - interval '9 hours' WHERE subject = 'otto'",
    )
    async with db.transaction() as tx:
        assert await maintenance.forget_console_sessions(tx) == "forgot 1 console session"
    assert value(dsn, "SELECT string_agg(subject, ' ') FROM duly.console_sessions") == "ada"
