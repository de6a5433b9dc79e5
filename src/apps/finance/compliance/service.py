"""The use cases of compliance, but for resolving: each gets a transaction and never ends it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any
from uuid import UUID

import structlog

from apps.finance.compliance import events, model, opening, store
from apps.finance.compliance.model import (
    SYSTEM,
    AlreadyReopened,
    Case,
    CaseFile,
    CaseNotEnded,
    CaseNotFound,
    Line,
    LineKind,
    check_evidence,
    check_open,
    check_room,
    check_stranger,
    find_due,
)
from apps.finance.compliance.opening import DUE
from apps.finance.compliance.opening import open_for_payment as open_for_payment
from apps.finance.compliance.store import Filters as Filters
from apps.finance.payments import service as payments
from apps.finance.payments.events import PaymentRejected
from apps.finance.payments.model import State
from duly import EventBody, NewJob, Tx, cancel, emit, find_queued, schedule, schedule_many
from duly.failpoints import failpoint
from duly.operate.alerts import raise_alert, resolve_alert

log = structlog.get_logger("apps.compliance")
RECOVER_MORE = "compliance.recover-more"
PAGE = 500
PAGES = 20  # in one commit
FORGET_LIMIT = 200  # cases in one commit
FIRST, LAST = UUID(int=0), UUID(int=2**128 - 1)
MOST_OF_AN_ACTOR = 200  # in the engine's audit
MOST_CASES_ABOUT = 100


# -- working on a case ------------------------------------------------------------------------------------------------


async def claim(tx: Tx, case_id: UUID, *, actor: str) -> Case:
    """Take a case that nobody has; who has it already keeps it."""
    was = (await lock(tx, case_id)).case
    after = model.claim(was, actor=actor)
    if after is was:
        return was
    return await _assign(tx, was, after, actor=actor, kind=LineKind.CLAIMED)


async def unclaim(tx: Tx, case_id: UUID, *, actor: str) -> Case:
    """Give a case back."""
    was = (await lock(tx, case_id)).case
    return await _assign(tx, was, model.unclaim(was, actor=actor), actor=actor, kind=LineKind.UNCLAIMED)


async def assign(tx: Tx, case_id: UUID, *, assignee: str, actor: str) -> Case:
    """Give a case to somebody, whoever had it."""
    was = (await lock(tx, case_id)).case
    after = model.assign(was, assignee, actor=actor)
    return await _assign(tx, was, after, actor=actor, kind=LineKind.ASSIGNED)


async def comment(tx: Tx, case_id: UUID, *, text: str, actor: str) -> Case:
    """Say something about it, for the other officers."""
    return await _note(tx, case_id, LineKind.COMMENTED, {"text": text}, actor=actor)


async def add_evidence(tx: Tx, case_id: UUID, *, reference: str, actor: str) -> Case:
    """Say where something is kept that speaks for a decision; nothing of it is kept here."""
    return await _note(tx, case_id, LineKind.EVIDENCE_ADDED, {"reference": check_evidence(reference)}, actor=actor)


async def reopen(tx: Tx, case_id: UUID, *, reason: str, actor: str) -> Case:
    """A new case that follows one that has ended, once; two officers decide it where two have decided before."""
    was = (await lock(tx, case_id)).case
    check_stranger(was, actor)
    if not was.has_ended:
        raise CaseNotEnded("the case is open: there is nothing to reopen")
    rules = opening.rules_in_force()
    made = await store.reopen_case(
        tx, was, actor=actor, needs_two=was.needs_two or rules.wants_two(was.amount, was.currency),
        hours=rules.sla_hours[was.severity],
        detail={"alertId": str(was.alert_id), "reopens": str(was.id), "reason": reason},
    )  # fmt: skip
    if made is None:
        raise AlreadyReopened("somebody has reopened the case before")
    failpoint("handler.mid")
    await schedule(tx, DUE, made.id, made.due_at)
    await emit(tx, opening.opened(made))
    return made


# -- because it is time -----------------------------------------------------------------------------------------------


async def come_due(tx: Tx, case_id: UUID) -> timedelta | None:
    """Nobody has decided in time: say so, once. How long it has yet; None when there is nothing to say (any more)."""
    found = await store.lock_case(tx, case_id)
    if found is None:
        return None
    was = found.case
    wait = find_due(was, now=found.now)
    if wait is None or wait > timedelta(0):
        return wait
    late = replace(was, overdue_at=found.now)
    await store.save_case(tx, was, late, actor=SYSTEM, kind=LineKind.OVERDUE, detail={})
    failpoint("handler.mid")
    await raise_alert(
        tx,
        subject=subject_of(was),
        message=f"compliance case {was.id} ({was.severity.value}) should have been decided by "
        f"{was.due_at:%Y-%m-%d %H:%M} UTC",
    )
    await emit(tx, events.CaseOverdue(case_id=was.id, severity=was.severity.value, due_at=was.due_at))
    return None


async def close_expired(tx: Tx, fact: PaymentRejected) -> None:
    """The review of a payment ended by itself: so does its case. The payment is locked by whoever tells."""
    for found in await store.lock_open_of_payment(tx, fact.payment_id):
        was = found.case
        await store.save_case(
            tx, was, model.expire(was, now=found.now), actor=SYSTEM, kind=LineKind.EXPIRED, detail={}
        )  # fmt: skip
        failpoint("handler.mid")
        await finish(tx, was, events.CaseExpired(case_id=was.id, payment_id=fact.payment_id), actor=SYSTEM)


async def recover(tx: Tx, *, after: UUID = FIRST, before: UUID = LAST) -> tuple[int, bool]:
    """Open the cases of held payments that have none, and give cases their timers back that were lost.

    How many, and whether there are more to look at: another job goes on where this one stopped.
    """
    recovered = 0
    for _ in range(PAGES):
        held: Sequence[Any] = []
        if before != FIRST:
            held, following = await payments.list_payments(tx, state=State.PENDING_REVIEW, before=before, limit=PAGE)
            recovered += await _open_missing(tx, [payment.id for payment in held])
            before = following or FIRST
        waiting = await store.read_waiting(tx, after=after, limit=PAGE) if after != LAST else []
        recovered += await _time_again(tx, [one for one in waiting if one[2] is None])
        after = waiting[-1][0] if len(waiting) == PAGE else LAST
        if before == FIRST and after == LAST:
            return recovered, False
    rest = {"after": str(after), "before": str(before)}
    await schedule(tx, RECOVER_MORE, "next", payload=rest, on_conflict="keep")
    return recovered, True


async def _open_missing(tx: Tx, payment_ids: Sequence[UUID]) -> int:
    if not payment_ids:
        return 0
    cased = await store.find_cased(tx, payment_ids)
    missing = [one for one in payment_ids if one not in cased]
    if not missing:
        return 0
    opened = await opening.open_for_held(tx, await payments.lock_held(tx, missing))
    if opened:
        log.warning("cases_recovered", count=len(opened), case_ids=[str(case.id) for case in opened[:100]])
    return len(opened)


async def _time_again(tx: Tx, waiting: Sequence[tuple[UUID, Any, Any]]) -> int:
    queued = await find_queued(tx, DUE, [one[0] for one in waiting])
    lost = [NewJob(DUE, case_id, due_at) for case_id, due_at, _ in waiting if str(case_id) not in queued]
    if lost:
        log.warning("case_timers_recovered", count=len(lost), case_ids=[str(job.entity_id) for job in lost[:100]])
        await schedule_many(tx, lost, on_conflict="keep")
    return len(lost)


async def forget(tx: Tx, *, days: int, limit: int = FORGET_LIMIT) -> tuple[int, bool]:
    """Drop cases that ended so long ago; how many, and whether there may be more. What is open is never forgotten."""
    looked_at, gone = await store.forget(tx, days=days, limit=limit)
    return gone, looked_at == limit and gone > 0


# -- looking ----------------------------------------------------------------------------------------------------------


async def read_case(tx: Tx, case_id: UUID) -> CaseFile:
    """One with its alert and what happened to it last."""
    case = await find_case(tx, case_id)
    alerts = await store.find_alerts(tx, [case.alert_id])
    successors = await store.find_successors(tx, [case.id])
    lines = await store.read_timeline(tx, case_id)
    return CaseFile(case, alerts[case.alert_id], lines, successors.get(case.id))


async def find_case(tx: Tx, case_id: UUID) -> Case:
    """One by its id."""
    found = await store.find_case(tx, case_id)
    if found is None:
        raise CaseNotFound(f"no case has the id {case_id}")
    return found


async def read_timeline(
    tx: Tx, case_id: UUID, *, before: int | None = None, limit: int = 50
) -> tuple[list[Line], int | None]:
    """A page of what happened, in order, the last before that line; and where the one before it ends."""
    await find_case(tx, case_id)
    found = await store.read_timeline(
        tx, case_id, before=min(before or store.LAST_LINE, store.LAST_LINE), limit=limit
    )  # fmt: skip
    return found, found[0].number if found and found[0].number > 1 else None


async def list_cases(
    tx: Tx, filters: Filters | None = None, *, before: UUID | None = None, limit: int = 50
) -> tuple[list[Case], UUID | None]:
    """A page of the queue, the newest first, and where the next one begins."""
    found = await store.list_cases(tx, filters or Filters(), before=before, limit=limit + 1)
    page = found[:limit]
    return page, page[-1].id if len(found) > limit else None


async def read_cases_about(
    tx: Tx, *, payment_id: UUID | None, transaction_ids: Sequence[UUID], limit: int = MOST_CASES_ABOUT
) -> list[CaseFile]:
    """The cases about a payment or these transactions, each with its alert and whole timeline, the oldest first."""
    cases = await store.find_cases_about(tx, payment_id=payment_id, transaction_ids=transaction_ids, limit=limit)
    if not cases:
        return []
    ids = [case.id for case in cases]
    alerts = await store.find_alerts(tx, [case.alert_id for case in cases])
    lines = await store.read_timelines(tx, ids)
    successors = await store.find_successors(tx, ids)
    return [CaseFile(one, alerts[one.alert_id], lines.get(one.id, []), successors.get(one.id)) for one in cases]


# -- what the use cases share -----------------------------------------------------------------------------------------


async def lock(tx: Tx, case_id: UUID) -> store.Locked:
    """One by its id, alone with it until the commit."""
    found = await store.lock_case(tx, case_id)
    if found is None:
        raise CaseNotFound(f"no case has the id {case_id}")
    return found


async def finish(tx: Tx, case: Case, fact: EventBody, *, actor: str) -> None:
    """A case has ended: no timer, no open alert, and others hear of it."""
    await cancel(tx, DUE, case.id)
    if case.overdue_at is not None:
        for alert_id in await store.lock_alerts(tx, subject_of(case)):
            await resolve_alert(tx, alert_id, actor=actor[:MOST_OF_AN_ACTOR], reason="the case has ended")
    await emit(tx, fact)


def subject_of(case: Case) -> str:
    """Of the engine's alert that it is overdue."""
    return f"compliance.overdue:{case.id}"


async def _assign(tx: Tx, was: Case, after: Case, *, actor: str, kind: LineKind) -> Case:
    detail = {} if kind is not LineKind.ASSIGNED else {"assignee": after.assignee}
    saved = await store.save_case(tx, was, after, actor=actor, kind=kind, detail=detail)
    await emit(tx, events.CaseAssigned(case_id=was.id, assignee=saved.assignee))
    return saved


async def _note(tx: Tx, case_id: UUID, kind: LineKind, detail: Mapping[str, Any], *, actor: str) -> Case:
    was = (await lock(tx, case_id)).case
    check_open(was, actor)
    check_room(was)
    return await store.save_case(tx, was, was, actor=actor, kind=kind, detail=detail)
