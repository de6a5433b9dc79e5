DELETE FROM duly.schedules WHERE name = 'transfers.expire-pending';
DROP SCHEMA transfers CASCADE;
