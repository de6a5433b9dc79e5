"""What identity checks do because it is time."""

from __future__ import annotations

from apps.finance.kyc import service
from apps.finance.kyc.gateways import check_addresses
from apps.finance.kyc.model import SessionNotFound
from duly import Cancel, Done, Duly, Fail, JobContext, Outcome, Snooze, Tx, schedule
from duly.ids import parse_uuid

RETRIES = 20  # when the database is away
REST = "rest"  # the entity of a run that goes on where the one before it reached its limit


def register(app: Duly) -> None:
    """Add the jobs; the schedules of those that recur come with the migration."""
    app.check_settings(check_addresses)

    @app.job(service.EXPIRE, max_retries=RETRIES)
    async def expire(ctx: JobContext, tx: Tx) -> Outcome:
        session_id = parse_uuid(ctx.entity_id or "")
        if session_id is None:
            return Fail("the job's entity is not a session's id")
        try:
            wait = await service.expire(tx, session_id)
        except SessionNotFound as absent:
            return Cancel(str(absent))
        return Snooze(wait, "it has not expired yet") if wait else Done("the session is over")

    @app.job(service.SWEEP)
    async def sweep(ctx: JobContext, tx: Tx) -> Done:
        count, has_more = await service.sweep(tx)
        if has_more:
            await schedule(tx, ctx.name, REST)
        return Done(f"expired {count} that their timers missed")

    @app.job(service.FORGET)
    async def forget(ctx: JobContext, tx: Tx) -> Done:
        sessions, callbacks, has_more = await service.forget(tx)
        if has_more:
            await schedule(tx, ctx.name, REST)
        return Done(f"forgot {sessions} sessions and {callbacks} callbacks")
