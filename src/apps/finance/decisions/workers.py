"""What decisions does because it is time: the log's partitions, and what is too old."""

from __future__ import annotations

import os

from apps.finance.decisions import service
from duly import Done, Duly, JobContext, Tx, schedule
from duly.errors import Refused

KEEP_VARIABLE = "DECISIONS_KEEP_DAYS"
DEFAULT_DAYS = 400
REST = "rest"  # the entity of a run that goes on where the one before it reached its limit


def register(app: Duly) -> None:
    """Add the jobs; their schedules come with the migration."""

    @app.job("decisions.keep-partitions")
    async def keep_partitions(tx: Tx) -> Done:
        return Done(f"made {await service.keep_partitions(tx)} partitions of the decision log")

    @app.job("decisions.forget")
    async def forget(ctx: JobContext, tx: Tx) -> Done:
        gone, has_more = await service.forget(tx, days=kept_days())
        said = ", ".join(f"{count} {what}" for what, count in gone.items())
        if has_more:
            await schedule(tx, ctx.name, REST)
        return Done(f"forgot {said}" + ("; the rest follows" if has_more else ""))


def kept_days() -> int:
    """How long a decision can be read and replayed."""
    given = os.environ.get(KEEP_VARIABLE) or str(DEFAULT_DAYS)
    if not given.isascii() or not given.isdigit() or not 1 <= len(given) <= 5 or int(given) < 1:
        raise Refused(f"{KEEP_VARIABLE} is no number of days: write 1 to 99999")
    return int(given)
