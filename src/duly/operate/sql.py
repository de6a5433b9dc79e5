"""The statements of an operator's actions and lists: values are bound, and every scan has an index or a limit."""

from __future__ import annotations

from duly.db import Statement

# ------------------------------------------------------------------------------------------------------ dead letters

_DEAD_LETTER = """
SELECT id, name, entity_id, priority, due_at, created_at, retry_count, max_retries, source, event_id, order_key,
       correlation_id, causation_id, reason, error, error_kind, buried_at
FROM duly.dead_letters
WHERE buried_at <= coalesce(CAST(:before_at AS timestamptz), 'infinity')
  AND (buried_at, id) < (coalesce(CAST(:before_at AS timestamptz), 'infinity'),
                         coalesce(CAST(:before_id AS bigint), 9223372036854775807))
"""
_NEWEST_DEAD_LETTER_FIRST = " ORDER BY buried_at DESC, id DESC LIMIT CAST(:limit AS int)"

FIND_DEAD_LETTER = Statement(_DEAD_LETTER + " AND id = CAST(:id AS bigint)")
LIST_DEAD_LETTERS = Statement(_DEAD_LETTER + _NEWEST_DEAD_LETTER_FIRST)
LIST_DEAD_LETTERS_OF_NAME = Statement(_DEAD_LETTER + " AND name = CAST(:name AS text)" + _NEWEST_DEAD_LETTER_FIRST)
LIST_DEAD_LETTERS_OF_ENTITY = Statement(
    _DEAD_LETTER
    + " AND entity_id = CAST(:entity_id AS text) AND (CAST(:name AS text) IS NULL OR name = CAST(:name AS text))"
    + _NEWEST_DEAD_LETTER_FIRST
)

# One index probe finds the next name; GROUP BY over the whole table would read every row.
_NAMES_OF_DEAD_LETTERS = """
WITH RECURSIVE found AS (
    (SELECT name, 1 AS place FROM duly.dead_letters ORDER BY name LIMIT 1)
    UNION ALL
    SELECT (SELECT d.name FROM duly.dead_letters d WHERE d.name > found.name ORDER BY d.name LIMIT 1), place + 1
    FROM found WHERE found.name IS NOT NULL AND place < CAST(:names_limit AS int)
)
"""
GROUP_DEAD_LETTERS = Statement(
    _NAMES_OF_DEAD_LETTERS
    + """
SELECT found.name, kinds.error_kind, kinds.counted, kinds.newest_at, kinds.newest_error, kinds.looked_at
FROM found CROSS JOIN LATERAL (
    SELECT error_kind, count(*) AS counted, max(buried_at) AS newest_at,
           (array_agg(error ORDER BY buried_at DESC))[1] AS newest_error, sum(count(*)) OVER () AS looked_at
    FROM (SELECT d.error_kind, d.buried_at, d.error FROM duly.dead_letters d
          WHERE d.name = found.name ORDER BY d.buried_at DESC LIMIT CAST(:cap AS int)) AS newest
    GROUP BY error_kind
) AS kinds
WHERE found.name IS NOT NULL ORDER BY kinds.newest_at DESC, found.name, kinds.error_kind
"""
)
FIND_DEAD_LETTER_NAMES = Statement(_NAMES_OF_DEAD_LETTERS + "SELECT name FROM found WHERE name IS NOT NULL")
COUNT_DEAD_LETTERS_BY_NAME = Statement("""
SELECT found.name, dead.counted FROM unnest(CAST(:names AS text[])) AS found(name)
CROSS JOIN LATERAL (
    SELECT count(*) AS counted
    FROM (SELECT 1 FROM duly.dead_letters d WHERE d.name = found.name
          ORDER BY d.buried_at LIMIT CAST(:cap AS int)) AS taken) AS dead
ORDER BY found.name
""")
COUNT_DEAD_LETTERS = Statement("""
SELECT count(*) FROM (
    SELECT 1 FROM duly.dead_letters
    WHERE (CAST(:name AS text) IS NULL OR name = CAST(:name AS text))
      AND (CAST(:error_kind AS text) IS NULL OR error_kind = CAST(:error_kind AS text))
    LIMIT CAST(:cap AS int)) AS counted
""")

LOCK_DEAD_LETTER = Statement("SELECT id, name FROM duly.dead_letters WHERE id = CAST(:id AS bigint) FOR UPDATE")
# Whoever else works on one of them right now answers for it: it is passed over.
_CHOOSE_DEAD_LETTERS = """
SELECT id, name FROM duly.dead_letters
WHERE (CAST(:error_kind AS text) IS NULL OR error_kind = CAST(:error_kind AS text))
"""
_OLDEST_DEAD_LETTER_FIRST = " ORDER BY buried_at, id LIMIT CAST(:limit AS int) FOR UPDATE SKIP LOCKED"
CHOOSE_DEAD_LETTERS = Statement(_CHOOSE_DEAD_LETTERS + _OLDEST_DEAD_LETTER_FIRST)
CHOOSE_DEAD_LETTERS_OF_NAME = Statement(
    _CHOOSE_DEAD_LETTERS + " AND name = CAST(:name AS text)" + _OLDEST_DEAD_LETTER_FIRST
)

# Whoever adds to an order, or takes from it, does so one after the other; before any row of it is looked at.
LOCK_ORDER_OF_DEAD_LETTERS = Statement("""
SELECT duly.lock_order(array_agg(name), array_agg(order_key)) IS NULL FROM duly.dead_letters
WHERE id = ANY(CAST(:ids AS bigint[])) AND order_key IS NOT NULL
""")
LOCK_ORDER_OF_JOB = Statement("""
SELECT duly.lock_order(ARRAY[name], ARRAY[order_key]) IS NULL FROM duly.jobs
WHERE id = CAST(:id AS bigint) AND order_key IS NOT NULL
""")
REQUEUE_DEAD_LETTERS = Statement("""
INSERT INTO duly.jobs (id, name, entity_id, payload, priority, run_at, due_at, created_at, original_delay, max_retries,
    backoff_seconds, source, waits, last_error, event_id, order_key, correlation_id, causation_id, traceparent)
SELECT d.id, d.name, d.entity_id, d.payload, d.priority, CASE WHEN held.back THEN 'infinity' ELSE duly.now() END,
       d.due_at, d.created_at, d.original_delay, d.max_retries, d.backoff_seconds, d.source,
       CASE WHEN held.back THEN 'behind' ELSE 'requeued' END, d.error, d.event_id, d.order_key, d.correlation_id,
       d.causation_id, d.traceparent
FROM duly.dead_letters d
CROSS JOIN LATERAL (SELECT d.order_key IS NOT NULL AND (
    EXISTS (SELECT 1 FROM duly.jobs e WHERE e.name = d.name AND e.order_key = d.order_key AND e.id < d.id)
    OR EXISTS (SELECT 1 FROM duly.dead_letters e
               WHERE e.name = d.name AND e.order_key = d.order_key AND e.id < d.id)) AS back) AS held
WHERE d.id = ANY(CAST(:ids AS bigint[]))
""")
REMOVE_RETRIED_DEAD_LETTERS = Statement("""
WITH gone AS (DELETE FROM duly.dead_letters WHERE id = ANY(CAST(:ids AS bigint[])) RETURNING *)
INSERT INTO duly.audit (at, actor, action, subject, reason, before, after)
SELECT duly.now(), CAST(:actor AS text), 'dead_letter.retried', 'job:' || gone.id, CAST(:reason AS text),
       to_jsonb(gone) - 'payload',
       jsonb_build_object('run_at', j.run_at, 'waits', j.waits, 'retry_count', j.retry_count)
FROM gone JOIN duly.jobs j ON j.id = gone.id ORDER BY gone.id
""")
DISCARD_DEAD_LETTERS = Statement("""
WITH gone AS (DELETE FROM duly.dead_letters WHERE id = ANY(CAST(:ids AS bigint[])) RETURNING *)
INSERT INTO duly.audit (at, actor, action, subject, reason, before)
SELECT duly.now(), CAST(:actor AS text), 'dead_letter.discarded', 'job:' || gone.id, CAST(:reason AS text),
       to_jsonb(gone)
FROM gone ORDER BY gone.id
""")
# Locked first: whoever buries another one at this moment either sees the alert resolved, or is seen by the next look.
LOCK_DEAD_LETTER_ALERTS = Statement("""
SELECT id FROM duly.alerts
WHERE kind = 'dead_letter' AND resolved_at IS NULL
  AND (CAST(:names AS text[]) IS NULL OR subject = ANY(CAST(:names AS text[]))) ORDER BY id FOR UPDATE
""")
RESOLVE_DEAD_LETTER_ALERTS = Statement("""
UPDATE duly.alerts SET resolved_at = duly.now()
WHERE kind = 'dead_letter' AND resolved_at IS NULL
  AND (CAST(:names AS text[]) IS NULL OR subject = ANY(CAST(:names AS text[])))
  AND NOT EXISTS (SELECT 1 FROM duly.dead_letters d WHERE d.name = duly.alerts.subject)
""")

# -------------------------------------------------------------------------------------------------------------- jobs

_JOB = """
SELECT id, name, entity_id,
       CASE WHEN lease_token IS NULL THEN 'Pending'
            WHEN lease_expires_at > clock_timestamp() THEN 'Running'
            ELSE 'Failed' END AS status,
       waits, nullif(run_at, 'infinity') AS run_at, due_at, created_at, priority, retry_count, max_retries, snoozes,
       source, last_error, event_id, order_key, correlation_id, causation_id, lease_expires_at, leased_by,
       claimed_at, progress
FROM duly.jobs
WHERE id > coalesce(CAST(:after AS bigint), 0)
  AND CASE CAST(:status AS text) WHEN 'Pending' THEN lease_token IS NULL
                                 WHEN 'Running' THEN lease_expires_at > clock_timestamp()
                                 WHEN 'Failed' THEN lease_expires_at <= clock_timestamp()
                                 ELSE true END
"""
FIND_JOB = Statement(_JOB + " AND id = CAST(:id AS bigint)")
_OLDEST_JOB_FIRST = " ORDER BY id LIMIT CAST(:limit AS int)"
LIST_JOBS = Statement(_JOB + _OLDEST_JOB_FIRST)
LIST_JOBS_OF_NAME = Statement(_JOB + " AND name = CAST(:name AS text)" + _OLDEST_JOB_FIRST)
LIST_JOBS_OF_ENTITY = Statement(
    _JOB
    + " AND entity_id = CAST(:entity_id AS text) AND (CAST(:name AS text) IS NULL OR name = CAST(:name AS text))"
    + _OLDEST_JOB_FIRST
)

CANCEL_JOB = Statement("""
WITH gone AS (DELETE FROM duly.jobs WHERE id = CAST(:id AS bigint) RETURNING *)
INSERT INTO duly.audit (at, actor, action, subject, reason, before)
SELECT duly.now(), CAST(:actor AS text), 'job.cancelled', 'job:' || gone.id, CAST(:reason AS text), to_jsonb(gone)
FROM gone RETURNING id
""")
LOCK_JOB = Statement("""
SELECT lease_token IS NOT NULL AS leased, waits = 'behind' AND (
    EXISTS (SELECT 1 FROM duly.jobs e WHERE e.name = j.name AND e.order_key = j.order_key AND e.id < j.id)
    OR EXISTS (SELECT 1 FROM duly.dead_letters e WHERE e.name = j.name AND e.order_key = j.order_key)) AS behind
FROM duly.jobs j WHERE j.id = CAST(:id AS bigint) FOR UPDATE
""")
RUN_JOB_NOW = Statement("""
WITH before AS MATERIALIZED (
    SELECT id, run_at, waits FROM duly.jobs WHERE id = CAST(:id AS bigint)
), changed AS (
    UPDATE duly.jobs SET run_at = least(run_at, duly.now()), waits = 'requeued'
    WHERE id = CAST(:id AS bigint) AND lease_token IS NULL
    RETURNING id, run_at, waits
)
INSERT INTO duly.audit (at, actor, action, subject, reason, before, after)
SELECT duly.now(), CAST(:actor AS text), 'job.run_now', 'job:' || changed.id, CAST(:reason AS text),
       to_jsonb(before) - 'id', to_jsonb(changed) - 'id'
FROM changed JOIN before USING (id) RETURNING id
""")
IS_DEAD_LETTER = Statement("SELECT 1 FROM duly.dead_letters WHERE id = CAST(:id AS bigint)")

# -------------------------------------------------------------------------------------------------------- executions

_EXECUTION_COLUMNS = """
    execution_id, job_id, name, entity_id, source, started_at, completed_at, succeeded, outcome, message, retry_count,
    next_run_at, worker, event_id, correlation_id, causation_id
"""
_BEFORE_EXECUTION = """
    completed_at <= coalesce(CAST(:before_at AS timestamptz), 'infinity')
    AND (completed_at, execution_id) < (coalesce(CAST(:before_at AS timestamptz), 'infinity'),
        coalesce(CAST(:before_id AS uuid), CAST('ffffffff-ffff-ffff-ffff-ffffffffffff' AS uuid)))
"""
_NEWEST_EXECUTION_FIRST = " ORDER BY completed_at DESC, execution_id DESC LIMIT CAST(:limit AS int)"
_EXECUTIONS = "SELECT " + _EXECUTION_COLUMNS + " FROM duly.executions WHERE " + _BEFORE_EXECUTION
LIST_EXECUTIONS_OF_NAME = Statement(_EXECUTIONS + " AND name = CAST(:name AS text)" + _NEWEST_EXECUTION_FIRST)
LIST_EXECUTIONS_OF_ENTITY = Statement(
    _EXECUTIONS
    + " AND entity_id = CAST(:entity_id AS text) AND (CAST(:name AS text) IS NULL OR name = CAST(:name AS text))"
    + _NEWEST_EXECUTION_FIRST
)
LIST_EXECUTIONS_OF_JOB = Statement(_EXECUTIONS + " AND job_id = CAST(:job_id AS bigint)" + _NEWEST_EXECUTION_FIRST)
# No index is ordered by time alone: the newest of each name, merged, are the newest of all.
LIST_EXECUTIONS = Statement(
    """
WITH RECURSIVE found AS (
    (SELECT name, 1 AS place FROM duly.executions ORDER BY name LIMIT 1)
    UNION ALL
    SELECT (SELECT e.name FROM duly.executions e WHERE e.name > found.name ORDER BY e.name LIMIT 1), place + 1
    FROM found WHERE found.name IS NOT NULL AND place < CAST(:names_limit AS int)
)
SELECT newest.* FROM found CROSS JOIN LATERAL (
"""
    + _EXECUTIONS
    + " AND name = found.name "
    + _NEWEST_EXECUTION_FIRST
    + ") AS newest WHERE found.name IS NOT NULL"
    + _NEWEST_EXECUTION_FIRST
)

# ------------------------------------------------------------------------------------------------------------ events

_WAITING_COLUMNS = """
    id, seq, type, topic, aggregate_id, CASE WHEN failed_at IS NULL THEN 'PENDING' ELSE 'FAILED' END AS status,
    attempts, retry_at, parked, last_error, created_at, CAST(NULL AS timestamptz) AS published_at
"""
_PUBLISHED_COLUMNS = """
    id, seq, type, topic, aggregate_id, 'PUBLISHED' AS status, attempts, CAST(NULL AS timestamptz) AS retry_at,
    false AS parked, CAST(NULL AS text) AS last_error, created_at, published_at
"""
_OF_TOPIC = " AND (CAST(:topic AS text) IS NULL OR topic = CAST(:topic AS text))"
_NEWEST_EVENT_FIRST = " ORDER BY seq DESC LIMIT CAST(:limit AS int)"
# A topic has no index: it is looked for among the newest ``scan`` events.
LIST_PENDING_EVENTS = Statement(
    "SELECT * FROM (SELECT "
    + _WAITING_COLUMNS
    + " FROM duly.outbox WHERE failed_at IS NULL ORDER BY seq DESC LIMIT CAST(:scan AS int)) AS newest WHERE true"
    + _OF_TOPIC
    + _NEWEST_EVENT_FIRST
)
LIST_FAILED_EVENTS = Statement(  # attempts > 0 is implied, and lets PostgreSQL use outbox_blockers
    "SELECT "
    + _WAITING_COLUMNS
    + " FROM duly.outbox WHERE failed_at IS NOT NULL AND attempts > 0"
    + _OF_TOPIC
    + _NEWEST_EVENT_FIRST
)
LIST_PUBLISHED_EVENTS = Statement(
    "SELECT * FROM (SELECT "
    + _PUBLISHED_COLUMNS
    + " FROM duly.events ORDER BY id DESC LIMIT CAST(:scan AS int)) AS newest WHERE true"
    + _OF_TOPIC
    + " ORDER BY id DESC LIMIT CAST(:limit AS int)"
)
# A pending event that holds nothing back is found through its lane: a sixty-fourth of them.
LIST_EVENTS_OF_AGGREGATE = Statement(
    "SELECT * FROM ((SELECT "
    + _WAITING_COLUMNS
    + """
    FROM duly.outbox WHERE aggregate_id = CAST(:aggregate_id AS text)
      AND (parked OR attempts > 0 OR retry_at IS NOT NULL)
      AND CASE CAST(:status AS text) WHEN 'PENDING' THEN failed_at IS NULL WHEN 'FAILED' THEN failed_at IS NOT NULL
                                     WHEN 'PUBLISHED' THEN false ELSE true END"""
    + _OF_TOPIC
    + _NEWEST_EVENT_FIRST
    + ") UNION ALL (SELECT "
    + _WAITING_COLUMNS
    + """
    FROM duly.outbox WHERE lane = CAST(hashtextextended(CAST(:aggregate_id AS text), 0) & 63 AS smallint)
      AND aggregate_id = CAST(:aggregate_id AS text) AND NOT parked AND failed_at IS NULL AND attempts = 0
      AND retry_at IS NULL
      AND coalesce(CAST(:status AS text), 'PENDING') = 'PENDING'"""
    + _OF_TOPIC
    + _NEWEST_EVENT_FIRST
    + ") UNION ALL (SELECT "
    + _PUBLISHED_COLUMNS
    + """
    FROM duly.events WHERE aggregate_id = CAST(:aggregate_id AS text)
      AND coalesce(CAST(:status AS text), 'PUBLISHED') = 'PUBLISHED'"""
    + _OF_TOPIC
    + _NEWEST_EVENT_FIRST
    + ")) AS newest"
    + _NEWEST_EVENT_FIRST
)

FIND_EVENT_STATUS = Statement("SELECT status FROM duly.event_log WHERE id = CAST(:id AS uuid) LIMIT 1")
FIND_FAILED_EVENTS = Statement("""
SELECT seq, lane FROM duly.outbox
WHERE failed_at IS NOT NULL AND attempts > 0 AND (CAST(:id AS uuid) IS NULL OR id = CAST(:id AS uuid))
  AND (CAST(:topic AS text) IS NULL OR topic = CAST(:topic AS text))
ORDER BY seq LIMIT CAST(:limit AS int)
""")
# The relay that serves a lane parks events behind a failed one: it must not do so while that one goes away.
LOCK_LANES = Statement("SELECT lane FROM duly.lanes WHERE lane = ANY(CAST(:lanes AS int[])) ORDER BY lane FOR UPDATE")
_NOTE_EVENTS = """
), resolved AS (
    UPDATE duly.alerts SET resolved_at = duly.now()
    WHERE kind = 'event_failed' AND resolved_at IS NULL
      AND subject = ANY(ARRAY(SELECT CAST(id AS text) FROM changed))
)
INSERT INTO duly.audit (at, actor, action, subject, reason, before, after)
SELECT duly.now(), CAST(:actor AS text), CAST(:action AS text), 'event:' || before.id, CAST(:reason AS text),
       before.facts, changed.facts
FROM changed JOIN before USING (seq) ORDER BY seq RETURNING id
"""
REQUEUE_EVENTS = Statement(
    """
WITH before AS MATERIALIZED (
    SELECT o.seq, o.id, to_jsonb(o) - 'payload' AS facts FROM duly.outbox o
    WHERE o.seq = ANY(CAST(:seqs AS bigint[])) AND o.failed_at IS NOT NULL
    ORDER BY o.seq FOR UPDATE
), changed AS (
    UPDATE duly.outbox o SET attempts = 0, failed_at = NULL, retry_at = NULL, last_error = NULL
    WHERE o.seq = ANY(ARRAY(SELECT seq FROM before))
    RETURNING o.seq, o.id, jsonb_build_object('attempts', 0, 'failed_at', NULL, 'retry_at', NULL) AS facts
"""
    + _NOTE_EVENTS
)
DISCARD_EVENTS = Statement(
    """
WITH before AS MATERIALIZED (
    SELECT o.seq, o.id, to_jsonb(o) AS facts FROM duly.outbox o
    WHERE o.seq = ANY(CAST(:seqs AS bigint[])) AND o.failed_at IS NOT NULL
    ORDER BY o.seq FOR UPDATE
), changed AS (
    DELETE FROM duly.outbox o WHERE o.seq = ANY(ARRAY(SELECT seq FROM before))
    RETURNING o.seq, o.id, CAST(NULL AS jsonb) AS facts
"""
    + _NOTE_EVENTS
)
# Of each aggregate the first, along audit_discarded.
LIST_DISCARDED = Statement("""
SELECT d.id, d.type, d.aggregate_id, d.at FROM unnest(CAST(:aggregate_ids AS text[])) AS a(id)
CROSS JOIN LATERAL (
    SELECT CAST(substr(u.subject, 7) AS uuid) AS id, u.before ->> 'type' AS type,
           u.before ->> 'aggregate_id' AS aggregate_id, u.at, u.id AS number
    FROM duly.audit u WHERE u.action = 'event.discarded' AND u.before ->> 'aggregate_id' = a.id
    ORDER BY u.id LIMIT CAST(:limit AS int)) AS d
ORDER BY d.number
""")
RELEASE_NEXT_EVENT = Statement("""
UPDATE duly.outbox SET parked = false
WHERE parked AND seq = (SELECT o.seq FROM duly.outbox o
                        WHERE o.aggregate_id = CAST(:aggregate_id AS text)
                          AND (o.parked OR o.attempts > 0 OR o.retry_at IS NOT NULL)
                        ORDER BY o.seq LIMIT 1)
""")
RELEASE_NEXT_EVENTS = Statement("""
UPDATE duly.outbox SET parked = false
WHERE parked AND seq IN (
    SELECT first.seq FROM unnest(CAST(:aggregate_ids AS text[])) AS a(id)
    CROSS JOIN LATERAL (SELECT o.seq FROM duly.outbox o
                        WHERE o.aggregate_id = a.id AND (o.parked OR o.attempts > 0 OR o.retry_at IS NOT NULL)
                        ORDER BY o.seq LIMIT 1) AS first)
""")
FIND_AGGREGATES = Statement("SELECT DISTINCT aggregate_id FROM duly.outbox WHERE seq = ANY(CAST(:seqs AS bigint[]))")
FIND_AGGREGATE = Statement("SELECT aggregate_id FROM duly.outbox WHERE seq = CAST(:seq AS bigint)")

# ---------------------------------------------------------------------------------------------------- alerts, audit

_ALERT = "SELECT id, kind, subject, message, count, raised_at, last_at, resolved_at FROM duly.alerts"
_NEWEST_ALERT_FIRST = """
WHERE raised_at <= coalesce(CAST(:before_at AS timestamptz), 'infinity')
  AND (raised_at, id) < (coalesce(CAST(:before_at AS timestamptz), 'infinity'),
                         coalesce(CAST(:before_id AS bigint), 9223372036854775807)) {and_so}
ORDER BY raised_at DESC, id DESC LIMIT CAST(:limit AS int)
"""
LIST_ALERTS = Statement(_ALERT + _NEWEST_ALERT_FIRST.replace("{and_so}", ""))
LIST_OPEN_ALERTS = Statement(_ALERT + _NEWEST_ALERT_FIRST.replace("{and_so}", "AND resolved_at IS NULL"))
RESOLVE_ALERT = Statement("""
WITH changed AS (
    UPDATE duly.alerts SET resolved_at = duly.now() WHERE id = CAST(:id AS bigint) AND resolved_at IS NULL RETURNING *
)
INSERT INTO duly.audit (at, actor, action, subject, reason, before, after)
SELECT duly.now(), CAST(:actor AS text), 'alert.resolved', 'alert:' || changed.id, CAST(:reason AS text),
       to_jsonb(changed) - 'resolved_at', jsonb_build_object('resolved_at', changed.resolved_at)
FROM changed RETURNING id
""")
RAISE_ALERT = Statement("SELECT duly.alert('application', CAST(:subject AS text), CAST(:message AS text))")
FIND_ALERT = Statement("SELECT resolved_at FROM duly.alerts WHERE id = CAST(:id AS bigint)")

_AUDIT = """
SELECT id, at, actor, action, subject, reason, CAST(before AS text) AS before, CAST(after AS text) AS after
FROM duly.audit WHERE id < coalesce(CAST(:before AS bigint), 9223372036854775807)
"""
_NEWEST_AUDIT_FIRST = " ORDER BY id DESC LIMIT CAST(:limit AS int)"
LIST_AUDIT = Statement(_AUDIT + _NEWEST_AUDIT_FIRST)
INSERT_AUDIT = Statement("""
INSERT INTO duly.audit (at, actor, action, subject, reason, before, after)
VALUES (duly.now(), :actor, :action, :subject, CAST(:reason AS text),
        CAST(CAST(:before AS text) AS jsonb), CAST(CAST(:after AS text) AS jsonb))
""")
LIST_AUDIT_OF_SUBJECT = Statement(_AUDIT + " AND subject = CAST(:subject AS text)" + _NEWEST_AUDIT_FIRST)

# ------------------------------------------------------------------------------------------------------------ status

FIND_JOB_NAMES = Statement("""
WITH RECURSIVE found AS (
    (SELECT name, 1 AS place FROM duly.jobs ORDER BY name LIMIT 1)
    UNION ALL
    SELECT (SELECT j.name FROM duly.jobs j WHERE j.name > found.name ORDER BY j.name LIMIT 1), place + 1
    FROM found WHERE found.name IS NOT NULL AND place < CAST(:names_limit AS int)
)
SELECT name FROM found WHERE name IS NOT NULL
""")
# Name by name, priority by priority, along jobs_ready. Counting reads the index alone; only the front of what is due
# is looked up in the table, because what runs was claimed from there.
COUNT_JOBS = Statement("""
SELECT found.name, sum(due.counted - front.leased) AS due, sum(front.running) AS running,
       sum(front.leased - front.running) AS expired, sum(future.counted) AS future, sum(behind.counted) AS behind,
       extract(epoch FROM duly.now() - min(oldest.run_at))::float8 AS oldest_due_seconds,
       bool_or(due.counted >= CAST(:cap AS int)) AS due_more,
       bool_or(front.leased >= CAST(:front AS int)) AS running_more
FROM unnest(CAST(:names AS text[])) AS found(name)
CROSS JOIN generate_series(1, 4) AS p(priority)
CROSS JOIN LATERAL (
    SELECT count(*) AS counted
    FROM (SELECT 1 FROM duly.jobs j
          WHERE j.name = found.name AND j.priority = p.priority AND j.run_at <= duly.now()
          ORDER BY j.run_at, j.id LIMIT CAST(:cap AS int)) AS taken) AS due
CROSS JOIN LATERAL (
    SELECT count(lease_token) AS leased, count(*) FILTER (WHERE lease_expires_at > clock_timestamp()) AS running
    FROM (SELECT j.lease_token, j.lease_expires_at FROM duly.jobs j
          WHERE j.name = found.name AND j.priority = p.priority AND j.run_at <= duly.now()
          ORDER BY j.run_at, j.id LIMIT CAST(:front AS int)) AS taken) AS front
LEFT JOIN LATERAL (
    SELECT j.run_at FROM duly.jobs j
    WHERE j.name = found.name AND j.priority = p.priority AND j.run_at <= duly.now() AND j.lease_token IS NULL
    ORDER BY j.run_at, j.id LIMIT 1) AS oldest ON true
CROSS JOIN LATERAL (
    SELECT count(*) AS counted
    FROM (SELECT 1 FROM duly.jobs j
          WHERE j.name = found.name AND j.priority = p.priority AND j.run_at > duly.now() AND j.run_at < 'infinity'
          ORDER BY j.run_at, j.id LIMIT CAST(:cap AS int)) AS taken) AS future
CROSS JOIN LATERAL (
    SELECT count(*) AS counted
    FROM (SELECT 1 FROM duly.jobs j
          WHERE j.name = found.name AND j.priority = p.priority AND j.run_at = 'infinity'
          ORDER BY j.run_at, j.id LIMIT CAST(:cap AS int)) AS taken) AS behind
GROUP BY found.name ORDER BY found.name
""")
# The oldest of each lane, and then of all: what is held behind a failed event says nothing about the relay.
COUNT_OUTBOX = Statement("""
SELECT (SELECT count(*) FROM (SELECT 1 FROM duly.outbox WHERE NOT parked AND failed_at IS NULL
                              LIMIT CAST(:cap AS int)) AS ready),
       (SELECT count(*) FROM (SELECT 1 FROM duly.outbox WHERE parked AND failed_at IS NULL
                              LIMIT CAST(:cap AS int)) AS held),
       (SELECT count(*) FROM (SELECT 1 FROM duly.outbox WHERE failed_at IS NOT NULL AND attempts > 0
                              LIMIT CAST(:cap AS int)) AS failed),
       (SELECT extract(epoch FROM duly.now() - min(first.created_at))::float8
        FROM generate_series(0, 63) AS l(lane)
        CROSS JOIN LATERAL (SELECT o.created_at FROM duly.outbox o
                            WHERE o.lane = l.lane AND NOT o.parked AND o.failed_at IS NULL
                            ORDER BY o.seq LIMIT 1) AS first)
""")
LIST_LATE_SCHEDULES = Statement("""
SELECT name, extract(epoch FROM duly.now() - next_run_at)::float8 FROM duly.schedules
WHERE enabled AND next_run_at < duly.now() - make_interval(secs => CAST(:grace_seconds AS float8))
ORDER BY next_run_at, name LIMIT CAST(:limit AS int)
""")
COUNT_OPEN_ALERTS = Statement("""
SELECT count(*) FROM (SELECT 1 FROM duly.alerts WHERE resolved_at IS NULL LIMIT CAST(:cap AS int)) AS opened
""")
LIST_PROCESSES = Statement("""
SELECT id, kind, names, version, started_at, extract(epoch FROM clock_timestamp() - seen_at)::float8 AS silent_seconds
FROM duly.processes
WHERE seen_at > clock_timestamp() - make_interval(secs => CAST(:alive_seconds AS float8))
ORDER BY kind, id LIMIT CAST(:limit AS int)
""")
READ_NOW = Statement("SELECT duly.now(), clock_timestamp()")
