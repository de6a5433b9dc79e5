"""Every action of an operator, once: the console's forms, the HTTP API and the command line all run these.

An application adds its own with ``register(Action(...))``; it then has a form in the console and a route in the API.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal
from uuid import UUID

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from duly.db import Tx, load_json
from duly.errors import Fault, Invalid, NotFound
from duly.operate import alerts, consumers, dead_letters, events, jobs
from duly.operate.arguments import BULK_LIMIT, LARGEST_ID, TEXT_LIMIT
from duly.operate.counts import Count
from duly.operate.words import plural
from duly.schedules import edit as schedules
from duly.schedules.edit import ScheduleRow

_NAME = re.compile(r"[a-z][a-z-]{0,39}\.[a-z][a-z-]{0,39}")


class Arguments(BaseModel):
    """What an action is given; a member that it does not know is refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    may_be_empty: ClassVar[frozenset[str]] = frozenset()
    """What a form empties by sending nothing; any other field that is empty was left out."""


@dataclass(frozen=True)
class Result:
    """What was done: a sentence for people, facts for machines, and for a bulk action how many.

    ``secret`` is shown once, to whoever acted, and kept nowhere. ``rest`` are the arguments that go on where a bulk
    action ended. ``page`` is the page of the console to see next, such as ``/orders/7``, if not the one acted from.
    One that ``is_refused`` wrote down that it was tried, and did not do what was asked for.
    """

    message: str
    number: int = 1
    facts: Mapping[str, str | int | bool | None] = field(default_factory=dict)
    secret: str | None = field(default=None, repr=False)
    rest: Mapping[str, str] | None = None
    page: str | None = None
    is_refused: bool = False


@dataclass(frozen=True)
class Action:
    """One thing an operator can do. ``count`` says beforehand how many a bulk action would touch.

    One that ``makes_secret`` makes one if its argument ``secret`` is left out; its answer is then for one pair of eyes.
    One that ``needs_reason`` is refused by the console without one; ``reason_note`` says what becomes of it,
    and without one no reason is asked for.
    """

    name: str
    about: str
    arguments: type[Arguments]
    run: Callable[[Tx, Any, str, str | None], Awaitable[Result]]
    is_destructive: bool = False
    count: Callable[[Tx, Any], Awaitable[Count]] | None = None
    verb: str = "Do it"
    makes_secret: bool = False
    needs_reason: bool = False
    reason_note: str = "kept in the audit with your name"

    def __post_init__(self) -> None:
        """The name becomes a path and a command, so it is one."""
        if not _NAME.fullmatch(self.name) or not self.about.strip():
            raise Invalid(f"{self.name!r} cannot name an action: write it as 'family.verb', and say what it is about")


ACTIONS: dict[str, Action] = {}


def register(action: Action) -> Action:
    """Add an action to all of the faces; a name has one."""
    if action.name in ACTIONS:
        raise Invalid(f"the action {action.name!r} is registered already")
    ACTIONS[action.name] = action
    return action


def find_action(name: str) -> Action:
    """The action of this name."""
    if name not in ACTIONS:
        raise NotFound("there is no such action")
    return ACTIONS[name]


def read_arguments(action: Action, given: Mapping[str, Any]) -> Arguments:
    """The arguments of an action; Invalid says which of them is wrong, without repeating it."""
    try:
        return action.arguments.model_validate(given)
    except ValidationError as error:
        faults = [
            Fault("body", "$." + ".".join(map(str, item["loc"])), str(item["msg"]).removeprefix("Value error, "))
            for item in error.errors(include_input=False, include_url=False)[:10]
        ]
        refusal = Invalid("; ".join(f"{fault.path.removeprefix('$.')}: {fault.detail}" for fault in faults))
        refusal.faults = tuple(faults)
        raise refusal from None


async def perform(tx: Tx, name: str, given: Mapping[str, Any], *, actor: str, reason: str | None = None) -> Result:
    """Do it, and audit it, in the caller's transaction."""
    action = find_action(name)
    return await action.run(tx, read_arguments(action, given), actor, reason)


# ---------------------------------------------------------------------------------------------------------- arguments


def _parsed(given: Any) -> Any:
    """A form and a command line send JSON as text."""
    if not isinstance(given, str):
        return given
    try:
        return load_json(given)
    except RecursionError:
        raise ValueError("it is not JSON that can be read: it is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"it is not JSON: {error}") from None


def _whole(given: Any) -> Any:
    """A form sends digits; what is true, false or broken is no number."""
    if isinstance(given, bool | float):
        raise ValueError("it is not a whole number")
    return given


RowId = Annotated[int, BeforeValidator(_whole), Field(gt=0, le=LARGEST_ID)]
Text = Annotated[str, Field(min_length=1, max_length=TEXT_LIMIT)]
Limit = Annotated[int, BeforeValidator(_whole), Field(ge=1, le=BULK_LIMIT)]
Payload = Annotated[dict[str, Any], BeforeValidator(_parsed)]
Misfire = Literal["run_once", "run_all", "skip"]
DstGap = Literal["after", "skip"]
DstOverlap = Literal["first", "both"]


class OfRow(Arguments):
    """A job, a dead letter or an alert."""

    id: RowId


class OfEvent(Arguments):
    """An event."""

    id: UUID


class OfDeadLetters(Arguments):
    """The oldest dead letters that failed in one way."""

    name: Text | None = None
    error_kind: Text | None = None
    limit: Limit = BULK_LIMIT


class OfFailedEvents(Arguments):
    """The oldest events that could not be published."""

    topic: Text | None = None
    limit: Limit = BULK_LIMIT


class OfSchedule(Arguments):
    """A schedule."""

    name: Text


class ConsumerMove(Arguments):
    """Where a consumer's events are to come from: a broker's name, or - for the relay.

    ``deliver``: what is still on its way through the broker it leaves is delivered here, however much it is.
    """

    name: Text
    via: Text
    deliver: bool = False


class NewSchedule(Arguments):
    """A schedule to be added."""

    name: Text
    cron: Text
    timezone: Text = "UTC"
    max_retries: int = 3
    misfire: Misfire = "run_once"
    dst_gap: DstGap = "after"
    dst_overlap: DstOverlap = "first"
    payload: Payload = Field(default_factory=dict)
    enabled: bool = True


class ScheduleChange(Arguments):
    """What of a schedule is to change; with ``expected_version`` an edit made from an old page is refused."""

    name: Text
    cron: Text | None = None
    timezone: Text | None = None
    max_retries: int | None = None
    misfire: Misfire | None = None
    dst_gap: DstGap | None = None
    dst_overlap: DstOverlap | None = None
    payload: Payload | None = None
    expected_version: int | None = None


# ---------------------------------------------------------------------------------------------------------- what runs


async def _cancel_job(tx: Tx, given: OfRow, actor: str, reason: str | None) -> Result:
    await jobs.cancel_job(tx, given.id, actor=actor, reason=reason)
    return Result(f"cancelled job {given.id}")


async def _run_job_now(tx: Tx, given: OfRow, actor: str, reason: str | None) -> Result:
    await jobs.run_job_now(tx, given.id, actor=actor, reason=reason)
    return Result(f"job {given.id} is due now")


async def _retry_dead(tx: Tx, given: OfRow, actor: str, reason: str | None) -> Result:
    await dead_letters.retry_dead_letter(tx, given.id, actor=actor, reason=reason)
    return Result("retried 1 dead letter")


async def _discard_dead(tx: Tx, given: OfRow, actor: str, reason: str | None) -> Result:
    await dead_letters.discard_dead_letter(tx, given.id, actor=actor, reason=reason)
    return Result("discarded 1 dead letter")


async def _retry_all_dead(tx: Tx, given: OfDeadLetters, actor: str, reason: str | None) -> Result:
    filters = given.model_dump()
    number = await dead_letters.retry_dead_letters(tx, **filters, actor=actor, reason=reason)
    return Result(f"retried {plural(number, 'dead letter')}", number)


async def _discard_all_dead(tx: Tx, given: OfDeadLetters, actor: str, reason: str | None) -> Result:
    filters = given.model_dump()
    number = await dead_letters.discard_dead_letters(tx, **filters, actor=actor, reason=reason)
    return Result(f"discarded {plural(number, 'dead letter')}", number)


async def _count_dead(tx: Tx, given: OfDeadLetters) -> Count:
    return await dead_letters.count_dead_letters(tx, name=given.name, error_kind=given.error_kind)


async def _requeue_event(tx: Tx, given: OfEvent, actor: str, reason: str | None) -> Result:
    await events.requeue_event(tx, given.id, actor=actor, reason=reason)
    return Result(f"requeued event {given.id}")


async def _discard_event(tx: Tx, given: OfEvent, actor: str, reason: str | None) -> Result:
    await events.discard_event(tx, given.id, actor=actor, reason=reason)
    return Result(f"discarded event {given.id}")


async def _requeue_all_events(tx: Tx, given: OfFailedEvents, actor: str, reason: str | None) -> Result:
    number = await events.requeue_events(tx, topic=given.topic, limit=given.limit, actor=actor, reason=reason)
    return Result(f"requeued {plural(number, 'event')}", number)


async def _discard_all_events(tx: Tx, given: OfFailedEvents, actor: str, reason: str | None) -> Result:
    number = await events.discard_events(tx, topic=given.topic, limit=given.limit, actor=actor, reason=reason)
    return Result(f"discarded {plural(number, 'event')}", number)


async def _count_events(tx: Tx, given: OfFailedEvents) -> Count:
    found = await events.list_events(tx, status="FAILED", topic=given.topic, limit=BULK_LIMIT)
    return Count(len(found), len(found) == BULK_LIMIT)


async def _resolve_alert(tx: Tx, given: OfRow, actor: str, reason: str | None) -> Result:
    await alerts.resolve_alert(tx, given.id, actor=actor, reason=reason)
    return Result(f"resolved alert {given.id}")


async def _move_consumer(tx: Tx, given: ConsumerMove, actor: str, reason: str | None) -> Result:
    via = None if given.via.strip() == consumers.RELAY else given.via.strip()
    move = await consumers.move_consumer(tx, given.name, via=via, actor=actor, reason=reason, deliver=given.deliver)
    before, after = (one or "the relay" for one in (move.before, move.after))
    delivered = f"{plural(move.underway, 'event')} on their way were delivered here"
    if move.is_partial:
        said = f"{delivered}, and more are left; {given.name} still gets its events from {before}"
        rest = {"name": given.name, "via": given.via, "deliver": "true"}
        return Result(said, move.underway, {"underway": move.underway}, rest=rest)
    said = f"{given.name} gets its events from {after} now, no longer from {before}"
    if move.underway:
        said += f"; {delivered}"
    if move.receivers == 0:
        said += f"; no receiver of {after} is alive: its events wait there until `duly receive` runs with DULY_RECEIVE"
    return Result(said, facts={"underway": move.underway})


async def _add_schedule(tx: Tx, given: NewSchedule, actor: str, reason: str | None) -> Result:
    values = {name: getattr(given, name) for name in NewSchedule.model_fields}
    return _said("added", await schedules.add_schedule(tx, **values, actor=actor, reason=reason))


async def _edit_schedule(tx: Tx, given: ScheduleChange, actor: str, reason: str | None) -> Result:
    values = {name: getattr(given, name) for name in ScheduleChange.model_fields if name != "name"}
    return _said("changed", await schedules.edit_schedule(tx, given.name, **values, actor=actor, reason=reason))


async def _enable_schedule(tx: Tx, given: OfSchedule, actor: str, reason: str | None) -> Result:
    return _said("enabled", await schedules.enable_schedule(tx, given.name, actor=actor, reason=reason))


async def _disable_schedule(tx: Tx, given: OfSchedule, actor: str, reason: str | None) -> Result:
    return _said("disabled", await schedules.disable_schedule(tx, given.name, actor=actor, reason=reason))


async def _trigger_schedule(tx: Tx, given: OfSchedule, actor: str, reason: str | None) -> Result:
    id = await schedules.trigger_schedule(tx, given.name, actor=actor, reason=reason)
    return Result(f"queued {given.name} as job {id}", facts={"job_id": str(id)})


async def _remove_schedule(tx: Tx, given: OfSchedule, actor: str, reason: str | None) -> Result:
    await schedules.remove_schedule(tx, given.name, actor=actor, reason=reason)
    return Result(f"removed {given.name}")


def _said(verb: str, row: ScheduleRow) -> Result:
    following = f"next run {row.next_run_at.isoformat()}" if row.next_run_at else "no next run"
    message = f"{verb} {row.name}: {row.cron} in {row.timezone}, {following}, version {row.version}"
    return Result(message, facts={"version": row.version})


for _action in (
    Action("jobs.cancel", "Delete a job, whether it waits or runs.", OfRow, _cancel_job, True, verb="Cancel"),
    Action("jobs.run-now", "Make a waiting job due now.", OfRow, _run_job_now, verb="Run now"),
    Action("dead.retry", "Put a dead letter back into the queue, due now.", OfRow, _retry_dead, verb="Retry"),
    Action("dead.discard", "Throw a dead letter away; the audit keeps it.", OfRow, _discard_dead, True, verb="Discard"),
    Action(
        "dead.retry-all", "Put many dead letters back into the queue, the oldest first.",
        OfDeadLetters, _retry_all_dead, True, _count_dead, "Retry all",
    ),
    Action(
        "dead.discard-all", "Throw many dead letters away, the oldest first; the audit keeps them.",
        OfDeadLetters, _discard_all_dead, True, _count_dead, "Discard all",
    ),
    Action("events.requeue", "Give a FAILED event all its attempts again.", OfEvent, _requeue_event, verb="Requeue"),
    Action(
        "events.discard", "Give up a FAILED event; its aggregate goes on, and the audit keeps it.",
        OfEvent, _discard_event, True, verb="Discard",
    ),
    Action(
        "events.requeue-all", "Give many FAILED events all their attempts again.",
        OfFailedEvents, _requeue_all_events, True, _count_events, "Requeue all",
    ),
    Action(
        "events.discard-all", "Give up many FAILED events; their aggregates go on, and the audit keeps them.",
        OfFailedEvents, _discard_all_events, True, _count_events, "Discard all",
    ),
    Action(
        "alerts.resolve", "Close an alert; the same trouble opens a new one.",
        OfRow, _resolve_alert, verb="Resolve",
    ),
    Action(
        "consumers.via", "Let the events of a consumer come from a broker, or from the relay (-); none is missed.",
        ConsumerMove, _move_consumer, True, verb="Move",
    ),
    Action("schedules.add", "Add a schedule.", NewSchedule, _add_schedule, verb="Add schedule"),
    Action(
        "schedules.edit", "Change a schedule; in force from the next tick.",
        ScheduleChange, _edit_schedule, verb="Save",
    ),
    Action("schedules.enable", "Let a schedule run again, from now on.", OfSchedule, _enable_schedule, verb="Enable"),
    Action("schedules.disable", "Stop a schedule from firing.", OfSchedule, _disable_schedule, True, verb="Disable"),
    Action("schedules.trigger", "Queue one run of a schedule now.", OfSchedule, _trigger_schedule, verb="Run now"),
    Action(
        "schedules.remove", "Delete a schedule; the audit keeps it.",
        OfSchedule, _remove_schedule, True, verb="Remove",
    ),
):  # fmt: skip
    register(_action)
