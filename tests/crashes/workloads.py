"""The small pieces of work that lead a process by its failpoints, and the table of which leads by which.

A point without a workload fails a test; a cell that makes no sense stands in ``SENSELESS`` with its reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from duly import Database, Relay
from tests.crashes.bench import Bench
from tests.crashes.checker import Promise, Sent
from tests.engine.outbox.broker import BrokerTransport
from tests.engine.webhooks.hooks import Hooks

AGGREGATES = ("a1", "a2", "a3")
JOBS_DONE = "SELECT NOT EXISTS (SELECT 1 FROM duly.jobs)"
ALL_DONE = "SELECT NOT EXISTS (SELECT 1 FROM duly.jobs) AND NOT EXISTS (SELECT 1 FROM duly.outbox)"
ALL_RECEIVED = "SELECT NOT EXISTS (SELECT 1 FROM duly.jobs) AND (SELECT count(*) FROM duly.received) = 9"
TICKED = "SELECT NOT EXISTS (SELECT 1 FROM duly.schedules WHERE name LIKE 's%%' AND next_run_at <= duly.now())"
LISTENING = """
SELECT NOT EXISTS (SELECT 1 FROM duly.jobs)
   AND EXISTS (SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'duly-listen')
"""
SCHEDULE = """
SELECT duly.schedule(%(name)s, %(entity)s, duly.now() - interval '1 second', max_retries => %(max_retries)s,
                     on_conflict => 'allow')
"""
EMIT = """
INSERT INTO duly.outbox (id, type, topic, aggregate_id, payload, created_at)
VALUES (duly.uuid7(), 'order.changed', 'shop', %(aggregate)s, jsonb_build_object('n', %(n)s::int), duly.now())
RETURNING id::text
"""
BURY = """
INSERT INTO duly.dead_letters (id, name, entity_id, payload, priority, due_at, created_at, original_delay, retry_count,
                               source, reason, error, error_kind, buried_at)
SELECT nextval(pg_get_serial_sequence('duly.jobs', 'id')), 'work', %(entity)s, '{}', 3, duly.now(), duly.now(), '0', 3,
       'Deferred', 'retries_used_up', 'as planned', 'ValueError', duly.now()
RETURNING id
"""
PLAN = """
INSERT INTO duly.schedules (name, cron, next_run_at)
SELECT 's' || n, '0 0 1 1 *', date_trunc('second', duly.now()) FROM generate_series(1, 150) AS n
RETURNING name, next_run_at::text
"""
OLD_HISTORY = """
SELECT duly.create_partitions(parent, (current_date - 40), 2) FROM unnest(ARRAY['events', 'executions']) AS parent
"""
OLD_ROWS = """
INSERT INTO duly.processed_events (consumer, event_id, processed_at)
SELECT 'ledger', duly.uuid7(), duly.now() - make_interval(days => n) FROM unnest(ARRAY[1, 40, 50]) AS n
"""
MAINTAINED = (
    (
        "partitions of the next week are missing",
        "SELECT count(*) < 16 FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid"
        " WHERE i.inhparent IN ('duly.events'::regclass, 'duly.executions'::regclass)"
        " AND to_date(substring(c.relname FROM '[0-9]{8}$'), 'YYYYMMDD') BETWEEN current_date AND current_date + 7",
    ),
    (
        "partitions older than the retention are still there",
        "SELECT count(*) > 0 FROM pg_class WHERE relname ~ '^(events|executions)_p[0-9]{8}$'"
        " AND to_date(right(relname, 8), 'YYYYMMDD') < current_date - 31",
    ),
    (
        "the inbox was not cleaned up, or too much of it",
        "SELECT count(*) <> 1 FROM duly.processed_events WHERE consumer = 'ledger'",
    ),
)


DELIVERED = (
    (
        "not every event was delivered to each of the two subscribers",
        "SELECT count(*) <> 12 FROM duly.webhook_deliveries WHERE status = 'DELIVERED'",
    ),
    (
        "an attempt was not recorded exactly once",
        "SELECT count(*) <> 12 OR max(number) > 1 FROM duly.webhook_attempts",
    ),
    ("a delivery is in a dead letter", "SELECT count(*) > 0 FROM duly.dead_letters"),
)


@dataclass(frozen=True)
class Workload:
    """A piece of work, the process that does it, and how one sees that all of it is done."""

    name: str
    prepare: Callable[[Bench], Promise]
    duties: tuple[str, ...] = ("worker",)
    kind: str = "in_transaction"
    drained: str = JOBS_DONE
    settings: dict[str, Any] = field(default_factory=dict)
    victim: dict[str, Any] = field(default_factory=dict)  # of the order for the armed process alone
    also: str = ""  # armed in the same process, to get there at all
    clean_lease_seconds: float = 60.0  # with `term`: nobody has to wait for it
    then: tuple[str, ...] = ()  # duties of a process that does the rest, after one that runs once
    nudge: Callable[[Bench], None] = lambda _bench: None  # done again and again until the failpoint is reached
    meanwhile: Callable[[Bench], None] = lambda _bench: None  # done again and again until the work is
    questions: tuple[tuple[str, str], ...] = ()  # what must be false in the end
    needs_broker: bool = False
    needs_clients: bool = False
    empty_database: bool = False


def jobs(*entities: str, hopeless: tuple[str, ...] = (), **promised: Any) -> Callable[[Bench], Promise]:
    """Jobs for these entities; a hopeless one has no retries."""

    def prepare(bench: Bench) -> Promise:
        made: dict[int, str] = {}
        for entity in entities:
            retries = 0 if entity in hopeless else None
            given = {"name": "work", "entity": entity, "max_retries": retries}
            made[bench.value(SCHEDULE, given)] = entity
        return Promise(jobs=made, hopeless=set(hopeless), **promised)

    return prepare


def numbers(count: int) -> tuple[str, ...]:
    """Entities."""
    return tuple(str(number) for number in range(1, count + 1))


def events(*consumers: str, poison: tuple[str, ...] = (), **promised: Any) -> Callable[[Bench], Promise]:
    """Three events for each of three aggregates, or one for each where some are poison; consumers that keep the order
    have an exclamation mark."""

    def prepare(bench: Bench) -> Promise:
        aggregates = AGGREGATES if not poison else ("a1", "a2", poison[0], "a3", "a4", poison[1])
        made = [
            Sent(bench.value(EMIT, {"aggregate": aggregate, "n": n}), aggregate, n)
            for n in range(1 if poison else 3)
            for aggregate in aggregates
        ]
        named = {name.rstrip("!"): name.endswith("!") for name in consumers}
        return Promise(events=made, consumers=named, hopeless=set(poison), **promised)

    return prepare


def messages(bench: Bench) -> Promise:
    """The same events, waiting at the broker for two consumers that get theirs from it."""
    bench.rows("UPDATE duly.consumers SET via = 'socket', via_since = duly.now() WHERE name <> 'duly.webhooks'")
    promise = events("ledger!", "mail")(bench)

    async def publish() -> None:
        assert bench.broker is not None
        db = Database(bench.dsn)
        relay = Relay(db, transport=BrokerTransport(bench.broker.port))
        while (await relay.cycle()).done:
            pass
        await relay.close()
        await db.close()

    asyncio.run(publish())
    return promise


def dead_letters(bench: Bench) -> Promise:
    """Three dead letters, to be put back."""
    return Promise(jobs={bench.value(BURY, {"entity": entity}): entity for entity in numbers(3)})


def schedules(bench: Bench) -> Promise:
    """More due schedules than one tick takes."""
    return Promise(occurrences=[(row[0], row[1]) for row in bench.rows(PLAN)], without_effects=True)


def clean_up(bench: Bench) -> Promise:
    """The engine's own jobs, each twice, with something to do."""
    bench.rows(OLD_HISTORY)
    bench.rows(OLD_ROWS)
    made = {}
    for _ in range(2):
        for name in ("create-partitions", "drop-history", "forget-processed-events", "forget-audit"):
            made[bench.value(SCHEDULE, {"name": f"duly.{name}", "entity": None, "max_retries": None})] = name
    return Promise(jobs=made, without_effects=True)


def requests(*, keyed: bool) -> Callable[[Bench], Promise]:
    """Three requests, one after the other; with a key they are repeated until they are answered."""

    def prepare(bench: Bench) -> Promise:
        bench.make_shop()
        names = set(numbers(3))
        bench.ask(sorted(names), keyed=keyed)
        return Promise(keyed=names if keyed else set(), unkeyed=set() if keyed else names, without_effects=True)

    return prepare


def migrations(bench: Bench) -> Promise:
    """An empty database, to become what an undisturbed migration makes."""
    return Promise(schema=bench.reference_schema())


def webhooks(bench: Bench) -> Promise:
    """Six events for two subscribers, one of whom takes one at a time."""
    url = bench.open_receiver()

    async def subscribe() -> None:
        db = Database(bench.dsn)
        hooks = Hooks(db, bench.dsn)
        await hooks.subscribe(url, max_in_flight=1)
        await hooks.subscribe(url)
        await db.close()

    asyncio.run(subscribe())
    for n in range(6):
        bench.value(EMIT, {"aggregate": "a1", "n": n})
    return Promise(without_effects=True)


def end_listener(bench: Bench) -> None:
    """The listening connection is ended, so that it is made again."""
    bench.terminate("application_name = 'duly-listen'")


def let_tick(bench: Bench) -> None:
    """The next tick is half a minute away; an edit of a schedule brings it forward."""
    bench.rows("SELECT pg_notify('duly', 'schedules')")


def refuse_for_a_while(bench: Bench) -> None:
    """The broker refuses a1 once and a2 twice: what follows them is parked, and let go one after the other."""
    attempts = dict(bench.rows("SELECT aggregate_id, max(attempts) FROM duly.outbox GROUP BY aggregate_id"))
    bench.let_through |= {one for one, times in (("a1", 1), ("a2", 2)) if attempts.get(one, times) >= times}
    bench.refuse(dict.fromkeys({"a1", "a2"} - bench.let_through, "try again"))


RELAYED = ("relay", "worker")
SMALL_BATCHES = {"relay_batch": 3}
POISON = ("poison1", "poison2")

WORKLOADS = {
    one.name: one
    for one in (
        Workload("jobs", jobs(*numbers(6))),
        Workload("sync jobs", jobs(*numbers(6)), kind="synchronous"),
        Workload("raw jobs", jobs(*numbers(6)), kind="raw"),
        Workload("limited jobs", jobs(*numbers(6)), kind="limited"),
        Workload(
            "grouped jobs", jobs("1", "2", "poison1", "3", "4", "poison2", hopeless=POISON), kind="grouped",
            settings={"concurrency": 3},
        ),
        Workload(
            "unknown commits", jobs(*numbers(6)), kind="grouped", settings={"concurrency": 3},
            also="worker.before_commit=cut",
        ),
        Workload(
            "jobs together", jobs("1", "2", "poison1", "3", "4", "poison2", hopeless=POISON), kind="together",
            settings={"concurrency": 3},
        ),
        Workload("plain jobs", jobs(*numbers(6), at_least_once=True), kind="without_transaction"),
        Workload(
            "hoarded jobs", jobs(*numbers(90), at_least_once=True), kind="without_transaction",
            settings={"concurrency": 40}, victim={"work_seconds": 1.2, "hoard_seconds": 0.3},
        ),
        Workload(
            "failing jobs", jobs("1", "stubborn", "hopeless", "2", hopeless=("hopeless",), fails_first=True),
            kind="failing",
        ),
        Workload(
            "slow jobs", jobs(*numbers(3)), settings={"concurrency": 3}, victim={"work_seconds": 1.2},
            clean_lease_seconds=1.5,
        ),
        Workload("heard jobs", jobs(*numbers(6)), drained=LISTENING, nudge=end_listener),
        Workload(
            "events", events("ledger!", "mail"), RELAYED, "consumers", ALL_DONE, SMALL_BATCHES,
        ),
        Workload("plain events", events("call!", at_least_once=True), RELAYED, "plain_consumer", ALL_DONE),
        Workload(
            "batched events", events("pack", poison=POISON), RELAYED, "batch_consumer", ALL_DONE,
            {"concurrency": 3},
        ),
        Workload(
            "broker", events("ledger!", "mail", to_broker=True), RELAYED, "consumers", ALL_DONE, SMALL_BATCHES,
            needs_broker=True,
        ),
        Workload(
            "refusing broker", events("ledger!", "mail", to_broker=True), RELAYED, "consumers", ALL_DONE,
            SMALL_BATCHES | {"publish_attempts": 50}, nudge=refuse_for_a_while, meanwhile=refuse_for_a_while,
            needs_broker=True,
        ),
        Workload(
            "messages", messages, ("receiver", "worker"), "consumers", ALL_RECEIVED, {"receive_batch": 2},
            needs_broker=True,
        ),
        Workload(
            "group messages", messages, ("group receiver", "worker"), "consumers", ALL_RECEIVED, {"receive_batch": 2},
            needs_broker=True,
        ),
        Workload("ticks", schedules, ("scheduler",), "nothing", TICKED, meanwhile=let_tick),
        Workload("clean-up", clean_up, kind="nothing", settings={"concurrency": 1}, questions=MAINTAINED),
        Workload("webhooks", webhooks, RELAYED, "webhooks", ALL_DONE, questions=DELIVERED),
        Workload("dead letters", dead_letters, ("requeue",), then=("worker",)),
        Workload("keyed requests", requests(keyed=True), ("api",), "nothing", "SELECT true", needs_clients=True),
        Workload("plain requests", requests(keyed=False), ("api",), "nothing", "SELECT true", needs_clients=True),
        Workload("migrations", migrations, ("migrate",), "nothing", "SELECT true", empty_database=True),
    )
}  # fmt: skip

LEADS_BY: dict[str, tuple[str, ...]] = {
    "handler.mid": ("jobs",),
    "heartbeat.after": ("slow jobs",),
    "heartbeat.before": ("slow jobs",),
    "heartbeat.renewed": ("slow jobs",),
    "http.before_commit": ("keyed requests", "plain requests"),
    "http.before_response": ("keyed requests", "plain requests"),
    "idempotency.reserved": ("keyed requests",),
    "idempotency.stored": ("keyed requests",),
    "inbox.committed": ("plain events", "jobs together"),
    "inbox.marked": ("events",),
    "inbox.noted": ("plain events", "jobs together"),
    "maintenance.created": ("clean-up",),
    "maintenance.dropped": ("clean-up",),
    "maintenance.forgot": ("clean-up",),
    "migrate.before_step": ("migrations",),
    "migrate.committed": ("migrations",),
    "migrate.step_done": ("migrations",),
    "migrate.turn_taken": ("migrations",),
    "receiver.acknowledged": ("messages", "group messages"),
    "receiver.before_commit": ("messages", "group messages"),
    "receiver.committed": ("messages", "group messages"),
    "receiver.received": ("messages", "group messages"),
    "relay.before_commit": ("events", "broker"),
    "relay.committed": ("events", "broker"),
    "relay.fetched": ("events", "broker"),
    "relay.parked": ("refusing broker",),
    "relay.sent": ("broker",),
    "relay.unparked": ("refusing broker",),
    "requeue.inserted": ("dead letters",),
    "settle.written": ("jobs", "plain jobs", "failing jobs"),
    "tick.advanced": ("ticks",),
    "tick.chosen": ("ticks",),
    "tick.committed": ("ticks",),
    "tick.inserted": ("ticks",),
    "transport.sent": ("broker",),
    "wakeup.subscribed": ("heard jobs",),
    "webhook.before_send": ("webhooks",),
    "webhook.recorded": ("webhooks",),
    "webhook.sent": ("webhooks",),
    "worker.batch_split": ("batched events",),
    "worker.before_claim": ("jobs",),
    "worker.before_claim_commit": ("limited jobs",),
    "worker.before_commit": ("jobs", "sync jobs", "raw jobs", "grouped jobs", "events"),
    "worker.before_handler": ("jobs", "sync jobs", "plain jobs"),
    "worker.before_settle": ("jobs", "plain jobs", "failing jobs"),
    "worker.claimed": ("jobs", "limited jobs"),
    "worker.committed": ("jobs", "sync jobs", "raw jobs", "grouped jobs", "events"),
    "worker.group_split": ("grouped jobs",),
    "worker.handler_done": ("jobs", "sync jobs", "plain jobs", "plain events"),
    "worker.released": ("hoarded jobs",),
    "worker.resolving": ("unknown commits",),
    "worker.settled": ("plain jobs", "failing jobs"),
    "worker.together_split": ("jobs together",),
}
SENSELESS: dict[tuple[str, str], str] = {}
