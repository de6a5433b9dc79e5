DELETE FROM duly.schedules WHERE name IN ('ledger.seal', 'ledger.forget-holds');
DROP SCHEMA ledger CASCADE;
