"""The statements of the clean-up; each deletes one batch and returns how many rows went."""

from __future__ import annotations

from duly.db import Statement

# Partitions are made and dropped under strong locks: better to fail and be retried than to queue everybody behind us.
BOUND_LOCK_WAIT = Statement("SELECT set_config('lock_timeout', '5s', true)")
ALLOW_FORGETTING = Statement("SELECT set_config('duly.forgetting', 'on', true)")
CREATE_PARTITIONS = Statement("""
SELECT duly.create_partitions(CAST(:parent AS text), CAST(duly.now() AT TIME ZONE 'UTC' AS date), CAST(:days AS int))
""")
DROP_PARTITIONS = Statement("""
SELECT duly.drop_partitions(CAST(:parent AS text),
                            CAST(duly.now() AT TIME ZONE 'UTC' AS date) - CAST(:days AS int))
""")
COUNT_KEPT_PARTITIONS = Statement("""
SELECT count(*)::int FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
WHERE i.inhparent = CAST('duly.' || CAST(:parent AS text) AS regclass) AND c.relname ~ '_p[0-9]{8}$'
  AND to_date(right(c.relname, 8), 'YYYYMMDD') < CAST(duly.now() AT TIME ZONE 'UTC' AS date) - CAST(:days AS int)
""")
# Rows that no partition was made for are in the default one, which is never dropped.
FORGET_STRAY_EVENTS = Statement("""
WITH gone AS (
    DELETE FROM duly.events_default WHERE id = ANY(ARRAY(
        SELECT e.id FROM duly.events_default e
        WHERE e.id < duly.uuid7_floor(duly.now() - make_interval(days => CAST(:days AS int)))
          AND NOT EXISTS (SELECT 1 FROM duly.jobs j WHERE j.event_id = e.id)
          AND NOT EXISTS (SELECT 1 FROM duly.dead_letters d WHERE d.event_id = e.id)
        LIMIT CAST(:batch AS int)))
    RETURNING 1)
SELECT count(*)::int FROM gone
""")
FORGET_STRAY_EXECUTIONS = Statement("""
WITH gone AS (
    DELETE FROM duly.executions_default WHERE ctid = ANY(ARRAY(
        SELECT ctid FROM duly.executions_default
        WHERE completed_at < duly.now() - make_interval(days => CAST(:days AS int)) LIMIT CAST(:batch AS int)))
    RETURNING 1)
SELECT count(*)::int FROM gone
""")
FORGET_PROCESSED_EVENTS = Statement("""
WITH gone AS (
    DELETE FROM duly.processed_events WHERE ctid = ANY(ARRAY(
        SELECT ctid FROM duly.processed_events
        WHERE processed_at < duly.now() - make_interval(days => CAST(:days AS int)) LIMIT CAST(:batch AS int)))
    RETURNING 1)
SELECT count(*)::int FROM gone
""")
FORGET_RECEIVED = Statement("""
WITH gone AS (
    DELETE FROM duly.received WHERE ctid = ANY(ARRAY(
        SELECT r.ctid FROM duly.received r
        WHERE r.received_at < duly.now() - make_interval(days => CAST(:days AS int))
          AND NOT EXISTS (SELECT 1 FROM duly.jobs j WHERE j.event_id = r.id)
          AND NOT EXISTS (SELECT 1 FROM duly.dead_letters d WHERE d.event_id = r.id)
        LIMIT CAST(:batch AS int)))
    RETURNING 1)
SELECT count(*)::int FROM gone
""")
# Without its cursor a stream is read from its beginning: those that moved last are kept, however long ago that was.
FORGET_CURSORS = Statement("""
WITH gone AS (
    DELETE FROM duly.cursors WHERE (via, shard) IN (
        SELECT old.via, old.shard
        FROM (SELECT c.via, c.shard, c.moved_at,
                     row_number() OVER (PARTITION BY c.via ORDER BY c.moved_at DESC) AS place
              FROM duly.cursors c) AS old
        WHERE old.place > 100 AND old.moved_at < duly.now() - make_interval(days => CAST(:days AS int))
        LIMIT CAST(:batch AS int))
    RETURNING 1)
SELECT count(*)::int FROM gone
""")
# An operator who works on one right now keeps it.
CHOOSE_OLD_DEAD_LETTERS = Statement("""
SELECT id FROM duly.dead_letters
WHERE buried_at < duly.now() - make_interval(days => CAST(:days AS int))
ORDER BY buried_at, id LIMIT CAST(:batch AS int) FOR UPDATE SKIP LOCKED
""")
FORGET_DEAD_LETTERS = Statement("""
WITH gone AS (
    DELETE FROM duly.dead_letters WHERE id = ANY(CAST(:ids AS bigint[])) RETURNING name, buried_at
)
INSERT INTO duly.audit (at, actor, action, subject, reason, before)
SELECT duly.now(), 'duly', 'dead_letters.forgotten', 'dead_letters:' || name, 'older than the retention',
       jsonb_build_object('count', count(*), 'oldest', min(buried_at), 'newest', max(buried_at))
FROM gone GROUP BY name ORDER BY name
""")
FORGET_AUDIT = Statement("""
WITH gone AS (
    DELETE FROM duly.audit WHERE id = ANY(ARRAY(
        SELECT id FROM duly.audit WHERE at < duly.now() - make_interval(days => CAST(:days AS int))
        ORDER BY at LIMIT CAST(:batch AS int)))
    RETURNING 1)
SELECT count(*)::int FROM gone
""")
FORGET_ALERTS = Statement("""
WITH gone AS (
    DELETE FROM duly.alerts WHERE id = ANY(ARRAY(
        SELECT id FROM duly.alerts
        WHERE raised_at < duly.now() - make_interval(days => CAST(:days AS int))
          AND resolved_at < duly.now() - make_interval(days => CAST(:days AS int))
        ORDER BY raised_at LIMIT CAST(:batch AS int)))
    RETURNING 1)
SELECT count(*)::int FROM gone
""")
FORGET_PROCESSES = Statement("""
DELETE FROM duly.processes WHERE id = ANY(ARRAY(
    SELECT id FROM duly.processes WHERE seen_at < clock_timestamp() - make_interval(days => CAST(:days AS int))
    LIMIT CAST(:batch AS int)))
RETURNING id
""")
FORGET_CONSOLE_SESSIONS = Statement("""
WITH gone AS (
    DELETE FROM duly.console_sessions WHERE id_hash = ANY(ARRAY(
        SELECT id_hash FROM duly.console_sessions WHERE expires_at < clock_timestamp()
        ORDER BY expires_at LIMIT CAST(:batch AS int)))
    RETURNING 1)
SELECT count(*)::int FROM gone
""")
SCHEDULE_AGAIN = Statement("SELECT duly.schedule(CAST(:name AS text))")
