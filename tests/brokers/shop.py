"""The application that runs over every broker: its consumers leave a witness, and misbehave when an event says so."""

from __future__ import annotations

import asyncio
import os
import signal

from sqlalchemy import text

from duly import Duly, Event, EventBody, Tx
from duly.failpoints import failpoint
from tests.engine.inbox.effects import record

CREATE_MENDED = "CREATE TABLE mended (what text PRIMARY KEY)"
IS_MENDED = text("SELECT EXISTS (SELECT 1 FROM mended WHERE what = :what)")
CONSUMERS = ("ledger", "mail")
LINGER_SECONDS = 2.0


class Changed(EventBody, type="order.changed", topic="shop", aggregate="order_id"):
    """An order changed, for the n-th time."""

    order_id: str
    n: int


app = Duly()


@app.consumer("ledger", on="order.*", ordered=True, backoff=[0], max_retries=2)
async def ledger(event: Event, tx: Tx) -> None:
    """In order; what an event asks for in ``do`` is done until it is mended. Who lingers is slow, and no more."""
    asked = str(event.payload.get("do", ""))
    if asked == "linger":
        await asyncio.sleep(LINGER_SECONDS)
    elif asked and not (await tx.execute(IS_MENDED, {"what": asked})).scalar_one():
        if asked == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("as asked")
    await record(tx, "ledger", event)
    failpoint("handler.mid")


@app.consumer("mail", on="order.*", backoff=[0])
async def mail(event: Event, tx: Tx) -> None:
    """In no order."""
    await record(tx, "mail", event)
