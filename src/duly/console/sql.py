"""What the pages read beyond what ``duly.operate`` lists; every scan follows an index and stops at a limit."""

from __future__ import annotations

from duly.db import Statement

# -------------------------------------------------------------------------------------------------------------- jobs

# By due time, over names and priorities: each is a walk along jobs_ready from where the page before ended. What runs
# was claimed from the front of what is due, so a state is looked for among the first ``scan`` of each.
LIST_QUEUE = Statement("""
SELECT id, name, entity_id,
       CASE WHEN lease_token IS NULL THEN 'Pending' WHEN lease_expires_at > clock_timestamp() THEN 'Running'
            ELSE 'Failed' END AS status,
       waits, nullif(run_at, 'infinity') AS run_at, due_at, created_at, priority, retry_count, max_retries, snoozes,
       source, last_error, event_id, order_key, correlation_id, causation_id, lease_expires_at, leased_by,
       claimed_at, progress
FROM (
    SELECT j.* FROM unnest(CAST(:names AS text[])) AS n(name)
    CROSS JOIN generate_series(1, 4) AS p(priority)
    CROSS JOIN LATERAL (
        SELECT * FROM duly.jobs
        WHERE name = n.name AND priority = p.priority
          AND run_at >= coalesce(CAST(:since AS timestamptz), '-infinity')
          AND run_at <= coalesce(CAST(:until AS timestamptz), 'infinity')
          AND (run_at, id) > (coalesce(CAST(CAST(:after_at AS text) AS timestamptz), '-infinity'),
                              coalesce(CAST(:after_id AS bigint), 0))
        ORDER BY run_at, id LIMIT CAST(:scan AS int)) AS j
) AS found
WHERE CASE CAST(:status AS text) WHEN 'Pending' THEN lease_token IS NULL
                                 WHEN 'Running' THEN lease_expires_at > clock_timestamp()
                                 WHEN 'Failed' THEN lease_expires_at <= clock_timestamp()
                                 ELSE true END
ORDER BY found.run_at, found.id LIMIT CAST(:limit AS int)
""")
FIND_PAYLOAD = Statement("""
SELECT jsonb_pretty(payload) FROM duly.jobs WHERE id = CAST(:id AS bigint)
UNION ALL SELECT jsonb_pretty(payload) FROM duly.dead_letters WHERE id = CAST(:id AS bigint) LIMIT 1
""")
# For each name its newest run: ordered, so that the newest partition that has one ends the search.
LIST_LAST_RUNS = Statement("""
SELECT n.name, last.execution_id, last.job_id, last.completed_at, last.outcome, last.seconds
FROM unnest(CAST(:names AS text[])) AS n(name)
CROSS JOIN LATERAL (
    SELECT e.execution_id, e.job_id, e.completed_at, e.outcome,
           extract(epoch FROM e.completed_at - e.started_at)::float8 AS seconds
    FROM duly.executions e WHERE e.name = n.name ORDER BY e.completed_at DESC LIMIT 1) AS last
""")
LIST_KNOWN_NAMES = Statement("""
SELECT DISTINCT unnest(names) AS name FROM duly.processes
WHERE kind = 'worker' AND seen_at > clock_timestamp() - make_interval(secs => CAST(:alive_seconds AS float8)) ORDER BY 1
LIMIT CAST(:limit AS int)
""")

# ----------------------------------------------------------------------------------------------------------- history

_NAMES_OF_EXECUTIONS = """
WITH RECURSIVE found AS (
    (SELECT name, 1 AS place FROM duly.executions
     WHERE completed_at >= CAST(:day AS timestamptz) ORDER BY name LIMIT 1)
    UNION ALL
    SELECT (SELECT e.name FROM duly.executions e
            WHERE e.name > found.name AND e.completed_at >= CAST(:day AS timestamptz) ORDER BY e.name LIMIT 1),
           place + 1
    FROM found WHERE found.name IS NOT NULL AND place < CAST(:names_limit AS int)
)
"""
FIND_RUN_NAMES = Statement("""
WITH RECURSIVE found AS (
    (SELECT name, 1 AS place FROM duly.executions ORDER BY name LIMIT 1)
    UNION ALL
    SELECT (SELECT e.name FROM duly.executions e WHERE e.name > found.name ORDER BY e.name LIMIT 1), place + 1
    FROM found WHERE found.name IS NOT NULL AND place < CAST(:names_limit AS int)
)
SELECT name FROM found WHERE name IS NOT NULL
""")
_RUN = """
    execution_id, job_id, name, entity_id, source, started_at, completed_at, succeeded, outcome, message, retry_count,
    next_run_at, worker, event_id, correlation_id, causation_id
"""
_RUN_BEFORE = """
    completed_at >= coalesce(CAST(:since AS timestamptz), '-infinity')
    AND completed_at <= coalesce(CAST(:before_at AS timestamptz), CAST(:until AS timestamptz), 'infinity')
    AND (completed_at, execution_id) < (coalesce(CAST(:before_at AS timestamptz), 'infinity'),
        coalesce(CAST(:before_id AS uuid), CAST('ffffffff-ffff-ffff-ffff-ffffffffffff' AS uuid)))
"""
_WITH_OUTCOME = """
WHERE CAST(:outcome AS text) IS NULL OR outcome = CAST(:outcome AS text)
ORDER BY completed_at DESC, execution_id DESC LIMIT CAST(:limit AS int)
"""
# No index is ordered by time alone: the newest of each name, merged, are the newest of all. An outcome is looked for
# among the newest ``scan`` of each.
LIST_HISTORY = Statement(
    "SELECT"
    + _RUN
    + """
FROM unnest(CAST(:names AS text[])) AS n(wanted) CROSS JOIN LATERAL (
    SELECT * FROM duly.executions WHERE name = n.wanted AND"""
    + _RUN_BEFORE
    + """ ORDER BY completed_at DESC, execution_id DESC LIMIT CAST(:scan AS int)) AS newest"""
    + _WITH_OUTCOME
)
LIST_HISTORY_OF_ENTITY = Statement(
    "SELECT"
    + _RUN
    + """
FROM (SELECT * FROM duly.executions
      WHERE entity_id = CAST(:entity_id AS text) AND (CAST(:name AS text) IS NULL OR name = CAST(:name AS text)) AND"""
    + _RUN_BEFORE
    + """ ORDER BY completed_at DESC, execution_id DESC LIMIT CAST(:scan AS int)) AS newest"""
    + _WITH_OUTCOME
)
FIND_RUN = Statement(
    "SELECT"
    + _RUN
    + """
FROM duly.executions WHERE job_id = CAST(:job_id AS bigint) AND execution_id = CAST(:execution_id AS uuid) LIMIT 1"""
)
# The names of the last day's runs, then of each the minutes that are wanted: executions_name serves both, so that the
# worker pays for no index that only the charts need (docs/decisions/0019).
COUNT_MINUTES = Statement(
    _NAMES_OF_EXECUTIONS
    + """
SELECT date_trunc('minute', e.completed_at) AS minute, found.name, count(*) AS total,
       count(*) FILTER (WHERE e.outcome IN ('done', 'duplicate')) AS done,
       count(*) FILTER (WHERE e.outcome IN ('retried', 'lost')) AS failed,
       count(*) FILTER (WHERE e.outcome = 'buried') AS buried,
       percentile_cont(ARRAY[0.5, 0.95]) WITHIN GROUP (
           ORDER BY extract(epoch FROM e.completed_at - e.started_at)::float8) AS seconds
FROM found CROSS JOIN LATERAL (
    SELECT completed_at, started_at, outcome FROM duly.executions
    WHERE name = found.name AND completed_at >= CAST(:since AS timestamptz)
      AND completed_at < CAST(:until AS timestamptz)) AS e
WHERE found.name IS NOT NULL
GROUP BY GROUPING SETS ((date_trunc('minute', e.completed_at)), (date_trunc('minute', e.completed_at), found.name))
"""
)

# ------------------------------------------------------------------------------------------------------ dead letters

_DEAD_LETTER = """
SELECT id, name, entity_id, priority, due_at, created_at, retry_count, max_retries, source, event_id, order_key,
       correlation_id, causation_id, reason, error, error_kind, buried_at
FROM (SELECT * FROM duly.dead_letters
      WHERE buried_at <= coalesce(CAST(:before_at AS timestamptz), 'infinity')
        AND (buried_at, id) < (coalesce(CAST(:before_at AS timestamptz), 'infinity'),
                               coalesce(CAST(:before_id AS bigint), 9223372036854775807))
"""
_NEWEST = """ ORDER BY buried_at DESC, id DESC LIMIT CAST(:scan AS int)) AS newest
WHERE CAST(:error_kind AS text) IS NULL OR error_kind = CAST(:error_kind AS text)
ORDER BY buried_at DESC, id DESC LIMIT CAST(:limit AS int)
"""
LIST_DEAD_LETTERS = Statement(_DEAD_LETTER + _NEWEST)
LIST_DEAD_LETTERS_OF_NAME = Statement(_DEAD_LETTER + " AND name = CAST(:name AS text)" + _NEWEST)
LIST_DEAD_LETTERS_OF_ENTITY = Statement(
    _DEAD_LETTER
    + " AND entity_id = CAST(:entity_id AS text) AND (CAST(:name AS text) IS NULL OR name = CAST(:name AS text))"
    + _NEWEST
)

# ------------------------------------------------------------------------------------------------------------ events

_WAITING = """
SELECT id, seq, type, topic, aggregate_id, CASE WHEN failed_at IS NULL THEN 'PENDING' ELSE 'FAILED' END AS status,
       attempts, retry_at, parked, last_error, created_at, CAST(NULL AS timestamptz) AS published_at
FROM duly.outbox WHERE seq < coalesce(CAST(:before AS bigint), 9223372036854775807)
"""
LIST_PENDING = Statement(_WAITING + " AND failed_at IS NULL ORDER BY seq DESC LIMIT CAST(:limit AS int)")
LIST_FAILED = Statement(
    _WAITING + " AND failed_at IS NOT NULL AND attempts > 0 ORDER BY seq DESC LIMIT CAST(:limit AS int)"
)
LIST_PUBLISHED = Statement("""
SELECT id, seq, type, topic, aggregate_id, 'PUBLISHED' AS status, attempts, CAST(NULL AS timestamptz) AS retry_at,
       false AS parked, CAST(NULL AS text) AS last_error, created_at, published_at
FROM duly.events
WHERE id < coalesce(CAST(:before AS uuid), CAST('ffffffff-ffff-ffff-ffff-ffffffffffff' AS uuid))
ORDER BY id DESC LIMIT CAST(:limit AS int)
""")
# Events are published in the order of their ids, but for those that failed: the newest ids are the newest published.
COUNT_JUST_PUBLISHED = Statement("""
SELECT count(*) AS number, date_part('epoch', duly.now() - min(published_at)) AS seconds
FROM (SELECT published_at FROM duly.events ORDER BY id DESC LIMIT CAST(:scan AS int)) AS newest
WHERE published_at >= duly.now() - make_interval(secs => CAST(:seconds AS float8))
""")
FIND_EVENT = Statement("""
SELECT id, seq, type, topic, aggregate_id, status, attempts, retry_at, parked, last_error, created_at, published_at,
       jsonb_pretty(headers) AS headers, jsonb_pretty(payload) AS payload
FROM duly.event_log WHERE id = CAST(:id AS uuid) LIMIT 1
""")
FIND_RECEIVED = Statement("""
SELECT id, position AS seq, type, topic, aggregate_id, 'RECEIVED' AS status, 0 AS attempts,
       CAST(NULL AS timestamptz) AS retry_at, false AS parked, CAST(NULL AS text) AS last_error, created_at,
       received_at AS published_at, jsonb_pretty(headers) AS headers, jsonb_pretty(payload) AS payload
FROM duly.received WHERE id = CAST(:id AS uuid) ORDER BY received_at LIMIT 1
""")
LIST_CONSUMERS = Statement("""
SELECT name, patterns, ordered, enabled, via, registered_at FROM duly.consumers ORDER BY name LIMIT CAST(:limit AS int)
""")

# ------------------------------------------------------------------------------------------------- schedules, processes

# Of the names that have a schedule elsewhere than in UTC.
LIST_ZONES = Statement("""
SELECT name, timezone FROM duly.schedules WHERE timezone <> 'UTC' ORDER BY name LIMIT CAST(:limit AS int)
""")

LIST_PROCESSES = Statement("""
SELECT id, kind, names, version, started_at, extract(epoch FROM clock_timestamp() - seen_at)::float8 AS silent_seconds
FROM duly.processes ORDER BY kind, id LIMIT CAST(:limit AS int)
""")

# ------------------------------------------------------------------------------------------------------------- audit

# Who and what are in no index: they are looked for among the newest ``scan``, and further on the next page.
_AUDIT = " FROM duly.audit WHERE id < coalesce(CAST(:before AS bigint), 9223372036854775807)"
_OF_SUBJECT = " AND subject = CAST(:subject AS text)"
_SCANNED = """ ORDER BY id DESC LIMIT CAST(:scan AS int)) AS newest
WHERE (CAST(:actor AS text) IS NULL OR position(lower(CAST(:actor AS text)) IN lower(actor)) > 0)
  AND (CAST(:action AS text) IS NULL OR position(lower(CAST(:action AS text)) IN lower(action)) > 0)
ORDER BY id DESC LIMIT CAST(:limit AS int)
"""
_ENTRY = """
SELECT id, at, actor, action, subject, reason, CAST(before AS text) AS before, CAST(after AS text) AS after
FROM (SELECT *"""
_REACHED = " ORDER BY id DESC OFFSET CAST(:scan AS int) - 1 LIMIT 1"
SEARCH_AUDIT = Statement(_ENTRY + _AUDIT + _SCANNED)
SEARCH_AUDIT_OF_SUBJECT = Statement(_ENTRY + _AUDIT + _OF_SUBJECT + _SCANNED)
FIND_AUDIT_REACHED = Statement("SELECT id" + _AUDIT + _REACHED)
FIND_AUDIT_OF_SUBJECT_REACHED = Statement("SELECT id" + _AUDIT + _OF_SUBJECT + _REACHED)
