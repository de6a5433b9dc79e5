DELETE FROM duly.schedules WHERE name IN ('payments.retry', 'payments.recover', 'payments.forget-callbacks');
DROP SCHEMA payments CASCADE;
