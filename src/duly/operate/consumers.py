"""Consumers: what each wants and where it comes from; and moving one to a broker or back, so that nothing is missed."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from duly.brokers.connect import broker_names
from duly.db import Tx, fetch, is_lock_timeout, request_poke
from duly.errors import Busy, Conflict, Invalid, NotFound
from duly.inbox.receive import JOB_PREFIX
from duly.jobs.sql import LOCK_ORDER
from duly.operate import sql_consumers as sql
from duly.operate.arguments import page_size, signed
from duly.operate.audit import write_audit

RELAY = "-"  # how a person writes that the relay brings the events
MOST_UNDERWAY = 1_000  # in one transaction: each may take a lock of its order
MOST_AT_A_MOMENT = 20_000  # twice what one relay publishes at once
ALIVE_SECONDS = 30.0
ENGINE_PREFIX = "duly."


@dataclass(frozen=True)
class ConsumerRow:
    """A consumer as the database knows it."""

    name: str
    patterns: list[str]
    ordered: bool
    enabled: bool
    via: str | None
    via_since: datetime | None
    registered_at: datetime


@dataclass(frozen=True)
class Move:
    """What a move did; ``underway`` events were still at the broker, and are delivered here.

    One that ``is_partial`` delivered the oldest of them, and moved nothing: the same call goes on with the next ones.
    """

    before: str | None
    after: str | None
    underway: int
    is_partial: bool = False
    receivers: int | None = None  # of the broker it came to, alive at this moment


async def list_consumers(tx: Tx, *, limit: int = 1_000) -> list[ConsumerRow]:
    """All of them, by name."""
    return [ConsumerRow(*row) for row in await fetch(tx, sql.LIST_CONSUMERS, limit=page_size(limit))]


async def move_consumer(
    tx: Tx, name: str, *, via: str | None, actor: str, reason: str | None = None, deliver: bool = False
) -> Move:
    """From now on its events come from this broker, or from the relay (None).

    The lanes and the consumer are locked, so each event is on one side of the move. When a consumer leaves a broker,
    what we published and the broker has not brought yet is delivered here, in order. More than fits one transaction is
    waited for; or with ``deliver`` delivered, a part in each call.
    """
    signed(actor=actor, reason=reason)
    _check(name, via)
    await _lock(tx)
    rows = await fetch(tx, sql.LOCK_CONSUMER, name=name)
    if not rows:
        raise NotFound(f"there is no consumer {name!r}")
    patterns, ordered, before, since = rows[0]
    if before == via:
        raise Conflict(f"the consumer {name!r} gets its events from {_said(via)} already")
    found: list[Any] = []
    until: datetime | None = None
    if before is not None:
        found, until = await _find_underway(tx, name, patterns, via=before, since=since, deliver=deliver)
        await _deliver(tx, name, found, ordered=ordered)
    if until is None:
        await fetch(tx, sql.MOVE_CONSUMER, name=name, via=via)
    else:
        await fetch(tx, sql.ADVANCE_CONSUMER, name=name, since=until)
    after = via if until is None else before
    await write_audit(
        tx, actor=actor, action="consumer.moved" if until is None else "consumer.delivered",
        subject=f"consumer:{name}", reason=reason,
        before={"via": before}, after={"via": after, "delivered_here": len(found)},
    )  # fmt: skip
    return Move(before, after, len(found), until is not None, await _count_receivers(tx, after))


def _check(name: str, via: str | None) -> None:
    if name.startswith(ENGINE_PREFIX):
        raise Invalid(f"{name!r} is a part of the engine: the relay brings it its events")
    known = broker_names()
    if via is not None and via not in known:
        raise Invalid(f"{via!r} is no broker: choose {', '.join(known)}, or {RELAY} for the relay")


async def _lock(tx: Tx) -> None:
    await fetch(tx, sql.BOUND_LOCK_WAIT)
    try:
        await fetch(tx, sql.LOCK_LANES)
    except Exception as error:
        if is_lock_timeout(error):
            raise Busy("the relays did not pause within 5 seconds: try again") from error
        raise


async def _find_underway(
    tx: Tx, name: str, patterns: list[str], *, via: str, since: datetime, deliver: bool
) -> tuple[list[Any], datetime | None]:
    """What the broker has not brought; of more than fits, what was published before a moment, and that moment."""
    likes = [_as_like(one) for one in patterns]
    for most in (MOST_UNDERWAY, MOST_AT_A_MOMENT):
        found = await fetch(tx, sql.FIND_UNDERWAY, via=via, since=since, likes=likes, limit=most + 1)
        if len(found) <= most:
            return found, None
        if not deliver:
            raise Conflict(
                f"more than {most} events for {name!r} are still on their way through {via}: try again when its "
                "receiver has caught up; if they can never arrive (a queue that is gone, another broker, no receiver), "
                "deliver them here from the history: `duly consumers via --deliver`"
            )
        until: datetime = found[-1][2]
        if page := [row for row in found if row[2] < until]:
            return page, until
    raise Conflict(f"more than {MOST_AT_A_MOMENT} events for {name!r} were published at one and the same moment")


async def _deliver(tx: Tx, name: str, found: list[Any], *, ordered: bool) -> None:
    if not found:
        return
    if ordered:
        keys = sorted({row[1] for row in found})
        await fetch(tx, LOCK_ORDER, names=[JOB_PREFIX + name] * len(keys), keys=keys)
    await fetch(tx, sql.DELIVER_UNDERWAY, name=name, ids=[row[0] for row in found], ordered=ordered)
    request_poke(tx, "jobs")


async def _count_receivers(tx: Tx, via: str | None) -> int | None:
    if via is None:
        return None
    counted: int = (await fetch(tx, sql.COUNT_RECEIVERS, via=via, alive_seconds=ALIVE_SECONDS))[0][0]
    return counted


def _as_like(pattern: str) -> str:
    """A consumer's pattern has one wildcard, the star."""
    return pattern.replace("_", r"\_").replace("*", "%")


def _said(via: str | None) -> str:
    return via or "the relay"
