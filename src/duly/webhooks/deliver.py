"""The delivery job: reads what it needs, sends without a transaction, and records the attempt with the job's end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from datetime import timedelta
from importlib.metadata import version
from typing import Any
from uuid import UUID

from duly.db import Database, Tx, fetch
from duly.failpoints import failpoint
from duly.gather import Gather
from duly.inbox.receive import as_event
from duly.jobs.handlers import Handler, JobContext, TxKind
from duly.jobs.outcomes import Cancel, Done, Outcome, ThenTogether
from duly.jobs.together import wait_for_locks
from duly.messages import Event, is_internal, to_cloudevent
from duly.settings import Settings
from duly.telemetry import WEBHOOK_ATTEMPTS, WEBHOOK_SECONDS
from duly.webhooks import sql
from duly.webhooks.addresses import Allowed
from duly.webhooks.admit import DELIVER_JOB, JOB_BACKOFF_SECONDS, JOB_RETRIES, admit, lock, share_of
from duly.webhooks.record import SUPERSEDED, Sent, Task, record
from duly.webhooks.sealing import Keyring, Sealed, subscription_place
from duly.webhooks.sender import Sender
from duly.webhooks.signing import headers_for

LEASE_SECONDS = 60.0
JOB_SECONDS = 50.0  # the longest time-out of a subscription, and names and databases that take their time
PLACES_AT_ONCE = 3  # a subscription that somebody has locked leaves sessions to the others
PLACE_LOCK_SECONDS = 2.0
USER_AGENT = f"duly/{version('duly')}"


class _Reader:
    """What the deliveries of one worker share: they read together, and only so many wait for a lock."""

    def __init__(self, db: Database) -> None:
        self.db = db
        self.rows: Gather[UUID, Any] = Gather(self._read)
        self.places = asyncio.Semaphore(PLACES_AT_ONCE)

    async def _read(self, ids: list[UUID]) -> list[Any]:
        """A row, or None, for each."""
        async with self.db.transaction() as tx:
            rows = {row[0]: row for row in await fetch(tx, sql.READ_DELIVERIES, ids=ids)}
        return [rows.get(id) for id in ids]


class Deliverer:
    """Delivers for one process."""

    def __init__(self, settings: Settings, *, sender: Sender | None = None, keyring: Keyring | None = None) -> None:
        self._settings = settings
        self._most = share_of(settings.webhook_concurrency)
        self._disable_after = timedelta(days=settings.webhook_disable_days)
        self._sender = sender
        self._keyring = keyring
        self._reader: _Reader | None = None

    def create_handler(self) -> Handler:
        """The handler of the delivery job."""
        return Handler(
            DELIVER_JOB, self.deliver, TxKind.OWN, True, True, JOB_RETRIES, list(JOB_BACKOFF_SECONDS), JOB_SECONDS
        )

    async def deliver(self, ctx: JobContext, db: Database) -> Outcome | ThenTogether:
        """One attempt, unless it is not this delivery's time."""
        found = await self._begin(db, UUID(ctx.entity_id or ""), int(ctx.payload["turn"]))
        if not isinstance(found, Task):
            return found
        if found.event is None:
            return ThenTogether(self._record, found)
        sent = await self._send(found, found.event, ctx)
        failpoint("webhook.sent")
        return ThenTogether(self._record, sent)

    async def _begin(self, db: Database, id: UUID, turn: int) -> Task | Outcome:
        """What is to be sent; or why nothing is. Without locks, when all is as usual."""
        row = await self._reading(db).rows.ask(id)
        if row is None:
            return Cancel("there is no such delivery any more")
        status, its_turn, tries, subscription_id, standing, url, timeout_seconds, is_open, now = row[1:10]
        if its_turn != turn or status not in ("QUEUED", "RETRYING"):
            return SUPERSEDED
        if status == "RETRYING" or standing != "ACTIVE" or is_open:
            async with self._reading(db).places, db.transaction() as tx:
                await wait_for_locks(tx, seconds=PLACE_LOCK_SECONDS)
                await lock(tx, [subscription_id])
                placed = await fetch(
                    tx, sql.TAKE_PLACE, id=id, turn=turn, subscription_id=subscription_id, most=self._most
                )
            if not placed:
                return SUPERSEDED
            if placed[0][0] != "QUEUED":
                return Done(f"not sent: it is {placed[0][0]}")
        hidden = row[13] is not None and is_internal(row[14])  # it was declared so after the delivery was made
        event = as_event(row[13:20]) if row[13] is not None and not hidden else None
        secrets = [(number, Sealed(key, bytes(sealed))) for number, key, sealed in zip(*row[10:13], strict=True)]
        return Task(id, turn, tries, subscription_id, url, timeout_seconds, now, event, secrets, hidden)

    def _reading(self, db: Database) -> _Reader:
        if self._reader is None or self._reader.db is not db:
            self._reader = _Reader(db)
        return self._reader

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

    async def _record(self, tx: Tx, ended: Sequence[Sent | Task]) -> list[Outcome]:
        return await record(tx, ended, most=self._most, disable_after=self._disable_after)

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
