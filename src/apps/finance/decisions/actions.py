"""What a risk administrator does with rules in the console: each audited in the transaction that does it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any
from uuid import UUID

from pydantic import BeforeValidator, Field

from apps.finance.decisions import service, store
from apps.finance.decisions.analysis import Finding
from apps.finance.decisions.model import LARGEST_SCORE, Outcome, RuleVersion
from apps.finance.decisions.views import SetName
from apps.shared.text import Name
from duly import Tx
from duly.http.bodies import read_json
from duly.operate import Action, Arguments, Result, write_audit

ROLE = "DECISION_ADMIN"
LARGEST_VERSION = 2_147_483_647


def parse_json(given: Any) -> Any:
    """JSON as a form sends it, read as the API reads it; ValueError says where it ends to be JSON."""
    if not isinstance(given, str):
        return given
    try:
        return read_json(given.encode())
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON: {error.msg} in line {error.lineno}, column {error.colno}") from None
    except UnicodeError:
        raise ValueError("it is not JSON: it has half of a surrogate pair") from None
    except ValueError as error:
        raise ValueError(f"it is not JSON that can be read: {error}") from None


def _ticked(given: Any) -> Any:
    """A box in a form is on, or not sent at all."""
    return True if given == "on" else given


Conditions = Annotated[dict[str, Any], BeforeValidator(parse_json)]
Ticked = Annotated[bool, BeforeValidator(_ticked)]
Version = Annotated[int, Field(ge=1, le=LARGEST_VERSION)]
Priority = Annotated[int, Field(ge=-1_000_000, le=1_000_000)]
Score = Annotated[int, Field(ge=-LARGEST_SCORE, le=LARGEST_SCORE)]


class RuleText(Arguments):
    """A rule as a form says it; ``says`` is the reason that a decision gives when the rule matched."""

    name: Name
    conditions: Conditions
    decision: Outcome | None = None
    score: Score | None = None
    says: Name | None = None
    priority: Priority = 0
    terminate: Ticked = False


class NewRule(RuleText):
    """A rule of a rule set."""

    rule_set_id: SetName


class NextVersion(RuleText):
    """Another version of a rule; an edit made from an old page is refused."""

    id: UUID
    expected_version: Version


class Activation(Arguments):
    """Which version is to decide, with its warnings or without any."""

    id: UUID
    version: Version
    acknowledge_warnings: Ticked = False


class OfRule(Arguments):
    """A rule."""

    id: UUID


async def _create(tx: Tx, given: NewRule, actor: str, reason: str | None) -> Result:
    record, findings = await service.create_rule(tx, given.rule_set_id, written=_written(given), actor=actor)
    await write_audit(
        tx, actor=actor, action="rule.created", subject=f"rule:{record.id}", reason=reason, after=_facts(record.newest)
    )
    return Result(f"made {record.newest.name} as a draft{_warn(findings)}", page=f"/rules/{record.id}")


async def _change(tx: Tx, given: NextVersion, actor: str, reason: str | None) -> Result:
    record, findings = await service.change_rule(
        tx, given.id, written=_written(given), expected_version=given.expected_version, actor=actor
    )
    before = await service.find_version(tx, record, given.expected_version)
    await write_audit(
        tx, actor=actor, action="rule.changed", subject=f"rule:{given.id}", reason=reason, before=_facts(before),
        after=_facts(record.newest),
    )  # fmt: skip
    page = f"/rules/{given.id}/diff?from={before.version}&to={record.version}"
    return Result(f"wrote version {record.version} of {record.newest.name}{_warn(findings)}", page=page)


async def _activate(tx: Tx, given: Activation, actor: str, reason: str | None) -> Result:
    await store.lock_changes(tx)  # what decides now is still what decided when the new version does
    before = (await service.read_rule_record(tx, given.id)).active_version
    record, _ = await service.activate_rule(
        tx, given.id, version=given.version, acknowledge_warnings=given.acknowledge_warnings, actor=actor
    )
    await write_audit(
        tx, actor=actor, action="rule.activated", subject=f"rule:{given.id}", reason=reason,
        before={"active_version": before}, after={"active_version": record.active_version},
    )  # fmt: skip
    return Result(f"version {given.version} of {record.newest.name} decides now", page=f"/rules/{given.id}")


async def _deprecate(tx: Tx, given: OfRule, actor: str, reason: str | None) -> Result:
    await store.lock_changes(tx)
    before = (await service.read_rule_record(tx, given.id)).status
    record = await service.deprecate_rule(tx, given.id, actor=actor)
    await write_audit(
        tx, actor=actor, action="rule.deprecated", subject=f"rule:{given.id}", reason=reason,
        before={"status": before.value}, after={"status": record.status.value},
    )  # fmt: skip
    return Result(f"{record.newest.name} decides no more", page=f"/rules/{given.id}")


def _written(given: RuleText) -> dict[str, Any]:
    action = {"decision": given.decision and given.decision.value, "score": given.score, "reason": given.says}
    return {
        "name": given.name, "conditions": given.conditions, "priority": given.priority, "terminate": given.terminate,
        "action": {name: value for name, value in action.items() if value is not None},
    }  # fmt: skip


def _facts(version: RuleVersion) -> Mapping[str, Any]:
    return {
        "version": version.version, "name": version.name, "priority": version.priority,
        "terminate": version.terminate, "action": dict(version.action), "conditions": version.conditions,
    }  # fmt: skip


def _warn(findings: Sequence[Finding]) -> str:
    warnings = sum(finding.is_warning for finding in findings)
    return f"; to activate it, {warnings} warning{'s' if warnings > 1 else ''} must be acknowledged" if warnings else ""


ACTIONS = (
    Action("rules.create", "Make a rule: a draft, which decides nothing yet.", NewRule, _create, verb="Make a draft"),
    Action(
        "rules.change", "Write the next version of a rule; the one that decides stays until the new one is activated.",
        NextVersion, _change, verb="Save as a new version",
    ),
    Action(
        "rules.activate", "From now on, this version of the rule decides.",
        Activation, _activate, True, verb="Activate", needs_reason=True,
    ),
    Action(
        "rules.deprecate", "From now on, the rule decides nothing; that is final.",
        OfRule, _deprecate, True, verb="Deprecate", needs_reason=True,
    ),
)  # fmt: skip
