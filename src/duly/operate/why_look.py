"""What every answer of ``duly why`` is made from: the transaction, the two clocks, and who is alive."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from duly.db import Statement, Tx, fetch
from duly.messages import may_read
from duly.operate import sql, sql_why
from duly.operate.audit import list_audit
from duly.operate.status import Process, list_processes
from duly.operate.words import listing, moment, short

CAP = 1_000
SHOWN = 20
SCAN_LIMIT = 20_000


@dataclass(frozen=True)
class Look:
    """One question: leases are in physical time, everything else in business time."""

    tx: Tx
    now: datetime
    physical_now: datetime
    roles: Set[str] | None = None
    """Of whoever asks, where there are events that are closed to some; without any it is who has the database."""

    async def fetch(self, statement: Statement, **values: Any) -> list[Any]:
        """Rows of one statement."""
        return list(await fetch(self.tx, statement, **values))

    async def one(self, statement: Statement, **values: Any) -> Any:
        """The first column of the first row, or None."""
        rows = await self.fetch(statement, **values)
        return rows[0][0] if rows else None

    async def workers(self) -> list[Process]:
        """The workers that are alive."""
        return [process for process in await list_processes(self.tx) if process.kind == "worker"]


async def start(tx: Tx, roles: Set[str] | None = None) -> Look:
    """Look at both clocks once, so that one answer speaks of one moment."""
    now, physical_now = (await fetch(tx, sql.READ_NOW))[0]
    return Look(tx, now, physical_now, roles)


async def say_audit(look: Look, subject: str) -> list[str]:
    """What people did to it, oldest first."""
    entries = await list_audit(look.tx, subject=subject, limit=SHOWN)
    said = []
    for entry in reversed(entries):
        because = f": {short(entry.reason)}" if entry.reason else ", without a reason"
        said.append(f"On {moment(entry.at)} {entry.actor} did {entry.action}{because}.")
    return said


async def say_caused(
    look: Look, causes: list[UUID], *, entity_id: str | None, since: datetime, until: datetime
) -> list[str]:
    """The events and jobs that carry one of these ids as their cause."""
    if not causes:
        return []
    events = await look.fetch(
        sql_why.FIND_CAUSED_EVENTS,
        causes=[str(cause) for cause in causes],
        since=since,
        until=until,
        scan=SCAN_LIMIT,
        limit=SHOWN,
    )
    jobs = await look.fetch(sql_why.FIND_CAUSED_JOBS, causes=causes, entity_id=entity_id, scan=SCAN_LIMIT, limit=SHOWN)
    said = []
    if shown := [f"event {id} ({type_}, {state})" for id, type_, state in events if may_read(type_, look.roles)]:
        said.append(f"It caused {listing(shown)}.")
    if jobs:
        said.append(f"It caused {listing([f'job {id} ({name}, {state})' for id, name, state in jobs])}.")
    return said


def say_origin(*, correlation_id: object, causation_id: object) -> list[str]:
    """The ids by which the rest of the chain is found."""
    said = []
    if causation_id is not None:
        said.append(f"Its cause is {causation_id}.")
    if correlation_id is not None:
        said.append(f"Its correlation id is {correlation_id}.")
    return said
