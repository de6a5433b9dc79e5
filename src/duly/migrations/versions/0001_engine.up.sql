-- The engine's first schema: clock, outbox, history, inbox, jobs, dead letters, schedules, alerts, audit, processes.

CREATE SCHEMA IF NOT EXISTS duly;

-- ---------------------------------------------------------------------------------------------------- clock and ids

-- The business clock. A sandbox replaces this body (duly.testing); production never does.
CREATE FUNCTION duly.now() RETURNS timestamptz
LANGUAGE sql STABLE PARALLEL SAFE
AS $$ SELECT statement_timestamp() $$;

-- UUID version 7: the first 48 bits are milliseconds, so ids sort by time and history can be partitioned by id.
CREATE FUNCTION duly.uuid7(at timestamptz DEFAULT statement_timestamp()) RETURNS uuid
LANGUAGE sql VOLATILE PARALLEL SAFE
AS $$
SELECT encode(
    set_bit(set_bit(
        overlay(uuid_send(gen_random_uuid())
                PLACING substring(int8send(floor(extract(epoch FROM at) * 1000)::bigint) FROM 3)
                FROM 1 FOR 6),
        52, 1), 53, 1), 'hex')::uuid
$$;

-- The smallest UUIDv7 of an instant: the bound of a partition.
CREATE FUNCTION duly.uuid7_floor(at timestamptz) RETURNS uuid
LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$
SELECT (lpad(to_hex(floor(extract(epoch FROM at) * 1000)::bigint), 12, '0') || '00000000000000000000')::uuid
$$;

CREATE FUNCTION duly.wants_notify() RETURNS boolean
LANGUAGE sql STABLE
AS $$ SELECT coalesce(current_setting('duly.notify', true), '') <> 'off' $$;

-- ----------------------------------------------------------------------------------------------------------- outbox

-- What is still to be published. Order within an aggregate is the order of seq.
CREATE TABLE duly.outbox (
    seq          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    id           uuid NOT NULL,
    type         text NOT NULL,
    topic        text NOT NULL,
    aggregate_id text NOT NULL,
    lane         smallint GENERATED ALWAYS AS ((hashtextextended(aggregate_id, 0) & 63)::smallint) STORED,
    payload      jsonb NOT NULL,
    headers      jsonb NOT NULL DEFAULT '{}',
    created_at   timestamptz NOT NULL,
    attempts     smallint NOT NULL DEFAULT 0,
    retry_at     timestamptz,
    failed_at    timestamptz,
    last_error   text,
    parked       boolean NOT NULL DEFAULT false,
    CONSTRAINT outbox_type_is_named CHECK (type ~ '^[A-Za-z][A-Za-z0-9_.:-]{0,199}$'),
    CONSTRAINT outbox_topic_is_named CHECK (topic ~ '^[A-Za-z][A-Za-z0-9_.:-]{0,199}$'),
    CONSTRAINT outbox_aggregate_is_short CHECK (length(aggregate_id) BETWEEN 1 AND 200),
    CONSTRAINT outbox_payload_is_object CHECK (jsonb_typeof(payload) = 'object'),
    CONSTRAINT outbox_payload_is_bounded CHECK (pg_column_size(payload) + pg_column_size(headers) <= 1048576),
    CONSTRAINT outbox_headers_is_object CHECK (jsonb_typeof(headers) = 'object'),
    CONSTRAINT outbox_failure_is_explained CHECK (failed_at IS NULL OR (last_error IS NOT NULL AND attempts > 0))
) WITH (fillfactor = 80, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0);

CREATE INDEX outbox_ready ON duly.outbox (lane, seq) WHERE NOT parked AND failed_at IS NULL;
-- Whatever holds back the later events of its own aggregate: backing off, failed, or itself held back.
CREATE INDEX outbox_blockers ON duly.outbox (aggregate_id, seq) WHERE parked OR attempts > 0 OR retry_at IS NOT NULL;
CREATE INDEX outbox_retries ON duly.outbox (retry_at) WHERE attempts > 0 AND failed_at IS NULL;

-- One relay at a time serves a lane; the lease is for transports that publish outside the transaction.
CREATE TABLE duly.lanes (
    lane             smallint PRIMARY KEY,
    lease_token      bigint,
    leased_by        text,
    lease_expires_at timestamptz,
    CONSTRAINT lanes_lease_is_whole CHECK ((lease_token IS NULL) = (lease_expires_at IS NULL)),
    CONSTRAINT lanes_are_64 CHECK (lane BETWEEN 0 AND 63)
);
INSERT INTO duly.lanes (lane) SELECT generate_series(0, 63);

-- Published events, dropped by partition. The id is a UUIDv7, so its range is a range of time.
CREATE TABLE duly.events (
    id           uuid NOT NULL,
    seq          bigint NOT NULL,
    type         text NOT NULL,
    topic        text NOT NULL,
    aggregate_id text NOT NULL,
    payload      jsonb NOT NULL,
    headers      jsonb NOT NULL,
    created_at   timestamptz NOT NULL,
    published_at timestamptz NOT NULL,
    attempts     smallint NOT NULL,
    CONSTRAINT events_pkey PRIMARY KEY (id)
) PARTITION BY RANGE (id);
CREATE INDEX events_aggregate ON duly.events (aggregate_id, seq);
CREATE TABLE duly.events_default PARTITION OF duly.events DEFAULT;

-- ------------------------------------------------------------------------------------------------- consumers, inbox

CREATE TABLE duly.consumers (
    name          text PRIMARY KEY,
    patterns      text[] NOT NULL,
    ordered       boolean NOT NULL DEFAULT false,
    enabled       boolean NOT NULL DEFAULT true,
    registered_at timestamptz NOT NULL,
    CONSTRAINT consumers_is_named CHECK (name ~ '^[A-Za-z][A-Za-z0-9_.-]{0,89}$'),
    CONSTRAINT consumers_has_patterns CHECK (cardinality(patterns) BETWEEN 1 AND 100)
);

CREATE TABLE duly.processed_events (
    consumer     text NOT NULL,
    event_id     uuid NOT NULL,
    processed_at timestamptz NOT NULL,
    CONSTRAINT processed_events_pkey PRIMARY KEY (consumer, event_id)
);
CREATE INDEX processed_events_age ON duly.processed_events USING brin (processed_at);

-- ------------------------------------------------------------------------------------------------------------- jobs

CREATE SEQUENCE duly.lease_tokens;

-- Work that is still to do. The lease is in no index: claiming is a HOT update.
CREATE TABLE duly.jobs (
    id               bigint GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY,
    name             text NOT NULL,
    entity_id        text,
    payload          jsonb NOT NULL DEFAULT '{}',
    priority         smallint NOT NULL DEFAULT 3,
    run_at           timestamptz NOT NULL,
    due_at           timestamptz NOT NULL,
    created_at       timestamptz NOT NULL,
    original_delay   interval NOT NULL DEFAULT '0',
    retry_count      smallint NOT NULL DEFAULT 0,
    max_retries      smallint,
    backoff_seconds  integer[],
    source           text NOT NULL DEFAULT 'Deferred',
    waits            text NOT NULL DEFAULT 'due',
    last_error       text,
    snoozes          integer NOT NULL DEFAULT 0,
    event_id         uuid,
    order_key        text,
    is_unique        boolean NOT NULL DEFAULT false,
    unique_key       text,
    slot             smallint,
    correlation_id   uuid,
    causation_id     uuid,
    traceparent      text,
    lease_token      bigint,
    lease_expires_at timestamptz,
    leased_by        text,
    claimed_at       timestamptz,
    progress         text,
    lost_by          text,
    lost_token       bigint,
    lost_claimed_at  timestamptz,
    CONSTRAINT jobs_is_named CHECK (name ~ '^[A-Za-z][A-Za-z0-9_.:-]{0,99}$'),
    CONSTRAINT jobs_entity_is_short CHECK (length(entity_id) BETWEEN 1 AND 200),
    CONSTRAINT jobs_payload_is_object CHECK (jsonb_typeof(payload) = 'object'),
    CONSTRAINT jobs_payload_is_bounded CHECK (pg_column_size(payload) <= 1048576),
    CONSTRAINT jobs_priority_is_1_to_4 CHECK (priority BETWEEN 1 AND 4),
    CONSTRAINT jobs_retries_count_up CHECK (retry_count >= 0 AND snoozes >= 0),
    CONSTRAINT jobs_max_retries_is_sane CHECK (max_retries BETWEEN 0 AND 1000),
    CONSTRAINT jobs_source_is_known CHECK (source IN ('Scheduled', 'Manual', 'Deferred')),
    CONSTRAINT jobs_waits_is_known CHECK (waits IN
        ('due', 'retry', 'snoozed', 'released', 'requeued', 'behind', 'unknown_commit')),
    CONSTRAINT jobs_key_is_of_a_unique_job CHECK (unique_key IS NULL OR is_unique),
    CONSTRAINT jobs_lease_is_whole CHECK
        ((lease_token IS NULL) = (lease_expires_at IS NULL) AND (lease_token IS NULL) = (leased_by IS NULL))
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0);

CREATE INDEX jobs_ready ON duly.jobs (name, priority, run_at, id);
CREATE INDEX jobs_entity ON duly.jobs (entity_id, name) WHERE entity_id IS NOT NULL;
CREATE INDEX jobs_order ON duly.jobs (name, order_key, id) WHERE order_key IS NOT NULL;
CREATE UNIQUE INDEX jobs_unique ON duly.jobs (unique_key) WHERE unique_key IS NOT NULL;
CREATE UNIQUE INDEX jobs_slot ON duly.jobs (name, slot) WHERE slot IS NOT NULL;

CREATE TABLE duly.dead_letters (
    id              bigint PRIMARY KEY,
    name            text NOT NULL,
    entity_id       text,
    payload         jsonb NOT NULL,
    priority        smallint NOT NULL,
    due_at          timestamptz NOT NULL,
    created_at      timestamptz NOT NULL,
    original_delay  interval NOT NULL,
    retry_count     smallint NOT NULL,
    max_retries     smallint,
    backoff_seconds integer[],
    source          text NOT NULL,
    event_id        uuid,
    order_key       text,
    correlation_id  uuid,
    causation_id    uuid,
    traceparent     text,
    reason          text NOT NULL,
    error           text NOT NULL,
    error_kind      text NOT NULL,
    buried_at       timestamptz NOT NULL,
    CONSTRAINT dead_letters_reason_is_known CHECK (reason IN
        ('retries_used_up', 'failed_for_good', 'worker_died', 'event_missing'))
);
CREATE INDEX dead_letters_age ON duly.dead_letters (buried_at, id);
CREATE INDEX dead_letters_name ON duly.dead_letters (name, buried_at);
CREATE INDEX dead_letters_entity ON duly.dead_letters (entity_id) WHERE entity_id IS NOT NULL;
CREATE INDEX dead_letters_order ON duly.dead_letters (name, order_key) WHERE order_key IS NOT NULL;

-- Every run is one row, written when it ends and never changed.
CREATE TABLE duly.executions (
    execution_id   uuid NOT NULL,
    job_id         bigint NOT NULL,
    name           text NOT NULL,
    entity_id      text,
    source         text NOT NULL,
    started_at     timestamptz NOT NULL,
    completed_at   timestamptz NOT NULL,
    succeeded      boolean NOT NULL,
    outcome        text NOT NULL,
    message        text,
    retry_count    smallint NOT NULL,
    next_run_at    timestamptz,
    worker         text NOT NULL,
    lease_token    bigint NOT NULL,
    event_id       uuid,
    correlation_id uuid,
    causation_id   uuid,
    CONSTRAINT executions_outcome_is_known CHECK (outcome IN
        ('done', 'duplicate', 'retried', 'snoozed', 'cancelled', 'buried', 'lost', 'released'))
) PARTITION BY RANGE (completed_at);
CREATE INDEX executions_job ON duly.executions (job_id);
CREATE INDEX executions_name ON duly.executions (name, completed_at);
CREATE INDEX executions_entity ON duly.executions (entity_id, completed_at) WHERE entity_id IS NOT NULL;
CREATE TABLE duly.executions_default PARTITION OF duly.executions DEFAULT;

-- What was written of the past stays as it was. Only the clean-up deletes, and says so in its transaction; a slip of
-- the hand in psql is refused. (Who owns the table can drop it: that is a matter of roles, not of a trigger.)
CREATE FUNCTION duly.keep_history() RETURNS trigger
LANGUAGE plpgsql
AS $$
BEGIN
    IF TG_OP = 'DELETE' AND current_setting('duly.forgetting', true) = 'on' THEN
        RETURN OLD;
    END IF;
    RAISE EXCEPTION 'duly.% is insert-only: % is refused', TG_ARGV[0], TG_OP
        USING ERRCODE = 'restrict_violation',
              HINT = 'Old rows go with the schedules duly.drop-history and duly.forget-audit.';
END
$$;
CREATE TRIGGER executions_keep BEFORE UPDATE OR DELETE ON duly.executions
    FOR EACH ROW EXECUTE FUNCTION duly.keep_history('executions');
CREATE TRIGGER executions_keep_all BEFORE TRUNCATE ON duly.executions
    FOR EACH STATEMENT EXECUTE FUNCTION duly.keep_history('executions');

-- Whoever adds jobs of an order key, or lets the next one run, does so one after the other; always in the same order.
CREATE FUNCTION duly.lock_order(names text[], keys text[]) RETURNS void
LANGUAGE plpgsql
AS $$
BEGIN
    PERFORM pg_advisory_xact_lock(sorted.hash)
    FROM (SELECT DISTINCT hashtextextended('duly.order ' || k.name || ' ' || k.key, 0) AS hash
          FROM unnest(names, keys) AS k(name, key) ORDER BY 1) AS sorted;
END
$$;

-- Order per aggregate: when a job with an order key leaves the queue, the next one of its key may run. A dead letter
-- keeps its place until an operator retries or discards it. A head that is locked is leaving, too: whoever deletes it
-- waits for our lock and lets the one after it run.
CREATE FUNCTION duly.release_next() RETURNS trigger
LANGUAGE plpgsql
AS $$
BEGIN
    PERFORM duly.lock_order(ARRAY[OLD.name], ARRAY[OLD.order_key]);
    UPDATE duly.jobs SET run_at = duly.now(), waits = 'due'
    WHERE id = (SELECT j.id FROM duly.jobs j
                WHERE j.id = (SELECT h.id FROM duly.jobs h
                              WHERE h.name = OLD.name AND h.order_key = OLD.order_key ORDER BY h.id LIMIT 1)
                FOR NO KEY UPDATE SKIP LOCKED)
      AND waits = 'behind'
      AND NOT EXISTS (SELECT 1 FROM duly.dead_letters d WHERE d.name = OLD.name AND d.order_key = OLD.order_key);
    RETURN NULL;
END
$$;
CREATE TRIGGER jobs_release_next AFTER DELETE ON duly.jobs
    FOR EACH ROW WHEN (OLD.order_key IS NOT NULL) EXECUTE FUNCTION duly.release_next();
CREATE TRIGGER dead_letters_release_next AFTER DELETE ON duly.dead_letters
    FOR EACH ROW WHEN (OLD.order_key IS NOT NULL) EXECUTE FUNCTION duly.release_next();

-- --------------------------------------------------------------------------------------------------------- schedules

CREATE TABLE duly.schedules (
    name          text PRIMARY KEY,
    cron          text NOT NULL,
    timezone      text NOT NULL DEFAULT 'UTC',
    enabled       boolean NOT NULL DEFAULT true,
    max_retries   smallint NOT NULL DEFAULT 3,
    misfire       text NOT NULL DEFAULT 'run_once',
    dst_gap       text NOT NULL DEFAULT 'after',
    dst_overlap   text NOT NULL DEFAULT 'first',
    payload       jsonb NOT NULL DEFAULT '{}',
    last_run_at   timestamptz,
    next_run_at   timestamptz,
    missed_count  integer NOT NULL DEFAULT 0,
    missed_oldest timestamptz,
    missed_newest timestamptz,
    last_error    text,
    version       integer NOT NULL DEFAULT 1,
    updated_at    timestamptz NOT NULL DEFAULT duly.now(),
    CONSTRAINT schedules_is_named CHECK (name ~ '^[A-Za-z][A-Za-z0-9_.:-]{0,99}$'),
    CONSTRAINT schedules_cron_is_short CHECK (length(cron) BETWEEN 9 AND 100),
    CONSTRAINT schedules_max_retries_is_sane CHECK (max_retries BETWEEN 0 AND 1000),
    CONSTRAINT schedules_misfire_is_known CHECK (misfire IN ('run_once', 'run_all', 'skip')),
    CONSTRAINT schedules_dst_gap_is_known CHECK (dst_gap IN ('after', 'skip')),
    CONSTRAINT schedules_dst_overlap_is_known CHECK (dst_overlap IN ('first', 'both')),
    CONSTRAINT schedules_payload_is_object CHECK (jsonb_typeof(payload) = 'object')
);
CREATE INDEX schedules_due ON duly.schedules (next_run_at) WHERE enabled;

-- An edit by plain SQL takes effect at the next tick, too: the tick plans a row without a next run anew.
CREATE FUNCTION duly.plan_again() RETURNS trigger
LANGUAGE plpgsql
AS $$
BEGIN
    NEW.next_run_at := NULL;
    RETURN NEW;
END
$$;
CREATE TRIGGER schedules_plan_again BEFORE UPDATE ON duly.schedules
    FOR EACH ROW WHEN ((OLD.cron, OLD.timezone, OLD.dst_gap, OLD.dst_overlap)
                       IS DISTINCT FROM (NEW.cron, NEW.timezone, NEW.dst_gap, NEW.dst_overlap)
                       AND OLD.next_run_at IS NOT DISTINCT FROM NEW.next_run_at)
    EXECUTE FUNCTION duly.plan_again();

-- ------------------------------------------------------------------------------------------- alerts, audit, processes

CREATE TABLE duly.alerts (
    id           bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    kind         text NOT NULL,
    subject      text NOT NULL,
    message      text NOT NULL,
    count        integer NOT NULL DEFAULT 1,
    raised_at    timestamptz NOT NULL,
    last_at      timestamptz NOT NULL,
    resolved_at  timestamptz,
    CONSTRAINT alerts_kind_is_known CHECK (kind IN
        ('event_failed', 'dead_letter', 'schedule_broken', 'occurrences_missed'))
);
CREATE UNIQUE INDEX alerts_open ON duly.alerts (kind, subject) WHERE resolved_at IS NULL;
CREATE INDEX alerts_age ON duly.alerts (raised_at);

CREATE TABLE duly.audit (
    id       bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at       timestamptz NOT NULL,
    actor    text NOT NULL,
    action   text NOT NULL,
    subject  text NOT NULL,
    reason   text,
    before   jsonb,
    after    jsonb
);
CREATE INDEX audit_subject ON duly.audit (subject, id);
CREATE INDEX audit_age ON duly.audit (at);
CREATE TRIGGER audit_keep BEFORE UPDATE OR DELETE ON duly.audit
    FOR EACH ROW EXECUTE FUNCTION duly.keep_history('audit');
CREATE TRIGGER audit_keep_all BEFORE TRUNCATE ON duly.audit
    FOR EACH STATEMENT EXECUTE FUNCTION duly.keep_history('audit');

-- Who is alive, and which names each worker knows. Physical time: liveness is not business time.
CREATE TABLE duly.processes (
    id         text PRIMARY KEY,
    kind       text NOT NULL,
    names      text[] NOT NULL DEFAULT '{}',
    version    text NOT NULL,
    started_at timestamptz NOT NULL,
    seen_at    timestamptz NOT NULL,
    CONSTRAINT processes_kind_is_known CHECK (kind IN ('worker', 'relay', 'scheduler'))
);

-- ------------------------------------------------------------------------------------------------------- the SQL face

-- What a job's status is, in the words of the specification.
CREATE VIEW duly.queue AS
SELECT id, name, entity_id,
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

-- What an event's status is.
CREATE VIEW duly.event_log AS
SELECT id, seq, type, topic, aggregate_id,
       CASE WHEN failed_at IS NULL THEN 'PENDING' ELSE 'FAILED' END AS status,
       attempts, retry_at, parked, last_error, created_at, NULL::timestamptz AS published_at, headers, payload
FROM duly.outbox
UNION ALL
SELECT id, seq, type, topic, aggregate_id, 'PUBLISHED', attempts, NULL, false, NULL, created_at, published_at,
       headers, payload
FROM duly.events;

CREATE FUNCTION duly.emit_many(
    types text[], topics text[], aggregate_ids text[], payloads jsonb[], headers jsonb[], notify boolean DEFAULT true
) RETURNS SETOF uuid
LANGUAGE plpgsql
AS $$
DECLARE
    moment timestamptz := duly.now();
    correlation uuid := duly.uuid7(moment);
BEGIN
    IF notify AND duly.wants_notify() THEN
        PERFORM pg_notify('duly', 'outbox');
    END IF;
    RETURN QUERY
    INSERT INTO duly.outbox (id, type, topic, aggregate_id, payload, headers, created_at)
    SELECT duly.uuid7(moment), e.type, e.topic, e.aggregate_id, e.payload,
           CASE WHEN e.header ? 'correlation_id' THEN e.header
                ELSE e.header || jsonb_build_object('correlation_id', correlation) END, moment
    FROM unnest(types, topics, aggregate_ids, payloads, headers)
         WITH ORDINALITY AS e(type, topic, aggregate_id, payload, header, place)
    ORDER BY e.place
    RETURNING id;
END
$$;

CREATE FUNCTION duly.emit(
    type text, topic text, aggregate_id text, payload jsonb DEFAULT '{}', headers jsonb DEFAULT '{}'
) RETURNS uuid
LANGUAGE sql
AS $$ SELECT duly.emit_many(ARRAY[type], ARRAY[topic], ARRAY[aggregate_id], ARRAY[payload], ARRAY[headers]) $$;

-- One INSERT. A job with an entity is unique by (name, entity) while it is pending; on_conflict says what a second
-- one means: replace (the timer moves), keep (the first stays), reject (an error), allow (both run), or
-- nothing (no row and no id: for callers that raise an error of their own).
CREATE FUNCTION duly.schedule_many(
    names text[], entity_ids text[], run_ats timestamptz[], payloads jsonb[],
    on_conflict text DEFAULT 'replace', priority smallint DEFAULT 3, max_retries smallint DEFAULT NULL,
    backoff_seconds integer[] DEFAULT NULL, source text DEFAULT 'Deferred',
    correlation_id uuid DEFAULT NULL, causation_id uuid DEFAULT NULL, traceparent text DEFAULT NULL,
    notify boolean DEFAULT true
) RETURNS SETOF bigint
LANGUAGE plpgsql
AS $$
#variable_conflict use_column
DECLARE
    moment timestamptz := duly.now();
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
    IF on_conflict <> 'allow' THEN
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
               schedule_many.source, coalesce(schedule_many.correlation_id, duly.uuid7(moment)),
               schedule_many.causation_id,
               schedule_many.traceparent
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

CREATE FUNCTION duly.schedule(
    name text, entity_id text DEFAULT NULL, run_at timestamptz DEFAULT NULL, payload jsonb DEFAULT '{}',
    on_conflict text DEFAULT 'replace', priority integer DEFAULT 3, max_retries integer DEFAULT NULL,
    backoff_seconds integer[] DEFAULT NULL, correlation_id uuid DEFAULT NULL, causation_id uuid DEFAULT NULL
) RETURNS bigint
LANGUAGE sql
AS $$
SELECT duly.schedule_many(ARRAY[name], ARRAY[entity_id], ARRAY[run_at], ARRAY[payload], on_conflict,
                          priority::smallint, max_retries::smallint, backoff_seconds, 'Deferred',
                          correlation_id, causation_id)
$$;

-- Deletes what is still pending; what runs already is not touched. Returns how many.
CREATE FUNCTION duly.cancel(name text, entity_id text) RETURNS integer
LANGUAGE sql
AS $$
WITH gone AS (
    DELETE FROM duly.jobs j WHERE j.entity_id = cancel.entity_id AND j.name = cancel.name AND j.lease_token IS NULL
    RETURNING 1
)
SELECT count(*)::integer FROM gone
$$;

CREATE FUNCTION duly.alert(kind text, subject text, message text) RETURNS void
LANGUAGE sql
AS $$
INSERT INTO duly.alerts (kind, subject, message, raised_at, last_at)
VALUES (kind, subject, left(message, 2000), duly.now(), duly.now())
ON CONFLICT (kind, subject) WHERE resolved_at IS NULL
DO UPDATE SET count = duly.alerts.count + 1, last_at = excluded.last_at, message = excluded.message
$$;

-- ---------------------------------------------------------------------------------------------- partitions of history

-- Makes the daily partitions of one parent from a day on; rows that fell into the default partition move over.
CREATE FUNCTION duly.create_partitions(parent text, first_day date, days integer) RETURNS integer
LANGUAGE plpgsql
AS $$
DECLARE
    day date;
    child text;
    made integer := 0;
    low text;
    high text;
    key text := CASE parent WHEN 'events' THEN 'id' WHEN 'executions' THEN 'completed_at' END;
BEGIN
    IF key IS NULL OR days NOT BETWEEN 1 AND 400 THEN
        RAISE EXCEPTION 'duly.create_partitions: parent must be events or executions, days 1 to 400';
    END IF;
    PERFORM set_config('duly.forgetting', 'on', true);
    FOR day IN SELECT d::date FROM generate_series(first_day, first_day + (days - 1), interval '1 day') AS d LOOP
        child := format('%s_p%s', parent, to_char(day, 'YYYYMMDD'));
        CONTINUE WHEN to_regclass(format('duly.%I', child)) IS NOT NULL;
        low := CASE parent WHEN 'events' THEN duly.uuid7_floor(day::timestamp AT TIME ZONE 'UTC')::text
                           ELSE day::text || ' 00:00:00+00' END;
        high := CASE parent WHEN 'events' THEN duly.uuid7_floor((day + 1)::timestamp AT TIME ZONE 'UTC')::text
                            ELSE (day + 1)::text || ' 00:00:00+00' END;
        EXECUTE format('CREATE TABLE duly.%I (LIKE duly.%I INCLUDING ALL)', child, parent);
        EXECUTE format('WITH moved AS (DELETE FROM duly.%I WHERE %I >= %L AND %I < %L RETURNING *)
                        INSERT INTO duly.%I SELECT * FROM moved', parent || '_default', key, low, key, high, child);
        EXECUTE format('ALTER TABLE duly.%I ATTACH PARTITION duly.%I FOR VALUES FROM (%L) TO (%L)',
                       parent, child, low, high);
        made := made + 1;
    END LOOP;
    PERFORM set_config('duly.forgetting', '', true);
    RETURN made;
END
$$;

-- Drops the partitions that end before a day. An events partition that a waiting job or dead letter still needs stays.
CREATE FUNCTION duly.drop_partitions(parent text, before date) RETURNS integer
LANGUAGE plpgsql
AS $$
DECLARE
    child record;
    gone integer := 0;
BEGIN
    FOR child IN
        SELECT c.relname AS name, to_date(right(c.relname, 8), 'YYYYMMDD') AS day
        FROM pg_inherits i
        JOIN pg_class c ON c.oid = i.inhrelid
        WHERE i.inhparent = format('duly.%I', parent)::regclass AND c.relname ~ '_p[0-9]{8}$'
        ORDER BY c.relname
    LOOP
        CONTINUE WHEN child.day >= before;
        CONTINUE WHEN parent = 'events' AND EXISTS (
            SELECT 1 FROM (SELECT event_id FROM duly.jobs UNION ALL SELECT event_id FROM duly.dead_letters) AS needed
            WHERE event_id >= duly.uuid7_floor(child.day::timestamp AT TIME ZONE 'UTC')
              AND event_id < duly.uuid7_floor((child.day + 1)::timestamp AT TIME ZONE 'UTC'));
        EXECUTE format('DROP TABLE duly.%I', child.name);
        gone := gone + 1;
    END LOOP;
    RETURN gone;
END
$$;

-- A year of birthdays may pass in a sandbox: rows outside every partition are in the default one, never refused.
SELECT duly.create_partitions('events', (duly.now() AT TIME ZONE 'UTC')::date - 1, 9);
SELECT duly.create_partitions('executions', (duly.now() AT TIME ZONE 'UTC')::date - 1, 9);

-- The engine's own clean-up is a set of schedules like any other.
INSERT INTO duly.schedules (name, cron, misfire) VALUES
    ('duly.create-partitions', '7 */6 * * *', 'run_once'),
    ('duly.drop-history', '17 3 * * *', 'run_once'),
    ('duly.forget-processed-events', '27 3 * * *', 'run_once'),
    ('duly.forget-dead-letters', '37 3 * * *', 'run_once'),
    ('duly.forget-audit', '47 3 * * *', 'run_once');
