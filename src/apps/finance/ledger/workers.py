"""What the ledger does because it is time; and the check of the whole ledger as a command."""

from __future__ import annotations

import asyncio
import sys
from uuid import UUID

import structlog
from pydantic import ValidationError
from sqlalchemy.exc import DBAPIError

from apps.finance.ledger import audit, service
from apps.finance.ledger.model import HoldNotFound
from duly import Cancel, Done, Duly, Fail, JobContext, Outcome, Snooze, Tx, schedule
from duly.cli.home import database_address
from duly.cli.process import open_database
from duly.errors import DulyError, Refused
from duly.settings import Settings
from duly.telemetry import configure_logging

log = structlog.get_logger("apps.ledger")
SEAL = "ledger.seal"
REST = "rest"  # the entity of a run that goes on where the one before it reached its limit


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

    @app.job(SEAL, limit=1)
    async def seal_journal(ctx: JobContext, tx: Tx) -> Outcome:
        try:
            seal, has_more = await audit.seal_journal(tx)
        except Refused as restored:
            return Fail(str(restored))
        if seal is None:
            return Done("nothing new to seal")
        if has_more:  # a commit is bounded; what is left is for a run of its own, at once
            await schedule(tx, SEAL, REST)
        return Done(f"seal {seal.number} covers {seal.transactions} transactions")


def main() -> None:
    """The command ``ledger-verify``: every rule on every row, and every seal."""
    sys.exit(run())


def run() -> int:
    """0 when the ledger is sound, 1 when it is not or could not be looked at; the log says which, and names the row."""
    try:
        settings = Settings()
        configure_logging(level=settings.log_level, style=settings.log_format)
        with database_address(settings) as dsn:
            return asyncio.run(_verify(dsn, settings))
    except (DulyError, ValidationError, OSError, DBAPIError) as error:
        log.critical("ledger_not_verified", reason=type(error).__name__)
        return 1


async def _verify(dsn: str, settings: Settings) -> int:
    async with open_database(dsn, settings) as db, db.transaction() as tx:
        found = await audit.verify(tx)
    if wrong := found.first_violation:
        log.critical("ledger_broken", rule=wrong.rule, table=wrong.table, row=wrong.row)
        return 1
    log.info("ledger_verified", rows=found.rows, seals=found.seals, sealed_transactions=found.sealed_transactions)
    return 0
