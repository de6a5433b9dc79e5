"""The test bench: facts that a person makes up, decided by the rules in force or with another version of one of them.

Nothing is logged and nothing is observed. Velocity facts are counted as they would be now, unless they are given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from apps.finance.decisions import facts as reading
from apps.finance.decisions import service, store
from apps.finance.decisions.compiled import CompiledSet
from apps.finance.decisions.language import Kind
from apps.finance.decisions.model import NOW, RuleSetNotFound, RuleVersion, Settings, Verdict
from duly import Tx

PATH = "$.facts"
EXAMPLES: Mapping[Kind, Any] = {
    Kind.DECIMAL: "100.00", Kind.INTEGER: 1, Kind.STRING: "", Kind.BOOLEAN: False,
    Kind.INSTANT: "2026-01-31T09:00:00Z", Kind.STRINGS: [],
}  # fmt: skip


@dataclass(frozen=True)
class Tried:
    """What would have been said, about which facts, and why."""

    rule_set_version: int
    verdict: Verdict
    facts: Mapping[str, Any]
    trace: Sequence[Mapping[str, Any]]
    ignored: Sequence[str]


async def try_facts(
    tx: Tx, rule_set_id: str, given: Mapping[str, Any], *, candidate: RuleVersion | None = None
) -> Tried:
    """Decide about made-up facts; a candidate stands in for the version of its rule that is in force, or beside it."""
    loaded = await service.find_loaded(tx, rule_set_id)
    settings, compiled = loaded.settings, loaded.compiled
    if candidate is not None:
        rule, lists = await service.join(tx, loaded, candidate)
        others = [other for other in loaded.rules if other.id != rule.id]
        compiled = CompiledSet(settings, [*others, rule], lists)
    recorded = await _record(tx, rule_set_id, settings, compiled, given)
    ignored = reading.find_ignored(settings.kinds, given)
    return Tried(loaded.version, compiled.decide(recorded), recorded, compiled.trace(recorded), ignored)


async def _record(
    tx: Tx, rule_set_id: str, settings: Settings, compiled: CompiledSet, given: Mapping[str, Any]
) -> dict[str, Any]:
    """The facts as the log would hold them."""
    recorded = reading.record(settings.fields, given, path=PATH)
    counted = {fact.name: fact.kind for fact in settings.velocity if fact.name in given}
    wanted = [name for name in compiled.names if name not in counted]
    asked = service.ask_velocity(settings, wanted, recorded)
    found = await store.find_current(tx, rule_set_id, asked=[question for _, question in asked])
    if found is None:
        raise RuleSetNotFound(f"there is no rule set {rule_set_id}")
    _, now, numbers = found
    for (velocity, question), number in zip(asked, numbers, strict=True):
        recorded[velocity.name] = service.count_velocity(velocity, number, question)
    recorded |= reading.record(counted, given, path=PATH)
    recorded[NOW] = now.isoformat()
    moment = reading.record({NOW: Kind.INSTANT}, given, path=PATH) if NOW in given else {}
    return {**recorded, **moment}


def example(settings: Settings) -> dict[str, Any]:
    """Facts to begin with: one of each kind that the rule set knows."""
    return {name: EXAMPLES[kind] for name, kind in settings.fields.items()}
