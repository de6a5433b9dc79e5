"""What waits, failed, ran and was emitted for one entity."""

from __future__ import annotations

from duly.messages import may_read
from duly.operate.dead_letters import list_dead_letters
from duly.operate.events import list_events
from duly.operate.jobs import list_executions, list_jobs
from duly.operate.why_job import say_briefly
from duly.operate.why_look import SHOWN, Look
from duly.operate.words import moment, short, when


async def why_entity(look: Look, entity_id: str) -> list[str]:
    """A line for each job, dead letter, run and event of an entity; nothing when there is none."""
    said = [say_briefly(job, look.now) for job in await list_jobs(look.tx, entity_id=entity_id, limit=SHOWN)]
    for dead in await list_dead_letters(look.tx, entity_id=entity_id, limit=SHOWN):
        since = when(dead.buried_at, look.now)
        said.append(f"Job {dead.id} ({dead.name}) is a dead letter since {since}: {short(dead.error)}")
    for run in await list_executions(look.tx, entity_id=entity_id, limit=SHOWN):
        message = f": {short(run.message)}" if run.message else ""
        said.append(f"Job {run.job_id} ({run.name}) ran until {moment(run.completed_at)}: {run.outcome}{message}.")
    events = await list_events(look.tx, aggregate_id=entity_id, limit=SHOWN)
    said += [
        f"Event {one.id} ({one.type}) is {one.status}, emitted at {moment(one.created_at)}."
        for one in events
        if may_read(one.type, look.roles)
    ]
    return [f"{entity_id} is an entity; the newest {SHOWN} of each kind follow.", *said] if said else []
