DELETE FROM duly.console_sessions WHERE NOT roles <@ ARRAY['ADMINISTRATOR'::text, 'OPERATOR'::text];
ALTER TABLE duly.console_sessions DROP CONSTRAINT console_sessions_has_a_role, ADD CONSTRAINT console_sessions_has_a_role
    CHECK (cardinality(roles) > 0 AND roles <@ ARRAY['ADMINISTRATOR'::text, 'OPERATOR'::text]);
