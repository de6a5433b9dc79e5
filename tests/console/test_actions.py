"""E7.1: every action of an operator, once, with three faces: API, command line, form."""

from __future__ import annotations

import asyncio
import re
from html import unescape
from pathlib import Path
from typing import Any

import httpx2
import pytest
from typer.main import get_command

from duly.cli.main import app as commands
from duly.console.sessions import create_session
from duly.db import Database, Tx
from duly.errors import Invalid, NotFound
from duly.operate.actions import ACTIONS, Action, Arguments, Result, perform, register
from tests.console.conftest import Site, csrf_of, post, serving
from tests.console.world import DELIVERY, DISABLED, EVENT, PAGES, SUBSCRIPTION, fill
from tests.support import rows, value

SECRET = "a-secret-of-sixteen"
# What each action is given, the command that does the same, and what the audit then says.
CASES: dict[str, tuple[dict[str, Any], str, str]] = {
    "jobs.cancel": ({"id": "1"}, "jobs cancel", "job.cancelled"),
    "jobs.run-now": ({"id": "1"}, "jobs run-now", "job.run_now"),
    "dead.retry": ({"id": "7"}, "dead retry", "dead_letter.retried"),
    "dead.discard": ({"id": "7"}, "dead discard", "dead_letter.discarded"),
    "dead.retry-all": ({"name": "shop.charge", "error_kind": "BankAway"}, "dead retry", "dead_letter.retried"),
    "dead.discard-all": ({"name": "shop.charge"}, "dead discard", "dead_letter.discarded"),
    "events.requeue": ({"id": EVENT}, "events requeue", "event.requeued"),
    "events.discard": ({"id": EVENT}, "events discard", "event.discarded"),
    "events.requeue-all": ({}, "events requeue", "event.requeued"),
    "events.discard-all": ({"topic": "orders"}, "events discard", "event.discarded"),
    "consumers.via": ({"name": "audience", "via": "kafka"}, "consumers via", "consumer.moved"),
    "alerts.resolve": ({"id": "1"}, "alerts resolve", "alert.resolved"),
    "schedules.add": ({"name": "new.one", "cron": "0 9 * * *"}, "schedules add", "schedule.added"),
    "schedules.edit": ({"name": "duly.forget-audit", "cron": "1 1 * * *"}, "schedules edit", "schedule.edited"),
    "schedules.enable": ({"name": "off.one"}, "schedules enable", "schedule.enabled"),
    "schedules.disable": ({"name": "duly.forget-audit"}, "schedules disable", "schedule.disabled"),
    "schedules.trigger": ({"name": "duly.forget-audit"}, "schedules trigger", "schedule.triggered"),
    "schedules.remove": ({"name": "duly.forget-audit"}, "schedules remove", "schedule.removed"),
    "webhooks.add": (
        {"url": "http://127.0.0.1:8009/", "events": "order.* parcel.*", "secret": SECRET},
        "webhooks add", "webhook_subscription.created",
    ),
    "webhooks.edit": (
        {"id": SUBSCRIPTION, "events": "parcel.*", "max_in_flight": "3", "expected_version": "1"},
        "webhooks edit", "webhook_subscription.edited",
    ),
    "webhooks.rotate": (
        {"id": SUBSCRIPTION, "secret": SECRET, "overlap_hours": "1.5"},
        "webhooks rotate", "webhook_subscription.secret_rotated",
    ),
    "webhooks.provider-secret": (
        {"provider": "bank", "secret": SECRET, "overlap_hours": "1.5"},
        "webhooks provider-secret", "webhook_provider.secret_added",
    ),
    "webhooks.pause": ({"id": SUBSCRIPTION}, "webhooks pause", "webhook_subscription.paused"),
    "webhooks.resume": ({"id": DISABLED}, "webhooks resume", "webhook_subscription.resumed"),
    "webhooks.disable": ({"id": SUBSCRIPTION}, "webhooks disable", "webhook_subscription.disabled"),
    "webhooks.delete": ({"id": SUBSCRIPTION}, "webhooks delete", "webhook_subscription.deleted"),
    "webhooks.redeliver": ({"id": DELIVERY}, "webhooks redeliver", "webhook_delivery.redelivered"),
    "webhooks.redeliver-range": (
        {"id": SUBSCRIPTION, "since": "2020-01-01T00:00", "until": "2100-01-01T00:00+01:00"},
        "webhooks redeliver", "webhook_subscription.redelivered",
    ),
    "webhooks.test": ({"id": SUBSCRIPTION}, "webhooks test", "webhook_subscription.tested"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def world(dsn: str) -> None:
    """Something for each action to act on."""
    fill(dsn)
    rows(dsn, "INSERT INTO duly.schedules (name, cron, enabled) VALUES ('off.one', '0 9 * * *', false)")


def audited(dsn: str) -> list[tuple[Any, ...]]:
    """What the audit says beyond what was there."""
    known = "action <> 'order:1' AND subject <> 'console:session'"
    return rows(dsn, f"SELECT action, actor, reason FROM duly.audit WHERE {known} ORDER BY id")


def test_every_action_is_tried_here() -> None:
    assert set(CASES) == set(ACTIONS)


@pytest.mark.parametrize("name", CASES)
def test_every_action_has_a_command(name: str) -> None:
    family, verb = CASES[name][1].split()
    command: Any = get_command(commands)
    group = command.commands[family]
    assert verb in group.commands
    file = {"schedules": "schedules.py", "webhooks": "webhooks.py", "consumers": "brokers.py"}.get(family, "operate.py")
    source = (Path(__file__).parents[2] / "src/duly/cli" / file).read_text()
    assert f'"{name}"' in source, "the command must run the action"


@pytest.mark.parametrize("name", CASES)
async def test_every_action_is_a_documented_route_for_administrators(site: Site, dsn: str, name: str) -> None:
    given, _, audit = CASES[name]
    path = f"/v1/console/actions/{name}"
    client = await site.browser()
    document = (await client.get("/openapi.json")).json()
    assert document["paths"][path]["post"]["summary"] == ACTIONS[name].about
    body = {**given, "reason": "because"}
    for headers, status in (
        ({}, 401),
        (site.headers("OPERATOR"), 403),
        (site.headers("ADMINISTRATOR", scope="x"), 403),
    ):
        assert (await client.post(path, json=body, headers=headers)).status_code == status
    assert audited(dsn) == []
    key = {**site.headers("ADMINISTRATOR"), "Idempotency-Key": "k1"}
    done = await client.post(path, json=body, headers=key)
    assert done.status_code == 200, done.text
    assert done.json()["action"] == name
    assert audited(dsn) == [(audit, "tess", "because")]
    again = await client.post(path, json=body, headers=key)
    assert (again.text, again.headers["idempotent-replayed"]) == (done.text, "true")
    assert len(audited(dsn)) == 1


@pytest.mark.parametrize("name", CASES)
async def test_every_action_is_a_form_that_is_audited_in_the_same_commit(
    ada: httpx2.AsyncClient, dsn: str, name: str
) -> None:
    given, _, audit = CASES[name]
    answer = await post(ada, name, **given, reason="because", return_to="/console/alerts")
    assert answer.status_code == 303, answer.text
    assert answer.headers["location"] == "/console/alerts"
    assert audited(dsn) == [(audit, "Ada Kowalska (ada)", "because")]
    said = await ada.get("/console/alerts")
    assert 'role="status"' in said.text
    assert 'role="status"' not in (await ada.get("/console/alerts")).text  # once


@pytest.mark.parametrize("name", [name for name, action in ACTIONS.items() if action.is_destructive])
async def test_what_cannot_be_undone_is_asked_about_first(ada: httpx2.AsyncClient, dsn: str, name: str) -> None:
    given, _, _ = CASES[name]
    page = await ada.get(f"/console/actions/{name}", params=given)
    assert page.status_code == 200, page.text
    assert ACTIONS[name].about.split(";")[0] in page.text
    unconfirmed = await ada.post(f"/console/actions/{name}", data={**given, "csrf": await csrf_of(ada)})
    assert unconfirmed.status_code == 200
    assert 'name="confirmed" value="yes"' in unconfirmed.text
    assert audited(dsn) == []


@pytest.mark.parametrize("name", CASES)
async def test_an_operator_is_refused_by_every_form_and_by_the_page_before_it(
    otto: httpx2.AsyncClient, dsn: str, name: str
) -> None:
    """FAULTS: authorise the handler, not the button; a name that is none is refused, too."""
    given, _, _ = CASES[name]
    for action in (name, "none.such"):
        assert (await post(otto, action, **given, reason="because")).status_code == 403
        assert (await otto.get(f"/console/actions/{action}", params=given)).status_code == 403
    assert audited(dsn) == []


async def test_every_button_of_the_engine_leads_to_a_page_that_asks_why(ada: httpx2.AsyncClient, dsn: str) -> None:
    seen: set[str] = set()
    for path in PAGES:
        page = (await ada.get(path)).text
        for form in page.split('<form class="act"')[1:]:
            opening = form.partition(">")[0]
            assert "method" not in opening, path
            seen |= set(re.findall(r"/console/actions/([a-z.-]+)", opening))
    assert {"dead.retry", "jobs.run-now", "schedules.trigger", "webhooks.resume", "alerts.resolve"} <= seen
    for name in seen:
        asked = await ada.get(f"/console/actions/{name}", params=CASES[name][0])
        assert 'name="reason"' in asked.text, name
        assert ('class="danger solid"' in asked.text) == ACTIONS[name].is_destructive, name
    assert audited(dsn) == []


async def test_after_an_action_the_list_is_as_it_was(ada: httpx2.AsyncClient) -> None:
    """Filters, and the page of the list."""
    address = "/console/dead-letters?name=shop.charge&kind=BankAway&after=2100-01-01T00:00:00%2B00:00_9"
    page = await ada.get(address)
    form = next(text for text in page.text.split("<form")[1:] if '/actions/dead.retry"' in text)
    fields = {name: unescape(text) for name, text in
              re.findall(r'<input type="hidden" name="([^"]+)" value="([^"]*)">', form)}  # fmt: skip
    assert fields == {"id": "7", "return_to": address}
    answer = await post(ada, "dead.retry", **fields)
    assert (answer.status_code, answer.headers["location"]) == (303, address)


async def test_what_is_refused_leads_back(ada: httpx2.AsyncClient) -> None:
    page = await post(ada, "jobs.run-now", id="2", return_to="/console/jobs/2")
    assert page.status_code == 409
    assert '<a class="button primary" href="/console/jobs/2">Back</a>' in page.text
    assert ">Back</a>" not in (await post(ada, "jobs.run-now", id="2")).text


@pytest.mark.parametrize(
    ("name", "given", "kept", "said"),
    [
        ("schedules.add", {"name": "a.b", "cron": "0 9 * * *", "payload": "[1]"}, 'value="a.b"', "wrong-payload"),
        ("schedules.add", {"name": "a.b", "cron": "0 9 * * *", "max_retries": "x"}, 'value="a.b"', "wrong-max_retries"),
        ("schedules.add", {"name": "duly.forget-audit", "cron": "7 9 * * *"}, 'value="7 9 * * *"', "exists already"),
        ("schedules.edit", {"name": "duly.forget-audit", "cron": "7 9 * * *", "expected_version": "77"},
         'name="expected_version" value="77"', "was changed meanwhile"),
        ("webhooks.add", {"url": "ftp://example.com/", "events": "order.*\nparcel.*", "secret": "canary-of-sixteen"},
         ">order.*\nparcel.*</textarea>", "The URL starts with https://"),
        ("webhooks.add", {"url": "https://example.com/", "events": "a", "max_in_flight": "900"},
         'value="https://example.com/"', "wrong-max_in_flight"),
        ("webhooks.edit", {"id": SUBSCRIPTION, "url": "https://example.com/", "expected_version": "77"},
         'name="expected_version" value="77"', "was changed meanwhile"),
    ],
)  # fmt: skip
async def test_a_form_that_is_refused_is_shown_again_with_what_was_typed(
    ada: httpx2.AsyncClient, dsn: str, name: str, given: dict[str, str], kept: str, said: str
) -> None:
    page = await post(ada, name, **given, reason="a <reason>")
    assert page.status_code in (409, 422), page.text[-300:]
    assert f'action="/console/actions/{name}"' in page.text
    assert kept in page.text
    assert 'role="alert"' in page.text
    assert said in page.text
    assert 'value="a &lt;reason&gt;"' in page.text
    assert "canary" not in page.text  # a secret is typed anew
    assert audited(dsn) == []


async def test_a_bulk_action_says_how_many_and_touches_no_more(ada: httpx2.AsyncClient, dsn: str) -> None:
    rows(dsn, "INSERT INTO duly.dead_letters SELECT (jsonb_populate_record(d, jsonb_build_object('id', 100 + n))).* "
              "FROM duly.dead_letters d, generate_series(1, 41) AS n WHERE d.id = 7")  # fmt: skip
    page = await ada.get("/console/actions/dead.retry-all?name=shop.charge&error_kind=BankAway")
    assert "This touches <strong>42</strong>" in page.text
    fields = dict(re.findall(r'<input type="hidden" name="([^"]+)" value="([^"]*)">', page.text))
    assert fields["limit"] == "42"
    rows(dsn, "INSERT INTO duly.dead_letters SELECT (jsonb_populate_record(d, jsonb_build_object('id', 900, "
              "'buried_at', duly.now() + interval '1 s'))).* FROM duly.dead_letters d WHERE d.id = 7")  # fmt: skip
    answer = await ada.post("/console/actions/dead.retry-all", data=fields)
    assert answer.status_code == 303
    assert rows(dsn, "SELECT id FROM duly.dead_letters") == [(900,)]
    assert "Retried 42 dead letters." in (await ada.get("/console/dead-letters")).text


@pytest.mark.parametrize(
    ("name", "given", "status"),
    [
        ("jobs.cancel", {"id": "0"}, 422), ("jobs.cancel", {"id": "x"}, 422), ("jobs.cancel", {}, 422),
        ("jobs.cancel", {"id": "1", "more": "x"}, 422), ("jobs.cancel", {"id": "99999999999999999999"}, 422),
        ("jobs.cancel", {"id": "12345"}, 404), ("jobs.run-now", {"id": "2"}, 409),
        ("events.requeue", {"id": "x"}, 422), ("schedules.add", {"name": "a b", "cron": "0 9 * * *"}, 422),
        ("schedules.add", {"name": "a.b", "cron": "nonsense"}, 422),
        ("schedules.add", {"name": "a.b", "cron": "0 9 * * *", "payload": "[1]"}, 422),
        ("schedules.add", {"name": "a.b", "cron": "0 9 * * *", "payload": "{"}, 422),
        ("schedules.add", {"name": "duly.forget-audit", "cron": "0 9 * * *"}, 409),
        ("schedules.edit", {"name": "duly.forget-audit", "cron": "0 9 * * *", "expected_version": "77"}, 409),
        ("schedules.edit", {"name": "duly.forget-audit"}, 422), ("dead.retry-all", {"limit": "0"}, 422),
        ("none.such", {}, 404),
    ],
)  # fmt: skip
async def test_what_cannot_be_done_is_a_page_or_a_problem_and_nothing_is_written(
    site: Site, ada: httpx2.AsyncClient, dsn: str, name: str, given: dict[str, str], status: int
) -> None:
    page = await post(ada, name, **given)
    assert page.status_code == status, page.text
    assert "<h1>" in page.text
    if name in ACTIONS:
        body = {field: value_ for field, value_ in given.items() if field != "payload"} | (
            {"payload": [1]} if "payload" in given else {}
        )
        problem = await ada.post(f"/v1/console/actions/{name}", json=body, headers=site.headers("ADMINISTRATOR"))
        assert problem.status_code == status, problem.text
        assert problem.headers["content-type"].startswith("application/problem+json")
    assert audited(dsn) == []


async def test_two_operators_at_once_do_it_once(site: Site, ada: httpx2.AsyncClient, dsn: str) -> None:
    other = await site.signed_in("ada")
    token, other_token = await csrf_of(ada), await csrf_of(other)
    answers = await asyncio.gather(
        *(browser.post("/console/actions/dead.discard", data={"id": "7", "csrf": csrf, "confirmed": "yes"})
          for browser, csrf in ((ada, token), (other, other_token)) for _ in range(4))
    )  # fmt: skip
    assert sorted(answer.status_code for answer in answers) == [303, 404, 404, 404, 404, 404, 404, 404]
    assert len(audited(dsn)) == 1


async def test_lists_are_for_both_roles_and_ids_are_text(site: Site, dsn: str) -> None:
    client = await site.browser()
    for path in ("status", "jobs", "jobs/1", "jobs/7", "executions", "dead-letters", "dead-letters/groups", "events",
                 "schedules", "schedules/duly.forget-audit", "schedules/preview?cron=0+9+*+*+*", "alerts", "audit",
                 "why?id=1", "entity?id=order:1", "webhooks", f"webhooks/{SUBSCRIPTION}",
                 f"webhooks/{SUBSCRIPTION}/deliveries", f"webhooks/deliveries/{DELIVERY}"):  # fmt: skip
        assert (await client.get(f"/v1/console/{path}")).status_code == 401
        assert (await client.get(f"/v1/console/{path}", headers=site.headers("NOBODY"))).status_code == 403
        for role in ("OPERATOR", "ADMINISTRATOR"):
            answer = await client.get(f"/v1/console/{path}", headers=site.headers(role))
            assert answer.status_code == 200, (path, answer.text)
            assert not re.search(r'"(id|job_id|seq|number)":\s*\d', answer.text), path
    missing = await client.get("/v1/console/jobs/12345", headers=site.headers("OPERATOR"))
    assert missing.status_code == 404


async def test_an_application_registers_an_action_of_its_own(db: Database, dsn: str, tmp_path: Path) -> None:
    class OfOrder(Arguments):
        """An order."""

        order: str

    async def close(tx: Tx, given: OfOrder, actor: str, reason: str | None) -> Result:
        return Result(f"closed {given.order} for {actor}")

    action = Action("orders.close", "Close an order.", OfOrder, close, True, verb="Close")
    register(action)
    try:
        with pytest.raises(Invalid):
            register(action)
        with pytest.raises(Invalid):
            Action("not a name", "x", OfOrder, close)
        async with serving(db, tmp_path) as site:
            ada = await site.signed_in("ada")
            assert "Close an order." in (await ada.get("/console/actions/orders.close?order=9")).text
            assert (await post(ada, "orders.close", order="9")).status_code == 303
            done = await ada.post(
                "/v1/console/actions/orders.close", json={"order": "9"}, headers=site.headers("ADMINISTRATOR")
            )
            assert done.json()["message"] == "closed 9 for tess"
    finally:
        del ACTIONS["orders.close"]
    async with db.transaction() as tx:
        with pytest.raises(NotFound):
            await perform(tx, "orders.close", {}, actor="x")


async def test_many_failed_events_are_given_up_and_what_waited_goes_on(db: Database, dsn: str) -> None:
    rows(dsn, "INSERT INTO duly.outbox (id, type, topic, aggregate_id, payload, created_at, parked) "
              "VALUES (duly.uuid7(), 'order.sent', 'orders', 'order:1', '{}', duly.now(), true)")  # fmt: skip
    async with db.transaction() as tx:
        done = await perform(tx, "events.discard-all", {}, actor="alice")
    assert done.number == 1
    assert rows(dsn, "SELECT type, parked FROM duly.outbox") == [("order.sent", False)]
    assert value(dsn, "SELECT count(*) FROM duly.audit WHERE action = 'event.discarded'") == 1


async def test_two_clicks_on_one_form_do_it_once(ada: httpx2.AsyncClient, dsn: str) -> None:
    page = await ada.get("/console/actions/schedules.trigger?name=duly.forget-audit&return_to=/console/schedules")
    fields = dict(re.findall(r'<input type="hidden" name="([^"]+)" value="([^"]*)">', page.text.split("<main")[1]))
    assert fields["once"] != ""
    answers = await asyncio.gather(*(ada.post("/console/actions/schedules.trigger", data=fields) for _ in range(5)))
    assert {(answer.status_code, answer.headers["location"]) for answer in answers} == {(303, fields["return_to"])}
    assert len(audited(dsn)) == 1
    assert value(dsn, "SELECT count(*) FROM duly.jobs WHERE name = 'duly.forget-audit'") == 1
    await ada.post("/console/actions/schedules.trigger", data=fields)
    assert "it was done by your first click, and not again" in (await ada.get("/console/schedules")).text


async def test_a_form_of_a_new_page_or_filled_in_anew_is_another_request(ada: httpx2.AsyncClient, dsn: str) -> None:
    for word, reason in (("w1", "a"), ("w1", "b"), ("w2", "b")):
        await post(ada, "schedules.trigger", name="duly.forget-audit", once=word, reason=reason)
    assert [reason for _, _, reason in audited(dsn)] == ["a", "b", "b"]


async def test_a_word_that_no_key_can_hold_is_refused(ada: httpx2.AsyncClient, dsn: str) -> None:
    refused = await post(ada, "schedules.trigger", name="duly.forget-audit", once="ä ö")
    assert refused.status_code == 400
    assert audited(dsn) == []


async def test_a_secret_is_made_once_and_shown_once(ada: httpx2.AsyncClient, dsn: str) -> None:
    given = {"url": "http://127.0.0.1:8009/", "events": "order.*", "once": "w1", "return_to": "/console/webhooks"}
    first = await post(ada, "webhooks.add", **given)
    assert "whsec_" in first.text
    again = await post(ada, "webhooks.add", **given)
    assert (again.status_code, again.headers["location"]) == (303, "/console/webhooks")
    assert [action for action, _, _ in audited(dsn)] == ["webhook_subscription.created"]
    secret = re.search(r"whsec_[\w+/=-]+", first.text)
    assert secret is not None
    assert secret[0] not in str(rows(dsn, "SELECT convert_from(body, 'UTF8') FROM duly.idempotency_keys"))


async def test_the_same_word_of_two_people_is_two_requests(
    site: Site, ada: httpx2.AsyncClient, db: Database, dsn: str
) -> None:
    eve = await site.browser()
    eve.cookies.set(
        "duly", await create_session(db, subject="eve", name="Eve", roles=["ADMINISTRATOR"]), domain="127.0.0.1"
    )
    for browser in (ada, eve, eve):
        answer = await post(browser, "schedules.trigger", name="duly.forget-audit", once="w1")
        assert answer.status_code == 303
    assert [actor for _, actor, _ in audited(dsn)] == ["Ada Kowalska (ada)", "Eve (eve)"]


@pytest.mark.parametrize("given", ["https://evil.example", "//evil.example", "/\\evil.example", "javascript:alert(1)"])
async def test_after_an_action_only_pages_of_the_console_are_gone_to(ada: httpx2.AsyncClient, given: str) -> None:
    """Open redirect, by the form, by the page before it and by the link on that."""
    answer = await post(ada, "jobs.run-now", id="1", return_to=given)
    assert (answer.status_code, answer.headers["location"]) == (303, "/console")
    page = await ada.get("/console/actions/jobs.cancel", params={"id": "1", "return_to": given})
    assert page.status_code == 200
    assert "evil.example" not in page.text.split("<main")[1]
    assert "javascript:" not in page.text.split("<main")[1]
    unconfirmed = await ada.post(
        "/console/actions/jobs.cancel", data={"csrf": await csrf_of(ada), "id": "1", "return_to": given}
    )  # fmt: skip
    assert "evil.example" not in unconfirmed.text
    coloured = await ada.post("/console/theme", data={"csrf": await csrf_of(ada), "theme": "dark", "return_to": given})
    assert (coloured.status_code, coloured.headers["location"]) == (303, "/console")


async def test_what_is_done_and_its_record_are_one_commit(ada: httpx2.AsyncClient, dsn: str) -> None:
    """When the record cannot be written, nothing was done."""
    rows(dsn, "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS "
              "$$ BEGIN RAISE EXCEPTION 'no' USING ERRCODE = '23514'; END $$")  # fmt: skip
    rows(dsn, "CREATE TRIGGER refuse BEFORE INSERT ON duly.audit FOR EACH ROW EXECUTE FUNCTION refuse()")
    tables = ("jobs", "dead_letters", "outbox", "alerts", "schedules", "webhook_subscriptions", "webhook_deliveries",
              "webhook_secrets", "idempotency_keys")  # fmt: skip

    def world() -> list[Any]:
        return [
            value(dsn, f"SELECT md5(string_agg(t::text, ' ' ORDER BY t::text)) FROM duly.{one} t") for one in tables
        ]

    before = world()
    token = await csrf_of(ada)
    for name, (given, _, _) in CASES.items():
        fields = {**given, "csrf": token, "confirmed": "yes", "once": name}
        page = await ada.post(f"/console/actions/{name}", data=fields)
        assert page.status_code == 422, (name, page.text[-300:])
        assert world() == before, name
