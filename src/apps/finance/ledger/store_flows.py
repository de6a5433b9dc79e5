"""What went out of accounts and came in, over windows that end at one of their entries: whatever has happened since.

An entry never changes, so the answer about a moment is the same whenever it is asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import text

from apps.finance.ledger.model import WINDOWS, Flow, FlowQuestion, Moved
from duly import Tx

# One pass over the entries of each account that is asked about, however many questions there are about it. Sums up to
# an entry are by its version, for some are of the same moment; sums before a window are by moments, whole. More than so
# many entries of an account are not read: a window that begins before those has no answer. Reversals do not count.
READ_FLOWS = text("""
WITH asked AS MATERIALIZED (
    SELECT q.place, q.account_id, q.version, q.moment
    FROM unnest(CAST(:accounts AS uuid[]), CAST(:versions AS bigint[]), CAST(:moments AS timestamptz[]))
         WITH ORDINALITY AS q(account_id, version, moment, place)
), spans AS MATERIALIZED (
    SELECT s.account_id, s.last, b.side, b.type = 'LIABILITY' AS is_customers,
           greatest(f.version, s.last - CAST(:most AS bigint)) AS read_after,
           f.version < s.last - CAST(:most AS bigint) AS is_cut
    FROM (SELECT account_id, max(version) AS last, min(moment) AS earliest FROM asked GROUP BY 1) AS s
    JOIN ledger.accounts b ON b.id = s.account_id
    CROSS JOIN LATERAL ledger.find_entry_at(
        s.account_id, s.earliest - interval '168 hours' - interval '1 microsecond') AS f
), lines AS (
    SELECT s.account_id, s.side, s.is_cut, e.version, e.posted_at, e.is_out, e.is_in, e.went_out, e.came_in
    FROM spans s
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
    WINDOW up_to AS (PARTITION BY l.account_id ORDER BY l.version ROWS UNBOUNDED PRECEDING),
           before AS (PARTITION BY l.account_id ORDER BY l.posted_at GROUPS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)
), measured AS (
    SELECT m.account_id, m.side, m.version, m.is_cut, m.outs, m.ins, m.out_sum, m.in_sum,
           first_value(m.posted_at) OVER (PARTITION BY m.account_id ORDER BY m.posted_at) AS first_read,
           first_value(m.posted_at) OVER hour AS hour_first, first_value(m.outs_before) OVER hour AS hour_outs,
           first_value(m.ins_before) OVER hour AS hour_ins, first_value(m.out_sum_before) OVER hour AS hour_out_sum,
           first_value(m.in_sum_before) OVER hour AS hour_in_sum,
           first_value(m.posted_at) OVER day AS day_first, first_value(m.outs_before) OVER day AS day_outs,
           first_value(m.ins_before) OVER day AS day_ins, first_value(m.out_sum_before) OVER day AS day_out_sum,
           first_value(m.in_sum_before) OVER day AS day_in_sum,
           first_value(m.posted_at) OVER week AS week_first, first_value(m.outs_before) OVER week AS week_outs,
           first_value(m.ins_before) OVER week AS week_ins, first_value(m.out_sum_before) OVER week AS week_out_sum,
           first_value(m.in_sum_before) OVER week AS week_in_sum
    FROM summed m
    WINDOW hour AS (PARTITION BY m.account_id ORDER BY m.posted_at
                    RANGE BETWEEN interval '1 hour' PRECEDING AND CURRENT ROW),
           day AS (PARTITION BY m.account_id ORDER BY m.posted_at
                   RANGE BETWEEN interval '24 hours' PRECEDING AND CURRENT ROW),
           week AS (PARTITION BY m.account_id ORDER BY m.posted_at
                    RANGE BETWEEN interval '168 hours' PRECEDING AND CURRENT ROW)
)
SELECT s.side, s.is_customers, m.version IS NULL AS is_unread,
        m.is_cut AND m.hour_first = m.first_read AS hour_is_cut,
       m.is_cut AND m.day_first = m.first_read AS day_is_cut, m.is_cut AND m.week_first = m.first_read AS week_is_cut,
       m.outs - m.hour_outs AS hour_outs, m.out_sum - m.hour_out_sum AS hour_out_sum,
       m.ins - m.hour_ins AS hour_ins, m.in_sum - m.hour_in_sum AS hour_in_sum,
       m.outs - m.day_outs AS day_outs, m.out_sum - m.day_out_sum AS day_out_sum,
       m.ins - m.day_ins AS day_ins, m.in_sum - m.day_in_sum AS day_in_sum,
       m.outs - m.week_outs AS week_outs, m.out_sum - m.week_out_sum AS week_out_sum,
       m.ins - m.week_ins AS week_ins, m.in_sum - m.week_in_sum AS week_in_sum
FROM asked q
JOIN spans s ON s.account_id = q.account_id
LEFT JOIN measured m ON m.account_id = q.account_id AND m.version = q.version
ORDER BY q.place
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


async def read_flows(tx: Tx, asked: Sequence[FlowQuestion], *, most: int) -> list[Flow]:
    """An answer to each question, in one statement."""
    found = (await tx.execute(READ_FLOWS, _values(asked, most))).mappings().all()
    return [_flow(row) for row in found]


async def count_receivers(tx: Tx, asked: Sequence[FlowQuestion], *, most: int) -> list[int | None]:
    """To how many accounts the money of each went; None where that is more than is counted."""
    return [row[0] for row in await tx.execute(COUNT_RECEIVERS, _values(asked, most))]


def _values(asked: Sequence[FlowQuestion], most: int) -> dict[str, Any]:
    return {
        "accounts": [one.account_id for one in asked], "versions": [one.version for one in asked],
        "moments": [one.at for one in asked], "most": most,
    }  # fmt: skip


def _flow(row: Any) -> Flow:
    windows = {
        name: None
        if row["is_unread"] or row[f"{name}_is_cut"]
        else Moved(*(int(row[f"{name}_{part}"]) for part in ("outs", "out_sum", "ins", "in_sum")))
        for name in WINDOWS
    }
    return Flow(row["side"], row["is_customers"], windows)
