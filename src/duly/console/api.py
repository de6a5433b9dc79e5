"""The console over HTTP for programs: each action of the registry, and the lists that its pages show."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from datetime import datetime
from functools import lru_cache
from typing import Annotated, Any
from uuid import UUID

from fastapi import Depends, Path, Query, Request, Response
from pydantic import BaseModel, Field, create_model

from duly.auth.http import Require
from duly.auth.principals import Principal
from duly.console.app import BEGIN_READING
from duly.console.record import seen_by
from duly.console.sessions import ADMINISTRATOR, OPERATOR
from duly.console.sign_in import SCOPE
from duly.console.timeline import read_timeline
from duly.db import Tx, fetch
from duly.errors import Invalid, NotFound
from duly.http.transactions import HEADER, RequestTx, Router
from duly.http.webhooks import BRING_YOUR_OWN
from duly.messages import may_read
from duly.operate import alerts, audit, dead_letters, events, jobs
from duly.operate.actions import ACTIONS, Action, Arguments
from duly.operate.arguments import LARGEST_ID, REASON_LIMIT, TEXT_LIMIT
from duly.operate.counts import Count
from duly.operate.status import status
from duly.operate.why import why
from duly.schedules import edit as schedules
from duly.schedules.cron import Cron
from duly.schedules.edit import ScheduleRow
from duly.webhooks import deliveries, subscriptions
from duly.webhooks.look import host_of, list_provider_secrets
from duly.webhooks.model import DeliveryStatus

PREFIX = "/v1/console"
Administrator = Annotated[Principal, Depends(Require(SCOPE, ADMINISTRATOR))]
Reader = Annotated[Principal, Depends(Require(SCOPE, ADMINISTRATOR, OPERATOR))]
Limit = Annotated[int, Query(ge=1, le=200)]
Word = Annotated[str | None, Query(min_length=1, max_length=TEXT_LIMIT)]
Name = Annotated[str, Path(min_length=1, max_length=TEXT_LIMIT)]
RowId = Annotated[int, Path(ge=1, le=LARGEST_ID)]
AfterId = Annotated[int | None, Query(ge=0, le=LARGEST_ID)]
_IDS = frozenset({"id", "job_id", "seq", "number"})  # bigints: as numbers they would lose digits in a browser


class Done(BaseModel):
    """What an action did: a sentence, how many it touched, and what was made."""

    action: str
    message: str
    number: int
    facts: dict[str, str | int | bool | None]
    secret: str | None = None
    """What was made, this once."""


class Items(BaseModel):
    """Rows, and what to pass to get the next ones; ids are text, exact."""

    items: list[dict[str, Any]]
    next: dict[str, str] | None = None


One = dict[str, Any]
Reason = Annotated[str | None, Field(max_length=REASON_LIMIT, description="Kept in the audit.")]


class Signed(Arguments):
    """What every action is given besides its own arguments."""

    reason: Reason = None


def create_api_router() -> Router:
    """Every route of the console's API; an action registered later than this has none."""
    return _create_api_router(tuple(map(id, ACTIONS.values())))


@lru_cache(maxsize=4)
def _create_api_router(_actions: tuple[int, ...]) -> Router:
    """Made once for the same actions: it takes longer than anything else at the start."""
    router = Router(prefix=PREFIX, tags=["console"])
    for action in ACTIONS.values():
        _add_action(router, action)
    _add_lists(router)
    _add_schedules(router)
    _add_webhooks(router)
    _add_looks(router)
    return router


def _add_action(router: Router, action: Action) -> None:
    title = "".join(part.title() for part in action.name.replace(".", "-").split("-"))
    body = create_model(f"{title}Request", __base__=(action.arguments, Signed))

    async def run(given: Any, tx: RequestTx, caller: Administrator, request: Request, response: Response) -> Done:
        values = {name: getattr(given, name) for name in action.arguments.model_fields}
        if action.makes_secret and values["secret"] is None and HEADER in request.headers:
            raise Invalid(BRING_YOUR_OWN)
        response.headers["Cache-Control"] = "no-store"
        arguments = action.arguments.model_construct(**values)
        result = await action.run(tx, arguments, caller.subject[:TEXT_LIMIT], given.reason)
        return Done(
            action=action.name, message=result.message, number=result.number, facts=dict(result.facts),
            secret=result.secret,
        )  # fmt: skip

    run.__annotations__ = {
        "given": body, "tx": RequestTx, "caller": Administrator, "request": Request, "response": Response,
        "return": Done,
    }  # fmt: skip
    router.post(f"/actions/{action.name}", summary=action.about, name=action.name)(run)


def _add_lists(router: Router) -> None:
    @router.get("/jobs", summary="Jobs that wait or run, by id.")
    async def list_jobs(
        tx: RequestTx, _: Reader, name: Word = None, entity: Word = None, status: jobs.JobStatus | None = None,
        after: AfterId = None, limit: Limit = 50,
    ) -> Items:  # fmt: skip
        await fetch(tx, BEGIN_READING)
        found = await jobs.list_jobs(tx, name=name, entity_id=entity, status=status, limit=limit, after=after)
        return _page(found, limit, lambda last: {"after": str(last.id)})

    @router.get("/executions", summary="Runs, the newest first.")
    async def list_executions(
        tx: RequestTx, _: Reader, name: Word = None, entity: Word = None, job: AfterId = None,
        before_at: datetime | None = None, before_id: UUID | None = None, limit: Limit = 50,
    ) -> Items:  # fmt: skip
        await fetch(tx, BEGIN_READING)
        before = _pair(before_at, before_id)
        found = await jobs.list_executions(tx, name=name, entity_id=entity, job_id=job, before=before, limit=limit)
        return _page(found, limit, lambda last: _key(last.completed_at, last.execution_id))

    @router.get("/dead-letters", summary="Work that failed for good, the newest first.")
    async def list_dead_letters(
        tx: RequestTx, _: Reader, name: Word = None, entity: Word = None, before_at: datetime | None = None,
        before_id: AfterId = None, limit: Limit = 50,
    ) -> Items:  # fmt: skip
        await fetch(tx, BEGIN_READING)
        before = _pair(before_at, before_id)
        found = await dead_letters.list_dead_letters(tx, name=name, entity_id=entity, before=before, limit=limit)
        return _page(found, limit, lambda last: _key(last.buried_at, last.id))

    @router.get("/dead-letters/groups", summary="Dead letters by name and kind of error.")
    async def group_dead_letters(tx: RequestTx, _: Reader) -> Items:
        await fetch(tx, BEGIN_READING)
        return Items(items=[plain(group) for group in await dead_letters.group_dead_letters(tx)])

    @router.get("/events", summary="Events, the newest first.")
    async def list_events(
        tx: RequestTx, caller: Reader, status: events.EventStatus | None = None, topic: Word = None,
        aggregate: Word = None, limit: Limit = 50,
    ) -> Items:  # fmt: skip
        await fetch(tx, BEGIN_READING)
        found = await events.list_events(tx, status=status, topic=topic, aggregate_id=aggregate, limit=limit)
        if topic is not None or aggregate is not None:  # that there is one would say too much
            found = [one for one in found if may_read(one.type, caller.roles)]
        return Items(items=[plain(one.seen_by(caller.roles)) for one in found])

    @router.get("/alerts", summary="What the engine wants a person to look at.")
    async def list_alerts(
        tx: RequestTx, _: Reader, resolved: bool = False, before_at: datetime | None = None, before_id: AfterId = None,
        limit: Limit = 100,
    ) -> Items:  # fmt: skip
        await fetch(tx, BEGIN_READING)
        before = _pair(before_at, before_id)
        found = await alerts.list_alerts(tx, open_only=not resolved, before=before, limit=limit)
        return _page(found, limit, lambda last: _key(last.raised_at, last.id))

    @router.get("/audit", summary="Who did what, the newest first.")
    async def list_audit(
        tx: RequestTx, caller: Reader, subject: Word = None, before: AfterId = None, limit: Limit = 50
    ) -> Items:
        await fetch(tx, BEGIN_READING)
        found = await audit.list_audit(tx, subject=subject, before=before, limit=limit)
        is_administrator = ADMINISTRATOR in caller.roles
        found = [seen_by(entry, caller.roles, is_open=is_administrator) for entry in found]
        return _page(found, limit, lambda last: {"before": str(last.id)})


def _add_schedules(router: Router) -> None:
    @router.get("/schedules", summary="Schedules, by name.")
    async def list_schedules(tx: RequestTx, caller: Reader, after: Word = None, limit: Limit = 200) -> Items:
        await fetch(tx, BEGIN_READING)
        found = await schedules.list_schedules(tx, after_name=after or "", limit=limit)
        following = {"after": found[-1].name} if len(found) == limit else None
        return Items(items=[_schedule(row, caller) for row in found], next=following)

    @router.get("/schedules/preview", summary="The next runs of an expression, with the changes of the clocks marked.")
    async def preview(
        tx: RequestTx, _: Reader, cron: str, timezone: str = "UTC", dst_gap: str = "after", dst_overlap: str = "first",
        count: Annotated[int, Query(ge=1, le=100)] = 10,
    ) -> Items:  # fmt: skip
        now = (await fetch(tx, BEGIN_READING))[0][2]
        return Items(items=[plain(run) for run in Cron(cron, timezone, dst_gap, dst_overlap).preview(now, count)])

    @router.get("/schedules/{name}", summary="One schedule.")
    async def get_schedule(name: Name, tx: RequestTx, caller: Reader) -> One:
        await fetch(tx, BEGIN_READING)
        return _schedule(await schedules.get_schedule(tx, name), caller)


def _add_webhooks(router: Router) -> None:
    @router.get("/webhooks", summary="Everybody's webhook subscriptions, the newest first.")
    async def list_webhooks(tx: RequestTx, caller: Reader, before: UUID | None = None, limit: Limit = 50) -> Items:
        await fetch(tx, BEGIN_READING)
        found = await subscriptions.list_subscriptions(tx, before=before, limit=limit)
        following = {"before": str(found[-1].id)} if len(found) == limit else None
        return Items(items=[_subscription(one, caller) for one in found], next=following)

    @router.get("/webhooks/providers", summary="Who may call us, and how old the secrets are, without the secrets.")
    async def list_providers(tx: RequestTx, _: Reader, limit: Limit = 100) -> Items:
        await fetch(tx, BEGIN_READING)
        return Items(items=[plain(one) for one in await list_provider_secrets(tx, limit=limit)])

    @router.get("/webhooks/{id}", summary="One subscription, and why something is sent to it now, or is not.")
    async def get_webhook(id: UUID, tx: RequestTx, caller: Reader) -> One:
        await fetch(tx, BEGIN_READING)
        found = await subscriptions.find_subscription(tx, id)
        sentences = await _why(tx, f"webhook_subscription:{id}", caller)
        return {"subscription": _subscription(found, caller), "why": sentences}

    @router.get("/webhooks/{id}/deliveries", summary="Its deliveries, the newest first.")
    async def list_deliveries(
        id: UUID,
        tx: RequestTx,
        _: Reader,
        status: DeliveryStatus | None = None,
        before: AfterId = None,
        limit: Limit = 50,
    ) -> Items:
        await fetch(tx, BEGIN_READING)
        found = await deliveries.list_deliveries(tx, subscription_id=id, status=status, before=before, limit=limit)
        return _page(found, limit, lambda last: {"before": str(last.number)})

    @router.get("/webhooks/deliveries/{id}", summary="One delivery with its attempts, the newest first.")
    async def get_delivery(id: UUID, tx: RequestTx, caller: Reader) -> One:
        await fetch(tx, BEGIN_READING)
        found = await deliveries.find_delivery(tx, id)
        tried = [_attempt(one, caller) for one in found.attempts]
        sentences = await _why(tx, f"webhook_delivery:{id}", caller)
        return {"delivery": plain(found.delivery), "attempts": tried, "why": sentences}


def _add_looks(router: Router) -> None:
    @router.get("/status", summary="What waits, runs, failed and is late, and who is alive.")
    async def read_status(tx: RequestTx, _: Reader) -> One:
        await fetch(tx, BEGIN_READING)
        return dict(plain(await status(tx)))

    @router.get("/jobs/{id}", summary="One job: where it is, and why.")
    async def get_job(id: RowId, tx: RequestTx, caller: Reader) -> One:
        await fetch(tx, BEGIN_READING)
        found: Any = await jobs.find_job(tx, id) or await dead_letters.find_dead_letter(tx, id)
        runs = await jobs.list_executions(tx, job_id=id, limit=20)
        if found is None and not runs:
            raise NotFound(f"no job has the number {id}; history older than the retention is dropped")
        facts = plain(found) if found is not None else {"id": str(id)}
        return {"job": facts, "runs": [plain(run) for run in runs], "why": await _why(tx, f"job:{id}", caller)}

    @router.get("/why", summary="Why something did or did not run, in sentences.")
    async def say_why(
        tx: RequestTx, caller: Reader, id: Annotated[str, Query(min_length=1, max_length=TEXT_LIMIT)]
    ) -> One:
        await fetch(tx, BEGIN_READING)
        return {"sentences": await _why(tx, id, caller)}

    @router.get("/entity", summary="Everything that happened to one entity, in order.")
    async def read_entity(
        tx: RequestTx, caller: Reader, id: Annotated[str, Query(min_length=1, max_length=TEXT_LIMIT)]
    ) -> Items:
        await fetch(tx, BEGIN_READING)
        return Items(items=[plain(moment) for moment in await read_timeline(tx, id, caller.roles)])


async def _why(tx: Tx, id: str, caller: Principal) -> list[str]:
    return await why(tx, id, roles=caller.roles)


def _schedule(row: ScheduleRow, caller: Principal) -> One:
    """One of them; its payload is for administrators, as every payload is."""
    facts = dict(plain(row))
    if ADMINISTRATOR not in caller.roles:
        del facts["payload"]
    return facts


def _subscription(one: subscriptions.Subscription, caller: Principal) -> One:
    """One of them; where it goes beyond the host may be a secret, and is for administrators."""
    facts = dict(plain(one))
    return facts if ADMINISTRATOR in caller.roles else facts | {"url": host_of(one.url)}


def _attempt(one: deliveries.Attempt, caller: Principal) -> One:
    """One of them; what was sent and answered is for administrators."""
    facts = dict(plain(one))
    hidden = set() if ADMINISTRATOR in caller.roles else {"request_headers", "response_headers", "response_excerpt"}
    return {name: value for name, value in facts.items() if name not in hidden}


def _page(found: Sequence[Any], limit: int, after: Any) -> Items:
    return Items(items=[plain(one) for one in found], next=after(found[-1]) if len(found) == limit else None)


def _key(at: datetime, id: object) -> dict[str, str]:
    return {"before_at": at.isoformat(), "before_id": str(id)}


def _pair(at: datetime | None, id: Any) -> Any:
    if (at is None) != (id is None) or (at is not None and at.tzinfo is None):
        raise Invalid("give before_at, with its offset, and before_id together, as the page before said them")
    return None if at is None else (at, id)


def plain(value: Any, name: str = "") -> Any:
    """As JSON: times and ids are text."""
    if isinstance(value, Count):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name), field.name) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if isinstance(value, datetime):
        return value.isoformat()
    if value is None or isinstance(value, bool | str | float) or (isinstance(value, int) and name not in _IDS):
        return value
    return str(value)
