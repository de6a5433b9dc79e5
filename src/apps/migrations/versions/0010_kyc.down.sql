DROP INDEX ledger.seals_end;
DROP INDEX payments.unmatched_of_payment;
DELETE FROM duly.schedules WHERE name IN ('kyc.sweep', 'kyc.forget');
DROP SCHEMA kyc CASCADE;
