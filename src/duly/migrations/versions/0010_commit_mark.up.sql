-- The transaction's id, and since when the server has counted without a crash. The id alone says nothing after a crash:
-- one that had not reached the disk is given away again, and whoever gets it may commit. A crash empties the server's
-- statistics, and so does becoming the primary; a clean restart keeps them. NULL when nothing was written.
CREATE FUNCTION duly.commit_mark() RETURNS text LANGUAGE sql VOLATILE
AS $$
    SELECT CAST(pg_current_xact_id_if_assigned() AS text) || ' '
        || CAST(extract(epoch FROM pg_stat_get_bgwriter_stat_reset_time()) AS text)
$$;
-- committed, aborted, in progress; lost: the id is nobody's any more; crashed: it may be somebody else's. NULL: too old.
CREATE FUNCTION duly.commit_outcome(mark text) RETURNS text LANGUAGE plpgsql VOLATILE
AS $$
DECLARE
    status text;
BEGIN
    BEGIN
        status := pg_xact_status(CAST(split_part(mark, ' ', 1) AS xid8));
    EXCEPTION WHEN invalid_parameter_value THEN  -- it lies in the future
        RETURN 'lost';
    END;
    IF status = 'committed' AND split_part(mark, ' ', 2)
            <> CAST(extract(epoch FROM pg_stat_get_bgwriter_stat_reset_time()) AS text) THEN
        RETURN 'crashed';
    END IF;
    RETURN status;
END $$;
