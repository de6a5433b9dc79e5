"""``duly why ID`` answers in sentences: E7.1 (one job and why it waits), for every reason that there is."""

from __future__ import annotations

import re
from datetime import timedelta
from uuid import UUID, uuid4

from duly.db import Database
from duly.operate import cancel_job, discard_event, retry_dead_letter, why
from tests.engine.operate.conftest import NOON, WHO, Make

CORRELATION = UUID("019c0000-0000-7000-8000-00000000c0de")


async def ask(db: Database, id: object) -> str:
    """The whole answer, one sentence a line; asked twice, it is the same but for the physical clock."""
    async with db.transaction() as tx:
        return "\n".join(await why(tx, str(id)))


# -------------------------------------------------------------------------------------------------- a job that waits


async def test_a_job_before_its_time_says_when_it_is_due(db: Database, make: Make) -> None:
    id = make.job(entity_id="order-1", run_at=NOON + timedelta(minutes=4))
    said = await ask(db, id)
    assert said.startswith(f"Job {id} is charge for order-1.\n")
    assert "It is not due until 2026-03-02 12:04:00 UTC (in 4 min)." in said
    assert said == await ask(db, id)


async def test_a_job_to_be_retried_says_which_attempt_comes_and_what_went_wrong(db: Database, make: Make) -> None:
    """E3.6."""
    id = make.job(
        run_at=NOON + timedelta(seconds=90), waits="retry", retry_count=1, max_retries=2, last_error="bank\n is away"
    )
    make.execution(id, outcome="retried", message="bank is away", next_run_at=NOON + timedelta(seconds=90))
    said = await ask(db, id)
    assert "It waits to be retried at 2026-03-02 12:01:30 UTC (in 1 min 30 s): attempt 2 of 3." in said
    assert "The last error: bank is away" in said
    assert (
        "Attempt 1 began 2026-03-02 11:59:58 UTC in w1, took 2 s and failed: bank is away; "
        "the next run was set for 2026-03-02 12:01:30 UTC."
    ) in said


async def test_a_job_that_was_put_off_given_back_or_requeued_says_so(db: Database, make: Make) -> None:
    later = NOON + timedelta(hours=2)
    snoozed = make.job(waits="snoozed", snoozes=2, run_at=later)
    released, requeued = make.job(waits="released"), make.job(waits="requeued", run_at=later)
    unknown = make.job(waits="unknown_commit", run_at=later)
    assert "Its handler put it off 2 times; it waits until 2026-03-02 14:00:00 UTC (in 2 h)." in await ask(db, snoozed)
    assert "A worker that stopped gave it back. It is due since" in await ask(db, released)
    assert "An operator put it back into the queue. It is not due until" in await ask(db, requeued)
    assert "The connection was lost while its last run committed" in await ask(db, unknown)


async def test_a_job_behind_another_of_its_aggregate_names_it_and_what_that_one_waits_for(
    db: Database, make: Make
) -> None:
    """E2.3."""
    head = make.job("consumer:audit", order_key="order-1", waits="retry", run_at=NOON + timedelta(minutes=1))
    make.behind("consumer:audit", "order-1")
    id = make.behind("consumer:audit", "order-1")
    said = await ask(db, id)
    assert f"It waits behind job {head} of the same aggregate (order-1), which must finish first; 2 are before" in said
    assert f"Job {head}: It waits to be retried at 2026-03-02 12:01:00 UTC (in 1 min): attempt 1." in said


async def test_a_job_behind_a_dead_letter_says_what_to_do_with_it(db: Database, make: Make) -> None:
    make.dead(1, "consumer:audit", order_key="order-1")
    id = make.behind("consumer:audit", "order-1", id=5)
    said = await ask(db, id)
    assert "It waits behind dead letter 1 of the same aggregate (order-1): retry it (`duly dead retry 1`)" in said


async def test_a_job_behind_nothing_says_who_lets_it_go(db: Database, make: Make) -> None:
    id = make.behind("consumer:audit", "order-1")
    said = await ask(db, id)
    assert f"none is left: a relay lets it go when it next looks, or you do (`duly jobs run-now {id}`)." in said


async def test_a_due_job_without_a_worker_says_whether_none_is_alive_or_none_knows_its_name(
    db: Database, make: Make
) -> None:
    """E3.10: a job whose name has no handler is left for a worker that has one."""
    id = make.job(run_at=NOON - timedelta(minutes=3))
    make.process("dead", names=("charge",), silent=60)
    make.process("r1", "relay")
    said = await ask(db, id)
    assert "It is due since 2026-03-02 11:57:00 UTC (3 min ago)." in said
    assert "No worker is alive: start one (`duly worker`)." in said
    make.process("w1", names=("refund", "mail"))
    assert "No live worker knows the name charge; 1 worker alive, knowing mail and refund." in await ask(db, id)
    make.process("w2", names=("charge",))
    assert "A worker that knows its name is alive and should take it any moment." in await ask(db, id)


async def test_a_due_job_of_a_limited_name_says_who_holds_the_slots(db: Database, make: Make) -> None:
    make.process("w1", names=("charge",))
    first, second = make.job(slot=1), make.job(slot=2)
    make.lease(first)
    make.lease(second)
    id = make.job()
    assert f"its slots are taken by jobs {first} and {second}." in await ask(db, id)


async def test_a_due_job_in_a_long_queue_says_how_many_come_before_it(db: Database, make: Make) -> None:
    make.process("w1", names=("charge",))
    make.job(priority=1)
    make.job(run_at=NOON - timedelta(minutes=1))
    make.job(priority=4, run_at=NOON - timedelta(minutes=1))
    make.job(priority=1, run_at=NOON + timedelta(minutes=1))
    make.lease(make.job(run_at=NOON - timedelta(minutes=1)))
    id = make.job()
    assert "2 due jobs of its name come before it." in await ask(db, id)


# ---------------------------------------------------------------------------------------- a job that does not wait


async def test_a_running_job_says_where_since_when_and_until_when_its_lease_lasts(db: Database, make: Make) -> None:
    """E3.5, E3.9."""
    id = make.job()
    make.lease(id, worker="host:12:worker")
    make.run("UPDATE duly.jobs SET progress = '3 of 10 pages'")
    make.clock.advance(seconds=61)
    said = await ask(db, id)
    assert (
        "It is running since 2026-03-02 12:00:00 UTC (1 min 1 s ago) in host:12:worker; its lease lasts until" in said
    )
    assert re.search(r"until .* UTC \(in (5 min|4 min \d+ s)\) and is renewed", said)
    assert "It says: 3 of 10 pages." in said


async def test_a_job_whose_worker_died_says_so_until_it_is_taken_over(db: Database, make: Make) -> None:
    """E3.5: a zombie goes back to pending."""
    id = make.job()
    make.lease(id, worker="host:12:worker", seconds=-120)
    said = await ask(db, id)
    assert "Its lease expired 2 min ago: host:12:worker died or stalled, and nobody has taken it over yet." in said
    assert "No worker is alive" in said


async def test_a_dead_letter_says_why_it_died_and_who_waits_behind_it(db: Database, make: Make) -> None:
    """E3.7."""
    make.dead(7, "consumer:audit", entity_id="order-1", order_key="order-1", buried_at=NOON - timedelta(hours=26))
    make.behind("consumer:audit", "order-1", id=9)
    make.execution(7, "consumer:audit", outcome="buried", message="boom", retry_count=3)
    said = await ask(db, 7)
    assert "It is a dead letter since 2026-03-01 10:00:00 UTC (1 d 2 h ago): its retries were used up, after 4" in said
    assert "The error (ValueError): boom" in said
    assert "1 later job of its aggregate (order-1) wait behind it." in said
    assert "Attempt 4 began 2026-03-02 11:59:58 UTC in w1, took 2 s and failed for good: boom." in said


async def test_a_finished_job_says_how_each_attempt_ended(db: Database, make: Make) -> None:
    """E3.8."""
    make.execution(3, outcome="lost", message="the lease expired", completed_at=NOON - timedelta(minutes=5))
    make.execution(3, message="charged 3 orders", retry_count=1)
    said = await ask(db, 3)
    assert "It is done: its last run ended at 2026-03-02 12:00:00 UTC" in said
    assert said.index("was lost: its worker died or stalled: the lease") < said.index("succeeded: charged 3 orders")


async def test_a_job_says_what_operators_did_to_it_even_when_it_is_gone(db: Database, make: Make) -> None:
    """E7.1: a cancelled job has no run in the log; the audit is what is left."""
    id = make.job()
    make.dead(77)
    async with db.transaction() as tx:
        await cancel_job(tx, id, **WHO)
        await retry_dead_letter(tx, 77, actor="bob")
    assert await ask(db, id) == (
        f"Job {id} is gone; only the record of it is left.\n"
        "On 2026-03-02 12:00:00 UTC alice did job.cancelled: the bank is back."
    )
    assert "bob did dead_letter.retried, without a reason." in await ask(db, 77)


async def test_a_job_says_where_it_came_from_and_what_it_caused(db: Database, make: Make) -> None:
    """Correlation and causation ids make the chain."""
    source = make.published("order-1")
    id = make.job(
        "consumer:audit",
        entity_id="order-1",
        event_id=source,
        causation_id=source,
        correlation_id=CORRELATION,
        waits="retry",
    )
    make.execution(id, "consumer:audit", entity_id="order-1", event_id=source, outcome="retried")
    headers = f'{{"causation_id": "{source}"}}'
    published = make.published("order-1", headers=headers, type="audit.written")
    pending = make.event("order-1", headers=headers, type="audit.checked")
    make.job("consumer:mail", entity_id="order-1", event_id=source, causation_id=source)
    timer = make.job("remind", entity_id="order-7", causation_id=source)
    dead = make.dead(900, "fax", causation_id=source)
    make.execution(901, "print", entity_id="order-1", causation_id=source)
    said = await ask(db, id)
    assert f"It is the work of consumer audit on event {source}." in said
    assert f"Its correlation id is {CORRELATION}." in said
    assert f"event {published} (audit.written, PUBLISHED)" in said
    assert f"event {pending} (audit.checked, PENDING)" in said
    assert (
        f"It caused job {timer} (remind, waiting), job {dead} (fax, dead letter) and job 901 (print, done)." in said
    ), "the other consumer's job was made by the relay, not by this one"


async def test_a_timer_says_which_run_caused_it_and_a_scheduled_job_its_schedule(db: Database, make: Make) -> None:
    run = make.execution(50, "checkout")
    caused = make.job("remind", causation_id=run)
    assert f"Its cause is {run}." in await ask(db, caused)
    assert f"It caused job {caused} (remind, waiting)." in await ask(db, 50)
    scheduled, manual = make.job("sweep", source="Scheduled"), make.job("sweep", source="Manual")
    assert "It comes from the schedule sweep." in await ask(db, scheduled)
    assert "Somebody triggered the schedule sweep by hand." in await ask(db, manual)


# ------------------------------------------------------------------------------------------------------------ events


async def test_a_pending_event_says_whether_a_relay_is_alive(db: Database, make: Make) -> None:
    """E1.4."""
    id = make.event()
    assert "It is PENDING, and no relay is alive: start one (`duly relay`)." in await ask(db, id)
    make.process("r1", "relay")
    assert "It is PENDING: a relay is alive and should publish it any moment." in await ask(db, id)


async def test_an_event_that_backs_off_says_when_it_is_tried_again(db: Database, make: Make) -> None:
    id = make.event(attempts=2, retry_at=NOON + timedelta(seconds=4), last_error="broker is away")
    said = await ask(db, id)
    assert "It is PENDING: 2 attempts failed, the next is at 2026-03-02 12:00:04 UTC (in 4 s)." in said
    assert "The last error: broker is away" in said


async def test_an_event_held_behind_another_names_it(db: Database, make: Make) -> None:
    """E1.5."""
    failed = make.failed_event("order-1")
    held = make.event("order-1", parked=True)
    backing_off = make.event("order-2", attempts=1, retry_at=NOON + timedelta(seconds=2), last_error="slow")
    later = make.event("order-2")
    assert f"It is held behind event {failed} of the same aggregate, which is FAILED since" in await ask(db, held)
    assert f"held behind event {backing_off} of the same aggregate, which is tried again at" in await ask(db, later)


async def test_a_failed_event_says_what_to_do_and_who_waits_behind_it(db: Database, make: Make) -> None:
    id = make.failed_event("order-1")
    make.event("order-1", parked=True)
    said = await ask(db, id)
    assert "It is FAILED since 2026-03-02 12:00:00 UTC (less than a second ago), after 5 attempts." in said
    assert f"`duly events requeue {id}`" in said
    assert "1 later event of its aggregate wait behind it." in said


async def test_a_published_event_says_how_each_consumer_ended(db: Database, make: Make) -> None:
    """E2.1, E2.3."""
    id = make.published("order-1", headers=f'{{"correlation_id": "{CORRELATION}"}}')
    facts = {"entity_id": "order-1", "event_id": id}
    waiting = make.job("consumer:mail", **facts)
    running = make.job("consumer:print", **facts)
    make.lease(running)
    make.dead(900, "consumer:fax", **facts)
    make.execution(901, "consumer:audit", **facts)
    make.execution(waiting, "consumer:mail", outcome="retried", **facts)
    make.run(
        "INSERT INTO duly.consumers (name, patterns, registered_at) VALUES ('ledger', '{*}', duly.now());"
        "INSERT INTO duly.processed_events SELECT 'ledger', id, duly.now() FROM duly.events"
    )
    said = await ask(db, id)
    assert "It is PUBLISHED since 2026-03-02 12:00:00 UTC" in said
    assert f"Consumer mail has job {waiting}, which waits." in said
    assert f"Consumer print has job {running}, which is taken by a worker." in said
    assert "Consumer fax failed for good: dead letter 900: boom." in said
    assert "Consumer audit handled it in job 901." in said
    assert "Consumer ledger has processed it." in said
    assert f"Its correlation id is {CORRELATION}." in said
    other = make.published("order-2")
    assert "No consumer of this database got a job for it" in await ask(db, other)


async def test_a_discarded_event_is_still_explained(db: Database, make: Make) -> None:
    id = make.failed_event()
    async with db.transaction() as tx:
        await discard_event(tx, id, **WHO)
    assert "alice did event.discarded: the bank is back." in await ask(db, id)


# ------------------------------------------------------------------------------- executions, schedules, names, entities


async def test_an_execution_leads_to_its_job(db: Database, make: Make) -> None:
    run = make.execution(3, message="fine")
    said = await ask(db, run)
    assert said.startswith(f"{run} is the run of job 3 (charge) that began 2026-03-02 11:59:58 UTC.")
    assert "succeeded: fine" in said


async def test_an_execution_is_found_by_the_time_in_its_id_when_no_sandbox_moves_the_clock(
    db: Database, make: Make
) -> None:
    make.clock.resume()
    run = make.execution(3, message="fine")
    assert "succeeded: fine" in await ask(db, run)


async def test_a_schedule_says_its_next_and_last_run_and_what_it_missed(db: Database, make: Make) -> None:
    """E3.12, E7.1."""
    make.run(
        "INSERT INTO duly.schedules (name, cron, timezone, next_run_at, last_run_at, missed_count, missed_oldest,"
        " missed_newest, misfire) VALUES ('sweep', '*/5 * * * *', 'Europe/Warsaw', duly.now() + interval '5 minutes',"
        " duly.now(), 3, duly.now() - interval '20 minutes', duly.now() - interval '10 minutes', 'run_all')"
    )
    job = make.job("sweep", source="Scheduled", run_at=NOON + timedelta(minutes=1))
    make.execution(99, "sweep", message="swept 4")
    make.process("w1", names=("sweep",))
    said = await ask(db, "sweep")
    assert "sweep is a schedule: */5 * * * * in Europe/Warsaw." in said
    assert "It is enabled, and runs next at 2026-03-02 12:05:00 UTC (in 5 min)." in said
    assert "It last fired for 2026-03-02 12:00:00 UTC" in said
    assert "It last missed 3 occurrences, from 2026-03-02 11:40:00 UTC to 2026-03-02 11:50:00 UTC" in said
    assert "It has 1 job in the queue and 0 dead letters." in said
    assert f"Job {job}: It is not due until 2026-03-02 12:01:00 UTC (in 1 min)." in said
    assert "Its last run, of job 99, ended done at 2026-03-02 12:00:00 UTC" in said
    assert "Live workers that know it: w1." in said
    assert said == await ask(db, "schedule:sweep")


async def test_a_disabled_schedule_says_by_whom_and_why(db: Database, make: Make) -> None:
    make.run("INSERT INTO duly.schedules (name, cron, enabled) VALUES ('sweep', '0 9 * * *', false)")
    assert "It is disabled; the audit does not say by whom." in await ask(db, "sweep")
    make.run(
        "INSERT INTO duly.audit (at, actor, action, subject, reason) VALUES"
        " (duly.now(), 'bob', 'schedule.disabled', 'schedule:sweep', 'too loud')"
    )
    said = await ask(db, "sweep")
    assert "It is disabled by bob since 2026-03-02 12:00:00 UTC (less than a second ago): too loud." in said
    assert "It has never fired." in said


async def test_a_broken_or_late_schedule_says_so(db: Database, make: Make) -> None:
    make.run(
        "INSERT INTO duly.schedules (name, cron, next_run_at, last_error) VALUES"
        " ('late', '0 9 * * *', duly.now() - interval '3 hours', NULL), ('broken', '99 9 * * *', NULL, 'bad minute')"
    )
    assert "due since 2026-03-02 09:00:00 UTC (3 h ago): is a scheduler alive?" in await ask(db, "late")
    assert "It is broken: bad minute" in await ask(db, "broken")


async def test_a_job_name_without_a_schedule_is_explained_too(db: Database, make: Make) -> None:
    make.job("charge")
    make.dead(9, "charge")
    said = await ask(db, "charge")
    assert "charge is a job name without a schedule." in said
    assert "It has 1 job in the queue and 1 dead letter." in said
    assert "The history has no run of it." in said
    assert "Live workers that know it: none." in said


async def test_an_entity_lists_everything_about_it(db: Database, make: Make) -> None:
    """One timeline of an order, whatever its id looks like."""
    for entity in ("order:123", "123456", str(uuid4())):
        waiting = make.job("charge", entity_id=entity, run_at=NOON + timedelta(minutes=15))
        make.dead(waiting + 1_000, "refund", entity_id=entity)
        make.execution(waiting + 2_000, "checkout", entity_id=entity)
        event = make.event(entity)
        said = await ask(db, entity)
        assert f"Job {waiting} (charge) waits (due) until 2026-03-02 12:15:00 UTC (in 15 min)." in said
        assert f"Job {waiting + 1_000} (refund) is a dead letter since" in said
        assert f"Job {waiting + 2_000} (checkout) ran until 2026-03-02 12:00:00 UTC: done." in said
        assert f"Event {event} (order.placed) is PENDING" in said
        assert said == await ask(db, f"entity:{entity}")


async def test_a_number_is_a_job_first_and_an_entity_when_one_asks_for_it(db: Database, make: Make) -> None:
    id = make.job()
    make.job("refund", entity_id=str(id))
    assert (await ask(db, id)).startswith(f"Job {id} is charge.")
    assert (await ask(db, f"job:{id}")).startswith(f"Job {id} is charge.")
    assert (await ask(db, f"entity:{id}")).startswith(f"{id} is an entity")


async def test_what_is_unknown_says_what_was_looked_at(db: Database, make: Make) -> None:
    for id in ("nothing-like-it", str(uuid4()), "019c0000-0000-7000-8000-000000000001", "99999999999999999999"):
        said = await ask(db, id)
        assert said.startswith(f"Nothing is known about {id}.")
        assert "Looked at: jobs, dead letters, executions, events, the outbox, schedules" in said
        assert "History older than the retention is dropped (the log of runs begins 20" in said
    make.job()
    assert "No job has had this number yet." in await ask(db, 12345)
    for id in ("", "x" * 201, "a\x00b"):
        assert await ask(db, id) == "An id is text of 1 to 200 characters."


async def test_no_answer_contains_a_payload(db: Database, make: Make) -> None:
    """Payloads hold personal data and secrets."""
    event = make.failed_event("order-1")
    job = make.job(entity_id="order-1", payload='{"card": "4111-SECRET"}')
    make.dead(900, entity_id="order-1", payload='{"card": "4111-SECRET"}')
    async with db.transaction() as tx:
        await cancel_job(tx, job, **WHO)
        await discard_event(tx, event, **WHO)
    for id in (event, job, 900, "order-1", "charge"):
        assert "SECRET" not in await ask(db, id)
