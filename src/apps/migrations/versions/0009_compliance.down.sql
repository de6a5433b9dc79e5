DELETE FROM duly.schedules WHERE name IN ('compliance.recover', 'compliance.forget');
DROP SCHEMA compliance CASCADE;
