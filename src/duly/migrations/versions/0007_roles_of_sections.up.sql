-- Which roles there are is for the sections of the applications to say; a session holds those that one of them asks for.
ALTER TABLE duly.console_sessions DROP CONSTRAINT console_sessions_has_a_role, ADD CONSTRAINT console_sessions_has_a_role
    CHECK (cardinality(roles) BETWEEN 1 AND 50 AND array_position(roles, NULL) IS NULL);
