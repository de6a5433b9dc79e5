"""A little of everything that the console shows, with one text in every place where a stranger's may be."""

from __future__ import annotations

from tests.support import rows

HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>{{ 7*7 }}</title><svg onload=alert(3)>"
EVENT = "019c0000-0000-7000-8000-000000000001"
PUBLISHED = "019c0000-0000-7000-8000-000000000002"
RUN = "019c0000-0000-7000-8000-000000000003"
SUBSCRIPTION = "019c0000-0000-7000-8000-000000000004"
DISABLED = "019c0000-0000-7000-8000-000000000005"
DELIVERY = "019c0000-0000-7000-8000-000000000006"
RETRYING = "019c0000-0000-7000-8000-000000000007"

STATEMENTS = (
    "SELECT setval(s.name, greatest(nextval(s.name), 1000)) FROM pg_get_serial_sequence('duly.jobs', 'id') AS s(name)",
    "INSERT INTO duly.jobs (id, name, entity_id, payload, run_at, due_at, created_at, last_error, progress) "
    "VALUES (1, 'shop.remind', %(text)s, jsonb_build_object('note', %(text)s::text), duly.now() - interval '5 min', "
    "duly.now(), duly.now(), %(text)s, %(text)s)",
    "INSERT INTO duly.jobs (id, name, run_at, due_at, created_at, lease_token, leased_by, lease_expires_at, "
    "claimed_at) "
    "VALUES (2, 'shop.remind', duly.now(), duly.now(), duly.now(), 1, %(text)s, clock_timestamp() + interval '1 min', "
    "duly.now())",
    "INSERT INTO duly.dead_letters (id, name, entity_id, payload, priority, due_at, created_at, original_delay, "
    "retry_count, source, reason, error, error_kind, buried_at) VALUES (7, 'shop.charge', %(text)s, "
    "jsonb_build_object('note', %(text)s::text), 3, duly.now(), duly.now(), '0', 3, 'Deferred', 'retries_used_up', "
    "%(text)s, 'BankAway', duly.now())",
    "INSERT INTO duly.executions (execution_id, job_id, name, entity_id, source, started_at, completed_at, "
    "succeeded, outcome, message, retry_count, worker, lease_token) VALUES "
    "('019c0000-0000-7000-8000-000000000003', 1, 'shop.remind', %(text)s, 'Deferred', duly.now(), duly.now(), false, "
    "'retried', %(text)s, 0, %(text)s, 1)",
    "INSERT INTO duly.outbox (id, type, topic, aggregate_id, payload, headers, created_at, attempts, failed_at, "
    "last_error) VALUES ('019c0000-0000-7000-8000-000000000001', 'order.paid', 'orders', %(text)s, "
    "jsonb_build_object('note', %(text)s::text), jsonb_build_object('x', %(text)s::text), duly.now(), 5, duly.now(), "
    "%(text)s)",
    "INSERT INTO duly.events (id, seq, type, topic, aggregate_id, payload, headers, created_at, published_at, "
    "attempts) "
    "VALUES ('019c0000-0000-7000-8000-000000000002', 1, 'order.paid', 'orders', %(text)s, "
    "jsonb_build_object('note', %(text)s::text), '{}', duly.now(), duly.now(), 1)",
    "INSERT INTO duly.alerts (kind, subject, message, raised_at, last_at) "
    "VALUES ('dead_letter', %(text)s, %(text)s, duly.now(), duly.now())",
    "INSERT INTO duly.processes (id, kind, names, version, started_at, seen_at) VALUES "
    "(%(text)s, 'worker', ARRAY['shop.remind', 'shop.never', 'shop.charge'], %(text)s, clock_timestamp(), "
    "clock_timestamp())",
    "INSERT INTO duly.consumers (name, patterns, registered_at) VALUES ('audience', ARRAY[%(text)s], duly.now())",
    "UPDATE duly.schedules SET timezone = %(text)s, last_error = %(text)s WHERE name = 'duly.drop-history'",
    "INSERT INTO duly.audit (at, actor, action, subject, reason, before, after) VALUES (duly.now(), %(text)s, "
    "%(text)s, %(text)s, %(text)s, jsonb_build_object(%(text)s::text, %(text)s::text), "
    "jsonb_build_object('x', %(text)s::text))",
    # one subscriber that fails, and one that is disabled; the texts are whatever a receiver or a caller may say
    "INSERT INTO duly.webhook_subscriptions (id, owner, url, description, patterns, status, failures, failing_since, "
    "open_until, disabled_reason, created_at, updated_at) VALUES "
    "('019c0000-0000-7000-8000-000000000004', %(text)s, 'https://hooks.example.com/in?token=sesame', %(text)s, "
    "ARRAY['order.*', %(text)s], 'ACTIVE', 6, duly.now() - interval '1 h', duly.now() + interval '5 min', NULL, "
    "duly.now() - interval '9 d', duly.now()), "
    "('019c0000-0000-7000-8000-000000000005', %(text)s, 'https://gone.example.com/', '', ARRAY['*'], 'DISABLED', 1, "
    "duly.now() - interval '6 d', NULL, %(text)s, duly.now() - interval '9 d', duly.now())",
    "INSERT INTO duly.webhook_secrets (subscription_id, number, key_id, sealed, created_at) VALUES "
    "('019c0000-0000-7000-8000-000000000004', 1, %(text)s, repeat('x', 60)::bytea, duly.now() - interval '9 d')",
    "INSERT INTO duly.webhook_deliveries (id, subscription_id, event_id, event_type, aggregate_id, event_created_at, "
    "status, attempts, tries, next_attempt_at, last_http_status, last_error, created_at, finished_at) VALUES "
    "('019c0000-0000-7000-8000-000000000006', '019c0000-0000-7000-8000-000000000004', "
    "'019c0000-0000-7000-8000-000000000002', %(text)s, %(text)s, duly.now(), 'PERMANENTLY_FAILED', 8, 8, NULL, 500, "
    "%(text)s, duly.now() - interval '1 h', duly.now()), "
    "('019c0000-0000-7000-8000-000000000007', '019c0000-0000-7000-8000-000000000004', "
    "'019c0000-0000-7000-8000-000000000001', 'order.paid', %(text)s, duly.now(), 'RETRYING', 1, 1, "
    "duly.now() + interval '1 min', NULL, 'timeout', duly.now(), NULL)",
    "INSERT INTO duly.webhook_attempts (delivery_id, number, subscription_id, started_at, latency_ms, outcome, "
    "http_status, error, address, request_headers, request_bytes, response_headers, response_excerpt, worker) VALUES "
    "('019c0000-0000-7000-8000-000000000006', 8, '019c0000-0000-7000-8000-000000000004', duly.now(), 1234, 'FAILED', "
    "500, 'http_status', '192.0.2.1', jsonb_build_object('X-Note', %(text)s::text), 77, "
    "jsonb_build_object('server', %(text)s::text), %(text)s, %(text)s)",
    "INSERT INTO duly.alerts (kind, subject, message, raised_at, last_at) VALUES "
    "('webhook_failed', '019c0000-0000-7000-8000-000000000004', %(text)s, duly.now(), duly.now())",
)  # fmt: skip


def fill(dsn: str, words: str = "order:1") -> None:
    """Put words wherever a stranger's text can end up."""
    for statement in STATEMENTS:
        rows(dsn, statement, {"text": words})


PAGES = (
    "/console", "/console/jobs", "/console/jobs?name=shop.remind", "/console/jobs?status=Running",
    "/console/jobs?entity=order:1", "/console/jobs?since=2026-01-01T00:00&until=2036-01-01T00:00", "/console/jobs/1",
    "/console/jobs/2", "/console/jobs/7", f"/console/jobs/1/runs/{RUN}", "/console/schedules",
    "/console/schedules/new", "/console/schedules/duly.forget-audit", "/console/schedules/duly.drop-history",
    "/console/schedules/duly.forget-audit/edit", "/console/history", "/console/history?outcome=retried",
    "/console/history?entity=order:1", "/console/history?job=1", "/console/dead-letters",
    "/console/dead-letters?name=shop.charge&kind=BankAway", "/console/dead-letters?entity=order:1", "/console/outbox",
    "/console/outbox?status=PENDING", "/console/outbox?status=PUBLISHED", "/console/outbox?aggregate=order:1",
    f"/console/events/{EVENT}", f"/console/events/{PUBLISHED}", "/console/entity?id=order:1", "/console/entity",
    "/console/search", "/console/audit", "/console/audit?subject=order:1", "/console/alerts", "/console/alerts?all=1",
    "/console/processes", "/console/webhooks", f"/console/webhooks/{SUBSCRIPTION}", f"/console/webhooks/{DISABLED}",
    f"/console/webhooks/{SUBSCRIPTION}?status=RETRYING", f"/console/webhooks/{SUBSCRIPTION}?type=order.paid",
    f"/console/webhooks/{SUBSCRIPTION}?type=order.paid&status=RETRYING", f"/console/webhooks/deliveries/{DELIVERY}",
    f"/console/webhooks/deliveries/{RETRYING}",
)  # fmt: skip
