"""The statements of subscriptions, of the delivery log, and of what is received."""

from __future__ import annotations

from duly.db import Statement

# --------------------------------------------------------------------------------------------------- subscriptions

# One at a time changes who wants what: each must see what the last one left.
LOCK_PATTERNS = Statement("SELECT pg_advisory_xact_lock(hashtextextended('duly.webhooks patterns', 0)) IS NULL")
# The relay makes jobs for these; without subscriptions it makes none. More patterns than a consumer may have: all.
KEEP_PATTERNS = Statement("""
INSERT INTO duly.consumers (name, patterns, ordered, enabled, registered_at)
SELECT 'duly.webhooks', CASE WHEN cardinality(wanted.patterns) BETWEEN 1 AND 100 THEN wanted.patterns ELSE '{*}' END,
       false, cardinality(wanted.patterns) > 0, duly.now()
FROM (SELECT ARRAY(SELECT DISTINCT p FROM duly.webhook_subscriptions s CROSS JOIN unnest(s.patterns) AS p
                   WHERE s.status <> 'DELETED' ORDER BY p) AS patterns) AS wanted
ON CONFLICT (name) DO UPDATE SET patterns = excluded.patterns, enabled = excluded.enabled
""")

SUBSCRIPTION = """
    s.id, s.owner, s.url, s.description, s.patterns, s.status, s.max_in_flight, s.timeout_seconds, s.failures,
    s.failing_since, s.open_until, s.disabled_reason, s.version, s.created_at, s.updated_at,
    ARRAY(SELECT k.number FROM duly.webhook_secrets k
          WHERE k.subscription_id = s.id AND (k.expires_at IS NULL OR k.expires_at > duly.now())
          ORDER BY k.number DESC) AS secrets
FROM duly.webhook_subscriptions s
"""
ADD_SUBSCRIPTION = Statement("""
INSERT INTO duly.webhook_subscriptions
    (id, owner, url, description, patterns, max_in_flight, timeout_seconds, created_at, updated_at)
VALUES (CAST(:id AS uuid), CAST(:owner AS text), CAST(:url AS text), CAST(:description AS text),
        CAST(:patterns AS text[]), CAST(:max_in_flight AS smallint), CAST(:timeout_seconds AS smallint), duly.now(),
        duly.now())
""")
FIND_SUBSCRIPTION = Statement("SELECT" + SUBSCRIPTION + "WHERE s.id = CAST(:id AS uuid) AND s.status <> 'DELETED'")
LOCK_SUBSCRIPTION = Statement(
    "SELECT" + SUBSCRIPTION + "WHERE s.id = CAST(:id AS uuid) AND s.status <> 'DELETED' FOR NO KEY UPDATE OF s"
)
_NEWEST_SUBSCRIPTION_FIRST = """
  AND s.id < coalesce(CAST(:before AS uuid), 'ffffffff-ffff-ffff-ffff-ffffffffffff')
ORDER BY s.id DESC LIMIT CAST(:limit AS int)
"""
LIST_SUBSCRIPTIONS = Statement("SELECT" + SUBSCRIPTION + "WHERE s.status <> 'DELETED'" + _NEWEST_SUBSCRIPTION_FIRST)
LIST_OWN_SUBSCRIPTIONS = Statement(
    "SELECT"
    + SUBSCRIPTION
    + "WHERE s.status <> 'DELETED' AND s.owner = CAST(:owner AS text)"
    + _NEWEST_SUBSCRIPTION_FIRST
)
COUNT_OWN_SUBSCRIPTIONS = Statement("""
SELECT count(*)::int FROM duly.webhook_subscriptions WHERE owner = CAST(:owner AS text) AND status <> 'DELETED'
""")
CHANGE_SUBSCRIPTION = Statement("""
UPDATE duly.webhook_subscriptions SET url = CAST(:url AS text), description = CAST(:description AS text),
    patterns = CAST(:patterns AS text[]), max_in_flight = CAST(:max_in_flight AS smallint),
    timeout_seconds = CAST(:timeout_seconds AS smallint), status = CAST(:status AS text),
    failures = CAST(:failures AS int), failing_since = CAST(:failing_since AS timestamptz),
    open_until = CAST(:open_until AS timestamptz), disabled_reason = CAST(:disabled_reason AS text),
    version = version + 1, updated_at = duly.now()
WHERE id = CAST(:id AS uuid)
""")
RESOLVE_ALERTS = Statement("""
UPDATE duly.alerts SET resolved_at = duly.now()
WHERE kind = ANY(CAST(:kinds AS text[])) AND subject = CAST(:id AS text) AND resolved_at IS NULL
""")
WRITE_AUDIT = Statement("""
INSERT INTO duly.audit (at, actor, action, subject, reason, before, after)
VALUES (duly.now(), CAST(:actor AS text), CAST(:action AS text), CAST(:subject AS text), CAST(:reason AS text),
        CAST(CAST(:before AS text) AS jsonb), CAST(CAST(:after AS text) AS jsonb))
""")

# --------------------------------------------------------------------------------------------------------- secrets

# The one before the current one ends with its overlap, and whatever was older ends now: two are valid at most.
END_SECRETS = Statement("""
UPDATE duly.webhook_secrets SET expires_at =
    CASE WHEN expires_at IS NULL THEN duly.now() + make_interval(secs => CAST(:overlap_seconds AS float8))
         ELSE least(expires_at, duly.now()) END
WHERE subscription_id = CAST(:id AS uuid) AND (expires_at IS NULL OR expires_at > duly.now())
""")
NEXT_SECRET = Statement("""
SELECT coalesce(max(number), 0) + 1 FROM duly.webhook_secrets WHERE subscription_id = CAST(:id AS uuid)
""")
ADD_SECRET = Statement("""
INSERT INTO duly.webhook_secrets (subscription_id, number, key_id, sealed, created_at)
VALUES (CAST(:id AS uuid), CAST(:number AS int), CAST(:key_id AS text), CAST(:sealed AS bytea), duly.now())
""")
DROP_SECRETS = Statement("DELETE FROM duly.webhook_secrets WHERE subscription_id = CAST(:id AS uuid)")
END_PROVIDER_SECRETS = Statement("""
UPDATE duly.webhook_provider_secrets SET expires_at =
    CASE WHEN expires_at IS NULL THEN duly.now() + make_interval(secs => CAST(:overlap_seconds AS float8))
         ELSE least(expires_at, duly.now()) END
WHERE provider = CAST(:provider AS text) AND (expires_at IS NULL OR expires_at > duly.now())
""")
NEXT_PROVIDER_SECRET = Statement("""
SELECT coalesce(max(number), 0) + 1 FROM duly.webhook_provider_secrets WHERE provider = CAST(:provider AS text)
""")
ADD_PROVIDER_SECRET = Statement("""
INSERT INTO duly.webhook_provider_secrets (provider, number, key_id, sealed, created_at)
VALUES (CAST(:provider AS text), CAST(:number AS int), CAST(:key_id AS text), CAST(:sealed AS bytea), duly.now())
""")
LOCK_PROVIDER = Statement("""
SELECT pg_advisory_xact_lock(hashtextextended('duly.webhook_provider ' || CAST(:provider AS text), 0)) IS NULL
""")
READ_PROVIDER_SECRETS = Statement("""
SELECT duly.now(), k.number, k.key_id, k.sealed
FROM (SELECT 1) AS always
LEFT JOIN (SELECT number, key_id, sealed FROM duly.webhook_provider_secrets
           WHERE provider = CAST(:provider AS text) AND (expires_at IS NULL OR expires_at > duly.now())
           ORDER BY number DESC LIMIT 2) AS k ON true
""")
FIND_OTHER_SECRETS = Statement("""
SELECT subscription_id, number, key_id, sealed FROM duly.webhook_secrets
WHERE key_id <> CAST(:key_id AS text) ORDER BY subscription_id, number LIMIT CAST(:limit AS int) FOR UPDATE
""")
RESEAL_SECRET = Statement("""
UPDATE duly.webhook_secrets SET key_id = CAST(:key_id AS text), sealed = CAST(:sealed AS bytea)
WHERE subscription_id = CAST(:id AS uuid) AND number = CAST(:number AS int)
""")
FIND_OTHER_PROVIDER_SECRETS = Statement("""
SELECT provider, number, key_id, sealed FROM duly.webhook_provider_secrets
WHERE key_id <> CAST(:key_id AS text) ORDER BY provider, number LIMIT CAST(:limit AS int) FOR UPDATE
""")
RESEAL_PROVIDER_SECRET = Statement("""
UPDATE duly.webhook_provider_secrets SET key_id = CAST(:key_id AS text), sealed = CAST(:sealed AS bytea)
WHERE provider = CAST(:provider AS text) AND number = CAST(:number AS int)
""")

# ------------------------------------------------------------------------------------------------------ deliveries

DELIVERY = """
    d.id, d.number, d.subscription_id, d.event_id, d.event_type, d.aggregate_id, d.event_created_at, d.status,
    d.attempts, d.tries, d.redeliveries, d.next_attempt_at, d.last_http_status, d.last_error, d.created_at,
    d.finished_at
"""
_OF_DELIVERIES = DELIVERY + "FROM duly.webhook_deliveries d "
_BEFORE = " AND d.number < coalesce(CAST(:before AS bigint), 9223372036854775807) "
_NEWEST_DELIVERY_FIRST = "ORDER BY d.number DESC LIMIT CAST(:limit AS int)"
FIND_DELIVERY = Statement("SELECT" + _OF_DELIVERIES + "WHERE d.id = CAST(:id AS uuid)")
LIST_DELIVERIES = Statement("SELECT" + _OF_DELIVERIES + "WHERE true" + _BEFORE + _NEWEST_DELIVERY_FIRST)
LIST_DELIVERIES_OF_STATUS = Statement(
    "SELECT"
    + DELIVERY
    + """FROM duly.webhook_subscriptions s
CROSS JOIN LATERAL (SELECT d.* FROM duly.webhook_deliveries d
                    WHERE d.subscription_id = s.id AND d.status = CAST(:status AS text)"""
    + _BEFORE
    + _NEWEST_DELIVERY_FIRST
    + ") AS d "
    + _NEWEST_DELIVERY_FIRST
)
LIST_DELIVERIES_OF_SUBSCRIPTION = Statement(
    "SELECT"
    + _OF_DELIVERIES
    + "WHERE d.subscription_id = CAST(:subscription_id AS uuid)"
    + _BEFORE
    + _NEWEST_DELIVERY_FIRST
)
LIST_DELIVERIES_OF_BOTH = Statement(
    "SELECT"
    + _OF_DELIVERIES
    + "WHERE d.subscription_id = CAST(:subscription_id AS uuid) AND d.status = CAST(:status AS text)"
    + _BEFORE
    + _NEWEST_DELIVERY_FIRST
)
COUNT_DELIVERIES = Statement("""
SELECT s.status, (SELECT count(*) FROM (
    SELECT 1 FROM duly.webhook_deliveries d
    WHERE d.subscription_id = CAST(:subscription_id AS uuid) AND d.status = s.status
    LIMIT CAST(:cap AS int)) AS counted)::int
FROM unnest(CAST(:statuses AS text[])) AS s(status)
""")
LIST_ATTEMPTS = Statement("""
SELECT number, started_at, latency_ms, outcome, http_status, error, address, CAST(request_headers AS text),
       request_bytes, CAST(response_headers AS text), response_excerpt, worker
FROM duly.webhook_attempts WHERE delivery_id = CAST(:id AS uuid) ORDER BY number DESC LIMIT CAST(:limit AS int)
""")
READ_EVENT = Statement("""
SELECT id, type, topic, aggregate_id, payload::text, headers::text, created_at
FROM duly.events WHERE id = CAST(:id AS uuid)
""")
# What is over starts again, with a set of tries of its own; what waits for its retry goes now.
AGAIN = """
UPDATE duly.webhook_deliveries d SET
    status = 'WAITING', redeliveries = redeliveries + 1, finished_at = NULL, next_attempt_at = NULL,
    tries = CASE WHEN d.status = 'RETRYING' THEN d.tries ELSE 0 END, turn = d.turn + 1
"""
REDELIVER = Statement(
    AGAIN
    + """WHERE d.id = CAST(:id AS uuid) AND d.status IN ('DELIVERED', 'PERMANENTLY_FAILED', 'CANCELLED', 'RETRYING')
RETURNING d.id
"""
)
REDELIVER_RANGE = Statement(
    AGAIN
    + """WHERE d.id = ANY(ARRAY(
    SELECT c.id FROM unnest(CAST(:statuses AS text[])) AS s(status)
    CROSS JOIN LATERAL (
        SELECT o.id, o.number FROM duly.webhook_deliveries o
        WHERE o.subscription_id = CAST(:subscription_id AS uuid) AND o.status = s.status
          AND o.created_at >= CAST(:since AS timestamptz) AND o.created_at < CAST(:until AS timestamptz)
          AND o.number > CAST(:after AS bigint)
        ORDER BY o.number LIMIT CAST(:limit AS int)) AS c
    ORDER BY c.number LIMIT CAST(:limit AS int)))
RETURNING d.number
"""
)
COUNT_RANGE = Statement("""
SELECT count(*)::int FROM (
    SELECT 1 FROM unnest(CAST(:statuses AS text[])) AS s(status)
    CROSS JOIN LATERAL (
        SELECT 1 FROM duly.webhook_deliveries o
        WHERE o.subscription_id = CAST(:subscription_id AS uuid) AND o.status = s.status
          AND o.created_at >= CAST(:since AS timestamptz) AND o.created_at < CAST(:until AS timestamptz)
          AND o.number > CAST(:after AS bigint)
        ORDER BY o.number LIMIT CAST(:cap AS int)) AS c
    LIMIT CAST(:cap AS int)) AS counted
""")
# When the last that failed for good is sent again, nobody has to be told about it any more.
RESOLVE_FAILED_ALERT = Statement("""
UPDATE duly.alerts SET resolved_at = duly.now()
WHERE kind = 'webhook_failed' AND subject = CAST(CAST(:id AS uuid) AS text) AND resolved_at IS NULL
  AND NOT EXISTS (SELECT 1 FROM duly.webhook_deliveries d
                  WHERE d.subscription_id = CAST(:id AS uuid) AND d.status = 'PERMANENTLY_FAILED')
""")
CANCEL_JOBS = Statement("""
DELETE FROM duly.jobs j WHERE j.entity_id = CAST(:id AS text) AND j.name = 'duly.deliver-webhook'
  AND j.lease_token IS NULL
""")
# An event that nobody else hears: it is in the history as if it had been published.
ADD_TEST_EVENT = Statement("""
INSERT INTO duly.events (id, seq, type, topic, aggregate_id, payload, headers, created_at, published_at, attempts)
SELECT duly.uuid7(duly.now()), nextval(pg_get_serial_sequence('duly.outbox', 'seq')), 'webhook.test', 'duly.webhooks',
       CAST(:subscription_id AS text), jsonb_build_object('subscription_id', CAST(:subscription_id AS text)),
       CAST(CAST(:headers AS text) AS jsonb), duly.now(), duly.now(), 0
RETURNING id, type, aggregate_id, created_at
""")

# ---------------------------------------------------------------------------------------------------------- received

# Waits for a concurrent transaction that takes the same event, and then sees its row.
NOTE_RECEIVED = Statement("""
INSERT INTO duly.received_webhooks (provider, provider_event_id, received_at)
VALUES (CAST(:provider AS text), CAST(:id AS text), duly.now())
ON CONFLICT DO NOTHING RETURNING provider
""")
