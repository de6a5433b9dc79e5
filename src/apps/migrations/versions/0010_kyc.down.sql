DELETE FROM duly.schedules WHERE name IN ('kyc.sweep', 'kyc.forget');
DROP SCHEMA kyc CASCADE;
