"""What the ledger does because it is time; and the check of the whole ledger as a command."""

from __future__ import annotations

from uuid import UUID

from apps.finance.ledger import service
from apps.finance.ledger.model import HoldNotFound
from duly import Cancel, Done, Duly, Fail, JobContext, Outcome, Snooze, Tx


def register(app: Duly) -> None:
    """Add the jobs; the schedules of those that recur come with the migration."""

    @app.job(service.EXPIRE_HOLD, max_retries=5)
    async def expire_hold(ctx: JobContext, tx: Tx) -> Outcome:
        try:
            hold_id = UUID(ctx.entity_id or "")
        except ValueError:
            return Fail("this timer is about no hold: its entity is no id of one")
        try:
            found = await service.expire_hold(tx, hold_id)
        except HoldNotFound as absent:
            return Cancel(str(absent))
        if found.has_expired:
            return Done("the hold has expired")
        if found.wait:
            return Snooze(found.wait, "the hold has not expired yet")
        return Done(f"nothing to do: the hold is {found.hold.status.value}")

    @app.job("ledger.forget-holds")
    async def forget_holds(tx: Tx) -> Done:
        return Done(f"forgot {await service.forget_holds(tx)} holds")
