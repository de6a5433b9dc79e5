"""Closed events: whoever runs the engine sees where they stand, and not what they are, or of whom."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from uuid import UUID

import httpx2
import pytest
import pytest_asyncio
from fastapi import Request
from fastapi.responses import Response

from duly import EventBody, emit
from duly.app import Duly
from duly.auth.issuer_codes import PEOPLE, Person
from duly.console import Pages, Section, show
from duly.db import Database
from duly.messages import is_internal, may_read
from duly.outbox.relay import Relay
from tests.console.conftest import Site, post, serving
from tests.support import rows, value

AUDITOR = "QUALITY_ENGINEER"
ORDER = "order-4711"
SECRET = "canary of the payload"
ERROR = "canary of the error"
FAIL = """
UPDATE duly.outbox SET failed_at = duly.now(), attempts = 5, last_error = 'canary of the error'
WHERE type = 'order.watched'
"""


class Suspected(EventBody, type="order.watched", topic="shop.suspicions", aggregate="order_id", readers=(AUDITOR,)):
    """Nobody is to know."""

    order_id: str
    why: str


class Placed(EventBody, type="order.booked", topic="shop.orders", aggregate="order_id"):
    """Everybody may know."""

    order_id: str


@pytest_asyncio.fixture
async def site(db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    """A console with a closed section; Bea runs the engine, and is of those, too."""
    pages = Pages()

    @pages.get("")
    async def begin(request: Request) -> Response:
        return show(request, "message.html", title="x", sentence="x")

    app = Duly()
    app.include_console(Section("suspicions", "Suspicions", pages, roles=(AUDITOR,), is_closed=True))
    monkeypatch.setitem(PEOPLE, "bea", Person("Bea", ("ADMINISTRATOR", AUDITOR), "runs and audits"))
    async with serving(db, tmp_path, app) as served:
        yield served


async def emit_both(db: Database) -> UUID:
    """One of each about the same order; the id of the closed one."""
    async with db.transaction() as tx:
        await emit(tx, Placed(order_id=ORDER), Suspected(order_id=ORDER, why=SECRET))
    found: UUID = value(db.dsn, "SELECT id FROM duly.event_log WHERE type = 'order.watched'")
    return found


async def read_all(browser: httpx2.AsyncClient, id: UUID, *more: str) -> str:
    """Every page that could tell."""
    paths = [f"/outbox?status={status}" for status in ("PENDING", "PUBLISHED", "FAILED")]
    paths += [f"/outbox?aggregate={ORDER}", f"/events/{id}", f"/entity?id={ORDER}", "/audit", *more]
    return "".join([(await browser.get(f"/console{path}")).text for path in paths])


def test_what_is_closed_is_internal_and_who_may_read_it_is_declared() -> None:
    assert is_internal("order.watched")
    assert may_read("order.watched", None), "who has the database has it all"
    assert [may_read("order.watched", roles) for roles in (set(), {"ADMINISTRATOR"}, {"X", AUDITOR})] == [
        False, False, True,
    ]  # fmt: skip
    assert may_read("order.booked", set())
    assert may_read("never.declared", set())


@pytest.mark.parametrize("person", ["otto", "ada"])
@pytest.mark.parametrize("state", ["PENDING", "FAILED", "PUBLISHED"])
async def test_nobody_else_learns_that_there_is_one(
    site: Site, db: Database, dsn: str, person: str, state: str
) -> None:
    id = await emit_both(db)
    if state == "FAILED":
        rows(dsn, FAIL)
    elif state == "PUBLISHED":
        await Relay(db).run_once()
    told = await read_all(await site.signed_in(person), id)
    for secret in ("order.watched", "shop.suspicions", SECRET, ERROR):
        assert secret not in told, secret
    assert "order.booked" in told, "what is open is shown as before"
    assert "A closed event" in told
    assert state in (await (await site.signed_in(person)).get(f"/console/events/{id}")).text


async def test_who_has_the_role_sees_all_of_it(site: Site, db: Database) -> None:
    id = await emit_both(db)
    bea = await site.signed_in("bea")
    for path in ("/outbox?status=PENDING", f"/outbox?aggregate={ORDER}", f"/events/{id}", f"/entity?id={ORDER}"):
        assert "order.watched" in (await bea.get(f"/console{path}")).text, path
    assert SECRET in (await bea.get(f"/console/events/{id}")).text


async def test_an_order_of_which_nothing_else_is_known_has_no_timeline(site: Site, db: Database) -> None:
    """That there is one would say enough."""
    async with db.transaction() as tx:
        await emit(tx, Suspected(order_id="quiet", why=SECRET))
    ada, bea = await site.signed_in("ada"), await site.signed_in("bea")
    assert [(await one.get("/console/entity?id=quiet")).status_code for one in (ada, bea)] == [404, 200]
    assert [(await one.get("/console/search?q=quiet")).status_code for one in (ada, bea)] == [404, 303]


async def test_it_can_be_requeued_and_given_up_blindly(site: Site, db: Database, dsn: str) -> None:
    """Somebody must run the engine; what was done is in the record, and what it was done to is closed there, too."""
    id = await emit_both(db)
    rows(dsn, FAIL)
    ada, bea = await site.signed_in("ada"), await site.signed_in("bea")
    assert (await post(ada, "events.requeue", id=str(id))).status_code == 303
    rows(dsn, FAIL)
    assert (await post(ada, "events.discard", id=str(id))).status_code == 303
    told = await read_all(ada, id, f"/audit?subject=event:{id}")
    assert "event.discarded" in told
    for secret in ("order.watched", "shop.suspicions", SECRET, ERROR):
        assert secret not in told, secret
    assert SECRET in (await bea.get(f"/console/audit?subject=event:{id}")).text


async def test_programs_learn_no_more_than_people(site: Site, db: Database, dsn: str) -> None:
    id = await emit_both(db)
    browser = await site.browser()
    paths = ("/events", f"/events?aggregate={ORDER}", "/events?topic=shop.suspicions", f"/why?id=event:{id}",
             f"/why?id=entity:{ORDER}", f"/entity?id={ORDER}", "/audit")  # fmt: skip

    async def read(*roles: str) -> list[str]:
        answers = [await browser.get(f"/v1/console{path}", headers=site.headers(*roles)) for path in paths]
        assert {answer.status_code for answer in answers} == {200}
        return [answer.text for answer in answers]

    for roles in (("OPERATOR",), ("ADMINISTRATOR",)):
        told = await read(*roles)
        assert "order.watched" not in "".join(told).replace("shop.suspicions", "order.watched"), roles
        assert '"closed"' in told[0], "it is counted, and no more"
        assert '"items":[]' in told[2].replace(" ", "")
    everything = await read("OPERATOR", AUDITOR)
    assert all("order.watched" in one for one in everything[:-1])
