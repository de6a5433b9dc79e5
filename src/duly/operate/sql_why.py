"""The statements behind ``duly why``: each finds a few rows by an index, or stops at a limit."""

from __future__ import annotations

from duly.db import Statement

# -------------------------------------------------------------------------------------------------------------- jobs

FIND_ATTEMPTS = Statement("""
SELECT execution_id, name, entity_id, source, started_at, completed_at, outcome, message, retry_count, next_run_at,
       worker, event_id, correlation_id, causation_id
FROM duly.executions WHERE job_id = CAST(:job_id AS bigint)
ORDER BY completed_at DESC, execution_id DESC LIMIT CAST(:limit AS int)
""")
FIND_ORDER_HEAD = Statement("""
SELECT id FROM duly.jobs
WHERE name = CAST(:name AS text) AND order_key = CAST(:order_key AS text) AND id < CAST(:id AS bigint)
ORDER BY id LIMIT 1
""")
FIND_ORDER_DEAD_LETTER = Statement("""
SELECT min(id) FROM duly.dead_letters WHERE name = CAST(:name AS text) AND order_key = CAST(:order_key AS text)
""")
COUNT_ORDER_BEFORE = Statement("""
SELECT count(*) FROM (
    SELECT 1 FROM duly.jobs
    WHERE name = CAST(:name AS text) AND order_key = CAST(:order_key AS text) AND id < CAST(:id AS bigint)
    LIMIT CAST(:cap AS int)) AS counted
""")
COUNT_ORDER_WAITING = Statement("""
SELECT count(*) FROM (
    SELECT 1 FROM duly.jobs WHERE name = CAST(:name AS text) AND order_key = CAST(:order_key AS text)
    LIMIT CAST(:cap AS int)) AS counted
""")
COUNT_JOBS_AHEAD = Statement("""
SELECT count(*) FROM (
    SELECT 1 FROM generate_series(1, CAST(:priority AS int)) AS p(priority)
    CROSS JOIN LATERAL (
        SELECT 1 FROM duly.jobs j
        WHERE j.name = CAST(:name AS text) AND j.priority = p.priority AND j.run_at <= duly.now()
          AND j.lease_token IS NULL
          AND (p.priority < CAST(:priority AS int)
               OR (j.run_at, j.id) < (CAST(:run_at AS timestamptz), CAST(:id AS bigint)))
        ORDER BY j.run_at, j.id LIMIT CAST(:cap AS int)) AS ahead
    LIMIT CAST(:cap AS int)) AS counted
""")
FIND_SLOTS = Statement("""
SELECT id FROM duly.jobs WHERE name = CAST(:name AS text) AND slot IS NOT NULL ORDER BY slot LIMIT CAST(:limit AS int)
""")
FIND_LAST_JOB_ID = Statement("""
SELECT coalesce(pg_sequence_last_value(CAST(pg_get_serial_sequence('duly.jobs', 'id') AS regclass)), 0)
""")
# The id of a run says when it began, so only a few partitions are looked through; its column has no index.
FIND_EXECUTION = Statement("""
SELECT job_id, name, started_at FROM duly.executions
WHERE execution_id = CAST(:execution_id AS uuid)
  AND completed_at >= coalesce(CAST(:since AS timestamptz), '-infinity')
  AND completed_at < coalesce(CAST(:until AS timestamptz), 'infinity') LIMIT 1
""")
# By its cause no job is found through an index: of those that wait or are dead, the newest ``scan`` are looked through.
FIND_CAUSED_JOBS = Statement("""
SELECT id, name, status FROM (
    (SELECT id, name, CASE WHEN lease_token IS NULL THEN 'waiting' ELSE 'running' END AS status
     FROM (SELECT id, name, lease_token, causation_id, event_id FROM duly.jobs ORDER BY id DESC
           LIMIT CAST(:scan AS int)) AS newest
     WHERE causation_id = ANY(CAST(:causes AS uuid[])) AND event_id IS DISTINCT FROM causation_id
     LIMIT CAST(:limit AS int))
    UNION ALL
    (SELECT id, name, 'dead letter'
     FROM (SELECT id, name, causation_id, event_id FROM duly.dead_letters ORDER BY id DESC
           LIMIT CAST(:scan AS int)) AS newest
     WHERE causation_id = ANY(CAST(:causes AS uuid[])) AND event_id IS DISTINCT FROM causation_id
     LIMIT CAST(:limit AS int))
    UNION ALL
    (SELECT DISTINCT ON (job_id) job_id, name, outcome FROM duly.executions
     WHERE entity_id = CAST(:entity_id AS text) AND causation_id = ANY(CAST(:causes AS uuid[]))
       AND event_id IS DISTINCT FROM causation_id AND outcome IN ('done', 'duplicate', 'cancelled')
     ORDER BY job_id LIMIT CAST(:limit AS int))
) AS caused ORDER BY id LIMIT CAST(:limit AS int)
""")
# An event's id begins with its time: what a run emitted lies between the run's start and end.
FIND_CAUSED_EVENTS = Statement("""
SELECT id, type, status FROM (
    (SELECT id, type, 'PUBLISHED' AS status
     FROM (SELECT id, type, headers FROM duly.events
           WHERE id >= duly.uuid7_floor(CAST(:since AS timestamptz) - interval '1 second')
             AND id < duly.uuid7_floor(CAST(:until AS timestamptz) + interval '1 second')
           ORDER BY id LIMIT CAST(:scan AS int)) AS emitted
     WHERE headers->>'causation_id' = ANY(CAST(:causes AS text[])) LIMIT CAST(:limit AS int))
    UNION ALL
    (SELECT id, type, CASE WHEN failed_at IS NULL THEN 'PENDING' ELSE 'FAILED' END
     FROM (SELECT id, type, failed_at, headers FROM duly.outbox ORDER BY seq DESC LIMIT CAST(:scan AS int)) AS newest
     WHERE headers->>'causation_id' = ANY(CAST(:causes AS text[])) LIMIT CAST(:limit AS int))
) AS caused ORDER BY id LIMIT CAST(:limit AS int)
""")

# ------------------------------------------------------------------------------------------------------------ events

_EVENT_ORIGIN = "headers->>'correlation_id' AS correlation_id, headers->>'causation_id' AS causation_id"
FIND_PUBLISHED_EVENT = Statement(
    """
SELECT id, seq, type, topic, aggregate_id, 'PUBLISHED' AS status, attempts, CAST(NULL AS timestamptz) AS retry_at,
       false AS parked, CAST(NULL AS text) AS last_error, created_at, published_at,
       CAST(NULL AS timestamptz) AS failed_at, """
    + _EVENT_ORIGIN
    + " FROM duly.events WHERE id = CAST(:id AS uuid)"
)
FIND_WAITING_EVENT = Statement(
    """
SELECT id, seq, type, topic, aggregate_id, CASE WHEN failed_at IS NULL THEN 'PENDING' ELSE 'FAILED' END AS status,
       attempts, retry_at, parked, last_error, created_at, CAST(NULL AS timestamptz) AS published_at, failed_at, """
    + _EVENT_ORIGIN
    + " FROM duly.outbox WHERE id = CAST(:id AS uuid) LIMIT 1"
)
FIND_ARRIVALS = Statement("""
SELECT type, topic, aggregate_id, created_at, headers->>'correlation_id', headers->>'causation_id', via, position,
       received_at
FROM duly.received WHERE id = CAST(:id AS uuid) ORDER BY received_at, via LIMIT CAST(:limit AS int)
""")
FIND_HOLDER = Statement("""
SELECT id, failed_at, retry_at, last_error FROM duly.outbox
WHERE aggregate_id = CAST(:aggregate_id AS text) AND seq < CAST(:seq AS bigint)
  AND (parked OR attempts > 0 OR retry_at IS NOT NULL)
ORDER BY seq LIMIT 1
""")
COUNT_HELD = Statement("""
SELECT count(*) FROM (
    SELECT 1 FROM duly.outbox
    WHERE aggregate_id = CAST(:aggregate_id AS text) AND parked AND seq > CAST(:seq AS bigint)
    LIMIT CAST(:cap AS int)) AS counted
""")
COUNT_RELAYS = Statement("""
SELECT count(*)::int FROM duly.processes
WHERE kind = 'relay' AND seen_at > clock_timestamp() - make_interval(secs => CAST(:alive_seconds AS float8))
""")
# A consumer's job carries the aggregate as its entity, which is indexed; the event's own column is not.
FIND_DELIVERIES = Statement("""
SELECT name, id, state, message FROM (
    (SELECT name, id, CASE WHEN lease_token IS NULL THEN 'waits' ELSE 'runs' END AS state, last_error AS message,
            1 AS rank
     FROM duly.jobs WHERE entity_id = CAST(:aggregate_id AS text) AND event_id = CAST(:id AS uuid)
     LIMIT CAST(:limit AS int))
    UNION ALL
    (SELECT name, id, 'dead', error, 2 FROM duly.dead_letters
     WHERE entity_id = CAST(:aggregate_id AS text) AND event_id = CAST(:id AS uuid) LIMIT CAST(:limit AS int))
    UNION ALL
    (SELECT name, job_id, outcome, message, 3 FROM duly.executions
     WHERE entity_id = CAST(:aggregate_id AS text) AND event_id = CAST(:id AS uuid)
       AND outcome IN ('done', 'duplicate', 'cancelled') LIMIT CAST(:limit AS int))
    UNION ALL
    (SELECT 'consumer:' || c.name, NULL, 'processed', NULL, 4 FROM duly.consumers c
     JOIN duly.processed_events p ON p.consumer = c.name AND p.event_id = CAST(:id AS uuid) LIMIT CAST(:limit AS int))
) AS deliveries ORDER BY name, rank, id LIMIT CAST(:limit AS int)
""")

# ---------------------------------------------------------------------------------------------- names and schedules

FIND_SCHEDULE = Statement("""
SELECT name, cron, timezone, enabled, misfire, last_run_at, next_run_at, missed_count, missed_oldest, missed_newest,
       last_error
FROM duly.schedules WHERE name = CAST(:name AS text)
""")
FIND_DISABLING = Statement("""
SELECT at, actor, reason FROM duly.audit
WHERE subject = 'schedule:' || CAST(:name AS text) AND action = 'schedule.disabled' ORDER BY id DESC LIMIT 1
""")
COUNT_JOBS_OF_NAME = Statement("""
SELECT (SELECT count(*) FROM (SELECT 1 FROM duly.jobs WHERE name = CAST(:name AS text)
                              LIMIT CAST(:cap AS int)) AS queued),
       (SELECT count(*) FROM (SELECT 1 FROM duly.dead_letters WHERE name = CAST(:name AS text)
                              LIMIT CAST(:cap AS int)) AS dead)
""")
FIND_NEXT_JOB = Statement("""
SELECT first.id FROM generate_series(1, 4) AS p(priority)
CROSS JOIN LATERAL (SELECT j.id, j.run_at FROM duly.jobs j
                    WHERE j.name = CAST(:name AS text) AND j.priority = p.priority
                    ORDER BY j.run_at, j.id LIMIT 1) AS first
ORDER BY first.run_at, first.id LIMIT 1
""")
FIND_OLDEST_DAY = Statement("""
SELECT min(to_date(right(c.relname, 8), 'YYYYMMDD')) FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
WHERE i.inhparent = CAST('duly.executions' AS regclass) AND c.relname ~ '_p[0-9]{8}$'
""")
