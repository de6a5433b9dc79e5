"""Handlers: what a function asks for, and the context it is given."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import Enum
from typing import Any
from uuid import UUID

import asyncpg
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Session

from duly.db import Database, load_json
from duly.errors import Invalid
from duly.ids import uuid7, uuid7s
from duly.jobs.outcomes import Cancel, Done, Fail, Snooze, Then, ThenTogether
from duly.messages import storable
from duly.telemetry import Origin

DEFAULT_MAX_RETRIES = 3
MAX_MESSAGE = 2_000
_DONE = Done()


class TxKind(Enum):
    """Which transaction a handler asked for, by its annotation."""

    NONE = "none"
    SESSION = "AsyncSession"
    CONNECTION = "AsyncConnection"
    RAW = "asyncpg.Connection"
    SYNC = "Session"
    OWN = "Database"  # none is open: it opens its own, before or after a call to the outside


_TX_KINDS: dict[Any, TxKind] = {
    AsyncSession: TxKind.SESSION,
    AsyncConnection: TxKind.CONNECTION,
    asyncpg.Connection: TxKind.RAW,
    Session: TxKind.SYNC,
    Database: TxKind.OWN,
}


Lease = tuple[int, int]  # a job's id, and the token of one claim of it


def _column(index: int) -> Any:
    """A property that reads what the claim returned, when somebody asks: most runs ask for little."""
    return property(lambda job: job.row[index])


class Job:
    """One job that this worker holds, and its lease."""

    __slots__ = (
        "_execution_id", "argument", "claimed_mono", "duplicate", "give_up_at", "id", "lease_token", "name", "news",
        "renewed_at", "row", "unreadable",
    )  # fmt: skip

    def __init__(self, row: Sequence[Any], claimed_mono: float) -> None:
        """From what the claim returned, in the order of its columns (``sql.CLAIMED``)."""
        self.row = row
        self.id: int = row[0]
        self.name: str = row[1]
        self.lease_token: int = row[17]
        self.claimed_mono = claimed_mono
        self.renewed_at = claimed_mono
        self.give_up_at = float("inf")  # when its handler has used up its time
        self.news: str | None = None  # what it reported since the last heartbeat
        self.argument: Any = None
        self.duplicate = False
        self.unreadable: str | None = None  # why the event of this job cannot be given to anybody
        self._execution_id: UUID | None = None

    entity_id: str | None = _column(2)
    payload_text: str = _column(3)
    priority: int = _column(4)
    retry_count: int = _column(8)
    max_retries: int | None = _column(9)
    backoff_seconds: list[int] | None = _column(10)
    source: str = _column(11)
    event_id: UUID | None = _column(12)
    order_key: str | None = _column(13)
    correlation_id: UUID | None = _column(14)
    causation_id: UUID | None = _column(15)
    traceparent: str | None = _column(16)
    lost_by: str | None = _column(19)

    @property
    def lease(self) -> Lease:
        """The claim that this run stands on."""
        return self.id, self.lease_token

    @property
    def turn(self) -> tuple[int, float, int]:
        """What is run first: the more urgent, then the one due for longer."""
        row = self.row
        return row[4], row[5], row[0]

    @property
    def late_seconds(self) -> float:
        """How long after it was due it was claimed."""
        seconds: float = self.row[18] - self.row[5]
        return max(0.0, seconds)

    @property
    def due_at(self) -> datetime:
        """When it was first due."""
        return datetime.fromtimestamp(self.row[6], UTC)

    @property
    def claimed_at(self) -> datetime:
        """When this worker took it, by the database's clock."""
        return datetime.fromtimestamp(self.row[18], UTC)

    @property
    def original_delay(self) -> timedelta:
        """How long it was to wait at first."""
        return timedelta(seconds=self.row[7])

    @property
    def execution_id(self) -> UUID:
        """The id of this run."""
        if self._execution_id is None:
            self._execution_id = uuid7()
        return self._execution_id

    @property
    def has_execution_id(self) -> bool:
        """Whether somebody has asked for it: otherwise ``number_runs`` gives it one with many others."""
        return self._execution_id is not None

    @property
    def origin(self) -> Origin:
        """What the work it causes carries."""
        return Origin(self.correlation_id, self.event_id or self.execution_id, self.traceparent)


def number_runs(jobs: Sequence[Job]) -> None:
    """Give an execution id to each that has none yet."""
    nameless = [job for job in jobs if not job.has_execution_id]
    for job, execution_id in zip(nameless, uuid7s(len(nameless)), strict=True):
        job._execution_id = execution_id


class JobContext:
    """What a handler knows of its run, and how it reports. Returning is success, raising is failure."""

    __slots__ = ("_began", "_failure", "_job", "_message", "_payload", "_progress")

    def __init__(self, job: Job, began: float, progress: Callable[[int, str], None]) -> None:
        self._job = job
        self._began = began
        self._progress = progress
        self._message: str | None = None
        self._failure: str | None = None
        self._payload: dict[str, Any] | None = None

    @property
    def started_at(self) -> datetime:
        """When this run started, by the database's clock."""
        return self._job.claimed_at + timedelta(seconds=self._began - self._job.claimed_mono)

    @property
    def name(self) -> str:
        """The job's name."""
        return self._job.name

    @property
    def job_id(self) -> int:
        """The queue's id of this job, the same through all its retries."""
        return self._job.id

    @property
    def entity_id(self) -> str | None:
        """What the job is about; None for a recurring one."""
        return self._job.entity_id

    @property
    def execution_id(self) -> UUID:
        """The id of this run; a good idempotency key for calls to the outside is ``job_id``, which retries share."""
        return self._job.execution_id

    @property
    def payload(self) -> dict[str, Any]:
        """What was given when it was scheduled."""
        if self._payload is None:
            self._payload = load_json(self._job.payload_text)
        return self._payload

    @property
    def due_at(self) -> datetime:
        """When it was first due: the cron occurrence, or the ``run_at`` of the timer."""
        return self._job.due_at

    @property
    def late_by(self) -> timedelta:
        """How long after its time this run started."""
        return max(self.started_at - self._job.due_at, timedelta(0))

    @property
    def retry_count(self) -> int:
        """How many runs failed before this one."""
        return self._job.retry_count

    @property
    def correlation_id(self) -> UUID | None:
        """The id that everything of one request or occurrence shares."""
        return self._job.correlation_id

    def report_success(self, message: str) -> None:
        """A sentence for the history."""
        self._message = message

    def report_failure(self, error: str) -> None:
        """The run failed although it returns: its writes are rolled back, and it is retried."""
        self._failure = error

    def report_progress(self, message: str) -> None:
        """What a person sees while it runs; sent with the next heartbeat."""
        self._progress(self._job.id, storable(str(message)[:MAX_MESSAGE]))

    def outcome(self, returned: Any) -> Done | Snooze | Cancel | Fail | Then | ThenTogether:
        """What the run came to."""
        if self._failure is not None:
            raise ReportedFailure(self._failure)
        if returned is None and self._message is None:
            return _DONE
        if isinstance(returned, Done | Snooze | Cancel | Fail | Then | ThenTogether):
            return returned
        return Done(self._message)


class ReportedFailure(Exception):
    """A handler called ``report_failure``."""


@dataclass
class Handler:
    """A function under a name, with what it asked for."""

    name: str
    function: Callable[..., Any]
    tx_kind: TxKind = TxKind.NONE
    is_async: bool = True
    takes_argument: bool = True
    max_retries: int = DEFAULT_MAX_RETRIES
    backoff_seconds: list[int] | None = None
    timeout_seconds: float | None = None
    limit: int | None = None
    batch: int = 1
    tx_position: int = field(default=1)
    group: int = 1
    is_plain: bool = field(init=False)

    def __post_init__(self) -> None:
        """A plain one is an ``async def`` without a transaction that takes one job at a time: nothing but a call."""
        self.is_plain = type(self) is Handler and self.is_async and self.tx_kind is TxKind.NONE

    @property
    def is_in_tx(self) -> bool:
        """Whether it runs inside a transaction, which its settlement joins."""
        return self.tx_kind not in (TxKind.NONE, TxKind.OWN)

    @property
    def unit_size(self) -> int:
        """How many jobs share one transaction."""
        return max(self.batch, self.group)

    def arguments(self, argument: Any, tx: Any) -> list[Any]:
        """The positional arguments of one call."""
        given = [argument] if self.takes_argument else []
        if self.tx_kind is not TxKind.NONE:
            given.insert(self.tx_position if self.takes_argument else 0, tx)
        return given

    async def load(self, connection: Any, jobs: Sequence[Job]) -> None:
        """Fetch what the jobs of one claim need, in one statement; ordinary jobs need nothing."""

    async def mark(self, tx: Any, jobs: Sequence[Job]) -> set[int]:
        """Mark the jobs as handled inside their transaction; the ids of those that had been before."""
        return set()

    async def unmark(self, tx: Any, jobs: Sequence[Job]) -> None:
        """Take the marks back in the same transaction, because the jobs are not done after all."""

    def unmark_sync(self, tx: Any, jobs: Sequence[Job]) -> None:
        """The same on a synchronous session."""

    def mark_sync(self, tx: Any, jobs: Sequence[Job]) -> set[int]:
        """The same on a synchronous session."""
        return set()


@dataclass(frozen=True)
class Signature:
    """What a function's parameters ask for."""

    takes_argument: bool
    tx_kind: TxKind
    tx_position: int
    is_async: bool


def read_signature(function: Callable[..., Any], *, argument_types: Sequence[Any], what: str) -> Signature:
    """Find out which parameter is the context (or event) and which the transaction; refuse what cannot be served."""
    is_async = inspect.iscoroutinefunction(function)
    hints = _hints(function)
    argument: int | None = None
    tx: tuple[int, TxKind] | None = None
    for index, parameter in enumerate(inspect.signature(function).parameters.values()):
        if (
            parameter.kind in (parameter.VAR_KEYWORD, parameter.KEYWORD_ONLY)
            or parameter.default is not parameter.empty
        ):
            continue
        hint = hints.get(parameter.name)
        kind = _TX_KINDS.get(typing.get_origin(hint) or hint)
        if kind is None and hint is None and parameter.name in ("tx", "session"):
            kind = TxKind.SESSION if is_async else TxKind.SYNC
        if kind is not None and tx is None:
            tx = (index, kind)
        elif (hint is None or hint in argument_types or hint is Any) and argument is None:
            argument = index
        else:
            raise Invalid(
                f"{what}: the parameter {parameter.name!r} ({hint}) cannot be served; a handler takes "
                f"{' or '.join(getattr(t, '__name__', str(t)) for t in argument_types)}, and a transaction "
                "annotated Tx, AsyncConnection, asyncpg.Connection or (in a plain def) Session, or Database for "
                "transactions of its own"
            )
    tx_kind = tx[1] if tx else TxKind.NONE
    if tx_kind not in (TxKind.NONE, TxKind.OWN) and is_async == (tx_kind is TxKind.SYNC):
        raise Invalid(
            f"{what}: {'an async def takes Tx, not Session' if is_async else 'a plain def takes Session, not Tx'}"
        )
    return Signature(
        argument is not None, tx_kind, 0 if tx and argument is not None and tx[0] < argument else 1, is_async
    )


def _hints(function: Callable[..., Any]) -> Mapping[str, Any]:
    try:
        return typing.get_type_hints(function)
    except (NameError, TypeError):  # names that exist only for the type checker
        return {
            name: hint for name, hint in getattr(function, "__annotations__", {}).items() if not isinstance(hint, str)
        }
