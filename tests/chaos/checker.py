"""The checker: pure questions to the facts of a run. Each check is a query for what must not exist.

A query answers with rows of one text each: what is wrong, in words. No rows, no violation.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from tests.chaos.app import CRON_ALL, CRON_ONCE, LIMIT

EXAMPLES = 5
# The kinds of effects that each order has exactly once; jobs are named after their effects.
CONSUMED = ("batched", "noted", "followed")
ONCE = (
    "grouped", "limited", "flaky", "snooze", "sync", "raw", "slow", "block", "v2", "stall.done", "stall.long",
    "settle",
)  # fmt: skip
NEVER = ("raise", "kill", "hang")
MUST_DIE = ("chaos.raise", "chaos.kill", "chaos.hang", "chaos.fail", "stall.fail")
TERMINAL = "('done', 'duplicate', 'cancelled', 'buried')"


@dataclass(frozen=True)
class Violation:
    """One thing that must not have happened."""

    check: str
    count: int
    examples: tuple[str, ...]

    def __str__(self) -> str:
        shown = "; ".join(self.examples)
        return f"{self.check}: {self.count} ({shown}{'; ...' if self.count > len(self.examples) else ''})"


def _values(words: tuple[str, ...]) -> str:
    return "(" + ", ".join(f"('{word}')" for word in words) + ")"


def _list(words: tuple[str, ...]) -> str:
    return "(" + ", ".join(f"'{word}'" for word in words) + ")"


QUERIES: dict[str, str] = {
    # -- requests: acknowledged is kept, refused is not, once is once
    "acknowledged_lost": """
        SELECT h.op FROM (SELECT DISTINCT op, kind FROM history WHERE type = 'ok') h
        WHERE (h.kind = 'order' AND h.op NOT IN (SELECT op FROM orders))
           OR (h.kind = 'cancel' AND h.op NOT IN (SELECT op FROM cancels))
           OR (h.kind = 'nudge' AND h.op NOT IN (SELECT op FROM nudges))
           OR (h.kind = 'note' AND h.op NOT IN (SELECT op FROM notes))""",
    "refused_but_kept": """
        SELECT DISTINCT op FROM history h WHERE type = 'fail' AND kind <> 'reuse'
          AND NOT EXISTS (SELECT 1 FROM history k WHERE k.op = h.op AND k.type = 'ok')
          AND (op IN (SELECT op FROM orders) OR op IN (SELECT op FROM notes)
               OR op IN (SELECT op FROM events WHERE type = 'order.placed')
               OR op IN (SELECT entity_id FROM executions WHERE name = 'chaos.timer'))""",
    "never_asked": """
        SELECT op FROM (SELECT op FROM orders UNION ALL SELECT op FROM notes UNION ALL SELECT op FROM nudges
                        UNION ALL SELECT op FROM cancels)
        WHERE op NOT IN (SELECT op FROM history WHERE type = 'invoke')""",
    "duplicate_business": """
        SELECT op || ' is there ' || count(*) || ' times'
        FROM (SELECT op FROM orders UNION ALL SELECT op FROM notes UNION ALL SELECT op FROM nudges
              UNION ALL SELECT op FROM cancels) GROUP BY op HAVING count(*) > 1""",
    "unanswered": """
        SELECT DISTINCT op FROM history h WHERE type = 'invoke' AND kind NOT IN ('note', 'reuse')
          AND NOT EXISTS (SELECT 1 FROM history k WHERE k.op = h.op AND k.type IN ('ok', 'fail'))""",
    "replay_differs": """
        SELECT op || ' got ' || count(DISTINCT body) || ' different answers' FROM history
        WHERE type = 'ok' GROUP BY op HAVING count(DISTINCT body) > 1""",
    "answered_500": "SELECT op FROM history WHERE status = 500",
    "key_reuse_accepted": "SELECT op FROM history WHERE kind = 'reuse' AND type = 'ok'",
    "key_without_answer": "SELECT key FROM keys WHERE status IS NULL",
    # -- one commit: row, event, timer
    "row_without_event": """
        SELECT op || ' has ' || (SELECT count(*) FROM events e WHERE e.op = o.op AND e.type = 'order.placed')
        FROM orders o WHERE 1 <> (SELECT count(*) FROM events e WHERE e.op = o.op AND e.type = 'order.placed')
        UNION ALL SELECT op FROM notes WHERE op NOT IN (SELECT op FROM events WHERE type = 'note.taken')""",
    "event_without_row": """
        SELECT op FROM events WHERE type = 'order.placed' AND op NOT IN (SELECT op FROM orders)
        UNION ALL SELECT op FROM events WHERE type = 'note.taken' AND op NOT IN (SELECT op FROM notes)""",
    "timer_without_row": """
        SELECT entity_id || ' ' || name FROM (SELECT entity_id, name FROM executions
                                              UNION SELECT entity_id, name FROM jobs)
        WHERE (name LIKE 'chaos.%' OR name LIKE 'stall.%') AND name <> 'chaos.unique' AND entity_id IS NOT NULL
          AND entity_id NOT IN (SELECT op FROM orders)""",
    "event_in_two_places": "SELECT id FROM events GROUP BY id HAVING count(*) > 1",
    # -- effects
    "lost_effect": f"""
        SELECT o.op || ' has no ' || k.column1 FROM orders o, (VALUES {_values(CONSUMED)[1:-1]}) k
        WHERE NOT EXISTS (SELECT 1 FROM effects e WHERE e.key = o.op AND e.kind = k.column1)
        UNION ALL
        SELECT n.op || ' has no noted' FROM notes n
        WHERE NOT EXISTS (SELECT 1 FROM effects e WHERE e.key = n.op AND e.kind = 'noted')
        UNION ALL
        SELECT o.op || ' has no ' || o.extra FROM orders o
        WHERE replace(o.extra, 'chaos.', '') IN {_list(ONCE)}
          AND NOT EXISTS (SELECT 1 FROM effects e WHERE e.key = o.op AND e.kind = replace(o.extra, 'chaos.', ''))
        UNION ALL
        SELECT o.op || ' was not ordered' FROM orders o
        WHERE NOT EXISTS (SELECT 1 FROM effects e WHERE e.key = o.op AND e.kind = 'ordered')
          AND NOT EXISTS (SELECT 1 FROM orders p WHERE p.account = o.account AND p.poison AND p.seq <= o.seq)
        UNION ALL
        SELECT e.key || ' fired without an event' FROM effects e
        WHERE e.kind = 'timer' AND NOT EXISTS (SELECT 1 FROM effects f WHERE f.key = e.key AND f.kind = 'fired')""",
    "duplicate_effect": """
        SELECT kind || ' of ' || key || ' ' || count(*) || ' times' FROM effects
        WHERE kind NOT IN ('snoozed', 'unique') GROUP BY kind, key HAVING count(*) > 1
        UNION ALL
        SELECT 'unique job ' || job_id || ' ' || count(*) || ' times' FROM effects
        WHERE kind = 'unique' GROUP BY job_id HAVING count(*) > 1""",
    "effect_of_the_impossible": f"SELECT kind || ' ' || key FROM effects WHERE kind IN {_list(NEVER)}",
    "effect_without_row": """
        SELECT kind || ' ' || key FROM effects
        WHERE kind NOT LIKE 'chaos.%' AND kind NOT IN ('unique', 'snoozed')
          AND key NOT IN (SELECT op FROM orders) AND key NOT IN (SELECT op FROM notes)""",
    "snoozes": """
        SELECT key || ' snoozed ' || count(*) || ' times' FROM effects WHERE kind = 'snoozed' AND key NOT LIKE 'noted %'
        GROUP BY key HAVING count(*) <> 2
        UNION ALL SELECT key || ' snoozed ' || count(*) || ' times' FROM effects
        WHERE kind = 'snoozed' AND key LIKE 'noted %' GROUP BY key HAVING count(*) <> 1""",
    "order_broken": """
        SELECT aggregate || ': ' || seq || ' came when ' || saw || ' was the last' FROM effects
        WHERE kind = 'ordered' AND saw <> seq - 1
        UNION ALL
        SELECT aggregate || ': ' || seq || ' overtook a dead letter' FROM effects e
        WHERE kind = 'ordered' AND EXISTS (SELECT 1 FROM orders p WHERE p.account = e.aggregate AND p.poison
                                           AND p.seq <= e.seq)""",
    "published_out_of_order": """
        SELECT aggregate_id || ': ' || n FROM (
            SELECT aggregate_id, n, lag(n, 1, 0) OVER (PARTITION BY aggregate_id ORDER BY seq) AS before
            FROM events WHERE type = 'order.placed') WHERE n <> before + 1""",
    # -- the outside: at least once, and never more often than it was tried
    "outside_lost": """
        SELECT op FROM orders WHERE op NOT IN (SELECT key FROM witness WHERE kind = 'outside')
        UNION ALL SELECT op FROM orders
        WHERE extra = 'chaos.plain' AND op NOT IN (SELECT key FROM witness WHERE kind = 'plain')""",
    "outside_too_often": """
        SELECT key || ' called ' || count(*) || ' times' FROM witness w WHERE kind = 'outside' GROUP BY key, mark
        HAVING count(*) > (SELECT count(*) FROM executions x
                           WHERE x.event_id = w.mark AND x.name = 'consumer:outside')
        UNION ALL
        SELECT key || ' called ' || count(*) || ' times' FROM witness w WHERE kind = 'plain' GROUP BY key
        HAVING count(*) > (SELECT count(*) FROM executions x WHERE x.entity_id = w.key AND x.name = 'chaos.plain')""",
    # -- the broker: each event at least once, first deliveries in order
    "never_sent": """
        SELECT o.op FROM orders o JOIN events e ON e.op = o.op AND e.type = 'order.placed' AND e.state = 'published'
        WHERE (SELECT value FROM run WHERE name = 'broker') = 'true'
          AND o.op NOT IN (SELECT key FROM witness WHERE kind = 'sent')""",
    "sent_out_of_order": """
        SELECT account || ': ' || seq || ' before ' || later FROM (
            SELECT o.account, o.seq, lead(o.seq) OVER (PARTITION BY o.account ORDER BY w.at) AS later
            FROM (SELECT key, min(CAST(at AS integer)) AS at FROM witness WHERE kind = 'sent' GROUP BY key) w
            JOIN orders o ON o.op = w.key) WHERE later < seq""",
    "sent_twice_needlessly": """
        SELECT key || ' ' || count(*) || ' times' FROM witness WHERE kind = 'sent'
          AND (SELECT value FROM run WHERE name = 'calm') = 'true' GROUP BY key, mark HAVING count(*) > 1""",
    # -- timers
    "timer_fate": """
        SELECT o.op || ': fired ' || fired || ', cancelled ' || gone FROM (
            SELECT op, (SELECT count(*) FROM effects e WHERE e.kind = 'timer' AND e.key = o.op) AS fired,
                   coalesce((SELECT sum(n) FROM cancels c WHERE c.target = o.op), 0) AS gone FROM orders o) o
        WHERE fired + gone <> 1""",
    "too_early": """
        SELECT kind || ' ' || key || ' ' || (due_at - business_at) || ' s early' FROM effects WHERE due_at > business_at
        UNION ALL
        SELECT name || ' ' || job_id || ' was claimed before its time' FROM trace WHERE what = 'claim' AND is_early""",
    "unique_twice": "SELECT entity || ' had ' || pending || ' pending' FROM nudges WHERE pending > 1",
    "nudge_lost": """
        SELECT op FROM nudges n WHERE NOT EXISTS (
            SELECT 1 FROM effects e
            WHERE e.kind = 'unique' AND e.key = n.entity AND e.business_at >= n.run_at - 0.5)""",
    # -- leases
    "lease_taken_from_the_living": """
        SELECT name || ' ' || job_id || ' by ' || worker FROM trace WHERE what = 'claim' AND was_live""",
    "tokens_not_increasing": """
        SELECT job_id || ': ' || token || ' after ' || before FROM (
            SELECT job_id, token, lag(token) OVER (PARTITION BY job_id ORDER BY seq) AS before
            FROM trace WHERE what = 'claim') WHERE token <= before""",
    "zombie_accepted": """
        SELECT a.name || ' ' || a.job_id || ' ' || a.outcome || ' under ' || a.token FROM trace a
        WHERE a.what = 'accept' AND a.outcome <> 'lost'
          AND EXISTS (SELECT 1 FROM trace c WHERE c.job_id = a.job_id AND c.what = 'claim'
                      AND c.seq < a.seq AND c.token > a.token)""",
    "accepted_twice": f"""
        SELECT job_id || ' under ' || token FROM trace WHERE what = 'accept' GROUP BY job_id, token HAVING count(*) > 1
        UNION ALL
        SELECT job_id || ' ended ' || count(*) || ' times' FROM executions WHERE outcome IN {TERMINAL}
        GROUP BY job_id HAVING count(*) > 1""",
    "effect_without_end": """
        SELECT kind || ' ' || key FROM effects e WHERE job_id IS NOT NULL AND kind <> 'snoozed'
          AND NOT EXISTS (SELECT 1 FROM executions x WHERE x.job_id = e.job_id AND x.outcome = 'done')""",
    "taken_over_needlessly": """
        SELECT name || ' ' || job_id FROM executions x WHERE outcome = 'lost' AND name IN ('chaos.block', 'stall.long')
          AND (SELECT value FROM run WHERE name = 'calm') = 'true'""",
    # -- the end
    "stuck": """
        SELECT name || ' ' || coalesce(entity_id, id) || ' (' || waits || ')' FROM jobs j
        WHERE NOT (waits = 'behind' AND order_key IN (SELECT order_key FROM dead_letters d WHERE d.name = j.name))
        UNION ALL SELECT 'event ' || id || ' ' || state FROM events WHERE state <> 'published'
        UNION ALL SELECT 'job ' || id || ' leased' FROM jobs WHERE leased
        UNION ALL SELECT 'lane ' || lane || ' leased' FROM lanes""",
    "dead_letter_of_the_good": f"""
        SELECT name || ' ' || coalesce(entity_id, '') || ' ' || reason FROM dead_letters d
        WHERE name NOT IN {_list(MUST_DIE)}
          AND NOT (name = 'consumer:ordered' AND event_id IN (
                   SELECT e.id FROM events e JOIN orders o ON o.op = e.op WHERE o.poison))""",
    "poison_not_dead": f"""
        SELECT o.op || ' ' || extra FROM orders o WHERE extra IN {_list(MUST_DIE)}
          AND 1 <> (SELECT count(*) FROM dead_letters d WHERE d.entity_id = o.op AND d.name = o.extra)
        UNION ALL
        SELECT o.op || ' ordered' FROM orders o WHERE poison AND 1 <> (
            SELECT count(*) FROM dead_letters d JOIN events e ON e.id = d.event_id
            WHERE d.name = 'consumer:ordered' AND e.op = o.op)
          AND NOT EXISTS (SELECT 1 FROM orders p WHERE p.account = o.account AND p.poison AND p.seq < o.seq)""",
    "poison_tried_too_often": """
        SELECT name || ' ' || job_id || ' ' || count(*) || ' times' FROM executions
        WHERE name IN ('chaos.raise', 'chaos.hang') AND outcome IN ('retried', 'buried', 'lost')
          -- whoever takes it over after its last attempt does not run it: it comes to bury it, and may die over that
          AND NOT (retry_count > 3 AND outcome IN ('buried', 'lost'))
        GROUP BY name, job_id HAVING count(*) > 4""",
    "inbox_incomplete": """
        SELECT e.op || ' for ' || c.column1 FROM events e, (VALUES ('batched'), ('noted'), ('outside')) c
        WHERE e.type = 'order.placed' AND NOT EXISTS (
            SELECT 1 FROM processed p WHERE p.event_id = e.id AND p.consumer = c.column1)""",
}


def _limit(facts: sqlite3.Connection) -> Iterator[str]:
    """At most so many successful runs of a limited name at the same moment."""
    running = 0
    moments = """
        SELECT began_at AS moment, 1 AS step, key FROM effects WHERE kind = 'limited'
        UNION ALL SELECT at, -1, key FROM effects WHERE kind = 'limited' ORDER BY moment, step"""
    for moment, step, key in facts.execute(moments):
        running += step
        if running > LIMIT:
            yield f"{running} at once at {moment} ({key})"


def _cron(facts: sqlite3.Connection) -> Iterator[str]:
    """Each occurrence once; of the schedule that runs all, every one between the first and the last."""
    for name in (CRON_ALL, CRON_ONCE):
        fired = [row[0] for row in facts.execute("SELECT due_at FROM effects WHERE kind = ? ORDER BY due_at", [name])]
        yield from (f"{name} at {at} twice" for at, after in pairwise(fired) if at == after)
        yield from (f"{name} at {at} is no occurrence" for at in fired if at % 60)
        if name == CRON_ALL:
            yield from (f"{name}: nothing between {at} and {after}" for at, after in pairwise(fired) if after - at > 60)
        last = facts.execute("SELECT last_run_at FROM schedules WHERE name = ?", [name]).fetchone()
        if last and last[0] is not None and last[0] not in fired:
            yield f"{name} was fired for {last[0]} and did not run"


def _unexpected(facts: sqlite3.Connection) -> Iterator[str]:
    """Processes that ended by themselves, and other things the harness saw."""
    row = facts.execute("SELECT value FROM run WHERE name = 'unexpected'").fetchone()
    yield from json.loads(row[0]) if row else ()


CHECKS: dict[str, Callable[[sqlite3.Connection], Iterator[str]]] = {
    "limit_exceeded": _limit,
    "cron_not_once": _cron,
    "unexpected_end": _unexpected,
}


def check(facts: sqlite3.Connection) -> list[Violation]:
    """Everything that is wrong with these facts."""
    found = []
    for name, query in QUERIES.items():
        if violation := _judge(name, (str(row[0]) for row in facts.execute(query))):
            found.append(violation)
    for name, ask in CHECKS.items():
        if violation := _judge(name, ask(facts)):
            found.append(violation)
    return found


def _judge(name: str, wrong: Iterator[str]) -> Violation | None:
    """Counts all, remembers a few."""
    examples: list[str] = []
    count = 0
    for one in wrong:
        count += 1
        if len(examples) < EXAMPLES:
            examples.append(one)
    return Violation(name, count, tuple(examples)) if count else None
