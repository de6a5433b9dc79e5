"""The statements of the relay."""

from __future__ import annotations

from duly.db import Statement

# Lanes are locked in a statement of their own: the fetch that follows has a snapshot taken after the lock, so it
# cannot see an event that the lane's last relay has just published.
LOCK_LANES = Statement("""
SELECT lane FROM duly.lanes
WHERE lease_expires_at IS NULL OR lease_expires_at < clock_timestamp() OR leased_by = CAST(:relay AS text)
ORDER BY (lane + CAST(:turn AS int)) % 64 LIMIT CAST(:share AS int) FOR UPDATE SKIP LOCKED
""")
LEASE_LANES = Statement("""
UPDATE duly.lanes SET lease_token = CAST(:token AS bigint), leased_by = CAST(:relay AS text),
    lease_expires_at = clock_timestamp() + make_interval(secs => CAST(:lease_seconds AS float8))
WHERE lane = ANY(CAST(:lanes AS smallint[]))
""")
NEXT_TOKEN = Statement("SELECT nextval('duly.lease_tokens')")
RELEASE_LANES = Statement("""
UPDATE duly.lanes SET lease_token = NULL, leased_by = NULL, lease_expires_at = NULL
WHERE lease_token = CAST(:token AS bigint) RETURNING lane
""")

# One index range a lane, in order of seq. An event with an unsettled earlier one of its aggregate that is backing
# off, failed or parked is not taken, but marked so that it is parked.
FETCH_EVENTS = Statement("""
SELECT e.seq, e.id, e.type, e.topic, e.aggregate_id, CASE WHEN CAST(:bodies AS boolean) THEN e.payload::text END,
       e.headers::text, e.created_at, e.lane, e.held, e.holds
FROM (SELECT lane FROM unnest(CAST(:lanes AS smallint[])) WITH ORDINALITY AS l(lane, place) ORDER BY place) AS mine
CROSS JOIN LATERAL (
    -- Scalar subqueries, not EXISTS: PostgreSQL would read and hash all that is parked anywhere.
    SELECT o.*,
           (SELECT true FROM duly.outbox b
            WHERE b.aggregate_id = o.aggregate_id AND b.seq < o.seq
              AND (b.parked OR b.attempts > 0 OR b.retry_at IS NOT NULL) LIMIT 1) AS held,
           (SELECT true FROM duly.outbox b
            WHERE b.aggregate_id = o.aggregate_id AND b.parked LIMIT 1) AS holds
    FROM duly.outbox o
    WHERE o.lane = mine.lane AND NOT o.parked AND o.failed_at IS NULL
      AND (o.retry_at IS NULL OR o.retry_at <= duly.now())
    ORDER BY o.seq LIMIT CAST(:batch AS int)) AS e
LIMIT CAST(:batch AS int)
""")
SECONDS_TO_NEXT_EVENT = Statement("""
SELECT extract(epoch FROM min(retry_at) - duly.now())::float8 FROM duly.outbox
WHERE attempts > 0 AND failed_at IS NULL
""")
# Who gets its events from a broker (via) is none of the relay's business; except who was moved there while a batch was
# on its way: those are told twice rather than not at all, and the inbox knows the second.
READ_CONSUMERS = Statement("""
SELECT name, patterns, ordered FROM duly.consumers
WHERE enabled AND (via IS NULL OR name = ANY(CAST(:also AS text[]))) ORDER BY name
""")
COUNT_RELAYS = Statement("""
SELECT greatest(1, count(*))::int FROM duly.processes
WHERE kind = 'relay' AND seen_at > clock_timestamp() - interval '30 seconds'
""")

# The jobs are made from what the DELETE really moved, so an event that was published already makes none.
PUBLISH_EVENTS = Statement("""
WITH moved AS (
    DELETE FROM duly.outbox WHERE seq = ANY(CAST(:seqs AS bigint[])) RETURNING *
), kept AS (
    INSERT INTO duly.events (id, seq, type, topic, aggregate_id, payload, headers, created_at, published_at, attempts)
    SELECT id, seq, type, topic, aggregate_id, payload, headers, created_at, duly.now(), attempts FROM moved
), routed AS (
    SELECT m.id AS event_id, m.seq, m.aggregate_id, 'consumer:' || r.consumer AS name,
           CASE WHEN r.ordered THEN m.aggregate_id END AS order_key,
           r.ordered AND row_number() OVER (PARTITION BY r.consumer, m.aggregate_id ORDER BY m.seq) > 1 AS follows,
           CASE WHEN m.headers->>'correlation_id' ~ '^[0-9a-fA-F]{8}-([0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}$'
                THEN (m.headers->>'correlation_id')::uuid END AS correlation_id,
           m.headers->>'traceparent' AS traceparent
    FROM moved m
    JOIN unnest(CAST(:routed_seqs AS bigint[]), CAST(:consumers AS text[]), CAST(:ordered AS boolean[]))
         AS r(seq, consumer, ordered) ON r.seq = m.seq
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
    ORDER BY r.seq, r.name
)
SELECT seq FROM moved
""")

FAIL_EVENTS = Statement("""
UPDATE duly.outbox o SET attempts = o.attempts + 1, last_error = g.error,
    retry_at = duly.now() + make_interval(secs => least(power(2, o.attempts), 3600)),
    failed_at = CASE WHEN o.attempts + 1 >= CAST(:attempts AS int) THEN duly.now() END
FROM unnest(CAST(:seqs AS bigint[]), CAST(:errors AS text[])) AS g(seq, error)
WHERE o.seq = g.seq
RETURNING o.id, o.topic, o.type, o.attempts, o.failed_at IS NOT NULL
""")
# Its topic is away: no attempt of the event's own. It waits a quarter of its age, 2 to 30 seconds.
POSTPONE_EVENTS = Statement("""
UPDATE duly.outbox o SET last_error = g.reason, retry_at = duly.now() + make_interval(
    secs => least(greatest(extract(epoch FROM duly.now() - o.created_at)::float8 / 4, 2), 30))
FROM unnest(CAST(:seqs AS bigint[]), CAST(:reasons AS text[])) AS g(seq, reason)
WHERE o.seq = g.seq
""")
RAISE_ALERTS = Statement("""
SELECT count(duly.alert('event_failed', a.subject, a.message))
FROM unnest(CAST(:subjects AS text[]), CAST(:messages AS text[])) AS a(subject, message)
""")
PARK_EVENTS = Statement("UPDATE duly.outbox SET parked = true WHERE seq = ANY(CAST(:seqs AS bigint[])) AND NOT parked")

# The next ones of these aggregates, whose head is gone; a thousand at a time, in order.
UNPARK_AGGREGATES = Statement("""
UPDATE duly.outbox SET parked = false
WHERE seq = ANY(ARRAY(SELECT o.seq FROM duly.outbox o
                      WHERE o.aggregate_id = ANY(CAST(:aggregates AS text[])) AND o.parked
                      ORDER BY o.seq LIMIT 1000))
""")
# The same for whatever an operator's SQL may have left parked with nothing in front of it; now and then. Hops from one
# held-back aggregate to the next along the index, and looks only at the first event of each.
UNPARK_STRAYS = Statement("""
WITH RECURSIVE hop AS (
    (SELECT o.aggregate_id, o.parked, 1 AS depth FROM duly.outbox o
     WHERE o.parked OR o.attempts > 0 OR o.retry_at IS NOT NULL ORDER BY o.aggregate_id, o.seq LIMIT 1)
    UNION ALL
    SELECT n.aggregate_id, n.parked, hop.depth + 1
    FROM hop CROSS JOIN LATERAL (
        SELECT o.aggregate_id, o.parked FROM duly.outbox o
        WHERE (o.parked OR o.attempts > 0 OR o.retry_at IS NOT NULL) AND o.aggregate_id > hop.aggregate_id
        ORDER BY o.aggregate_id, o.seq LIMIT 1) AS n
    WHERE hop.depth < 10000
)
UPDATE duly.outbox SET parked = false
WHERE seq = ANY(ARRAY(
    SELECT freed.seq FROM hop
    CROSS JOIN LATERAL (SELECT o.seq FROM duly.outbox o WHERE o.aggregate_id = hop.aggregate_id AND o.parked
                        ORDER BY o.seq LIMIT 1000) AS freed
    WHERE hop.parked LIMIT 1000))
""")

# Jobs that wait behind nothing: a transaction that was letting the next one run was rolled back at the wrong moment.
# Hops from key to key along the index, too.
RELEASE_STRAYS = Statement("""
WITH RECURSIVE hop AS (
    (SELECT j.name, j.order_key, j.id, j.waits, 1 AS depth FROM duly.jobs j
     WHERE j.order_key IS NOT NULL ORDER BY j.name, j.order_key, j.id LIMIT 1)
    UNION ALL
    SELECT n.name, n.order_key, n.id, n.waits, hop.depth + 1
    FROM hop CROSS JOIN LATERAL (
        SELECT j.name, j.order_key, j.id, j.waits FROM duly.jobs j
        WHERE j.order_key IS NOT NULL AND (j.name, j.order_key) > (hop.name, hop.order_key)
        ORDER BY j.name, j.order_key, j.id LIMIT 1) AS n
    WHERE hop.depth < 10000
)
UPDATE duly.jobs SET run_at = duly.now(), waits = 'due'
WHERE id = ANY(ARRAY(
    SELECT hop.id FROM hop
    WHERE hop.waits = 'behind'
      AND (SELECT true FROM duly.dead_letters d
           WHERE d.name = hop.name AND d.order_key = hop.order_key LIMIT 1) IS NULL
    LIMIT 1000))
  AND waits = 'behind'
""")
