"""What is run in the measurements: handlers that do nothing, and some that write one row."""

from __future__ import annotations

import asyncpg
from sqlalchemy import text

from duly import Event, Tx
from duly.app import Duly
from duly.jobs.handlers import JobContext

EFFECTS_TABLE = "CREATE TABLE IF NOT EXISTS effects (id bigint GENERATED ALWAYS AS IDENTITY, note text NOT NULL)"
WRITE_EFFECT = "INSERT INTO effects (note) VALUES ('written')"
_WRITE = text(WRITE_EFFECT)
ORDERED_AGGREGATES = 1_000


def application(ticks: int = 0) -> Duly:
    """The registry; ``ticks`` more names for schedules of as many."""
    app = Duly()
    _add_idle(app)
    _add_writing(app)
    _add_consumers(app)
    for number in range(ticks):
        app.job(f"tick-{number}")(_nothing)
    return app


async def _nothing(ctx: JobContext) -> None: ...


def _add_idle(app: Duly) -> None:
    app.job("noop")(_nothing)

    @app.job("each")
    async def each(ctx: JobContext, tx: Tx) -> None: ...

    @app.job("each-asyncpg")
    async def each_asyncpg(ctx: JobContext, tx: asyncpg.Connection) -> None: ...

    @app.job("group-100", group=100)
    async def group_100(ctx: JobContext, tx: Tx) -> None: ...

    @app.job("group-500", group=500)
    async def group_500(ctx: JobContext, tx: Tx) -> None: ...


def _add_writing(app: Duly) -> None:
    async def by_session(ctx: JobContext, tx: Tx) -> None:
        await tx.execute(_WRITE)

    async def by_asyncpg(ctx: JobContext, tx: asyncpg.Connection) -> None:
        await tx.execute(WRITE_EFFECT)

    app.job("write-each")(by_session)
    app.job("write-each-asyncpg")(by_asyncpg)
    app.job("write-group-100", group=100)(by_session)
    app.job("write-group-100-asyncpg", group=100)(by_asyncpg)


def _add_consumers(app: Duly) -> None:
    @app.consumer("single", on="bench.single")
    async def single(event: Event, tx: Tx) -> None: ...

    @app.consumer("many", on="bench.many", batch=200)
    async def many(events: list[Event], tx: Tx) -> None: ...

    @app.consumer("ordered", on="bench.ordered", ordered=True)
    async def ordered(event: Event, tx: Tx) -> None: ...
