"""The statements of the job queue. Measured on 2 cores: see docs/architecture/jobs.md for what each costs."""

from __future__ import annotations

from duly.db import Statement

# What a claim returns, in the order of ``handlers.Job``. Moments are seconds since 1970: a driver makes a float in a
# tenth of the time that a datetime takes, and hardly anybody asks for it.
_CLAIMED = """
    id, name, entity_id, payload, priority, run_epoch, due_epoch, delay_seconds, retry_count, max_retries,
    backoff_seconds, source, event_id, order_key, correlation_id, causation_id, traceparent, lease_token, claimed_epoch,
    lost_by
"""
_RETURNED = """
    id, name, entity_id, payload::text AS payload, priority, date_part('epoch', run_at) AS run_epoch,
    date_part('epoch', due_at) AS due_epoch, date_part('epoch', original_delay) AS delay_seconds, retry_count,
    max_retries, backoff_seconds, source, event_id, order_key, correlation_id, causation_id, traceparent, lease_token,
    date_part('epoch', claimed_at) AS claimed_epoch, lost_by
"""

# One index probe for each (priority, name); the outer LIMIT stops the walk, so exactly as many rows are locked as are
# taken. `id = ANY(ARRAY(...))` and not a join: a join turns into a sequential scan at some hundred rows. A lease that
# expired is taken over here, and the run that was lost gets its row in the history in the same statement.
_CLAIM = (
    """
WITH claimed AS (
    UPDATE duly.jobs SET
        lease_token = (SELECT nextval('duly.lease_tokens')),
        lease_expires_at = clock_timestamp() + make_interval(secs => CAST(:lease_seconds AS float8)),
        leased_by = CAST(:worker AS text), claimed_at = duly.now(), unique_key = NULL, progress = NULL,
        retry_count = retry_count + (lease_token IS NOT NULL)::int,
        lost_by = leased_by, lost_token = lease_token,
        lost_claimed_at = CASE WHEN lease_token IS NOT NULL THEN claimed_at END
    WHERE id = ANY(ARRAY(
        SELECT picked.id
        FROM {lanes} AS lane
        CROSS JOIN LATERAL (
            SELECT j.id FROM duly.jobs j
            WHERE j.name = lane.name AND j.priority = lane.priority AND j.run_at <= duly.now()
              AND {and_so} (j.lease_expires_at IS NULL OR j.lease_expires_at < clock_timestamp())
            ORDER BY j.run_at, j.id LIMIT CAST(:limit AS int) FOR UPDATE SKIP LOCKED
        ) AS picked
        LIMIT CAST(:limit AS int)))
    RETURNING """
    + _RETURNED
    + """, lost_token, lost_claimed_at
), lost AS (
    INSERT INTO duly.executions (execution_id, job_id, name, entity_id, source, started_at, completed_at, succeeded,
        outcome, message, retry_count, worker, lease_token, event_id, correlation_id, causation_id)
    SELECT duly.uuid7(), id, name, entity_id, source, lost_claimed_at, duly.now(), false, 'lost',
           'the lease expired: the worker died or stalled', retry_count - 1, lost_by, lost_token, event_id,
           correlation_id, causation_id
    FROM claimed WHERE lost_claimed_at IS NOT NULL
)
SELECT """
    + _CLAIMED
    + " FROM claimed"
)
CLAIM_JOBS = Statement(
    _CLAIM.replace(
        "{lanes}",
        """
              (SELECT n.name, p.priority
              FROM unnest(CAST(:names AS text[])) WITH ORDINALITY AS n(name, place)
              CROSS JOIN generate_series(1, 4) AS p(priority)
              ORDER BY p.priority, n.place)""",
    ).replace("{and_so} ", "")
)
# The same from a moment on in each lane. While somebody keeps an old snapshot open, what was deleted cannot be cleaned
# away: a claim from the start of the index would walk over all of it.
CLAIM_JOBS_FROM = Statement(
    _CLAIM.replace(
        "{lanes}",
        """
              (SELECT l.name, l.priority, to_timestamp(l.start) AS start
              FROM unnest(CAST(:names AS text[]), CAST(:priorities AS int[]), CAST(:starts AS float8[]))
                   WITH ORDINALITY AS l(name, priority, start, place)
              ORDER BY l.place)""",
    ).replace("{and_so}", "j.run_at >= lane.start AND")
)

READ_NOW = Statement("SELECT date_part('epoch', duly.now())")
LOCK_LIMITED_NAME = Statement(
    "SELECT pg_try_advisory_xact_lock(hashtextextended('duly.limit ' || CAST(:name AS text), 0))"
)
# Whoever gives a lost job's slot away fences its holder, who may only have stalled and would renew or settle it.
FREE_LOST_SLOTS = Statement("""
UPDATE duly.jobs SET slot = NULL, lease_token = nextval('duly.lease_tokens')
WHERE name = CAST(:name AS text) AND slot IS NOT NULL AND lease_expires_at < clock_timestamp()
""")
COUNT_FREE_SLOTS = Statement("""
SELECT greatest(0, CAST(:slots AS int) - count(*))::int FROM duly.jobs
WHERE name = CAST(:name AS text) AND slot IS NOT NULL
""")
# Runs right after CLAIM_JOBS, under the name's advisory lock; the unique index on (name, slot) is the guard.
TAKE_SLOTS = Statement("""
UPDATE duly.jobs SET slot = free.slot
FROM (SELECT id, row_number() OVER (ORDER BY id) AS place FROM unnest(CAST(:ids AS bigint[])) AS id) AS taken
JOIN (SELECT s.number AS slot, row_number() OVER (ORDER BY s.number) AS place
      FROM generate_series(1, CAST(:slots AS int)) AS s(number)
      WHERE NOT EXISTS (SELECT 1 FROM duly.jobs u WHERE u.name = CAST(:name AS text) AND u.slot = s.number)) AS free
  USING (place)
WHERE duly.jobs.id = taken.id
""")

SECONDS_TO_NEXT_JOB = Statement("""
SELECT extract(epoch FROM min(soonest.run_at) - duly.now())::float8
FROM unnest(CAST(:names AS text[])) AS n(name)
CROSS JOIN generate_series(1, 4) AS p(priority)
CROSS JOIN LATERAL (
    SELECT j.run_at FROM duly.jobs j
    WHERE j.name = n.name AND j.priority = p.priority AND j.run_at > duly.now() AND j.run_at < 'infinity'
    ORDER BY j.run_at LIMIT 1) AS soonest
""")

_ENDED = """CAST(:ids AS bigint[]), CAST(:tokens AS bigint[]), CAST(:execution_ids AS uuid[]),
    CAST(:seconds AS float8[])"""
_ENDED_COLUMNS = "id, token, execution_id, seconds"


def _given(values: str = "", columns: str = "", constant: str = "") -> str:
    """What the worker says of its runs, one row for each."""
    columns = _ENDED_COLUMNS + columns
    return " given AS (SELECT *" + constant + " FROM unnest(" + _ENDED + values + ") AS g(" + columns + "))"


_OUTCOMES = ", CAST(:outcomes AS text[]), CAST(:messages AS text[])", ", outcome, message"
_HELD = "id = ANY(CAST(:ids AS bigint[])) AND (id, lease_token) IN (SELECT g.id, g.token FROM given g)"
_LOG = """
    INSERT INTO duly.executions (execution_id, job_id, name, entity_id, source, started_at, completed_at, succeeded,
        outcome, message, retry_count, next_run_at, worker, lease_token, event_id, correlation_id, causation_id)
    SELECT g.execution_id, s.id, s.name, s.entity_id, s.source,
           duly.now() - make_interval(secs => g.seconds), duly.now(),
           g.outcome IN ('done', 'duplicate', 'cancelled', 'snoozed'), g.outcome, g.message, s.ran_as, s.next_run_at,
           CAST(:worker AS text), g.token, s.event_id, s.correlation_id, s.causation_id
    FROM settled s JOIN given g ON g.id = s.id
"""


# The lease token is in the predicate of every terminal write: what comes back is what was really settled.
def _complete(given: str) -> Statement:
    return Statement(
        "WITH"
        + given
        + ", settled AS (DELETE FROM duly.jobs WHERE "
        + _HELD
        + """
    RETURNING id, name, entity_id, source, retry_count AS ran_as, NULL::timestamptz AS next_run_at, event_id,
              correlation_id, causation_id)"""
        + _LOG
        + "RETURNING job_id, lease_token"
    )


COMPLETE_JOBS = _complete(_given(*_OUTCOMES))
COMPLETE_DONE = _complete(
    _given(constant=", 'done' AS outcome, NULL::text AS message")
)  # and nothing to say: most runs

POSTPONE_JOBS = Statement(
    "WITH"
    + _given(_OUTCOMES[0] + ", CAST(:waits_seconds AS float8[])", _OUTCOMES[1] + ", wait_seconds")
    + """, settled AS (
    UPDATE duly.jobs SET
        run_at = duly.now() + make_interval(secs => (SELECT g.wait_seconds FROM given g WHERE g.id = duly.jobs.id)),
        waits = (SELECT CASE g.outcome WHEN 'retried' THEN 'retry' ELSE g.outcome END
                 FROM given g WHERE g.id = duly.jobs.id),
        last_error = coalesce((SELECT g.message FROM given g
                               WHERE g.id = duly.jobs.id AND g.outcome = 'retried'), last_error),
        retry_count = retry_count + (SELECT (g.outcome = 'retried')::int FROM given g WHERE g.id = duly.jobs.id),
        snoozes = snoozes + (SELECT (g.outcome = 'snoozed')::int FROM given g WHERE g.id = duly.jobs.id),
        lease_token = NULL, lease_expires_at = NULL, leased_by = NULL, slot = NULL, progress = NULL
    WHERE """
    + _HELD
    + """
    RETURNING id, name, entity_id, source,
              retry_count - (SELECT (g.outcome = 'retried')::int FROM given g WHERE g.id = duly.jobs.id) AS ran_as,
              run_at AS next_run_at, event_id, correlation_id, causation_id)"""
    + _LOG
    + "RETURNING job_id, lease_token"
)

# The dead letter is written by the statement that deletes the job, so an ordered aggregate stays held (the trigger
# that lets the next one run looks after both).
BURY_JOBS = Statement(
    "WITH"
    + _given(
        _OUTCOMES[0] + ", CAST(:reasons AS text[]), CAST(:error_kinds AS text[])", _OUTCOMES[1] + ", reason, error_kind"
    )
    + ", settled AS (DELETE FROM duly.jobs WHERE "
    + _HELD
    + """
    RETURNING id, name, entity_id, payload, priority, due_at, created_at, original_delay, retry_count,
              retry_count AS ran_as, max_retries, backoff_seconds, source, event_id, order_key, correlation_id,
              causation_id, traceparent, NULL::timestamptz AS next_run_at
), dead AS (
    INSERT INTO duly.dead_letters (id, name, entity_id, payload, priority, due_at, created_at, original_delay,
        retry_count, max_retries, backoff_seconds, source, event_id, order_key, correlation_id, causation_id,
        traceparent, reason, error, error_kind, buried_at)
    SELECT s.id, s.name, s.entity_id, s.payload, s.priority, s.due_at, s.created_at, s.original_delay,
           s.retry_count, s.max_retries, s.backoff_seconds, s.source, s.event_id, s.order_key, s.correlation_id,
           s.causation_id, s.traceparent, g.reason, coalesce(g.message, ''), g.error_kind, duly.now()
    FROM settled s JOIN given g ON g.id = s.id
), logged AS ("""
    + _LOG
    + """RETURNING job_id, lease_token, name, message
), raised AS (
    SELECT duly.alert('dead_letter', l.name, min(l.message)) FROM logged l GROUP BY l.name
)
SELECT l.job_id, l.lease_token FROM logged l, (SELECT count(*) FROM raised) AS forced"""
)

# For jobs that never started: back to where they were, no row in the history, nothing counted.
RELEASE_JOBS = Statement(
    """
UPDATE duly.jobs SET lease_token = NULL, lease_expires_at = NULL, leased_by = NULL, slot = NULL, waits = 'released'
WHERE id = ANY(CAST(:ids AS bigint[]))
  AND (id, lease_token) IN (SELECT * FROM unnest(CAST(:ids AS bigint[]), CAST(:tokens AS bigint[])))
RETURNING id
"""
)

# A job that was taken over from a dead worker goes back as if it had not been: expired, with the attempts it had. The
# history has the run that was lost already, so its next claim writes none (claimed_at).
LAPSE_LEASES = Statement("""
UPDATE duly.jobs SET lease_token = nextval('duly.lease_tokens'), lease_expires_at = clock_timestamp(),
    leased_by = lost_by, retry_count = retry_count - 1, claimed_at = NULL, slot = NULL
WHERE id = ANY(CAST(:ids AS bigint[]))
  AND (id, lease_token) IN (SELECT * FROM unnest(CAST(:ids AS bigint[]), CAST(:tokens AS bigint[])))
RETURNING id
""")

# A row that is locked is being settled at this moment: it needs no renewal.
RENEW_LEASES = Statement("""
UPDATE duly.jobs SET
    lease_expires_at = clock_timestamp() + make_interval(secs => CAST(:lease_seconds AS float8)),
    progress = coalesce((SELECT g.progress
                         FROM unnest(CAST(:ids AS bigint[]), CAST(:progress AS text[])) AS g(id, progress)
                         WHERE g.id = duly.jobs.id), progress)
WHERE id = ANY(ARRAY(SELECT id FROM duly.jobs WHERE id = ANY(CAST(:ids AS bigint[])) FOR UPDATE SKIP LOCKED))
  AND (id, lease_token) IN (SELECT * FROM unnest(CAST(:ids AS bigint[]), CAST(:tokens AS bigint[])))
""")
READ_HOLDERS = Statement("SELECT id, lease_token FROM duly.jobs WHERE id = ANY(CAST(:ids AS bigint[]))")

# After a COMMIT that got no answer: waits for the row if that COMMIT is still under way.
LOOK_UP_COMMIT = Statement("""
SELECT EXISTS (SELECT 1 FROM duly.executions
               WHERE job_id = CAST(:id AS bigint) AND execution_id = CAST(:execution_id AS uuid))
""")
LOCK_HELD_JOB = Statement("""
SELECT id FROM duly.jobs WHERE id = CAST(:id AS bigint) AND lease_token = CAST(:token AS bigint) FOR UPDATE
""")

COUNT_BACKLOG = Statement("""
SELECT count(*)::int, min(late.run_at), max(late.run_at)
FROM unnest(CAST(:names AS text[])) AS n(name)
CROSS JOIN generate_series(1, 4) AS p(priority)
CROSS JOIN LATERAL (
    SELECT j.run_at FROM duly.jobs j
    WHERE j.name = n.name AND j.priority = p.priority AND j.run_at < duly.now() - interval '1 minute'
      AND j.lease_token IS NULL
    ORDER BY j.run_at LIMIT 1000) AS late
""")

# After a claim that got no answer. Scans the queue; happens once after a lost connection.
RELEASE_UNKNOWN = Statement(
    """
UPDATE duly.jobs SET lease_token = NULL, lease_expires_at = NULL, leased_by = NULL, slot = NULL, waits = 'released'
WHERE leased_by = CAST(:worker AS text) AND NOT (id = ANY(CAST(:known AS bigint[])))
"""
)

# The distinct names in the queue by hopping along the index, not by reading it.
FIND_UNKNOWN_NAMES = Statement("""
WITH RECURSIVE hop AS (
    (SELECT name FROM duly.jobs ORDER BY name LIMIT 1)
    UNION ALL
    SELECT (SELECT j.name FROM duly.jobs j WHERE j.name > hop.name ORDER BY j.name LIMIT 1)
    FROM hop WHERE hop.name IS NOT NULL
)
SELECT hop.name, (SELECT count(*) FROM (SELECT 1 FROM duly.jobs j WHERE j.name = hop.name LIMIT 1000) AS capped)::int
FROM hop WHERE hop.name IS NOT NULL AND NOT (hop.name = ANY(CAST(:names AS text[]))) LIMIT 100
""")

LOCK_ORDER = Statement("SELECT duly.lock_order(CAST(:names AS text[]), CAST(:keys AS text[])) IS NULL")
