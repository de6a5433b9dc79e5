"""The statements that show consumers, and move one from the relay to a broker or back."""

from __future__ import annotations

from duly.db import Statement

LIST_CONSUMERS = Statement("""
SELECT name, patterns, ordered, enabled, via, via_since, registered_at FROM duly.consumers
ORDER BY name LIMIT CAST(:limit AS int)
""")
BOUND_LOCK_WAIT = Statement("SELECT set_config('lock_timeout', '5s', true)")
# Waits for every relay that settles right now, and the next ones wait for us.
LOCK_LANES = Statement("LOCK TABLE duly.lanes IN EXCLUSIVE MODE")
# Waits for every receiver that routes right now.
LOCK_CONSUMER = Statement("""
SELECT patterns, ordered, via, via_since FROM duly.consumers WHERE name = CAST(:name AS text) FOR UPDATE
""")
MOVE_CONSUMER = Statement("""
UPDATE duly.consumers SET via = CAST(:via AS text),
    via_since = CASE WHEN CAST(:via AS text) IS NOT NULL THEN duly.now() END
WHERE name = CAST(:name AS text)
""")
# What was published before this is delivered: should the broker bring it after all, it makes no job.
ADVANCE_CONSUMER = Statement("""
UPDATE duly.consumers SET via_since = CAST(:since AS timestamptz) WHERE name = CAST(:name AS text)
""")
COUNT_RECEIVERS = Statement("""
SELECT count(*)::int FROM duly.processes
WHERE kind = 'receiver' AND CAST(:via AS text) = ANY(names)
  AND seen_at > clock_timestamp() - make_interval(secs => CAST(:alive_seconds AS float8))
""")
# Published since the consumer was moved to the broker, and not received from it yet. Reads the history of that time.
FIND_UNDERWAY = Statement("""
SELECT e.id, e.aggregate_id, e.published_at FROM duly.events e
WHERE e.published_at >= CAST(:since AS timestamptz)
  AND (e.type LIKE ANY(CAST(:likes AS text[])) OR e.topic LIKE ANY(CAST(:likes AS text[])))
  AND NOT EXISTS (SELECT 1 FROM duly.received r WHERE r.id = e.id AND r.via = CAST(:via AS text))
ORDER BY e.published_at, e.seq LIMIT CAST(:limit AS int)
""")
DELIVER_UNDERWAY = Statement("""
INSERT INTO duly.jobs (name, entity_id, event_id, order_key, run_at, due_at, created_at, waits,
                       correlation_id, causation_id, traceparent)
SELECT 'consumer:' || CAST(:name AS text), e.aggregate_id, e.id, r.order_key,
       CASE WHEN behind THEN 'infinity' ELSE duly.now() END, duly.now(), duly.now(),
       CASE WHEN behind THEN 'behind' ELSE 'due' END,
       CASE WHEN e.headers->>'correlation_id' ~ '^[0-9a-fA-F]{8}-([0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}$'
            THEN (e.headers->>'correlation_id')::uuid END, e.id, e.headers->>'traceparent'
FROM duly.events e
CROSS JOIN LATERAL (SELECT CASE WHEN CAST(:ordered AS boolean) THEN e.aggregate_id END AS order_key) AS r
CROSS JOIN LATERAL (SELECT r.order_key IS NOT NULL AND (
    EXISTS (SELECT 1 FROM duly.events earlier WHERE earlier.id = ANY(CAST(:ids AS uuid[]))
              AND earlier.aggregate_id = e.aggregate_id AND earlier.seq < e.seq)
    OR EXISTS (SELECT 1 FROM duly.jobs j
               WHERE j.name = 'consumer:' || CAST(:name AS text) AND j.order_key = r.order_key)
    OR EXISTS (SELECT 1 FROM duly.dead_letters d
               WHERE d.name = 'consumer:' || CAST(:name AS text) AND d.order_key = r.order_key)) AS behind) AS b
WHERE e.id = ANY(CAST(:ids AS uuid[])) ORDER BY e.seq
""")
