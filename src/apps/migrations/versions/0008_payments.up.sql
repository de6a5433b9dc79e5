CREATE SCHEMA payments;

-- Where each payment stands. What is true of a state is said here, so that no code can forget it: money that is under
-- way has a posting, money that is back has a reversal, what is reviewed has a hold, what waits has a time.
CREATE TABLE payments.payments (
    id               uuid PRIMARY KEY,
    from_account_id  uuid NOT NULL,
    to_account_id    uuid NOT NULL,
    amount           bigint NOT NULL,
    currency         text NOT NULL,
    state            text NOT NULL,
    reason           text,
    retryable        boolean NOT NULL DEFAULT false,
    next_retry_at    timestamptz,
    attempts         smallint NOT NULL DEFAULT 0,
    delivery         text,
    sent_at          timestamptz,
    initiated_by     text NOT NULL,
    provider         text NOT NULL,
    provider_ref     text,
    bank_key         uuid NOT NULL,
    decision_id      uuid,
    review_hold_id   uuid,
    incoming_hold_id uuid,
    transaction_id   uuid,
    reversal_id      uuid,
    contradicted_at  timestamptz,
    version          integer NOT NULL DEFAULT 1,
    since            timestamptz NOT NULL,
    created_at       timestamptz NOT NULL,
    updated_at       timestamptz NOT NULL,
    CONSTRAINT payments_bank_key_is_unique UNIQUE (bank_key),
    CONSTRAINT payments_provider_ref_is_unique UNIQUE (provider, provider_ref),
    CONSTRAINT payments_transaction_is_its_own UNIQUE (transaction_id),
    CONSTRAINT payments_reversal_is_its_own UNIQUE (reversal_id),
    CONSTRAINT payments_state_is_known CHECK (state IN
        ('REJECTED', 'PENDING_REVIEW', 'PROCESSING', 'UNKNOWN', 'FAILED', 'RETURNING', 'COMPLETED',
         'PERMANENTLY_FAILED')),
    CONSTRAINT payments_go_elsewhere CHECK (from_account_id <> to_account_id),
    CONSTRAINT payments_amount_is_positive CHECK (amount > 0),
    CONSTRAINT payments_currency_is_a_code CHECK (currency ~ '^[A-Z]{3}$'),
    CONSTRAINT payments_reason_is_short CHECK (length(reason) BETWEEN 1 AND 100),
    CONSTRAINT payments_state_is_explained CHECK
        ((reason IS NOT NULL) = (state IN ('REJECTED', 'UNKNOWN', 'FAILED', 'RETURNING', 'PERMANENTLY_FAILED'))),
    CONSTRAINT payments_only_failed_are_retried CHECK (NOT retryable OR state = 'FAILED'),
    CONSTRAINT payments_retry_has_its_time CHECK (retryable = (next_retry_at IS NOT NULL)),
    CONSTRAINT payments_attempts_are_few CHECK (attempts BETWEEN 0 AND 7),
    CONSTRAINT payments_attempt_has_its_time CHECK ((attempts > 0) = (sent_at IS NOT NULL)),
    CONSTRAINT payments_delivery_is_known CHECK (delivery IN ('DUE', 'UNDER_WAY')),
    CONSTRAINT payments_delivery_is_processing CHECK
        (delivery IS NULL OR (state = 'PROCESSING' AND (delivery = 'DUE' OR attempts > 0))),
    CONSTRAINT payments_under_way_are_posted CHECK
        ((transaction_id IS NOT NULL)
         = (retryable OR state IN ('PROCESSING', 'UNKNOWN', 'RETURNING', 'COMPLETED', 'PERMANENTLY_FAILED'))),
    CONSTRAINT payments_over_are_given_back CHECK ((reversal_id IS NOT NULL) = (state = 'PERMANENTLY_FAILED')),
    CONSTRAINT payments_review_holds CHECK (state <> 'PENDING_REVIEW' OR review_hold_id IS NOT NULL),
    CONSTRAINT payments_incoming_is_posted CHECK (incoming_hold_id IS NULL OR transaction_id IS NOT NULL),
    CONSTRAINT payments_initiator_is_named CHECK (length(initiated_by) BETWEEN 1 AND 255),
    CONSTRAINT payments_provider_is_named CHECK (length(provider) BETWEEN 1 AND 90),
    CONSTRAINT payments_provider_ref_is_short CHECK (length(provider_ref) BETWEEN 1 AND 200),
    CONSTRAINT payments_version_counts_up CHECK (version >= 1),
    CONSTRAINT payments_time_goes_on CHECK (since >= created_at AND updated_at >= since)
) WITH (fillfactor = 70);
CREATE INDEX payments_state ON payments.payments (state, id);
CREATE INDEX payments_due ON payments.payments (next_retry_at, id) WHERE retryable AND contradicted_at IS NULL;
CREATE INDEX payments_open ON payments.payments (id)
    WHERE state IN ('PENDING_REVIEW', 'PROCESSING', 'UNKNOWN', 'RETURNING') AND contradicted_at IS NULL;

-- What happened to a payment, one line a version. The list is every change of state there is; a line that changes none
-- is something that was noted.
CREATE TABLE payments.history (
    payment_id uuid NOT NULL,
    number     integer NOT NULL,
    at         timestamptz NOT NULL,
    from_state text,
    to_state   text NOT NULL,
    cause      text NOT NULL,
    detail     text,
    CONSTRAINT history_pkey PRIMARY KEY (payment_id, number),
    CONSTRAINT history_payment_exists FOREIGN KEY (payment_id) REFERENCES payments.payments (id),
    CONSTRAINT history_begins_once CHECK ((number = 1) = (from_state IS NULL) AND number >= 1),
    CONSTRAINT history_cause_is_short CHECK (length(cause) BETWEEN 1 AND 50),
    CONSTRAINT history_detail_is_short CHECK (length(detail) BETWEEN 1 AND 500),
    CONSTRAINT history_change_is_possible CHECK (coalesce(from_state, '') = to_state OR (coalesce(from_state, '') || '>' || to_state) IN (
        '>REJECTED', '>PENDING_REVIEW', '>PROCESSING', '>FAILED',
        'PENDING_REVIEW>PROCESSING', 'PENDING_REVIEW>REJECTED', 'PENDING_REVIEW>FAILED',
        'PROCESSING>UNKNOWN', 'PROCESSING>FAILED', 'PROCESSING>COMPLETED', 'PROCESSING>PERMANENTLY_FAILED',
        'PROCESSING>RETURNING', 'UNKNOWN>PROCESSING', 'UNKNOWN>FAILED', 'UNKNOWN>COMPLETED',
        'UNKNOWN>PERMANENTLY_FAILED', 'UNKNOWN>RETURNING', 'FAILED>PROCESSING', 'FAILED>COMPLETED',
        'FAILED>UNKNOWN', 'FAILED>PERMANENTLY_FAILED', 'FAILED>RETURNING', 'RETURNING>COMPLETED',
        'RETURNING>PERMANENTLY_FAILED'))
);

-- Calls of a provider that fit no payment, or say what nobody understands: for a person. No bodies, no personal data.
CREATE TABLE payments.unmatched_callbacks (
    id             uuid PRIMARY KEY,
    provider       text NOT NULL,
    event_id       text NOT NULL,
    payment_ref    text NOT NULL,
    client_ref     text,
    status         text NOT NULL,
    amount         numeric,
    currency       text,
    problem        text NOT NULL,
    payment_id     uuid,
    received_at    timestamptz NOT NULL,
    matched_at     timestamptz,
    dismissed_at   timestamptz,
    dismissed_by   text,
    dismiss_reason text,
    CONSTRAINT unmatched_event_is_kept_once UNIQUE (provider, event_id),
    CONSTRAINT unmatched_problem_is_known CHECK
        (problem IN ('unknown_reference', 'unknown_status', 'amount_differs', 'names_differ', 'reference_differs')),
    CONSTRAINT unmatched_ref_is_short CHECK (length(payment_ref) BETWEEN 1 AND 200),
    CONSTRAINT unmatched_client_ref_is_short CHECK (length(client_ref) BETWEEN 1 AND 200),
    CONSTRAINT unmatched_status_is_short CHECK (length(status) BETWEEN 1 AND 50),
    CONSTRAINT unmatched_is_matched_later CHECK (matched_at >= received_at),
    CONSTRAINT unmatched_is_dismissed_later CHECK (dismissed_at >= received_at),
    CONSTRAINT unmatched_dismissal_is_signed CHECK
        (num_nonnulls(dismissed_at, dismissed_by, dismiss_reason) IN (0, 3)),
    CONSTRAINT unmatched_dismissal_is_short CHECK
        (length(dismissed_by) BETWEEN 1 AND 255 AND length(dismiss_reason) BETWEEN 1 AND 200)
);
CREATE INDEX unmatched_ref ON payments.unmatched_callbacks (provider, payment_ref)
    WHERE matched_at IS NULL AND dismissed_at IS NULL;
CREATE INDEX unmatched_open ON payments.unmatched_callbacks (id) WHERE matched_at IS NULL AND dismissed_at IS NULL;
CREATE INDEX unmatched_payment ON payments.unmatched_callbacks (payment_id)
    WHERE matched_at IS NULL AND dismissed_at IS NULL;
CREATE INDEX unmatched_age ON payments.unmatched_callbacks (received_at, id);

-- The history is never changed, and payments are never deleted: they are part of the books.
CREATE FUNCTION payments.keep() RETURNS trigger
LANGUAGE plpgsql
AS $$
BEGIN
    RAISE EXCEPTION 'payments.%: % is refused', TG_TABLE_NAME, TG_OP USING ERRCODE = 'restrict_violation';
END
$$;
CREATE TRIGGER history_keep BEFORE UPDATE OR DELETE ON payments.history FOR EACH ROW EXECUTE FUNCTION payments.keep();
CREATE TRIGGER history_keep_all BEFORE TRUNCATE ON payments.history EXECUTE FUNCTION payments.keep();
CREATE TRIGGER payments_keep BEFORE DELETE ON payments.payments FOR EACH ROW EXECUTE FUNCTION payments.keep();
CREATE TRIGGER payments_keep_all BEFORE TRUNCATE ON payments.payments EXECUTE FUNCTION payments.keep();

-- What a payment is about never changes, and how it ended does not either.
CREATE FUNCTION payments.keep_terms() RETURNS trigger
LANGUAGE plpgsql
AS $$
BEGIN
    IF (OLD.id, OLD.from_account_id, OLD.to_account_id, OLD.amount, OLD.currency, OLD.initiated_by, OLD.provider,
        OLD.bank_key, OLD.created_at)
       IS DISTINCT FROM
       (NEW.id, NEW.from_account_id, NEW.to_account_id, NEW.amount, NEW.currency, NEW.initiated_by, NEW.provider,
        NEW.bank_key, NEW.created_at)
       OR NEW.version <> OLD.version + 1
       OR (OLD.transaction_id IS NOT NULL AND NEW.transaction_id IS DISTINCT FROM OLD.transaction_id)
       OR (OLD.state IN ('REJECTED', 'COMPLETED', 'PERMANENTLY_FAILED') AND NEW.state <> OLD.state)
       OR NEW.attempts < OLD.attempts THEN
        RAISE EXCEPTION 'payment %: this never changes', OLD.id USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN NEW;
END
$$;
CREATE TRIGGER payments_terms BEFORE UPDATE ON payments.payments
    FOR EACH ROW EXECUTE FUNCTION payments.keep_terms();

-- Whatever a hold's end and a posting after it will lock, in the ledger's own order: the hold's account alone would be out
-- of turn. With the rights of the owner, since the application's role only reads these tables.
CREATE FUNCTION payments.lock_ledger(posted uuid, accounts uuid[]) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off
AS $$
BEGIN
    PERFORM 1 FROM ledger.transactions t WHERE t.id = posted FOR NO KEY UPDATE;
    PERFORM 1 FROM ledger.balances b WHERE b.account_id = ANY(accounts) ORDER BY b.account_id FOR NO KEY UPDATE;
END
$$;
REVOKE ALL ON FUNCTION payments.lock_ledger FROM PUBLIC;

-- Whether somebody has reversed a posting: the reversal's id, or NULL; until the commit nobody can do so.
CREATE FUNCTION payments.lock_posting(posted uuid) RETURNS uuid
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off
AS $$
BEGIN
    PERFORM 1 FROM ledger.transactions t WHERE t.id = posted FOR NO KEY UPDATE;
    RETURN (SELECT r.id FROM ledger.transactions r WHERE r.reverses_id = posted);
END
$$;
REVOKE ALL ON FUNCTION payments.lock_posting FROM PUBLIC;

-- What was missed is made up for by one run: each looks at everything that is due.
INSERT INTO duly.schedules (name, cron, misfire) VALUES
    ('payments.retry', '* * * * *', 'run_once'),
    ('payments.recover', '*/10 * * * *', 'run_once'),
    ('payments.forget-callbacks', '37 3 * * *', 'run_once');
