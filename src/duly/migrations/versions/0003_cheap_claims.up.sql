-- A table's CHECKs run at every UPDATE, whichever column it changes: a claim paid half of its time for a regular
-- expression on a name that cannot have changed. A domain's run when a value is made. Nothing is rewritten or read here:
-- what is in the table has been checked by the constraints that go.
DROP VIEW duly.queue;
CREATE DOMAIN duly.job_name AS text;
CREATE DOMAIN duly.job_payload AS jsonb;
ALTER TABLE duly.jobs
    DROP CONSTRAINT jobs_is_named, DROP CONSTRAINT jobs_payload_is_object, DROP CONSTRAINT jobs_payload_is_bounded,
    ALTER COLUMN name TYPE duly.job_name, ALTER COLUMN payload TYPE duly.job_payload;
ALTER DOMAIN duly.job_name ADD CONSTRAINT jobs_is_named CHECK (VALUE ~ '^[A-Za-z][A-Za-z0-9_.:-]{0,99}$') NOT VALID;
ALTER DOMAIN duly.job_payload ADD CONSTRAINT jobs_payload_is_object CHECK (jsonb_typeof(VALUE) = 'object') NOT VALID;
ALTER DOMAIN duly.job_payload ADD CONSTRAINT jobs_payload_is_bounded CHECK (pg_column_size(VALUE) <= 1048576) NOT VALID;

CREATE VIEW duly.queue AS
SELECT id, name::text, entity_id,
       CASE WHEN lease_token IS NULL THEN 'Pending'
            WHEN lease_expires_at > clock_timestamp() THEN 'Running'
            ELSE 'Failed' END AS status,
       run_at, due_at, created_at, retry_count, max_retries, source, waits, priority,
       lease_expires_at AS lock_expires_at, leased_by, progress, last_error AS error, event_id,
       correlation_id, causation_id
FROM duly.jobs
UNION ALL
SELECT id, name, entity_id, 'DeadLetter', NULL, due_at, created_at, retry_count, max_retries, source, reason, priority,
       NULL, NULL, NULL, error, event_id, correlation_id, causation_id
FROM duly.dead_letters;

-- A session keeps its plans. One that was made while a queue was empty would read the whole table, and go on doing so
-- when a hundred thousand rows have come, until somebody analyses it. What the planner looks at is the size of the file:
-- so a queue's file starts with some pages, and vacuum leaves it as long as it was.
ALTER TABLE duly.jobs SET (vacuum_truncate = false);
ALTER TABLE duly.outbox SET (vacuum_truncate = false);
ALTER TABLE duly.dead_letters SET (vacuum_truncate = false);
INSERT INTO duly.jobs (id, name, run_at, due_at, created_at)
SELECT -n, 'page', 'infinity', 'infinity', now() FROM generate_series(1, 3000) AS n;
INSERT INTO duly.outbox (seq, id, type, topic, aggregate_id, payload, created_at) OVERRIDING SYSTEM VALUE
SELECT -n, gen_random_uuid(), 'page', 'page', 'page', '{}', now() FROM generate_series(1, 5000) AS n;
INSERT INTO duly.dead_letters (id, name, payload, priority, due_at, created_at, original_delay, retry_count, source,
    reason, error, error_kind, buried_at)
SELECT -n, 'page', '{}', 3, now(), now(), '0', 0, 'Manual', 'worker_died', '', '', now()
FROM generate_series(1, 5000) AS n;
DELETE FROM duly.jobs WHERE id < 0;
DELETE FROM duly.outbox WHERE seq < 0;
DELETE FROM duly.dead_letters WHERE id < 0;

-- Jobs given in one call, outside of any request, have one cause: one correlation id, made once.
CREATE OR REPLACE FUNCTION duly.schedule_many(
    names text[], entity_ids text[], run_ats timestamptz[], payloads jsonb[],
    on_conflict text DEFAULT 'replace', priority smallint DEFAULT 3, max_retries smallint DEFAULT NULL,
    backoff_seconds integer[] DEFAULT NULL, source text DEFAULT 'Deferred',
    correlation_id uuid DEFAULT NULL, causation_id uuid DEFAULT NULL, traceparent text DEFAULT NULL,
    notify boolean DEFAULT true
) RETURNS SETOF bigint
LANGUAGE plpgsql
SET enable_seqscan = off
AS $$
#variable_conflict use_column
DECLARE
    moment timestamptz := duly.now();
    correlation uuid := coalesce(schedule_many.correlation_id, duly.uuid7(moment));
    waiting bigint[];
    written bigint[];
BEGIN
    IF on_conflict NOT IN ('replace', 'keep', 'reject', 'allow', 'nothing') THEN
        RAISE EXCEPTION 'duly.schedule: on_conflict must be replace, keep, reject or allow, not %', on_conflict
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    -- A later run needs no wake-up: every poll looks ten seconds ahead.
    IF notify AND duly.wants_notify() AND EXISTS (SELECT 1 FROM unnest(run_ats) AS r(at)
                                       WHERE r.at IS NULL OR r.at < moment + interval '10 seconds') THEN
        PERFORM pg_notify('duly', 'jobs');
    END IF;
    -- A job that ran and waits for its retry is pending again, but gave up its key: taking it back could make a worker
    -- wait for a stranger's transaction. It counts all the same.
    IF on_conflict <> 'allow' AND cardinality(array_remove(entity_ids, NULL)) > 0 THEN
        SELECT array_agg(j.id) INTO waiting
        FROM unnest(names, entity_ids) AS n(name, entity_id)
        JOIN duly.jobs j ON j.entity_id = n.entity_id AND j.name = n.name
        WHERE j.is_unique AND j.unique_key IS NULL AND j.lease_token IS NULL;
        IF on_conflict = 'replace' AND waiting IS NOT NULL THEN
            DELETE FROM duly.jobs WHERE id = ANY(waiting) AND lease_token IS NULL;
        END IF;
    END IF;
    WITH job AS (
        INSERT INTO duly.jobs AS kept (name, entity_id, run_at, due_at, payload, created_at, original_delay,
                   is_unique, unique_key, priority, max_retries, backoff_seconds, source,
                   correlation_id, causation_id, traceparent)
        SELECT n.name, n.entity_id, coalesce(n.run_at, moment), coalesce(n.run_at, moment), n.payload, moment,
               greatest(coalesce(n.run_at, moment) - moment, interval '0'),
               on_conflict <> 'allow' AND n.entity_id IS NOT NULL,
               CASE WHEN on_conflict <> 'allow' THEN n.name || ' ' || n.entity_id END,
               schedule_many.priority, schedule_many.max_retries, schedule_many.backoff_seconds,
               schedule_many.source, correlation, schedule_many.causation_id, schedule_many.traceparent
        FROM unnest(names, entity_ids, run_ats, payloads)
             WITH ORDINALITY AS n(name, entity_id, run_at, payload, place)
        WHERE waiting IS NULL OR on_conflict = 'replace' OR NOT EXISTS (
            SELECT 1 FROM duly.jobs w WHERE w.id = ANY(waiting) AND w.name = n.name AND w.entity_id = n.entity_id)
        ORDER BY n.place
        ON CONFLICT (unique_key) WHERE unique_key IS NOT NULL DO UPDATE
        SET run_at = excluded.run_at, due_at = excluded.due_at, payload = excluded.payload,
            created_at = excluded.created_at, original_delay = excluded.original_delay, priority = excluded.priority,
            max_retries = excluded.max_retries, backoff_seconds = excluded.backoff_seconds,
            correlation_id = excluded.correlation_id, causation_id = excluded.causation_id,
            traceparent = excluded.traceparent, retry_count = 0, snoozes = 0, waits = 'due', last_error = NULL
        WHERE on_conflict = 'replace'
        RETURNING kept.id
    )
    SELECT array_agg(job.id) INTO written FROM job;
    RETURN QUERY SELECT unnest(written);
    IF coalesce(cardinality(written), 0) = cardinality(names) OR on_conflict = 'nothing' THEN
        RETURN;
    END IF;
    IF on_conflict = 'reject' THEN
        RAISE EXCEPTION 'duly.schedule: a job of this name and entity is pending already'
            USING ERRCODE = 'unique_violation';
    END IF;
    RETURN QUERY
    SELECT j.id FROM unnest(names, entity_ids) AS n(name, entity_id)
    JOIN duly.jobs j ON j.unique_key = n.name || ' ' || n.entity_id
    UNION SELECT unnest(waiting)
    EXCEPT SELECT unnest(written);
END
$$;
