"""Every statement about schedules, by name."""

from __future__ import annotations

from duly.db import Statement

# -------------------------------------------------------------------------------------------------- the tick

# The lock and the advance are in one commit: whoever skips a row finds it advanced, or still due.
CHOOSE_DUE_SCHEDULES = Statement("""
SELECT name, cron, timezone, dst_gap, dst_overlap, misfire,
       CASE WHEN isfinite(next_run_at) THEN next_run_at END AS next_run_at, last_error, missed_count,
       missed_oldest, missed_newest, duly.now() AS now
FROM duly.schedules
WHERE enabled AND (next_run_at IS NULL OR next_run_at <= duly.now())
ORDER BY next_run_at NULLS FIRST
LIMIT :batch
FOR UPDATE SKIP LOCKED
""")

# Payload and retries come from the schedule's own row, not a thousand times over the wire.
INSERT_JOBS = Statement("""
INSERT INTO duly.jobs (name, payload, run_at, due_at, created_at, original_delay, max_retries, source,
                       correlation_id)
SELECT s.name, s.payload, r.at, r.at, duly.now(), r.delay, s.max_retries, 'Scheduled', duly.uuid7()
FROM unnest(CAST(:names AS text[]), CAST(:ats AS timestamptz[]), CAST(:delays AS interval[]))
     AS r(name, at, delay)
JOIN duly.schedules s ON s.name = r.name
ORDER BY r.at, s.name
""")

# The version stays: it counts what people changed, and an edit must not fail because the clock ticked.
ADVANCE_SCHEDULES = Statement("""
UPDATE duly.schedules AS s
SET next_run_at = p.next_run_at,
    last_run_at = coalesce(p.last_run_at, s.last_run_at),
    last_error = p.last_error,
    missed_count = p.missed_count,
    missed_oldest = p.missed_oldest,
    missed_newest = p.missed_newest
FROM unnest(CAST(:names AS text[]), CAST(:next_run_ats AS timestamptz[]),
            CAST(:last_run_ats AS timestamptz[]), CAST(:last_errors AS text[]), CAST(:missed_counts AS integer[]),
            CAST(:missed_oldests AS timestamptz[]), CAST(:missed_newests AS timestamptz[]))
     AS p(name, next_run_at, last_run_at, last_error, missed_count, missed_oldest, missed_newest)
WHERE s.name = p.name
""")

RAISE_ALERTS = Statement("""
SELECT duly.alert(a.kind, a.subject, a.message)
FROM unnest(CAST(:kinds AS text[]), CAST(:subjects AS text[]), CAST(:messages AS text[]))
     AS a(kind, subject, message)
""")

RESOLVE_BROKEN = Statement("""
UPDATE duly.alerts SET resolved_at = duly.now()
WHERE kind = 'schedule_broken' AND subject = ANY(CAST(:names AS text[])) AND resolved_at IS NULL
""")

# More than 0, at most 30: on a boundary the next one is meant.
READ_SECONDS_TO_BOUNDARY = Statement("""
SELECT CAST(30 - mod(extract(epoch FROM duly.now()), 30) AS double precision)
""")

# What was planned under other zone rules is planned anew. No lock: a row that somebody changed meanwhile is
# left alone.
READ_PLANNED_SCHEDULES = Statement("""
SELECT name, cron, timezone, dst_gap, dst_overlap, next_run_at, duly.now() AS now
FROM duly.schedules
WHERE enabled AND next_run_at > duly.now() AND isfinite(next_run_at) AND last_error IS NULL
  AND name > :after_name
ORDER BY name
LIMIT :batch
""")

REPLAN_SCHEDULES = Statement("""
UPDATE duly.schedules AS s SET next_run_at = p.next_run_at
FROM unnest(CAST(:names AS text[]), CAST(:planned_ats AS timestamptz[]), CAST(:next_run_ats AS timestamptz[]))
     AS p(name, planned_at, next_run_at)
WHERE s.name = p.name AND s.enabled AND s.next_run_at = p.planned_at
""")

# -------------------------------------------------------------------------------------------------- the edits

READ_NOW = Statement("SELECT duly.now()")

READ_SCHEDULE = Statement("""
SELECT name, cron, timezone, enabled, max_retries, misfire, dst_gap, dst_overlap,
       CAST(payload AS text) AS payload, last_run_at, next_run_at, missed_count, missed_oldest, missed_newest,
       last_error, version, updated_at, CAST(to_jsonb(s) AS text) AS snapshot
FROM duly.schedules AS s
WHERE name = :name
""")

LOCK_SCHEDULE = Statement("""
SELECT name, cron, timezone, enabled, max_retries, misfire, dst_gap, dst_overlap,
       CAST(payload AS text) AS payload, last_run_at, next_run_at, missed_count, missed_oldest, missed_newest,
       last_error, version, updated_at, CAST(to_jsonb(s) AS text) AS snapshot
FROM duly.schedules AS s
WHERE name = :name
FOR UPDATE
""")

LIST_SCHEDULES = Statement("""
SELECT name, cron, timezone, enabled, max_retries, misfire, dst_gap, dst_overlap,
       CAST(payload AS text) AS payload, last_run_at, next_run_at, missed_count, missed_oldest, missed_newest,
       last_error, version, updated_at
FROM duly.schedules
WHERE name > :after_name
ORDER BY name
LIMIT :limit
""")

ADD_SCHEDULE = Statement("""
INSERT INTO duly.schedules (name, cron, timezone, enabled, max_retries, misfire, dst_gap, dst_overlap,
                            payload, next_run_at, updated_at)
VALUES (:name, :cron, :timezone, :enabled, CAST(:max_retries AS smallint), :misfire, :dst_gap, :dst_overlap,
        CAST(CAST(:payload AS text) AS jsonb), CAST(:next_run_at AS timestamptz), duly.now())
ON CONFLICT (name) DO NOTHING
RETURNING name
""")

CHANGE_SCHEDULE = Statement("""
UPDATE duly.schedules
SET cron = :cron, timezone = :timezone, enabled = :enabled, max_retries = CAST(:max_retries AS smallint),
    misfire = :misfire, dst_gap = :dst_gap, dst_overlap = :dst_overlap,
    payload = coalesce(CAST(CAST(:payload AS text) AS jsonb), payload),
    next_run_at = CAST(:next_run_at AS timestamptz), last_error = CAST(:last_error AS text),
    version = version + 1, updated_at = duly.now()
WHERE name = :name
""")

REMOVE_SCHEDULE = Statement("DELETE FROM duly.schedules WHERE name = :name")

TRIGGER_SCHEDULE = Statement("""
INSERT INTO duly.jobs (name, payload, run_at, due_at, created_at, original_delay, max_retries, source,
                       correlation_id, causation_id, traceparent)
SELECT name, payload, duly.now(), duly.now(), duly.now(), CAST(:original_delay AS interval), max_retries,
       'Manual', coalesce(CAST(:correlation_id AS uuid), duly.uuid7()), CAST(:causation_id AS uuid),
       CAST(:traceparent AS text)
FROM duly.schedules
WHERE name = :name
RETURNING id
""")

WRITE_AUDIT = Statement("""
INSERT INTO duly.audit (at, actor, action, subject, reason, before, after)
VALUES (duly.now(), :actor, :action, :subject, CAST(:reason AS text),
        CAST(CAST(:before AS text) AS jsonb), CAST(CAST(:after AS text) AS jsonb))
""")
