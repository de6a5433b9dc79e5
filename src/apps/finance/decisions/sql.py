"""The statements of decisions."""

from __future__ import annotations

from sqlalchemy import text

ADVISORY_KEY = 0x64656369
MOST_DISTINCT = 1_000
"""A distinct count is exact up to here, and says this number for everything above."""

# Changes of what is in force go one after the other, over all rule sets, so that a list and the sets that use it never
# meet half-way. They are rare, and no evaluation waits for them.
LOCK_CHANGES = text("SELECT pg_advisory_xact_lock(:key, 0)")
FIND_RULE_SET = text("""
SELECT r.id, r.description, r.version, r.snapshot_id, r.created_at, r.updated_at, s.settings
FROM decisions.rule_sets r JOIN decisions.snapshots s ON s.id = r.snapshot_id WHERE r.id = :id
""")
LIST_RULE_SETS = text("""
SELECT r.id, r.description, r.version, r.snapshot_id, r.created_at, r.updated_at, s.settings
FROM decisions.rule_sets r JOIN decisions.snapshots s ON s.id = r.snapshot_id
WHERE r.id > coalesce(CAST(:after AS text), '') ORDER BY r.id LIMIT :limit
""")
INSERT_RULE_SET = text("""
INSERT INTO decisions.rule_sets (id, description, created_at, updated_at)
VALUES (:id, :description, duly.now(), duly.now()) ON CONFLICT (id) DO NOTHING
RETURNING id
""")
COUNT_RULE_SETS = text("SELECT count(*) FROM decisions.rule_sets")
DESCRIBE_RULE_SET = text("UPDATE decisions.rule_sets SET description = :description WHERE id = :id")
PUBLISH = text("""
WITH active AS (
    SELECT r.id, r.active_version AS version, v.list_ids
    FROM decisions.rules r JOIN decisions.rule_versions v ON v.rule_id = r.id AND v.version = r.active_version
    WHERE r.rule_set_id = :id AND r.status = 'ACTIVE'
), used AS (
    SELECT l.id, l.version FROM decisions.lists l WHERE l.id IN (SELECT unnest(list_ids) FROM active)
), made AS (
    INSERT INTO decisions.snapshots (id, rule_set_id, version, settings, rule_ids, rule_versions, list_ids,
                                     list_versions, reason, created_by, created_at)
    SELECT duly.uuid7(duly.now()), r.id, r.version + 1, coalesce(CAST(:settings AS jsonb), s.settings),
           ARRAY(SELECT id FROM active ORDER BY id), ARRAY(SELECT version FROM active ORDER BY id),
           ARRAY(SELECT id FROM used ORDER BY id), ARRAY(SELECT version FROM used ORDER BY id),
           :reason, :created_by, duly.now()
    FROM decisions.rule_sets r LEFT JOIN decisions.snapshots s ON s.id = r.snapshot_id
    WHERE r.id = :id
    RETURNING id, rule_set_id, version, settings
)
UPDATE decisions.rule_sets r SET version = m.version, snapshot_id = m.id, updated_at = duly.now()
FROM made m WHERE r.id = m.rule_set_id
RETURNING r.id, r.description, r.version, r.snapshot_id, r.created_at, r.updated_at, m.settings
""")
FIND_SNAPSHOT = text("""
SELECT id, rule_set_id, version, settings, list_ids, list_versions FROM decisions.snapshots WHERE id = :id
""")
FIND_RULES_OF_SNAPSHOT = text("""
SELECT v.rule_id, v.version, v.name, v.priority, v.terminate, v.conditions, v.action, v.created_by, v.created_at
FROM decisions.snapshots s CROSS JOIN LATERAL unnest(s.rule_ids, s.rule_versions) AS u(rule_id, version)
JOIN decisions.rule_versions v ON v.rule_id = u.rule_id AND v.version = u.version
WHERE s.id = :id
""")
FIND_LISTS_OF_SNAPSHOT = text("""
SELECT v.list_id, v.members
FROM decisions.snapshots s CROSS JOIN LATERAL unnest(s.list_ids, s.list_versions) AS u(list_id, version)
JOIN decisions.list_versions v ON v.list_id = u.list_id AND v.version = u.version
WHERE s.id = :id
""")
INSERT_RULE = text("""
INSERT INTO decisions.rules (id, rule_set_id, version, created_by, created_at, updated_at)
VALUES (duly.uuid7(), :rule_set_id, 1, :created_by, duly.now(), duly.now())
RETURNING id
""")
INSERT_RULE_VERSION = text("""
INSERT INTO decisions.rule_versions (rule_id, version, name, priority, terminate, conditions, action, list_ids,
                                     created_by, created_at)
VALUES (:rule_id, :version, :name, :priority, :terminate, CAST(:conditions AS jsonb), CAST(:action AS jsonb), :list_ids,
        :created_by, duly.now())
""")
LOCK_RULE = text("SELECT version FROM decisions.rules WHERE id = :id FOR UPDATE")
RAISE_RULE_VERSION = text("UPDATE decisions.rules SET version = :version, updated_at = duly.now() WHERE id = :id")
ACTIVATE_RULE = text("""
UPDATE decisions.rules SET status = 'ACTIVE', active_version = :version, updated_at = duly.now()
WHERE id = :id AND status <> 'DEPRECATED'
""")
DEPRECATE_RULE = text("""
UPDATE decisions.rules SET status = 'DEPRECATED', active_version = NULL, updated_at = duly.now()
WHERE id = :id AND status <> 'DEPRECATED'
RETURNING rule_set_id
""")
COUNT_ACTIVE = text("SELECT count(*) FROM decisions.rules WHERE rule_set_id = :id AND status = 'ACTIVE'")
UPSERT_LIST = text("""
INSERT INTO decisions.lists (id, version, created_at, updated_at) VALUES (:id, 1, duly.now(), duly.now())
ON CONFLICT (id) DO UPDATE SET version = lists.version + 1, updated_at = duly.now()
RETURNING version
""")
INSERT_LIST_VERSION = text("""
INSERT INTO decisions.list_versions (list_id, version, members, created_by, created_at)
VALUES (:id, :version, :members, :created_by, duly.now())
RETURNING list_id AS id, version, members, created_by, created_at
""")
FIND_LIST = text("""
SELECT l.id, v.version, v.members, v.created_by, v.created_at
FROM decisions.lists l JOIN decisions.list_versions v ON v.list_id = l.id
WHERE l.id = :id AND v.version = coalesce(CAST(:version AS integer), l.version)
""")
LIST_LISTS = text("""
SELECT l.id, l.version, cardinality(v.members) AS size, l.updated_at
FROM decisions.lists l JOIN decisions.list_versions v ON v.list_id = l.id AND v.version = l.version
WHERE l.id > coalesce(CAST(:after AS text), '') ORDER BY l.id LIMIT :limit
""")
FIND_LIST_NAMES = text("SELECT id FROM decisions.lists WHERE id = ANY(CAST(:ids AS text[]))")
FIND_CURRENT_LISTS = text("""
SELECT v.list_id, v.members FROM decisions.lists l
JOIN decisions.list_versions v ON v.list_id = l.id AND v.version = l.version WHERE l.id = ANY(CAST(:ids AS text[]))
""")
FIND_USERS_OF_LIST = text("""
SELECT r.id FROM decisions.rule_sets r JOIN decisions.snapshots s ON s.id = r.snapshot_id
WHERE s.list_ids @> ARRAY[CAST(:id AS text)] ORDER BY r.id
""")
# The first statement of every evaluation.
FIND_CURRENT = text("SELECT snapshot_id, duly.now() AS now FROM decisions.rule_sets WHERE id = :id")
# The same with the velocity facts.
FIND_CURRENT_WITH_VELOCITY = text("""
SELECT r.snapshot_id, n.now, ARRAY(
    SELECT decisions.measure(f.function, f.stream, f.key, f.seconds, f.excluded, n.now, CAST(:most_distinct AS integer))
    FROM unnest(CAST(:functions AS text[]), CAST(:streams AS text[]), CAST(:keys AS text[]),
                CAST(:windows AS integer[]), CAST(:excluded AS text[]))
         WITH ORDINALITY AS f(function, stream, key, seconds, excluded, place)
    ORDER BY f.place) AS velocity
FROM decisions.rule_sets r CROSS JOIN (SELECT duly.now()) AS n(now)
WHERE r.id = :id
""")
# In the order of their keys: two that observe the same ones wait for each other, and never in a circle.
OBSERVE = text("""
WITH given AS (
    SELECT g.stream, g.key, coalesce(g.amount, 0) AS amount, g.value, coalesce(g.at, duly.now()) AS at
    FROM unnest(CAST(:streams AS text[]), CAST(:keys AS text[]), CAST(:amounts AS numeric[]), CAST(:values AS text[]),
                CAST(:ats AS timestamptz[])) AS g(stream, key, amount, value, at)
), seen AS (
    INSERT INTO decisions.sightings (stream, key, value, seen_at)
    SELECT stream, key, value, max(at) FROM given WHERE value IS NOT NULL GROUP BY 1, 2, 3 ORDER BY 1, 2, 3
    ON CONFLICT (stream, key, value) DO UPDATE SET seen_at = greatest(sightings.seen_at, excluded.seen_at)
)
INSERT INTO decisions.buckets (stream, key, width, start, count, total, largest)
SELECT g.stream, g.key, w.width, date_trunc(w.width, g.at, 'UTC'), count(*), sum(g.amount), max(g.amount)
FROM given g CROSS JOIN (VALUES ('minute'), ('hour')) AS w(width) GROUP BY 1, 2, 3, 4 ORDER BY 1, 2, 3, 4
ON CONFLICT (stream, key, width, start) DO UPDATE
SET count = buckets.count + excluded.count, total = buckets.total + excluded.total,
    largest = greatest(buckets.largest, excluded.largest)
""")
INSERT_DECISION = text("""
INSERT INTO decisions.log (id, rule_set_id, rule_set_version, snapshot_id, engine, subject, at, decision, score, facts,
                           matched, incomplete, evaluated, latency_us)
VALUES (duly.uuid7(CAST(:at AS timestamptz)), :rule_set_id, :rule_set_version, :snapshot_id, :engine, :subject, :at,
        :decision, :score, CAST(:facts AS jsonb), CAST(:matched AS jsonb), CAST(:incomplete AS jsonb), :evaluated,
        :latency_us)
RETURNING id, duly.commit_mark()
""")
# The same in the only statement of an evaluation whose rules ask for neither the time nor the past: a row is written if
# the rules that decided are in force, and the moment is added to the facts as Python would write it.
INSERT_DECISION_IN_FORCE = text("""
INSERT INTO decisions.log (id, rule_set_id, rule_set_version, snapshot_id, engine, subject, at, decision, score, facts,
                           matched, incomplete, evaluated, latency_us)
SELECT duly.uuid7(n.now), r.id, CAST(:rule_set_version AS integer), r.snapshot_id, CAST(:engine AS text),
       CAST(:subject AS text), n.now, CAST(:decision AS text), CAST(:score AS integer),
       CAST(:facts AS jsonb) || jsonb_build_object('now', replace(
           to_char(n.now AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US'), '.000000', '') || '+00:00'),
       CAST(:matched AS jsonb), CAST(:incomplete AS jsonb), CAST(:evaluated AS integer), CAST(:latency_us AS integer)
FROM decisions.rule_sets r CROSS JOIN (SELECT duly.now() OFFSET 0) AS n(now)
WHERE r.id = CAST(:rule_set_id AS text) AND r.snapshot_id = CAST(:snapshot_id AS uuid)
RETURNING id, at, duly.commit_mark()
""")
INSERT_DECISIONS = text("""
WITH given AS MATERIALIZED (
    SELECT g.*, duly.uuid7(CAST(:at AS timestamptz)) AS id
    FROM unnest(CAST(:subjects AS text[]), CAST(:decisions AS text[]), CAST(:scores AS integer[]),
                CAST(:factss AS text[]), CAST(:matcheds AS text[]), CAST(:incompletes AS text[]),
                CAST(:evaluateds AS integer[]), CAST(:latency_uss AS integer[]))
         WITH ORDINALITY AS g(subject, decision, score, facts, matched, incomplete, evaluated, latency_us, place)
), written AS (
    INSERT INTO decisions.log (id, rule_set_id, rule_set_version, snapshot_id, engine, subject, at, decision, score,
                               facts, matched, incomplete, evaluated, latency_us)
    SELECT id, CAST(:rule_set_id AS text), CAST(:rule_set_version AS integer), CAST(:snapshot_id AS uuid),
           CAST(:engine AS text), subject, CAST(:at AS timestamptz), decision, score, CAST(facts AS jsonb),
           CAST(matched AS jsonb), CAST(incomplete AS jsonb), evaluated, latency_us
    FROM given
)
SELECT id FROM given ORDER BY place
""")
FIND_DECISION = text("SELECT * FROM decisions.log WHERE id = :id")
LIST_DECISIONS = text("""
SELECT * FROM decisions.log
WHERE rule_set_id = :rule_set_id AND id < coalesce(CAST(:before AS uuid), 'ffffffff-ffff-ffff-ffff-ffffffffffff')
  AND decision = coalesce(CAST(:decision AS text), decision)
ORDER BY id DESC LIMIT :limit
""")
# What was not approved is what people look for, and rare: it has an index of its own.
LIST_FLAGGED = text("""
SELECT * FROM decisions.log
WHERE rule_set_id = :rule_set_id AND decision = :decision AND decision <> 'APPROVE'
  AND id < coalesce(CAST(:before AS uuid), 'ffffffff-ffff-ffff-ffff-ffffffffffff')
ORDER BY id DESC LIMIT :limit
""")
FIND_FACTS = text("""
SELECT id, facts, decision FROM decisions.log
WHERE rule_set_id = :rule_set_id AND id < CAST(:before AS uuid) AND id >= CAST(:since AS uuid)
ORDER BY id DESC LIMIT :limit
""")
FIND_IDS_OF_WINDOW = text("""
SELECT duly.uuid7_floor(coalesce(CAST(:since AS timestamptz), duly.now() - interval '7 days')),
       duly.uuid7_floor(coalesce(CAST(:until AS timestamptz), duly.now() + interval '1 day'))
""")
BOUND_LOCK_WAIT = text("SELECT set_config('lock_timeout', '5s', true)")
ALLOW_FORGETTING = text("SELECT set_config('decisions.forgetting', 'on', true)")
CREATE_PARTITIONS = text(
    "SELECT decisions.create_partitions(CAST(duly.now() AT TIME ZONE 'UTC' AS date), CAST(:days AS integer))"
)
DROP_PARTITIONS = text(
    "SELECT decisions.drop_partitions(CAST(duly.now() AT TIME ZONE 'UTC' AS date) - CAST(:days AS integer))"
)
FORGET_STRAYS = text("""
WITH gone AS (
    DELETE FROM decisions.log_default WHERE id = ANY(ARRAY(
        SELECT id FROM decisions.log_default
        WHERE id < duly.uuid7_floor(duly.now() - make_interval(days => CAST(:days AS integer)))
        ORDER BY id LIMIT :batch))
    RETURNING 1)
SELECT count(*) FROM gone
""")
FORGET_BUCKETS = text("""
WITH gone AS (
    DELETE FROM decisions.buckets WHERE ctid = ANY(ARRAY(
        SELECT ctid FROM decisions.buckets WHERE start < duly.now() - make_interval(days => CAST(:days AS integer))
        ORDER BY start LIMIT :batch))
    RETURNING 1)
SELECT count(*) FROM gone
""")
FORGET_SIGHTINGS = text("""
WITH gone AS (
    DELETE FROM decisions.sightings WHERE ctid = ANY(ARRAY(
        SELECT ctid FROM decisions.sightings WHERE seen_at < duly.now() - make_interval(days => CAST(:days AS integer))
        ORDER BY seen_at LIMIT :batch))
    RETURNING 1)
SELECT count(*) FROM gone
""")
# A snapshot that was replaced before the oldest decision of the log: no replay can ask for it.
FORGET_SNAPSHOTS = text("""
WITH gone AS (
    DELETE FROM decisions.snapshots WHERE id = ANY(ARRAY(
        SELECT old.id FROM decisions.snapshots old
        JOIN decisions.snapshots following
          ON following.rule_set_id = old.rule_set_id AND following.version = old.version + 1
        WHERE following.created_at < duly.now() - make_interval(days => CAST(:days AS integer))
        ORDER BY old.id LIMIT :batch))
    RETURNING 1)
SELECT count(*) FROM gone
""")
FORGET_LIST_VERSIONS = text("""
WITH gone AS (
    DELETE FROM decisions.list_versions v USING decisions.lists l
    WHERE l.id = v.list_id AND v.version < l.version
      AND v.created_at < duly.now() - make_interval(days => CAST(:days AS integer))
      AND NOT EXISTS (
          SELECT 1 FROM decisions.snapshots s CROSS JOIN LATERAL unnest(s.list_ids, s.list_versions) AS u(id, version)
          WHERE u.id = v.list_id AND u.version = v.version)
    RETURNING 1)
SELECT count(*) FROM gone
""")
