"""A busy night in a shop: what the browser tests look at, and what the pictures in the documentation show."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

from apps import samples
from duly.db import Database
from duly.schedules.cron import Cron
from duly.settings import Settings
from tests.support import rows, value

NAMES = (
    "ARRAY['orders.expire', 'payments.capture', 'invoices.send', 'consumer:mailer', 'consumer:ledger', 'rates.fetch']"
)
KNOWN = NAMES + " || ARRAY(SELECT name FROM duly.schedules UNION SELECT name FROM duly.jobs)"
HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>"

# What people did, before the samples were loaded: the record is in the order of its ids.
PEOPLE = (
    """
    INSERT INTO duly.audit (at, actor, action, subject, reason, before, after)
    SELECT now() - minutes * interval '1 min', actor, action, subject, reason, CAST(before AS jsonb),
           CAST(after AS jsonb)
    FROM (VALUES
        (190, 'Ada Kowalska (ada)', 'webhook_subscription.paused',
         'webhook_subscription:01990000-0000-7000-8000-000000000004', 'month end: accounting asked for it',
         '{"status": "ACTIVE"}', '{"status": "PAUSED"}'),
        (151, 'Piet de Vries (piet)', 'dead_letter.retried', 'job:899871', 'the bank is back',
         '{"name": "payments.capture", "retry_count": 3, "error_kind": "ConnectTimeout"}', NULL),
        (150, 'Piet de Vries (piet)', 'dead_letter.retried', 'job:899868', 'the bank is back',
         '{"name": "payments.capture", "retry_count": 3, "error_kind": "ConnectTimeout"}', NULL),
        (96, 'Ada Kowalska (ada)', 'schedule.triggered', 'schedule:rates.fetch', 'the table came late today', NULL,
         '{"job_id": 4711}'),
        (50, 'Ada Kowalska (ada)', 'schedule.edited', 'schedule:reports.nightly', 'the warehouse closes later',
         '{"cron": "0 2 * * *", "version": 1}', '{"cron": "30 2 * * *", "version": 2}'),
        (40, 'Ada Kowalska (ada)', 'schedule.disabled', 'schedule:invoices.monthly', 'billing moves to the new ledger',
         '{"enabled": true}', '{"enabled": false}')
    ) AS done(minutes, actor, action, subject, reason, before, after) ORDER BY minutes DESC
    """,
)

FILL: tuple[str, ...] = (
    "SELECT setval(pg_get_serial_sequence('duly.jobs', 'id'), 5000)",
    # what the samples emitted and scheduled was taken care of
    "WITH sent AS (DELETE FROM duly.outbox RETURNING *) INSERT INTO duly.events (id, seq, type, topic, aggregate_id, "
    "payload, headers, created_at, published_at, attempts) SELECT id, seq, type, topic, aggregate_id, payload, "
    "headers, created_at, created_at + interval '8 ms', 1 FROM sent",
    "DELETE FROM duly.jobs WHERE run_at <= now() AND name <> 'payments.send'",
    # an hour of runs, with a bad quarter
    "INSERT INTO duly.executions (execution_id, job_id, name, entity_id, source, started_at, completed_at, succeeded, "
    "outcome, message, retry_count, worker, lease_token) "
    "SELECT duly.uuid7(at), 1000 + n, name, CASE name WHEN 'rates.fetch' THEN NULL ELSE 'order:' || 4000 + n % 200 "
    "END, CASE name WHEN 'rates.fetch' THEN 'Scheduled' ELSE 'Deferred' END, at - took, at, "
    "outcome IN ('done', 'duplicate'), outcome, CASE WHEN outcome = 'done' THEN NULL WHEN outcome = 'lost' THEN "
    "'the worker died or stalled' WHEN name = 'payments.capture' THEN 'ConnectTimeout: the bank did not answer within "
    "5 s' WHEN name = 'consumer:mailer' THEN 'SMTPServerDisconnected: connection unexpectedly closed' ELSE "
    "'OperationalError: could not serialize access' END, 0, 'worker-' || 1 + n % 3, 1 FROM ("
    "  SELECT n, now() - n * interval '0.9 s' AS at, (" + NAMES + ")[1 + n % 6] AS name, "
    "         (20 + (n * 7919) % 180 + CASE WHEN n BETWEEN 900 AND 1500 THEN 400 ELSE 0 END) * interval '1 ms' AS took,"
    "         CASE WHEN n BETWEEN 900 AND 1500 AND n % 4 = 1 THEN 'retried' WHEN n % 97 = 0 THEN 'buried' "
    "              WHEN n % 211 = 0 THEN 'lost' ELSE 'done' END AS outcome FROM generate_series(1, 4000) AS n) AS ran",
    # what waits and runs
    "INSERT INTO duly.jobs (name, entity_id, run_at, due_at, created_at, payload) SELECT 'orders.expire', "
    "'order:' || 4400 + n, now() + n * interval '37 s', now(), now() - interval '3 min', "
    "jsonb_build_object('order', 4400 + n, 'amount', '129.90 PLN') FROM generate_series(1, 60) AS n",
    "INSERT INTO duly.jobs (name, entity_id, run_at, due_at, created_at, retry_count, waits, last_error) "
    "SELECT 'payments.capture', 'order:' || 4300 + n, now() - n * interval '9 s', now() - interval '10 min', "
    "now() - interval '12 min', 2, 'retry', 'ConnectTimeout: the bank did not answer within 5 s' "
    "FROM generate_series(1, 14) AS n",
    "INSERT INTO duly.jobs (name, entity_id, run_at, due_at, created_at, lease_token, leased_by, lease_expires_at, "
    "claimed_at, progress) SELECT 'invoices.send', 'invoice:' || 88 + n, now(), now(), now(), n, 'worker-2', "
    "clock_timestamp() + interval '1 h', now(), 'page ' || n || ' of 7' FROM generate_series(1, 3) AS n",
    # what failed for good
    "INSERT INTO duly.dead_letters (id, name, entity_id, payload, priority, due_at, created_at, original_delay, "
    "retry_count, source, reason, error, error_kind, buried_at) SELECT 900000 + n, "
    "CASE WHEN n <= 9 THEN 'payments.capture' ELSE 'consumer:mailer' END, 'order:' || 4200 + n, "
    "jsonb_build_object('order', 4200 + n), 3, now() - (n * 4 + 21) * interval '1 min', now() - (n * 4 + 23) * "
    "interval '1 min', '0', 3, 'Deferred', 'retries_used_up', "
    "CASE WHEN n <= 6 THEN 'the bank did not answer within 5 s' WHEN n <= 9 THEN 'card declined: do not honour' "
    "ELSE 'mailbox does not exist' END, CASE WHEN n <= 6 THEN 'ConnectTimeout' WHEN n <= 9 THEN 'Declined' ELSE "
    "'SMTPRecipientsRefused' END, now() - (n * 4 + 1) * interval '1 min' + interval '5 s' "
    "FROM generate_series(1, 12) AS n",
    # events
    "INSERT INTO duly.consumers (name, patterns, ordered, registered_at) VALUES ('mailer', ARRAY['order.*'], false, "
    "now()), ('ledger', ARRAY['payment.captured', 'order.placed'], true, now())",
    "INSERT INTO duly.outbox (id, type, topic, aggregate_id, payload, headers, created_at, attempts, failed_at, "
    "last_error) SELECT duly.uuid7(), 'order.shipped', 'shop', 'order:' || 4250 + n, jsonb_build_object('n', n), '{}', "
    "now() - interval '20 min', 5, now() - interval '6 min', 'broker refused: topic is read only' "
    "FROM generate_series(1, 2) AS n",
    "INSERT INTO duly.events (id, seq, type, topic, aggregate_id, payload, headers, created_at, published_at, "
    "attempts) "
    "SELECT duly.uuid7(now() - n * interval '20 s'), n, (ARRAY['order.placed', 'payment.captured', 'order.shipped'])"
    "[1 + n % 3], 'shop', 'order:' || CASE WHEN n IN (1, 41) THEN 4241 ELSE 4200 + n % 40 END, "
    "jsonb_build_object('total', '129.90'), jsonb_build_object("
    "'correlation_id', duly.uuid7()), now() - n * interval '20 s', now() - n * interval '20 s' + interval '8 ms', 1 "
    "FROM generate_series(1, 120) AS n",
    # one order's story: placed 27 minutes ago, its payment was not captured
    "INSERT INTO duly.executions (execution_id, job_id, name, entity_id, source, started_at, completed_at, succeeded, "
    "outcome, message, retry_count, worker, lease_token, correlation_id) SELECT duly.uuid7(), 900001, "
    "'payments.capture', 'order:4201', 'Deferred', now() - n * interval '5 min', now() - n * interval '5 min' + "
    "interval '5 s', false, CASE n WHEN 1 THEN 'buried' ELSE 'retried' END, 'ConnectTimeout: the bank did not answer "
    "within 5 s', 4 - n, 'worker-1', 1, (SELECT duly.uuid7(now() - interval '27 min 60 ms')) "
    "FROM generate_series(1, 4) AS n",
    # schedules
    "INSERT INTO duly.schedules (name, cron, timezone, next_run_at, last_run_at) VALUES "
    "('rates.fetch', '15 12 * * MON-FRI', 'Europe/Warsaw', now() + interval '5 h', now() - interval '19 h'), "
    "('invoices.monthly', '30 2 1 * *', 'America/New_York', now() + interval '9 d', NULL), "
    "('reports.nightly', '30 2 * * *', 'Europe/Warsaw', now() + interval '7 h', now() - interval '17 h')",
    "UPDATE duly.schedules SET enabled = false, next_run_at = NULL WHERE name = 'invoices.monthly'",
    # trouble
    "INSERT INTO duly.alerts (kind, subject, message, raised_at, last_at, count) VALUES "
    "('dead_letter', 'payments.capture', 'payments.capture failed for good: ConnectTimeout', now() - interval '1 h', "
    "now() - interval '4 min', 9), ('occurrences_missed', 'rates.fetch', 'rates.fetch missed 2 runs', "
    "now() - interval '20 h', now() - interval '20 h', 1)",
    "INSERT INTO duly.processes (id, kind, names, version, started_at, seen_at) SELECT kind || '-' || n, kind, "
    "CASE kind WHEN 'worker' THEN " + KNOWN + " ELSE '{}' END, '0.1.0', clock_timestamp() - interval '2 d', "
    "clock_timestamp() + interval '1 h' FROM unnest(ARRAY['worker', 'worker', 'relay', 'scheduler']) WITH ORDINALITY "
    "AS p(kind, n)",
)

RAN = """
INSERT INTO duly.executions (execution_id, job_id, name, source, started_at, completed_at, succeeded, outcome,
                             retry_count, worker, lease_token)
SELECT duly.uuid7(CAST(%(last)s AS timestamptz)), %(job)s, %(name)s, 'Scheduled', CAST(%(last)s AS timestamptz),
       CAST(%(last)s AS timestamptz) + interval '130 ms', true, 'done', 0, 'worker-1', 1
"""
HEALTHY = "01990000-0000-7000-8000-000000000001"
BROKEN = "01990000-0000-7000-8000-000000000002"
FAILED_DELIVERY = "01990000-0000-7000-8000-000000000102"

FILL += (
    "DELETE FROM duly.webhook_subscriptions",
    "INSERT INTO duly.webhook_subscriptions (id, owner, url, description, patterns, status, failures, failing_since, "
    "open_until, disabled_reason, created_at, updated_at) VALUES "
    "('01990000-0000-7000-8000-000000000001', 'warehouse', 'https://warehouse.example.com/hooks/orders', 'Picking and "
    "packing', '{order.placed,order.shipped}', 'ACTIVE', 0, NULL, NULL, NULL, now() - interval '90 d', now() - "
    "interval '9 d'), "
    "('01990000-0000-7000-8000-000000000002', 'crm', 'https://crm.example.com/api/v2/in?key=3f9a', 'Customer "
    "timeline', '{order.*,payment.captured}', 'ACTIVE', 12, now() - interval '3 h', now() + interval '50 min', NULL, "
    "now() - interval '41 d', now() - interval '3 min'), "
    "('01990000-0000-7000-8000-000000000003', 'partner-7', 'https://hooks.partner7.example/duly', 'Commission', "
    "'{payment.*}', 'DISABLED', 1, now() - interval '6 d', NULL, 'the receiver answered 410 Gone', "
    "now() - interval '200 d', now() - interval '2 d'), "
    "('01990000-0000-7000-8000-000000000004', 'ledger', 'https://books.example.com/events', 'Month end: paused by "
    "accounting', '{payment.captured}', 'PAUSED', 0, NULL, NULL, NULL, now() - interval '20 d', now() - "
    "interval '1 h')",
    "INSERT INTO duly.webhook_secrets (subscription_id, number, key_id, sealed, created_at, expires_at) "
    "SELECT s.id, k.n, '2026-03', repeat('x', 60)::bytea, CASE k.n WHEN 2 THEN now() - interval '11 h' ELSE "
    "s.created_at END, CASE WHEN k.n = 1 AND s.owner = 'crm' THEN now() + interval '13 h' END "
    "FROM duly.webhook_subscriptions s CROSS JOIN LATERAL generate_series(1, CASE s.owner WHEN 'crm' THEN 2 ELSE 1 "
    "END) AS k(n)",
    # one that was tried for eleven days: 1 min, 5 min, 30 min, 6 h, 24 h, 3 d and 7 d after each other
    "INSERT INTO duly.events (id, seq, type, topic, aggregate_id, payload, headers, created_at, published_at, "
    "attempts) SELECT duly.uuid7(at), 121, 'order.placed', 'archive', 'order:3877', jsonb_build_object('total', "
    "'129.90'), '{}', at, at + interval '8 ms', 1 FROM (SELECT now() - interval '270 h 39 min' AS at) AS e",
    "INSERT INTO duly.webhook_deliveries (id, subscription_id, event_id, event_type, aggregate_id, event_created_at, "
    "status, attempts, tries, last_http_status, last_error, created_at, finished_at) SELECT "
    "'01990000-0000-7000-8000-000000000102', '01990000-0000-7000-8000-000000000002', id, type, aggregate_id, "
    "created_at, 'PERMANENTLY_FAILED', 8, 8, 502, 'status', created_at + interval '9 ms', created_at + interval "
    "'270 h 36 min 400 ms' FROM duly.events WHERE topic = 'archive'",
    "INSERT INTO duly.webhook_deliveries (id, subscription_id, event_id, event_type, aggregate_id, event_created_at, "
    "status, attempts, tries, next_attempt_at, last_http_status, last_error, created_at, finished_at) "
    "SELECT ('01990000-0000-7000-8000-' || lpad((s.n * 1000 + e.place)::text, 12, '0'))::uuid, s.id, e.id, e.type, "
    "e.aggregate_id, e.created_at, made.status, CASE made.status WHEN 'WAITING' THEN 0 WHEN 'RETRYING' THEN 3 ELSE 1 "
    "END, CASE made.status WHEN 'WAITING' THEN 0 WHEN 'RETRYING' THEN 3 ELSE 1 END, "
    "CASE made.status WHEN 'RETRYING' THEN now() + interval '29 min' END, "
    "CASE made.status WHEN 'DELIVERED' THEN 200 WHEN 'RETRYING' THEN 502 END, "
    "CASE made.status WHEN 'RETRYING' THEN 'status' END, e.created_at + interval '9 ms', "
    "CASE made.status WHEN 'DELIVERED' THEN e.created_at + interval '190 ms' END "
    "FROM (SELECT *, row_number() OVER (ORDER BY created_at) AS place FROM duly.events WHERE topic = 'shop') AS e "
    "CROSS JOIN (VALUES (1, '01990000-0000-7000-8000-000000000001'::uuid), "
    "(2, '01990000-0000-7000-8000-000000000002'), (4, '01990000-0000-7000-8000-000000000004')) AS s(n, id) "
    "CROSS JOIN LATERAL (SELECT CASE WHEN s.n = 4 OR (s.n = 2 "
    "AND e.place > 105) THEN 'WAITING' WHEN s.n = 2 AND e.place > 98 THEN 'RETRYING' ELSE 'DELIVERED' END) AS "
    "made(status)",
    "INSERT INTO duly.webhook_attempts (delivery_id, number, subscription_id, started_at, latency_ms, outcome, "
    "http_status, error, address, request_headers, request_bytes, response_headers, response_excerpt, worker) "
    "SELECT '01990000-0000-7000-8000-000000000102', n, '01990000-0000-7000-8000-000000000002', now() - interval "
    "'270 h 39 min' + (ARRAY[0, 1, 6, 36, 396, 1836, 6156, 16236])[n] * interval '1 min' + interval '20 ms', "
    "CASE n WHEN 3 THEN 15003 ELSE 240 + n * 17 END, 'FAILED', CASE n WHEN 3 THEN NULL ELSE 502 END, "
    "CASE n WHEN 3 THEN 'timeout' ELSE 'status' END, '203.0.113.80', jsonb_build_object('X-Event-Type', "
    "'order.placed', 'X-Delivery-Id', '01990000-0000-7000-8000-000000000102', 'webhook-id', "
    "'01990000-0000-7000-8000-0000000000aa', 'webhook-signature', 'v1,K5oZfzN95Z9UVu1EsfQmfVNQhnkZ2pj9o9NDN/H/pI4=', "
    "'X-Signature', repeat('5f', 32)), 412, jsonb_build_object('content-type', 'text/html', 'server', 'nginx'), "
    "CASE n WHEN 3 THEN '' ELSE '<html><body><h1>502 Bad Gateway</h1></body></html>' END, 'worker-2' "
    "FROM generate_series(1, 8) AS n",
    "INSERT INTO duly.alerts (kind, subject, message, raised_at, last_at, count) VALUES "
    "('webhook_failed', '01990000-0000-7000-8000-000000000002', 'order.placed was not taken in 8 tries; the last: "
    "status', now() - interval '3 min', now() - interval '3 min', 1), "
    "('webhook_disabled', '01990000-0000-7000-8000-000000000003', 'the receiver answered 410 Gone', now() - interval "
    "'2 d', now() - interval '2 d', 1)",
)

# A week of cases about money that was posted; each decided by two, so that what a test decides alone is its own.
FILL += (
    """
    INSERT INTO compliance.alerts (id, source, transaction_id, rule_set_id, rule_set_version, outcome, severity, facts,
                                   matched, incomplete, trace, raised_at)
    SELECT ('01990000-0000-7000-8000-' || lpad((3000 + t.n)::text, 12, '0'))::uuid, 'AML', t.id, 'aml-screening', 3,
           'REVIEW', (ARRAY['MEDIUM', 'CRITICAL', 'LOW', 'HIGH'])[1 + t.n % 4], a.facts, a.matched, a.incomplete,
           a.trace, now() - t.n * interval '19 h'
    FROM (SELECT id, row_number() OVER (ORDER BY id) AS n FROM ledger.transactions ORDER BY id LIMIT 8) AS t
    CROSS JOIN (SELECT * FROM compliance.alerts LIMIT 1) AS a
    """,
    """
    INSERT INTO compliance.cases (id, kind, status, severity, alert_id, transaction_id, amount, currency, needs_two,
        assignee, due_at, overdue_at, proposed_decision, proposed_code, proposed_reason, proposed_by, proposed_at,
        decision, reason_code, reason, effect, resolved_by, confirmed_by, ended_at, created_at, updated_at)
    SELECT a.id, 'AML', c.status, a.severity, a.id, a.transaction_id, 1049900 + 731500 * a.n, 'PLN', true,
           CASE WHEN a.n % 2 = 0 THEN 'carl' END, a.raised_at + interval '48 h',
           CASE WHEN c.status = 'OPEN' AND a.n > 2 THEN a.raised_at + interval '48 h' END,
           p.decision, p.code, p.reason, p.officer, p.at, r.decision, r.code, r.reason, r.effect, r.officer, r.second,
           r.at, a.raised_at, now()
    FROM (SELECT *, row_number() OVER (ORDER BY id) AS n FROM compliance.alerts WHERE source = 'AML') AS a
    CROSS JOIN LATERAL (SELECT CASE a.n % 4 WHEN 2 THEN 'PROPOSED' WHEN 0 THEN 'RESOLVED' ELSE 'OPEN' END) AS c(status)
    LEFT JOIN (VALUES ('PROPOSED', 'REJECT', 'SOURCE_OF_FUNDS_UNKNOWN', 'No invoice, new payee.', 'carl', now()))
        AS p(status, decision, code, reason, officer, at) ON p.status = c.status
    LEFT JOIN (VALUES ('RESOLVED', 'APPROVE', 'WITHIN_PROFILE', 'As usual.', 'MONEY_STAYS', 'carl', 'cora', now()))
        AS r(status, decision, code, reason, effect, officer, second, at) ON r.status = c.status
    """,
    """
    INSERT INTO compliance.case_events (case_id, number, at, actor, kind, detail)
    SELECT id, 1, created_at, 'system', 'OPENED', jsonb_build_object('alertId', alert_id)
    FROM compliance.cases WHERE kind = 'AML'
    """,
)


async def load_samples(dsn: str, directory: Path) -> None:
    """What ``make run`` shows of the applications, after what people did before."""
    for statement in PEOPLE:
        rows(dsn, statement)
    db = Database(dsn, settings=Settings(data=directory))
    await db.run(samples.load)
    await db.close()


def fill(dsn: str) -> None:
    """Write all of it."""
    for statement in FILL:
        rows(dsn, statement)
    keep_time(dsn)


def keep_time(dsn: str) -> None:
    """Every schedule's next run is where a scheduler would have put it, and most have run before."""
    now = value(dsn, "SELECT now()")
    found = rows(dsn, "SELECT name, cron, timezone FROM duly.schedules WHERE enabled ORDER BY name")
    for place, (name, cron, timezone) in enumerate(found):
        parsed = Cron(cron, timezone)
        last = parsed.latest(now - timedelta(days=32), now)
        values = {"name": name, "next": parsed.next_after(now), "last": last}
        rows(dsn, "UPDATE duly.schedules SET next_run_at = %(next)s, last_run_at = %(last)s WHERE name = %(name)s",
             values)  # fmt: skip
        if last and place % 7 and name not in ("rates.fetch", "reports.nightly"):
            rows(dsn, RAN, {**values, "job": 6_000 + place})


def fill_hostile(dsn: str) -> None:
    """Text that would run, in every place where a stranger's text is kept."""
    from tests.console.world import fill as fill_everywhere

    fill_everywhere(dsn, HOSTILE)
