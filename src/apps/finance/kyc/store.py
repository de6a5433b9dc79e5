"""Every statement on sessions, their history and callbacks that were kept. A session is locked before it changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from sqlalchemy import text

from apps.finance.kyc.model import Callback, HistoryLine, Problem, Session, Status
from apps.finance.kyc.tables import metadata, sessions
from duly import Tx
from duly.ids import uuid7

__all__ = ["metadata"]

INSERT_SESSION = text("""
WITH made AS (
    INSERT INTO kyc.sessions (id, user_id, provider, status, token, requested_by, created_at, expires_at, updated_at)
    VALUES (CAST(:id AS uuid), :user_id, :provider, 'PENDING', :token, :requested_by, duly.now(),
            duly.now() + CAST(:window AS interval), duly.now())
    RETURNING *
), told AS (
    INSERT INTO kyc.history (session_id, number, at, to_status, cause)
    SELECT id, 1, created_at, status, 'create' FROM made
)
SELECT * FROM made
""")
SAVE_SESSION = text("""
WITH moved AS (
    UPDATE kyc.sessions s
    SET status = CAST(:status AS text), provider_ref = CAST(:provider_ref AS text),
        evidence_ref = CAST(:evidence_ref AS text), version = s.version + 1,
        updated_at = greatest(duly.now(), s.updated_at)
    WHERE s.id = CAST(:id AS uuid) AND s.version = CAST(:version AS integer)
    RETURNING s.*
), told AS (
    INSERT INTO kyc.history (session_id, number, at, from_status, to_status, cause)
    SELECT id, version, updated_at, CAST(:from_status AS text), status, CAST(:cause AS text) FROM moved
)
SELECT * FROM moved
""")
LOCK_SESSION = text("""
SELECT s.*, duly.now() AS moment FROM kyc.sessions s WHERE s.id = CAST(:id AS uuid) FOR NO KEY UPDATE
""")
FIND_SESSION = text("SELECT * FROM kyc.sessions WHERE id = CAST(:id AS uuid)")
FIND_REFERENCE = text("""
SELECT s.id FROM kyc.sessions s
WHERE s.provider = CAST(:provider AS text) AND s.provider_ref = CAST(:reference AS text)
""")
# A provider knows a session by the id we gave it, or by its own reference; it cannot name another provider's.
LOCK_REFERRED = text("""
WITH found AS MATERIALIZED (
    SELECT r.id FROM kyc.sessions r
    WHERE r.provider = CAST(:provider AS text) AND r.provider_ref = CAST(:session_ref AS text)
    UNION
    SELECT k.id FROM kyc.sessions k
    WHERE k.provider = CAST(:provider AS text) AND k.id = CAST(:client_ref AS uuid))
SELECT s.*, duly.now() AS moment, (SELECT count(*) FROM found) AS named FROM kyc.sessions s
WHERE s.id = (SELECT f.id FROM found f LIMIT 1)
FOR NO KEY UPDATE OF s
""")
LOCK_DUE = text("""
SELECT s.*, duly.now() AS moment FROM kyc.sessions s
WHERE s.status IN ('PENDING', 'IN_PROGRESS') AND s.expires_at <= duly.now()
ORDER BY s.expires_at, s.id LIMIT CAST(:limit AS integer) FOR NO KEY UPDATE SKIP LOCKED
""")
READ_HISTORY = text("""
SELECT number, at, from_status, to_status, cause FROM kyc.history
WHERE session_id = CAST(:id AS uuid) ORDER BY number DESC LIMIT CAST(:limit AS integer)
""")
KEEP_CALLBACK = text("""
INSERT INTO kyc.unmatched_callbacks
    (id, provider, event_id, client_ref, session_ref, status, evidence_ref, problem, session_id, received_at)
VALUES (CAST(:id AS uuid), :provider, :event_id, CAST(:client_ref AS uuid), CAST(:session_ref AS text),
        CAST(:status AS text), CAST(:evidence_ref AS text), :problem, CAST(:session_id AS uuid), duly.now())
ON CONFLICT (provider, event_id) DO NOTHING
""")
DISMISS_CALLBACK = text("""
UPDATE kyc.unmatched_callbacks
SET dismissed_at = greatest(duly.now(), received_at), dismissed_by = CAST(:actor AS text),
    handled = CAST(:handled AS text)
WHERE id = CAST(:id AS uuid) AND dismissed_at IS NULL
RETURNING *
""")
# Asked once the alert is locked: whoever keeps another callback has counted the alert up before, or opens a new one.
HAS_OPEN_CALLBACK = text("""
SELECT EXISTS (SELECT 1 FROM kyc.unmatched_callbacks
WHERE dismissed_at IS NULL AND provider = CAST(:provider AS text)
  AND coalesce(session_id, CAST('00000000-0000-0000-0000-000000000000' AS uuid))
      = coalesce(CAST(:session_id AS uuid), CAST('00000000-0000-0000-0000-000000000000' AS uuid)))
""")
LOCK_ALERTS = text("""
SELECT a.id FROM duly.alerts a
WHERE a.kind = 'application' AND a.subject = CAST(:subject AS text) AND a.resolved_at IS NULL
ORDER BY a.id FOR UPDATE
""")
FIND_CALLBACK = text("SELECT id FROM kyc.unmatched_callbacks WHERE id = CAST(:id AS uuid)")
# The history goes with its session.
FORGET_SESSIONS = text("""
DELETE FROM kyc.sessions WHERE id = ANY(ARRAY(
    SELECT s.id FROM kyc.sessions s
    WHERE s.updated_at < duly.now() - make_interval(days => CAST(:days AS integer))
      AND s.status NOT IN ('PENDING', 'IN_PROGRESS')
    ORDER BY s.updated_at, s.id LIMIT CAST(:limit AS integer) FOR UPDATE SKIP LOCKED))
RETURNING id
""")
FORGET_CALLBACKS = text("""
DELETE FROM kyc.unmatched_callbacks WHERE id = ANY(ARRAY(
    SELECT c.id FROM kyc.unmatched_callbacks c
    WHERE c.received_at < duly.now() - make_interval(days => CAST(:days AS integer))
    ORDER BY c.received_at, c.id LIMIT CAST(:limit AS integer) FOR UPDATE SKIP LOCKED))
RETURNING provider, session_id, dismissed_at IS NULL AS is_open
""")
# A page of each list, the newest first: ids are ordered by time. Rows, not "status = :status": of a status that few
# have, a plan for any of them would read all sessions by their ids.
LIST_SESSIONS = text("""
SELECT * FROM kyc.sessions WHERE id < coalesce(CAST(:before AS uuid), 'ffffffff-ffff-ffff-ffff-ffffffffffff')
ORDER BY id DESC LIMIT CAST(:limit AS integer)
""")
LIST_IN_STATUS = text("""
SELECT * FROM kyc.sessions
WHERE status >= CAST(:status AS text)
  AND (status, id) < (CAST(:status AS text), coalesce(CAST(:before AS uuid), 'ffffffff-ffff-ffff-ffff-ffffffffffff'))
ORDER BY status DESC, id DESC LIMIT CAST(:limit AS integer)
""")
LIST_OF_USER = text("""
SELECT * FROM kyc.sessions
WHERE user_id >= CAST(:user_id AS text)
  AND (user_id, id) < (CAST(:user_id AS text), coalesce(CAST(:before AS uuid), 'ffffffff-ffff-ffff-ffff-ffffffffffff'))
ORDER BY user_id DESC, id DESC LIMIT CAST(:limit AS integer)
""")
LIST_CALLBACKS = text("""
SELECT * FROM kyc.unmatched_callbacks
WHERE id < coalesce(CAST(:before AS uuid), 'ffffffff-ffff-ffff-ffff-ffffffffffff')
ORDER BY id DESC LIMIT CAST(:limit AS integer)
""")
LIST_OPEN_CALLBACKS = text("""
SELECT * FROM kyc.unmatched_callbacks
WHERE dismissed_at IS NULL AND id < coalesce(CAST(:before AS uuid), 'ffffffff-ffff-ffff-ffff-ffffffffffff')
ORDER BY id DESC LIMIT CAST(:limit AS integer)
""")
MOST_LINES = 20  # of a history: it has four at most, and one for each time that a reference was noted
FIELDS: Sequence[str] = [column.name for column in sessions.columns]


@dataclass(frozen=True)
class Locked:
    """A session that nobody else changes until the commit, and what time it is."""

    session: Session
    now: datetime


@dataclass(frozen=True)
class Unmatched:
    """A callback that a person should look at."""

    id: UUID
    provider: str
    event_id: str
    client_ref: UUID | None
    session_ref: str | None
    status: str | None
    problem: str
    session_id: UUID | None
    received_at: datetime
    dismissed_at: datetime | None
    dismissed_by: str | None
    handled: str | None
    evidence_ref: str | None


async def insert_session(tx: Tx, *, user_id: str, provider: str, by: str, token: str, window: timedelta) -> Session:
    """Write a new one, with the first line of its history."""
    values = {"id": uuid7(), "user_id": user_id, "provider": provider, "requested_by": by, "token": token}
    row = (await tx.execute(INSERT_SESSION, values | {"window": window})).mappings().one()
    return _session(row)


async def save_session(tx: Tx, was: Session, after: Session, *, cause: str) -> Session:
    """Write a change of one that is locked; the version says that it is the one that was read."""
    values = {
        "id": was.id, "version": was.version, "from_status": was.status.value, "status": after.status.value,
        "provider_ref": after.provider_ref, "evidence_ref": after.evidence_ref, "cause": cause,
    }  # fmt: skip
    return _session((await tx.execute(SAVE_SESSION, values)).mappings().one())


async def lock_session(tx: Tx, session_id: UUID) -> Locked | None:
    """One by its id."""
    row = (await tx.execute(LOCK_SESSION, {"id": session_id})).mappings().one_or_none()
    return Locked(_session(row), row["moment"]) if row else None


async def lock_referred(tx: Tx, callback: Callback) -> tuple[Locked | None, int]:
    """One by what a provider calls it, and how many it named."""
    values = {
        "provider": callback.provider, "session_ref": callback.session_ref, "client_ref": callback.client_ref,
    }  # fmt: skip
    row = (await tx.execute(LOCK_REFERRED, values)).mappings().one_or_none()
    return (Locked(_session(row), row["moment"]), row["named"]) if row else (None, 0)


async def lock_due(tx: Tx, *, limit: int) -> list[Locked]:
    """The oldest whose time is over and that nobody else holds."""
    found = await tx.execute(LOCK_DUE, {"limit": limit})
    return [Locked(_session(row), row["moment"]) for row in found.mappings()]


async def find_session(tx: Tx, session_id: UUID) -> Session | None:
    """One by its id."""
    row = (await tx.execute(FIND_SESSION, {"id": session_id})).mappings().one_or_none()
    return _session(row) if row else None


async def find_reference(tx: Tx, provider: str, reference: str) -> UUID | None:
    """Whose reference it is."""
    values = {"provider": provider, "reference": reference}
    found: UUID | None = (await tx.execute(FIND_REFERENCE, values)).scalar_one_or_none()
    return found


async def read_history(tx: Tx, session_id: UUID) -> list[HistoryLine]:
    """What happened to it, in order."""
    lines = [
        HistoryLine(
            row.number, row.at, Status(row.from_status) if row.from_status else None, Status(row.to_status), row.cause
        )
        for row in await tx.execute(READ_HISTORY, {"id": session_id, "limit": MOST_LINES})
    ]
    return lines[::-1]


async def list_sessions(
    tx: Tx, *, user_id: str | None, status: Status | None, before: UUID | None, limit: int
) -> list[Session]:
    """The newest first: of a person, or of a status, or all."""
    values: dict[str, Any] = {"before": before, "limit": limit}
    if user_id is not None:
        found = await tx.execute(LIST_OF_USER, values | {"user_id": user_id})
    elif status is not None:
        found = await tx.execute(LIST_IN_STATUS, values | {"status": status.value})
    else:
        found = await tx.execute(LIST_SESSIONS, values)
    return [_session(row) for row in found.mappings()]


async def forget_sessions(tx: Tx, *, days: int, limit: int) -> int:
    """Delete the oldest that are over; how many."""
    return len((await tx.execute(FORGET_SESSIONS, {"days": days, "limit": limit})).all())


# -- callbacks -------------------------------------------------------------------------------------------------------


async def keep_callback(tx: Tx, callback: Callback, *, problem: Problem, session_id: UUID | None) -> None:
    """For a person."""
    values = {
        "id": uuid7(), "provider": callback.provider, "event_id": callback.event_id, "problem": problem.value,
        "client_ref": callback.client_ref, "session_ref": callback.session_ref, "session_id": session_id,
        "status": callback.status.value if callback.status else None, "evidence_ref": callback.evidence_ref,
    }  # fmt: skip
    await tx.execute(KEEP_CALLBACK, values)


async def list_unmatched(tx: Tx, *, is_open: bool, before: UUID | None, limit: int) -> list[Unmatched]:
    """The newest first."""
    found = await tx.execute(LIST_OPEN_CALLBACKS if is_open else LIST_CALLBACKS, {"before": before, "limit": limit})
    return [_unmatched(row) for row in found.mappings()]


async def dismiss_callback(tx: Tx, callback_id: UUID, *, actor: str, handled: str) -> Unmatched | None:
    """Somebody has dealt with it; None when it is not open."""
    values = {"id": callback_id, "actor": actor, "handled": handled}
    row = (await tx.execute(DISMISS_CALLBACK, values)).mappings().one_or_none()
    return _unmatched(row) if row else None


async def lock_alerts(tx: Tx, subject: str) -> list[int]:
    """The engine's open alerts of this subject: nobody else closes them until the commit."""
    return [row[0] for row in await tx.execute(LOCK_ALERTS, {"subject": subject})]


async def has_open_callback(tx: Tx, provider: str, session_id: UUID | None) -> bool:
    """Whether one of this session, or of none, waits for somebody."""
    found: bool = (await tx.execute(HAS_OPEN_CALLBACK, {"provider": provider, "session_id": session_id})).scalar_one()
    return found


async def has_callback(tx: Tx, callback_id: UUID) -> bool:
    """Whether it is kept."""
    return (await tx.execute(FIND_CALLBACK, {"id": callback_id})).scalar_one_or_none() is not None


async def forget_callbacks(tx: Tx, *, days: int, limit: int) -> tuple[int, set[tuple[str, UUID | None]]]:
    """Delete the oldest; how many, and of whom some had waited for somebody."""
    gone = (await tx.execute(FORGET_CALLBACKS, {"days": days, "limit": limit})).all()
    return len(gone), {(row.provider, row.session_id) for row in gone if row.is_open}


def _unmatched(row: Mapping[Any, Any]) -> Unmatched:
    return Unmatched(**{field.name: row[field.name] for field in fields(Unmatched)})


def _session(row: Mapping[Any, Any]) -> Session:
    return Session(**{name: row[name] for name in FIELDS} | {"status": Status(row["status"])})
