"""The facts of decisions; the only door for other contexts. Who screens whom, and how, is nobody's business outside."""

from __future__ import annotations

from uuid import UUID

from duly import EventBody

TOPIC = "decision.events"


class RuleActivated(EventBody, type="decision.rule.activated", topic=TOPIC, aggregate="rule_id", internal=True):
    """From now on this version of the rule decides."""

    rule_id: UUID
    rule_set_id: str
    version: int
    rule_set_version: int
    actor: str


class RuleWasDeprecated(EventBody, type="decision.rule.deprecated", topic=TOPIC, aggregate="rule_id", internal=True):
    """The rule decides no more, and never will again."""

    rule_id: UUID
    rule_set_id: str
    rule_set_version: int
    actor: str
