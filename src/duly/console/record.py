"""What people did, for whoever looks: an operator sees no payload and no address here, as on every other page."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence, Set
from typing import TYPE_CHECKING, Any

from fastapi import Request

from duly.console.routes import may_act, signed_in
from duly.messages import may_read
from duly.operate.audit import AuditEntry, list_audit
from duly.operate.dead_letters import DeadLetter
from duly.operate.events import EventEntry
from duly.operate.jobs import QueuedJob
from duly.schedules.edit import ScheduleRow
from duly.webhooks.subscriptions import Subscription

if TYPE_CHECKING:
    from duly.console.app import Look

HIDDEN = "hidden"
EVENT = "event:"
# What an operator's pages show anyway. Whatever else was written down, by an application perhaps, stays closed.
SHOWN = {
    field.name
    for kind in (QueuedJob, DeadLetter, EventEntry, ScheduleRow, Subscription)
    for field in dataclasses.fields(kind)
} | {"count", "since", "until", "only_failed"}
SHOWN -= {"payload", "url"}


async def read_audit(
    request: Request, look: Look, *, subject: str | None = None, before: int | None = None, limit: int
) -> list[AuditEntry]:
    """One page of it, the newest first; who may act in the section that asks sees all of what it wrote down."""
    return for_viewer(request, await list_audit(look.tx, subject=subject, before=before, limit=limit))


def for_viewer(request: Request, found: Sequence[AuditEntry]) -> list[AuditEntry]:
    """The same for whoever asks."""
    session = signed_in(request)
    is_open = session.may_act or may_act(request)
    return [seen_by(entry, session.roles, is_open=is_open) for entry in found]


def seen_by(entry: AuditEntry, roles: Set[str], *, is_open: bool) -> AuditEntry:
    """An action for somebody with these roles: nothing of a closed event, and no payloads for who may only look."""
    kinds = {str(facts.get("type", "")) for facts in (_read(entry.before), _read(entry.after))}
    if entry.subject.startswith(EVENT) and not all(may_read(kind, roles) for kind in kinds):
        return dataclasses.replace(
            entry, before=entry.before and f'"{HIDDEN}"', after=entry.after and f'"{HIDDEN}"'
        )  # fmt: skip
    return entry if is_open else veiled(entry)


def veiled(entry: AuditEntry) -> AuditEntry:
    """The same action with the names of everything that changed, and the values of what an operator may see."""
    before, after = _read(entry.before), _read(entry.after)
    secret = {name for name in {**before, **after} if name not in SHOWN}
    changed = {name for name in secret if before.get(name) != after.get(name)}
    before |= dict.fromkeys(secret & set(before), HIDDEN)
    after |= {name: f"{HIDDEN}, and not as before" if name in changed else HIDDEN for name in secret & set(after)}
    return dataclasses.replace(
        entry,
        before=json.dumps(before, ensure_ascii=False) if entry.before is not None else None,
        after=json.dumps(after, ensure_ascii=False) if entry.after is not None else None,
    )


def _read(text: str | None) -> dict[str, Any]:
    """What was written down; a number that is not whole stays as it is written."""
    found = json.loads(text, parse_float=str) if text is not None else {}
    return found if isinstance(found, dict) else {"": found}
