CREATE SCHEMA decisions;

-- What is in force: the row is read by every evaluation, and changes only when somebody activates something.
CREATE TABLE decisions.rule_sets (
    id          text PRIMARY KEY,
    description text NOT NULL,
    version     integer NOT NULL DEFAULT 0,
    snapshot_id uuid,
    created_at  timestamptz NOT NULL,
    updated_at  timestamptz NOT NULL,
    CONSTRAINT rule_sets_id_is_a_name CHECK (id ~ '^[a-z0-9][a-z0-9-]{0,63}$'),
    CONSTRAINT rule_sets_version_has_a_snapshot CHECK ((version = 0) = (snapshot_id IS NULL) AND version >= 0)
);

-- A version of a rule set: its settings, and which versions of which rules and lists are in it. Written once.
CREATE TABLE decisions.snapshots (
    id            uuid PRIMARY KEY,
    rule_set_id   text NOT NULL,
    version       integer NOT NULL,
    settings      jsonb NOT NULL,
    rule_ids      uuid[] NOT NULL,
    rule_versions integer[] NOT NULL,
    list_ids      text[] NOT NULL,
    list_versions integer[] NOT NULL,
    reason        text NOT NULL,
    created_by    text NOT NULL,
    created_at    timestamptz NOT NULL,
    CONSTRAINT snapshots_rule_set_exists FOREIGN KEY (rule_set_id) REFERENCES decisions.rule_sets (id),
    CONSTRAINT snapshots_version_is_positive CHECK (version > 0),
    CONSTRAINT snapshots_are_whole
        CHECK (cardinality(rule_ids) = cardinality(rule_versions) AND cardinality(list_ids) = cardinality(list_versions))
);
CREATE UNIQUE INDEX snapshots_version ON decisions.snapshots (rule_set_id, version);

CREATE TABLE decisions.rules (
    id             uuid PRIMARY KEY,
    rule_set_id    text NOT NULL,
    status         text NOT NULL DEFAULT 'DRAFT',
    version        integer NOT NULL,
    active_version integer,
    created_by     text NOT NULL,
    created_at     timestamptz NOT NULL,
    updated_at     timestamptz NOT NULL,
    CONSTRAINT rules_rule_set_exists FOREIGN KEY (rule_set_id) REFERENCES decisions.rule_sets (id),
    CONSTRAINT rules_status_is_known CHECK (status IN ('DRAFT', 'ACTIVE', 'DEPRECATED')),
    CONSTRAINT rules_version_is_positive CHECK (version > 0),
    CONSTRAINT rules_active_has_a_version
        CHECK ((status = 'ACTIVE') = (active_version IS NOT NULL) AND active_version BETWEEN 1 AND version)
);
CREATE INDEX rules_of_a_set ON decisions.rules (rule_set_id, id);
CREATE INDEX rules_active ON decisions.rules (rule_set_id) WHERE status = 'ACTIVE';

CREATE TABLE decisions.rule_versions (
    rule_id    uuid NOT NULL,
    version    integer NOT NULL,
    name       text NOT NULL,
    priority   integer NOT NULL,
    terminate  boolean NOT NULL,
    conditions jsonb NOT NULL,
    action     jsonb NOT NULL,
    list_ids   text[] NOT NULL,
    created_by text NOT NULL,
    created_at timestamptz NOT NULL,
    PRIMARY KEY (rule_id, version),
    CONSTRAINT rule_versions_rule_exists FOREIGN KEY (rule_id) REFERENCES decisions.rules (id),
    CONSTRAINT rule_versions_version_is_positive CHECK (version > 0)
);

CREATE TABLE decisions.lists (
    id         text PRIMARY KEY,
    version    integer NOT NULL,
    created_at timestamptz NOT NULL,
    updated_at timestamptz NOT NULL,
    CONSTRAINT lists_id_is_a_name CHECK (id ~ '^[a-z0-9][a-z0-9-]{0,63}$'),
    CONSTRAINT lists_version_is_positive CHECK (version > 0)
);
CREATE TABLE decisions.list_versions (
    list_id    text NOT NULL,
    version    integer NOT NULL,
    members    text[] NOT NULL,
    created_by text NOT NULL,
    created_at timestamptz NOT NULL,
    PRIMARY KEY (list_id, version),
    CONSTRAINT list_versions_list_exists FOREIGN KEY (list_id) REFERENCES decisions.lists (id),
    CONSTRAINT list_versions_are_bounded CHECK (cardinality(members) <= 10000)
);

-- What was decided, from which facts, by which snapshot: enough to decide again. Ids are of version 7, made from the
-- business clock, so a range of ids is a range of time, and old days are dropped whole.
CREATE TABLE decisions.log (
    id               uuid NOT NULL,
    rule_set_id      text NOT NULL,
    rule_set_version integer NOT NULL,
    snapshot_id      uuid NOT NULL,
    engine           text NOT NULL,
    subject          text,
    at               timestamptz NOT NULL,
    decision         text NOT NULL,
    score            integer,
    facts            jsonb NOT NULL,
    matched          jsonb NOT NULL,
    incomplete       jsonb NOT NULL,
    evaluated        integer NOT NULL,
    latency_us       integer NOT NULL,
    CONSTRAINT log_pkey PRIMARY KEY (id),
    CONSTRAINT log_decision_is_known CHECK (decision IN ('APPROVE', 'REVIEW', 'REJECT'))
) PARTITION BY RANGE (id);
CREATE INDEX log_rule_set ON decisions.log (rule_set_id, id);
CREATE INDEX log_flagged ON decisions.log (rule_set_id, decision, id) WHERE decision <> 'APPROVE';
CREATE TABLE decisions.log_default PARTITION OF decisions.log DEFAULT;

-- How much was observed in each minute and each hour: a window of any volume is read from at most some 800 rows.
CREATE TABLE decisions.buckets (
    stream  text NOT NULL,
    key     text NOT NULL,
    width   text NOT NULL,
    start   timestamptz NOT NULL,
    count   bigint NOT NULL,
    total   numeric NOT NULL,
    largest numeric NOT NULL,
    PRIMARY KEY (stream, key, width, start),
    CONSTRAINT buckets_width_is_known CHECK (width IN ('minute', 'hour')),
    CONSTRAINT buckets_hold_something CHECK (count > 0)
) WITH (fillfactor = 70);
CREATE INDEX buckets_start ON decisions.buckets (start);

-- When each value was last observed: how many different ones a window has, exactly, without keeping every observation.
CREATE TABLE decisions.sightings (
    stream  text NOT NULL,
    key     text NOT NULL,
    value   text NOT NULL,
    seen_at timestamptz NOT NULL,
    PRIMARY KEY (stream, key, value)
);
CREATE INDEX sightings_of_a_key ON decisions.sightings (stream, key, seen_at);
CREATE INDEX sightings_seen ON decisions.sightings (seen_at);

-- One velocity fact. A window begins at a whole minute: minutes up to the next whole hour, then hours. In a function, so
-- that its plans are made once a session: planning it with every evaluation would take as long as running it.
CREATE FUNCTION decisions.measure(
    function text, in_stream text, of_key text, seconds integer, excluded text, now timestamptz, most_distinct integer
) RETURNS numeric
LANGUAGE plpgsql STABLE
AS $$
DECLARE
    since timestamptz := date_trunc('minute', now - make_interval(secs => seconds), 'UTC');
    first_hour timestamptz := date_trunc('hour', since + interval '59 minutes 59 seconds', 'UTC');
    counted numeric;
    total numeric;
    largest numeric;
BEGIN
    IF function = 'distinct' THEN
        SELECT count(*) INTO counted FROM (
            SELECT 1 FROM decisions.sightings g
            WHERE g.stream = in_stream AND g.key = of_key AND g.seen_at >= since
              AND (excluded IS NULL OR g.value <> excluded)
            LIMIT most_distinct) AS seen;
        RETURN counted;
    END IF;
    SELECT coalesce(sum(b.count), 0), coalesce(sum(b.total), 0), coalesce(max(b.largest), 0)
    INTO counted, total, largest
    FROM (
        SELECT m.count, m.total, m.largest FROM decisions.buckets m
        WHERE m.stream = in_stream AND m.key = of_key AND m.width = 'minute'
          AND m.start >= since AND m.start < first_hour
        UNION ALL
        SELECT h.count, h.total, h.largest FROM decisions.buckets h
        WHERE h.stream = in_stream AND h.key = of_key AND h.width = 'hour' AND h.start >= first_hour
    ) AS b;
    RETURN CASE function WHEN 'count' THEN counted WHEN 'sum' THEN total ELSE largest END;
END
$$;

-- What was written of the past stays as it was. Only the clean-up deletes, and says so in its transaction.
CREATE FUNCTION decisions.keep_history() RETURNS trigger
LANGUAGE plpgsql
AS $$
BEGIN
    IF TG_OP = 'DELETE' AND current_setting('decisions.forgetting', true) = 'on' THEN
        RETURN OLD;
    END IF;
    RAISE EXCEPTION 'decisions.% is insert-only: % is refused', TG_ARGV[0], TG_OP USING ERRCODE = 'restrict_violation';
END
$$;
CREATE TRIGGER log_keep BEFORE UPDATE OR DELETE ON decisions.log
    FOR EACH ROW EXECUTE FUNCTION decisions.keep_history('log');
CREATE TRIGGER log_keep_all BEFORE TRUNCATE ON decisions.log
    FOR EACH STATEMENT EXECUTE FUNCTION decisions.keep_history('log');
CREATE TRIGGER snapshots_keep BEFORE UPDATE OR DELETE ON decisions.snapshots
    FOR EACH ROW EXECUTE FUNCTION decisions.keep_history('snapshots');
CREATE TRIGGER snapshots_keep_all BEFORE TRUNCATE ON decisions.snapshots
    FOR EACH STATEMENT EXECUTE FUNCTION decisions.keep_history('snapshots');
CREATE TRIGGER rule_versions_keep BEFORE UPDATE OR DELETE ON decisions.rule_versions
    FOR EACH ROW EXECUTE FUNCTION decisions.keep_history('rule_versions');
CREATE TRIGGER rule_versions_keep_all BEFORE TRUNCATE ON decisions.rule_versions
    FOR EACH STATEMENT EXECUTE FUNCTION decisions.keep_history('rule_versions');
CREATE TRIGGER list_versions_keep BEFORE UPDATE OR DELETE ON decisions.list_versions
    FOR EACH ROW EXECUTE FUNCTION decisions.keep_history('list_versions');
CREATE TRIGGER list_versions_keep_all BEFORE TRUNCATE ON decisions.list_versions
    FOR EACH STATEMENT EXECUTE FUNCTION decisions.keep_history('list_versions');

-- One partition a day; rows that are in the default one already are moved.
CREATE FUNCTION decisions.create_partitions(first_day date, days integer) RETURNS integer
LANGUAGE plpgsql
AS $$
DECLARE
    day date;
    child text;
    low uuid;
    high uuid;
    made integer := 0;
BEGIN
    IF days NOT BETWEEN 1 AND 400 THEN
        RAISE EXCEPTION 'decisions.create_partitions: days 1 to 400';
    END IF;
    PERFORM set_config('decisions.forgetting', 'on', true);
    FOR day IN SELECT d::date FROM generate_series(first_day, first_day + (days - 1), interval '1 day') AS d LOOP
        child := 'log_p' || to_char(day, 'YYYYMMDD');
        CONTINUE WHEN to_regclass(format('decisions.%I', child)) IS NOT NULL;
        low := duly.uuid7_floor(day::timestamp AT TIME ZONE 'UTC');
        high := duly.uuid7_floor((day + 1)::timestamp AT TIME ZONE 'UTC');
        EXECUTE format('CREATE TABLE decisions.%I (LIKE decisions.log INCLUDING ALL)', child);
        EXECUTE format('WITH moved AS (DELETE FROM decisions.log_default WHERE id >= %L AND id < %L RETURNING *)
                        INSERT INTO decisions.%I SELECT * FROM moved', low, high, child);
        EXECUTE format('ALTER TABLE decisions.log ATTACH PARTITION decisions.%I FOR VALUES FROM (%L) TO (%L)',
                       child, low, high);
        made := made + 1;
    END LOOP;
    PERFORM set_config('decisions.forgetting', '', true);
    RETURN made;
END
$$;

CREATE FUNCTION decisions.drop_partitions(before date) RETURNS integer
LANGUAGE plpgsql
AS $$
DECLARE
    child text;
    gone integer := 0;
BEGIN
    FOR child IN
        SELECT c.relname FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
        WHERE i.inhparent = 'decisions.log'::regclass AND c.relname ~ '^log_p[0-9]{8}$'
          AND to_date(right(c.relname, 8), 'YYYYMMDD') < before
        ORDER BY c.relname
    LOOP
        EXECUTE format('DROP TABLE decisions.%I', child);
        gone := gone + 1;
    END LOOP;
    RETURN gone;
END
$$;
SELECT decisions.create_partitions((duly.now() AT TIME ZONE 'UTC')::date - 1, 9);

-- The two rule sets that payments and compliance ask by name. Without an active rule they approve.
INSERT INTO decisions.rule_sets (id, description, created_at, updated_at) VALUES
    ('payment-screening', 'Before a payment is posted: approve, hold for review, or reject.', duly.now(), duly.now()),
    ('aml-screening', 'After a transaction was posted: does it look like money laundering?', duly.now(), duly.now());
INSERT INTO decisions.snapshots
    (id, rule_set_id, version, settings, rule_ids, rule_versions, list_ids, list_versions, reason, created_by,
     created_at)
SELECT duly.uuid7(), given.id, 1, given.settings, '{}', '{}', '{}', '{}', 'made by the migration', 'duly', duly.now()
FROM (VALUES
    ('payment-screening', CAST('{
        "fields": {"paymentId": "string", "amount": "decimal", "currency": "string", "from": "string", "to": "string",
                   "fromType": "string", "toType": "string", "initiatedBy": "string", "country": "string"},
        "velocity": [
            {"name": "payments1h", "function": "count", "stream": "payments", "by": ["from"], "windowSeconds": 3600,
             "includeCurrent": true},
            {"name": "payments24h", "function": "count", "stream": "payments", "by": ["from"], "windowSeconds": 86400,
             "includeCurrent": true},
            {"name": "paid24h", "function": "sum", "stream": "payments", "by": ["from", "currency"], "of": "amount",
             "windowSeconds": 86400, "includeCurrent": true},
            {"name": "payees24h", "function": "distinct", "stream": "payments", "by": ["from"], "of": "to",
             "windowSeconds": 86400, "includeCurrent": true}],
        "aggregation": {"mode": "worst"}, "default": "APPROVE", "onIncomplete": "REVIEW",
        "money": {"amount": "amount", "currency": "currency"}}' AS jsonb)),
    ('aml-screening', CAST('{
        "fields": {"transactionId": "string", "reference": "string", "amount": "decimal", "currency": "string",
                   "entryCount": "integer", "accounts": "strings", "fromAccount": "string", "toAccount": "string",
                   "postedAt": "instant"},
        "velocity": [
            {"name": "transactions24h", "function": "count", "stream": "transactions", "by": ["fromAccount"],
             "windowSeconds": 86400, "includeCurrent": true},
            {"name": "moved24h", "function": "sum", "stream": "transactions", "by": ["fromAccount", "currency"],
             "of": "amount", "windowSeconds": 86400, "includeCurrent": true},
            {"name": "counterparties7d", "function": "distinct", "stream": "transactions", "by": ["fromAccount"],
             "of": "toAccount", "windowSeconds": 604800, "includeCurrent": true}],
        "aggregation": {"mode": "worst"}, "default": "APPROVE", "onIncomplete": "REVIEW",
        "money": {"amount": "amount", "currency": "currency"}}' AS jsonb))
) AS given(id, settings);
UPDATE decisions.rule_sets SET version = 1, snapshot_id = s.id FROM decisions.snapshots s WHERE s.rule_set_id = rule_sets.id;

INSERT INTO duly.schedules (name, cron, misfire) VALUES
    ('decisions.keep-partitions', '11 */6 * * *', 'run_once'),
    ('decisions.forget', '21 3 * * *', 'run_once');
