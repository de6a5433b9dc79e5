"""E7.1: sections with roles and actions of their own: closed, confirmed, done once, audited, refused at the field."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Any

import pytest
import pytest_asyncio
from fastapi import Request
from fastapi.responses import Response
from pydantic import Field

from duly.app import Duly
from duly.console import Pages, Section, Wrong, check_may_act, may_act, show
from duly.console.forms import MARKED, read_wrong
from duly.db import Database, Tx
from duly.errors import Conflict, Fault, Forbidden, Invalid
from duly.operate import Action, Arguments, Result, write_audit
from tests.console.conftest import Site, csrf_of, post, serving
from tests.support import rows, value

FORM = """{% extends "base.html" %}{% from "parts.html" import act, proof, refused, marks, problem %}{% block content %}
<h1>Orders</h1><p>{{ "may act" if may_act else "may look" }}</p>
{{ act(session, "orders.close", {"order": "9"}, mount ~ "/orders") }}
<form method="post" action="{{ mount }}/actions/orders.rename">{{ refused(wrong) }}{{ proof(session) }}
<label>Name <input name="name" value="{{ values.get("name", "") }}"{{ marks(wrong, "name") }}>
{{ problem(wrong, "name") }}</label></form>{% endblock %}"""
PLAIN = '{% extends "base.html" %}{% block content %}<h1>Secrets</h1>{% endblock %}'


class OfOrder(Arguments):
    """An order."""

    order: str


class Naming(Arguments):
    """A name for an order."""

    name: Annotated[str, Field(max_length=10)]


async def close(tx: Tx, given: OfOrder, actor: str, reason: str | None) -> Result:
    """As an application does it."""
    await write_audit(
        tx, actor=actor, action="order.closed", subject=f"order:{given.order}", reason=reason, before={"open": True},
        after={"open": False},
    )  # fmt: skip
    return Result(f"closed order {given.order}", page="/orders/closed")


async def rename(tx: Tx, given: Naming, actor: str, reason: str | None) -> Result:
    """Refuses some names, each in another way."""
    if given.name == "deep":
        error = Invalid("the name is bad")
        error.faults = (Fault("body", "$.name.all[0].givenOp", "write another"),)
        raise error
    if given.name == "taken":
        raise Conflict("this name is taken")
    if given.name == "mine":
        raise Forbidden("it is your own")
    await write_audit(tx, actor=actor, action="order.renamed", subject="order:9", reason=reason)
    return Result("renamed it")


async def read_along(tx: Tx, given: OfOrder, actor: str, reason: str | None) -> Result:
    """For auditors."""
    await write_audit(tx, actor=actor, action="secret.read", subject=f"order:{given.order}")
    return Result("read it")


CLOSE = Action("orders.close", "Close an order.", OfOrder, close, True, verb="Close", needs_reason=True)
RENAME = Action("orders.rename", "Name an order.", Naming, rename, verb="Rename")
READ = Action("secrets.read", "Read a secret.", OfOrder, read_along, verb="Read")


def make_app(directory: Path) -> Duly:
    """Orders for those who manage quality, whom operators may watch; secrets for engineers only."""
    (directory / "orders.html").write_text(FORM)
    (directory / "secrets.html").write_text(PLAIN)
    orders, secrets = Pages(), Pages()

    @orders.get("")
    @orders.get("/closed")
    async def all_orders(request: Request) -> Response:
        return show(request, "orders.html", may_act=may_act(request), values={}, wrong=None)

    @orders.get("/new")
    async def new_order(request: Request) -> Response:
        check_may_act(request)
        return show(request, "orders.html", may_act=True, values={}, wrong=None)

    @orders.post("/try")
    async def try_order(request: Request) -> Response:
        return show(request, "orders.html", may_act=True, values=request.state.form, wrong=None)

    @orders.form("orders.rename")
    async def again(request: Request, wrong: Wrong) -> Response:
        return show(request, "orders.html", may_act=True, values=wrong.given, wrong=wrong, status=wrong.status)

    @secrets.get("")
    async def all_secrets(request: Request) -> Response:
        return show(request, "secrets.html")

    app = Duly()
    app.include_console(
        Section("orders", "Orders", orders, templates=directory, roles=("QUALITY_MANAGER",), actions=(CLOSE, RENAME))
    )
    app.include_console(
        Section("secrets", "Secrets", secrets, roles=("QUALITY_ENGINEER",), is_closed=True, actions=(READ,))
    )
    return app


@pytest_asyncio.fixture
async def site(db: Database, tmp_path: Path) -> AsyncIterator[Site]:
    """A console with these sections."""
    async with serving(db, tmp_path, make_app(tmp_path)) as served:
        yield served


def audited(dsn: str) -> list[tuple[Any, ...]]:
    """What was done, but for signing in."""
    return rows(
        dsn,
        "SELECT action, actor, subject, reason, before, after FROM duly.audit WHERE subject <> 'console:session' "
        "ORDER BY id",
    )


def menu(page: str) -> list[str]:
    """What the navigation offers."""
    return re.findall(r'<li><a href="/console([^"]*)"', page)


async def test_who_has_only_a_sections_role_sees_only_that_section(site: Site, dsn: str) -> None:
    mona = await site.signed_in("mona")
    assert rows(dsn, "SELECT subject, roles FROM duly.console_sessions") == [("mona", ["QUALITY_MANAGER"])]
    begun = await mona.get("/console")
    assert (begun.status_code, begun.headers["location"]) == (303, "/console/orders")
    page = await mona.get("/console/orders")
    assert page.status_code == 200
    assert "may act" in page.text
    assert menu(page.text) == ["/orders"]
    assert 'role="search"' not in page.text
    for path in ("/jobs", "/audit", "/search?q=1", "/entity?id=a", "/live", "/secrets", "/nowhere", "/webhooks/new"):
        refused = await mona.get(f"/console{path}")
        assert refused.status_code == 403, path
        assert 'href="/console/orders">Back</a>' in refused.text
    assert (await post(mona, "schedules.trigger", name="duly.forget-audit")).status_code == 403
    assert (await mona.get("/console/actions/jobs.cancel?id=1")).status_code == 403
    assert (await post(mona, "none.such")).status_code == 403
    assert audited(dsn) == []


@pytest.mark.parametrize(("person", "seen"), [("ada", 200), ("otto", 200), ("eric", 403)])
async def test_who_lacks_the_role_may_at_most_look(site: Site, dsn: str, person: str, seen: int) -> None:
    browser = await site.signed_in(person)
    page = await browser.get("/console/orders")
    assert page.status_code == seen
    assert "/actions/orders.close" not in page.text
    assert (await browser.get("/console/orders/new")).status_code == 403
    for path in ("/orders/try", "/actions/orders.close"):
        answer = await browser.post(
            f"/console{path}", data={"csrf": await csrf_of(browser), "order": "9", "confirmed": "yes", "reason": "x"}
        )
        assert answer.status_code == 403, path
    assert (await browser.get("/console/actions/orders.close?order=9")).status_code == 403
    assert audited(dsn) == []


async def test_a_closed_section_is_not_even_in_the_menu_of_administrators(site: Site, dsn: str) -> None:
    for person in ("ada", "otto", "mona"):
        browser = await site.signed_in(person)
        assert "/secrets" not in menu((await browser.get("/console/orders")).text)
        assert (await browser.get("/console/secrets")).status_code == 403
        assert (await post(browser, "secrets.read", order="9")).status_code == 403
    eric = await site.signed_in("eric")
    assert menu((await eric.get("/console/secrets")).text) == ["/secrets"]
    assert (await post(eric, "secrets.read", order="9")).status_code == 303
    assert [(action, actor) for action, actor, *_ in audited(dsn)] == [("secret.read", "eric")]


async def test_an_action_is_asked_about_needs_a_reason_and_is_audited_by_subject(site: Site, dsn: str) -> None:
    mona = await site.signed_in("mona")
    asked = await mona.get("/console/actions/orders.close?order=9")
    assert "Close an order." in asked.text
    assert "required" in asked.text.split('name="reason"')[1].split(">")[0]
    fields = {"csrf": await csrf_of(mona), "order": "9"}
    unconfirmed = await mona.post("/console/actions/orders.close", data=fields)
    assert 'name="confirmed" value="yes"' in unconfirmed.text
    for reason in ("", "   "):
        unsaid = await mona.post("/console/actions/orders.close", data={**fields, "confirmed": "yes", "reason": reason})
        assert unsaid.status_code == 422
        assert 'aria-invalid="true" aria-describedby="wrong-reason"' in unsaid.text
        assert 'id="wrong-reason"' in unsaid.text
        assert 'name="order" value="9"' in unsaid.text
    assert audited(dsn) == []
    done = await post(mona, "orders.close", order="9", reason="no stock", return_to="/console/orders")
    assert (done.status_code, done.headers["location"]) == (303, "/console/orders/closed")
    assert audited(dsn) == [("order.closed", "mona", "order:9", "no stock", {"open": True}, {"open": False})]
    assert "Closed order 9." in (await mona.get("/console/orders")).text


async def test_two_clicks_do_it_once_and_both_lead_to_the_same_page(site: Site, dsn: str) -> None:
    mona = await site.signed_in("mona")
    page = await mona.get("/console/actions/orders.close?order=9")
    fields = dict(re.findall(r'<input type="hidden" name="([^"]+)" value="([^"]*)">', page.text.split("<main")[1]))
    answers = await asyncio.gather(
        *(mona.post("/console/actions/orders.close", data={**fields, "reason": "once"}) for _ in range(5))
    )
    assert {(one.status_code, one.headers["location"]) for one in answers} == {(303, "/console/orders/closed")}
    assert len(audited(dsn)) == 1


@pytest.mark.parametrize("path", ["/actions/orders.close", "/orders/try"])
async def test_without_the_token_or_from_elsewhere_nothing_is_done(site: Site, dsn: str, path: str) -> None:
    mona, stranger = await site.signed_in("mona"), await site.browser()
    fields = {"order": "9", "confirmed": "yes", "reason": "x"}
    assert (await mona.post(f"/console{path}", data=fields)).status_code == 403
    evil = {"Origin": "https://evil.example"}
    right = {**fields, "csrf": await csrf_of(mona)}
    assert (await mona.post(f"/console{path}", data=right, headers=evil)).status_code == 403
    assert (await stranger.post(f"/console{path}", data=right)).status_code == 401
    assert audited(dsn) == []


@pytest.mark.parametrize(
    ("given", "status", "at_field", "above"),
    [("x" * 11, 422, "String should have at most 10 characters", MARKED),
     ("deep", 422, "$.name.all[0].givenOp: write another", MARKED), ("taken", 409, None, "This name is taken"),
     ("mine", 403, None, "It is your own")],
)  # fmt: skip
async def test_what_is_refused_is_said_at_the_field_with_what_was_typed(
    site: Site, dsn: str, given: str, status: int, at_field: str | None, above: str
) -> None:
    mona = await site.signed_in("mona")
    page = await post(mona, "orders.rename", name=given, return_to="/console/orders")
    assert page.status_code == status
    assert "<h1>Orders</h1>" in page.text
    assert f'name="name" value="{given}"' in page.text
    assert above in page.text.split('role="alert">')[1].split("</p>")[0]
    assert ('aria-describedby="wrong-name"' in page.text) == (at_field is not None)
    if at_field is not None:
        assert at_field in page.text.split('id="wrong-name">')[1].split("</label>")[0]
    assert audited(dsn) == []
    words = re.findall(r'name="once" value="([^"]+)"', page.text)
    assert len(set(words)) == len(words) > 0  # the form that is shown again is a form of its own
    assert (await post(mona, "orders.rename", name="fine")).status_code == 303
    assert [action for action, *_ in audited(dsn)] == ["order.renamed"]


async def test_what_was_typed_is_shown_and_never_runs(site: Site) -> None:
    mona = await site.signed_in("mona")
    page = await post(mona, "orders.rename", name='"><script>alert(1)</script>')
    assert page.status_code == 422
    assert "<script>alert" not in page.text
    assert "&lt;script&gt;alert(1)" in page.text


async def test_a_sections_action_has_a_form_and_no_route_of_the_consoles_api(site: Site) -> None:
    client = await site.browser()
    answer = await client.post(
        "/v1/console/actions/orders.close", json={"order": "9"}, headers=site.headers("ADMINISTRATOR")
    )
    assert answer.status_code == 404


async def test_a_section_says_what_it_is_for(db: Database, tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="closed to everybody"):
        Section("orders", "Orders", Pages(), is_closed=True)
    for name in ("jobs", "actions", "sign-in"):
        app = Duly()
        app.include_console(Section(name, "Not the engine's", Pages()))
        with pytest.raises(Invalid, match="page of the engine"):
            async with serving(db, tmp_path, app):
                pass
    taken = Action("jobs.cancel", "Not the engine's.", OfOrder, close)
    for actions in ((taken,), (CLOSE, CLOSE)):
        app = Duly()
        app.include_console(Section("orders", "Orders", Pages(), actions=actions))
        with pytest.raises(Invalid, match="registered already"):
            async with serving(db, tmp_path, app):
                pass


async def test_the_record_of_a_section_is_whole_for_who_acts_there_and_veiled_for_who_looks(
    site: Site, dsn: str
) -> None:
    await post(await site.signed_in("mona"), "orders.close", order="9", reason="no stock")
    otto = (await (await site.signed_in("otto")).get("/console/audit?subject=order:9")).text
    assert "hidden" in otto
    assert "no stock" in otto


async def test_roles_that_no_section_asks_for_are_not_kept(
    site: Site, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from duly.console.sign_in import Attempt
    from tests.console.conftest import sign_in

    async def redeem(_code: str, attempt: Attempt, _redirect_uri: str) -> dict[str, str]:
        roles = ["QUALITY_MANAGER", "OPERATOR", "PAYROLL"]
        return {
            "access_token": site.issuer.sign("zoe", scopes=["console"], roles=roles),
            "id_token": site.issuer.sign_identity("zoe", name="Zoe", client_id="duly-console", nonce=attempt.nonce),
        }

    monkeypatch.setattr(site.console.sign_in, "_redeem", redeem)
    browser = await site.browser()
    assert (await sign_in(browser, "ada")).status_code == 303
    assert value(dsn, "SELECT roles FROM duly.console_sessions") == ["OPERATOR", "QUALITY_MANAGER"]
    page = await browser.get("/console/orders")
    assert "/jobs" in menu(page.text)
    assert "may act" in page.text


def test_a_fault_is_shown_at_the_first_field_on_its_way() -> None:
    error = Invalid("several")
    error.faults = (
        Fault("body", "$.action.decision", "one"), Fault("body", "$.acknowledgeWarnings", "two"),
        Fault("body", "$.conditions.all[1]", "three"), Fault("body", "$.conditions", "four"),
    )  # fmt: skip
    wrong = read_wrong(error, {"a": "b"}, {"decision", "conditions", "acknowledge_warnings"})
    assert wrong.at == {
        "decision": ("one",), "acknowledge_warnings": ("two",),
        "conditions": ("$.conditions.all[1]: three", "four"),
    }  # fmt: skip
    assert (wrong.sentence, wrong.status, wrong.given) == (MARKED, 422, {"a": "b"})
    error.faults += (Fault("body", "$.elsewhere", "five"),)
    assert read_wrong(error, {}, {"decision"}).sentence == "Several"


async def test_the_engines_addresses_are_all_known_to_be_taken(site: Site) -> None:
    """A new page of the engine must be added to the names that no section may have."""
    from duly.console.pages import create_pages
    from duly.console.rights import TAKEN

    console = site.console
    paths = {route.path for route in create_pages(console).routes if hasattr(route, "path")}  # ours, not the sections'
    first = {path.removeprefix("/console").lstrip("/").partition("/")[0] for path in paths}
    assert {name for name in first if name and "{" not in name} - {"orders", "secrets"} <= TAKEN
