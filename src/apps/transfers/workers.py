"""What transfers do because of an event, or because it is time; and the hourly task as a command of its own."""

from __future__ import annotations

import asyncio
import signal
import sys
from datetime import timedelta

import structlog
from pydantic import ValidationError

from apps.transfers import service
from apps.transfers.events import OwnershipTransferExpired
from apps.transfers.gateways import ExpiryClient, ExpiryRefused
from duly import Cancel, Done, Duly, Event, Fail, Outcome, Tx
from duly.auth.setup import NoCredentials
from duly.errors import DulyError, Refused
from duly.ids import uuid7
from duly.settings import Settings
from duly.telemetry import Origin, configure_logging, originating

log = structlog.get_logger("apps.transfers")
JOB = "transfers.expire-pending"
MOST_ROUNDS = 50  # half a million transfers; what is left waits for the next hour
LONGEST_RUN = timedelta(minutes=10)
STOPPED = 128 + signal.SIGTERM


def register(app: Duly) -> None:
    """Add the job and the consumer to an application; the job's schedule comes with the migration."""

    @app.job(JOB, timeout=LONGEST_RUN, limit=1)
    async def expire_pending() -> Outcome:
        try:
            async with ExpiryClient.open(Settings()) as client:
                return Done(f"expired {await expire_all(client)}")
        except NoCredentials as unset:  # where the CronJob does this, workers have no credentials for it
            log.warning("transfers_expire_left_to_others", reason=str(unset))
            return Cancel(f"left to the command transfers-expire: {unset}")
        except (ExpiryRefused, Refused) as refused:  # trying again is no help
            return Fail(str(refused))

    @app.job("transfers.forget-notices")
    async def forget_notices(tx: Tx) -> Done:
        return Done(f"forgot {await service.forget_notices(tx)} notices")

    @app.consumer("transfers.notify-owner", on=OwnershipTransferExpired.event_type)
    async def notify_owner(event: Event, tx: Tx) -> None:
        await service.notify_owner(tx, event)


async def expire_all(client: ExpiryClient, *, most_rounds: int = MOST_ROUNDS) -> int:
    """Ask until nothing is left, within bounds; how many expired."""
    total = 0
    for _ in range(most_rounds):
        expired = await client.expire()
        total += expired.count
        if not expired.has_more:
            return total
    log.warning("transfers_expire_unfinished", rounds=most_rounds, count=total)
    return total


def main() -> None:
    """The command ``transfers-expire``: one run (T6)."""
    sys.exit(run())


def run() -> int:
    """Expire over HTTP; 0 when that worked, 1 when it did not and the log says at critical level why."""
    try:
        settings = Settings()
    except ValidationError as error:
        configure_logging()
        name = ".".join(str(step) for step in error.errors(include_input=False)[0]["loc"])
        log.critical("transfers_expire_failed", reason=f"the setting {name} cannot be used")
        return 1
    configure_logging(level=settings.log_level, style=settings.log_format)
    try:
        return asyncio.run(_run(settings))
    except asyncio.CancelledError:
        log.warning("transfers_expire_stopped")
        return STOPPED


async def _run(settings: Settings) -> int:
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    correlation_id = uuid7()
    with (
        structlog.contextvars.bound_contextvars(correlation_id=str(correlation_id)),
        originating(Origin(correlation_id)),
    ):
        try:
            async with ExpiryClient.open(settings) as client:
                count = await expire_all(client)
        except DulyError as error:
            log.critical("transfers_expire_failed", reason=str(error))
            return 1
        log.info("transfers_expired", count=count)
        return 0
