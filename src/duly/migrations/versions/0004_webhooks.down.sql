DELETE FROM duly.schedules WHERE name IN ('duly.sweep-webhooks', 'duly.forget-webhooks');
DELETE FROM duly.jobs
WHERE name IN ('duly.sweep-webhooks', 'duly.forget-webhooks', 'duly.deliver-webhook', 'duly.resume-webhooks',
               'consumer:duly.webhooks');
DELETE FROM duly.consumers WHERE name = 'duly.webhooks';
DELETE FROM duly.alerts WHERE kind IN ('webhook_failed', 'webhook_disabled');
ALTER TABLE duly.alerts DROP CONSTRAINT alerts_kind_is_known, ADD CONSTRAINT alerts_kind_is_known CHECK (kind IN
    ('event_failed', 'dead_letter', 'schedule_broken', 'occurrences_missed'));
DROP TABLE duly.received_webhooks;
DROP TABLE duly.webhook_provider_secrets;
DROP TABLE duly.webhook_attempts;
DROP TABLE duly.webhook_deliveries;
DROP TABLE duly.webhook_secrets;
DROP TABLE duly.webhook_subscriptions;
