-- ------------------------------------------------------------------------------------------------------------- out

-- Who wants which events, where. `failures` counts those in a row, `open_until` is the circuit: until then nothing is
-- sent. A deleted one stays until the clean-up has removed its deliveries, batch by batch.
CREATE TABLE duly.webhook_subscriptions (
    id              uuid PRIMARY KEY,
    owner           text NOT NULL,
    url             text NOT NULL,
    description     text NOT NULL DEFAULT '',
    patterns        text[] NOT NULL,
    status          text NOT NULL DEFAULT 'ACTIVE',
    max_in_flight   smallint NOT NULL DEFAULT 5,
    timeout_seconds smallint NOT NULL DEFAULT 15,
    failures        integer NOT NULL DEFAULT 0,
    failing_since   timestamptz,
    open_until      timestamptz,
    disabled_reason text,
    version         integer NOT NULL DEFAULT 1,
    created_at      timestamptz NOT NULL,
    updated_at      timestamptz NOT NULL,
    CONSTRAINT webhook_subscriptions_owner_is_short CHECK (length(owner) BETWEEN 1 AND 1000),
    CONSTRAINT webhook_subscriptions_url_is_http CHECK (url ~ '^https?://[!-~]+$' AND length(url) <= 2000),
    CONSTRAINT webhook_subscriptions_description_is_short CHECK (length(description) <= 500),
    CONSTRAINT webhook_subscriptions_has_patterns CHECK (cardinality(patterns) BETWEEN 1 AND 100),
    CONSTRAINT webhook_subscriptions_status_is_known CHECK (status IN ('ACTIVE', 'PAUSED', 'DISABLED', 'DELETED')),
    CONSTRAINT webhook_subscriptions_in_flight_is_sane CHECK (max_in_flight BETWEEN 1 AND 100),
    CONSTRAINT webhook_subscriptions_timeout_is_sane CHECK (timeout_seconds BETWEEN 1 AND 30),
    CONSTRAINT webhook_subscriptions_failures_count_up CHECK (failures >= 0),
    CONSTRAINT webhook_subscriptions_failing_is_whole CHECK ((failures = 0) = (failing_since IS NULL)),
    CONSTRAINT webhook_subscriptions_disabling_is_explained CHECK ((status = 'DISABLED') = (disabled_reason IS NOT NULL))
) WITH (fillfactor = 70);
CREATE INDEX webhook_subscriptions_owner ON duly.webhook_subscriptions (owner, id) WHERE status <> 'DELETED';

-- Sealed with AES-256-GCM; the id and number are part of what is sealed, so a row cannot be moved to another's place.
-- The one without an end is the current one; the one before it is valid until its end.
CREATE TABLE duly.webhook_secrets (
    subscription_id uuid NOT NULL,
    number          integer NOT NULL,
    key_id          text NOT NULL,
    sealed          bytea NOT NULL,
    created_at      timestamptz NOT NULL,
    expires_at      timestamptz,
    CONSTRAINT webhook_secrets_pkey PRIMARY KEY (subscription_id, number),
    CONSTRAINT webhook_secrets_subscription FOREIGN KEY (subscription_id) REFERENCES duly.webhook_subscriptions (id)
        ON DELETE CASCADE,
    CONSTRAINT webhook_secrets_is_sealed CHECK (length(sealed) BETWEEN 29 AND 1000)
);
CREATE UNIQUE INDEX webhook_secrets_current ON duly.webhook_secrets (subscription_id) WHERE expires_at IS NULL;

-- One row for each event and subscription, whatever becomes of it. WAITING: not admitted yet, or kept for later. QUEUED:
-- admitted, it has a job that is due. RETRYING: it has a job for later. `turn` counts admissions: a job of an earlier
-- one is fenced by it. `tries` are those since it was made or redelivered, `attempts` all of them.
CREATE TABLE duly.webhook_deliveries (
    id               uuid NOT NULL,
    number           bigint GENERATED ALWAYS AS IDENTITY,
    subscription_id  uuid NOT NULL,
    event_id         uuid NOT NULL,
    event_type       text NOT NULL,
    aggregate_id     text NOT NULL,
    event_created_at timestamptz NOT NULL,
    status           text NOT NULL DEFAULT 'WAITING',
    turn             integer NOT NULL DEFAULT 0,
    attempts         integer NOT NULL DEFAULT 0,
    tries            smallint NOT NULL DEFAULT 0,
    redeliveries     integer NOT NULL DEFAULT 0,
    next_attempt_at  timestamptz,
    last_http_status smallint,
    last_error       text,
    created_at       timestamptz NOT NULL,
    finished_at      timestamptz,
    CONSTRAINT webhook_deliveries_pkey PRIMARY KEY (id),
    CONSTRAINT webhook_deliveries_once UNIQUE (subscription_id, event_id),
    CONSTRAINT webhook_deliveries_subscription FOREIGN KEY (subscription_id)
        REFERENCES duly.webhook_subscriptions (id),
    CONSTRAINT webhook_deliveries_status_is_known CHECK (status IN
        ('WAITING', 'QUEUED', 'RETRYING', 'DELIVERED', 'PERMANENTLY_FAILED', 'CANCELLED')),
    CONSTRAINT webhook_deliveries_counts_up CHECK (turn >= 0 AND redeliveries >= 0 AND tries BETWEEN 0 AND attempts),
    CONSTRAINT webhook_deliveries_retry_has_a_time CHECK ((status = 'RETRYING') = (next_attempt_at IS NOT NULL)),
    CONSTRAINT webhook_deliveries_end_has_a_time CHECK
        ((status IN ('DELIVERED', 'PERMANENTLY_FAILED', 'CANCELLED')) = (finished_at IS NOT NULL))
) WITH (fillfactor = 80);
CREATE UNIQUE INDEX webhook_deliveries_number ON duly.webhook_deliveries (number);
CREATE INDEX webhook_deliveries_subscription_number ON duly.webhook_deliveries (subscription_id, number);
CREATE INDEX webhook_deliveries_status ON duly.webhook_deliveries (subscription_id, status, number);

-- Every attempt that was recorded is one row, written when it ends and never changed.
CREATE TABLE duly.webhook_attempts (
    delivery_id      uuid NOT NULL,
    number           integer NOT NULL,
    subscription_id  uuid NOT NULL,
    started_at       timestamptz NOT NULL,
    latency_ms       integer NOT NULL,
    outcome          text NOT NULL,
    http_status      smallint,
    error            text,
    address          text,
    request_headers  jsonb NOT NULL,
    request_bytes    integer NOT NULL,
    response_headers jsonb NOT NULL,
    response_excerpt text NOT NULL,
    worker           text NOT NULL,
    CONSTRAINT webhook_attempts_pkey PRIMARY KEY (delivery_id, number),
    CONSTRAINT webhook_attempts_outcome_is_known CHECK (outcome IN ('DELIVERED', 'FAILED')),
    CONSTRAINT webhook_attempts_failure_is_explained CHECK ((outcome = 'FAILED') = (error IS NOT NULL)),
    CONSTRAINT webhook_attempts_excerpt_is_short CHECK (length(response_excerpt) <= 2048)
);
CREATE TRIGGER webhook_attempts_keep BEFORE UPDATE OR DELETE ON duly.webhook_attempts
    FOR EACH ROW EXECUTE FUNCTION duly.keep_history('webhook_attempts');
CREATE TRIGGER webhook_attempts_keep_all BEFORE TRUNCATE ON duly.webhook_attempts
    FOR EACH STATEMENT EXECUTE FUNCTION duly.keep_history('webhook_attempts');

-- -------------------------------------------------------------------------------------------------------------- in

CREATE TABLE duly.webhook_provider_secrets (
    provider   text NOT NULL,
    number     integer NOT NULL,
    key_id     text NOT NULL,
    sealed     bytea NOT NULL,
    created_at timestamptz NOT NULL,
    expires_at timestamptz,
    CONSTRAINT webhook_provider_secrets_pkey PRIMARY KEY (provider, number),
    CONSTRAINT webhook_provider_secrets_is_named CHECK (provider ~ '^[A-Za-z][A-Za-z0-9_.-]{0,89}$'),
    CONSTRAINT webhook_provider_secrets_is_sealed CHECK (length(sealed) BETWEEN 29 AND 1000)
);
CREATE UNIQUE INDEX webhook_provider_secrets_current ON duly.webhook_provider_secrets (provider)
    WHERE expires_at IS NULL;

-- What a provider has sent and we have acted on: the row and the effect are one commit, so a replay has none.
CREATE TABLE duly.received_webhooks (
    provider          text NOT NULL,
    provider_event_id text NOT NULL,
    received_at       timestamptz NOT NULL,
    CONSTRAINT received_webhooks_pkey PRIMARY KEY (provider, provider_event_id),
    CONSTRAINT received_webhooks_id_is_short CHECK (length(provider_event_id) BETWEEN 1 AND 255)
);
CREATE INDEX received_webhooks_age ON duly.received_webhooks USING brin (received_at);

-- ------------------------------------------------------------------------------------------------- alerts, schedules

ALTER TABLE duly.alerts DROP CONSTRAINT alerts_kind_is_known, ADD CONSTRAINT alerts_kind_is_known CHECK (kind IN
    ('event_failed', 'dead_letter', 'schedule_broken', 'occurrences_missed', 'webhook_failed', 'webhook_disabled'));

INSERT INTO duly.schedules (name, cron, misfire) VALUES
    ('duly.sweep-webhooks', '*/5 * * * *', 'run_once'),
    ('duly.forget-webhooks', '7 4 * * *', 'run_once');
