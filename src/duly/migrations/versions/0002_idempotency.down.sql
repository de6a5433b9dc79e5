DELETE FROM duly.schedules WHERE name = 'duly.forget-idempotency-keys';
DROP TABLE duly.idempotency_keys;
