"""What currencies does because it is time."""

from __future__ import annotations

from datetime import date, datetime, timedelta

import structlog

from apps.currencies import service
from apps.currencies.gateways import Nbp
from apps.currencies.model import WARSAW, Kept, RateTable, TableChanged, day_of
from apps.currencies.service import SYNC
from duly import Done, Duly, Fail, JobContext, Outcome, Then, Tx
from duly.settings import Settings

log = structlog.get_logger("apps.currencies")
LONGEST_RUN = timedelta(minutes=1)


def register(app: Duly) -> None:
    """Add the jobs; their schedules come with the migration."""

    @app.job(SYNC, max_retries=3, timeout=LONGEST_RUN)
    async def sync_rates(ctx: JobContext) -> Then:
        day = day_of(ctx.due_at)  # a late run fetches the day it was due for
        async with Nbp.open(Settings()) as bank:
            table = await bank.fetch(day)
        if table is None:
            return Then(lambda tx: _look_again(tx, day, ctx.started_at))
        return Then(lambda tx: _keep(tx, table))

    @app.job("currencies.forget-tables")
    async def forget_tables(tx: Tx) -> Done:
        return Done(f"forgot {await service.forget_tables(tx)} tables")


async def _keep(tx: Tx, table: RateTable) -> Outcome:
    try:
        kept = await service.keep_table(tx, table)
    except TableChanged as changed:  # trying again is no help
        return Fail(str(changed))
    if kept is Kept.CORRECTED:
        log.warning("rates_corrected", day=table.day.isoformat(), number=table.number)
    return Done(f"{table.day}: table {table.number} with {len(table.rates)} rates, {kept.value}")


async def _look_again(tx: Tx, day: date, now: datetime) -> Done:
    again = await service.plan_another_look(tx, day, now=now)
    if again is None:
        return Done(f"{day}: the bank has no table of this day")
    return Done(f"{day}: the bank has no table of this day yet; we look again at {again.astimezone(WARSAW):%H:%M}")
