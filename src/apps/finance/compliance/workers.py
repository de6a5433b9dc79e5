"""What compliance does because something was posted, or because it is time."""

from __future__ import annotations

import os
from datetime import timedelta

from apps.finance.compliance import aml, service
from apps.finance.compliance.opening import DUE, rules_in_force
from duly import Done, Duly, Event, Fail, JobContext, Outcome, Snooze, Tx, schedule
from duly.errors import Refused
from duly.ids import parse_uuid

KEEP_VARIABLE = "COMPLIANCE_KEEP_DAYS"
DEFAULT_DAYS = 2_557  # seven years
BATCH = 200
RETRIES = 20
REST = "rest"  # the entity of a run that goes on where the one before it reached its limit


def register(app: Duly) -> None:
    """Add the consumer and the jobs; the schedules of those that recur come with the migration.

    A setting that nobody can understand is refused here, at the start, and not when the first case is to be opened.
    """
    rules_in_force()
    kept_days()

    @app.consumer("aml-screening", on="transaction.posted", batch=BATCH, max_retries=RETRIES)
    async def screen(events: list[Event], tx: Tx) -> None:
        await aml.screen(tx, events)

    @app.job(DUE, max_retries=RETRIES)
    async def come_due(ctx: JobContext, tx: Tx) -> Outcome:
        case_id = parse_uuid(ctx.entity_id or "")
        if case_id is None:
            return Fail("the job's entity is not a case's id")
        wait = await service.come_due(tx, case_id)
        if wait is not None and wait > timedelta(0):
            return Snooze(wait, "there is time yet")
        return Done("it is decided, or everybody knows that it is late")

    @app.job("compliance.recover")
    async def recover(tx: Tx) -> Done:
        return _describe(*await service.recover(tx))

    @app.job(service.RECOVER_MORE)
    async def recover_more(ctx: JobContext, tx: Tx) -> Done:
        after = parse_uuid(str(ctx.payload.get("after", ""))) or service.FIRST
        before = parse_uuid(str(ctx.payload.get("before", ""))) or service.LAST
        return _describe(*await service.recover(tx, after=after, before=before))

    @app.job("compliance.forget")
    async def forget(ctx: JobContext, tx: Tx) -> Done:
        gone, has_more = await service.forget(tx, days=kept_days())
        if has_more:
            await schedule(tx, ctx.name, REST)
        return Done(f"forgot {gone} cases" + ("; the rest follows" if has_more else ""))


def kept_days() -> int:
    """How long a case is kept after it has ended."""
    given = os.environ.get(KEEP_VARIABLE) or str(DEFAULT_DAYS)
    if not given.isascii() or not given.isdigit() or not 1 <= len(given) <= 5 or int(given) < 1:
        raise Refused(f"{KEEP_VARIABLE} is no number of days: write 1 to 99999")
    return int(given)


def _describe(count: int, has_more: bool) -> Done:
    return Done(f"recovered {count} cases and timers" + (", more to look at" if has_more else ""))
