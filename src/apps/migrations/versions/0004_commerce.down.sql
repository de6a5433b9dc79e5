DELETE FROM duly.schedules
WHERE name IN ('PaymentExpiration', 'CartAbandonment', 'TokenCleanup', 'commerce.forget-carts');
DROP SCHEMA commerce CASCADE;
