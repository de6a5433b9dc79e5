"""The statements of the idempotency keys."""

from __future__ import annotations

from duly.db import Statement

# A row that another transaction has inserted and not committed makes this wait: that is the lock. One that has expired
# is taken over. No row comes back when a valid one is there. What is stored of a key is a digest; the release before
# this one stored it as it came, and those are found until they expire.
RESERVE_KEY = Statement("""
INSERT INTO duly.idempotency_keys AS k (caller, key, fingerprint, created_at, expires_at)
SELECT CAST(:caller AS text), CAST(:key AS text), CAST(:fingerprint AS bytea), duly.now(),
       duly.now() + make_interval(hours => CAST(:ttl_hours AS int))
WHERE NOT EXISTS (SELECT 1 FROM duly.idempotency_keys o WHERE o.caller = CAST(:caller AS text)
                  AND o.key = CAST(:verbatim AS text) AND o.expires_at > duly.now())
ON CONFLICT (caller, key) DO UPDATE
SET fingerprint = excluded.fingerprint, status = NULL, headers = NULL, body = NULL,
    created_at = excluded.created_at, expires_at = excluded.expires_at
WHERE k.expires_at <= duly.now()
RETURNING 1
""")
FIND_ANSWER = Statement("""
SELECT fingerprint, status, CAST(headers AS text), body FROM duly.idempotency_keys
WHERE caller = CAST(:caller AS text) AND key IN (CAST(:key AS text), CAST(:verbatim AS text))
ORDER BY key = CAST(:key AS text) DESC
""")
STORE_ANSWER = Statement("""
UPDATE duly.idempotency_keys
SET status = CAST(:status AS smallint), headers = CAST(:headers AS json), body = CAST(:body AS bytea)
WHERE caller = CAST(:caller AS text) AND key = CAST(:key AS text) AND status IS NULL
RETURNING 1
""")
FORGET_KEYS = Statement("""
WITH gone AS (
    DELETE FROM duly.idempotency_keys WHERE (caller, key) IN (
        SELECT caller, key FROM duly.idempotency_keys WHERE expires_at <= duly.now()
        ORDER BY expires_at LIMIT CAST(:batch AS int) FOR UPDATE SKIP LOCKED)
    RETURNING 1)
SELECT count(*)::int FROM gone
""")
