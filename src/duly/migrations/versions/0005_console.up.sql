-- Who is signed in to the console. The browser holds a random id, this table its hash: whoever reads the table cannot
-- sign in with it, and signing out or revoking is in force at the next request. Times are physical, as a lease's are:
-- moving the business clock signs nobody out.
CREATE TABLE duly.console_sessions (
    id_hash    bytea NOT NULL,
    subject    text NOT NULL,
    name       text NOT NULL,
    roles      text[] NOT NULL,
    created_at timestamptz NOT NULL,
    seen_at    timestamptz NOT NULL,
    expires_at timestamptz NOT NULL,
    revoked_at timestamptz,
    CONSTRAINT console_sessions_pkey PRIMARY KEY (id_hash),
    CONSTRAINT console_sessions_id_is_sha256 CHECK (octet_length(id_hash) = 32),
    CONSTRAINT console_sessions_subject_is_short CHECK (length(subject) BETWEEN 1 AND 255),
    CONSTRAINT console_sessions_name_is_short CHECK (length(name) BETWEEN 1 AND 255),
    CONSTRAINT console_sessions_has_a_role CHECK
        (cardinality(roles) > 0 AND roles <@ ARRAY['ADMINISTRATOR'::text, 'OPERATOR'::text]),
    CONSTRAINT console_sessions_end_in_time CHECK
        (expires_at > created_at AND expires_at <= created_at + interval '8 hours')
);
CREATE INDEX console_sessions_age ON duly.console_sessions (expires_at);

INSERT INTO duly.schedules (name, cron, misfire) VALUES ('duly.forget-console-sessions', '23 3 * * *', 'run_once');
