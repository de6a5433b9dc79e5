"""The statements of delivery: fan-out, admission, attempts. Subscriptions are locked first, always in order of id."""

from __future__ import annotations

from duly.db import Statement

READ_NOW = Statement("SELECT duly.now()")

# --------------------------------------------------------------------------------------------------------- fan-out

# Events of the time before a subscription was made are not for it, even if they are fanned out only now.
READ_WANTED = Statement("""
SELECT id, patterns, created_at FROM duly.webhook_subscriptions WHERE status <> 'DELETED' ORDER BY id
""")
# In order of arrival: their numbers say so.
ADD_DELIVERIES = Statement("""
INSERT INTO duly.webhook_deliveries
    (id, subscription_id, event_id, event_type, aggregate_id, event_created_at, created_at)
SELECT n.id, n.subscription_id, n.event_id, n.event_type, n.aggregate_id, n.event_created_at, duly.now()
FROM unnest(CAST(:ids AS uuid[]), CAST(:subscription_ids AS uuid[]), CAST(:event_ids AS uuid[]),
            CAST(:event_types AS text[]), CAST(:aggregate_ids AS text[]), CAST(:event_created_ats AS timestamptz[]))
     WITH ORDINALITY AS n(id, subscription_id, event_id, event_type, aggregate_id, event_created_at, place)
ORDER BY n.place
ON CONFLICT (subscription_id, event_id) DO NOTHING
RETURNING subscription_id
""")

# ------------------------------------------------------------------------------------------------------- admission

LOCK_SUBSCRIPTIONS = Statement("""
SELECT id, status, failures, failing_since, open_until, disabled_reason, duly.now()
FROM duly.webhook_subscriptions WHERE id = ANY(CAST(:ids AS uuid[])) ORDER BY id FOR NO KEY UPDATE
""")
# How many more may be under way: nobody gets more than a share of the slots, who fails gets one at a time, and who is
# left alone (or paused, or disabled) gets none. A statement of its own, after the lock: it must see what others did.
_ROOM = """
    SELECT s.id, CASE WHEN s.status <> 'ACTIVE' OR s.open_until > duly.now() THEN 0
                      WHEN s.failures > 0 THEN 1
                      ELSE least(s.max_in_flight, CAST(:most AS int)) END
                 - (SELECT count(*) FROM duly.webhook_deliveries q
                    WHERE q.subscription_id = s.id AND q.status = 'QUEUED') AS free
    FROM duly.webhook_subscriptions s
"""
ADMIT = Statement(
    "WITH room AS ("
    + _ROOM
    + """WHERE s.id = ANY(CAST(:ids AS uuid[]))
)
UPDATE duly.webhook_deliveries SET status = 'QUEUED', turn = turn + 1
WHERE id = ANY(ARRAY(
    SELECT next.id FROM room
    CROSS JOIN LATERAL (SELECT d.id FROM duly.webhook_deliveries d
                        WHERE d.subscription_id = room.id AND d.status = 'WAITING'
                        ORDER BY d.number LIMIT greatest(room.free, 0)) AS next))
RETURNING id, turn
"""
)
# A retry that is due takes a free place or waits for one; what was admitted and may not go now waits, too.
TAKE_PLACE = Statement(
    "WITH room AS ("
    + _ROOM
    + """WHERE s.id = CAST(:subscription_id AS uuid)
)
UPDATE duly.webhook_deliveries d SET
    status = CASE WHEN s.status = 'DELETED' THEN 'CANCELLED'
                  WHEN d.status = 'QUEUED' AND s.status = 'ACTIVE' AND coalesce(s.open_until <= duly.now(), true)
                      THEN 'QUEUED'
                  WHEN d.status = 'RETRYING' AND room.free > 0 THEN 'QUEUED'
                  ELSE 'WAITING' END,
    next_attempt_at = NULL,
    finished_at = CASE WHEN s.status = 'DELETED' THEN duly.now() END
FROM room JOIN duly.webhook_subscriptions s ON s.id = room.id
WHERE d.id = CAST(:id AS uuid) AND d.turn = CAST(:turn AS int) AND d.status IN ('QUEUED', 'RETRYING')
RETURNING d.status
"""
)

# -------------------------------------------------------------------------------------------------------- delivery

_SECRETS = """
(SELECT {what} FROM duly.webhook_secrets k
 WHERE k.subscription_id = d.subscription_id AND (k.expires_at IS NULL OR k.expires_at > duly.now())
 ORDER BY k.number DESC LIMIT 2)
"""
READ_DELIVERIES = Statement(
    """
SELECT d.id, d.status, d.turn, d.tries, d.subscription_id, s.status, s.url, s.timeout_seconds,
       coalesce(s.open_until > duly.now(), false), duly.now(),
       ARRAY"""
    + _SECRETS.replace("{what}", "k.number")
    + ", ARRAY"
    + _SECRETS.replace("{what}", "k.key_id")
    + ", ARRAY"
    + _SECRETS.replace("{what}", "k.sealed")
    + """, e.id, e.type, e.topic, e.aggregate_id, e.payload::text, e.headers::text, e.created_at
FROM duly.webhook_deliveries d
JOIN duly.webhook_subscriptions s ON s.id = d.subscription_id
LEFT JOIN duly.events e ON e.id = d.event_id
WHERE d.id = ANY(CAST(:ids AS uuid[]))
"""
)
# Each at its turn, or not at all.
RECORD_ATTEMPTS = Statement("""
WITH made AS (
    SELECT * FROM unnest(
        CAST(:ids AS uuid[]), CAST(:turns AS int[]), CAST(:statuses AS text[]), CAST(:tries AS smallint[]),
        CAST(:waits_seconds AS float8[]), CAST(:are_finished AS boolean[]), CAST(:http_statuses AS smallint[]),
        CAST(:errors AS text[]), CAST(:outcomes AS text[]), CAST(:started_ats AS timestamptz[]),
        CAST(:latencies_ms AS int[]), CAST(:addresses AS text[]), CAST(:requests_headers AS text[]),
        CAST(:requests_bytes AS int[]), CAST(:responses_headers AS text[]), CAST(:response_excerpts AS text[]))
        AS m(id, turn, status, tries, wait_seconds, is_finished, http_status, error, outcome, started_at, latency_ms,
             address, request_headers, request_bytes, response_headers, response_excerpt)
), moved AS (
    UPDATE duly.webhook_deliveries d SET
        status = m.status, attempts = d.attempts + 1, tries = m.tries,
        next_attempt_at = duly.now() + make_interval(secs => m.wait_seconds),
        last_http_status = m.http_status, last_error = m.error,
        finished_at = CASE WHEN m.is_finished THEN duly.now() END
    FROM made m WHERE d.id = m.id AND d.turn = m.turn AND d.status = 'QUEUED'
    RETURNING d.id, d.turn, d.subscription_id, d.attempts
)
INSERT INTO duly.webhook_attempts (delivery_id, number, subscription_id, started_at, latency_ms, outcome, http_status,
    error, address, request_headers, request_bytes, response_headers, response_excerpt, worker)
SELECT id, moved.attempts, moved.subscription_id, m.started_at, m.latency_ms, m.outcome, m.http_status, m.error,
       m.address, CAST(m.request_headers AS jsonb), m.request_bytes, CAST(m.response_headers AS jsonb),
       m.response_excerpt, CAST(:worker AS text)
FROM moved JOIN made m USING (id, turn)
RETURNING delivery_id
""")
END_DELIVERIES = Statement("""
UPDATE duly.webhook_deliveries d SET status = 'PERMANENTLY_FAILED', last_error = CAST(:error AS text),
    next_attempt_at = NULL, finished_at = duly.now()
FROM unnest(CAST(:ids AS uuid[]), CAST(:turns AS int[])) AS m(id, turn)
WHERE d.id = m.id AND d.turn = m.turn AND d.status IN ('QUEUED', 'RETRYING')
RETURNING d.id
""")
NOTE_STANDINGS = Statement("""
UPDATE duly.webhook_subscriptions s SET status = m.status, failures = m.failures, failing_since = m.failing_since,
    open_until = m.open_until, disabled_reason = m.disabled_reason, updated_at = duly.now()
FROM unnest(CAST(:ids AS uuid[]), CAST(:status AS text[]), CAST(:failures AS int[]),
            CAST(:failing_since AS timestamptz[]), CAST(:open_until AS timestamptz[]),
            CAST(:disabled_reason AS text[]))
     AS m(id, status, failures, failing_since, open_until, disabled_reason)
WHERE s.id = m.id
""")
RAISE_ALERTS = Statement("""
SELECT duly.alert(a.kind, a.subject, a.message)
FROM unnest(CAST(:kinds AS text[]), CAST(:subjects AS text[]), CAST(:messages AS text[]))
     WITH ORDINALITY AS a(kind, subject, message, place)
ORDER BY a.place
""")
AUDIT_DISABLING = Statement("""
INSERT INTO duly.audit (at, actor, action, subject, reason)
VALUES (duly.now(), 'duly', 'webhook_subscription.disabled', 'webhook_subscription:' || CAST(:id AS text),
        CAST(:reason AS text))
""")

# ----------------------------------------------------------------------------------------------- sweep and clean-up

# Whatever was admitted and has no job any more: an operator cancelled it, or threw its dead letter away. So many are
# looked at from one place on, in order of subscription, status and number; where there may be more, with the last one.
# A job is found by its entity: by its name there are as many as deliveries, and a planner without statistics (measured:
# 5,000 deliveries and jobs that were just made) would walk over all of them for each.
FIND_STRAYS = Statement("""
WITH looked AS MATERIALIZED (
    SELECT d.id, s.id AS subscription_id, t.status, d.number
    FROM duly.webhook_subscriptions s CROSS JOIN (VALUES ('QUEUED'), ('RETRYING')) AS t(status)
    CROSS JOIN LATERAL (
        SELECT o.id, o.number FROM duly.webhook_deliveries o
        WHERE o.subscription_id = s.id AND o.status = t.status
          AND o.number > CASE WHEN s.id = CAST(:subscription_id AS uuid) AND t.status = CAST(:status AS text)
                              THEN CAST(:number AS bigint) ELSE 0 END
        ORDER BY o.number LIMIT CAST(:limit AS int)) AS d
    WHERE s.id >= CAST(:subscription_id AS uuid)
      AND (s.id > CAST(:subscription_id AS uuid) OR t.status >= CAST(:status AS text))
    ORDER BY s.id, t.status, d.number LIMIT CAST(:limit AS int)
)
SELECT id, subscription_id, status, number, is_stray, place = CAST(:limit AS int) AS is_last
FROM (SELECT l.*, row_number() OVER (ORDER BY l.subscription_id, l.status, l.number) AS place,
             (SELECT true FROM duly.jobs j
              WHERE j.entity_id = l.id::text AND j.name || '' = 'duly.deliver-webhook' LIMIT 1) IS NULL AS is_stray
      FROM looked l) AS found
WHERE is_stray OR place = CAST(:limit AS int)
ORDER BY place
""")
# Asked again under the lock: its job may just have been made. One whose job is a dead letter would only die again.
TAKE_BACK_STRAYS = Statement("""
UPDATE duly.webhook_deliveries d SET
    status = CASE WHEN buried.found THEN 'PERMANENTLY_FAILED' ELSE 'WAITING' END,
    last_error = CASE WHEN buried.found THEN 'dead_letter' ELSE d.last_error END,
    finished_at = CASE WHEN buried.found THEN duly.now() END, next_attempt_at = NULL
FROM unnest(CAST(:ids AS uuid[])) AS stray(id)
CROSS JOIN LATERAL (SELECT EXISTS (SELECT 1 FROM duly.dead_letters l
                                   WHERE l.entity_id = stray.id::text AND l.name = 'duly.deliver-webhook') AS found
                   ) AS buried
WHERE d.id = stray.id AND d.status IN ('QUEUED', 'RETRYING')
  AND (SELECT true FROM duly.jobs j
       WHERE j.entity_id = d.id::text AND j.name || '' = 'duly.deliver-webhook' LIMIT 1) IS NULL
RETURNING d.id, d.subscription_id, d.status
""")
# With something under way, its end admits the next.
FIND_IDLE = Statement("""
SELECT s.id FROM duly.webhook_subscriptions s
WHERE s.status = 'ACTIVE' AND coalesce(s.open_until <= duly.now(), true)
  AND (SELECT true FROM duly.webhook_deliveries d
       WHERE d.subscription_id = s.id AND d.status = 'WAITING' LIMIT 1)
  AND (SELECT true FROM duly.webhook_deliveries q
       WHERE q.subscription_id = s.id AND q.status = 'QUEUED' LIMIT 1) IS NULL
ORDER BY s.id LIMIT CAST(:limit AS int)
""")
# The events are gone by then, too; what is under way, or is just being sent again, is left alone.
FORGET_DELIVERIES = Statement("""
WITH old AS (
    SELECT d.id FROM duly.webhook_deliveries d
    WHERE d.created_at < duly.now() - make_interval(days => CAST(:days AS int))
      AND d.status NOT IN ('QUEUED', 'RETRYING')
    ORDER BY d.number LIMIT CAST(:batch AS int)
    FOR UPDATE SKIP LOCKED
), attempted AS (
    DELETE FROM duly.webhook_attempts WHERE delivery_id = ANY(ARRAY(SELECT id FROM old))
), gone AS (
    DELETE FROM duly.webhook_deliveries WHERE id = ANY(ARRAY(SELECT id FROM old)) RETURNING 1
)
SELECT count(*)::int FROM gone
""")
# What was deleted is kept as long as the rest: a subscriber decides that nothing is sent, not what is remembered. None
# of it is under way: this takes what the statement above leaves alone.
FORGET_DELETED = Statement("""
WITH old AS (
    SELECT d.id FROM duly.webhook_subscriptions s CROSS JOIN (VALUES ('QUEUED'), ('RETRYING')) AS t(status)
    CROSS JOIN LATERAL (SELECT o.id FROM duly.webhook_deliveries o
                        WHERE o.subscription_id = s.id AND o.status = t.status
                          AND o.created_at < duly.now() - make_interval(days => CAST(:days AS int))
                        ORDER BY o.number LIMIT CAST(:batch AS int)) AS d
    WHERE s.status = 'DELETED' LIMIT CAST(:batch AS int)
), attempted AS (
    DELETE FROM duly.webhook_attempts WHERE delivery_id = ANY(ARRAY(SELECT id FROM old))
), gone AS (
    DELETE FROM duly.webhook_deliveries WHERE id = ANY(ARRAY(SELECT id FROM old)) RETURNING 1
)
SELECT count(*)::int FROM gone
""")
# With the last of its deliveries, and not before.
FORGET_SUBSCRIPTIONS = Statement("""
DELETE FROM duly.webhook_subscriptions s
WHERE s.status = 'DELETED'
  AND (SELECT true FROM duly.webhook_deliveries d WHERE d.subscription_id = s.id LIMIT 1) IS NULL
RETURNING s.id
""")
FORGET_SECRETS = Statement("DELETE FROM duly.webhook_secrets WHERE expires_at < duly.now() RETURNING number")
FORGET_PROVIDER_SECRETS = Statement(
    "DELETE FROM duly.webhook_provider_secrets WHERE expires_at < duly.now() RETURNING number"
)
FORGET_RECEIVED = Statement("""
WITH gone AS (
    DELETE FROM duly.received_webhooks WHERE ctid = ANY(ARRAY(
        SELECT ctid FROM duly.received_webhooks
        WHERE received_at < duly.now() - make_interval(days => CAST(:days AS int)) LIMIT CAST(:batch AS int)))
    RETURNING 1)
SELECT count(*)::int FROM gone
""")
ALLOW_FORGETTING = Statement("SELECT set_config('duly.forgetting', 'on', true)")
