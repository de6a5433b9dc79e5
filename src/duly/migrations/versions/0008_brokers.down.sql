DELETE FROM duly.schedules WHERE name = 'duly.forget-received';
DELETE FROM duly.jobs WHERE name = 'duly.forget-received';
DELETE FROM duly.processes WHERE kind = 'receiver';
ALTER TABLE duly.processes DROP CONSTRAINT processes_kind_is_known, ADD CONSTRAINT processes_kind_is_known
    CHECK (kind IN ('worker', 'relay', 'scheduler'));
-- What still waits finds its event where it looks for it after this.
INSERT INTO duly.events (id, seq, type, topic, aggregate_id, payload, headers, created_at, published_at, attempts)
SELECT DISTINCT ON (r.id) r.id, nextval(pg_get_serial_sequence('duly.outbox', 'seq')), r.type, r.topic, r.aggregate_id,
       r.payload, r.headers, r.created_at, r.received_at, 0
FROM duly.received r
WHERE r.id IN (SELECT event_id FROM duly.jobs UNION ALL SELECT event_id FROM duly.dead_letters)
  AND NOT EXISTS (SELECT 1 FROM duly.events e WHERE e.id = r.id)
ORDER BY r.id, r.received_at;
DROP TABLE duly.received, duly.cursors;
ALTER TABLE duly.consumers DROP COLUMN via, DROP COLUMN via_since;
