DROP INDEX duly.audit_discarded;
