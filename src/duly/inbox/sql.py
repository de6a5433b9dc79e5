"""The statements of the receiver: what a broker brought becomes rows, jobs and dead letters in one transaction."""

from __future__ import annotations

from duly.db import Statement

# Whoever moves a consumer to another source waits for us, and we for them; registering waits for nobody.
READ_CONSUMERS_VIA = Statement("""
SELECT name, patterns, ordered FROM duly.consumers
WHERE enabled AND via = CAST(:via AS text) ORDER BY name FOR KEY SHARE
""")

# Jobs are made from what was really inserted, so a message that came before makes none; and none for an event of ours
# that the relay brought to the consumer before it was moved here. Order is that of delivery. A scalar subquery, not
# EXISTS: PostgreSQL would read and hash the whole history.
RECEIVE_EVENTS = Statement("""
WITH given AS (
    SELECT * FROM unnest(
        CAST(:ids AS uuid[]), CAST(:types AS text[]), CAST(:topics AS text[]), CAST(:aggregate_ids AS text[]),
        CAST(CAST(:payloads AS text[]) AS jsonb[]), CAST(CAST(:headers AS text[]) AS jsonb[]),
        CAST(:moments AS timestamptz[]), CAST(:positions AS text[]))
        WITH ORDINALITY AS g(id, type, topic, aggregate_id, payload, headers, created_at, position, place)
), fresh AS (
    INSERT INTO duly.received (id, via, type, topic, aggregate_id, payload, headers, created_at, received_at, position)
    SELECT g.id, CAST(:via AS text), g.type, g.topic, g.aggregate_id, g.payload, g.headers, g.created_at, duly.now(),
           g.position
    FROM given g ORDER BY g.place
    ON CONFLICT DO NOTHING RETURNING id
), routed AS (
    SELECT g.id AS event_id, g.place, g.aggregate_id, 'consumer:' || c.name AS name,
           CASE WHEN r.ordered THEN g.aggregate_id END AS order_key,
           r.ordered AND row_number() OVER (PARTITION BY c.name, g.aggregate_id ORDER BY g.place) > 1 AS follows,
           CASE WHEN g.headers->>'correlation_id' ~ '^[0-9a-fA-F]{8}-([0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}$'
                THEN (g.headers->>'correlation_id')::uuid END AS correlation_id,
           g.headers->>'traceparent' AS traceparent
    FROM fresh f
    JOIN given g ON g.id = f.id
    JOIN unnest(CAST(:routed_ids AS uuid[]), CAST(:consumers AS text[]), CAST(:ordered AS boolean[]))
         AS r(id, consumer, ordered) ON r.id = f.id
    JOIN duly.consumers c ON c.name = r.consumer
    WHERE (SELECT true FROM duly.events e WHERE e.id = f.id AND e.published_at < c.via_since LIMIT 1) IS NULL
), delivered AS (
    INSERT INTO duly.jobs (name, entity_id, event_id, order_key, run_at, due_at, created_at, waits,
                           correlation_id, causation_id, traceparent)
    SELECT r.name, r.aggregate_id, r.event_id, r.order_key,
           CASE WHEN behind THEN 'infinity' ELSE duly.now() END, duly.now(), duly.now(),
           CASE WHEN behind THEN 'behind' ELSE 'due' END, r.correlation_id, r.event_id, r.traceparent
    FROM routed r
    CROSS JOIN LATERAL (SELECT r.follows OR (r.order_key IS NOT NULL AND (
        EXISTS (SELECT 1 FROM duly.jobs j WHERE j.name = r.name AND j.order_key = r.order_key)
        OR EXISTS (SELECT 1 FROM duly.dead_letters d
                   WHERE d.name = r.name AND d.order_key = r.order_key))) AS behind) AS b
    ORDER BY r.place, r.name
    RETURNING 1
)
SELECT (SELECT count(*) FROM fresh)::int, (SELECT count(*) FROM delivered)::int
""")

# One that is buried already came again: its acknowledgement was lost.
BURY_MESSAGES = Statement("""
WITH given AS (
    SELECT * FROM unnest(CAST(:marks AS text[]), CAST(CAST(:payloads AS text[]) AS jsonb[]), CAST(:errors AS text[]))
        WITH ORDINALITY AS g(mark, payload, error, place)
), buried AS (
    INSERT INTO duly.dead_letters (id, name, entity_id, payload, priority, due_at, created_at, original_delay,
        retry_count, max_retries, source, reason, error, error_kind, buried_at)
    SELECT nextval(pg_get_serial_sequence('duly.jobs', 'id')), CAST(:name AS text), g.mark, g.payload, 3, duly.now(),
           duly.now(), interval '0', 0, 0, 'Deferred', 'failed_for_good', g.error, 'Invalid', duly.now()
    FROM given g
    WHERE (SELECT true FROM duly.dead_letters d
           WHERE d.name = CAST(:name AS text) AND d.entity_id = g.mark LIMIT 1) IS NULL
    ORDER BY g.place
    RETURNING error
), raised AS (
    SELECT duly.alert('dead_letter', CAST(:name AS text), min(b.error)) FROM buried b HAVING count(*) > 0
)
SELECT (SELECT count(*) FROM buried)::int, (SELECT count(*) FROM raised)
""")

READ_CURSORS = Statement("SELECT shard, position FROM duly.cursors WHERE via = CAST(:via AS text)")
# Only from where we read: of two receivers that read the same, one moves it.
MOVE_CURSORS = Statement("""
WITH given AS (
    SELECT * FROM unnest(CAST(:shards AS text[]), CAST(:before AS bigint[]), CAST(:positions AS bigint[]))
        AS g(shard, before, position)
), moved AS (
    UPDATE duly.cursors c SET position = g.position, moved_at = duly.now() FROM given g
    WHERE c.via = CAST(:via AS text) AND c.shard = g.shard AND c.position = g.before RETURNING c.shard
), made AS (
    INSERT INTO duly.cursors (via, shard, position, moved_at)
    SELECT CAST(:via AS text), g.shard, g.position, duly.now() FROM given g WHERE g.before IS NULL
    ON CONFLICT DO NOTHING RETURNING shard
)
SELECT shard FROM moved UNION ALL SELECT shard FROM made
""")

# What workers could run now and have not. Who waits behind another of its aggregate, or for a retry, does not count:
# one sick aggregate must not stop the others.
COUNT_AHEAD = Statement("""
SELECT count(*)::int FROM (
    SELECT 1 FROM duly.consumers c
    CROSS JOIN generate_series(1, 4) AS p(priority)
    CROSS JOIN LATERAL (
        SELECT 1 FROM duly.jobs j
        WHERE j.name = 'consumer:' || c.name AND j.priority = p.priority AND j.run_at <= duly.now()
        LIMIT CAST(:limit AS int)) AS waiting
    WHERE c.enabled AND c.via = CAST(:via AS text)
    LIMIT CAST(:limit AS int)) AS counted
""")

# Where the history of our own does not hold an event, a broker brought it. The same event by two ways is one event.
LOAD_RECEIVED = Statement("""
SELECT DISTINCT ON (r.id)
       r.id, r.type, r.topic, r.aggregate_id, r.payload::text, r.headers::text, r.created_at,
       EXISTS (SELECT 1 FROM duly.processed_events p
               WHERE p.consumer = CAST(:consumer AS text) AND p.event_id = r.id) AS processed
FROM duly.received r WHERE r.id = ANY(CAST(:ids AS uuid[])) ORDER BY r.id, r.received_at
""")
