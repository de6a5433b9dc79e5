"""Every statement on alerts, cases and their timelines.

Locks are taken in one order: a payment, then its case, then whatever the ledger locks. Who changes a case has its row;
every change writes its line of the timeline in the same statement.
"""

from __future__ import annotations

from sqlalchemy import TextClause, text

from apps.finance.compliance.tables import LABEL, LABEL_OF_ASSIGNEE

# Alert, case and the first line of its timeline; what has an alert already is left out, however it is told again.
OPEN_CASES = text("""
WITH given AS MATERIALIZED (
    SELECT g.* FROM unnest(
        CAST(:alert_ids AS uuid[]), CAST(:case_ids AS uuid[]), CAST(:payment_ids AS uuid[]),
        CAST(:transaction_ids AS uuid[]), CAST(:decision_ids AS uuid[]), CAST(:rule_set_versions AS integer[]),
        CAST(:outcomes AS text[]), CAST(:severitys AS text[]), CAST(:factss AS text[]), CAST(:matcheds AS text[]),
        CAST(:incompletes AS text[]), CAST(:traces AS text[]), CAST(:amounts AS bigint[]), CAST(:currencys AS text[]),
        CAST(:initiators AS text[]), CAST(:needs_twos AS boolean[]), CAST(:hourss AS integer[]),
        CAST(:latests AS timestamptz[]))
        WITH ORDINALITY AS g(alert_id, case_id, payment_id, transaction_id, decision_id, rule_set_version, outcome,
                             severity, facts, matched, incomplete, trace, amount, currency, initiated_by, needs_two,
                             hours, latest, place)
), raised AS (
    INSERT INTO compliance.alerts (id, source, payment_id, transaction_id, decision_id, rule_set_id, rule_set_version,
                                   outcome, severity, facts, matched, incomplete, trace, raised_at)
    SELECT alert_id, CAST(:kind AS text), payment_id, transaction_id, decision_id, CAST(:rule_set_id AS text),
           rule_set_version, outcome, severity, CAST(facts AS jsonb), CAST(matched AS jsonb),
           CAST(incomplete AS jsonb), CAST(trace AS jsonb), duly.now()
    FROM given ORDER BY coalesce(transaction_id, payment_id)
    ON CONFLICT DO NOTHING
    RETURNING id
), opened AS (
    INSERT INTO compliance.cases (id, kind, status, severity, alert_id, payment_id, transaction_id, amount, currency,
                                  initiated_by, needs_two, due_at, created_at, updated_at)
    SELECT g.case_id, CAST(:kind AS text), 'OPEN', g.severity, g.alert_id, g.payment_id, g.transaction_id, g.amount,
           g.currency, g.initiated_by, g.needs_two,
           greatest(least(duly.now() + make_interval(hours => g.hours), g.latest), duly.now()), duly.now(), duly.now()
    FROM given g JOIN raised r ON r.id = g.alert_id
    RETURNING *
), told AS (
    INSERT INTO compliance.case_events (case_id, number, at, actor, kind, detail)
    SELECT id, 1, created_at, 'system', 'OPENED', jsonb_build_object('alertId', alert_id) FROM opened
)
SELECT o.* FROM opened o JOIN given g ON g.case_id = o.id ORDER BY g.place
""")
# At most one case follows another: the constraint decides between two who reopen it at the same moment.
REOPEN_CASE = text("""
WITH opened AS (
    INSERT INTO compliance.cases (id, kind, status, severity, alert_id, payment_id, transaction_id, amount, currency,
                                  initiated_by, needs_two, due_at, created_at, updated_at, reopens_id, reopened_by)
    SELECT CAST(:id AS uuid), c.kind, 'OPEN', c.severity, c.alert_id, c.payment_id, c.transaction_id, c.amount,
           c.currency, c.initiated_by, CAST(:needs_two AS boolean), duly.now() + make_interval(hours => :hours),
           duly.now(), duly.now(), c.id, CAST(:actor AS text)
    FROM compliance.cases c WHERE c.id = CAST(:reopens_id AS uuid)
    ON CONFLICT (reopens_id) DO NOTHING
    RETURNING *
), told AS (
    INSERT INTO compliance.case_events (case_id, number, at, actor, kind, detail)
    SELECT id, 1, created_at, reopened_by, 'OPENED', CAST(CAST(:detail AS text) AS jsonb) FROM opened
)
SELECT * FROM opened
""")
SAVE_CASE = text("""
WITH moved AS (
    UPDATE compliance.cases c
    SET status = CAST(:status AS text), needs_two = CAST(:needs_two AS boolean), assignee = CAST(:assignee AS text),
        overdue_at = CAST(:overdue_at AS timestamptz), proposed_decision = CAST(:proposed_decision AS text),
        proposed_code = CAST(:proposed_code AS text), proposed_reason = CAST(:proposed_reason AS text),
        proposed_by = CAST(:proposed_by AS text), proposed_at = CAST(:proposed_at AS timestamptz),
        decision = CAST(:decision AS text), reason_code = CAST(:reason_code AS text), reason = CAST(:reason AS text),
        effect = CAST(:effect AS text), resolved_by = CAST(:resolved_by AS text),
        confirmed_by = CAST(:confirmed_by AS text), ended_at = CAST(:ended_at AS timestamptz),
        version = c.version + 1, updated_at = greatest(duly.now(), c.updated_at)
    WHERE c.id = CAST(:id AS uuid) AND c.version = CAST(:version AS integer)
    RETURNING c.*
), told AS (
    INSERT INTO compliance.case_events (case_id, number, at, actor, kind, detail)
    SELECT id, version, updated_at, CAST(:actor AS text), CAST(:kind AS text), CAST(CAST(:detail AS text) AS jsonb)
    FROM moved
)
SELECT * FROM moved
""")
LOCK_CASE = text("""
SELECT c.*, duly.now() AS moment FROM compliance.cases c WHERE c.id = CAST(:id AS uuid) FOR NO KEY UPDATE
""")
LOCK_OPEN_OF_PAYMENT = text("""
SELECT c.*, duly.now() AS moment FROM compliance.cases c
WHERE c.payment_id = CAST(:id AS uuid) AND c.kind = 'PAYMENT_REVIEW' AND c.status IN ('OPEN', 'PROPOSED')
ORDER BY c.id FOR NO KEY UPDATE
""")
FIND_CASE = text("SELECT * FROM compliance.cases WHERE id = CAST(:id AS uuid)")
FIND_SUCCESSORS = text("""
SELECT reopens_id, id FROM compliance.cases WHERE reopens_id = ANY(CAST(:ids AS uuid[]))
""")
FIND_ALERTS = text("SELECT * FROM compliance.alerts WHERE id = ANY(CAST(:ids AS uuid[]))")
FIND_CASED = text("""
SELECT payment_id FROM compliance.alerts
WHERE source = 'PAYMENT_REVIEW' AND payment_id = ANY(CAST(:payment_ids AS uuid[]))
""")
READ_TIMELINE = text("""
SELECT number, at, actor, kind, detail FROM compliance.case_events
WHERE case_id = CAST(:id AS uuid) AND number < CAST(:before AS integer)
ORDER BY number DESC LIMIT CAST(:limit AS integer)
""")
READ_TIMELINES = text("""
SELECT t.case_id, t.number, t.at, t.actor, t.kind, t.detail
FROM unnest(CAST(:ids AS uuid[])) AS c(id)
CROSS JOIN LATERAL (SELECT e.* FROM compliance.case_events e WHERE e.case_id = c.id
                    ORDER BY e.number LIMIT CAST(:limit AS integer)) AS t
ORDER BY t.case_id, t.number
""")
FIND_CASES_ABOUT = text("""
SELECT * FROM compliance.cases WHERE id IN (
    SELECT p.id FROM compliance.cases p WHERE p.payment_id = CAST(:payment_id AS uuid)
    UNION
    SELECT t.id FROM compliance.cases t WHERE t.transaction_id = ANY(CAST(:transaction_ids AS uuid[])))
ORDER BY id LIMIT CAST(:limit AS integer)
""")
READ_WAITING = text("""
SELECT id, due_at, overdue_at FROM compliance.cases
WHERE status IN ('OPEN', 'PROPOSED') AND id > CAST(:after AS uuid)
ORDER BY id LIMIT CAST(:limit AS integer)
""")
# Whose payment a case is about does not learn of it from a number either.
_SHOWN = " AND (CAST(:hidden_from AS text) IS NULL OR initiated_by IS DISTINCT FROM CAST(:hidden_from AS text))"
COUNT_BY_STATUS = text(
    "SELECT s.status, (SELECT count(*) FROM (SELECT 1 FROM compliance.cases c WHERE c.status >= s.status"
    " AND (c.status, c.id) <= (s.status, CAST('ffffffff-ffff-ffff-ffff-ffffffffffff' AS uuid))" + _SHOWN
    + " ORDER BY c.status DESC, c.id DESC LIMIT CAST(:cap AS integer)) AS counted)"
    " FROM unnest(CAST(:statuses AS text[])) AS s(status)"
)  # fmt: skip
COUNT_OVERDUE = text(
    "SELECT count(*) FROM (SELECT 1 FROM compliance.cases c WHERE c.overdue_at IS NOT NULL"
    " AND c.status IN ('OPEN', 'PROPOSED')" + _SHOWN + " LIMIT CAST(:cap AS integer)) AS counted"
)  # fmt: skip
LOCK_ALERTS = text("""
SELECT a.id FROM duly.alerts a
WHERE a.kind = 'application' AND a.subject = CAST(:subject AS text) AND a.resolved_at IS NULL
ORDER BY a.id FOR UPDATE
""")
ALLOW_FORGETTING = text("SELECT set_config('compliance.forgetting', 'on', true)")
# Those that are being reopened are locked, and left for another time. That nothing follows them is asked again once
# they are ours: who reopened one before that has committed it by then.
LOCK_OLD = text("""
SELECT c.id FROM compliance.cases c
WHERE c.status IN ('RESOLVED', 'EXPIRED')
  AND c.ended_at < duly.now() - make_interval(days => CAST(:days AS integer))
  AND NOT EXISTS (SELECT 1 FROM compliance.cases n WHERE n.reopens_id = c.id)
ORDER BY c.ended_at, c.id LIMIT CAST(:limit AS integer) FOR UPDATE SKIP LOCKED
""")
FORGET_LINES = text("""
DELETE FROM compliance.case_events e WHERE e.case_id = ANY(CAST(:ids AS uuid[]))
  AND NOT EXISTS (SELECT 1 FROM compliance.cases n WHERE n.reopens_id = e.case_id)
""")
FORGET_CASES = text("""
DELETE FROM compliance.cases c WHERE c.id = ANY(CAST(:ids AS uuid[]))
  AND NOT EXISTS (SELECT 1 FROM compliance.cases n WHERE n.reopens_id = c.id)
RETURNING c.alert_id
""")
FORGET_ALERTS = text("""
DELETE FROM compliance.alerts a WHERE a.id = ANY(CAST(:ids AS uuid[]))
  AND NOT EXISTS (SELECT 1 FROM compliance.cases c WHERE c.alert_id = a.id)
""")

# A page of the queue, the newest first. Each statement goes along one index, in its order, whatever the statistics say:
# not "status = :status", for of a status that few have, a plan for any status would read all cases by their ids. Of
# several columns, the index is on one expression of them all: along an index on each, a plan for any values would take
# that of the first column, and look at every case that it finds there.
_LIST = "SELECT * FROM compliance.cases WHERE "
_REST = """
  AND (CAST(:status AS text) IS NULL OR status = CAST(:status AS text))
  AND (CAST(:kind AS text) IS NULL OR kind = CAST(:kind AS text))
  AND (CAST(:severity AS text) IS NULL OR severity = CAST(:severity AS text))
  AND (CAST(:assignee AS text) IS NULL OR assignee = CAST(:assignee AS text))
"""
_BEFORE = "coalesce(CAST(:before AS uuid), 'ffffffff-ffff-ffff-ffff-ffffffffffff')"
_END = " LIMIT CAST(:limit AS integer)"


def _along(given: str, by: str, *, known: str = "") -> str:
    """The statement that goes along the index on one expression and the id, as far as that expression is so."""
    return (
        _LIST + known + "(" + by + ") >= " + given + " AND ((" + by + "), id) < (" + given + ", " + _BEFORE + ")"
        + _SHOWN + " ORDER BY (" + by + ") DESC, id DESC" + _END
    )  # fmt: skip


def _along_each(by: str, *, known: str = "") -> TextClause:
    """A page along each of a few labels, and of all of them the newest."""
    inner = _along("l.label", by, known=known)
    return text(
        "SELECT c.* FROM unnest(CAST(:labels AS text[])) AS l(label) CROSS JOIN LATERAL (" + inner + ") AS c"
        " ORDER BY c.id DESC" + _END
    )  # fmt: skip


_ASSIGNED = "assignee IS NOT NULL AND "
LIST_CASES = text(_LIST + "id < " + _BEFORE + _SHOWN + " ORDER BY id DESC" + _END)
LIST_OVERDUE = text(
    _LIST + "overdue_at IS NOT NULL AND status IN ('OPEN', 'PROPOSED') AND id < " + _BEFORE + _SHOWN + _REST
    + " ORDER BY id DESC" + _END
)  # fmt: skip
LIST_BY_ONE: dict[str, TextClause] = {
    name: text(_along(f"CAST(:{name} AS text)", name, known=_ASSIGNED if name == "assignee" else ""))
    for name in ("status", "kind", "severity", "assignee")
}
"""By the one filter that is given."""
LIST_BY_LABEL = _along_each(LABEL)
LIST_OF_ASSIGNEE_BY_LABEL = _along_each(LABEL_OF_ASSIGNEE, known=_ASSIGNED)
"""By several filters: along every label that fits them, 16 at most."""
