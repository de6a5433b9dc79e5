"""Which deliveries may go now: a few of each subscriber at a time, so that nobody waits behind somebody else's.

Everything that waits is a row; only what is admitted has a job. Whoever ends an attempt, or changes what a subscriber
may have, admits what follows in the same commit, with the subscription locked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from duly.db import fetch
from duly.ids import uuid7s
from duly.inbox.receive import Consumer, matches
from duly.jobs.handlers import TxKind
from duly.jobs.schedule import NewJob, schedule_many
from duly.messages import Event, is_internal
from duly.webhooks import sql
from duly.webhooks.model import Standing

CONSUMER = "duly.webhooks"
DELIVER_JOB = "duly.deliver-webhook"
RESUME_JOB = "duly.resume-webhooks"
FAN_OUT_BATCH = 200
JOB_RETRIES = 20  # of the job, when its worker dies or the database is away: tries are the delivery's own
JOB_BACKOFF_SECONDS = (2, 10, 30, 60, 300)


@dataclass(frozen=True)
class Locked:
    """A subscription that this transaction holds."""

    id: UUID
    standing: Standing
    now: datetime


async def lock(tx: Any, ids: Sequence[UUID]) -> list[Locked]:
    """Hold these, in order of their ids: everybody who takes several takes them in this order."""
    rows = await fetch(tx, sql.LOCK_SUBSCRIPTIONS, ids=list(ids))
    return [Locked(row[0], Standing(row[1], row[2], row[3], row[4], row[5]), row[6]) for row in rows]


async def admit(tx: Any, ids: Sequence[UUID], *, most: int) -> int:
    """Give jobs to as many waiting deliveries as there is room for, oldest first. The subscriptions are locked."""
    rows = await fetch(tx, sql.ADMIT, ids=list(ids), most=most)
    jobs = [NewJob(DELIVER_JOB, id, payload={"turn": turn}) for id, turn in rows]
    # Not unique: a job of an earlier turn may still be there, and finds that it is not its turn.
    await schedule_many(
        tx, jobs, on_conflict="allow", max_retries=JOB_RETRIES, backoff=list(map(float, JOB_BACKOFF_SECONDS))
    )
    return len(jobs)


def share_of(concurrency: int) -> int:
    """How many slots one subscriber may have at most: half of a worker's."""
    return max(1, concurrency // 2)


async def fan_out(tx: Any, events: Sequence[Event], *, most: int) -> int:
    """A delivery for each event and each subscription that wants it; five statements, however many of either.

    What is internal is wanted by nobody, whatever a pattern says.
    """
    events = [event for event in events if not is_internal(event.type)]
    if not events:
        return 0
    wanted = await fetch(tx, sql.READ_WANTED)
    pairs = [
        (event, id)
        for event in events
        for id, patterns, created_at in wanted
        if created_at <= event.created_at
        and any(matches(pattern, type_=event.type, topic=event.topic) for pattern in patterns)
    ]
    if not pairs:
        return 0
    rows = await fetch(
        tx, sql.ADD_DELIVERIES,
        ids=uuid7s(len(pairs)),
        subscription_ids=[id for _, id in pairs],
        event_ids=[event.id for event, _ in pairs],
        event_types=[event.type for event, _ in pairs],
        aggregate_ids=[event.aggregate_id for event, _ in pairs],
        event_created_ats=[event.created_at for event, _ in pairs],
    )  # fmt: skip
    touched = sorted({row[0] for row in rows})
    if touched:
        await lock(tx, touched)
        await admit(tx, touched, most=most)
    return len(rows)


def create_consumer(concurrency: int) -> Consumer:
    """The consumer of everything that anybody subscribed to; its patterns are kept by ``subscriptions``."""

    async def spread(events: list[Event], tx: Any) -> None:
        await fan_out(tx, events, most=share_of(concurrency))

    return Consumer(
        f"consumer:{CONSUMER}", spread, TxKind.SESSION, True, True, JOB_RETRIES, list(JOB_BACKOFF_SECONDS),
        batch=FAN_OUT_BATCH, consumer=CONSUMER, patterns=[], keeps_patterns=True,
    )  # fmt: skip
