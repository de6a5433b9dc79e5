"""What went out of accounts and came in, over windows that end at one of their entries: whatever has happened since.

An entry never changes, so the answer about a moment is the same whenever it is asked, and whatever else is asked with
it. A window with more than so many entries has none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from sqlalchemy import text

from apps.finance.ledger.model import WINDOWS, Flow, FlowQuestion, Moved
from duly import Tx

MOST_AT_ONCE = 200_000  # entries that one statement sums up

# Behind which entry each window begins. For nearly all accounts one that lies before all windows of all questions will
# do: so few entries follow that no window can have too many. Only for a busy one it is looked up exactly.
LOCATE_FLOWS = text("""
WITH asked AS MATERIALIZED (
    SELECT q.place, q.account_id, q.version, q.moment, q.most
    FROM unnest(CAST(:accounts AS uuid[]), CAST(:versions AS bigint[]), CAST(:moments AS timestamptz[]),
                CAST(:mosts AS bigint[])) WITH ORDINALITY AS q(account_id, version, moment, most, place)
), spans AS MATERIALIZED (
    SELECT s.account_id, b.side, f.version AS first, s.last - f.version > s.fewest AS is_busy
    FROM (SELECT account_id, max(version) AS last, min(moment) AS earliest, min(most) AS fewest
          FROM asked GROUP BY 1) AS s
    JOIN ledger.accounts b ON b.id = s.account_id
    CROSS JOIN LATERAL ledger.find_entry_at(
        s.account_id, s.earliest - interval '168 hours' - interval '1 microsecond') AS f
)
SELECT s.side,
       CASE WHEN s.is_busy THEN (SELECT f.version FROM ledger.find_entry_at(
           q.account_id, q.moment - interval '1 hour' - interval '1 microsecond') AS f) ELSE s.first END AS hour,
       CASE WHEN s.is_busy THEN (SELECT f.version FROM ledger.find_entry_at(
           q.account_id, q.moment - interval '24 hours' - interval '1 microsecond') AS f) ELSE s.first END AS day,
       CASE WHEN s.is_busy THEN (SELECT f.version FROM ledger.find_entry_at(
           q.account_id, q.moment - interval '168 hours' - interval '1 microsecond') AS f) ELSE s.first END AS week
FROM asked q JOIN spans s ON s.account_id = q.account_id
ORDER BY q.place
""")
# One pass over each stretch of an account's entries, however many questions there are about it. Sums up to an entry are
# by its version, for some are of the same moment; sums before a window are by moments, whole. Reversals do not count.
READ_FLOWS = text("""
WITH lines AS (
    SELECT s.stretch, e.version, e.posted_at, e.is_out, e.is_in, e.went_out, e.came_in
    FROM unnest(CAST(:accounts AS uuid[]), CAST(:sides AS integer[]), CAST(:afters AS bigint[]),
                CAST(:lasts AS bigint[])) WITH ORDINALITY AS s(account_id, side, read_after, last, stretch)
    CROSS JOIN LATERAL (
        SELECT l.version, l.posted_at,
               CASE WHEN c.counts AND s.side * l.amount < 0 THEN 1 ELSE 0 END AS is_out,
               CASE WHEN c.counts AND s.side * l.amount > 0 THEN 1 ELSE 0 END AS is_in,
               CASE WHEN c.counts THEN greatest(-s.side * l.amount, 0) ELSE 0 END AS went_out,
               CASE WHEN c.counts THEN greatest(s.side * l.amount, 0) ELSE 0 END AS came_in
        FROM ledger.entries l
        CROSS JOIN LATERAL (
            SELECT (SELECT t.reverses_id FROM ledger.transactions t WHERE t.id = l.transaction_id) IS NULL
            OFFSET 0) AS c(counts)  -- once for each entry, and not once for each time that it is asked for
        WHERE l.account_id = s.account_id AND l.version > s.read_after AND l.version <= s.last) AS e
), summed AS (
    SELECT l.*,
           sum(l.is_out) OVER up_to AS outs, sum(l.is_in) OVER up_to AS ins,
           sum(l.went_out) OVER up_to AS out_sum, sum(l.came_in) OVER up_to AS in_sum,
           coalesce(sum(l.is_out) OVER before, 0) AS outs_before, coalesce(sum(l.is_in) OVER before, 0) AS ins_before,
           coalesce(sum(l.went_out) OVER before, 0) AS out_sum_before,
           coalesce(sum(l.came_in) OVER before, 0) AS in_sum_before
    FROM lines l
    WINDOW up_to AS (PARTITION BY l.stretch ORDER BY l.version ROWS UNBOUNDED PRECEDING),
           before AS (PARTITION BY l.stretch ORDER BY l.posted_at GROUPS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)
), measured AS (
    SELECT m.stretch, m.version, m.outs, m.ins, m.out_sum, m.in_sum,
           first_value(m.outs_before) OVER hour AS hour_outs, first_value(m.out_sum_before) OVER hour AS hour_out_sum,
           first_value(m.ins_before) OVER hour AS hour_ins, first_value(m.in_sum_before) OVER hour AS hour_in_sum,
           first_value(m.outs_before) OVER day AS day_outs, first_value(m.out_sum_before) OVER day AS day_out_sum,
           first_value(m.ins_before) OVER day AS day_ins, first_value(m.in_sum_before) OVER day AS day_in_sum,
           first_value(m.outs_before) OVER week AS week_outs, first_value(m.out_sum_before) OVER week AS week_out_sum,
           first_value(m.ins_before) OVER week AS week_ins, first_value(m.in_sum_before) OVER week AS week_in_sum
    FROM summed m
    WINDOW hour AS (PARTITION BY m.stretch ORDER BY m.posted_at
                    RANGE BETWEEN interval '1 hour' PRECEDING AND CURRENT ROW),
           day AS (PARTITION BY m.stretch ORDER BY m.posted_at
                   RANGE BETWEEN interval '24 hours' PRECEDING AND CURRENT ROW),
           week AS (PARTITION BY m.stretch ORDER BY m.posted_at
                    RANGE BETWEEN interval '168 hours' PRECEDING AND CURRENT ROW)
)
SELECT q.place,
       m.outs - m.hour_outs AS hour_outs, m.out_sum - m.hour_out_sum AS hour_out_sum,
       m.ins - m.hour_ins AS hour_ins, m.in_sum - m.hour_in_sum AS hour_in_sum,
       m.outs - m.day_outs AS day_outs, m.out_sum - m.day_out_sum AS day_out_sum,
       m.ins - m.day_ins AS day_ins, m.in_sum - m.day_in_sum AS day_in_sum,
       m.outs - m.week_outs AS week_outs, m.out_sum - m.week_out_sum AS week_out_sum,
       m.ins - m.week_ins AS week_ins, m.in_sum - m.week_in_sum AS week_in_sum
FROM unnest(CAST(:stretches AS bigint[]), CAST(:versions AS bigint[]), CAST(:places AS integer[]))
     AS q(stretch, version, place)
JOIN measured m ON m.stretch = q.stretch AND m.version = q.version
""")
# Whom an account's money went to in the week before one of its entries; of one that is too busy, nothing.
COUNT_RECEIVERS = text("""
SELECT CASE WHEN l.number > CAST(:most AS bigint) THEN NULL ELSE (
    SELECT count(DISTINCT o.account_id)
    FROM ledger.entries e
    JOIN ledger.transactions t ON t.id = e.transaction_id AND t.reverses_id IS NULL
    JOIN ledger.entries o ON o.transaction_id = e.transaction_id AND o.account_id <> e.account_id
    JOIN ledger.accounts p ON p.id = o.account_id AND p.side * o.amount > 0
    WHERE e.account_id = q.account_id AND e.version > q.version - l.number AND e.version <= q.version
      AND b.side * e.amount < 0) END AS receivers
FROM unnest(CAST(:accounts AS uuid[]), CAST(:versions AS bigint[]), CAST(:moments AS timestamptz[]))
     WITH ORDINALITY AS q(account_id, version, moment, place)
JOIN ledger.accounts b ON b.id = q.account_id
CROSS JOIN LATERAL ledger.find_entry_at(
    q.account_id, q.moment - interval '168 hours' - interval '1 microsecond') AS f
CROSS JOIN LATERAL (SELECT q.version - f.version) AS l(number)
ORDER BY q.place
""")


@dataclass
class _Stretch:
    """Entries of an account that follow each other, and the questions that they answer."""

    account_id: UUID
    side: int
    after: int
    last: int
    places: list[int] = field(default_factory=list)


async def read_flows(tx: Tx, asked: Sequence[FlowQuestion], *, most: int) -> list[Flow]:
    """An answer to each question, the same alone and among others: two statements, or a few more for a lot to read."""
    mosts = [min(one.most, most) for one in asked]
    located = (await tx.execute(LOCATE_FLOWS, _values(asked) | {"mosts": mosts})).mappings().all()
    found: dict[int, Any] = {}
    for some in _portions(_find_stretches(asked, located, mosts)):
        found |= {row["place"]: row for row in (await tx.execute(READ_FLOWS, _read_values(asked, some))).mappings()}
    return [
        _flow(one, where, found.get(place), most)
        for place, (one, where, most) in enumerate(zip(asked, located, mosts, strict=True))
    ]


async def count_receivers(tx: Tx, asked: Sequence[FlowQuestion], *, most: int) -> list[int | None]:
    """To how many accounts the money of each went; None where that is more than is counted."""
    return [row[0] for row in await tx.execute(COUNT_RECEIVERS, _values(asked) | {"most": most})]


def _values(asked: Sequence[FlowQuestion]) -> dict[str, Any]:
    return {
        "accounts": [one.account_id for one in asked], "versions": [one.version for one in asked],
        "moments": [one.at for one in asked],
    }  # fmt: skip


def _can_read(one: FlowQuestion, before: int, most: int) -> bool:
    """Whether a window that begins behind this entry has few enough of them: a matter of the question alone."""
    return one.version - before <= most


def _find_stretches(asked: Sequence[FlowQuestion], located: Sequence[Any], mosts: Sequence[int]) -> list[_Stretch]:
    """What has to be read: what overlaps is read once, and what lies between is not read."""
    wanted = []
    for place, (one, where, most) in enumerate(zip(asked, located, mosts, strict=True)):
        befores = [where[name] for name in WINDOWS if _can_read(one, where[name], most)]
        if befores:
            wanted.append((one.account_id, min(befores), one.version, where["side"], place))
    found: list[_Stretch] = []
    for account_id, after, version, side, place in sorted(wanted):
        last = found[-1] if found else None
        if last is None or last.account_id != account_id or last.last <= after:
            found.append(last := _Stretch(account_id, side, after, version))
        last.last = max(last.last, version)
        last.places.append(place)
    return found


def _portions(stretches: Sequence[_Stretch]) -> Iterator[list[_Stretch]]:
    """So many that one statement can hold them."""
    some: list[_Stretch] = []
    for one in stretches:
        if some and sum(each.last - each.after for each in some) + one.last - one.after > MOST_AT_ONCE:
            yield some
            some = []
        some.append(one)
    if some:
        yield some


def _read_values(asked: Sequence[FlowQuestion], some: Sequence[_Stretch]) -> dict[str, Any]:
    questions = [(number, place) for number, one in enumerate(some, 1) for place in one.places]
    return {
        "accounts": [one.account_id for one in some], "sides": [one.side for one in some],
        "afters": [one.after for one in some], "lasts": [one.last for one in some],
        "stretches": [number for number, _ in questions], "places": [place for _, place in questions],
        "versions": [asked[place].version for _, place in questions],
    }  # fmt: skip


def _flow(one: FlowQuestion, where: Any, row: Any, most: int) -> Flow:
    windows = {
        name: Moved(*(int(row[f"{name}_{part}"]) for part in ("outs", "out_sum", "ins", "in_sum")))
        if row is not None and _can_read(one, where[name], most)
        else None
        for name in WINDOWS
    }
    return Flow(windows)
