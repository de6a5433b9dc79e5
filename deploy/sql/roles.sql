-- The rights of a role that runs the applications, and does not own them. Run it as the owner after every migration:
--   CREATE ROLE duly_app LOGIN;   -- once; give it a password, or a certificate
--   psql --set ON_ERROR_STOP=1 --file deploy/sql/roles.sql "$OWNER_DATABASE_URL"
-- The schedules that make and drop partitions (duly.create-partitions, duly.drop-history) need the owner: let one worker
-- run as the owner, and the others, the API above all, as this role.
-- The role reads and writes everything but the ledger: that it reads, and writes through its functions alone.
DO $$
DECLARE
    found name;
BEGIN
    FOR found IN SELECT nspname FROM pg_namespace
                 WHERE nspname !~ '^pg_' AND nspname NOT IN ('information_schema', 'public') ORDER BY 1 LOOP
        EXECUTE format('GRANT USAGE ON SCHEMA %I TO duly_app', found);
        EXECUTE format('GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA %I TO duly_app', found);
        EXECUTE format('GRANT SELECT ON ALL TABLES IN SCHEMA %I TO duly_app', found);
        EXECUTE format('GRANT USAGE ON ALL SEQUENCES IN SCHEMA %I TO duly_app', found);
        IF found <> 'ledger' THEN
            EXECUTE format('GRANT INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA %I TO duly_app', found);
        END IF;
    END LOOP;
END
$$;
GRANT INSERT ON ledger.seals TO duly_app;
-- Why a case was opened, and what happened to it, is written once: not even the role that runs compliance changes it.
REVOKE UPDATE ON compliance.alerts, compliance.case_events FROM duly_app;
