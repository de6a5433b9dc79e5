"""Mutants of the outbox, the inbox and plain SQL: E1, E2, E7.3."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

DB = "src/duly/db.py"
DUTY = "src/duly/duty.py"
RELAY = "src/duly/outbox/relay.py"
RELAY_SQL = "src/duly/outbox/sql.py"
RECEIVE = "src/duly/inbox/receive.py"
RECEIVER = "src/duly/inbox/receiver.py"
RECEIVER_SQL = "src/duly/inbox/sql.py"
STORE = "src/duly/inbox/store.py"
MESSAGES = "src/duly/messages.py"
SCHEMA = "src/duly/migrations/versions/0001_engine.up.sql"
RUN = "src/duly/jobs/run.py"
OPERATE = "src/duly/operate/events.py"
OPERATE_SQL = "src/duly/operate/sql.py"
CLEAN_UP = "src/duly/operate/maintenance.py"
CLEAN_UP_SQL = "src/duly/operate/sql_maintenance.py"

EMIT = "tests/engine/outbox/test_emit.py"
CYCLES = "tests/engine/outbox/test_relay.py"
PUBLISHING = "tests/engine/outbox/test_publishing.py"
ORDER = "tests/engine/outbox/test_order.py"
ISOLATION = "tests/engine/outbox/test_isolation.py"
POSTPONED = "tests/engine/outbox/test_postponed.py"
STOPPING = "tests/engine/outbox/test_stopping.py"
STRANGE = "tests/engine/outbox/test_strange_events.py"
PARTITIONS = "tests/engine/outbox/test_partitions.py"
WIRE = "tests/engine/test_messages.py"
POKER = "tests/engine/test_poker.py"
OPERATOR = "tests/engine/operate/test_events.py"
DEAD_LETTERS = "tests/engine/operate/test_dead_letters.py"
FORGETTING = "tests/engine/operate/test_maintenance.py"
CONSUMERS = "tests/engine/inbox/test_receive.py"
FAILURES = "tests/engine/inbox/test_failures.py"
ORDERED = "tests/engine/inbox/test_ordered.py"
RECEIVING = "tests/engine/inbox/test_receiver.py"
VIA = "tests/engine/inbox/test_via.py"
SCHEDULING = "tests/engine/jobs/test_schedule.py"
ORIGIN = "tests/engine/jobs/test_origin.py"

INVISIBLE = f"{EMIT}::test_an_event_is_invisible_until_its_transaction_commits"
ROLLED_BACK = f"{EMIT}::test_an_event_is_rolled_back_with_its_transaction"
FIVE_ATTEMPTS = f"{PUBLISHING}::test_each_failure_counts_and_waits_twice_as_long"
HELD_BACK = f"{PUBLISHING}::test_a_failing_event_holds_back_its_own_aggregate_and_no_other"
NOT_HIDDEN = "test_what_one_consumer_has_processed_is_not_hidden_from_one_without_a_transaction"
ANY_STEP = f"{RECEIVING}::test_an_error_at_any_step_loses_nothing_and_repeats_nothing"

EMITTING: list[Mutant] = [
    Mutant(
        id="E1.1",
        breaks="emit commits the caller's transaction",
        file="src/duly/outbox/emit.py",
        old='    rows = await fetch(tx, EMIT, notify=must_notify(tx, "outbox"), **values)\n',
        new=(
            '    rows = await fetch(tx, EMIT, notify=must_notify(tx, "outbox"), **values)\n'
            '    if hasattr(tx, "commit"):\n'
            "        await tx.commit()\n"
        ),
        tests=(f"{INVISIBLE}[own_async_connection]", f"{INVISIBLE}[dulys_session]"),
    ),
    Mutant(
        id="E1.1",
        breaks="a block that raises is committed",
        file=DB,
        old="                await asyncio.shield(session.close())\n            raise\n",
        new="                await asyncio.shield(session.commit())\n            raise\n",
        tests=(f"{ROLLED_BACK}[dulys_session]",),
    ),
    Mutant(
        id="E1.1",
        breaks="a synchronous block that raises is committed",
        file=DB,
        old="            yield session\n            session.flush()\n",
        new=(
            "            try:\n"
            "                yield session\n"
            "            finally:\n"
            "                session.commit()\n"
            "            session.flush()\n"
        ),
        tests=(f"{ROLLED_BACK}[dulys_sync_session]",),
    ),
    Mutant(
        id="E1.1",
        breaks="emit reads rows as psycopg's owner likes them",
        file=DB,
        old="        async with tx.cursor(row_factory=tuple_row) as cursor:  # whatever rows its owner prefers\n",
        new="        async with tx.cursor() as cursor:\n",
        tests=(f"{INVISIBLE}[psycopg_async_with_dicts]",),
    ),
    Mutant(
        id="E1.1",
        breaks="a connection that a pool lends out is refused",
        file=DB,
        old='    if hasattr(tx, "fetchrow"):  # asyncpg',
        new="    if type(tx) is asyncpg.Connection:  # asyncpg",
        tests=(f"{INVISIBLE}[pooled_asyncpg]",),
    ),
    Mutant(
        id="E1.2",
        breaks="an event forgets what caused it",
        file="src/duly/outbox/emit.py",
        old='        "causation_id": origin.causation_id,\n',
        new='        "causation_id": None,\n',
        tests=(f"{EMIT}::test_events_carry_where_they_come_from",),
    ),
    Mutant(
        id="E1.2",
        breaks="ids do not sort by time",
        file=SCHEMA,
        old="    SELECT duly.uuid7(moment), e.type, e.topic,",
        new="    SELECT gen_random_uuid(), e.type, e.topic,",
        tests=(f"{EMIT}::test_ids_are_version_seven_and_sort_by_the_databases_time",),
    ),
    Mutant(
        id="E1.2",
        breaks="an event's time is the machine's, not the business clock's",
        file=SCHEMA,
        old="    moment timestamptz := duly.now();\n    correlation uuid := duly.uuid7(moment);\n",
        new="    moment timestamptz := clock_timestamp();\n    correlation uuid := duly.uuid7(moment);\n",
        tests=(f"{EMIT}::test_ids_are_version_seven_and_sort_by_the_databases_time",),
    ),
    Mutant(
        id="E1.2",
        breaks="headers of the caller's own are overwritten",
        file="src/duly/outbox/emit.py",
        old="    return origin_headers(origin) | dict(event.headers)\n",
        new="    return dict(event.headers) | origin_headers(origin)\n",
        tests=(f"{EMIT}::test_headers_of_the_callers_own_are_kept_and_win",),
    ),
    Mutant(
        id="E1.2",
        breaks="the history has another time of creation",
        file=RELAY_SQL,
        old="headers, created_at, duly.now(), attempts FROM moved",
        new="headers, duly.now(), duly.now(), attempts FROM moved",
        tests=(f"{CYCLES}::test_what_was_emitted_is_what_the_history_keeps",),
    ),
    Mutant(
        id="E1.2",
        breaks="the envelope has no causation id",
        file=MESSAGES,
        old='_EXTENSIONS = {"correlation_id": "correlationid", "causation_id": "causationid", ',
        new='_EXTENSIONS = {"correlation_id": "correlationid", ',
        tests=(f"{WIRE}::test_the_envelope_is_cloudevents_one",),
    ),
    Mutant(
        id="E1.2",
        breaks="headers that CloudEvents cannot carry are dropped on the wire",
        file=MESSAGES,
        old="            rest[header] = content\n",
        new="            continue\n",
        tests=(f"{RECEIVING}::test_headers_come_back_as_they_were_emitted",),
    ),
    Mutant(
        id="E1.2",
        breaks="a fraction that no float can hold is rounded on the wire",
        file=MESSAGES,
        old="        return number if Decimal(repr(number)) == value else str(value)\n",
        new="        return number\n",
        tests=(f"{WIRE}::test_a_fraction_that_no_float_can_hold_is_exact_on_the_wire",),
    ),
    Mutant(
        id="E1.3",
        breaks="a batch is ten events by default",
        file="src/duly/settings.py",
        old="    relay_batch: int = Field(default=100,",
        new="    relay_batch: int = Field(default=10,",
        tests=(f"{CYCLES}::test_a_cycle_publishes_a_hundred_events_unless_told_otherwise",),
    ),
    Mutant(
        id="E1.3",
        breaks="the batch is one of each lane",
        file=RELAY_SQL,
        old="    ORDER BY o.seq LIMIT CAST(:batch AS int)) AS e\nLIMIT CAST(:batch AS int)\n",
        new="    ORDER BY o.seq LIMIT CAST(:batch AS int)) AS e\n",
        tests=(f"{CYCLES}::test_a_cycle_publishes_a_hundred_events_unless_told_otherwise",),
    ),
    Mutant(
        id="E1.3",
        breaks="a commit of somebody else's wakes no relay",
        file=SCHEMA,
        old="        PERFORM pg_notify('duly', 'outbox');\n",
        new="        PERFORM pg_notify('duly', 'jobs');\n",
        tests=(f"{EMIT}::test_a_commit_wakes_the_relay_whoever_makes_it[plain_sql]",),
    ),
    Mutant(
        id="E1.3",
        breaks="a busy process wakes nobody after its commit",
        file=DB,
        old="        await session.close()\n        self._poker.poke(scope.pokes)\n",
        new="        await session.close()\n",
        tests=(f"{POKER}::test_whoever_says_much_wakes_after_the_commits_and_for_many_at_once",),
    ),
    Mutant(
        id="E1.3",
        breaks="a relay that hears nothing polls once a second",
        file=DUTY,
        old="    deaf_poll_seconds = 0.1  # while no wake-up can reach us\n",
        new="    deaf_poll_seconds = 1.0\n",
        tests=(f"{CYCLES}::test_a_relay_that_hears_nothing_waits_a_tenth_of_a_second_at_most",),
    ),
    Mutant(
        id="E1.3",
        breaks="the relay pauses while there is work",
        file=DUTY,
        old="                if not result.done:\n",
        new="                if True:\n",
        tests=(f"{CYCLES}::test_one_wake_up_is_enough_for_any_amount_of_work",),
    ),
]

FAILING: list[Mutant] = [
    Mutant(
        id="E1.4",
        breaks="an event that backs off is shown as FAILED",
        file=SCHEMA,
        old="       CASE WHEN failed_at IS NULL THEN 'PENDING' ELSE 'FAILED' END AS status,\n",
        new="       CASE WHEN attempts = 0 THEN 'PENDING' ELSE 'FAILED' END AS status,\n",
        tests=(FIVE_ATTEMPTS,),
    ),
    Mutant(
        id="E1.4",
        breaks="published_at is when it was emitted",
        file=RELAY_SQL,
        old="headers, created_at, duly.now(), attempts FROM moved",
        new="headers, created_at, created_at, attempts FROM moved",
        tests=(f"{PUBLISHING}::test_an_event_is_pending_then_published_with_its_time",),
    ),
    Mutant(
        id="E1.4",
        breaks="the wait grows by a second, not by doubling",
        file=RELAY_SQL,
        old="least(power(2, o.attempts), 3600)",
        new="least(o.attempts + 1, 3600)",
        tests=(FIVE_ATTEMPTS,),
    ),
    Mutant(
        id="E1.4",
        breaks="it has six attempts",
        file=RELAY_SQL,
        old="    failed_at = CASE WHEN o.attempts + 1 >= CAST(:attempts AS int) THEN duly.now() END\n",
        new="    failed_at = CASE WHEN o.attempts + 1 > CAST(:attempts AS int) THEN duly.now() END\n",
        tests=(FIVE_ATTEMPTS,),
    ),
    Mutant(
        id="E1.4",
        breaks="it is sent again before its time",
        file=RELAY_SQL,
        old="\n      AND (o.retry_at IS NULL OR o.retry_at <= duly.now())\n",
        new="\n",
        tests=(FIVE_ATTEMPTS,),
    ),
    Mutant(
        id="E1.4",
        breaks="the relay does not say when the next retry is due",
        file=RELAY,
        old="        wait = None if worked else (await fetch(connection, sql.SECONDS_TO_NEXT_EVENT))[0][0]\n",
        new="        wait = None\n",
        tests=(FIVE_ATTEMPTS,),
    ),
    Mutant(
        id="E1.4",
        breaks="each failed attempt raises an alert",
        file=RELAY,
        old="        final = [row for row in rows if row[4]]\n",
        new="        final = list(rows)\n",
        tests=(f"{PUBLISHING}::test_an_event_that_failed_raises_one_alert_that_names_it",),
    ),
    Mutant(
        id="E1.4",
        breaks="a requeued event has no attempts left",
        file=OPERATE_SQL,
        old="    UPDATE duly.outbox o SET attempts = 0, failed_at = NULL,",
        new="    UPDATE duly.outbox o SET failed_at = NULL,",
        tests=(f"{OPERATOR}::test_a_requeued_event_has_all_its_attempts_again",),
    ),
    Mutant(
        id="E1.4",
        breaks="who requeues an event that backs off is told that it was done",
        file=OPERATE_SQL,
        old="WHERE failed_at IS NOT NULL AND attempts > 0 AND (CAST(:id AS uuid) IS NULL",
        new="WHERE attempts > 0 AND (CAST(:id AS uuid) IS NULL",
        tests=(f"{OPERATOR}::test_an_event_that_is_still_retried_can_be_neither_requeued_nor_discarded",),
    ),
    Mutant(
        id="E1.4",
        breaks="an operator does not wait for the relay that has the lane",
        file=OPERATE,
        old="    await fetch(tx, sql.LOCK_LANES, lanes=lanes)\n",
        new="",
        tests=(f"{OPERATOR}::test_of_two_operators_who_requeue_one_event_one_wins",),
    ),
    Mutant(
        id="E1.4",
        breaks="a failing event blocks its lane",
        file=RELAY_SQL,
        old="            WHERE b.aggregate_id = o.aggregate_id AND b.seq < o.seq\n",
        new="            WHERE b.lane = o.lane AND b.seq < o.seq\n",
        tests=(HELD_BACK,),
    ),
    Mutant(
        id="E1.4",
        breaks="an outage of the broker uses up attempts",
        file=RELAY,
        old="    return (answered, None) if is_there else ([], away)\n",
        new="    return answered, None\n",
        tests=(f"{ISOLATION}::test_an_outage_is_nobodys_attempt_however_few_events_there_are_to_show_it",),
    ),
    Mutant(
        id="E1.4",
        breaks="an outage that begins in the middle uses up attempts",
        file=RELAY,
        old="            return answered[:-cuts], away\n",
        new="            return answered, away\n",
        tests=(f"{ISOLATION}::test_an_outage_that_begins_while_events_are_sent_one_by_one_is_nobodys_attempt",),
    ),
    Mutant(
        id="E1.4",
        breaks="a topic that is away uses up attempts",
        file=RELAY_SQL,
        old="UPDATE duly.outbox o SET last_error = g.reason, retry_at",
        new="UPDATE duly.outbox o SET attempts = o.attempts + 1, last_error = g.reason, retry_at",
        tests=(f"{POSTPONED}::test_it_is_tried_again_for_as_long_as_it_takes_and_then_goes_in_order",),
    ),
    Mutant(
        id="E1.4",
        breaks="what a client raises stops the relay",
        file=RELAY,
        old="    except (OSError, TimeoutError):\n        raise\n    except Exception as error:",
        new="    except (OSError, TimeoutError):\n        raise\n    except RuntimeError as error:",
        tests=(f"{PUBLISHING}::test_whatever_a_client_raises_is_a_failed_attempt",),
    ),
    Mutant(
        id="E1.4",
        breaks="an event that Python cannot hold stops the relay",
        file=RELAY,
        old="        except (ValueError, RecursionError) as error:\n            unreadable.append(",
        new="        except RecursionError as error:\n            unreadable.append(",
        tests=(f"{STRANGE}::test_an_event_that_cannot_be_decoded_fails_and_the_others_go_to_the_broker",),
    ),
]

ORDERING: list[Mutant] = [
    Mutant(
        id="E1.5",
        breaks="the events of one call are written from the last to the first",
        file=SCHEMA,
        old="    ORDER BY e.place\n    RETURNING id;\n",
        new="    ORDER BY e.place DESC\n    RETURNING id;\n",
        tests=(f"{EMIT}::test_many_events_are_one_statement_and_keep_their_order",),
    ),
    Mutant(
        id="E1.5",
        breaks="a batch is taken by created_at",
        file=RELAY_SQL,
        old="    ORDER BY o.seq LIMIT CAST(:batch AS int)) AS e\n",
        new="    ORDER BY o.created_at LIMIT CAST(:batch AS int)) AS e\n",
        tests=(f"{CYCLES}::test_order_is_that_of_emission_although_the_clock_goes_back",),
    ),
    Mutant(
        id="E1.5",
        breaks="a new event overtakes those that are parked",
        file=RELAY_SQL,
        old="              AND (b.parked OR b.attempts > 0 OR b.retry_at IS NOT NULL) LIMIT 1) AS held,\n",
        new="              AND (b.attempts > 0 OR b.retry_at IS NOT NULL) LIMIT 1) AS held,\n",
        tests=(f"{OPERATOR}::test_what_is_emitted_after_a_requeue_goes_behind_those_that_were_held_back",),
    ),
    Mutant(
        id="E1.5",
        breaks="a new event overtakes one that was requeued",
        file=RELAY_SQL,
        old="              AND (b.parked OR b.attempts > 0 OR b.retry_at IS NOT NULL) LIMIT 1) AS held,\n",
        new="              AND (b.parked OR b.attempts > 0) LIMIT 1) AS held,\n",
        tests=(f"{PUBLISHING}::test_a_requeued_event_with_nothing_behind_it_is_not_overtaken",),
    ),
    Mutant(
        id="E1.5",
        breaks="two relays lease the same lanes",
        file=RELAY_SQL,
        old=" LIMIT CAST(:share AS int) FOR UPDATE SKIP LOCKED\n",
        new=" LIMIT CAST(:share AS int)\n",
        tests=(f"{ORDER}::test_relays_that_race_send_each_event_once_while_nothing_fails",),
    ),
    Mutant(
        id="E1.5",
        breaks="a lane is taken while another relay's lease lasts",
        file=RELAY_SQL,
        old="WHERE lease_expires_at IS NULL OR lease_expires_at < clock_timestamp() OR leased_by",
        new="WHERE lease_expires_at IS NULL OR lease_expires_at > clock_timestamp() OR leased_by",
        tests=(f"{ORDER}::test_a_lane_is_left_alone_while_its_relay_waits_for_the_broker",),
    ),
    Mutant(
        id="E1.5",
        breaks="a relay whose lease ran out settles all the same",
        file=RELAY,
        old="            if ours != set(lease.lanes):  # we were away for longer than the lease\n",
        new="            if False:\n",
        tests=(f"{ORDER}::test_a_zombie_whose_events_failed_elsewhere_does_not_count_them_again",),
    ),
    Mutant(
        id="E1.5",
        breaks="a relay that lost some of its lanes settles the events of all",
        file=RELAY,
        old="            if ours != set(lease.lanes):  # we were away for longer than the lease\n",
        new="            if not ours:\n",
        tests=(f"{ORDER}::test_a_zombie_that_lost_one_of_its_two_lanes_settles_nothing",),
    ),
    Mutant(
        id="E1.5",
        breaks="the newest event of an aggregate is sent first",
        file=RELAY,
        old="_read([queue.pop(0) for queue in queues.values()])",
        new="_read([queue.pop() for queue in queues.values()])",
        tests=(f"{ORDER}::test_a_lane_is_left_alone_while_its_relay_waits_for_the_broker",),
    ),
    Mutant(
        id="E1.5",
        breaks="later events are sent after one that failed",
        file=RELAY,
        old="                queues.pop(one.aggregate_id)\n",
        new="",
        tests=(f"{POSTPONED}::test_its_event_keeps_its_attempts_and_says_why_and_the_others_are_published",),
    ),
    Mutant(
        id="E1.5",
        breaks="a relay sends for longer than its lease",
        file=RELAY,
        old="        while queues and monotonic() < enough_at and not self._stop.is_set():\n",
        new="        while queues and not self._stop.is_set():\n",
        tests=(f"{ORDER}::test_a_relay_that_was_stopped_between_its_lease_and_its_first_word_sends_nothing_of_it",),
    ),
    Mutant(
        id="E1.5",
        breaks="of a long line the last are freed first",
        file=RELAY_SQL,
        old="                      ORDER BY o.seq LIMIT 1000))\n",
        new="                      ORDER BY o.seq DESC LIMIT 1000))\n",
        tests=(f"{PUBLISHING}::test_a_long_line_behind_a_failed_event_drains_in_order",),
    ),
    Mutant(
        id="E1.5",
        breaks="what was parked in the cycle that published its head is left behind",
        file=RELAY,
        old="bool(row[10]) or row[4] in behind)",
        new="bool(row[10]))",
        tests=(f"{PUBLISHING}::test_what_is_first_seen_when_the_retry_before_it_is_due_is_not_left_behind",),
    ),
    Mutant(
        id="E1.6",
        breaks="events count as published before the broker has them",
        file=RELAY,
        old="                await self._settle(connection, [], held, [])  # now:",
        new="                await self._settle(connection, pending, held, [])  # now:",
        tests=(f"{PUBLISHING}::test_an_ack_that_is_lost_sends_again_and_loses_nothing",),
    ),
    Mutant(
        id="E1.6",
        breaks="a line that was cut counts as an acknowledgement",
        file=RELAY,
        old='            answered.append((one[0], f"{type(error).__name__}: {error}"))\n',
        new="            answered.append((one[0], None))\n",
        tests=(f"{ISOLATION}::test_a_refusal_shows_that_the_broker_is_there_too",),
    ),
    Mutant(
        id="E1.6",
        breaks="an event whose transaction commits late is passed by",
        file=RELAY_SQL,
        old="    WHERE o.lane = mine.lane AND NOT o.parked AND o.failed_at IS NULL\n",
        new=(
            "    WHERE o.lane = mine.lane AND NOT o.parked AND o.failed_at IS NULL\n"
            "      AND o.seq > (SELECT coalesce(max(h.seq), 0) FROM duly.events h)\n"
        ),
        tests=(f"{CYCLES}::test_an_event_that_commits_late_is_not_lost",),
    ),
    Mutant(
        id="E1.6",
        breaks="a relay that broke keeps its lanes",
        file=RELAY,
        old="                await asyncio.shield(self._give_back(lease))\n",
        new="                pass\n",
        tests=(f"{STOPPING}::test_one_cycle_that_is_cancelled_leaves_no_lane_leased",),
    ),
    Mutant(
        id="E1.6",
        breaks="nobody frees what an operator's SQL left parked",
        file=RELAY,
        old="            await fetch(connection, sql.UNPARK_STRAYS)\n",
        new="",
        tests=(f"{PUBLISHING}::test_an_event_that_is_deleted_lets_the_next_ones_go",),
    ),
]

HISTORY: list[Mutant] = [
    Mutant(
        id="E1.8",
        breaks="a day of history goes too early",
        file=CLEAN_UP_SQL,
        old="                            CAST(duly.now() AT TIME ZONE 'UTC' AS date) - CAST(:days AS int))\n",
        new="                            CAST(duly.now() AT TIME ZONE 'UTC' AS date) - CAST(:days AS int) + 1)\n",
        tests=(f"{FORGETTING}::test_history_older_than_the_retention_is_dropped_by_partition",),
    ),
    Mutant(
        id="E1.8",
        breaks="the last day to be dropped stays",
        file=SCHEMA,
        old="        CONTINUE WHEN child.day >= before;\n",
        new="        CONTINUE WHEN child.day >= before - 1;\n",
        tests=(f"{PARTITIONS}::test_partitions_are_dropped_by_age_and_younger_ones_stay",),
    ),
    Mutant(
        id="E1.8",
        breaks="history goes row by row",
        file=SCHEMA,
        old="        EXECUTE format('DROP TABLE duly.%I', child.name);\n",
        new="        EXECUTE format('DELETE FROM duly.%I', child.name);\n",
        tests=(f"{PARTITIONS}::test_partitions_are_dropped_by_age_and_younger_ones_stay",),
    ),
    Mutant(
        id="E1.8",
        breaks="the events of dead letters are dropped",
        file=SCHEMA,
        old="(SELECT event_id FROM duly.jobs UNION ALL SELECT event_id FROM duly.dead_letters) AS needed",
        new="(SELECT event_id FROM duly.jobs) AS needed",
        tests=(f"{PARTITIONS}::test_a_partition_that_waiting_work_needs_is_not_dropped",),
    ),
    Mutant(
        id="E1.8",
        breaks="an event outside every partition is deleted although a dead letter needs it",
        file=CLEAN_UP_SQL,
        old="\n          AND NOT EXISTS (SELECT 1 FROM duly.dead_letters d WHERE d.event_id = e.id)\n",
        new="\n",
        tests=(f"{FORGETTING}::test_an_old_row_outside_every_partition_stays_while_a_dead_letter_needs_it",),
    ),
    Mutant(
        id="E1.8",
        breaks="the default partition only grows",
        file=CLEAN_UP_SQL,
        old="        WHERE e.id < duly.uuid7_floor(duly.now() - make_interval(days => CAST(:days AS int)))\n",
        new="        WHERE e.id < duly.uuid7_floor(duly.now() - make_interval(years => CAST(:days AS int)))\n",
        tests=(f"{PARTITIONS}::test_the_clean_up_drops_what_is_older_than_the_retention",),
    ),
    Mutant(
        id="E1.8",
        breaks="what a broker brought is forgotten although a dead letter needs it",
        file=CLEAN_UP_SQL,
        old="\n          AND NOT EXISTS (SELECT 1 FROM duly.dead_letters d WHERE d.event_id = r.id)\n",
        new="\n",
        tests=(f"{RECEIVING}::test_what_was_received_is_kept_while_a_dead_letter_needs_it",),
    ),
    Mutant(
        id="E1.8",
        breaks="the last day ahead has no partition",
        file=CLEAN_UP,
        old="parent=parent, days=days_ahead + 1))[0][0]",
        new="parent=parent, days=days_ahead))[0][0]",
        tests=(f"{FORGETTING}::test_partitions_are_made_from_today_on_and_making_them_again_changes_nothing",),
    ),
    Mutant(
        id="E1.8",
        breaks="a day begins when it does in the zone of whoever makes the partition",
        file=SCHEMA,
        old="        low := CASE parent WHEN 'events' THEN duly.uuid7_floor(day::timestamp AT TIME ZONE 'UTC')::text\n",
        new="        low := CASE parent WHEN 'events' THEN duly.uuid7_floor(day::timestamptz)::text\n",
        tests=(f"{PARTITIONS}::test_a_day_begins_at_midnight_in_utc_whatever_the_zone_of_who_makes_its_partition",),
    ),
]

CONSUMING: list[Mutant] = [
    Mutant(
        id="E2.1",
        breaks="the inbox row has a transaction of its own",
        file=RUN,
        old="            seen = await handler.mark(tx, jobs)\n            failpoint",
        new=(
            "            async with self._db.transaction() as other:\n"
            "                seen = await handler.mark(other, jobs)\n"
            "            failpoint"
        ),
        tests=(f"{CONSUMERS}::test_the_writes_the_inbox_row_and_the_jobs_end_are_one_commit",),
    ),
    Mutant(
        id="E2.1",
        breaks="all consumers share one inbox",
        file=SCHEMA,
        old="    CONSTRAINT processed_events_pkey PRIMARY KEY (consumer, event_id)\n",
        new="    CONSTRAINT processed_events_pkey PRIMARY KEY (event_id)\n",
        tests=(f"{CONSUMERS}::test_each_consumer_has_an_inbox_of_its_own",),
    ),
    Mutant(
        id="E2.1",
        breaks="a pattern must fit the type and the topic",
        file=RECEIVE,
        old="    return fnmatch.fnmatchcase(type_, pattern) or fnmatch.fnmatchcase(topic, pattern)\n",
        new="    return fnmatch.fnmatchcase(type_, pattern) and fnmatch.fnmatchcase(topic, pattern)\n",
        tests=(f"{CYCLES}::test_each_consumer_whose_pattern_fits_type_or_topic_gets_one_job",),
    ),
    Mutant(
        id="E2.1",
        breaks="a consumer that is switched off gets jobs",
        file=RELAY_SQL,
        old="WHERE enabled AND (via IS NULL",
        new="WHERE (via IS NULL",
        tests=(f"{CONSUMERS}::test_a_consumer_that_an_operator_switched_off_stays_off",),
    ),
    Mutant(
        id="E2.1",
        breaks="a broker's messages are acknowledged before they are stored",
        file=RECEIVER,
        old='        try:\n            failpoint("receiver.received")\n',
        new=(
            "        await self.source.acknowledge(messages)\n"
            '        try:\n            failpoint("receiver.received")\n'
        ),
        tests=(ANY_STEP,),
    ),
    Mutant(
        id="E2.1",
        breaks="the cursor moves in a transaction of its own",
        file=RECEIVER,
        old="        async with atomic(connection):\n            if positions:\n"
        "                await self._move_cursors(connection, positions)\n",
        new="        if positions:\n            await self._move_cursors(connection, positions)\n"
        "        async with atomic(connection):\n",
        tests=(ANY_STEP,),
    ),
    Mutant(
        id="E2.2",
        breaks="a raw transaction that raises is committed",
        file=DB,
        old="                await asyncio.shield(transaction.rollback())\n",
        new="                await asyncio.shield(transaction.commit())\n",
        tests=("tests/engine/test_db.py::test_a_raw_block_that_raises_rolls_back_too",),
    ),
    Mutant(
        id="E2.2",
        breaks="a redelivery is handled again",
        file=RECEIVE,
        old="            seen.add(job.id)\n",
        new="            continue\n",
        tests=(f"{CONSUMERS}::test_a_redelivery_is_skipped_without_side_effects_and_logged[by_session]",),
    ),
    Mutant(
        id="E2.2",
        breaks="the same event twice in one batch is handled twice",
        file=RECEIVE,
        old="            fresh.discard(job.event_id)  # the same event twice in one batch is handled once\n",
        new="            continue\n",
        tests=(f"{CONSUMERS}::test_two_deliveries_in_one_claim_are_handled_once",),
    ),
    Mutant(
        id="E2.2",
        breaks="a consumer without a transaction is called again",
        file=RUN,
        old="        if job.duplicate:\n",
        new="        if False:\n",
        tests=(f"{CONSUMERS}::test_a_redelivery_is_skipped_without_side_effects_and_logged[without_transaction]",),
    ),
    Mutant(
        id="E2.2",
        breaks="what one consumer has processed is skipped by one without a transaction",
        file=RECEIVE,
        old="               WHERE p.consumer = CAST(:consumer AS text) AND p.event_id = e.id) AS processed\n",
        new="               WHERE p.consumer <> CAST(:consumer AS text) || ' ' AND p.event_id = e.id) AS processed\n",
        tests=(f"{CONSUMERS}::{NOT_HIDDEN}",),
    ),
    Mutant(
        id="E2.2",
        breaks="what one consumer has processed of a broker's is skipped by one without a transaction",
        file=RECEIVER_SQL,
        old="               WHERE p.consumer = CAST(:consumer AS text) AND p.event_id = r.id) AS processed\n",
        new="               WHERE p.consumer <> CAST(:consumer AS text) || ' ' AND p.event_id = r.id) AS processed\n",
        tests=(f"{RECEIVING}::{NOT_HIDDEN}",),
    ),
    Mutant(
        id="E2.2",
        breaks="a consumer that snoozes empties the inbox of the others",
        file=RECEIVE,
        old="DELETE FROM duly.processed_events WHERE consumer = CAST(:consumer AS text) AND event_id",
        new="DELETE FROM duly.processed_events WHERE consumer <> CAST(:consumer AS text) || ' ' AND event_id",
        tests=(f"{CONSUMERS}::test_a_consumer_that_snoozes_leaves_the_inbox_of_another_alone",),
    ),
    Mutant(
        id="E2.2",
        breaks="a message that comes again makes jobs again",
        file=RECEIVER_SQL,
        old="    FROM fresh f\n    JOIN given g ON g.id = f.id\n",
        new="    FROM given f\n    JOIN given g ON g.id = f.id\n",
        tests=(f"{RECEIVING}::test_a_message_whose_acknowledgement_was_lost_comes_again_and_makes_no_second_job",),
    ),
    Mutant(
        id="E2.2",
        breaks="the same message twice in a batch makes jobs twice",
        file=STORE,
        old="                repeated += 1\n                continue\n",
        new="                repeated += 1\n",
        tests=(f"{RECEIVING}::test_the_same_event_twice_in_one_batch_is_one",),
    ),
    Mutant(
        id="E2.2",
        breaks="the broker brings again what the relay brought before the move",
        file=RECEIVER_SQL,
        old="WHERE e.id = f.id AND e.published_at < c.via_since LIMIT 1) IS NULL",
        new="WHERE e.id = f.id AND e.published_at < c.registered_at LIMIT 1) IS NULL",
        tests=(f"{VIA}::test_after_the_move_the_broker_brings_the_events_and_the_relay_none",),
    ),
    Mutant(
        id="E2.2",
        breaks="of two receivers that read the same both store it",
        file=RECEIVER_SQL,
        old=" AND c.shard = g.shard AND c.position = g.before RETURNING c.shard\n",
        new=" AND c.shard = g.shard RETURNING c.shard\n",
        tests=(f"{RECEIVING}::test_of_two_receivers_that_read_the_same_one_stores_it",),
    ),
    Mutant(
        id="E2.2",
        breaks="trouble of the database buries good messages",
        file=RECEIVER,
        old='_DATA_ERRORS = ("22", "23", "54")',
        new='_DATA_ERRORS = ("22", "23", "42", "54")',
        tests=(f"{RECEIVING}::test_trouble_of_the_database_buries_nothing",),
    ),
]

DYING: list[Mutant] = [
    Mutant(
        id="E2.3",
        breaks="a consumer's retries wait no longer each time",
        file="src/duly/jobs/retry.py",
        old="timedelta(seconds=FIRST_WAIT_SECONDS * 2 ** min(retry_count - 1, 20))",
        new="timedelta(seconds=FIRST_WAIT_SECONDS)",
        tests=(f"{FAILURES}::test_a_failing_consumer_is_retried_with_backoff_and_then_dead_lettered_with_its_error",),
    ),
    Mutant(
        id="E2.3",
        breaks="a consumer without its event runs all the same",
        file=RECEIVE,
        old='                job.unreadable = f"event {job.event_id} is no longer in the history"\n',
        new="                job.argument = None\n",
        tests=(f"{CONSUMERS}::test_an_event_that_is_gone_from_the_history_is_a_dead_letter",),
    ),
    Mutant(
        id="E2.3",
        breaks="an event that cannot be decoded stops its neighbours",
        file=RECEIVE,
        old="            except (ValueError, RecursionError) as error:\n",
        new="            except RecursionError as error:\n",
        tests=(f"{STRANGE}::test_a_strange_event_does_not_stop_a_consumer",),
    ),
    Mutant(
        id="E2.3",
        breaks="a dead letter holds every aggregate of its consumer",
        file=RELAY_SQL,
        old="                   WHERE d.name = r.name AND d.order_key = r.order_key))) AS behind) AS b\n",
        new="                   WHERE d.name = r.name))) AS behind) AS b\n",
        tests=(f"{FAILURES}::test_other_aggregates_go_on_while_one_fails",),
    ),
    Mutant(
        id="E2.3",
        breaks="an event overtakes a lone dead letter of its aggregate",
        file=RELAY_SQL,
        old=(
            "        OR EXISTS (SELECT 1 FROM duly.dead_letters d\n"
            "                   WHERE d.name = r.name AND d.order_key = r.order_key))) AS behind) AS b\n"
        ),
        new="        )) AS behind) AS b\n",
        tests=(f"{ORDERED}::test_the_first_event_behind_a_lone_dead_letter_waits_too",),
    ),
    Mutant(
        id="E2.3",
        breaks="a message of a broker overtakes a dead letter of its aggregate",
        file=RECEIVER_SQL,
        old=(
            "        OR EXISTS (SELECT 1 FROM duly.dead_letters d\n"
            "                   WHERE d.name = r.name AND d.order_key = r.order_key))) AS behind) AS b\n"
        ),
        new="        )) AS behind) AS b\n",
        tests=(f"{RECEIVING}::test_a_message_waits_behind_a_lone_dead_letter_of_its_aggregate",),
    ),
    Mutant(
        id="E2.3",
        breaks="the next of an aggregate runs when its head has died",
        file=SCHEMA,
        old=(
            "      AND waits = 'behind'\n"
            "      AND NOT EXISTS (SELECT 1 FROM duly.dead_letters d"
            " WHERE d.name = OLD.name AND d.order_key = OLD.order_key);\n"
        ),
        new="      AND waits = 'behind';\n",
        tests=(f"{ORDERED}::test_a_dead_letter_holds_its_aggregate",),
    ),
    Mutant(
        id="E2.3",
        breaks="the last of an aggregate runs next",
        file=SCHEMA,
        old="WHERE h.name = OLD.name AND h.order_key = OLD.order_key ORDER BY h.id LIMIT 1)\n",
        new="WHERE h.name = OLD.name AND h.order_key = OLD.order_key ORDER BY h.id DESC LIMIT 1)\n",
        tests=(f"{ORDERED}::test_events_of_one_aggregate_are_handled_one_after_the_other",),
    ),
    Mutant(
        id="E2.3",
        breaks="an aggregate stands still after its dead letter was decided",
        file=SCHEMA,
        old="CREATE TRIGGER dead_letters_release_next AFTER DELETE ON duly.dead_letters\n",
        new="CREATE TRIGGER dead_letters_release_next AFTER UPDATE ON duly.dead_letters\n",
        tests=(f"{ORDERED}::test_a_dead_letter_that_is_decided_lets_the_next_run",),
    ),
    Mutant(
        id="E2.3",
        breaks="the relay puts a job behind one that is just leaving",
        file=RELAY,
        old="            await fetch(connection, LOCK_ORDER, names=names, keys=aggregates)\n",
        new="            assert len(names) == len(aggregates)\n",
        tests=(f"{ORDERED}::test_a_relay_and_a_worker_at_the_same_moment_strand_nothing",),
    ),
    Mutant(
        id="E2.3",
        breaks="the receiver puts a job behind one that is just leaving",
        file=STORE,
        old="        await fetch(tx, LOCK_ORDER, names=[name for name, _ in keys], keys=[key for _, key in keys])\n",
        new="        assert all(name for name, _ in keys)\n",
        tests=(f"{RECEIVING}::test_a_receiver_and_a_worker_at_the_same_moment_strand_nothing",),
    ),
    Mutant(
        id="E2.3",
        breaks="nobody finds a job that waits behind nothing",
        file=RELAY,
        old="            await fetch(connection, sql.RELEASE_STRAYS)\n",
        new="",
        tests=(f"{ORDERED}::test_a_job_that_waits_behind_nothing_is_found_by_the_relay",),
    ),
    Mutant(
        id="E2.3",
        breaks="a job is let go although a dead letter of its aggregate stands before it",
        file=RELAY_SQL,
        old="           WHERE d.name = hop.name AND d.order_key = hop.order_key LIMIT 1) IS NULL\n",
        new="           WHERE d.name = hop.order_key LIMIT 1) IS NULL\n",
        tests=(f"{ORDERED}::test_a_job_that_waits_behind_nothing_is_found_by_the_relay",),
    ),
    Mutant(
        id="E2.3",
        breaks="the later of two dead letters of an aggregate is retried first",
        file=OPERATE_SQL,
        old="               WHERE e.name = d.name AND e.order_key = d.order_key AND e.id < d.id)) AS back) AS held\n",
        new="               WHERE e.name = d.name AND e.order_key = d.order_key AND e.id > d.id)) AS back) AS held\n",
        tests=(f"{DEAD_LETTERS}::test_the_later_of_two_dead_letters_of_an_aggregate_waits_for_the_earlier",),
    ),
    Mutant(
        id="E2.3",
        breaks="an event that its consumer gave up cannot be retried",
        file=RUN,
        old="if isinstance(outcome, Snooze | Fail):\n                    await handler.unmark(tx, fresh)\n",
        new="if isinstance(outcome, Snooze):\n                    await handler.unmark(tx, fresh)\n",
        tests=(f"{CONSUMERS}::test_a_dead_letter_of_a_consumer_that_gave_up_can_be_retried",),
    ),
    Mutant(
        id="E2.3",
        breaks="one aggregate that waits stops what a broker brings for the others",
        file=RECEIVER_SQL,
        old=" AND j.priority = p.priority AND j.run_at <= duly.now()\n",
        new=" AND j.priority = p.priority\n",
        tests=(f"{RECEIVING}::test_when_workers_fall_behind_the_rest_stays_at_the_broker",),
    ),
    Mutant(
        id="E2.3",
        breaks="a message that is no event raises no alert",
        file=RECEIVER_SQL,
        old="FROM buried b HAVING count(*) > 0\n",
        new="FROM buried b HAVING count(*) > 1\n",
        tests=(f"{RECEIVING}::test_a_message_that_is_no_event_is_buried_and_the_next_one_is_read",),
    ),
]

PLAIN_SQL: list[Mutant] = [
    Mutant(
        id="E7.3",
        breaks="duly.emit drops its headers",
        file=SCHEMA,
        old="ARRAY[aggregate_id], ARRAY[payload], ARRAY[headers]) $$;",
        new="ARRAY[aggregate_id], ARRAY[payload], ARRAY['{}'::jsonb]) $$;",
        tests=(f"{EMIT}::test_plain_sql_gets_a_correlation_id_too",),
    ),
    Mutant(
        id="E7.3",
        breaks="duly.emit takes any payload",
        file=SCHEMA,
        old="    CONSTRAINT outbox_payload_is_object CHECK (jsonb_typeof(payload) = 'object'),\n",
        new="    CONSTRAINT outbox_payload_is_object CHECK (jsonb_typeof(payload) <> 'null'),\n",
        tests=(f"{EMIT}::test_plain_sql_is_held_to_the_same_names",),
    ),
    Mutant(
        id="E7.3",
        breaks="duly.emit takes a payload of any size",
        file=SCHEMA,
        old="CHECK (pg_column_size(payload) + pg_column_size(headers) <= 1048576)",
        new="CHECK (pg_column_size(payload) + pg_column_size(headers) <= 1073741824)",
        tests=(f"{STRANGE}::test_plain_sql_has_a_limit_of_size_too",),
    ),
    Mutant(
        id="E7.3",
        breaks="duly.schedule forgets how often to retry",
        file=SCHEMA,
        old="                          priority::smallint, max_retries::smallint, backoff_seconds, 'Deferred',\n",
        new="                          priority::smallint, NULL, backoff_seconds, 'Deferred',\n",
        tests=(f"{SCHEDULING}::test_sql_and_python_write_the_same_row",),
    ),
    Mutant(
        id="E7.3",
        breaks="duly.schedule always replaces",
        file=SCHEMA,
        old="ARRAY[run_at], ARRAY[payload], on_conflict,\n",
        new="ARRAY[run_at], ARRAY[payload], 'replace',\n",
        tests=(f"{SCHEDULING}::test_plain_sql_rejects_with_a_unique_violation",),
    ),
    Mutant(
        id="E7.3",
        breaks="duly.schedule forgets the cause",
        file=SCHEMA,
        old="                          correlation_id, causation_id)\n$$;\n",
        new="                          correlation_id)\n$$;\n",
        tests=(f"{ORIGIN}::test_plain_sql_jobs_have_a_correlation_id_too",),
    ),
    Mutant(
        id="E7.3",
        breaks="duly.cancel cancels whatever is about the entity",
        file=SCHEMA,
        old="    DELETE FROM duly.jobs j WHERE j.entity_id = cancel.entity_id AND j.name = cancel.name AND",
        new="    DELETE FROM duly.jobs j WHERE j.entity_id = cancel.entity_id AND",
        tests=(f"{SCHEDULING}::test_cancelling_is_one_statement_and_ends_with_its_caller",),
    ),
]

EVENTS: list[Mutant] = [*EMITTING, *FAILING, *ORDERING, *HISTORY, *CONSUMING, *DYING, *PLAIN_SQL]
