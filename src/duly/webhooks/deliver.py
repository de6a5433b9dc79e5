"""The delivery job: reads what it needs, sends without a transaction, and records the attempt with the job's end."""

from __future__ import annotations

import json
import os
import random
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from importlib.metadata import version
from typing import Any
from uuid import UUID

import structlog

from duly.db import Database, Tx, fetch
from duly.failpoints import failpoint
from duly.inbox.receive import as_event
from duly.jobs.handlers import Handler, JobContext, TxKind
from duly.jobs.outcomes import Cancel, Done, Outcome, Snooze, Then
from duly.jobs.schedule import schedule
from duly.messages import Event, to_cloudevent
from duly.settings import Settings
from duly.telemetry import WEBHOOK_ATTEMPTS, WEBHOOK_SECONDS
from duly.webhooks import sql
from duly.webhooks.addresses import Allowed
from duly.webhooks.admit import (
    DELIVER_JOB,
    JOB_BACKOFF_SECONDS,
    JOB_RETRIES,
    RESUME_JOB,
    admit,
    lock,
    share_of,
)
from duly.webhooks.model import FINISHED, Verdict, after_failure, after_success, judge
from duly.webhooks.sealing import Keyring, Sealed, subscription_place
from duly.webhooks.sender import Answer, Sender
from duly.webhooks.signing import headers_for

log = structlog.get_logger("duly.webhooks")
LEASE_SECONDS = 60.0
JOB_SECONDS = 50.0  # the longest time-out of a subscription, and names and databases that take their time
USER_AGENT = f"duly/{version('duly')}"
SUPERSEDED = Cancel("another job has this delivery now")


@dataclass(frozen=True)
class Task:
    """What one attempt needs to know. Its secrets are in no repr."""

    id: UUID
    turn: int
    tries: int
    subscription_id: UUID
    url: str
    timeout_seconds: float
    now: datetime
    event: Event | None
    secrets: Sequence[tuple[int, Sealed]] = field(repr=False)


@dataclass(frozen=True)
class Sent:
    """An attempt that was made."""

    task: Task
    started_at: datetime
    headers: Mapping[str, str]
    size: int
    answer: Answer


class Deliverer:
    """Delivers for one process."""

    def __init__(self, settings: Settings, *, sender: Sender | None = None, keyring: Keyring | None = None) -> None:
        self._settings = settings
        self._most = share_of(settings.webhook_concurrency)
        self._disable_after = timedelta(days=settings.webhook_disable_days)
        self._sender = sender
        self._keyring = keyring

    def create_handler(self) -> Handler:
        """The handler of the delivery job."""
        return Handler(
            DELIVER_JOB, self.deliver, TxKind.OWN, True, True, JOB_RETRIES, list(JOB_BACKOFF_SECONDS), JOB_SECONDS
        )

    async def deliver(self, ctx: JobContext, db: Database) -> Outcome | Then:
        """One attempt, unless it is not this delivery's time."""
        id = UUID(ctx.entity_id or "")
        async with db.transaction() as tx:
            found = await self._begin(tx, id, int(ctx.payload["turn"]))
        if not isinstance(found, Task):
            return found
        if found.event is None:
            return Then(lambda tx: self._give_up(tx, found))
        sent = await self._send(found, found.event, ctx)
        failpoint("webhook.sent")
        return Then(lambda tx: self._record(tx, sent))

    async def _begin(self, tx: Tx, id: UUID, turn: int) -> Task | Outcome:
        """What is to be sent; or why nothing is. Without locks, when all is as usual."""
        rows = await fetch(tx, sql.READ_DELIVERY, id=id)
        if not rows:
            return Cancel("there is no such delivery any more")
        row = rows[0]
        status, its_turn, tries, subscription_id, standing, url, timeout_seconds, is_open, now = row[:9]
        if its_turn != turn or status not in ("QUEUED", "RETRYING"):
            return SUPERSEDED
        if status == "RETRYING" or standing != "ACTIVE" or is_open:
            await lock(tx, [subscription_id])
            placed = await fetch(tx, sql.TAKE_PLACE, id=id, turn=turn, subscription_id=subscription_id, most=self._most)
            if not placed:
                return SUPERSEDED
            if placed[0][0] != "QUEUED":
                return Done(f"not sent: it is {placed[0][0]}")
        event = as_event(row[12:19]) if row[12] is not None else None
        secrets = [(number, Sealed(key, bytes(sealed))) for number, key, sealed in zip(*row[9:12], strict=True)]
        return Task(id, turn, tries, subscription_id, url, timeout_seconds, now, event, secrets)

    async def _send(self, task: Task, event: Event, ctx: JobContext) -> Sent:
        keyring = self._keyring = self._keyring or Keyring.open(self._settings)
        secrets = [
            keyring.unseal(sealed, place=subscription_place(task.subscription_id, number))
            for number, sealed in task.secrets
        ]
        body = encode_body(event)
        headers = headers_for(
            secrets, event_id=str(event.id), event_type=event.type, delivery_id=str(task.id),
            timestamp=int(task.now.timestamp()), body=body,
        )  # fmt: skip
        headers |= {"User-Agent": USER_AGENT, **_origin_headers(event)}
        started_at = ctx.started_at
        failpoint("webhook.before_send")
        answer = await self._sending().send(task.url, headers=headers, body=body, timeout_seconds=task.timeout_seconds)
        WEBHOOK_ATTEMPTS.labels(answer.error or "delivered").inc()
        WEBHOOK_SECONDS.observe(answer.latency_ms / 1000)
        return Sent(task, started_at, headers, len(body), answer)

    def _sending(self) -> Sender:
        if self._sender is None:
            self._sender = Sender(allowed_by(self._settings), threads=self._settings.webhook_concurrency)
        return self._sender

    async def _record(self, tx: Tx, sent: Sent) -> Outcome:
        """Attempt, delivery, standing and the next admissions: one commit with the job's end."""
        task, answer = sent.task, sent.answer
        (held,) = await lock(tx, [task.subscription_id])
        verdict = judge(
            delivered=answer.delivered, tries=task.tries, http_status=answer.http_status,
            retry_after=answer.retry_after,
        )  # fmt: skip
        if not await fetch(tx, sql.RECORD_ATTEMPT, **_attempt_values(sent, verdict)):
            return SUPERSEDED
        before = held.standing
        if answer.delivered:
            after = after_success(before)
        else:
            after = after_failure(
                before, now=held.now, http_status=answer.http_status, disable_after=self._disable_after,
                jitter=random.random(),  # noqa: S311 - jitter, not a secret
            )  # fmt: skip
        if after != before:
            await fetch(tx, sql.NOTE_STANDING, id=task.subscription_id, **vars(after))
        if verdict.status == "PERMANENTLY_FAILED" and before.status != "DELETED":  # nobody could repair that
            message = f"{sent.headers['X-Event-Type']} was not taken in {verdict.tries} tries; the last: {answer.error}"
            await fetch(tx, sql.RAISE_ALERT, kind="webhook_failed", subject=str(task.subscription_id), message=message)
        if after.status == "DISABLED" and before.status != "DISABLED":
            await _tell_disabled(tx, task.subscription_id, after.disabled_reason or "")
        if after.open_until is not None and after.open_until != before.open_until:
            await schedule(tx, RESUME_JOB, task.subscription_id, after.open_until)
        await admit(tx, [task.subscription_id], most=self._most)
        failpoint("webhook.recorded")
        return _outcome(verdict, answer)

    async def _give_up(self, tx: Tx, task: Task) -> Outcome:
        """The event is no longer in the history: there is nothing to send."""
        await lock(tx, [task.subscription_id])
        error = "event_gone"
        if not await fetch(tx, sql.END_DELIVERY, id=task.id, turn=task.turn, status="PERMANENTLY_FAILED", error=error):
            return SUPERSEDED
        message = "an event was removed from the history before it was delivered"
        await fetch(tx, sql.RAISE_ALERT, kind="webhook_failed", subject=str(task.subscription_id), message=message)
        await admit(tx, [task.subscription_id], most=self._most)
        return Done("the event is no longer in the history")

    async def resume(self, tx: Tx, subscription_id: UUID) -> int:
        """The circuit may close: let what there is room for go, which is one while it fails."""
        await lock(tx, [subscription_id])
        return await admit(tx, [subscription_id], most=self._most)


def encode_body(event: Event) -> bytes:
    """The same bytes at every attempt: CloudEvents 1.0 in JSON."""
    return json.dumps(to_cloudevent(event), ensure_ascii=False, separators=(",", ":")).encode()


def allowed_by(settings: Settings) -> Allowed:
    """What the settings let webhooks reach."""
    return Allowed.read(
        settings.webhook_allow_private, development=settings.env == "development", http=settings.webhook_allow_http
    )


def _origin_headers(event: Event) -> dict[str, str]:
    """The ids that tie the call to whatever caused it (E5.4)."""
    found = {"X-Correlation-Id": event.headers.get("correlation_id"), "traceparent": event.headers.get("traceparent")}
    return {
        name: text for name, text in found.items() if isinstance(text, str) and text.isascii() and text.isprintable()
    }


def _attempt_values(sent: Sent, verdict: Verdict) -> dict[str, Any]:
    task, answer = sent.task, sent.answer
    return {
        "id": task.id,
        "turn": task.turn,
        "status": verdict.status,
        "tries": verdict.tries,
        "wait_seconds": verdict.wait.total_seconds() if verdict.wait is not None else None,
        "is_finished": verdict.status in FINISHED,
        "http_status": answer.http_status,
        "error": answer.error,
        "outcome": "DELIVERED" if answer.delivered else "FAILED",
        "started_at": sent.started_at,
        "latency_ms": answer.latency_ms,
        "address": answer.address,
        "request_headers": json.dumps(dict(sent.headers)),
        "request_bytes": sent.size,
        "response_headers": json.dumps(dict(answer.response_headers)),
        "response_excerpt": answer.response_excerpt,
        "worker": f"{socket.gethostname()}:{os.getpid()}",
    }


async def _tell_disabled(tx: Tx, id: UUID, reason: str) -> None:
    log.warning("webhook_disabled", subscription_id=str(id), reason=reason)
    await fetch(tx, sql.RAISE_ALERT, kind="webhook_disabled", subject=str(id), message=reason)
    await fetch(tx, sql.AUDIT_DISABLING, id=str(id), reason=reason)


def _outcome(verdict: Verdict, answer: Answer) -> Outcome:
    said = answer.error or "delivered"
    if answer.http_status is not None:
        said = f"{said} ({answer.http_status})"
    if verdict.wait is not None:
        return Snooze(verdict.wait, said)
    return Done(said)
