"""Every kind of transaction in which a caller may emit, behind one face: begin, emit, insert an order, end."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import asyncpg
import psycopg
from psycopg.rows import dict_row
from psycopg.types.json import Jsonb
from sqlalchemy import Engine, NullPool, create_engine, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from duly import emit, sync
from duly.db import Database
from duly.messages import NewEvent

ORDERS = "CREATE TABLE orders (id text PRIMARY KEY)"
INSERT_ORDER = "INSERT INTO orders (id) VALUES ('{}')"
TRIGGER = """
CREATE FUNCTION announce_order() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM duly.emit('order.placed', 'shop', NEW.id, jsonb_build_object('n', 1), '{"origin": "trigger"}');
    RETURN NULL;
END $$;
CREATE TRIGGER orders_are_announced AFTER INSERT ON orders FOR EACH ROW EXECUTE FUNCTION announce_order();
"""


@dataclass
class Open:
    """A transaction that is open: it writes an order and its event; leaving the block with an error rolls it back."""

    place: Callable[[str], Any]


def order_placed(order_id: str) -> NewEvent:
    return NewEvent("order.placed", "shop", order_id, {"n": 1})


def async_engine(dsn: str) -> AsyncEngine:
    """An application's own engine, which knows nothing of duly."""
    return create_async_engine("postgresql+asyncpg://", async_creator=lambda: asyncpg.connect(dsn), poolclass=NullPool)


def sync_engine(dsn: str) -> Engine:
    return create_engine("postgresql+psycopg://", creator=lambda: psycopg.connect(dsn), poolclass=NullPool)


async def _place(tx: AsyncSession | AsyncConnection, order_id: str) -> None:
    await tx.execute(text(INSERT_ORDER.format(order_id)))
    await emit(tx, order_placed(order_id))


@asynccontextmanager
async def dulys_session(dsn: str) -> AsyncIterator[Open]:
    db = Database(dsn)
    try:
        async with db.transaction() as tx:
            yield Open(lambda order_id: _place(tx, order_id))
    finally:
        await db.close()


@asynccontextmanager
async def dulys_connection(dsn: str) -> AsyncIterator[Open]:
    """What a consumer that asks for an AsyncConnection is given."""
    db = Database(dsn)
    try:
        async with db.transaction() as tx:
            connection = await tx.connection()
            yield Open(lambda order_id: _place(connection, order_id))
    finally:
        await db.close()


@asynccontextmanager
async def dulys_asyncpg(dsn: str) -> AsyncIterator[Open]:
    """What a consumer that asks for an asyncpg.Connection is given."""
    db = Database(dsn)
    try:
        async with db.transaction() as tx:
            await tx.execute(text("SELECT 1"))
            raw = (await (await tx.connection()).get_raw_connection()).driver_connection

            async def place(order_id: str) -> None:
                await raw.execute(INSERT_ORDER.format(order_id))  # type: ignore[union-attr] # it is connected
                await emit(raw, order_placed(order_id))

            yield Open(place)
    finally:
        await db.close()


@asynccontextmanager
async def dulys_sync_session(dsn: str) -> AsyncIterator[Open]:
    db = Database(dsn)
    try:
        with db.transaction_sync() as tx:

            async def place(order_id: str) -> None:
                tx.execute(text(INSERT_ORDER.format(order_id)))
                sync.emit(tx, order_placed(order_id))

            yield Open(place)
    finally:
        await db.close()


@asynccontextmanager
async def own_async_session(dsn: str) -> AsyncIterator[Open]:
    async with AsyncSession(async_engine(dsn)) as session, session.begin():
        yield Open(lambda order_id: _place(session, order_id))


@asynccontextmanager
async def own_async_connection(dsn: str) -> AsyncIterator[Open]:
    async with async_engine(dsn).begin() as connection:
        yield Open(lambda order_id: _place(connection, order_id))


@asynccontextmanager
async def own_asyncpg(dsn: str) -> AsyncIterator[Open]:
    connection = await asyncpg.connect(dsn)
    try:
        async with connection.transaction():

            async def place(order_id: str) -> None:
                await connection.execute(INSERT_ORDER.format(order_id))
                await emit(connection, order_placed(order_id))

            yield Open(place)
    finally:
        await connection.close()


@asynccontextmanager
async def pooled_asyncpg(dsn: str) -> AsyncIterator[Open]:
    """A connection that an asyncpg pool lends out is a proxy."""
    async with (
        asyncpg.create_pool(dsn, min_size=1, max_size=1) as pool,
        pool.acquire() as connection,
        connection.transaction(),
    ):

        async def place(order_id: str) -> None:
            await connection.execute(INSERT_ORDER.format(order_id))
            await emit(connection, order_placed(order_id))

        yield Open(place)


@asynccontextmanager
async def psycopg_async(dsn: str) -> AsyncIterator[Open]:
    async with await psycopg.AsyncConnection.connect(dsn) as connection:

        async def place(order_id: str) -> None:
            await connection.execute(INSERT_ORDER.format(order_id).encode())
            await emit(connection, order_placed(order_id))

        yield Open(place)


@asynccontextmanager
async def psycopg_async_with_dicts(dsn: str) -> AsyncIterator[Open]:
    """An application may have rows in whatever shape it likes."""
    async with await psycopg.AsyncConnection.connect(dsn, row_factory=dict_row) as connection:

        async def place(order_id: str) -> None:
            await connection.execute(INSERT_ORDER.format(order_id).encode())
            assert len(await emit(connection, order_placed(order_id))) == 1

        yield Open(place)


@asynccontextmanager
async def own_session_on_psycopg(dsn: str) -> AsyncIterator[Open]:
    """SQLAlchemy's other asynchronous driver."""
    engine = create_async_engine(
        "postgresql+psycopg://", async_creator=lambda: psycopg.AsyncConnection.connect(dsn), poolclass=NullPool
    )
    async with AsyncSession(engine) as session, session.begin():
        yield Open(lambda order_id: _place(session, order_id))


@asynccontextmanager
async def own_session(dsn: str) -> AsyncIterator[Open]:
    with Session(sync_engine(dsn)) as session, session.begin():

        async def place(order_id: str) -> None:
            session.execute(text(INSERT_ORDER.format(order_id)))
            sync.emit(session, order_placed(order_id))

        yield Open(place)


@asynccontextmanager
async def own_connection(dsn: str) -> AsyncIterator[Open]:
    with sync_engine(dsn).begin() as connection:

        async def place(order_id: str) -> None:
            connection.execute(text(INSERT_ORDER.format(order_id)))
            sync.emit(connection, order_placed(order_id))

        yield Open(place)


@asynccontextmanager
async def psycopg_sync(dsn: str) -> AsyncIterator[Open]:
    with psycopg.connect(dsn) as connection:

        async def place(order_id: str) -> None:
            connection.execute(INSERT_ORDER.format(order_id).encode())
            sync.emit(connection, order_placed(order_id))

        yield Open(place)


@asynccontextmanager
async def psycopg_sync_with_dicts(dsn: str) -> AsyncIterator[Open]:
    with psycopg.connect(dsn, row_factory=dict_row) as connection:

        async def place(order_id: str) -> None:
            connection.execute(INSERT_ORDER.format(order_id).encode())
            assert len(sync.emit(connection, order_placed(order_id))) == 1

        yield Open(place)


@asynccontextmanager
async def plain_sql(dsn: str) -> AsyncIterator[Open]:
    """E7.3: psql, or another language."""
    with psycopg.connect(dsn) as connection:

        async def place(order_id: str) -> None:
            connection.execute(INSERT_ORDER.format(order_id).encode())
            connection.execute(
                "SELECT duly.emit('order.placed', 'shop', %s, payload => %s)", [order_id, Jsonb({"n": 1})]
            )

        yield Open(place)


@asynccontextmanager
async def trigger(dsn: str) -> AsyncIterator[Open]:
    """E7.3: the table itself announces its rows."""
    with psycopg.connect(dsn) as connection:
        connection.execute(TRIGGER)
        connection.commit()

        async def place(order_id: str) -> None:
            connection.execute(INSERT_ORDER.format(order_id).encode())

        yield Open(place)


Writer = Callable[[str], AbstractAsyncContextManager[Open]]
WRITERS: list[Writer] = [
    dulys_session,
    dulys_connection,
    dulys_asyncpg,
    dulys_sync_session,
    own_async_session,
    own_async_connection,
    own_asyncpg,
    pooled_asyncpg,
    psycopg_async,
    psycopg_async_with_dicts,
    own_session_on_psycopg,
    own_session,
    own_connection,
    psycopg_sync,
    psycopg_sync_with_dicts,
    plain_sql,
    trigger,
]
