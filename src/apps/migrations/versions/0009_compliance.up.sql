CREATE SCHEMA compliance;

-- Why somebody is to look: what the rules said, with the facts as they were, so that it can be read for as long as the
-- case is kept, and not only for as long as the log of decisions is. One for each transaction, and for each held payment.
CREATE TABLE compliance.alerts (
    id               uuid PRIMARY KEY,
    source           text NOT NULL,
    payment_id       uuid,
    transaction_id   uuid,
    decision_id      uuid,
    rule_set_id      text NOT NULL,
    rule_set_version integer,
    outcome          text NOT NULL,
    severity         text NOT NULL,
    facts            jsonb NOT NULL,
    matched          jsonb NOT NULL,
    incomplete       jsonb NOT NULL,
    trace            jsonb NOT NULL,
    raised_at        timestamptz NOT NULL,
    CONSTRAINT alerts_source_is_known CHECK (source IN ('PAYMENT_REVIEW', 'AML')),
    CONSTRAINT alerts_outcome_is_known CHECK (outcome IN ('REVIEW', 'REJECT')),
    CONSTRAINT alerts_severity_is_known CHECK (severity IN ('LOW', 'MEDIUM', 'HIGH', 'CRITICAL')),
    CONSTRAINT alerts_are_about_something CHECK
        (CASE source WHEN 'AML' THEN transaction_id IS NOT NULL ELSE payment_id IS NOT NULL END)
);
CREATE UNIQUE INDEX alerts_of_a_transaction ON compliance.alerts (transaction_id) WHERE source = 'AML';
CREATE UNIQUE INDEX alerts_of_a_payment ON compliance.alerts (payment_id) WHERE source = 'PAYMENT_REVIEW';

-- What a person decides about. What is true of a status is said here, and so are four eyes: a case that needs two has two
-- different ones, neither of them the payment's initiator, and the second not who reopened it.
CREATE TABLE compliance.cases (
    id                uuid PRIMARY KEY,
    kind              text NOT NULL,
    status            text NOT NULL,
    severity          text NOT NULL,
    alert_id          uuid NOT NULL,
    payment_id        uuid,
    transaction_id    uuid,
    amount            bigint NOT NULL,
    currency          text NOT NULL,
    initiated_by      text,
    needs_two         boolean NOT NULL,
    assignee          text,
    due_at            timestamptz NOT NULL,
    overdue_at        timestamptz,
    proposed_decision text,
    proposed_code     text,
    proposed_reason   text,
    proposed_by       text,
    proposed_at       timestamptz,
    decision          text,
    reason_code       text,
    reason            text,
    effect            text,
    resolved_by       text,
    confirmed_by      text,
    ended_at          timestamptz,
    reopens_id        uuid,
    reopened_by       text,
    version           integer NOT NULL DEFAULT 1,
    created_at        timestamptz NOT NULL,
    updated_at        timestamptz NOT NULL,
    CONSTRAINT cases_alert_exists FOREIGN KEY (alert_id) REFERENCES compliance.alerts (id),
    CONSTRAINT cases_reopened_exists FOREIGN KEY (reopens_id) REFERENCES compliance.cases (id),
    CONSTRAINT cases_are_reopened_once UNIQUE (reopens_id),
    CONSTRAINT cases_kind_is_known CHECK (kind IN ('PAYMENT_REVIEW', 'AML')),
    CONSTRAINT cases_status_is_known CHECK (status IN ('OPEN', 'PROPOSED', 'RESOLVED', 'EXPIRED')),
    CONSTRAINT cases_severity_is_known CHECK (severity IN ('LOW', 'MEDIUM', 'HIGH', 'CRITICAL')),
    CONSTRAINT cases_are_about_something CHECK
        (CASE kind WHEN 'AML' THEN transaction_id IS NOT NULL ELSE payment_id IS NOT NULL END),
    CONSTRAINT cases_amount_is_positive CHECK (amount > 0),
    CONSTRAINT cases_currency_is_a_code CHECK (currency ~ '^[A-Z]{3}$'),
    CONSTRAINT cases_assignee_is_named CHECK (length(assignee) BETWEEN 1 AND 255),
    CONSTRAINT cases_proposal_is_whole CHECK
        (num_nonnulls(proposed_decision, proposed_code, proposed_reason, proposed_by, proposed_at)
         = CASE status WHEN 'PROPOSED' THEN 5 ELSE 0 END),
    CONSTRAINT cases_resolution_is_whole CHECK
        (num_nonnulls(decision, reason_code, reason, effect, resolved_by)
         = CASE status WHEN 'RESOLVED' THEN 5 ELSE 0 END),
    CONSTRAINT cases_end_has_its_time CHECK ((status IN ('RESOLVED', 'EXPIRED')) = (ended_at IS NOT NULL)),
    CONSTRAINT cases_decision_is_known CHECK
        (decision IN ('APPROVE', 'REJECT') AND proposed_decision IN ('APPROVE', 'REJECT')),
    CONSTRAINT cases_reason_is_short CHECK (length(reason) <= 4000 AND length(proposed_reason) <= 4000),
    CONSTRAINT cases_effect_is_known CHECK (effect IN
        ('RELEASED', 'RELEASE_FAILED', 'HOLD_VOIDED', 'REVERSED', 'ALREADY_REVERSED', 'RETURNING', 'MONEY_STAYS',
         'NOTHING_HELD')),
    CONSTRAINT cases_large_are_confirmed CHECK (status <> 'RESOLVED' OR needs_two = (confirmed_by IS NOT NULL)),
    CONSTRAINT cases_confirmed_are_resolved CHECK (status = 'RESOLVED' OR confirmed_by IS NULL),
    CONSTRAINT cases_proposed_need_two CHECK (status <> 'PROPOSED' OR needs_two),
    CONSTRAINT cases_confirmed_by_another CHECK
        (confirmed_by <> resolved_by AND (reopened_by IS NULL OR confirmed_by <> reopened_by)),
    CONSTRAINT cases_are_not_ones_own CHECK
        (initiated_by NOT IN (coalesce(resolved_by, ''), coalesce(confirmed_by, ''), coalesce(proposed_by, ''))),
    CONSTRAINT cases_reopening_is_signed CHECK ((reopens_id IS NULL) = (reopened_by IS NULL)),
    CONSTRAINT cases_expire_with_payments CHECK (status <> 'EXPIRED' OR kind = 'PAYMENT_REVIEW'),
    CONSTRAINT cases_version_counts_up CHECK (version >= 1),
    CONSTRAINT cases_time_goes_on CHECK (updated_at >= created_at AND ended_at >= created_at)
) WITH (fillfactor = 80);
CREATE INDEX cases_by_status ON compliance.cases (status, id);
CREATE INDEX cases_by_kind ON compliance.cases (kind, id);
CREATE INDEX cases_by_kind_and_status ON compliance.cases (kind, status, id);
CREATE INDEX cases_by_severity ON compliance.cases (severity, id);
CREATE INDEX cases_by_severity_and_status ON compliance.cases (severity, status, id);
CREATE INDEX cases_by_assignee ON compliance.cases (assignee, id) WHERE assignee IS NOT NULL;
CREATE INDEX cases_by_assignee_and_status ON compliance.cases (assignee, status, id) WHERE assignee IS NOT NULL;
CREATE INDEX cases_overdue ON compliance.cases (id) WHERE overdue_at IS NOT NULL AND status IN ('OPEN', 'PROPOSED');
CREATE INDEX cases_open ON compliance.cases (id) WHERE status IN ('OPEN', 'PROPOSED');
CREATE UNIQUE INDEX cases_open_once ON compliance.cases (alert_id) WHERE status IN ('OPEN', 'PROPOSED');
CREATE INDEX cases_of_an_alert ON compliance.cases (alert_id);
CREATE INDEX cases_of_a_payment ON compliance.cases (payment_id) WHERE payment_id IS NOT NULL;
CREATE INDEX cases_of_a_transaction ON compliance.cases (transaction_id) WHERE transaction_id IS NOT NULL;
CREATE INDEX cases_ended ON compliance.cases (ended_at, id) WHERE status IN ('RESOLVED', 'EXPIRED');

-- What happened to a case, one line a version.
CREATE TABLE compliance.case_events (
    case_id uuid NOT NULL,
    number  integer NOT NULL,
    at      timestamptz NOT NULL,
    actor   text NOT NULL,
    kind    text NOT NULL,
    detail  jsonb NOT NULL,
    CONSTRAINT case_events_pkey PRIMARY KEY (case_id, number),
    CONSTRAINT case_events_case_exists FOREIGN KEY (case_id) REFERENCES compliance.cases (id),
    CONSTRAINT case_events_begin_once CHECK ((number = 1) = (kind = 'OPENED') AND number >= 1),
    CONSTRAINT case_events_actor_is_named CHECK (length(actor) BETWEEN 1 AND 255),
    CONSTRAINT case_events_kind_is_known CHECK (kind IN
        ('OPENED', 'ASSIGNED', 'CLAIMED', 'UNCLAIMED', 'COMMENTED', 'EVIDENCE_ADDED', 'OVERDUE', 'PROPOSED',
         'PROPOSAL_REFUSED', 'PROPOSAL_WITHDRAWN', 'RESOLUTION_REFUSED', 'RESOLVED', 'EXPIRED')),
    CONSTRAINT case_events_detail_is_short CHECK (pg_column_size(detail) <= 30000)
);
CREATE UNIQUE INDEX case_events_end_once ON compliance.case_events (case_id) WHERE kind IN ('RESOLVED', 'EXPIRED');

-- What was written stays as it was. Only the clean-up deletes, and says so in its transaction; never what is open.
CREATE FUNCTION compliance.keep() RETURNS trigger
LANGUAGE plpgsql
AS $$
BEGIN
    IF TG_OP = 'DELETE' AND current_setting('compliance.forgetting', true) = 'on' THEN
        RETURN OLD;
    END IF;
    RAISE EXCEPTION 'compliance.%: % is refused', TG_TABLE_NAME, TG_OP USING ERRCODE = 'restrict_violation';
END
$$;
CREATE TRIGGER alerts_keep BEFORE UPDATE OR DELETE ON compliance.alerts
    FOR EACH ROW EXECUTE FUNCTION compliance.keep();
CREATE TRIGGER alerts_keep_all BEFORE TRUNCATE ON compliance.alerts EXECUTE FUNCTION compliance.keep();
CREATE TRIGGER case_events_keep BEFORE UPDATE OR DELETE ON compliance.case_events
    FOR EACH ROW EXECUTE FUNCTION compliance.keep();
CREATE TRIGGER case_events_keep_all BEFORE TRUNCATE ON compliance.case_events EXECUTE FUNCTION compliance.keep();
CREATE TRIGGER cases_keep_all BEFORE TRUNCATE ON compliance.cases EXECUTE FUNCTION compliance.keep();

-- A case that has ended never changes, and what an open one is about does not either; that it needs two officers is not
-- taken back.
CREATE FUNCTION compliance.keep_case() RETURNS trigger
LANGUAGE plpgsql
AS $$
BEGIN
    IF TG_OP = 'DELETE' THEN
        IF current_setting('compliance.forgetting', true) = 'on' AND OLD.status IN ('RESOLVED', 'EXPIRED') THEN
            RETURN OLD;
        END IF;
        RAISE EXCEPTION 'compliance.cases: DELETE is refused' USING ERRCODE = 'restrict_violation';
    END IF;
    IF OLD.status IN ('RESOLVED', 'EXPIRED') THEN
        RAISE EXCEPTION 'case % has ended, and never changes', OLD.id USING ERRCODE = 'restrict_violation';
    END IF;
    IF (OLD.id, OLD.kind, OLD.severity, OLD.alert_id, OLD.payment_id, OLD.transaction_id, OLD.amount, OLD.currency,
        OLD.initiated_by, OLD.due_at, OLD.reopens_id, OLD.reopened_by, OLD.created_at)
       IS DISTINCT FROM
       (NEW.id, NEW.kind, NEW.severity, NEW.alert_id, NEW.payment_id, NEW.transaction_id, NEW.amount, NEW.currency,
        NEW.initiated_by, NEW.due_at, NEW.reopens_id, NEW.reopened_by, NEW.created_at)
       OR NEW.version <> OLD.version + 1
       OR (OLD.needs_two AND NOT NEW.needs_two)
       OR (OLD.overdue_at IS NOT NULL AND NEW.overdue_at IS DISTINCT FROM OLD.overdue_at) THEN
        RAISE EXCEPTION 'case %: this never changes', OLD.id USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN NEW;
END
$$;
CREATE TRIGGER cases_keep BEFORE UPDATE OR DELETE ON compliance.cases
    FOR EACH ROW EXECUTE FUNCTION compliance.keep_case();

-- Nothing is added to the timeline of a case after its end.
CREATE FUNCTION compliance.keep_end() RETURNS trigger
LANGUAGE plpgsql
AS $$
BEGIN
    IF EXISTS (SELECT 1 FROM compliance.case_events e
               WHERE e.case_id = NEW.case_id AND e.kind IN ('RESOLVED', 'EXPIRED')) THEN
        RAISE EXCEPTION 'case % has ended: nothing is added to its timeline', NEW.case_id
            USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN NEW;
END
$$;
CREATE TRIGGER case_events_end BEFORE INSERT ON compliance.case_events
    FOR EACH ROW EXECUTE FUNCTION compliance.keep_end();

-- The rules on transactions ask for facts that the screening measures in the journal, as of the moment of each transaction:
-- they are plain fields now, and no counts of a stream that nobody writes. Rules, lists and other settings stay.
INSERT INTO decisions.snapshots
    (id, rule_set_id, version, settings, rule_ids, rule_versions, list_ids, list_versions, reason, created_by,
     created_at)
SELECT duly.uuid7(), s.rule_set_id, s.version + 1,
       s.settings || jsonb_build_object(
           'fields', (s.settings -> 'fields') || f.fields,
           'velocity', coalesce((SELECT jsonb_agg(v ORDER BY n)
                                 FROM jsonb_array_elements(s.settings -> 'velocity') WITH ORDINALITY AS g(v, n)
                                 WHERE NOT f.fields ? (v ->> 'name')), '[]')),
       s.rule_ids, s.rule_versions, s.list_ids, s.list_versions, 'facts measured in the journal', 'duly', duly.now()
FROM decisions.rule_sets r
JOIN decisions.snapshots s ON s.id = r.snapshot_id
CROSS JOIN (SELECT CAST('{
    "transactionId": "string", "reference": "string", "amount": "decimal", "currency": "string",
    "entryCount": "integer", "accounts": "strings", "fromAccount": "string", "toAccount": "string",
    "postedAt": "instant",
    "transactions1h": "integer", "transactions24h": "integer", "transactions7d": "integer",
    "moved1h": "decimal", "moved24h": "decimal", "moved7d": "decimal",
    "receipts1h": "integer", "receipts24h": "integer", "receipts7d": "integer",
    "received1h": "decimal", "received24h": "decimal", "received7d": "decimal",
    "counterparties7d": "integer"}' AS jsonb)) AS f(fields)
WHERE r.id = 'aml-screening';
UPDATE decisions.rule_sets r SET version = s.version, snapshot_id = s.id, updated_at = duly.now()
FROM decisions.snapshots s
WHERE r.id = 'aml-screening' AND s.rule_set_id = r.id AND s.version = r.version + 1;

-- What was missed is made up for by one run: each looks at everything.
INSERT INTO duly.schedules (name, cron, misfire) VALUES
    ('compliance.recover', '*/10 * * * *', 'run_once'),
    ('compliance.forget', '53 3 * * *', 'run_once');
