"""What attempts came to: attempts, deliveries, standings, alerts and the next admissions in one commit.

Many attempts at once, of any subscriptions, in a number of statements that does not grow with them.
"""

from __future__ import annotations

import json
import os
import random
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import structlog

from duly.db import fetch
from duly.failpoints import failpoint
from duly.jobs.outcomes import Cancel, Done, Outcome, Snooze
from duly.jobs.schedule import NewJob, schedule_many
from duly.messages import Event
from duly.webhooks import sql
from duly.webhooks.admit import RESUME_JOB, Locked, admit, lock
from duly.webhooks.model import FINISHED, Standing, Verdict, after_failure, after_success, judge
from duly.webhooks.sealing import Sealed
from duly.webhooks.sender import Answer

log = structlog.get_logger("duly.webhooks")
SUPERSEDED = Cancel("another job has this delivery now")
GONE = Done("the event is no longer in the history, or is not for anybody outside")


@dataclass(frozen=True)
class Task:
    """What one attempt needs to know; without an event, it is gone or internal. Its secrets are in no repr."""

    id: UUID
    turn: int
    tries: int
    subscription_id: UUID
    url: str
    timeout_seconds: float
    now: datetime
    event: Event | None
    secrets: Sequence[tuple[int, Sealed]] = field(repr=False)
    is_internal: bool = False


@dataclass(frozen=True)
class Sent:
    """An attempt that was made."""

    task: Task
    started_at: datetime
    headers: Mapping[str, str]
    size: int
    answer: Answer

    @property
    def verdict(self) -> Verdict:
        """What becomes of its delivery."""
        answer = self.answer
        return judge(
            delivered=answer.delivered, tries=self.task.tries, http_status=answer.http_status,
            retry_after=answer.retry_after,
        )  # fmt: skip


@dataclass(frozen=True)
class Alert:
    """Something for an operator."""

    kind: str
    subscription_id: UUID
    message: str


async def record(tx: Any, ended: Sequence[Sent | Task], *, most: int, disable_after: timedelta) -> list[Outcome]:
    """Attempts that were made, and tasks that had nothing to send; how each job ends."""
    sent = [one for one in ended if isinstance(one, Sent)]
    gone = [one for one in ended if isinstance(one, Task)]
    touched = sorted({one.subscription_id for one in gone} | {one.task.subscription_id for one in sent})
    held = await lock(tx, touched)
    alerts: list[Alert] = []
    written: set[UUID] = set()
    if sent:
        written |= await _record_sent(tx, sent, held, disable_after, alerts)
    if gone:
        written |= await _give_up(tx, gone, held, alerts)
    await raise_alerts(tx, alerts)
    await admit(tx, touched, most=most)
    failpoint("webhook.recorded")
    return [_outcome(one, written) for one in ended]


def repairable(held: Sequence[Locked]) -> set[UUID]:
    """Those whose failed deliveries somebody could send again: not the deleted."""
    return {one.id for one in held if one.standing.status != "DELETED"}


async def raise_alerts(tx: Any, alerts: Sequence[Alert]) -> None:
    """All in one statement."""
    if alerts:
        await fetch(
            tx, sql.RAISE_ALERTS,
            kinds=[one.kind for one in alerts],
            subjects=[str(one.subscription_id) for one in alerts],
            messages=[one.message for one in alerts],
        )  # fmt: skip


async def _record_sent(
    tx: Any, sent: Sequence[Sent], held: Sequence[Locked], disable_after: timedelta, alerts: list[Alert]
) -> set[UUID]:
    rows = await fetch(tx, sql.RECORD_ATTEMPTS, **_attempt_values(sent))
    written = {row[0] for row in rows}
    changed: dict[UUID, tuple[Standing, Standing]] = {}
    told = repairable(held)
    for locked in held:
        those = [one for one in sent if one.task.subscription_id == locked.id and one.task.id in written]
        after = locked.standing
        for one in those:
            after = _after(after, one.answer, locked.now, disable_after)
            if one.verdict.status == "PERMANENTLY_FAILED" and locked.id in told:
                alerts.append(Alert("webhook_failed", locked.id, _failure(one)))
        if after != locked.standing:
            changed[locked.id] = (locked.standing, after)
    if changed:
        await _note_standings(tx, changed, alerts)
    return written


def _after(before: Standing, answer: Answer, now: datetime, disable_after: timedelta) -> Standing:
    if answer.delivered:
        return after_success(before)
    return after_failure(
        before, now=now, http_status=answer.http_status, disable_after=disable_after,
        jitter=random.random(),  # noqa: S311 - jitter, not a secret
    )  # fmt: skip


def _failure(sent: Sent) -> str:
    return f"{sent.headers['X-Event-Type']} was not taken in {sent.verdict.tries} tries; the last: {sent.answer.error}"


async def _note_standings(tx: Any, changed: Mapping[UUID, tuple[Standing, Standing]], alerts: list[Alert]) -> None:
    names = ("status", "failures", "failing_since", "open_until", "disabled_reason")
    columns = {name: [getattr(after, name) for _, after in changed.values()] for name in names}
    await fetch(tx, sql.NOTE_STANDINGS, ids=list(changed), **columns)
    resumes = []
    for id, (before, after) in changed.items():
        if after.status == "DISABLED" and before.status != "DISABLED":
            reason = after.disabled_reason or ""
            log.warning("webhook_disabled", subscription_id=str(id), reason=reason)
            alerts.append(Alert("webhook_disabled", id, reason))
            await fetch(tx, sql.AUDIT_DISABLING, id=str(id), reason=reason)
        if after.open_until is not None and after.open_until != before.open_until:
            resumes.append(NewJob(RESUME_JOB, id, after.open_until))
    await schedule_many(tx, resumes)


async def _give_up(tx: Any, gone: Sequence[Task], held: Sequence[Locked], alerts: list[Alert]) -> set[UUID]:
    """Their events are no longer in the history, or are internal by now: there is nothing to send."""
    written: set[UUID] = set()
    for error, hidden in (("event_gone", False), ("event_internal", True)):
        ids = [one.id for one in gone if one.is_internal is hidden]
        turns = [one.turn for one in gone if one.is_internal is hidden]
        if ids:
            written |= {row[0] for row in await fetch(tx, sql.END_DELIVERIES, ids=ids, turns=turns, error=error)}
    message = "an event was removed from the history before it was delivered"
    told = repairable(held)
    alerts += [
        Alert("webhook_failed", one.subscription_id, message)
        for one in gone
        if one.id in written and one.subscription_id in told and not one.is_internal
    ]
    return written


def _attempt_values(sent: Sequence[Sent]) -> dict[str, Any]:
    verdicts = [one.verdict for one in sent]
    answers = [one.answer for one in sent]
    return {
        "ids": [one.task.id for one in sent],
        "turns": [one.task.turn for one in sent],
        "statuses": [verdict.status for verdict in verdicts],
        "tries": [verdict.tries for verdict in verdicts],
        "waits_seconds": [verdict.wait.total_seconds() if verdict.wait else None for verdict in verdicts],
        "are_finished": [verdict.status in FINISHED for verdict in verdicts],
        "http_statuses": [answer.http_status for answer in answers],
        "errors": [answer.error for answer in answers],
        "outcomes": ["DELIVERED" if answer.delivered else "FAILED" for answer in answers],
        "started_ats": [one.started_at for one in sent],
        "latencies_ms": [answer.latency_ms for answer in answers],
        "addresses": [answer.address for answer in answers],
        "requests_headers": [json.dumps(dict(one.headers)) for one in sent],
        "requests_bytes": [one.size for one in sent],
        "responses_headers": [json.dumps(dict(answer.response_headers)) for answer in answers],
        "response_excerpts": [answer.response_excerpt for answer in answers],
        "worker": f"{socket.gethostname()}:{os.getpid()}",
    }


def _outcome(ended: Sent | Task, written: set[UUID]) -> Outcome:
    if isinstance(ended, Task):
        return GONE if ended.id in written else SUPERSEDED
    if ended.task.id not in written:
        return SUPERSEDED
    said = ended.answer.error or "delivered"
    if ended.answer.http_status is not None:
        said = f"{said} ({ended.answer.http_status})"
    wait = ended.verdict.wait
    return Done(said) if wait is None else Snooze(wait, said)
