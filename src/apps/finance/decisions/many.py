"""Deciding about many things at once: three statements, however many there are.

Facts come from the caller alone: what a rule set says about streams of observations is of now, and these are of then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from apps.finance.decisions import facts as reading
from apps.finance.decisions import store
from apps.finance.decisions.compiled import ENGINE
from apps.finance.decisions.deciding import decide
from apps.finance.decisions.loading import Loaded
from apps.finance.decisions.model import NOW, Decision, RuleSetNotFound
from apps.finance.decisions.service import find_snapshot
from duly import Tx


@dataclass(frozen=True)
class Question:
    """What is decided about; ``at`` is when it happened, which the rules take for now, however late it is."""

    facts: Mapping[str, Any]
    subject: str
    at: datetime


@dataclass(frozen=True)
class InForce:
    """A rule set as it is in force, and what time it is while it decides."""

    loaded: Loaded
    now: datetime

    @property
    def names(self) -> frozenset[str]:
        """The facts that some rule asks for: nobody needs to measure others."""
        return frozenset(self.loaded.compiled.names)

    def trace(self, decision: Decision) -> list[dict[str, Any]]:
        """What each rule and each condition said."""
        return self.loaded.compiled.trace(decision.facts)


async def find_in_force(tx: Tx, rule_set_id: str) -> InForce:
    """What decides now; one statement, unless it has changed since this process looked last."""
    found = await store.find_current(tx, rule_set_id, asked=[])
    if found is None:
        raise RuleSetNotFound(f"there is no rule set {rule_set_id}")
    snapshot_id, now, _ = found
    return InForce(await find_snapshot(tx, snapshot_id), now)


async def evaluate_many(tx: Tx, rules: InForce, questions: Sequence[Question]) -> list[Decision]:
    """Decide about each, and log all of it in one statement."""
    if not questions:
        return []
    loaded, made = rules.loaded, []
    for question in questions:
        recorded = reading.record(loaded.settings.fields, question.facts)
        recorded[NOW] = question.at.isoformat()
        made.append(decide(loaded, recorded, question.subject))
    ids = await store.insert_decisions(
        tx,
        {"rule_set_id": loaded.rule_set_id, "rule_set_version": loaded.version, "snapshot_id": loaded.id,
         "engine": ENGINE, "at": rules.now},
        [one.as_row() for one in made],
    )  # fmt: skip
    return [one.as_logged(decision_id, rules.now) for decision_id, one in zip(ids, made, strict=True)]
