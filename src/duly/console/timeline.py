"""Everything that happened to one entity, in one order; whoever keeps facts about entities adds a source."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Set
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from uuid import UUID

from duly.db import Tx
from duly.messages import may_read
from duly.operate.dead_letters import list_dead_letters
from duly.operate.events import EventEntry, list_events
from duly.operate.jobs import list_executions, list_jobs
from duly.operate.words import short
from duly.webhooks.look import host_of, list_of_events, list_tried

EACH = 100  # of each source, the newest
EPOCH = datetime.fromtimestamp(0, UTC)
UNIX_LIMIT = 253_402_300_799_000


@dataclass(frozen=True)
class Moment:
    """One thing that happened; ``href`` is an address under the console."""

    at: datetime
    kind: str
    title: str
    detail: str = ""
    href: str = ""
    tone: str = ""
    correlation_id: UUID | None = None


Roles = Set[str]
Source = Callable[[Tx, str, Roles], Awaitable[list[Moment]]]
SOURCES: dict[str, Source] = {}
TONES = {"done": "good", "duplicate": "good", "retried": "warn", "lost": "warn", "buried": "bad"}


def add_source(name: str, source: Source) -> None:
    """Let facts of another kind show up in the timelines."""
    SOURCES[name] = source


async def read_timeline(tx: Tx, entity_id: str, roles: Roles) -> list[Moment]:
    """The newest of every source, oldest first, each chain begun by the request or tick that it came from.

    Events that are closed to somebody with these roles are not among them.
    """
    found: list[Moment] = []
    for source in SOURCES.values():
        found += await source(tx, entity_id, roles)
    return sorted(found + _origins(found), key=lambda moment: (moment.at, moment.kind != "origin"))


def _origins(found: list[Moment]) -> list[Moment]:
    """A correlation id of ours begins with the time at which its request began."""
    first: dict[UUID, Moment] = {}
    for moment in sorted(found, key=lambda one: one.at):
        if moment.correlation_id is not None:
            first.setdefault(moment.correlation_id, moment)
    return [
        Moment(min(_time_of(id) or moment.at, moment.at), "origin", "Request or tick", f"correlation id {id}",
               correlation_id=id)
        for id, moment in first.items()
    ]  # fmt: skip


def _time_of(id: UUID) -> datetime | None:
    if id.version != 7:
        return None
    return EPOCH + timedelta(milliseconds=min(int(id.hex[:12], 16), UNIX_LIMIT))


async def _jobs(tx: Tx, entity_id: str, _roles: Roles) -> list[Moment]:
    return [
        Moment(
            job.created_at, "job", f"Job {job.id} {job.name}",
            f"{job.status}, {'runs' if job.status == 'Running' else 'waits'} ({job.waits})", f"/jobs/{job.id}",
            "warn" if job.status == "Failed" else "", job.correlation_id,
        )
        for job in await list_jobs(tx, entity_id=entity_id, limit=EACH)
    ]  # fmt: skip


async def _dead(tx: Tx, entity_id: str, _roles: Roles) -> list[Moment]:
    return [
        Moment(
            dead.buried_at, "dead letter", f"Job {dead.id} {dead.name}", f"{dead.error_kind}: {short(dead.error)}",
            f"/jobs/{dead.id}", "bad", dead.correlation_id,
        )
        for dead in await list_dead_letters(tx, entity_id=entity_id, limit=EACH)
    ]  # fmt: skip


async def _runs(tx: Tx, entity_id: str, _roles: Roles) -> list[Moment]:
    return [
        Moment(
            run.completed_at, "run", f"{run.name} {run.outcome}", short(run.message),
            f"/jobs/{run.job_id}/runs/{run.execution_id}", TONES.get(run.outcome, ""), run.correlation_id,
        )
        for run in await list_executions(tx, entity_id=entity_id, limit=EACH)
    ]  # fmt: skip


async def _list_open(tx: Tx, entity_id: str, roles: Roles) -> list[EventEntry]:
    found = await list_events(tx, aggregate_id=entity_id, limit=EACH)
    return [event for event in found if may_read(event.type, roles)]


async def _events(tx: Tx, entity_id: str, roles: Roles) -> list[Moment]:
    found = []
    for event in await _list_open(tx, entity_id, roles):
        tone = "bad" if event.status == "FAILED" else ""
        detail = f"{event.topic}, {event.status}"
        first = Moment(event.created_at, "event", f"Event {event.type}", detail, f"/events/{event.id}", tone)
        found.append(first)
        if event.published_at is not None:
            found.append(replace(first, at=event.published_at, kind="published", title=f"Published {event.type}"))
    return found


async def _webhooks(tx: Tx, entity_id: str, roles: Roles) -> list[Moment]:
    """What was made of the entity's events, and each attempt to deliver it."""
    events = await _list_open(tx, entity_id, roles)
    found = await list_of_events(tx, [event.id for event in events if event.published_at is not None], limit=EACH)
    named = {one.id: f"{one.event_type} to {host_of(url)}" for one, url in found}
    moments = [
        Moment(one.created_at, "webhook", f"Delivery of {named[one.id]}", one.status, f"/webhooks/deliveries/{one.id}",
               "bad" if one.status == "PERMANENTLY_FAILED" else "")
        for one, _ in found
    ]  # fmt: skip
    for tried in await list_tried(tx, list(named), limit=EACH) if named else []:
        tone = "good" if tried.outcome == "DELIVERED" else "warn"
        title = f"Attempt {tried.number}: {named[tried.delivery_id]}"
        detail = f"{tried.answer}, {tried.latency_ms} ms"
        href = f"/webhooks/deliveries/{tried.delivery_id}"
        moments.append(Moment(tried.started_at, "attempt", title, detail, href, tone))
    return moments


for _name, _source in (
    ("jobs", _jobs), ("dead letters", _dead), ("runs", _runs), ("events", _events), ("webhooks", _webhooks),
):  # fmt: skip
    add_source(_name, _source)
