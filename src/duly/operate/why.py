"""Answers, in plain sentences, why something did or did not run: ``duly why ID``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Set
from datetime import UTC, datetime, timedelta
from uuid import UUID

from duly.db import Tx
from duly.ids import parse_uuid
from duly.operate import sql_why as sql
from duly.operate.arguments import LARGEST_ID, TEXT_LIMIT
from duly.operate.why_entity import why_entity
from duly.operate.why_event import why_event
from duly.operate.why_job import why_job
from duly.operate.why_look import Look, start
from duly.operate.why_name import why_name
from duly.operate.words import moment

SANDBOX_SECONDS = 3_600  # a business clock further off than this is not a machine's clock
SHOWN_ID = 100

Answer = Callable[[Look, str], Awaitable[list[str]]]


async def why(tx: Tx, id: str, *, roles: Set[str] | None = None) -> list[str]:
    """Sentences about a job, event, execution, webhook, schedule, job name or entity; payloads are never among them.

    ``job:7``, ``event:...``, ``execution:...``, ``schedule:...`` and ``entity:...`` say which is meant; without that,
    a number is a job, a UUID an event or execution, anything else a name, and all of them may be an entity. Of events
    that are closed to these roles nothing is said but where they stand.
    """
    asked = id.strip()
    look = await start(tx, roles)
    if not 1 <= len(asked) <= TEXT_LIMIT or "\x00" in asked:
        return [f"An id is text of 1 to {TEXT_LIMIT} characters."]
    kind, _, rest = asked.partition(":")
    if rest and kind in _ANSWERS and (said := await _ANSWERS[kind](look, rest)):
        return said
    for answer in (_job, _event, *_ADDED, _execution, why_name, why_entity):
        if said := await answer(look, asked):
            return said
    return await _nothing(look, asked)


async def _job(look: Look, asked: str) -> list[str]:
    number = _number(asked)
    return await why_job(look, number) if number is not None else []


async def _event(look: Look, asked: str) -> list[str]:
    id = parse_uuid(asked)
    return await why_event(look, id) if id is not None else []


async def _execution(look: Look, asked: str) -> list[str]:
    id = parse_uuid(asked)
    if id is None or id.version != 7:
        return []
    since, until = around(look, id)
    rows = await look.fetch(sql.FIND_EXECUTION, execution_id=id, since=since, until=until)
    if not rows:
        return []
    job_id, name, started_at = rows[0]
    return [f"{id} is the run of job {job_id} ({name}) that began {moment(started_at)}.", *await why_job(look, job_id)]


_ANSWERS: dict[str, Answer] = {
    "job": _job,
    "event": _event,
    "execution": _execution,
    "schedule": why_name,
    "name": why_name,
    "entity": why_entity,
}


_ADDED: list[Answer] = []


def add_answer(kind: str, answer: Answer) -> None:
    """Let a part above this one answer for ids of its own, which are UUIDs; ``kind:ID`` says that it is meant."""
    _ANSWERS[kind] = answer
    _ADDED.append(answer)


async def _nothing(look: Look, asked: str) -> list[str]:
    said = [f"Nothing is known about {asked[:SHOWN_ID]}."]
    number = _number(asked)
    if number is not None and number > await look.one(sql.FIND_LAST_JOB_ID):
        said.append("No job has had this number yet.")
    oldest = await look.one(sql.FIND_OLDEST_DAY)
    since = f" (the log of runs begins {oldest})" if oldest else ""
    return [
        *said,
        "Looked at: jobs, dead letters, executions, events, the outbox, schedules, job names, entities, webhooks and "
        "the audit.",
        f"History older than the retention is dropped{since}.",
    ]


def _number(asked: str) -> int | None:
    if not (asked.isascii() and asked.isdigit() and len(asked) <= len(str(LARGEST_ID))):
        return None
    number = int(asked)
    return number if 0 < number <= LARGEST_ID else None


def around(look: Look, id: UUID) -> tuple[datetime | None, datetime | None]:
    """Between which times the run with this id can have ended; a sandbox's clock says nothing about that."""
    if abs((look.now - look.physical_now).total_seconds()) > SANDBOX_SECONDS:
        return None, None
    began = datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=min(int(id.hex[:12], 16), 2**47))
    return began - timedelta(hours=1), began + timedelta(days=2)
