CREATE SCHEMA quality;

CREATE TABLE quality.nonconformities (
    id          uuid PRIMARY KEY,
    supplier_id text NOT NULL,
    severity    text NOT NULL,
    description text NOT NULL,
    status      text NOT NULL DEFAULT 'OPEN',
    created_by  text NOT NULL,
    created_at  timestamptz NOT NULL,
    closed_by   text,
    closed_at   timestamptz,
    CONSTRAINT nonconformities_severity_is_known CHECK (severity IN ('LOW', 'MEDIUM', 'HIGH', 'CRITICAL')),
    CONSTRAINT nonconformities_status_is_known CHECK (status IN ('OPEN', 'CLOSED')),
    CONSTRAINT nonconformities_closing_is_whole
        CHECK ((status = 'CLOSED') = (closed_at IS NOT NULL) AND (closed_at IS NULL) = (closed_by IS NULL))
);
CREATE INDEX nonconformities_supplier ON quality.nonconformities (supplier_id, id);
CREATE INDEX nonconformities_status ON quality.nonconformities (status, severity, id);

-- One row for each event, never changed: the trail of an entity.
CREATE TABLE quality.audit_log (
    id          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    event_id    uuid NOT NULL,
    actor       text NOT NULL,
    action      text NOT NULL,
    entity_type text NOT NULL,
    entity_id   text NOT NULL,
    meta_json   jsonb NOT NULL,
    at          timestamptz NOT NULL
);
CREATE FUNCTION quality.keep_audit() RETURNS trigger
LANGUAGE plpgsql
AS $$
BEGIN
    RAISE EXCEPTION 'quality.audit_log is insert-only: % is refused', TG_OP USING ERRCODE = 'restrict_violation';
END
$$;
CREATE TRIGGER audit_log_keep BEFORE UPDATE OR DELETE ON quality.audit_log
    FOR EACH ROW EXECUTE FUNCTION quality.keep_audit();
CREATE TRIGGER audit_log_keep_all BEFORE TRUNCATE ON quality.audit_log
    FOR EACH STATEMENT EXECUTE FUNCTION quality.keep_audit();
CREATE UNIQUE INDEX audit_log_event ON quality.audit_log (event_id);
CREATE INDEX audit_log_entity ON quality.audit_log (entity_type, entity_id, at, event_id);
