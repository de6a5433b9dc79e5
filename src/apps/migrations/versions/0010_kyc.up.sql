CREATE SCHEMA kyc;

-- One check of one person each. What describes a person cannot be stored, whoever writes: there is an opaque id, an opaque
-- reference to evidence that the provider keeps, and no column for anything else.
CREATE TABLE kyc.sessions (
    id           uuid PRIMARY KEY,
    user_id      text NOT NULL,
    provider     text NOT NULL,
    status       text NOT NULL,
    token        text NOT NULL,
    requested_by text NOT NULL,
    provider_ref text,
    evidence_ref text,
    version      integer NOT NULL DEFAULT 1,
    created_at   timestamptz NOT NULL,
    expires_at   timestamptz NOT NULL,
    updated_at   timestamptz NOT NULL,
    CONSTRAINT sessions_provider_ref_is_unique UNIQUE (provider, provider_ref),
    CONSTRAINT sessions_status_is_known CHECK (status IN ('PENDING', 'IN_PROGRESS', 'APPROVED', 'REJECTED', 'EXPIRED')),
    CONSTRAINT sessions_user_is_opaque CHECK (user_id ~ '^([0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|(user|usr|u|customer|cust|cus|client|member|account|acct|sub|id)[-_]?([0-9]{1,9}|[0-9a-f]{24,64}))$'),
    CONSTRAINT sessions_provider_ref_is_opaque CHECK (provider_ref ~ '^([0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|(ev|evd|evidence|chk|check|ver|ref|rep|report|ses|session|kyc)[-_][0-9a-f]{24,64})$'),
    CONSTRAINT sessions_evidence_is_opaque CHECK (evidence_ref ~ '^([0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|(ev|evd|evidence|chk|check|ver|ref|rep|report|ses|session|kyc)[-_][0-9a-f]{24,64})$'),
    CONSTRAINT sessions_decided_have_evidence CHECK
        ((evidence_ref IS NOT NULL) = (status IN ('APPROVED', 'REJECTED'))),
    CONSTRAINT sessions_token_is_long CHECK (length(token) BETWEEN 32 AND 64),
    CONSTRAINT sessions_provider_is_named CHECK (length(provider) BETWEEN 1 AND 80),
    CONSTRAINT sessions_requester_is_named CHECK (length(requested_by) BETWEEN 1 AND 255),
    CONSTRAINT sessions_version_counts_up CHECK (version >= 1),
    CONSTRAINT sessions_time_goes_on CHECK (expires_at > created_at AND updated_at >= created_at)
) WITH (fillfactor = 80);
CREATE INDEX sessions_status ON kyc.sessions (status, id);
CREATE INDEX sessions_user ON kyc.sessions (user_id, id);
CREATE INDEX sessions_due ON kyc.sessions (expires_at, id) WHERE status IN ('PENDING', 'IN_PROGRESS');
CREATE INDEX sessions_age ON kyc.sessions (updated_at, id);

-- What happened to a session, one line a version; it goes with its session.
CREATE TABLE kyc.history (
    session_id  uuid NOT NULL,
    number      integer NOT NULL,
    at          timestamptz NOT NULL,
    from_status text,
    to_status   text NOT NULL,
    cause       text NOT NULL,
    CONSTRAINT history_pkey PRIMARY KEY (session_id, number),
    CONSTRAINT history_session_exists FOREIGN KEY (session_id) REFERENCES kyc.sessions (id) ON DELETE CASCADE,
    CONSTRAINT history_begins_once CHECK ((number = 1) = (from_status IS NULL) AND number >= 1),
    CONSTRAINT history_cause_is_known CHECK (cause IN ('create', 'open', 'callback', 'expire')),
    CONSTRAINT history_change_is_possible CHECK (coalesce(from_status, '') = to_status OR (coalesce(from_status, '') || '>' || to_status) IN (
        '>PENDING', 'PENDING>IN_PROGRESS', 'PENDING>APPROVED', 'PENDING>REJECTED', 'PENDING>EXPIRED',
        'IN_PROGRESS>APPROVED', 'IN_PROGRESS>REJECTED', 'IN_PROGRESS>EXPIRED'))
);

-- Calls of a provider that fit no session, or cannot be applied: for a person. No words of the provider's own.
CREATE TABLE kyc.unmatched_callbacks (
    id           uuid PRIMARY KEY,
    provider     text NOT NULL,
    event_id     text NOT NULL,
    client_ref   uuid,
    session_ref  text,
    status       text,
    problem      text NOT NULL,
    session_id   uuid,
    received_at  timestamptz NOT NULL,
    dismissed_at timestamptz,
    dismissed_by text,
    handled      text,
    CONSTRAINT unmatched_event_is_kept_once UNIQUE (provider, event_id),
    CONSTRAINT unmatched_problem_is_known CHECK
        (problem IN ('unknown_session', 'unknown_status', 'names_differ', 'bad_evidence', 'contradicts')),
    CONSTRAINT unmatched_event_is_a_digest CHECK (event_id ~ '^[0-9a-f]{64}$'),
    CONSTRAINT unmatched_ref_is_opaque CHECK (session_ref ~ '^([0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|(ev|evd|evidence|chk|check|ver|ref|rep|report|ses|session|kyc)[-_][0-9a-f]{24,64})$'),
    CONSTRAINT unmatched_status_is_known CHECK (status IN ('IN_PROGRESS', 'APPROVED', 'REJECTED', 'EXPIRED')),
    CONSTRAINT unmatched_handling_is_known CHECK (handled IN ('CORRECTED', 'NOT_OURS', 'NO_ACTION')),
    CONSTRAINT unmatched_is_dismissed_later CHECK (dismissed_at >= received_at),
    CONSTRAINT unmatched_dismissal_is_signed CHECK (num_nonnulls(dismissed_at, dismissed_by, handled) IN (0, 3)),
    CONSTRAINT unmatched_dismissal_is_short CHECK (length(dismissed_by) BETWEEN 1 AND 255)
);
CREATE INDEX unmatched_open ON kyc.unmatched_callbacks (id) WHERE dismissed_at IS NULL;
CREATE INDEX unmatched_age ON kyc.unmatched_callbacks (received_at, id);

-- Who is checked by whom never changes, and how a check ended does not either.
CREATE FUNCTION kyc.keep_terms() RETURNS trigger
LANGUAGE plpgsql
AS $$
BEGIN
    IF (OLD.id, OLD.user_id, OLD.provider, OLD.token, OLD.requested_by, OLD.created_at, OLD.expires_at)
       IS DISTINCT FROM
       (NEW.id, NEW.user_id, NEW.provider, NEW.token, NEW.requested_by, NEW.created_at, NEW.expires_at)
       OR NEW.version <> OLD.version + 1
       OR (OLD.provider_ref IS NOT NULL AND NEW.provider_ref IS DISTINCT FROM OLD.provider_ref)
       OR OLD.status IN ('APPROVED', 'REJECTED', 'EXPIRED') THEN
        RAISE EXCEPTION 'session %: this never changes', OLD.id USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN NEW;
END
$$;
CREATE TRIGGER sessions_terms BEFORE UPDATE ON kyc.sessions FOR EACH ROW EXECUTE FUNCTION kyc.keep_terms();

CREATE FUNCTION kyc.keep_history() RETURNS trigger
LANGUAGE plpgsql
AS $$
BEGIN
    RAISE EXCEPTION 'kyc.history: % is refused', TG_OP USING ERRCODE = 'restrict_violation';
END
$$;
CREATE TRIGGER history_keep BEFORE UPDATE ON kyc.history FOR EACH ROW EXECUTE FUNCTION kyc.keep_history();

-- What was missed is made up for by one run: each looks at everything that is due.
INSERT INTO duly.schedules (name, cron, misfire) VALUES
    ('kyc.sweep', '*/10 * * * *', 'run_once'),
    ('kyc.forget', '53 3 * * *', 'run_once');

-- For dossiers: the seal over a transaction, and all callbacks of a payment, also those that were dealt with.
CREATE INDEX seals_end ON ledger.seals (next_xid);
CREATE INDEX unmatched_of_payment ON payments.unmatched_callbacks (payment_id, id) WHERE payment_id IS NOT NULL;
