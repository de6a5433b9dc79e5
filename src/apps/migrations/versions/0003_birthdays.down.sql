DELETE FROM duly.schedules WHERE name IN
    ('birthdays.claim', 'birthdays.recover', 'birthdays.recheck-zones', 'birthdays.forget-events');
DROP SCHEMA birthdays CASCADE;
DROP SCHEMA users CASCADE;
