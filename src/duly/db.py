"""Connections, and the only COMMIT: every transaction of duly begins and ends in this file."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import random
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any, TypeVar
from uuid import UUID

import asyncpg
import psycopg
import psycopg.conninfo
from psycopg.rows import tuple_row
from sqlalchemy import Connection, CursorResult, Engine, create_engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from duly.errors import OutcomeUnknown, Refused, Unavailable
from duly.ids import uuid7
from duly.poker import Poker
from duly.settings import Settings
from duly.telemetry import Origin, current_origin

Tx = AsyncSession
"""What a service receives: a SQLAlchemy session inside a transaction that somebody else commits."""

T = TypeVar("T")
RETRYABLE_STATES = frozenset({"40001", "40P01"})
CONFLICT_RETRIES = 3
LOST_COMMIT = "the connection was lost during COMMIT: it may or may not have happened; look before you repeat it"
UNREADABLE = (
    "the address of the database cannot be read: write it as postgresql://user:password@host:5432/database, "
    "with special characters of the password percent-encoded"
)
_DRIVER_CLASS = re.compile(r"^<class '[^']*'>: ")
_PLACEHOLDER = re.compile(r"(?<![:\w]):([a-z_]\w*)")
_HOST = r"(\[[^]@/?#]*\]|[^][@/?#:,]*)(:\d*)?"
_ADDRESS = re.compile(rf"postgresql://([^][@/?#]*@)?{_HOST}(,{_HOST})*(/[^@?#]*)?(\?(\w+=[^&#]*(&\w+=[^&#]*)*)?)?")
_SCOPE = "duly_scope"


@dataclass
class Scope:
    """What one transaction of ours remembers until its COMMIT."""

    poker: Poker | None = None
    pokes: set[str] = field(default_factory=set)
    notified: set[str] = field(default_factory=set)
    correlation_id: UUID | None = None
    settings: Settings | None = None
    mark: str | None = None


_raw_scopes: dict[int, Scope] = {}  # by id() of an asyncpg connection, while a transaction of ours is open on it


def _scope(tx: Any) -> Scope | None:
    """The scope of a transaction that Database opened; None for anybody else's."""
    if isinstance(tx, AsyncSession | Session | AsyncConnection):
        found = tx.info.get(_SCOPE)
        return found if isinstance(found, Scope) else None
    return _raw_scopes.get(id(tx))


def settings_of(tx: Tx) -> Settings:
    """The settings of the Database that opened this transaction; for anybody else's, the environment's."""
    scope = _scope(tx)
    return scope.settings if scope is not None and scope.settings is not None else Settings()


class Statement:
    """One SQL text with ``:named`` values, callable on every kind of connection that duly supports."""

    def __init__(self, sql: str) -> None:
        self.sql = sql
        self.names = list(dict.fromkeys(_PLACEHOLDER.findall(sql)))
        self.text = text(sql)
        numbers = {name: index for index, name in enumerate(self.names, 1)}
        self.numbered = _PLACEHOLDER.sub(lambda found: f"${numbers[found[1]]}", sql)
        self.percent = _PLACEHOLDER.sub(lambda found: f"%({found[1]})s", sql.replace("%", "%%"))

    def args(self, values: Mapping[str, Any]) -> list[Any]:
        """The values in the order of ``numbered``."""
        return [values[name] for name in self.names]


Row = Sequence[Any]


async def fetch(tx: Any, statement: Statement, **values: Any) -> list[Row]:
    """Run a statement on any asynchronous connection or session, and return its rows."""
    if isinstance(tx, AsyncSession | AsyncConnection):
        result = await tx.execute(statement.text, values)
        return list(result.fetchall()) if isinstance(result, CursorResult) and result.returns_rows else []
    if isinstance(tx, psycopg.AsyncConnection):
        async with tx.cursor(row_factory=tuple_row) as cursor:  # whatever rows its owner prefers
            await cursor.execute(statement.percent, values)
            return list(await cursor.fetchall()) if cursor.description else []
    if hasattr(tx, "fetchrow"):  # asyncpg's connection, or its pool's proxy of one
        return list(await tx.fetch(statement.numbered, *statement.args(values)))
    raise TypeError(
        f"{type(tx).__name__} is not a transaction duly knows: pass an AsyncSession, an AsyncConnection, "
        "an asyncpg or a psycopg connection (for a synchronous one, use duly.sync)"
    )


def fetch_sync(tx: Any, statement: Statement, **values: Any) -> list[Row]:
    """Run a statement on a SQLAlchemy ``Session`` or ``Connection``, or on a psycopg connection."""
    if isinstance(tx, psycopg.Connection):
        with tx.cursor(row_factory=tuple_row) as cursor:
            cursor.execute(statement.percent, values)
            return list(cursor.fetchall()) if cursor.description else []
    if isinstance(tx, Session | Connection):
        result = tx.execute(statement.text, values)
        return list(result.fetchall()) if isinstance(result, CursorResult) and result.returns_rows else []
    raise TypeError(f"{type(tx).__name__} is not a synchronous transaction duly knows")


def sqlstate(error: BaseException) -> str | None:
    """The five-character SQLSTATE of an error, however deeply it is wrapped."""
    for cause in _causes(error):
        for holder in (cause, getattr(cause, "orig", None)):
            state = getattr(holder, "sqlstate", None)
            if isinstance(state, str):
                return state
    return None


def is_disconnect(error: BaseException) -> bool:
    """Whether the error means that the database, or the way to it, is gone (as against a refusal)."""
    state = sqlstate(error)
    if state is not None:
        return state[:2] in {"08", "57", "53"} and state not in {"57014"}
    for cause in _causes(error):
        if isinstance(cause, DBAPIError) and cause.connection_invalidated:
            return True
        if isinstance(cause, (OSError, TimeoutError, asyncpg.InterfaceError, psycopg.OperationalError, Unavailable)):
            return True
        if isinstance(cause, asyncpg.PostgresConnectionError | asyncpg.InternalClientError):
            return True
    return False


def is_conflict(error: BaseException) -> bool:
    """Whether running the same transaction again may well succeed: a lost race, not a mistake."""
    state = sqlstate(error)
    return state in RETRYABLE_STATES or (state == "23505" and "jobs_unique" in str(error))


def is_lock_timeout(error: BaseException) -> bool:
    """Whether a statement waited in vain for somebody else, or for longer than it may."""
    return sqlstate(error) in {"55P03", "57014"}


def is_passing(error: BaseException) -> bool:
    """Whether the same transaction may succeed in a moment: an outage, a conflict, a wait for a lock or a session."""
    is_pool_empty = any(isinstance(cause, PoolTimeout) for cause in _causes(error))
    return is_pool_empty or is_disconnect(error) or is_conflict(error) or is_lock_timeout(error)


def is_database_gone(error: BaseException) -> bool:
    """Whether it was our own database that went away, and not, say, a partner's HTTP server."""
    state = sqlstate(error)
    if state is not None:
        return state[:2] == "08" or state in {"57P01", "57P02", "57P03", "53300"}
    return any(
        isinstance(cause, Unavailable | psycopg.OperationalError | asyncpg.InternalClientError)
        or (isinstance(cause, DBAPIError) and cause.connection_invalidated)
        or (isinstance(cause, asyncpg.InterfaceError) and "closed" in str(cause))
        for cause in _causes(error)
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: BaseException | None = error
    for _ in range(10):
        if seen is None:
            return
        yield seen
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)


async def _decode_json(connection: Any) -> None:
    for kind in ("json", "jsonb"):
        await connection.set_type_codec(kind, schema="pg_catalog", encoder=_as_json, decoder=load_json, format="text")


def _as_json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


load_json = functools.partial(json.loads, parse_float=Decimal)


class Database:
    """One PostgreSQL: a pool of sessions for the callers, and single connections for the engine's duties."""

    def __init__(self, dsn: str, *, settings: Settings | None = None, pool_size: int | None = None) -> None:
        self.dsn = normal_dsn(dsn)
        self.settings = settings or Settings()
        size = pool_size or self.settings.pool_size
        self.engine: AsyncEngine = create_async_engine(
            "postgresql+asyncpg://",
            async_creator=functools.partial(self.connect, application="duly"),
            pool_size=size,
            max_overflow=0,
            hide_parameters=True,  # values may be personal: they are not for logs and dead letters
            pool_timeout=self.settings.connect_timeout_seconds,
            pool_pre_ping=False,
        )
        self.pool_size = size
        self._idle: list[Any] = []
        self._sync_engine: Engine | None = None
        self._shares_poker = False
        connect = functools.partial(self.connect, application="duly-notify")
        self._poker = Poker(connect, is_disconnect=is_disconnect)

    def with_pool(self, size: int) -> Database:
        """The same database through a pool of its own; it wakes duties through this one's connection."""
        other = Database(self.dsn, settings=self.settings, pool_size=size)
        other._poker = self._poker
        other._shares_poker = True
        return other

    # -- transactions -------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def transaction(self, *, confirm: bool = False) -> AsyncIterator[Tx]:
        """A session in one transaction: commits when the block ends, rolls back when it raises.

        With ``confirm`` the transaction's mark is asked for before COMMIT, so that a COMMIT whose reply is lost is
        looked up afterwards instead of guessed; without it, unless a statement told it (``note_mark``), such a COMMIT
        raises ``OutcomeUnknown``.
        """
        scope = Scope(self._poker, settings=self.settings)
        session = AsyncSession(self.engine, expire_on_commit=False, info={_SCOPE: scope})
        try:
            yield session
            await self._commit(session, scope, confirm=confirm)
        except BaseException:
            with contextlib.suppress(Exception):
                await asyncio.shield(session.close())
            raise
        await session.close()
        self._poker.poke(scope.pokes)

    @contextlib.asynccontextmanager
    async def raw_transaction(self) -> AsyncIterator[Any]:
        """The same on a bare asyncpg connection, for those who count microseconds."""
        connection = self._idle.pop() if self._idle else await self.connect(application="duly-raw")
        scope = _raw_scopes[id(connection)] = Scope(self._poker)
        transaction = connection.transaction()
        try:
            await transaction.start()
            yield connection
            await self._commit_raw(transaction)
        except BaseException:
            with contextlib.suppress(Exception):
                await asyncio.shield(transaction.rollback())
            raise
        finally:
            del _raw_scopes[id(connection)]
            if connection.is_closed() or connection.is_in_transaction():
                connection.terminate()
            else:
                self._idle.append(connection)
        self._poker.poke(scope.pokes)

    async def _commit_raw(self, transaction: Any) -> None:
        try:
            await transaction.commit()
        except Exception as error:
            if is_disconnect(error):
                raise OutcomeUnknown(LOST_COMMIT) from error
            raise

    async def _commit(self, session: AsyncSession, scope: Scope, *, confirm: bool) -> None:
        await session.flush()
        mark = scope.mark
        if confirm and mark is None:
            mark = (await session.execute(_READ_MARK)).scalar()
        try:
            await session.commit()
        except Exception as error:
            if not is_disconnect(error):
                raise
            if mark is not None and await self._committed(mark):
                return
            if mark is not None:
                raise Unavailable("the connection was lost before COMMIT took effect; nothing was written") from error
            raise OutcomeUnknown(LOST_COMMIT) from error

    async def _committed(self, mark: str) -> bool:
        """Whether a transaction whose COMMIT got no answer took effect; waits while it is still in progress."""
        for attempt in range(40):
            try:
                connection = await self.connect(application="duly-resolve")
                try:
                    outcome = await connection.fetchval("SELECT duly.commit_outcome($1)", mark)
                finally:
                    await connection.close()
            except Exception as error:
                if not is_disconnect(error):
                    raise
                outcome = None
            if outcome in {"committed", "aborted", "lost"}:
                return bool(outcome == "committed")
            if outcome == "crashed":
                raise OutcomeUnknown(LOST_COMMIT)
            await asyncio.sleep(min(0.05 * 2**attempt, 1.0))
        raise OutcomeUnknown(f"the outcome of transaction {mark} could not be learned: the database stayed away")

    async def run(self, work: Callable[[Tx], Awaitable[T]], *, confirm: bool = True) -> T:
        """Run ``work`` in a transaction, again up to three times when it lost a deadlock or a serialization race."""
        for attempt in range(CONFLICT_RETRIES + 1):
            try:
                async with self.transaction(confirm=confirm) as tx:
                    return await work(tx)
            except Exception as error:
                if not is_conflict(error) or attempt == CONFLICT_RETRIES:
                    raise
                await asyncio.sleep(random.uniform(0.005, 0.02) * 2**attempt)  # noqa: S311 - jitter, not a secret
        raise AssertionError("unreachable: the last attempt returns or raises")

    @contextlib.contextmanager
    def transaction_sync(self) -> Iterator[Session]:
        """The same for synchronous code, on psycopg."""
        with Session(self.sync_engine, expire_on_commit=False, info={_SCOPE: Scope()}) as session:
            yield session
            session.flush()
            try:
                session.commit()
            except Exception as error:
                if is_disconnect(error):
                    raise OutcomeUnknown(LOST_COMMIT) from error
                raise

    # -- connections --------------------------------------------------------------------------------------------

    async def connect(self, *, application: str = "duly", statement_timeout_seconds: float | None = None) -> Any:
        """A new asyncpg connection with bounded waits everywhere."""
        timeout = statement_timeout_seconds or self.settings.statement_timeout_seconds
        idle_seconds = max(self.settings.idle_transaction_seconds, timeout)
        try:
            connection = await asyncpg.connect(
                self.dsn or None,
                timeout=self.settings.connect_timeout_seconds,
                command_timeout=timeout + 5,
                server_settings={
                    "application_name": application,
                    "statement_timeout": str(int(timeout * 1000)),
                    "idle_in_transaction_session_timeout": str(int(idle_seconds * 1000)),
                    "timezone": "UTC",
                },
            )
            await _decode_json(connection)
        except Exception as error:
            for cause in _causes(error):
                cause.__traceback__ = None  # the driver's frames hold the password, and some loggers show all they hold
            if is_disconnect(error) and not isinstance(error, asyncpg.ProtocolViolationError):  # that is a pooler's no
                raise Unavailable(f"the database cannot be reached: {type(error).__name__}") from error
            raise
        return connection

    @property
    def sync_engine(self) -> Engine:
        """A psycopg engine for synchronous handlers, made when first needed."""
        if self._sync_engine is None:
            self._sync_engine = create_engine(
                "postgresql+psycopg://",
                creator=self._connect_sync,
                pool_size=self.pool_size,
                max_overflow=self.pool_size,
                hide_parameters=True,
            )
        return self._sync_engine

    def _connect_sync(self) -> psycopg.Connection[Any]:
        timeout = int(self.settings.statement_timeout_seconds * 1000)
        return psycopg.connect(
            self.dsn,
            connect_timeout=max(1, int(self.settings.connect_timeout_seconds)),
            application_name="duly-sync",
            options=f"-c statement_timeout={timeout} -c timezone=UTC "
            f"-c idle_in_transaction_session_timeout={int(self.settings.idle_transaction_seconds * 1000)}",
        )

    def poke(self, *channels: str) -> None:
        """Wake the duties that wait for ``jobs``, ``outbox`` or ``schedules``, here and in other processes."""
        self._poker.poke(channels)

    async def close(self) -> None:
        """Give back every connection."""
        if not self._shares_poker:
            await self._poker.close()
        await self.engine.dispose()
        while self._idle:
            self._idle.pop().terminate()
        if self._sync_engine is not None:
            self._sync_engine.dispose()


_READ_MARK = text("SELECT duly.commit_mark()")


def atomic(connection: Any) -> contextlib.AbstractAsyncContextManager[Any]:
    """A transaction on a duty's own asyncpg connection: the engine's counterpart of ``Database.transaction``."""
    transaction: contextlib.AbstractAsyncContextManager[Any] = connection.transaction()
    return transaction


def origin_of(tx: Any) -> Origin:
    """Where the work in this transaction comes from; without any origin, all of one transaction shares a fresh id."""
    origin = current_origin()
    if origin.correlation_id is None and (scope := _scope(tx)):
        scope.correlation_id = scope.correlation_id or uuid7()
        return replace(origin, correlation_id=scope.correlation_id)
    return origin


def note_mark(tx: Any, mark: str) -> None:
    """Whoever got ``duly.commit_mark()`` with a statement of theirs says so, and COMMIT need not ask for it."""
    if scope := _scope(tx):
        scope.mark = mark


def request_poke(tx: Any, channel: str) -> bool:
    """Remember, on a transaction that Database commits, whom to wake after its COMMIT; False for anybody else's."""
    scope = _scope(tx)
    if scope is None:
        return False
    if channel not in scope.notified:
        scope.pokes.add(channel)
    return True


def must_notify(tx: Any, channel: str) -> bool:
    """Whether a statement is to notify inside its transaction; if not, the wake-up is remembered until the COMMIT.

    It must in a transaction of somebody else's, and in ours while this process has little to say.
    """
    scope = _scope(tx)
    if scope is None or scope.poker is None or channel in scope.notified | scope.pokes:
        return not request_poke(tx, channel)
    if scope.poker.is_quiet(channel):
        scope.notified.add(channel)
        return True
    return not request_poke(tx, channel)


@contextlib.contextmanager
def lend_scope(tx: AsyncSession, connection: AsyncConnection) -> Iterator[None]:
    """Let the session's connection, given to a handler instead of the session, count as the same transaction."""
    connection.info[_SCOPE] = tx.info[_SCOPE]
    try:
        yield
    finally:
        connection.info.pop(_SCOPE, None)


def normal_dsn(dsn: str) -> str:
    """A libpq address without SQLAlchemy's driver suffix; one that each driver would read in its own way is refused.

    In words of our own: theirs take a part of the password for a host or port, and repeat it.
    """
    address = re.sub(r"^postgres(ql)?(\+\w+)?://", "postgresql://", dsn.strip())
    if address.startswith("postgresql://") and not (address.isprintable() and _ADDRESS.fullmatch(address)):
        raise Refused(UNREADABLE)
    return address


def safe_dsn(dsn: str) -> str:
    """Where the database is, in words without a password."""
    try:
        parts = psycopg.conninfo.conninfo_to_dict(normal_dsn(dsn))
    except (psycopg.Error, Refused, UnicodeError):
        return "an address that cannot be read"
    if "://" in str(parts.get("dbname")):  # an address within the address
        return "an address that cannot be read"
    shown = [f"{name}={parts[name]}" for name in ("host", "port", "dbname", "user") if parts.get(name)]
    return " ".join(shown) or "what the PG* variables say"


def describe_error(error: BaseException) -> str:
    """An error for the history: its class and first line. What a database adds below that quotes values."""
    kind = type(error).__name__
    inner = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
    if isinstance(inner, asyncpg.PostgresError | psycopg.Error) or isinstance(error, DBAPIError):
        first = _DRIVER_CLASS.sub("", str(inner).partition("\n")[0])
        return f"{kind}: {first}"
    return f"{kind}: {error}"
