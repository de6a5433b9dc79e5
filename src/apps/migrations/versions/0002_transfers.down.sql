DELETE FROM duly.schedules WHERE name IN ('transfers.expire-pending', 'transfers.forget-notices');
DROP SCHEMA transfers CASCADE;
