DELETE FROM duly.schedules WHERE name = 'duly.forget-console-sessions';
DROP TABLE duly.console_sessions;
