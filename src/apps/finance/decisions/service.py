"""The use cases of decisions: each gets a transaction and never ends it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

from apps.finance.decisions import facts as reading
from apps.finance.decisions import store
from apps.finance.decisions.analysis import Finding, analyse
from apps.finance.decisions.deciding import decide
from apps.finance.decisions.events import RuleActivated, RuleWasDeprecated
from apps.finance.decisions.facts import WRONG_TYPE
from apps.finance.decisions.language import BadRule, lists_of, parse
from apps.finance.decisions.loading import Cache, Loaded, read_rule
from apps.finance.decisions.model import (
    MOST_OBSERVATIONS,
    MOST_RULE_SETS,
    MOST_RULES,
    NOW,
    Changed,
    Decision,
    DecisionNotFound,
    Function,
    ListNotFound,
    Observation,
    Outcome,
    Rule,
    RuleDeprecated,
    RuleNotFound,
    RuleRecord,
    RuleSetExists,
    RuleSetFull,
    RuleSetNotFound,
    RuleSetRecord,
    RuleVersion,
    Settings,
    Status,
    StillInUse,
    TooManyRuleSets,
    Unacknowledged,
    ValueList,
    Velocity,
    Verdict,
    check_observation,
    key_of,
    read_action,
    read_settings,
    short,
)
from duly import Tx, emit
from duly.errors import Busy, Fault, Invalid

MOST_RELOADS = 4
PARTITIONS_AHEAD_DAYS = 8
OBSERVATION_DAYS = 33
"""A window is at most 31 days long."""
FORGET_BATCH = 5_000
_cache = Cache()


# -- deciding ---------------------------------------------------------------------------------------------------------


async def evaluate(
    tx: Tx, rule_set_id: str, facts: Mapping[str, Any], *, subject: str | None = None
) -> Decision:  # fmt: skip
    """Decide, and log it: one statement, or two if a rule asks for the time or the past; however many there are (F11).

    The rules of last time are guessed to be still in force; where they are not, nothing is logged by the guess.
    """
    guessed = _cache.latest(rule_set_id)
    if guessed is not None and guessed.compiled.is_timeless:
        decided = decide(guessed, reading.record(guessed.settings.fields, facts), subject)
        logged = await store.insert_decision_in_force(tx, decided.as_row())
        if logged is not None:
            decision_id, at = logged
            decided.recorded[NOW] = at.isoformat()
            return decided.as_logged(decision_id, at, ignored=reading.find_ignored(guessed.settings.fields, facts))
    loaded, recorded = await _gather(tx, rule_set_id, facts)
    decided = decide(loaded, recorded, subject)
    at = datetime.fromisoformat(recorded[NOW])
    decision_id = await store.insert_decision(tx, {**decided.as_row(), "at": at})
    return decided.as_logged(decision_id, at, ignored=reading.find_ignored(loaded.settings.fields, facts))


async def _gather(tx: Tx, rule_set_id: str, facts: Mapping[str, Any]) -> tuple[Loaded, dict[str, Any]]:
    """The rules in force and the record of the facts. The rules of last time are guessed to be still in force."""
    loaded = _cache.latest(rule_set_id)
    for _ in range(MOST_RELOADS):
        recorded = reading.record(loaded.settings.fields, facts) if loaded else {}
        asked = ask_velocity(loaded.settings, loaded.compiled.names, recorded) if loaded else []
        found = await store.find_current(tx, rule_set_id, asked=[question for _, question in asked])
        if found is None:
            raise RuleSetNotFound(f"there is no rule set {rule_set_id}")
        snapshot_id, now, numbers = found
        if loaded is not None and loaded.id == snapshot_id:
            for (velocity, question), number in zip(asked, numbers, strict=True):
                recorded[velocity.name] = count_velocity(velocity, number, question)
            recorded[NOW] = now.isoformat()
            return loaded, recorded
        loaded = await _cache.load(tx, snapshot_id, is_current=True)
    raise Busy("the rule set changes all the time: try again")


def ask_velocity(
    settings: Settings, names: Sequence[str], recorded: dict[str, Any]
) -> list[tuple[Velocity, dict[str, Any]]]:
    """What to ask about the past for the velocity facts among these; what lacks its key is absent like that."""
    asked = []
    kinds = settings.fields
    for velocity in settings.velocity:
        if velocity.name not in names:
            continue
        own = velocity.of if velocity.include_current and velocity.function is not Function.COUNT else None
        needed = [*velocity.by, *([own] if own else [])]
        values = reading.read(kinds, needed, recorded)
        lacking = [value for value in values if isinstance(value, reading.Absent)]
        if lacking:
            if lacking[0] is not reading.MISSING:
                recorded[velocity.name] = None if lacking[0] is reading.NULL else {WRONG_TYPE: "key"}
            continue
        parts = [str(value) for value in values[: len(velocity.by)]]
        current = values[-1] if own else None
        is_distinct = velocity.function is Function.DISTINCT and current is not None
        asked.append(
            (
                velocity,
                {
                    "function": velocity.function.value, "stream": velocity.stream, "key": key_of(parts),
                    "window": velocity.window_seconds, "excluded": short(str(current)) if is_distinct else None,
                    "current": current,
                },
            )
        )  # fmt: skip
    return asked


def count_velocity(velocity: Velocity, number: Decimal | None, question: Mapping[str, Any]) -> Any:
    """A velocity fact as it is recorded: what was observed before, and the current event where that is asked for."""
    past, current = number or Decimal(0), question["current"]
    if velocity.function in {Function.COUNT, Function.DISTINCT}:
        return int(past) + int(velocity.include_current)
    if velocity.include_current:
        past = past + current if velocity.function is Function.SUM else max(past, current)
    return format(past, "f")


async def observe(tx: Tx, *observations: Observation) -> None:
    """Count what happened, in the transaction in which it happens, for the velocity facts of what comes after it."""
    if not 1 <= len(observations) <= MOST_OBSERVATIONS:
        raise Invalid(f"observe 1 to {MOST_OBSERVATIONS} things at a time")
    for one in observations:
        check_observation(one)
    await store.observe(
        tx,
        [
            {
                "stream": one.stream, "key": key_of(one.by), "amount": one.amount,
                "value": short(one.value) if one.value is not None else None, "at": one.at,
            }
            for one in observations
        ],
    )  # fmt: skip


async def read_decision(tx: Tx, decision_id: UUID) -> tuple[Decision, list[dict[str, Any]]]:
    """One of the log with its trace, which is made anew: the same facts and rules say the same (F11)."""
    row, loaded = await _find_logged(tx, decision_id)
    verdict = loaded.compiled.decide(row["facts"])
    return _logged(row, verdict), loaded.compiled.trace(row["facts"])


async def replay(tx: Tx, decision_id: UUID) -> tuple[Decision, Verdict, list[str]]:
    """Decide again from the log alone; what was logged, what is said now, and in what they differ (F11)."""
    row, loaded = await _find_logged(tx, decision_id)
    verdict = loaded.compiled.decide(row["facts"])
    now = {
        "decision": verdict.decision.value, "score": verdict.score, "evaluated": verdict.evaluated,
        "matched": [[str(one.rule_id), one.version] for one in verdict.matched],
        "incomplete": [[str(one.rule_id), one.version] for one in verdict.incomplete],
    }  # fmt: skip
    return _logged(row, verdict), verdict, [name for name, value in now.items() if row[name] != value]


async def trace(tx: Tx, decision: Decision) -> list[dict[str, Any]]:
    """What each rule and each condition said."""
    loaded = await _cache.load(tx, decision.snapshot_id)
    return loaded.compiled.trace(decision.facts)


async def list_decisions(
    tx: Tx, *, rule_set_id: str, decision: Outcome | None, before: UUID | None, limit: int
) -> tuple[list[Mapping[str, Any]], UUID | None]:
    """A page of the log, and where the next one begins."""
    found = await store.list_decisions(
        tx, rule_set_id=rule_set_id, decision=decision.value if decision else None, before=before, limit=limit + 1
    )
    return found[:limit], found[limit - 1]["id"] if len(found) > limit else None


async def _find_logged(tx: Tx, decision_id: UUID) -> tuple[Mapping[str, Any], Loaded]:
    row = await store.find_decision(tx, decision_id)
    if row is None:
        raise DecisionNotFound(f"no decision has the id {decision_id}")
    return row, await _cache.load(tx, row["snapshot_id"])


def _logged(row: Mapping[str, Any], verdict: Verdict) -> Decision:
    names = ("id", "rule_set_id", "rule_set_version", "snapshot_id", "engine", "subject", "at", "facts", "latency_us")
    return Decision(**{name: row[name] for name in names}, verdict=verdict)


# -- rules ------------------------------------------------------------------------------------------------------------


async def create_rule(
    tx: Tx, rule_set_id: str, *, written: Mapping[str, Any], actor: str
) -> tuple[RuleRecord, list[Finding]]:
    """A draft, version 1 (F12); and what will be wrong with it once it is active."""
    loaded = await find_loaded(tx, rule_set_id)
    checked = await _check(tx, loaded, written)
    rule_id = await store.insert_rule(tx, rule_set_id=rule_set_id, created_by=actor, version=checked)
    record = await read_rule_record(tx, rule_id)
    return record, await _analyse(tx, loaded, record.newest)


async def change_rule(
    tx: Tx, rule_id: UUID, *, written: Mapping[str, Any], expected_version: int | None, actor: str
) -> tuple[RuleRecord, list[Finding]]:
    """The next version (F12). What is active stays as it is until the new version is activated."""
    record = await _lock_rule(tx, rule_id)
    if expected_version is not None and expected_version != record.version:
        raise Changed(f"the rule is at version {record.version} by now")
    loaded = await find_loaded(tx, record.rule_set_id)
    checked = await _check(tx, loaded, written)
    await store.insert_rule_version(tx, rule_id, number=record.version + 1, created_by=actor, version=checked)
    changed = await read_rule_record(tx, rule_id)
    return changed, await _analyse(tx, loaded, changed.newest)


async def activate_rule(
    tx: Tx, rule_id: UUID, *, version: int | None, acknowledge_warnings: bool, actor: str
) -> tuple[RuleRecord, list[Finding]]:
    """From the commit on, this version decides (F12). Warnings must be acknowledged."""
    await store.lock_changes(tx)
    record = await _lock_rule(tx, rule_id)
    chosen = await find_version(tx, record, version)
    loaded = await find_loaded(tx, record.rule_set_id)
    if record.status is not Status.ACTIVE and await store.count_active(tx, record.rule_set_id) >= MOST_RULES:
        raise RuleSetFull(f"{record.rule_set_id} has {MOST_RULES} active rules")
    findings = await _analyse(tx, loaded, chosen)
    warnings = [finding for finding in findings if finding.is_warning]
    if warnings and not acknowledge_warnings:
        refused = Unacknowledged("; ".join(f"{one.kind.value}: {one.message}" for one in warnings[:5]))
        refused.faults = tuple(Fault("body", "$.acknowledgeWarnings", _sentence(one)) for one in warnings[:20])
        raise refused
    await store.activate_rule(tx, rule_id, version=chosen.version)
    published = await store.publish(
        tx, record.rule_set_id, reason=f"activated {rule_id} version {chosen.version}", actor=actor
    )
    await emit(
        tx,
        RuleActivated(
            rule_id=rule_id, rule_set_id=record.rule_set_id, version=chosen.version,
            rule_set_version=published.version, actor=actor,
        ),
    )  # fmt: skip
    return await read_rule_record(tx, rule_id), findings


async def deprecate_rule(tx: Tx, rule_id: UUID, *, actor: str) -> RuleRecord:
    """From the commit on, it decides no more; it is never deleted (F12)."""
    await store.lock_changes(tx)
    record = await _lock_rule(tx, rule_id)
    await store.deprecate_rule(tx, rule_id)
    rule_set_version = 0
    if record.status is Status.ACTIVE:
        rule_set_version = (
            await store.publish(tx, record.rule_set_id, reason=f"deprecated {rule_id}", actor=actor)
        ).version
    else:
        rule_set_version = (await read_rule_set(tx, record.rule_set_id)).version
    await emit(
        tx,
        RuleWasDeprecated(
            rule_id=rule_id, rule_set_id=record.rule_set_id, rule_set_version=rule_set_version, actor=actor
        ),
    )
    return await read_rule_record(tx, rule_id)


async def read_rule_record(tx: Tx, rule_id: UUID) -> RuleRecord:
    """One with its newest version."""
    record = await store.find_rule(tx, rule_id)
    if record is None:
        raise RuleNotFound(f"no rule has the id {rule_id}")
    return record


async def list_rules(
    tx: Tx, *, rule_set_id: str | None, status: Status | None, before: UUID | None, limit: int
) -> tuple[list[RuleRecord], UUID | None]:
    """A page, and where the next one begins."""
    found = await store.list_rules(tx, rule_set_id=rule_set_id, status=status, before=before, limit=limit + 1)
    return found[:limit], found[limit - 1].id if len(found) > limit else None


async def list_rule_versions(
    tx: Tx, rule_id: UUID, *, before: int | None, limit: int
) -> tuple[list[RuleVersion], int | None]:
    """Every version there ever was, the newest first (F12)."""
    await read_rule_record(tx, rule_id)
    found = await store.list_rule_versions(tx, rule_id, before=before, limit=limit + 1)
    return found[:limit], found[limit - 1].version if len(found) > limit else None


async def find_version(tx: Tx, record: RuleRecord, version: int | None) -> RuleVersion:
    """A version of a rule; the newest unless one is named."""
    if version is None or version == record.version:
        return record.newest
    found = await store.list_rule_versions(tx, record.id, before=version + 1, limit=1)
    if not found or found[0].version != version:
        raise RuleNotFound(f"the rule has no version {version}")
    return found[0]


async def review(tx: Tx, record: RuleRecord, version: RuleVersion) -> list[Finding]:
    """What is to be said about a version before it is activated."""
    return await _analyse(tx, await find_loaded(tx, record.rule_set_id), version)


async def _lock_rule(tx: Tx, rule_id: UUID) -> RuleRecord:
    if not await store.lock_rule(tx, rule_id):
        raise RuleNotFound(f"no rule has the id {rule_id}")
    record = await read_rule_record(tx, rule_id)
    if record.status is Status.DEPRECATED:
        raise RuleDeprecated(f"{rule_id} is deprecated: make a new rule of it")
    return record


async def find_loaded(tx: Tx, rule_set_id: str) -> Loaded:
    """The rule set as it is in force."""
    record = await read_rule_set(tx, rule_set_id)
    return await _cache.load(tx, record.snapshot_id)


async def find_snapshot(tx: Tx, snapshot_id: UUID) -> Loaded:
    """A version of a rule set, ready to be asked."""
    return await _cache.load(tx, snapshot_id)


async def _check(tx: Tx, loaded: Loaded, written: Mapping[str, Any]) -> dict[str, Any]:
    """What a person wrote, ready to be stored; BadRule (400) with the JSON path of everything that is wrong."""
    tree = parse(written["conditions"], kinds=loaded.settings.kinds)
    used = sorted(lists_of(tree))
    known = await store.find_list_names(tx, used) if used else frozenset()
    if set(used) - known:
        parse(written["conditions"], kinds=loaded.settings.kinds, lists=known)
    read_action(written["action"], loaded.settings)
    return {**written, "list_ids": used}


async def _analyse(tx: Tx, loaded: Loaded, written: RuleVersion) -> list[Finding]:
    rule, lists = await join(tx, loaded, written)
    # Among many rules this takes a while, and evaluations in the same process should not wait for it.
    return await asyncio.to_thread(analyse, rule, loaded.rules, settings=loaded.settings, lists=lists)


async def join(tx: Tx, loaded: Loaded, written: RuleVersion) -> tuple[Rule, Mapping[str, frozenset[str]]]:
    """A version of a rule as it would be evaluated beside those in force, and the lists for all of them."""
    rule = read_rule(written, loaded.settings)
    more = sorted(lists_of(rule.conditions) - set(loaded.lists))
    return rule, {**loaded.lists, **(await store.find_current_lists(tx, more) if more else {})}


def _sentence(finding: Finding) -> str:
    shown = f"; for example {json.dumps(finding.witness)}" if finding.witness is not None else ""
    return f"{finding.kind.value} ({finding.rule_id}): {finding.message}{shown}"[:1_000]


# -- rule sets and lists ----------------------------------------------------------------------------------------------


async def create_rule_set(
    tx: Tx, rule_set_id: str, *, description: str, settings: Mapping[str, Any], actor: str
) -> RuleSetRecord:
    """A rule set without rules: it says its default."""
    read_settings(settings)
    await store.lock_changes(tx)
    if await store.count_rule_sets(tx) >= MOST_RULE_SETS:
        raise TooManyRuleSets(f"there are {MOST_RULE_SETS} rule sets")
    if not await store.insert_rule_set(tx, rule_set_id, description=description):
        raise RuleSetExists(f"{rule_set_id} exists already")
    return await store.publish(tx, rule_set_id, settings=settings, reason="created", actor=actor)


async def change_rule_set(
    tx: Tx, rule_set_id: str, *, description: str, settings: Mapping[str, Any], expected_version: int | None, actor: str
) -> RuleSetRecord:
    """Other settings, unless an active rule could not live with them."""
    await store.lock_changes(tx)
    loaded = await find_loaded(tx, rule_set_id)
    if expected_version is not None and expected_version != loaded.version:
        raise Changed(f"{rule_set_id} is at version {loaded.version} by now")
    new = read_settings(settings)
    snapshot = await store.find_snapshot(tx, loaded.id)
    assert snapshot is not None
    faults = []
    for written in snapshot.rules:
        try:
            read_rule(written, new)
        except BadRule as bad:
            faults.append(Fault("body", "$", f"the active rule {written.rule_id}: {bad}"))
    if faults:
        refused = StillInUse("active rules need what these settings lack: see errors")
        refused.faults = tuple(faults[:20])
        raise refused
    await store.describe_rule_set(tx, rule_set_id, description=description)
    return await store.publish(tx, rule_set_id, settings=settings, reason="settings changed", actor=actor)


async def read_rule_set(tx: Tx, rule_set_id: str) -> RuleSetRecord:
    """One as it is in force."""
    record = await store.find_rule_set(tx, rule_set_id)
    if record is None:
        raise RuleSetNotFound(f"there is no rule set {rule_set_id}")
    return record


async def list_rule_sets(tx: Tx, *, after: str | None, limit: int) -> tuple[list[RuleSetRecord], str | None]:
    """A page, and where the next one begins."""
    found = await store.list_rule_sets(tx, after=after, limit=limit + 1)
    return found[:limit], found[limit - 1].id if len(found) > limit else None


async def put_list(tx: Tx, list_id: str, *, members: Sequence[str], actor: str) -> tuple[ValueList, list[str]]:
    """The next version of a list, and of each rule set that looks into it; which those are."""
    await store.lock_changes(tx)
    made = await store.put_list(tx, list_id, members=sorted(set(members)), actor=actor)
    users = await store.find_users_of_list(tx, list_id)
    for rule_set_id in users:
        await store.publish(tx, rule_set_id, reason=f"list {list_id} version {made.version}", actor=actor)
    return made, users


async def read_list(tx: Tx, list_id: str, *, version: int | None = None) -> ValueList:
    """One now, or as it was at a version that is kept."""
    found = await store.find_list(tx, list_id, version=version)
    if found is None:
        raise ListNotFound(f"there is no list {list_id}" + (f" of version {version}" if version else ""))
    return found


async def list_lists(tx: Tx, *, after: str | None, limit: int) -> tuple[list[Mapping[str, Any]], str | None]:
    """A page, and where the next one begins."""
    found = await store.list_lists(tx, after=after, limit=limit + 1)
    return found[:limit], found[limit - 1]["id"] if len(found) > limit else None


# -- upkeep -----------------------------------------------------------------------------------------------------------


async def keep_partitions(tx: Tx) -> int:
    """Make the log's partitions of the days ahead."""
    return await store.create_partitions(tx, days=PARTITIONS_AHEAD_DAYS)


async def forget(tx: Tx, *, days: int) -> tuple[dict[str, int], bool]:
    """Drop what is older than the retention; how much, and whether a limit ended it."""
    gone = await store.forget(tx, log_days=days, observation_days=OBSERVATION_DAYS, batch=FORGET_BATCH)
    has_more = FORGET_BATCH in gone.values()
    # Last, for whoever drops a partition keeps every evaluation waiting until the commit.
    gone["days of the log"] = await store.drop_partitions(tx, days=days)
    return gone, has_more
