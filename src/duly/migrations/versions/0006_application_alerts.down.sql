DELETE FROM duly.alerts WHERE kind = 'application';
ALTER TABLE duly.alerts DROP CONSTRAINT alerts_kind_is_known, ADD CONSTRAINT alerts_kind_is_known CHECK (kind IN
    ('event_failed', 'dead_letter', 'schedule_broken', 'occurrences_missed', 'webhook_failed', 'webhook_disabled'));
