"""Rules are written, checked, versioned, activated and deprecated; never deleted (F12)."""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from duly.db import Database
from tests.apps.finance.decisions.acting import LARGE, Office
from tests.apps.transfers.acting import until_waiting
from tests.support import rows, value

NEVER = {"all": [LARGE, {"field": "amount", "op": "lt", "value": "1"}]}


async def test_a_new_rule_is_a_draft_of_version_1_that_decides_nothing(office: Office, dsn: str) -> None:
    """F12."""
    await office.make_set()
    answer = await office.write(priority=5, terminate=True)
    rule = answer.json()
    assert (answer.status_code, answer.headers["location"]) == (201, f"/v1/decision/rules/{rule['id']}")
    assert (rule["status"], rule["version"], rule["activeVersion"]) == ("DRAFT", 1, None)
    assert (rule["priority"], rule["terminate"], rule["createdBy"], rule["warnings"]) == (5, True, "ada", [])
    assert (await office.evaluate({"amount": "5000"}))["decision"] == "APPROVE"
    assert rows(dsn, "SELECT type FROM duly.outbox") == []


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"conditions": {"all": [LARGE, {"field": "ammount", "op": "gt", "value": "1"}]}}, "$.conditions.all[1].field"),
        ({"conditions": {**LARGE, "value": 1000.5}}, "$.conditions.value"),
        ({"conditions": {"field": "from", "op": "in", "list": "nobody"}}, "$.conditions.list"),
        ({"conditions": {"any": [{"not": {"field": "to", "op": "matches", "value": "(?!a)"}}]}},
         "$.conditions.any[0].not.value"),
        ({"conditions": []}, "$.conditions"),
        ({"action": {}}, "$.action.decision"),
        ({"action": {"decision": "MAYBE"}}, "$.action.decision"),
        ({"action": {"decision": "REJECT", "score": 5}}, "$.action.score"),
        ({"priority": "1"}, "$.priority"),
        ({"terminate": "yes"}, "$.terminate"),
        ({"surprise": 1}, "$.surprise"),
        ({"name": " "}, "$.name"),
    ],
)  # fmt: skip
async def test_a_bad_rule_is_400_with_the_json_path_and_nothing_is_written(
    office: Office, dsn: str, change: Any, path: str
) -> None:
    """F12: 400, not 422, with the offending path."""
    await office.make_set()
    answer = await office.write(**{"conditions": LARGE, **change})
    assert answer.status_code == 400, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    assert [error["path"] for error in answer.json()["errors"]] == [path]
    assert value(dsn, "SELECT count(*) FROM decisions.rules") == 0


async def test_a_member_that_occurs_twice_is_refused(office: Office) -> None:
    await office.make_set()
    twice = '{"ruleSetId":"screening","name":"n","action":{"decision":"REVIEW"},"conditions":{"op":"gt","op":"lt"}}'
    headers = {**office.admin, "Content-Type": "application/json"}
    answer = await office.api.client.post("/v1/decision/rules", content=twice, headers=headers)
    assert (answer.status_code, "twice" in answer.text) == (400, True)


async def test_an_unknown_rule_set_is_404(office: Office) -> None:
    assert (await office.write(rule_set="nowhere")).status_code == 404
    body = {"ruleSetId": "nowhere", "context": {}}
    assert (
        await office.api.client.post("/v1/decision/evaluate", json=body, headers=office.caller)
    ).status_code == 404  # fmt: skip


async def test_a_change_is_a_new_version_and_takes_effect_when_it_is_activated(office: Office) -> None:
    """F12: every change is a version, old ones can be read, and an older one can be put in force again."""
    await office.make_set()
    rule = await office.rule()
    body = {"name": "Lower", "conditions": {**LARGE, "value": "10"}, "action": {"decision": "REJECT"}}
    changed = (await office.ask("PUT", f"/rules/{rule['id']}", {**body, "expectedVersion": 1})).json()
    assert (changed["status"], changed["version"], changed["activeVersion"]) == ("ACTIVE", 2, 1)
    assert (await office.evaluate({"amount": "500"}))["decision"] == "APPROVE"
    assert (await office.activate(rule))["activeVersion"] == 2
    assert (await office.evaluate({"amount": "500"}))["decision"] == "REJECT"
    assert (await office.activate(rule, version=1))["activeVersion"] == 1
    assert (await office.evaluate({"amount": "500"}))["decision"] == "APPROVE"
    page = await office.get(f"/rules/{rule['id']}/versions?limit=1")
    assert [one["version"] for one in page["items"]] == [2]
    older = await office.get(f"/rules/{rule['id']}/versions?before={page['next']}")
    assert [(one["version"], one["conditions"]) for one in older["items"]] == [(1, LARGE)]
    stale = await office.ask("PUT", f"/rules/{rule['id']}", {**body, "expectedVersion": 1})
    assert stale.status_code == 409
    assert (await office.ask("POST", f"/rules/{rule['id']}/activate", {"version": 9})).status_code == 404


async def test_changes_at_the_same_time_are_versions_of_their_own(office: Office, dsn: str) -> None:
    """F12: each waits for the one before."""
    await office.make_set()
    rule = await office.draft()
    body = {"conditions": LARGE, "action": {"decision": "REVIEW"}}
    with psycopg.connect(dsn) as rival:
        rival.execute("SELECT 1 FROM decisions.rules FOR UPDATE")
        changing = [
            asyncio.create_task(office.ask("PUT", f"/rules/{rule['id']}", {**body, "name": name})) for name in "ab"
        ]
        await until_waiting(dsn, 2)
    answers = await asyncio.gather(*changing)
    assert sorted((answer.status_code, answer.json().get("version")) for answer in answers) == [(200, 2), (200, 3)]


async def test_activating_and_deprecating_emit_events_in_the_same_commit(office: Office, dsn: str) -> None:
    """F12."""
    await office.make_set()
    rule = await office.rule()
    answer = await office.ask("POST", f"/rules/{rule['id']}/deprecate")
    assert (answer.status_code, answer.json()["status"]) == (200, "DEPRECATED")
    emitted = rows(dsn, "SELECT type, topic, aggregate_id, payload->>'rule_set_version' FROM duly.outbox ORDER BY seq")
    assert emitted == [
        ("decision.rule.activated", "decision.events", rule["id"], "2"),
        ("decision.rule.deprecated", "decision.events", rule["id"], "3"),
    ]
    assert (await office.evaluate({"amount": "5000"}))["decision"] == "APPROVE"
    again = [
        await office.ask("POST", f"/rules/{rule['id']}/{verb}") for verb in ("activate", "deprecate")
    ] + [await office.ask("PUT", f"/rules/{rule['id']}", {"name": "n", "conditions": LARGE, "action": {}})]  # fmt: skip
    assert [one.status_code for one in again] == [409, 409, 409]
    assert (await office.get(f"/rules/{rule['id']}"))["status"] == "DEPRECATED"


async def test_warnings_come_with_the_draft_and_activation_asks_for_an_acknowledgement(office: Office) -> None:
    await office.make_set()
    stopper = await office.rule({"field": "amount", "op": "gt", "value": "1"}, priority=9, terminate=True)
    never = await office.draft(NEVER)
    assert [one["kind"] for one in never["warnings"]] == ["never_matches"]
    shadowed = await office.draft()
    [warning] = shadowed["warnings"]
    assert (warning["kind"], warning["by"], warning["ruleId"]) == ("shadowed", stopper["id"], shadowed["id"])
    decision = await office.evaluate(warning["witness"])
    assert [one["ruleId"] for one in decision["matchedRules"]] == [stopper["id"]]
    refused = await office.ask("POST", f"/rules/{shadowed['id']}/activate", {})
    assert (refused.status_code, refused.json()["type"]) == (409, "urn:duly:problem:unacknowledged")
    assert "shadowed" in refused.json()["errors"][0]["detail"]
    assert (await office.get(f"/rules/{shadowed['id']}"))["status"] == "DRAFT"
    assert (await office.activate(shadowed, acknowledgeWarnings=True))["status"] == "ACTIVE"


async def test_rules_are_listed_by_page_set_and_status(office: Office) -> None:
    await office.make_set()
    await office.make_set("other")
    made = [await office.draft() for _ in range(3)]
    await office.draft(rule_set="other")
    await office.activate(made[0])
    page = await office.get("/rules?ruleSetId=screening&limit=2")
    assert [one["id"] for one in page["items"]] == [made[2]["id"], made[1]["id"]]
    rest = await office.get(f"/rules?ruleSetId=screening&before={page['next']}")
    assert ([one["id"] for one in rest["items"]], rest["next"]) == ([made[0]["id"]], None)
    active = await office.get("/rules?ruleSetId=screening&status=ACTIVE")
    assert [one["id"] for one in active["items"]] == [made[0]["id"]]
    assert (await office.ask("GET", f"/rules/{uuid4()}")).status_code == 404
    assert (await office.ask("GET", f"/rules/{uuid4()}/versions")).status_code == 404


async def test_settings_that_active_rules_cannot_live_with_are_refused(office: Office) -> None:
    await office.make_set()
    rule = await office.rule()
    without = {"description": "d", "settings": {"fields": {"currency": "string"}}}
    refused = await office.ask("PUT", "/rule-sets/screening", without)
    assert (refused.status_code, rule["id"] in refused.json()["errors"][0]["detail"]) == (409, True)
    wider = {"description": "d", "settings": {"fields": {"amount": "decimal", "new": "string"}}, "expectedVersion": 2}
    changed = await office.ask("PUT", "/rule-sets/screening", wider)
    assert (changed.status_code, changed.json()["version"]) == (200, 3)
    assert (await office.ask("PUT", "/rule-sets/screening", wider)).status_code == 409
    assert (await office.write({"field": "new", "op": "exists"})).status_code == 201
    assert (await office.ask("POST", "/rule-sets", {**without, "id": "screening"})).status_code == 409
    assert (await office.ask("PUT", "/rule-sets/nowhere", without)).status_code == 404


async def test_a_changed_list_is_in_force_at_once_and_its_versions_stay(office: Office) -> None:
    await office.make_set()
    made = await office.ask("PUT", "/lists/sanctioned", {"members": ["acc-1", "acc-2", "acc-1"]})
    assert (made.status_code, made.json()["members"], made.json()["ruleSets"]) == (200, ["acc-1", "acc-2"], [])
    await office.rule({"field": "to", "op": "in", "list": "sanctioned"}, decision="REJECT")
    assert (await office.evaluate({"to": "acc-2"}))["decision"] == "REJECT"
    changed = await office.ask("PUT", "/lists/sanctioned", {"members": ["acc-3"]})
    assert (changed.json()["version"], changed.json()["ruleSets"]) == (2, ["screening"])
    assert (await office.evaluate({"to": "acc-2"}))["decision"] == "APPROVE"
    assert (await office.evaluate({"to": "acc-3"}))["decision"] == "REJECT"
    assert (await office.get("/lists/sanctioned?version=1"))["members"] == ["acc-1", "acc-2"]
    assert (await office.get("/lists"))["items"][0]["size"] == 1
    too_many = await office.ask("PUT", "/lists/sanctioned", {"members": ["x" * 3] * 10_001})
    assert (too_many.status_code, (await office.ask("GET", "/lists/none")).status_code) == (400, 404)


async def test_activations_at_the_same_time_all_count(office: Office, dsn: str) -> None:
    """Each makes a version of the set of its own, and the last one has every rule."""
    await office.make_set()
    drafts = [await office.draft({**LARGE, "value": str(number)}) for number in range(8)]
    await asyncio.gather(*(office.activate(draft) for draft in drafts))
    decision = await office.evaluate({"amount": "100"})
    assert (len(decision["matchedRules"]), decision["ruleSetVersion"]) == (8, 9)
    versions = rows(dsn, "SELECT version, cardinality(rule_ids) FROM decisions.snapshots ORDER BY created_at, version")
    assert versions[-9:] == [(1, 0), *((number + 1, number) for number in range(1, 9))]


async def test_a_list_that_changes_while_its_rule_is_activated_is_never_half_in_force(
    office: Office, dsn: str
) -> None:  # fmt: skip
    """Whichever comes first, in the end the set has the list's last version."""
    await office.make_set()
    for number in range(6):
        name = f"list-{number}"
        await office.ask("PUT", f"/lists/{name}", {"members": ["old"]})
        draft = await office.draft({"field": "to", "op": "in", "list": name})
        await asyncio.gather(
            office.activate(draft), office.ask("PUT", f"/lists/{name}", {"members": ["new"]})
        )  # fmt: skip
    stale = """
        SELECT u.id FROM decisions.rule_sets r JOIN decisions.snapshots s ON s.id = r.snapshot_id
        CROSS JOIN LATERAL unnest(s.list_ids, s.list_versions) AS u(id, version)
        JOIN decisions.lists l ON l.id = u.id WHERE u.version <> l.version
    """
    assert rows(dsn, stale) == []
    assert len((await office.evaluate({"to": "new"}))["matchedRules"]) == 6


@pytest.mark.parametrize("table", ["log", "snapshots", "rule_versions", "list_versions"])
@pytest.mark.parametrize("change", ["UPDATE {} SET {} = {}", "DELETE FROM {}", "TRUNCATE {} CASCADE"])
async def test_what_a_replay_needs_is_insert_only(office: Office, dsn: str, table: str, change: str) -> None:
    await office.make_set()
    await office.ask("PUT", "/lists/some", {"members": ["a"]})
    await office.rule()
    await office.evaluate({"amount": "1"})
    column = {"log": "decision"}.get(table, "created_by")
    with pytest.raises(Exception, match="insert-only"):
        rows(dsn, change.format(f"decisions.{table}", column, column))


async def test_a_rule_set_can_be_full(office: Office, db: Database, dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    await office.make_set()
    monkeypatch.setattr("apps.finance.decisions.service.MOST_RULES", 1)
    first = await office.rule()
    second = await office.draft({**LARGE, "value": "1"})
    refused = await office.ask("POST", f"/rules/{second['id']}/activate", {})
    assert (refused.status_code, refused.json()["type"]) == (409, "urn:duly:problem:rule-set-full")
    await office.activate(first)  # one that is active already takes no place


async def test_the_number_of_rule_sets_is_bounded(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("apps.finance.decisions.service.MOST_RULE_SETS", 3)
    await office.make_set()
    body = {"id": "one-more", "description": "d", "settings": {"fields": {"a": "string"}}}
    refused = await office.ask("POST", "/rule-sets", body)
    assert (refused.status_code, refused.json()["type"]) == (409, "urn:duly:problem:too-many-rule-sets")
