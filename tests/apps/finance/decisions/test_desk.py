"""F11, F12 in the console: risk administrators write, compare, try out, dry-run, activate and deprecate rules."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from html import unescape
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx2
import pytest
import pytest_asyncio

from apps.finance.decisions import service
from apps.finance.decisions.model import Observation
from apps.finance.decisions.wording import compare, say
from apps.wiring import app
from duly.db import Database
from tests.console.conftest import Site, csrf_of, post, serving
from tests.support import rows, value

SET = "desk"
FIELDS = {"amount": "decimal", "currency": "string", "from": "string", "country": "string"}
VELOCITY = [{"name": "sent", "function": "count", "stream": "desk", "by": ["from"], "windowSeconds": 3_600}]
LARGE = {"field": "amount", "op": "gt", "value": "1000.00"}
HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>"


@dataclass
class Desk:
    """A console with a rule set, a rule that decides, and some decisions."""

    site: Site
    db: Database
    dsn: str
    rule: UUID

    async def rita(self) -> httpx2.AsyncClient:
        """A risk administrator's browser."""
        return await self.site.signed_in("rita")

    def edited(self, **changes: Any) -> dict[str, str]:
        """The editor's form, filled in."""
        given = {"name": "Large", "conditions": json.dumps(LARGE), "decision": "REVIEW", "priority": "0", **changes}
        return {name: one for name, one in given.items() if one is not None}

    def change(self, **changes: Any) -> dict[str, str]:
        """The form for the next version of the rule."""
        return self.edited(id=str(self.rule), expected_version="1", **changes)

    def audited(self) -> list[tuple[Any, ...]]:
        """What the desk did."""
        return rows(self.dsn, "SELECT action, actor, subject, reason FROM duly.audit WHERE action LIKE 'rule.%%' "
                              "ORDER BY id", {})  # fmt: skip

    def versions(self) -> list[tuple[Any, ...]]:
        """The rule's versions."""
        return rows(self.dsn, "SELECT version, name, created_by FROM decisions.rule_versions WHERE rule_id = %(id)s "
                              "ORDER BY version", {"id": self.rule})  # fmt: skip


@pytest_asyncio.fixture
async def desk(db: Database, dsn: str, tmp_path: Path) -> AsyncIterator[Desk]:
    """One for a test."""
    async with serving(db, tmp_path, app) as site:
        await app.prepare(db)
        async with db.transaction() as tx:
            settings = {"fields": FIELDS, "velocity": VELOCITY, "money": {"amount": "amount", "currency": "currency"}}
            await service.create_rule_set(tx, SET, description="For the desk", settings=settings, actor="setup")
            written = {"name": "Large", "conditions": LARGE, "priority": 0, "terminate": False,
                       "action": {"decision": "REVIEW"}}  # fmt: skip
            record, _ = await service.create_rule(tx, SET, written=written, actor="setup")
            await service.activate_rule(tx, record.id, version=1, acknowledge_warnings=False, actor="setup")
        async with db.transaction() as tx:
            for amount in ("10.00", "600.00", "1500.00"):
                facts = {"amount": amount, "currency": "PLN", "from": "acc-1", "country": "PL"}
                await service.evaluate(tx, SET, facts, subject=f"pay-{amount}")
        yield Desk(site, db, dsn, record.id)


def main(page: httpx2.Response) -> str:
    """What a page says, without its tags."""
    text = page.text.split("<main")[1].split("</main>")[0]
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]+>", " ", text)))


def problem_at(page: httpx2.Response, field: str) -> str:
    """What is said at a field."""
    assert f'aria-describedby="wrong-{field}"' in page.text
    return unescape(page.text.split(f'id="wrong-{field}">')[1].split("</label>")[0])


PAGES = ("", "/decisions?set=desk", "/sets/desk", "/{rule}", "/{rule}/diff")
CLOSED = ("/new", "/new?set=desk", "/sets/desk/bench", "/{rule}/edit", "/{rule}/activate", "/{rule}/dry-run")


async def test_a_risk_administrator_sees_the_rules_and_nothing_else(desk: Desk) -> None:
    rita = await desk.rita()
    assert (await rita.get("/console")).headers["location"] == "/console/rules"
    decision = value(desk.dsn, "SELECT id FROM decisions.log LIMIT 1")
    for path in (*PAGES, *CLOSED, f"/decisions/{decision}"):
        page = await rita.get(f"/console/rules{path.format(rule=desk.rule)}")
        assert page.status_code == 200, (path, page.text[-500:])
        assert re.findall(r'<li><a href="/console([^"]*)"', page.text) == ["/rules"], path
        linked = set(re.findall(r'href="/console/([a-z-]+)', page.text)) - {"static", "rules"}
        assert linked == set(), path  # no link leads to where she is refused
    for path in ("/payments", "/accounts", "/jobs", "/audit"):
        assert (await rita.get(f"/console{path}")).status_code == 403


@pytest.mark.parametrize("person", ["ada", "otto"])
async def test_whoever_runs_the_engine_looks_and_changes_nothing(desk: Desk, person: str) -> None:
    browser = await desk.site.signed_in(person)
    for path in PAGES:
        page = await browser.get(f"/console/rules{path.format(rule=desk.rule)}")
        assert page.status_code == 200, path
        assert "/actions/rules." not in page.text
    for path in CLOSED:
        assert (await browser.get(f"/console/rules{path.format(rule=desk.rule)}")).status_code == 403, path
    cora = await desk.site.signed_in("cora")
    assert (await cora.get("/console/rules")).status_code == 403
    decision = value(desk.dsn, "SELECT id FROM decisions.log LIMIT 1")
    page = await browser.get(f"/console/rules/decisions/{decision}")
    assert ("acc-1" in page.text) == (person == "ada")


ACTIONS: dict[str, tuple[Mapping[str, str], str]] = {
    "rules.create": ({"rule_set_id": SET}, "rule.created"),
    "rules.change": ({"id": "", "expected_version": "1"}, "rule.changed"),
    "rules.activate": ({"id": "", "version": "1"}, "rule.activated"),
    "rules.deprecate": ({"id": ""}, "rule.deprecated"),
}


def fields_of(desk: Desk, name: str) -> dict[str, str]:
    """A form of each action that is right."""
    given = {field: str(desk.rule) if field == "id" else one for field, one in ACTIONS[name][0].items()}
    if name in ("rules.create", "rules.change"):
        given = desk.edited(**given)
    return {**given, "reason": "because", "confirmed": "yes"}


def test_every_action_of_the_section_is_tried_here() -> None:
    section = next(section for section in app.sections if section.name == "rules")
    assert {action.name for action in section.actions} == set(ACTIONS)


@pytest.mark.parametrize("name", ACTIONS)
async def test_each_action_is_for_the_role_with_a_token_and_once_a_click(desk: Desk, name: str) -> None:
    fields, path = fields_of(desk, name), f"/console/actions/{name}"
    for person in ("ada", "otto", "cora"):
        assert (await post(await desk.site.signed_in(person), name, **fields)).status_code == 403, person
    rita = await desk.rita()
    assert (await rita.post(path, data=fields)).status_code == 403
    assert (await rita.post(path, data={**fields, "csrf": "0" * 64})).status_code == 403
    assert desk.audited() == []
    sent = {**fields, "csrf": await csrf_of(rita), "once": "w1"}
    answers = await asyncio.gather(*(rita.post(path, data=sent) for _ in range(4)))
    assert {answer.status_code for answer in answers} == {303}
    assert len({answer.headers["location"] for answer in answers}) == 1
    ((action, actor, subject, reason),) = desk.audited()
    assert (action, actor, reason) == (ACTIONS[name][1], "rita", "because")
    assert subject.startswith("rule:")
    page = await rita.get(answers[0].headers["location"])
    assert page.status_code == 200
    assert 'role="status"' in page.text


async def test_a_rule_is_edited_compared_and_activated(desk: Desk) -> None:
    rita = await desk.rita()
    editor = await rita.get(f"/console/rules/{desk.rule}/edit")
    assert "1000.00" in editor.text
    assert 'name="expected_version" value="1"' in editor.text
    both = {
        "all": [{"field": "amount", "op": "gt", "value": "500.00"}, {"field": "country", "op": "ne", "value": "DE"}]
    }
    saved = await post(
        rita, "rules.change", **desk.change(conditions=json.dumps(both), name="Large abroad", says="big")
    )
    assert saved.headers["location"] == f"/console/rules/{desk.rule}/diff?from=1&to=2"
    assert desk.versions() == [(1, "Large", "setup"), (2, "Large abroad", "rita")]
    diff = await rita.get(saved.headers["location"])
    for words in ("From version 1 to 2", "gone: amount is more than 1000.00", "new: all of these",
                  "amount is more than 500.00", "country is not DE", "Large Large abroad"):  # fmt: skip
        assert words in main(diff), words
    asked = await rita.get(f"/console/rules/{desk.rule}/activate?version=2")
    assert "Version 1 decides now" in main(asked)
    sent = {"id": str(desk.rule), "version": "2"}
    unsaid = await post(rita, "rules.activate", **sent)
    assert unsaid.status_code == 422
    assert "say why" in problem_at(unsaid, "reason")
    assert "Activate version 2" in main(unsaid)
    done = await post(rita, "rules.activate", **sent, reason="losses in May")
    assert done.headers["location"] == f"/console/rules/{desk.rule}"
    page = await rita.get(f"/console/rules/{desk.rule}")
    assert "Version 2 of Large abroad decides now." in main(page)
    assert "losses in May" in main(page)
    assert value(desk.dsn, "SELECT active_version FROM decisions.rules WHERE id = %(id)s", {"id": desk.rule}) == 2
    assert value(desk.dsn, "SELECT count(*) FROM duly.outbox WHERE type = 'decision.rule.activated' "
                           "AND payload ->> 'actor' = 'rita'") == 1  # fmt: skip
    before, after = rows(desk.dsn, "SELECT before, after FROM duly.audit WHERE action = 'rule.activated'")[0]
    assert (before, after) == ({"active_version": 1}, {"active_version": 2})


@pytest.mark.parametrize(
    ("changes", "status", "field", "said"),
    [({"conditions": json.dumps({"all": [LARGE, {"field": "amuont", "op": "gt", "value": "1"}]})}, 400, "conditions",
       "$.conditions.all[1].field: the rule set has no such field: did you mean amount?"),
     ({"conditions": '{"field": "amount", "op": "gt", "value": 1.5}'}, 400, "conditions",
      "$.conditions.value: write a decimal"),
     ({"conditions": '{"field": "from", "op": "in", "list": "nowhere"}'}, 400, "conditions", "there is no such list"),
     ({"conditions": '{"field": "amount",\n "op" "gt"}'}, 422, "conditions", "line 2, column 7"),
     ({"conditions": "[1]"}, 422, "conditions", "dictionary"),
     ({"conditions": '{"a": 1, "a": 2}'}, 422, "conditions", "a member occurs twice"),
     ({"conditions": "[" * 5_000}, 422, "conditions", "nested"),
     ({"conditions": ""}, 422, "conditions", "Field required"),
     ({"name": "  "}, 422, "name", "Field required"), ({"name": "a\x07b"}, 422, "name", "pattern"),
     ({"priority": "many"}, 422, "priority", "integer"), ({"priority": "1000001"}, 422, "priority", "less than"),
     ({"decision": None}, 400, "decision", "write APPROVE, REVIEW or REJECT"),
     ({"decision": "MAYBE"}, 422, "decision", "Input should be"), ({"says": "x" * 201}, 422, "says", "200")],
)  # fmt: skip
@pytest.mark.parametrize("name", ["rules.create", "rules.change"])
async def test_a_bad_rule_is_shown_again_with_the_place_at_the_field(
    desk: Desk, name: str, changes: dict[str, Any], status: int, field: str, said: str
) -> None:
    rita = await desk.rita()
    own = {"rule_set_id": SET} if name == "rules.create" else {"id": str(desk.rule), "expected_version": "1"}
    page = await post(rita, name, **desk.edited(**own, **changes), reason="kept, too")
    assert page.status_code == status, main(page)
    assert said in problem_at(page, field)
    assert 'value="kept, too"' in page.text
    typed = str(changes.get("conditions") or "")
    assert typed.strip() in unescape(page.text)
    assert desk.audited() == []
    assert len(desk.versions()) == 1


async def test_an_edit_from_an_old_page_is_refused_with_what_was_typed(desk: Desk) -> None:
    rita = await desk.rita()
    assert (await post(rita, "rules.change", **desk.change(name="First"))).status_code == 303
    late = await post(rita, "rules.change", **desk.change(name="Second"))
    assert late.status_code == 409
    assert "The rule is at version 2 by now" in main(late)
    assert 'value="Second"' in late.text
    assert 'name="expected_version" value="1"' in late.text  # until the page is loaded again
    assert [name for _, name, _ in desk.versions()] == ["Large", "First"]


async def test_warnings_must_be_acknowledged(desk: Desk) -> None:
    rita = await desk.rita()
    never = {"all": [{"field": "amount", "op": "gt", "value": "5"}, {"field": "amount", "op": "lt", "value": "4"}]}
    saved = await post(rita, "rules.change", **desk.change(conditions=json.dumps(never)))
    assert "1 warning must be acknowledged" in main(await rita.get(saved.headers["location"]))
    asked = await rita.get(f"/console/rules/{desk.rule}/activate?version=2")
    assert "No input can match it" in main(asked)
    assert 'name="acknowledge_warnings"' in asked.text
    sent = {"id": str(desk.rule), "version": "2", "reason": "I know"}
    refused = await post(rita, "rules.activate", **sent)
    assert refused.status_code == 409
    assert "no input can match it" in problem_at(refused, "acknowledge_warnings")
    assert 'value="I know"' in refused.text
    assert (await post(rita, "rules.activate", **sent, acknowledge_warnings="on")).status_code == 303


async def test_a_deprecated_rule_is_over(desk: Desk) -> None:
    rita = await desk.rita()
    asked = await rita.get(f"/console/actions/rules.deprecate?id={desk.rule}")
    assert "that is final" in main(asked)
    assert (await post(rita, "rules.deprecate", id=str(desk.rule), reason="replaced")).status_code == 303
    page = await rita.get(f"/console/rules/{desk.rule}")
    assert "DEPRECATED" in main(page)
    assert "/activate" not in page.text
    for name, more in (("rules.deprecate", {}), ("rules.activate", {"version": "1"})):
        again = await post(rita, name, id=str(desk.rule), reason="again", **more)
        assert again.status_code == 409
        assert "is deprecated" in main(again)
    assert [action for action, *_ in desk.audited()] == ["rule.deprecated"]


async def test_the_test_bench_says_what_each_rule_said_and_writes_nothing(desk: Desk) -> None:
    rita = await desk.rita()
    page = await rita.get("/console/rules/sets/desk/bench")
    for words in ('"amount": "100.00"', "count in desk by from, over 1 h 00 min"):
        assert words in main(page), words
    logged = value(desk.dsn, "SELECT count(*) FROM decisions.log")
    token = await csrf_of(rita)

    async def try_out(facts: Any, **more: str) -> httpx2.Response:
        text = facts if isinstance(facts, str) else json.dumps(facts)
        return await rita.post("/console/rules/sets/desk/bench", data={"csrf": token, "facts": text, **more})

    page = await try_out({"amount": "1500.00", "colour": "red"})
    for words in ("REVIEW", "Large, version 1, matched: REVIEW", "amount is more than 1000.00 yes it is 1500.00",
                  "ignored: colour"):  # fmt: skip
        assert words in main(page), words
    assert "amount is more than 1000.00 no it is 10.00" in main(await try_out({"amount": "10.00"}))
    page = await try_out({})
    assert "could not be answered without amount (missing)" in main(page)
    assert "it is missing" in main(page)
    for facts, said in (("{", "line 1, column 2"), ("[1]", "write a JSON object"), ("", "it is not JSON"),
                        ({"amount": "x" * 5_000}, "$.facts.amount: a text has at most"),
                        ('{"from": "\\u0000"}', "$.facts.from: a text has no NUL"),
                        ("x" * 20_001, "at most")):  # fmt: skip
        page = await try_out(facts)
        assert page.status_code in (400, 422), main(page)
        assert said in problem_at(page, "facts"), facts
    assert value(desk.dsn, "SELECT count(*) FROM decisions.log") == logged
    assert (await try_out({}, rule="019c0000-0000-7000-8000-000000000003")).status_code == 404


async def test_a_draft_is_tried_with_velocity_as_of_now_or_as_given(desk: Desk) -> None:
    rita = await desk.rita()
    often = {"field": "sent", "op": "gte", "value": 3}
    await post(rita, "rules.change", **desk.change(conditions=json.dumps(often), decision="REJECT"))
    async with desk.db.transaction() as tx:
        for _ in range(4):
            await service.observe(tx, Observation("desk", ("acc-1",)))
    token = await csrf_of(rita)

    async def try_out(facts: dict[str, Any], version: str) -> str:
        sent = {"csrf": token, "facts": json.dumps(facts), "rule": str(desk.rule), "version": version}
        return main(await rita.post("/console/rules/sets/desk/bench", data=sent))

    assert "sent is at least 3 yes it is 4" in await try_out({"from": "acc-1"}, "2")
    assert "sent is at least 3 no it is 0" in await try_out({"from": "acc-2"}, "2")
    assert "sent is at least 3 yes it is 7" in await try_out({"from": "acc-2", "sent": 7}, "2")
    assert "amount is more than 1000.00" in await try_out({"from": "acc-1"}, "1")
    assert "Version 2 of" in main(await rita.get(f"/console/rules/sets/desk/bench?rule={desk.rule}&version=2"))


async def test_a_dry_run_says_what_would_have_changed(desk: Desk) -> None:
    rita = await desk.rita()
    lower = {"field": "amount", "op": "gt", "value": "500.00"}
    await post(rita, "rules.change", **desk.change(conditions=json.dumps(lower)))
    path, token = f"/console/rules/{desk.rule}/dry-run", await csrf_of(rita)
    assert "Decisions examined" not in main(await rita.get(f"{path}?version=2"))

    async def run(**fields: str) -> httpx2.Response:
        return await rita.post(path, data={"csrf": token, **fields})

    page = main(await run(version="2"))
    for words in (
        "Decisions examined 3",
        "Would be another 1",
        "The rule would match 2",
        "APPROVE REVIEW 1 600.00 PLN",
    ):
        assert words in page, words
    assert "REVIEW APPROVE 1 1500.00 PLN" in main(await run(version="1", without="on"))
    assert "Decisions examined 0" in main(await run(version="2", until="2020-01-01T00:00"))
    wrong = await run(version="2", since="yesterday")
    assert wrong.status_code == 422
    assert "write a time such as" in problem_at(wrong, "since")
    assert (await run(version="77")).status_code == 404
    assert (await run(version="0")).status_code == 400
    assert (await rita.post(path, data={"version": "2"})).status_code == 403
    assert value(desk.dsn, "SELECT count(*) FROM decisions.log") == 3


async def test_stored_text_is_shown_and_never_runs(desk: Desk) -> None:
    rita = await desk.rita()
    evil = {"any": [{"field": "country", "op": "eq", "value": HOSTILE}, LARGE]}
    made = await post(rita, "rules.change", **desk.change(name=HOSTILE, says=HOSTILE, conditions=json.dumps(evil)),
                      reason=HOSTILE)  # fmt: skip
    assert made.status_code == 303
    sent = {"csrf": await csrf_of(rita), "facts": json.dumps({"country": HOSTILE, "amount": "1"}),
            "rule": str(desk.rule), "version": "2"}  # fmt: skip
    shown = [await rita.post("/console/rules/sets/desk/bench", data=sent)]
    paths = ("", *(path.format(rule=desk.rule) for path in (*PAGES, *CLOSED) if "{rule}" in path))
    shown += [await rita.get(f"/console/rules{path}") for path in paths]
    for page in shown:
        assert page.status_code == 200
        assert "<script>alert" not in page.text
        assert "<img src=x" not in page.text
        assert "&lt;script&gt;alert(1)" in page.text


@pytest.mark.parametrize(
    ("path", "status"),
    [("/sets/nowhere", 404), ("/sets/nowhere/bench", 404), ("/new?set=nowhere", 404), ("/{rule}/diff?from=9", 404),
     ("/{rule}/diff?to=0", 400), ("/{rule}/diff?from=x", 400), ("/{rule}/edit?version=99", 404),
     ("/{rule}/edit?version=99999999999", 400), ("/{rule}/activate?version=2", 404),
     ("/sets/desk/bench?decision=019c0000-0000-7000-8000-000000000003", 404), ("/sets/desk/bench?decision=x", 400),
     ("/sets/desk/bench?rule={rule}&version=5", 404), ("/nonsense/edit", 404)],
)  # fmt: skip
async def test_nonsense_in_an_address_is_a_page_that_says_so(desk: Desk, path: str, status: int) -> None:
    page = await (await desk.rita()).get(f"/console/rules{path.format(rule=desk.rule)}")
    assert page.status_code == status
    assert "<h1>" in page.text


async def test_the_facts_of_a_decision_are_tried_again(desk: Desk) -> None:
    rita = await desk.rita()
    id = value(desk.dsn, "SELECT id FROM decisions.log WHERE subject = 'pay-1500.00'")
    page = await rita.get(f"/console/rules/decisions/{id}")
    assert f"/console/rules/sets/desk/bench?decision={id}" in page.text
    assert "1500.00" in main(await rita.get(f"/console/rules/sets/desk/bench?decision={id}"))


def test_conditions_are_said_in_words() -> None:
    conditions = {
        "all": [
            {"field": "a", "op": "between", "value": ["1", "2"], "otherwise": True},
            {"any": [{"field": "b", "op": "in", "value": list(range(12))}, {"not": {"field": "c", "op": "exists"}}]},
            {"field": "d", "op": "in", "list": "watched"}, {"field": "e", "op": "lt", "valueField": "f"},
            {"field": "g", "op": "eq", "value": False},
        ]
    }  # fmt: skip
    assert [(line.depth, line.text) for line in say(conditions)] == [
        (0, "all of these"), (1, "a is between 1 and 2 (yes if it is not known)"), (1, "any of these"),
        (2, "b is one of 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 2 more"), (2, "not this"), (3, "c is given"),
        (1, "d is in the list watched"), (1, "e is less than f"), (1, "g is false"),
    ]  # fmt: skip


async def test_the_first_version_is_all_new(desk: Desk) -> None:
    async with desk.db.transaction() as tx:
        record = await service.read_rule_record(tx, desk.rule)
    found = compare(None, record.newest)
    assert found.lines == [("+", "amount is more than 1000.00")]
    assert ("name", "", "Large") in found.members
    assert compare(record.newest, record.newest).is_empty
