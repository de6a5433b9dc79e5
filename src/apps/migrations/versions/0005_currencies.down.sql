DELETE FROM duly.schedules WHERE name IN ('CurrencyRateSync', 'currencies.forget-tables');
DROP SCHEMA currencies CASCADE;
