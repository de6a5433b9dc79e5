"""The chaos application's own tables, and triggers that witness every lease from inside the database.

No table has a constraint against a second row: what must not happen twice has to be able to, or it would not be seen.
"""

from __future__ import annotations

TABLES = """
CREATE SCHEMA chaos;
CREATE TABLE chaos.accounts (id text PRIMARY KEY, seq integer NOT NULL DEFAULT 0);
CREATE TABLE chaos.orders (id bigserial PRIMARY KEY, op text NOT NULL, account text NOT NULL, seq integer NOT NULL,
                           extra text NOT NULL, poison boolean NOT NULL, nonce text NOT NULL);
CREATE TABLE chaos.cancels (id bigserial PRIMARY KEY, op text NOT NULL, target text NOT NULL, n integer NOT NULL);
CREATE TABLE chaos.nudges (id bigserial PRIMARY KEY, op text NOT NULL, entity text NOT NULL, job_id bigint NOT NULL,
                           run_at timestamptz NOT NULL, pending integer NOT NULL);
CREATE TABLE chaos.notes (id bigserial PRIMARY KEY, op text NOT NULL);
CREATE TABLE chaos.effects (
    id bigserial PRIMARY KEY, kind text NOT NULL, key text NOT NULL, aggregate text, seq integer, saw integer,
    job_id bigint, began_at timestamptz, due_at timestamptz, business_at timestamptz NOT NULL DEFAULT duly.now(),
    at timestamptz NOT NULL DEFAULT clock_timestamp());
CREATE INDEX effects_order ON chaos.effects (aggregate, seq) WHERE kind = 'ordered';
CREATE INDEX effects_key ON chaos.effects (key, kind);
CREATE TABLE chaos.trace (
    seq bigserial PRIMARY KEY, what text NOT NULL, job_id bigint NOT NULL, name text NOT NULL, token bigint NOT NULL,
    old_token bigint, was_live boolean, is_early boolean, worker text, outcome text,
    at timestamptz NOT NULL DEFAULT clock_timestamp());
INSERT INTO chaos.accounts (id) SELECT 'a' || n FROM generate_series(1, 12) AS n;
INSERT INTO chaos.accounts (id) SELECT 'held' || n FROM generate_series(1, 200) AS n;
"""

TRIGGERS = """
CREATE FUNCTION chaos.note_claim() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO chaos.trace (what, job_id, name, token, old_token, was_live, is_early, worker)
    VALUES ('claim', NEW.id, NEW.name, NEW.lease_token, OLD.lease_token,
            OLD.lease_token IS NOT NULL AND OLD.lease_expires_at >= clock_timestamp(), OLD.run_at > duly.now(),
            NEW.leased_by);
    RETURN NULL;
END $$;
CREATE TRIGGER chaos_note_claim AFTER UPDATE OF lease_token ON duly.jobs
    FOR EACH ROW WHEN (NEW.lease_token IS NOT NULL AND NEW.lease_token IS DISTINCT FROM OLD.lease_token
                       AND NEW.claimed_at IS NOT NULL)  -- without it, its holder puts it back: jobs/apart.py
    EXECUTE FUNCTION chaos.note_claim();
CREATE FUNCTION chaos.note_acceptance() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO chaos.trace (what, job_id, name, token, worker, outcome)
    VALUES ('accept', NEW.job_id, NEW.name, NEW.lease_token, NEW.worker, NEW.outcome);
    RETURN NULL;
END $$;
CREATE TRIGGER chaos_note_acceptance AFTER INSERT ON duly.executions
    FOR EACH ROW EXECUTE FUNCTION chaos.note_acceptance();
"""
