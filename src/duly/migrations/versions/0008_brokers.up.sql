-- Which broker brings a consumer its events; without one the relay does. What we published before `via_since` it has
-- from the relay.
ALTER TABLE duly.consumers ADD COLUMN via text, ADD COLUMN via_since timestamptz,
    ADD CONSTRAINT consumers_via_is_named CHECK (via ~ '^[a-z][a-z0-9_-]{0,39}$'),
    ADD CONSTRAINT consumers_via_has_a_start CHECK ((via IS NULL) = (via_since IS NULL));

-- What a broker brought: written once, in the transaction that makes the consumers' jobs; a redelivery finds its row.
-- Its limits are looser than the outbox's: others write there, too.
CREATE TABLE duly.received (
    id           uuid NOT NULL,
    via          text NOT NULL,
    type         text NOT NULL,
    topic        text NOT NULL,
    aggregate_id text NOT NULL,
    payload      jsonb NOT NULL,
    headers      jsonb NOT NULL,
    created_at   timestamptz NOT NULL,
    received_at  timestamptz NOT NULL,
    position     text NOT NULL,
    CONSTRAINT received_pkey PRIMARY KEY (id, via),
    CONSTRAINT received_via_is_named CHECK (via ~ '^[a-z][a-z0-9_-]{0,39}$'),
    CONSTRAINT received_type_is_short CHECK (length(type) BETWEEN 1 AND 200),
    CONSTRAINT received_topic_is_short CHECK (length(topic) BETWEEN 1 AND 300),
    CONSTRAINT received_aggregate_is_short CHECK (length(aggregate_id) BETWEEN 1 AND 200),
    CONSTRAINT received_payload_is_object CHECK (jsonb_typeof(payload) = 'object' AND jsonb_typeof(headers) = 'object'),
    CONSTRAINT received_payload_is_bounded CHECK (pg_column_size(payload) + pg_column_size(headers) <= 8388608),
    CONSTRAINT received_position_is_short CHECK (length(position) <= 300)
);
CREATE INDEX received_age ON duly.received USING brin (received_at);

-- How far we have read, where the broker does not keep that for us; moved in the transaction that stores what was read.
CREATE TABLE duly.cursors (
    via      text NOT NULL,
    shard    text NOT NULL,
    position bigint NOT NULL,
    moved_at timestamptz NOT NULL,
    CONSTRAINT cursors_pkey PRIMARY KEY (via, shard),
    CONSTRAINT cursors_via_is_named CHECK (via ~ '^[a-z][a-z0-9_-]{0,39}$'),
    CONSTRAINT cursors_shard_is_short CHECK (length(shard) BETWEEN 1 AND 300),
    CONSTRAINT cursors_count_up CHECK (position >= 0)
);

ALTER TABLE duly.processes DROP CONSTRAINT processes_kind_is_known, ADD CONSTRAINT processes_kind_is_known
    CHECK (kind IN ('worker', 'relay', 'scheduler', 'receiver'));

INSERT INTO duly.schedules (name, cron, misfire) VALUES ('duly.forget-received', '57 3 * * *', 'run_once');
