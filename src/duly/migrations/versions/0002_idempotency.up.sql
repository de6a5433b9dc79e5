-- The row is inserted before the work and filled with the answer after it, all in the transaction of the work: while it
-- is uncommitted, a second request with the same key waits at the primary key; when it commits, the second one replays.
CREATE TABLE duly.idempotency_keys (
    caller      text NOT NULL,
    key         text NOT NULL,
    fingerprint bytea NOT NULL,
    status      smallint,
    headers     json,
    body        bytea,
    created_at  timestamptz NOT NULL,
    expires_at  timestamptz NOT NULL,
    CONSTRAINT idempotency_keys_pkey PRIMARY KEY (caller, key),
    CONSTRAINT idempotency_keys_caller_is_short CHECK (length(caller) <= 1000),
    CONSTRAINT idempotency_keys_key_is_short CHECK (length(key) BETWEEN 1 AND 255),
    CONSTRAINT idempotency_keys_fingerprint_is_sha256 CHECK (length(fingerprint) = 32),
    CONSTRAINT idempotency_keys_status_is_http CHECK (status BETWEEN 200 AND 499),
    CONSTRAINT idempotency_keys_answer_is_whole CHECK ((status IS NULL) = (body IS NULL))
) WITH (fillfactor = 70);
CREATE INDEX idempotency_keys_age ON duly.idempotency_keys (expires_at);

INSERT INTO duly.schedules (name, cron, misfire) VALUES ('duly.forget-idempotency-keys', '57 3 * * *', 'run_once');
