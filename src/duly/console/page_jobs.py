"""Jobs: by name with their schedules and last runs, one by one by due time, and one with everything known of it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any
from uuid import UUID

from fastapi import Request
from fastapi.responses import Response

from duly.console import sql
from duly.console.overview import Queue, read_pulse
from duly.console.record import read_audit
from duly.console.routes import BadQuery, Pages, Query, read, read_moment, read_number, show, signed_in
from duly.errors import NotFound
from duly.operate import sql as operate_sql
from duly.operate.arguments import LARGEST_ID
from duly.operate.counts import Count
from duly.operate.dead_letters import find_dead_letter
from duly.operate.jobs import STATUSES, Execution, QueuedJob, find_job, list_executions, list_jobs
from duly.operate.why import why
from duly.operate.why_look import start
from duly.operate.why_name import why_name
from duly.schedules.edit import ScheduleRow, get_schedule, list_schedules

if TYPE_CHECKING:
    from duly.console.app import Console, Look

PAGE = 50
NAMES_LIMIT = 200
SCAN = 1_000
ENTITY_PAGE = 200
NONE = Count(0)


@dataclass(frozen=True)
class Named:
    """One job name: its queue, its schedule if it has one, and its newest run if it ever ran."""

    name: str
    queue: Queue | None
    schedule: ScheduleRow | None
    dead: Count
    last: Any
    spark: list[int]
    is_known: bool

    @property
    def zone(self) -> str:
        """In which zone its times are shown."""
        return self.schedule.timezone if self.schedule else "UTC"


def register(pages: Pages) -> None:
    """Add these routes."""
    pages.get("/jobs")(jobs)
    pages.get("/jobs/{id}")(job)
    pages.get("/jobs/{id}/runs/{execution_id}")(run)


async def jobs(request: Request) -> Response:
    """Every name, or with a filter the jobs it finds."""
    console: Console = request.app.state.console
    query = Query(request)
    filters = {"name": query.text("name"), "entity": query.text("entity"), "status": query.choice("status", STATUSES)}
    since, until = query.moment("since"), query.moment("until")
    is_filtered = any(filters.values()) or since is not None or until is not None
    async with read(request) as look:
        names = [] if is_filtered else await _names(look, console)
        found, after = await _list(look, query, since=since, until=until, **filters)
        known, zones = await look.names(), await look.zones()
        sentences = await why_name(await start(look.tx), filters["name"]) if filters["name"] else []
    return show(
        request, "jobs.html", now=look.now, names=names, jobs=found, after=after, filters=filters, zones=zones,
        since=query.text("since"), until=query.text("until"), is_filtered=is_filtered, statuses=STATUSES,
        limit=NAMES_LIMIT, known=known, sentences=sentences,
    )  # fmt: skip


async def _names(look: Look, console: Console) -> list[Named]:
    """Queued, scheduled, dead or merely known to a worker: all names, those that need a look first."""
    pulse = await read_pulse(look)
    schedules = {row.name: row for row in await list_schedules(look.tx, limit=NAMES_LIMIT)}
    queues = {queue.name: queue for queue in pulse.queues[:NAMES_LIMIT]}
    known = await look.names()
    names = sorted({*schedules, *queues, *known, *list(pulse.dead_letters)[:NAMES_LIMIT]})[: 2 * NAMES_LIMIT]
    last = {row.name: row for row in await look.rows(sql.LIST_LAST_RUNS, names=names)}
    points = console.rollup.points(look.now)
    return [
        Named(
            name, queues.get(name), schedules.get(name), pulse.dead_letters.get(name, NONE), last.get(name),
            [point.names.get(name, 0) for point in points], name in known,
        )
        for name in names
    ]  # fmt: skip


async def _list(
    look: Look, query: Query, *, name: str | None, entity: str | None, status: str | None, since: Any, until: Any
) -> tuple[list[QueuedJob], str | None]:
    """One page by due time, and where the next one begins."""
    if entity is not None:
        found = await list_jobs(look.tx, name=name, entity_id=entity, status=status, limit=ENTITY_PAGE)
        return [job for job in found if _is_between(job, since, until)], None
    if name is not None:
        names = [name]
    else:
        names = [row[0] for row in await look.rows(operate_sql.FIND_JOB_NAMES, names_limit=NAMES_LIMIT)]
    after_at, after_id = _after(query)
    rows = await look.rows(
        sql.LIST_QUEUE, names=names, since=since, until=until, after_at=after_at, after_id=after_id, status=status,
        scan=PAGE + 1 if status is None else SCAN, limit=PAGE + 1,
    )  # fmt: skip
    found = [QueuedJob(*row) for row in rows]
    if len(found) <= PAGE:
        return found, None
    last = found[PAGE - 1]
    return found[:PAGE], f"{last.run_at.isoformat() if last.run_at else 'infinity'}_{last.id}"


def _is_between(job: QueuedJob, since: Any, until: Any) -> bool:
    return (since is None or job.run_at is None or job.run_at >= since) and (
        until is None or (job.run_at is not None and job.run_at <= until)
    )


def _after(query: Query) -> tuple[str | None, int | None]:
    given = query.after()
    if given is None:
        return None, None
    at, id = given
    moment, number = read_moment(at), read_number(id)
    if number is None or (moment is None and at != "infinity"):
        raise BadQuery("after is what the link to the next page says")
    return moment.isoformat() if moment is not None else at, number


async def job(request: Request, id: int) -> Response:
    """Where one job is and why, its runs, its record, and what can be done."""
    if not 0 < id <= LARGEST_ID:
        raise NotFound("no job has this number")
    async with read(request) as look:
        queued, dead = await find_job(look.tx, id), await find_dead_letter(look.tx, id)
        runs = await list_executions(look.tx, job_id=id, limit=PAGE)
        audit = await read_audit(request, look, subject=f"job:{id}", limit=20)
        found: Any = queued or dead or (runs[0] if runs else None)
        if found is None and not audit:
            raise NotFound(f"no job has the number {id}; history older than the retention is dropped")
        sentences = await why(look.tx, f"job:{id}", roles=signed_in(request).roles)
        payload = await look.rows(sql.FIND_PAYLOAD, id=id) if signed_in(request).may_act else []
        schedule = await _schedule(look, found.name) if found is not None else None
    return show(
        request, "job.html", now=look.now, id=id, queued=queued, dead=dead, found=found, runs=runs, audit=audit,
        sentences=sentences, payload=payload[0][0] if payload else None, schedule=schedule, zone=_zone(schedule),
        is_moving=queued is not None and (queued.status != "Pending" or _is_due(queued, look.now)),
    )  # fmt: skip


async def run(request: Request, id: int, execution_id: UUID) -> Response:
    """One run of a job."""
    if not 0 < id <= LARGEST_ID:
        raise NotFound("no job has this number")
    async with read(request) as look:
        rows = await look.rows(sql.FIND_RUN, job_id=id, execution_id=execution_id)
        if not rows:
            raise NotFound("there is no such run; history older than the retention is dropped")
        found = Execution(*rows[0])
        dead = await find_dead_letter(look.tx, id)
        schedule = await _schedule(look, found.name)
    return show(request, "run.html", now=look.now, run=found, dead=dead, schedule=schedule, zone=_zone(schedule))


async def _schedule(look: Look, name: str) -> ScheduleRow | None:
    """The schedule of this name, if there is one."""
    try:
        return await get_schedule(look.tx, name)
    except NotFound:
        return None


def _is_due(job: QueuedJob, now: datetime) -> bool:
    return job.run_at is not None and job.run_at <= now


def _zone(schedule: ScheduleRow | None) -> str:
    return "UTC" if schedule is None else schedule.timezone
