"""The use cases of identity checks: each gets a transaction and never ends it."""

from __future__ import annotations

import secrets
from collections.abc import Collection
from dataclasses import replace
from datetime import timedelta
from uuid import UUID

import structlog

from apps.finance.kyc import events, store
from apps.finance.kyc.model import (
    CALLBACKS_KEPT_DAYS,
    DECIDED,
    KEPT_DAYS,
    TOKEN_BYTES,
    WINDOW,
    Callback,
    CallbackDealtWith,
    CallbackNotFound,
    Handled,
    HistoryLine,
    Problem,
    Session,
    SessionNotFound,
    Status,
    UnknownProvider,
    Verdict,
    has_run_out,
    hash_token,
    hear,
    is_opaque,
    opens,
)
from duly import Tx, cancel, emit, schedule
from duly.errors import Fault
from duly.failpoints import failpoint
from duly.messages import EventBody
from duly.operate.alerts import raise_alert, resolve_alert

log = structlog.get_logger("apps.kyc")
EXPIRE, SWEEP, FORGET = "kyc.expire", "kyc.sweep", "kyc.forget"
SWEEP_BATCH = 500
FORGET_LIMIT = 5_000
MOST_OF_AN_ACTOR = 200  # in the engine's audit
SYSTEM = "system"
FACTS: dict[Status, type[EventBody]] = {
    Status.PENDING: events.SessionCreated, Status.APPROVED: events.SessionApproved,
    Status.REJECTED: events.SessionRejected, Status.EXPIRED: events.SessionExpired,
}  # fmt: skip


# -- beginning -------------------------------------------------------------------------------------------------------


async def create_session(
    tx: Tx, *, user_id: str, provider: str, by: str, known: Collection[str]
) -> tuple[Session, str]:  # fmt: skip
    """A session that expires by itself, whether or not anybody ever comes, or the provider ever answers (F8).

    With the token that opens its page, this once: it is not kept.
    """
    if provider not in known:
        refused = UnknownProvider("no provider of this name is plugged in")
        refused.faults = (Fault("body", "$.providerId", "name a provider that is plugged in, or leave it out"),)
        raise refused
    token = secrets.token_urlsafe(TOKEN_BYTES)
    session = await store.insert_session(
        tx, user_id=user_id, provider=provider, by=by, token=hash_token(token), window=WINDOW
    )
    failpoint("handler.mid")
    await schedule(tx, EXPIRE, session.id, session.expires_at)
    await emit(tx, _fact(session))
    return session, token


async def begin_opening(tx: Tx, session_id: UUID, *, token: str) -> tuple[Session, timedelta]:
    """The session that somebody came for, and how long it has; SessionNotFound also for a wrong token."""
    found = await store.lock_session(tx, session_id)
    if found is None or not opens(found.session, token):
        raise SessionNotFound("there is no such page")
    session = await _expire_if_over(tx, found)
    return session, max(session.expires_at - found.now, timedelta(0))


async def note_opened(tx: Tx, session_id: UUID, *, reference: str | None) -> Session:
    """The provider has a page for it, under this name: the first name that it gave is the one that counts."""
    found = await _lock(tx, session_id)
    session = await _expire_if_over(tx, found)
    if not session.is_open:
        return session
    after = replace(session, status=Status.IN_PROGRESS)
    if reference is not None and session.provider_ref is None:
        owner = await store.find_reference(tx, session.provider, reference)
        after = after if owner is not None else replace(after, provider_ref=reference)
        reference = None if owner is None else reference
    if reference not in (None, after.provider_ref):
        log.error("kyc_reference_differs", session_id=str(session.id))
        await raise_alert(
            tx,
            subject=f"kyc.reference:{session.id}",
            message=f"the provider gave session {session.id} a second name, or that of another session",
        )
    return after if after == session else await _apply(tx, session, after, cause="open")


# -- hearing ---------------------------------------------------------------------------------------------------------


async def receive(tx: Tx, callback: Callback) -> str:
    """What a provider called to say: applied, or ignored because it is old, or kept for a person."""
    found, named = await store.lock_referred(tx, callback)
    if found is None:
        return await _keep(tx, callback, Problem.UNKNOWN_SESSION, None)
    session = await _expire_if_over(tx, found)
    if named > 1 or _is_named_otherwise(session, callback):
        return await _keep(tx, callback, Problem.NAMES_DIFFER, None)
    if callback.status is None:
        return await _keep(tx, callback, Problem.UNKNOWN_STATUS, session)
    after = hear(session, callback.status, evidence_ref=callback.evidence_ref)
    if after is Verdict.STAY:
        return "ignored"
    if after is Verdict.CONTRADICT:
        return await _keep(tx, callback, Problem.CONTRADICTS, session)
    assert isinstance(after, Session)
    if after.status in DECIDED and not is_opaque(after.evidence_ref):
        return await _keep(tx, callback, Problem.BAD_EVIDENCE, session)
    failpoint("handler.mid")
    await _apply(tx, session, after, cause="callback")
    return "applied"


def _is_named_otherwise(session: Session, callback: Callback) -> bool:
    """Whether one of its names is not this session's."""
    is_other_id = callback.client_ref is not None and callback.client_ref != session.id
    is_other_ref = None not in (callback.session_ref, session.provider_ref) and (
        callback.session_ref != session.provider_ref
    )
    return is_other_id or is_other_ref


async def expire(tx: Tx, session_id: UUID) -> timedelta | None:
    """Its time is over; how long it has yet, None when there is nothing (more) to do."""
    found = await _lock(tx, session_id)
    if not found.session.is_open:
        return None
    if not has_run_out(found.session, found.now):
        return found.session.expires_at - found.now
    await _expire_if_over(tx, found)
    return None


async def sweep(tx: Tx, *, limit: int = SWEEP_BATCH) -> tuple[int, bool]:
    """Expire whatever its own timer missed; how many, and whether there may be more."""
    due = await store.lock_due(tx, limit=limit)
    for found in due:
        await _expire_if_over(tx, found)
    return len(due), len(due) == limit


# -- a person decides, and time passes -------------------------------------------------------------------------------


async def dismiss_callback(tx: Tx, callback_id: UUID, *, actor: str, handled: Handled) -> store.Unmatched:
    """A person has dealt with a callback that was kept; once."""
    dismissed = await store.dismiss_callback(tx, callback_id, actor=actor, handled=handled.value)
    if dismissed is not None:
        await _close_alert(tx, dismissed.provider, dismissed.session_id, actor=actor, reason="dealt with")
        return dismissed
    if await store.has_callback(tx, callback_id):
        raise CallbackDealtWith("the callback was dealt with before")
    raise CallbackNotFound(f"no callback has the id {callback_id}")


async def forget(tx: Tx, *, limit: int = FORGET_LIMIT) -> tuple[int, int, bool]:
    """Drop what nobody may keep any longer: sessions, callbacks, and whether there may be more."""
    gone = await store.forget_sessions(tx, days=KEPT_DAYS, limit=limit)
    failpoint("handler.mid")
    callbacks, waiting = await store.forget_callbacks(tx, days=CALLBACKS_KEPT_DAYS, limit=limit)
    for provider, session_id in sorted(waiting, key=str):
        await _close_alert(tx, provider, session_id, actor=SYSTEM, reason="no longer kept")
    return gone, callbacks, limit in (gone, callbacks)


# -- looking ---------------------------------------------------------------------------------------------------------


async def read_session(tx: Tx, session_id: UUID) -> tuple[Session, list[HistoryLine]]:
    """One by its id, with its history."""
    found = await store.find_session(tx, session_id)
    if found is None:
        raise SessionNotFound(f"no session has the id {session_id}")
    return found, await store.read_history(tx, session_id)


async def list_sessions(
    tx: Tx, *, user_id: str | None = None, status: Status | None = None, before: UUID | None = None, limit: int = 50
) -> tuple[list[Session], UUID | None]:
    """A page, the newest first, and where the next one begins."""
    found = await store.list_sessions(tx, user_id=user_id, status=status, before=before, limit=limit + 1)
    page = found[:limit]
    return page, page[-1].id if len(found) > limit else None


async def list_unmatched(
    tx: Tx, *, is_open: bool = True, before: UUID | None = None, limit: int = 50
) -> tuple[list[store.Unmatched], UUID | None]:
    """A page of callbacks that a person should look at, and where the next one begins."""
    found = await store.list_unmatched(tx, is_open=is_open, before=before, limit=limit + 1)
    page = found[:limit]
    return page, page[-1].id if len(found) > limit else None


async def _lock(tx: Tx, session_id: UUID) -> store.Locked:
    found = await store.lock_session(tx, session_id)
    if found is None:
        raise SessionNotFound(f"no session has the id {session_id}")
    return found


async def _expire_if_over(tx: Tx, found: store.Locked) -> Session:
    """Whoever comes first after its time says so: its timer, a sweep, a callback, or a person with the page."""
    if not has_run_out(found.session, found.now):
        return found.session
    return await _apply(tx, found.session, replace(found.session, status=Status.EXPIRED), cause="expire")


async def _apply(tx: Tx, was: Session, after: Session, *, cause: str) -> Session:
    """Write a change with everything that belongs to it: the history, the fact, the timer."""
    saved = await store.save_session(tx, was, after, cause=cause)
    failpoint("handler.mid")
    if not saved.is_open:
        await emit(tx, _fact(saved))
        if cause != "expire":
            await cancel(tx, EXPIRE, saved.id)
    return saved


async def _keep(tx: Tx, callback: Callback, problem: Problem, session: Session | None) -> str:
    """For a person: which session, and what is wrong; none of the provider's own words."""
    log.warning("kyc_callback_kept", provider=callback.provider, problem=problem.value)
    session_id = session.id if session else None
    await store.keep_callback(tx, callback, problem=problem, session_id=session_id)
    await raise_alert(
        tx,
        subject=_subject(callback.provider, session_id),
        message=f"a callback of {callback.provider} is kept for a person: {problem.value}",
    )
    return "kept"


def _subject(provider: str, session_id: UUID | None) -> str:
    """Of the engine's alert about callbacks of this session, or of none that is known."""
    return f"kyc.callbacks.{provider}" + (f":{session_id}" if session_id else "")


async def _close_alert(tx: Tx, provider: str, session_id: UUID | None, *, actor: str, reason: str) -> None:
    """Once the last callback of its subject is dealt with; the alert is locked before they are looked for."""
    alerts = await store.lock_alerts(tx, _subject(provider, session_id))
    if alerts and not await store.has_open_callback(tx, provider, session_id):
        for alert_id in alerts:
            await resolve_alert(tx, alert_id, actor=actor[:MOST_OF_AN_ACTOR], reason=reason)


def _fact(session: Session) -> EventBody:
    kind = FACTS[session.status]
    known = vars(session) | {"session_id": session.id}
    return kind.model_validate({name: known[name] for name in kind.model_fields})
