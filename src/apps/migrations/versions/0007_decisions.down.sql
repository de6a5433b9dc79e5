DELETE FROM duly.schedules WHERE name IN ('decisions.keep-partitions', 'decisions.forget');
DROP SCHEMA decisions CASCADE;
