"""What people look at: the pages, the overview, the timelines and ``duly why``. All of it stops at a limit."""

from __future__ import annotations

from duly.db import Statement
from duly.webhooks.sql_operate import DELIVERY, SUBSCRIPTION

# By a type there is no index: the newest ``scan`` of the subscription (and status) are looked through.
LIST_OF_TYPE = Statement(
    "SELECT"
    + DELIVERY
    + """FROM (SELECT n.* FROM duly.webhook_deliveries n
      WHERE n.subscription_id = CAST(:subscription_id AS uuid)
        AND n.number < coalesce(CAST(:before AS bigint), 9223372036854775807)
      ORDER BY n.number DESC LIMIT CAST(:scan AS int)) AS d
WHERE d.event_type = CAST(:event_type AS text) ORDER BY d.number DESC LIMIT CAST(:limit AS int)
"""
)
LIST_OF_TYPE_AND_STATUS = Statement(
    "SELECT"
    + DELIVERY
    + """FROM (SELECT n.* FROM duly.webhook_deliveries n
      WHERE n.subscription_id = CAST(:subscription_id AS uuid) AND n.status = CAST(:status AS text)
        AND n.number < coalesce(CAST(:before AS bigint), 9223372036854775807)
      ORDER BY n.number DESC LIMIT CAST(:scan AS int)) AS d
WHERE d.event_type = CAST(:event_type AS text) ORDER BY d.number DESC LIMIT CAST(:limit AS int)
"""
)
FIND_REACHED = Statement("""
SELECT n.number FROM duly.webhook_deliveries n
WHERE n.subscription_id = CAST(:subscription_id AS uuid)
  AND n.number < coalesce(CAST(:before AS bigint), 9223372036854775807)
ORDER BY n.number DESC OFFSET CAST(:scan AS int) - 1 LIMIT 1
""")
FIND_REACHED_OF_STATUS = Statement("""
SELECT n.number FROM duly.webhook_deliveries n
WHERE n.subscription_id = CAST(:subscription_id AS uuid) AND n.status = CAST(:status AS text)
  AND n.number < coalesce(CAST(:before AS bigint), 9223372036854775807)
ORDER BY n.number DESC OFFSET CAST(:scan AS int) - 1 LIMIT 1
""")
# A delivery is found by its subscription and event: one probe for each pair, so that no index is kept for this alone.
LIST_OF_EVENTS = Statement(
    "SELECT"
    + DELIVERY
    + """, s.url
FROM unnest(CAST(:event_ids AS uuid[])) AS e(id)
CROSS JOIN (SELECT id, url FROM duly.webhook_subscriptions
            ORDER BY id DESC OFFSET CAST(:skip AS int) LIMIT CAST(:subscriptions AS int)) AS s
CROSS JOIN LATERAL (SELECT o.* FROM duly.webhook_deliveries o
                    WHERE o.subscription_id = s.id AND o.event_id = e.id LIMIT 1) AS d
ORDER BY d.number DESC LIMIT CAST(:limit AS int)
"""
)
COUNT_SUBSCRIPTIONS = Statement("""
SELECT count(*)::int FROM (SELECT 1 FROM duly.webhook_subscriptions LIMIT CAST(:cap AS int)) AS counted
""")
LIST_ATTEMPTS_OF = Statement("""
SELECT a.delivery_id, a.number, a.started_at, a.latency_ms, a.outcome, a.http_status, a.error
FROM unnest(CAST(:ids AS uuid[])) AS d(id)
CROSS JOIN LATERAL (SELECT * FROM duly.webhook_attempts o WHERE o.delivery_id = d.id
                    ORDER BY o.number DESC LIMIT CAST(:each AS int)) AS a
ORDER BY a.started_at DESC LIMIT CAST(:limit AS int)
""")
COUNT_OF_SUBSCRIPTIONS = Statement("""
SELECT s.id, t.status, (SELECT count(*) FROM (
    SELECT 1 FROM duly.webhook_deliveries d WHERE d.subscription_id = s.id AND d.status = t.status
    LIMIT CAST(:cap AS int)) AS counted)::int
FROM unnest(CAST(:ids AS uuid[])) AS s(id) CROSS JOIN unnest(CAST(:statuses AS text[])) AS t(status)
""")
LIST_SECRETS = Statement("""
SELECT number, key_id, created_at, expires_at FROM duly.webhook_secrets
WHERE subscription_id = CAST(:id AS uuid) AND (expires_at IS NULL OR expires_at > duly.now())
ORDER BY number DESC LIMIT 10
""")
LIST_PROVIDER_SECRETS = Statement("""
SELECT number, key_id, created_at, expires_at, provider FROM duly.webhook_provider_secrets
WHERE expires_at IS NULL OR expires_at > duly.now() ORDER BY provider, number DESC LIMIT CAST(:limit AS int)
""")
FIND_ANY_SUBSCRIPTION = Statement("SELECT" + SUBSCRIPTION + "WHERE s.id = CAST(:id AS uuid)")
FIND_OLDEST_WAITING = Statement("""
SELECT d.created_at FROM duly.webhook_deliveries d
WHERE d.subscription_id = CAST(:id AS uuid) AND d.status = 'WAITING' ORDER BY d.number LIMIT 1
""")
FIND_LAST_ATTEMPT = Statement("""
SELECT a.number, a.started_at, a.latency_ms, a.outcome, a.http_status, a.error, a.address
FROM duly.webhook_attempts a WHERE a.delivery_id = CAST(:id AS uuid) ORDER BY a.number DESC LIMIT 1
""")
FIND_JOB_OF = Statement("""
SELECT id, run_at, lease_token IS NOT NULL FROM duly.jobs
WHERE entity_id = CAST(:id AS text) AND name = 'duly.deliver-webhook' ORDER BY id DESC LIMIT 1
""")
LIST_OPEN_ALERTS_OF = Statement("""
SELECT id, kind, message, count, raised_at, last_at FROM duly.alerts
WHERE kind IN ('webhook_failed', 'webhook_disabled') AND subject = CAST(:id AS text) AND resolved_at IS NULL
ORDER BY id DESC LIMIT 10
""")
# What an overview complains about: who is disabled or left alone, and whom nobody could deliver to. The clock is asked
# once, not for each of them.
READ_TROUBLE = Statement("""
SELECT s.id, s.url, s.status, s.disabled_reason, s.failures, s.failing_since,
       CASE WHEN s.status = 'ACTIVE' AND s.open_until > (SELECT duly.now()) THEN s.open_until END AS open_until,
       a.message AS alert,
       CASE WHEN a.id IS NULL THEN 0 ELSE (SELECT count(*) FROM (
           SELECT 1 FROM duly.webhook_deliveries d
           WHERE d.subscription_id = s.id AND d.status = 'PERMANENTLY_FAILED' LIMIT CAST(:cap AS int)) AS counted)::int
       END AS failed
FROM duly.webhook_subscriptions s
LEFT JOIN duly.alerts a ON a.kind = 'webhook_failed' AND a.subject = CAST(s.id AS text) AND a.resolved_at IS NULL
WHERE s.status <> 'DELETED'
  AND (s.status = 'DISABLED' OR (s.status = 'ACTIVE' AND s.open_until > (SELECT duly.now())) OR a.id IS NOT NULL)
ORDER BY s.failing_since NULLS LAST, s.id LIMIT CAST(:limit AS int)
""")
