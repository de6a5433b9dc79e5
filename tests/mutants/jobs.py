"""Mutants of jobs, schedules and the command line: E3, E7.2."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

JOBS_SQL = "src/duly/jobs/sql.py"
CLAIM_PY = "src/duly/jobs/claim.py"
HANDLERS_PY = "src/duly/jobs/handlers.py"
HEARTBEAT_PY = "src/duly/jobs/heartbeat.py"
RETRY_PY = "src/duly/jobs/retry.py"
RUN_PY = "src/duly/jobs/run.py"
SCHEDULE_PY = "src/duly/jobs/schedule.py"
SETTLE_PY = "src/duly/jobs/settle.py"
TOGETHER_PY = "src/duly/jobs/together.py"
WORKER_PY = "src/duly/jobs/worker.py"
CRON_PY = "src/duly/schedules/cron.py"
EDIT_PY = "src/duly/schedules/edit.py"
MISFIRE_PY = "src/duly/schedules/misfire.py"
SCHEDULES_SQL = "src/duly/schedules/sql.py"
TICK_PY = "src/duly/schedules/tick.py"
MAINTENANCE_PY = "src/duly/operate/maintenance.py"
MAINTENANCE_SQL = "src/duly/operate/sql_maintenance.py"
IDEMPOTENCY_SQL = "src/duly/idempotency/sql.py"
ENGINE_SQL = "src/duly/migrations/versions/0001_engine.up.sql"
CLAIMS_SQL = "src/duly/migrations/versions/0003_cheap_claims.up.sql"
APP_PY = "src/duly/app.py"
DUTY_PY = "src/duly/duty.py"
HEALTH_PY = "src/duly/http/health.py"
SETTINGS_PY = "src/duly/settings.py"
HOME_PY = "src/duly/cli/home.py"
MAIN_PY = "src/duly/cli/main.py"
PARTS_PY = "src/duly/cli/parts.py"
PROCESS_PY = "src/duly/cli/process.py"
SANDBOX_PY = "src/duly/cli/sandbox.py"
SUPERVISOR_PY = "src/duly/runtime/supervisor.py"

BACKLOG = "tests/engine/jobs/test_backlog.py"
COMMIT = "tests/engine/jobs/test_commit.py"
LEASE = "tests/engine/jobs/test_lease.py"
LIFECYCLE = "tests/engine/jobs/test_lifecycle.py"
LIMITS = "tests/engine/jobs/test_limits.py"
OUTAGE = "tests/engine/jobs/test_outage.py"
RETRY = "tests/engine/jobs/test_retry.py"
SCHEDULE = "tests/engine/jobs/test_schedule.py"
THEN = "tests/engine/jobs/test_then.py"
TOGETHER = "tests/engine/jobs/test_together.py"
WAKEUP = "tests/engine/jobs/test_wakeup.py"
ZOMBIES = "tests/engine/jobs/test_zombies.py"
RACES = "tests/races/test_jobs_races.py"
CRON = "tests/engine/schedules/test_cron.py"
EDIT = "tests/engine/schedules/test_edit.py"
TICK = "tests/engine/schedules/test_tick.py"
MAINTENANCE = "tests/engine/operate/test_maintenance.py"
INSERT_ONLY = "tests/engine/operate/test_insert_only.py"
CLEAN_UP = "tests/engine/idempotency/test_clean_up.py"
HEALTH = "tests/engine/http/test_health.py"
PARTS = "tests/engine/cli/test_parts.py"
SANDBOX = "tests/engine/cli/test_sandbox.py"
UP = "tests/engine/cli/test_up.py"

JOBS: list[Mutant] = [
    Mutant(
        id="E3.1",
        breaks="a schedule's retries do not reach its jobs",
        file=SCHEDULES_SQL,
        old="r.delay, s.max_retries, 'Scheduled'",
        new="r.delay, 3, 'Scheduled'",
        tests=(f"{TICK}::test_a_due_occurrence_is_one_job_that_carries_what_the_schedule_says",),
    ),
    Mutant(
        id="E3.1",
        breaks="last_run_at stands still",
        file=SCHEDULES_SQL,
        old="last_run_at = coalesce(p.last_run_at, s.last_run_at)",
        new="last_run_at = s.last_run_at",
        tests=(f"{TICK}::test_a_due_occurrence_is_one_job_that_carries_what_the_schedule_says",),
    ),
    Mutant(
        id="E3.1",
        breaks="a disabled schedule fires",
        file=SCHEDULES_SQL,
        old="WHERE enabled AND (next_run_at IS NULL OR",
        new="WHERE (next_run_at IS NULL OR",
        tests=(f"{TICK}::test_a_disabled_schedule_does_not_fire",),
    ),
    Mutant(
        id="E3.1",
        breaks="the tick takes every schedule for one in UTC",
        file=TICK_PY,
        old="        cron = Cron(row.cron, row.timezone, row.dst_gap, row.dst_overlap)\n",
        new='        cron = Cron(row.cron, "UTC", row.dst_gap, row.dst_overlap)\n',
        tests=(f"{TICK}::test_local_time_decides_across_a_change_of_the_clocks",),
    ),
    Mutant(
        id="E3.1",
        breaks="seeding overwrites what an administrator edited",
        file=SCHEDULES_SQL,
        old="ON CONFLICT (name) DO NOTHING",
        new="ON CONFLICT (name) DO UPDATE SET cron = excluded.cron",
        tests=(f"{EDIT}::test_seeding_adds_what_is_absent_and_leaves_what_is_there",),
    ),
    Mutant(
        id="E3.1",
        breaks="a new expression waits for the run planned by the old one",
        file=EDIT_PY,
        old="    if parsed != _parsed_or_none(before):\n",
        new="    if parsed.timezone != before.timezone:\n",
        tests=(f"{TICK}::test_an_edit_takes_effect_at_the_next_tick",),
    ),
    Mutant(
        id="E3.1",
        breaks="an edit by plain SQL waits for the run planned before it",
        file=ENGINE_SQL,
        old=("    NEW.next_run_at := NULL;\n    RETURN NEW;\n"),
        new="    RETURN NEW;\n",
        tests=(f"{TICK}::test_an_edit_by_plain_sql_takes_effect_at_the_next_tick",),
    ),
    Mutant(
        id="E3.1",
        breaks="an edit wakes no scheduler",
        file=EDIT_PY,
        old=(
            "    await _audit(tx, action, after.name, before=snapshot, after=changed, actor=actor, reason=reason)\n"
            '    request_poke(tx, "schedules")\n'
        ),
        new="    await _audit(tx, action, after.name, before=snapshot, after=changed, actor=actor, reason=reason)\n",
        tests=(f"{EDIT}::test_changes_wake_the_scheduler_and_triggers_wake_the_workers",),
    ),
    Mutant(
        id="E3.1",
        breaks="two administrators overwrite each other",
        file=SCHEDULES_SQL,
        old=("WHERE name = :name\nFOR UPDATE\n"),
        new="WHERE name = :name\n",
        tests=(f"{EDIT}::test_of_two_edits_of_one_version_at_once_one_wins",),
    ),
    Mutant(
        id="E3.2",
        breaks="scheduling is two statements",
        file=SCHEDULE_PY,
        old='    rows = await fetch(tx, SCHEDULE, notify=must_notify(tx, "jobs"), **values)\n',
        new=(
            '    await fetch(tx, FIND_QUEUED, name=name, entity_ids=values["entity_ids"])\n'
            '    rows = await fetch(tx, SCHEDULE, notify=must_notify(tx, "jobs"), **values)\n'
        ),
        tests=(f"{SCHEDULE}::test_scheduling_is_one_statement_and_commits_with_its_caller",),
    ),
    Mutant(
        id="E3.2",
        breaks="cancelling deletes a job that runs",
        file=ENGINE_SQL,
        old="AND j.name = cancel.name AND j.lease_token IS NULL",
        new="AND j.name = cancel.name",
        tests=(f"{LIFECYCLE}::test_cancel_never_touches_a_running_job",),
    ),
    Mutant(
        id="E3.2",
        breaks="cancelling deletes every timer of the entity",
        file=ENGINE_SQL,
        old="WHERE j.entity_id = cancel.entity_id AND j.name = cancel.name AND",
        new="WHERE j.entity_id = cancel.entity_id AND",
        tests=(f"{SCHEDULE}::test_cancelling_is_one_statement_and_ends_with_its_caller",),
    ),
    Mutant(
        id="E3.2",
        breaks="a second call makes a second timer",
        file=CLAIMS_SQL,
        old="CASE WHEN on_conflict <> 'allow' THEN n.name",
        new="CASE WHEN on_conflict = 'reject' THEN n.name",
        tests=(f"{SCHEDULE}::test_replace_moves_the_one_timer",),
    ),
    Mutant(
        id="E3.2",
        breaks="a second call does not move the timer",
        file=CLAIMS_SQL,
        old="SET run_at = excluded.run_at, due_at",
        new="SET run_at = kept.run_at, due_at",
        tests=(f"{SCHEDULE}::test_replace_moves_the_one_timer",),
    ),
    Mutant(
        id="E3.2",
        breaks="a job that waits for its retry is not pending",
        file=CLAIMS_SQL,
        old="WHERE j.is_unique AND j.unique_key IS NULL AND j.lease_token IS NULL;",
        new="WHERE j.is_unique AND j.unique_key IS NULL AND j.retry_count = 0 AND j.lease_token IS NULL;",
        tests=(f"{SCHEDULE}::test_a_job_that_waits_for_its_retry_is_pending_and_unique",),
    ),
    Mutant(
        id="E3.2",
        breaks="jobs do not survive a crash of the server",
        file=ENGINE_SQL,
        old="CREATE TABLE duly.jobs (",
        new="CREATE UNLOGGED TABLE duly.jobs (",
        tests=(f"{OUTAGE}::test_a_crash_of_postgres_under_load_heals_by_itself",),
    ),
    Mutant(
        id="E3.3",
        breaks="ticks drift",
        file=SCHEDULES_SQL,
        old="CAST(30 - mod(extract(epoch FROM duly.now()), 30) AS double precision)",
        new="CAST(30 AS double precision)",
        tests=(f"{TICK}::test_the_next_tick_is_on_a_half_minute_of_the_databases_clock",),
    ),
    Mutant(
        id="E3.3",
        breaks="a scheduler that hears nothing ticks off the boundary",
        file=TICK_PY,
        old="    deaf_poll_seconds = 30.0  #",
        new="    deaf_poll_seconds = 10.0  #",
        tests=(f"{TICK}::test_the_loop_waits_exactly_to_the_boundary_deaf_or_not",),
    ),
    Mutant(
        id="E3.3",
        breaks="a deferred job waits for the next poll",
        file=WORKER_PY,
        old="wait_seconds=None if taken else await self._claims.seconds_to_next(connection))",
        new="wait_seconds=None)",
        tests=(f"{WAKEUP}::test_a_deferred_job_starts_within_a_second_of_its_time",),
    ),
    Mutant(
        id="E3.3",
        breaks="a job that is due now wakes nobody",
        file=CLAIMS_SQL,
        old="PERFORM pg_notify('duly', 'jobs');",
        new="PERFORM pg_notify('duly', 'outbox');",
        tests=(f"{WAKEUP}::test_a_commit_through_plain_sql_wakes_the_worker",),
    ),
    Mutant(
        id="E3.3",
        breaks="who hears wake-ups does not poll",
        file=DUTY_PY,
        old="if deaf and self.channel else self.poll_seconds",
        new="if deaf and self.channel else 3600.0",
        tests=(f"{WAKEUP}::test_a_wakeup_that_is_lost_costs_a_poll_and_no_more",),
    ),
    Mutant(
        id="E3.3",
        breaks="the poll is a minute apart",
        file=SETTINGS_PY,
        old="poll_seconds: float = Field(default=1.0, gt=0)",
        new="poll_seconds: float = Field(default=60.0, gt=0)",
        tests=(f"{WAKEUP}::test_a_wakeup_that_is_lost_costs_a_poll_and_no_more",),
    ),
    Mutant(
        id="E3.3",
        breaks="jobs start a little before their time",
        file=JOBS_SQL,
        old="AND j.run_at <= duly.now()\n",
        new="AND j.run_at <= duly.now() + interval '1 second'\n",
        tests=(f"{WAKEUP}::test_nothing_runs_before_its_time",),
    ),
    Mutant(
        id="E3.4",
        breaks="two schedulers take the same row",
        file=SCHEDULES_SQL,
        old=("LIMIT :batch\nFOR UPDATE SKIP LOCKED\n"),
        new="LIMIT :batch\n",
        tests=(f"{TICK}::test_several_schedulers_at_once_fire_each_occurrence_once",),
    ),
    Mutant(
        id="E3.4",
        breaks="a scheduler waits for another one",
        file=SCHEDULES_SQL,
        old=("LIMIT :batch\nFOR UPDATE SKIP LOCKED\n"),
        new=("LIMIT :batch\nFOR UPDATE\n"),
        tests=(f"{TICK}::test_a_row_that_another_scheduler_holds_is_skipped_not_waited_for",),
    ),
    Mutant(
        id="E3.4",
        breaks="a tick inserts and advances in two commits",
        file=TICK_PY,
        old=("        async with atomic(connection):\n            verdicts = await self._tick(connection)\n"),
        new="        verdicts = await self._tick(connection)\n",
        tests=(
            f"{TICK}::test_several_schedulers_at_once_fire_each_occurrence_once",
            f"{TICK}::test_a_tick_costs_as_many_statements_for_a_hundred_schedules_as_for_one",
        ),
    ),
    Mutant(
        id="E3.4",
        breaks="a schedule is not advanced when it fires",
        file=SCHEDULES_SQL,
        old=("SET next_run_at = p.next_run_at,\n    last_run_at"),
        new=("SET next_run_at = coalesce(s.next_run_at, p.next_run_at),\n    last_run_at"),
        tests=(f"{TICK}::test_a_due_occurrence_is_one_job_that_carries_what_the_schedule_says",),
    ),
    Mutant(
        id="E3.4",
        breaks="two workers claim the same job",
        file=JOBS_SQL,
        old="LIMIT CAST(:limit AS int) FOR UPDATE SKIP LOCKED\n",
        new="LIMIT CAST(:limit AS int)\n",
        tests=(f"{RACES}::test_each_job_is_claimed_by_one_of_many_claimers",),
    ),
    Mutant(
        id="E3.4",
        breaks="one more of a limited name runs than may",
        file=JOBS_SQL,
        old="SELECT greatest(0, CAST(:slots AS int) - count(*))::int",
        new="SELECT greatest(0, CAST(:slots AS int) + 1 - count(*))::int",
        tests=(f"{LIMITS}::test_a_limit_holds_across_four_workers",),
    ),
    Mutant(
        id="E3.4",
        breaks="a job that failed keeps its place among the limited",
        file=JOBS_SQL,
        old="lease_token = NULL, lease_expires_at = NULL, leased_by = NULL, slot = NULL, progress = NULL\n",
        new="lease_token = NULL, lease_expires_at = NULL, leased_by = NULL, progress = NULL\n",
        tests=(f"{LIMITS}::test_a_slot_is_free_again_however_the_run_ended",),
    ),
    Mutant(
        id="E3.5",
        breaks="a lease is half a minute",
        file=SETTINGS_PY,
        old="lease_seconds: float = Field(default=300.0, gt=0)",
        new="lease_seconds: float = Field(default=30.0, gt=0)",
        tests=(f"{LEASE}::test_a_claimed_job_carries_a_lease_of_five_minutes",),
    ),
    Mutant(
        id="E3.5",
        breaks="a lease is not renewed while its handler lives",
        file=HEARTBEAT_PY,
        old="(job.news is not None or now - job.renewed_at >= older_than_seconds)",
        new="job.news is not None",
        tests=(f"{LEASE}::test_the_lease_is_renewed_while_the_handler_blocks_the_event_loop",),
    ),
    Mutant(
        id="E3.5",
        breaks="a handler that hangs is renewed for ever",
        file=HEARTBEAT_PY,
        old="if now < job.give_up_at and (",
        new="if (",
        tests=(f"{LEASE}::test_a_handler_that_blocks_the_loop_past_its_time_limit_loses_its_lease",),
    ),
    Mutant(
        id="E3.5",
        breaks="a zombie renews what is another's",
        file=JOBS_SQL,
        old=(
            "SKIP LOCKED))\n"
            "  AND (id, lease_token) IN (SELECT * FROM unnest(CAST(:ids AS bigint[]), CAST(:tokens AS bigint[])))\n"
            '""")\n'
            "READ_HOLDERS"
        ),
        new=('SKIP LOCKED))\n  AND cardinality(CAST(:tokens AS bigint[])) > 0\n""")\nREAD_HOLDERS'),
        tests=(f"{LIMITS}::test_a_stalled_holder_whose_slot_was_given_away_is_fenced",),
    ),
    Mutant(
        id="E3.5",
        breaks="a job is taken from a worker that lives",
        file=JOBS_SQL,
        old="(j.lease_expires_at IS NULL OR j.lease_expires_at < clock_timestamp())",
        new="(j.lease_expires_at IS NULL OR j.leased_by <> CAST(:worker AS text))",
        tests=(f"{LEASE}::test_the_lease_is_renewed_while_the_handler_blocks_the_event_loop",),
    ),
    Mutant(
        id="E3.5",
        breaks="a job of a dead worker is nobody's for ever",
        file=JOBS_SQL,
        old="(j.lease_expires_at IS NULL OR j.lease_expires_at < clock_timestamp())",
        new="j.lease_expires_at IS NULL",
        tests=(f"{LEASE}::test_a_job_of_a_dead_worker_is_taken_over_when_its_lease_ends",),
    ),
    Mutant(
        id="E3.5",
        breaks="a run that was lost costs no retry",
        file=JOBS_SQL,
        old="retry_count = retry_count + (lease_token IS NOT NULL)::int,",
        new="retry_count = retry_count,",
        tests=(f"{LEASE}::test_a_job_of_a_dead_worker_is_taken_over_when_its_lease_ends",),
    ),
    Mutant(
        id="E3.5",
        breaks="whatever kills workers runs for ever",
        file=SETTLE_PY,
        old=("    if job.lost_by is None or job.retry_count <= _allowed(job, handler):\n        return None\n"),
        new=("    if job.lost_by is None or job.retry_count <= _allowed(job, handler) + 100:\n        return None\n"),
        tests=(f"{LEASE}::test_a_handler_that_kills_its_process_ends_in_the_dead_letters",),
    ),
    Mutant(
        id="E3.5",
        breaks="a zombie settles without its token",
        file=JOBS_SQL,
        old='AND (id, lease_token) IN (SELECT g.id, g.token FROM given g)"',
        new='AND id IN (SELECT g.id FROM given g)"',
        tests=(f"{ZOMBIES}::test_a_zombie_can_neither_complete_nor_postpone_nor_bury",),
    ),
    Mutant(
        id="E3.5",
        breaks="a successor inherits the zombie's token",
        file=JOBS_SQL,
        old="lease_token = (SELECT nextval('duly.lease_tokens')),",
        new="lease_token = coalesce(lease_token, (SELECT nextval('duly.lease_tokens'))),",
        tests=(f"{ZOMBIES}::test_a_zombie_that_wakes_up_first_does_not_push_its_successor_aside",),
    ),
    Mutant(
        id="E3.5",
        breaks="a zombie's writes commit though its job is not settled",
        file=RUN_PY,
        old=(
            "        settled = await settle.write(tx, settlements, worker=self._worker)\n"
            "        settle.check_all_ours(settlements, settled)\n"
        ),
        new="        await settle.write(tx, settlements, worker=self._worker)\n",
        tests=(f"{ZOMBIES}::test_a_zombies_writes_roll_back_when_it_wakes_up",),
    ),
    Mutant(
        id="E3.5",
        breaks="a zombie's thread commits though its job is not settled",
        file=RUN_PY,
        old=(
            "            settled = settle.write_sync(tx, settlements, worker=self._worker)\n"
            "            settle.check_all_ours(settlements, settled)\n"
        ),
        new="            settle.write_sync(tx, settlements, worker=self._worker)\n",
        tests=(f"{ZOMBIES}::test_a_zombies_writes_roll_back_when_it_wakes_up",),
    ),
    Mutant(
        id="E3.5",
        breaks="what follows from a zombie's call is written with the others'",
        file=TOGETHER_PY,
        old=(
            "            settle.check_all_ours(settlements, await settle.write(tx, settlements, worker=self._worker))\n"
        ),
        new="            await settle.write(tx, settlements, worker=self._worker)\n",
        tests=(f"{TOGETHER}::test_writes_of_a_zombie_are_refused_and_the_others_kept",),
    ),
    Mutant(
        id="E3.5",
        breaks="a slot is given away and its holder not fenced",
        file=JOBS_SQL,
        old=("SET slot = NULL, lease_token = nextval('duly.lease_tokens')\nWHERE name"),
        new=("SET slot = NULL\nWHERE name"),
        tests=(f"{LIMITS}::test_a_stalled_holder_whose_slot_was_given_away_is_fenced",),
    ),
    Mutant(
        id="E3.6",
        breaks="a fifth of the delay instead of a tenth",
        file=RETRY_PY,
        old="SHARE_OF_DELAY = 0.1",
        new="SHARE_OF_DELAY = 0.2",
        tests=(f"{RETRY}::test_backoff_is_a_tenth_of_the_delay_for_each_retry_and_sixty_minutes_at_most",),
    ),
    Mutant(
        id="E3.6",
        breaks="no limit of sixty minutes",
        file=RETRY_PY,
        old="        return min(original_delay * (SHARE_OF_DELAY * retry_count), MAX_BACKOFF)\n",
        new="        return original_delay * (SHARE_OF_DELAY * retry_count)\n",
        tests=(f"{RETRY}::test_backoff_is_a_tenth_of_the_delay_for_each_retry_and_sixty_minutes_at_most",),
    ),
    Mutant(
        id="E3.6",
        breaks="the first retry waits as long as the second",
        file=SETTLE_PY,
        old="        job.retry_count + 1,\n",
        new="        job.retry_count + 2,\n",
        tests=(f"{RETRY}::test_a_failed_timer_waits_in_proportion_to_its_delay",),
    ),
    Mutant(
        id="E3.6",
        breaks="a timer's delay is not remembered",
        file=CLAIMS_SQL,
        old="greatest(coalesce(n.run_at, moment) - moment, interval '0')",
        new="interval '0'",
        tests=(f"{RETRY}::test_a_failed_timer_waits_in_proportion_to_its_delay",),
    ),
    Mutant(
        id="E3.6",
        breaks="the handler's list wins over the job's",
        file=SETTLE_PY,
        old="fixed_seconds=job.backoff_seconds or handler.backoff_seconds",
        new="fixed_seconds=handler.backoff_seconds or job.backoff_seconds",
        tests=(f"{RETRY}::test_a_fixed_list_of_the_job_wins_over_its_handlers",),
    ),
    Mutant(
        id="E3.6",
        breaks="a fixed list begins again at its end",
        file=RETRY_PY,
        old="fixed_seconds[min(retry_count, len(fixed_seconds)) - 1]",
        new="fixed_seconds[(retry_count - 1) % len(fixed_seconds)]",
        tests=(f"{RETRY}::test_a_fixed_list_is_followed_and_its_last_entry_repeats",),
    ),
    Mutant(
        id="E3.6",
        breaks="a recurring job has no delay",
        file=MISFIRE_PY,
        old="Run(at, following - at)",
        new="Run(at, timedelta())",
        tests=(f"{TICK}::test_a_due_occurrence_is_one_job_that_carries_what_the_schedule_says",),
    ),
    Mutant(
        id="E3.6",
        breaks="a recurring job that is triggered has no delay",
        file=EDIT_PY,
        old="original_delay=await _interval(tx, row),",
        new="original_delay=timedelta(),",
        tests=(f"{EDIT}::test_a_trigger_queues_one_manual_job_for_now",),
    ),
    Mutant(
        id="E3.7",
        breaks="one retry more than allowed",
        file=SETTLE_PY,
        old="    if job.retry_count >= allowed:\n",
        new="    if job.retry_count > allowed:\n",
        tests=(f"{RETRY}::test_a_job_runs_once_and_then_as_often_as_it_may_be_retried",),
    ),
    Mutant(
        id="E3.7",
        breaks="a job's own number of retries is ignored",
        file=SETTLE_PY,
        old="    allowed = handler.max_retries if job.max_retries is None else job.max_retries\n",
        new="    allowed = handler.max_retries\n",
        tests=(f"{RETRY}::test_a_job_runs_once_and_then_as_often_as_it_may_be_retried",),
    ),
    Mutant(
        id="E3.7",
        breaks="a failed job does not go back to pending",
        file=JOBS_SQL,
        old="lease_token = NULL, lease_expires_at = NULL, leased_by = NULL, slot = NULL, progress = NULL\n",
        new="slot = NULL, progress = NULL\n",
        tests=(f"{LIFECYCLE}::test_the_four_statuses_are_seen_in_the_queue_view",),
    ),
    Mutant(
        id="E3.7",
        breaks="a job that is given up leaves no dead letter",
        file=JOBS_SQL,
        old=("    FROM settled s JOIN given g ON g.id = s.id\n), logged AS ("),
        new=("    FROM settled s JOIN given g ON g.id = s.id WHERE s.max_retries IS NULL\n), logged AS ("),
        tests=(f"{LIFECYCLE}::test_a_dead_letter_keeps_everything_an_administrator_needs",),
    ),
    Mutant(
        id="E3.7",
        breaks="no administrator hears of a dead letter",
        file=JOBS_SQL,
        old="min(l.message)) FROM logged l GROUP BY l.name",
        new="min(l.message)) FROM logged l WHERE l.message IS NULL GROUP BY l.name",
        tests=(f"{LIFECYCLE}::test_a_dead_letter_keeps_everything_an_administrator_needs",),
    ),
    Mutant(
        id="E3.7",
        breaks="a job whose lease ran out looks as if it ran",
        file=CLAIMS_SQL,
        old="ELSE 'Failed' END AS status",
        new="ELSE 'Running' END AS status",
        tests=(f"{LIFECYCLE}::test_the_four_statuses_are_seen_in_the_queue_view",),
    ),
    Mutant(
        id="E3.7",
        breaks="a job that ended well stays in the queue for another run",
        file=SETTLE_PY,
        old=(
            "        groups.setdefault(sql.COMPLETE_DONE if plain else _STATEMENTS[outcome], []).append(settlement)\n"
        ),
        new=("        groups.setdefault(sql.RELEASE_JOBS if plain else _STATEMENTS[outcome], []).append(settlement)\n"),
        tests=(f"{LIFECYCLE}::test_success_deletes_the_row",),
    ),
    Mutant(
        id="E3.8",
        breaks="history can be deleted by anybody",
        file=ENGINE_SQL,
        old="    IF TG_OP = 'DELETE' AND current_setting('duly.forgetting', true) = 'on' THEN\n",
        new="    IF TG_OP = 'DELETE' THEN\n",
        tests=(f"{INSERT_ONLY}::test_what_was_written_is_neither_changed_nor_deleted",),
    ),
    Mutant(
        id="E3.8",
        breaks="history can be changed",
        file=ENGINE_SQL,
        old="CREATE TRIGGER executions_keep BEFORE UPDATE OR DELETE ON",
        new="CREATE TRIGGER executions_keep BEFORE DELETE ON",
        tests=(f"{INSERT_ONLY}::test_what_was_written_is_neither_changed_nor_deleted",),
    ),
    Mutant(
        id="E3.8",
        breaks="a run that was lost is not in the history",
        file=JOBS_SQL,
        old="FROM claimed WHERE lost_claimed_at IS NOT NULL",
        new="FROM claimed WHERE lost_claimed_at IS NULL AND lost_by IS NOT NULL",
        tests=(f"{LEASE}::test_a_job_of_a_dead_worker_is_taken_over_when_its_lease_ends",),
    ),
    Mutant(
        id="E3.8",
        breaks="an occurrence is not Scheduled",
        file=SCHEDULES_SQL,
        old="s.max_retries, 'Scheduled', duly.uuid7()",
        new="s.max_retries, 'Deferred', duly.uuid7()",
        tests=(f"{TICK}::test_a_due_occurrence_is_one_job_that_carries_what_the_schedule_says",),
    ),
    Mutant(
        id="E3.8",
        breaks="a trigger by hand is not Manual",
        file=SCHEDULES_SQL,
        old="       'Manual', coalesce(",
        new="       'Scheduled', coalesce(",
        tests=(f"{EDIT}::test_a_trigger_queues_one_manual_job_for_now",),
    ),
    Mutant(
        id="E3.8",
        breaks="a failed run has succeeded",
        file=JOBS_SQL,
        old="g.outcome IN ('done', 'duplicate', 'cancelled', 'snoozed')",
        new="g.outcome IN ('done', 'duplicate', 'cancelled', 'snoozed', 'retried')",
        tests=(f"{LIFECYCLE}::test_the_history_of_a_failing_job_is_one_row_for_each_run",),
    ),
    Mutant(
        id="E3.8",
        breaks="a run takes no time",
        file=JOBS_SQL,
        old="           duly.now() - make_interval(secs => g.seconds), duly.now(),\n",
        new="           duly.now() - make_interval(secs => g.seconds * 0), duly.now(),\n",
        tests=(f"{LIFECYCLE}::test_the_history_says_how_long_a_run_took",),
    ),
    Mutant(
        id="E3.8",
        breaks="the history has another execution id than the handler saw",
        file=HANDLERS_PY,
        old="    nameless = [job for job in jobs if not job.has_execution_id]\n",
        new="    nameless = list(jobs)\n",
        tests=(f"{LIFECYCLE}::test_every_run_is_one_complete_row_of_history",),
    ),
    Mutant(
        id="E3.9",
        breaks="a reported failure is a success",
        file=HANDLERS_PY,
        old="        if self._failure is not None:\n",
        new="        if self._failure is not None and self._message is None:\n",
        tests=(f"{LIFECYCLE}::test_a_reported_failure_is_retried_and_its_writes_are_rolled_back",),
    ),
    Mutant(
        id="E3.9",
        breaks="the message of a success is dropped",
        file=HANDLERS_PY,
        old="        return Done(self._message)\n",
        new="        return _DONE\n",
        tests=(f"{LIFECYCLE}::test_every_run_is_one_complete_row_of_history",),
    ),
    Mutant(
        id="E3.9",
        breaks="returning something without a report is a failure",
        file=HANDLERS_PY,
        old="        return Done(self._message)\n",
        new='        raise ReportedFailure("nothing was reported")\n',
        tests=(f"{LIFECYCLE}::test_returning_is_success",),
    ),
    Mutant(
        id="E3.9",
        breaks="a handler that raises has succeeded",
        file=RUN_PY,
        old="            return self._failed(job, handler, error, monotonic() - began)\n",
        new="            return settle.decide(job, Done(str(error)), monotonic() - began)\n",
        tests=(f"{LIFECYCLE}::test_the_history_of_a_failing_job_is_one_row_for_each_run",),
    ),
    Mutant(
        id="E3.9",
        breaks="progress is shown to nobody",
        file=HEARTBEAT_PY,
        old="            job.news = message\n",
        new="            job.news = job.news\n",
        tests=(f"{LIFECYCLE}::test_progress_is_seen_while_the_handler_runs",),
    ),
    Mutant(
        id="E3.9",
        breaks="progress of a run outlives it",
        file=JOBS_SQL,
        old="leased_by = NULL, slot = NULL, progress = NULL\n",
        new="leased_by = NULL, slot = NULL\n",
        tests=(f"{LIFECYCLE}::test_progress_is_seen_while_the_handler_runs",),
    ),
    Mutant(
        id="E3.9",
        breaks="a run started when it was due",
        file=HANDLERS_PY,
        old="        return self._job.claimed_at + timedelta(seconds=self._began - self._job.claimed_mono)\n",
        new="        return self._job.due_at\n",
        tests=(f"{LIFECYCLE}::test_the_context_says_what_which_run_when_and_how_late",),
    ),
    Mutant(
        id="E3.9",
        breaks="a snooze costs a retry",
        file=JOBS_SQL,
        old="retry_count = retry_count + (SELECT (g.outcome = 'retried')::int FROM",
        new="retry_count = retry_count + (SELECT (g.outcome <> 'released')::int FROM",
        tests=(f"{LIFECYCLE}::test_a_snoozed_job_runs_again_with_all_its_retries",),
    ),
    Mutant(
        id="E3.10",
        breaks="a name without a handler is no warning",
        file=CLAIM_PY,
        old='            log.warning("no_handler",',
        new='            log.debug("no_handler",',
        tests=(f"{BACKLOG}::test_a_job_without_a_handler_is_left_untouched_with_a_warning",),
    ),
    Mutant(
        id="E3.10",
        breaks="a worker claims what it has no handler for",
        file=JOBS_SQL,
        old="WHERE j.name = lane.name AND j.priority = lane.priority",
        new="WHERE j.priority = lane.priority",
        tests=(f"{BACKLOG}::test_a_job_without_a_handler_is_left_untouched_with_a_warning",),
    ),
    Mutant(
        id="E3.10",
        breaks="a worker warns of names it knows",
        file=JOBS_SQL,
        old="WHERE hop.name IS NOT NULL AND NOT (hop.name = ANY(CAST(:names AS text[]))) LIMIT 100",
        new="WHERE hop.name IS NOT NULL AND cardinality(CAST(:names AS text[])) > 0 LIMIT 100",
        tests=(f"{BACKLOG}::test_a_job_without_a_handler_is_left_untouched_with_a_warning",),
    ),
    Mutant(
        id="E3.10",
        breaks="a worker warns of what its neighbour in the process runs",
        file=CLAIM_PY,
        old="names=self._names + self._elsewhere)",
        new="names=self._names)",
        tests=(f"{BACKLOG}::test_what_another_worker_of_this_process_runs_is_no_warning",),
    ),
    Mutant(
        id="E3.11",
        breaks="a handler's writes and its job's end are two commits",
        file=RUN_PY,
        old=(
            "            await self._settle(tx, settlements)\n"
            '            failpoint("worker.before_commit")\n'
            '        failpoint("worker.committed")\n'
            "        return settlements\n"
            "\n"
            "    async def _handle_one_of_many"
        ),
        new=(
            '            failpoint("worker.before_commit")\n'
            "        async with self._db.raw_transaction() if is_raw else self._db.transaction() as tx:\n"
            "            await self._settle(tx, settlements)\n"
            '        failpoint("worker.committed")\n'
            "        return settlements\n"
            "\n"
            "    async def _handle_one_of_many"
        ),
        tests=(f"{COMMIT}::test_writes_and_completion_are_one_transaction",),
    ),
    Mutant(
        id="E3.11",
        breaks="a thread's writes and its job's end are two commits",
        file=RUN_PY,
        old=("            tx.flush()\n            settled = settle.write_sync(tx, settlements, worker=self._worker)\n"),
        new=(
            "            tx.flush()\n"
            "        with self._db.transaction_sync() as tx:\n"
            "            settled = settle.write_sync(tx, settlements, worker=self._worker)\n"
        ),
        tests=(f"{COMMIT}::test_writes_and_completion_are_one_transaction",),
    ),
    Mutant(
        id="E3.11",
        breaks="what follows from a call and its job's end are two commits",
        file=RUN_PY,
        old=("            await tx.flush()\n            await self._settle(tx, [settlement])\n"),
        new=(
            "            await tx.flush()\n"
            "        async with self._db.transaction() as tx:\n"
            "            await self._settle(tx, [settlement])\n"
        ),
        tests=(f"{THEN}::test_writes_of_a_zombie_are_refused_after_its_call",),
    ),
    Mutant(
        id="E3.11",
        breaks="a COMMIT without an answer is taken for done",
        file=RUN_PY,
        old="            return await self._look_up(handler, job, began)\n",
        new='            return Result([Settlement(job, "done", monotonic() - began)])\n',
        tests=(f"{COMMIT}::test_a_commit_without_an_answer_is_looked_up_and_never_guessed",),
    ),
    Mutant(
        id="E3.11",
        breaks="losing a deadlock is a failure",
        file=RUN_PY,
        old="                if not is_conflict(error) or attempt == CONFLICT_RETRIES:\n",
        new="                if not is_conflict(error) or attempt >= 0:\n",
        tests=(f"{COMMIT}::test_losing_a_deadlock_costs_no_attempt",),
    ),
    Mutant(
        id="E3.12",
        breaks="a backlog is worked off newest first",
        file=JOBS_SQL,
        old="ORDER BY j.run_at, j.id LIMIT CAST(:limit AS int) FOR",
        new="ORDER BY j.run_at DESC, j.id LIMIT CAST(:limit AS int) FOR",
        tests=(f"{BACKLOG}::test_a_backlog_is_worked_off_oldest_first",),
    ),
    Mutant(
        id="E3.12",
        breaks="the oldest of a backlog is said to be the newest",
        file=JOBS_SQL,
        old="SELECT count(*)::int, min(late.run_at), max(late.run_at)",
        new="SELECT count(*)::int, max(late.run_at), min(late.run_at)",
        tests=(f"{BACKLOG}::test_a_backlog_is_reported_with_its_count_its_oldest_and_its_newest",),
    ),
    Mutant(
        id="E3.12",
        breaks="what is due now is a backlog",
        file=JOBS_SQL,
        old="AND j.run_at < duly.now() - interval '1 minute'",
        new="AND j.run_at <= duly.now()",
        tests=(f"{BACKLOG}::test_the_long_running_worker_reports_a_backlog_when_it_starts",),
    ),
    Mutant(
        id="E3.12",
        breaks="more than a thousand are taken in a run",
        file=WORKER_PY,
        old="RUN_ONCE_JOBS = 1_000",
        new="RUN_ONCE_JOBS = 2_000",
        tests=(f"{BACKLOG}::test_run_once_takes_a_thousand_jobs_at_most",),
    ),
    Mutant(
        id="E3.12",
        breaks="a backlog is a stampede",
        file=SETTINGS_PY,
        old=("concurrency: int = Field(default=10, ge=1, le=10_000)\n    processes"),
        new=("concurrency: int = Field(default=100, ge=1, le=10_000)\n    processes"),
        tests=(f"{BACKLOG}::test_a_backlog_is_no_stampede",),
    ),
    Mutant(
        id="E3.12",
        breaks="run_once runs the oldest of what was missed",
        file=MISFIRE_PY,
        old=(
            "        newest = cron.latest(due_at, now) or due_at\n"
            "        plan = _planned([newest, cron.next_after(newest)])\n"
        ),
        new=(
            "        newest = cron.latest(due_at, now) or due_at\n"
            "        plan = _planned([due_at, cron.next_after(newest)])\n"
        ),
        tests=(f"{TICK}::test_run_once_queues_the_newest_of_what_was_missed",),
    ),
    Mutant(
        id="E3.12",
        breaks="skip runs what was missed",
        file=MISFIRE_PY,
        old="        on_time = cron.between(newest_late, now, limit)\n",
        new="        on_time = cron.between(due_at - _INSTANT, now, limit)\n",
        tests=(f"{TICK}::test_skip_drops_what_was_missed_and_fires_what_is_due_now",),
    ),
    Mutant(
        id="E3.12",
        breaks="run_all leaves out the oldest",
        file=MISFIRE_PY,
        old="    due = [due_at, *cron.between(due_at, now, limit - 1)]\n",
        new="    due = cron.between(due_at, now, limit) or [due_at]\n",
        tests=(f"{TICK}::test_run_all_queues_every_missed_one_oldest_first",),
    ),
    Mutant(
        id="E3.12",
        breaks="run_all queues a backlog without a bound",
        file=MISFIRE_PY,
        old="    due = [due_at, *cron.between(due_at, now, limit - 1)]\n",
        new="    due = [due_at, *cron.between(due_at, now, limit)]\n",
        tests=(f"{TICK}::test_run_all_works_off_a_long_backlog_a_thousand_at_a_time",),
    ),
    Mutant(
        id="E3.12",
        breaks="many schedules are a stampede together",
        file=TICK_PY,
        old="limit=min(RUNS_PER_SCHEDULE, RUNS_PER_TICK // len(rows))",
        new="limit=RUNS_PER_SCHEDULE",
        tests=(f"{TICK}::test_a_backlog_of_many_schedules_is_bounded_and_shared_fairly",),
    ),
    Mutant(
        id="E3.12",
        breaks="one fewer is missed than was",
        file=MISFIRE_PY,
        old="        found = [due_at, *cron.between(due_at, newest_late, COUNT_LIMIT - 1)]\n",
        new="        found = [due_at, *cron.between(due_at, newest_late, COUNT_LIMIT - 1)][1:]\n",
        tests=(f"{TICK}::test_missed_occurrences_are_logged_stored_counted_and_alerted",),
    ),
    Mutant(
        id="E3.12",
        breaks="what was missed is not shown",
        file=TICK_PY,
        old="        missed_counts=[missed.count if missed else 0 for missed in shown],\n",
        new="        missed_counts=[0 for _ in shown],\n",
        tests=(f"{TICK}::test_missed_occurrences_are_logged_stored_counted_and_alerted",),
    ),
    Mutant(
        id="E3.12",
        breaks="a minute late is missed",
        file=MISFIRE_PY,
        old="newest_late = now - LATE_AFTER - _INSTANT",
        new="newest_late = now - LATE_AFTER",
        tests=(f"{TICK}::test_a_minute_late_is_not_missed_and_a_moment_more_is",),
    ),
    Mutant(
        id="E3.13",
        breaks="a run ends before what it took has ended",
        file=WORKER_PY,
        old=(
            "            await self._until_idle(self.time_limit_seconds)\n"
            "        finally:\n"
            "            await self._shut_down(0)\n"
        ),
        new=("        finally:\n            await self._shut_down(0)\n"),
        tests=(f"{BACKLOG}::test_run_once_takes_a_thousand_jobs_at_most",),
    ),
    Mutant(
        id="E3.13",
        breaks="a run tells what earlier ones did",
        file=WORKER_PY,
        old=("        claimed = 0\n        self.counts = {}\n"),
        new="        claimed = 0\n",
        tests=(f"{BACKLOG}::test_repeating_run_once_is_what_the_worker_does",),
    ),
    Mutant(
        id="E3.13",
        breaks="a run leaves its connections open",
        file=WORKER_PY,
        old=("        await self._handler_db.close()\n        await self.close()\n"),
        new="        await self._handler_db.close()\n",
        tests=(f"{BACKLOG}::test_run_once_hangs_up",),
    ),
    Mutant(
        id="E3.13",
        breaks="a run waits for what is due later",
        file=WORKER_PY,
        old=(
            "                if not cycle.done and not self._leases:\n"
            "                    break\n"
            "                if not cycle.done:\n"
            "                    self._woken.clear()\n"
        ),
        new=(
            "                if not cycle.done and not self._leases and cycle.wait_seconds is None:\n"
            "                    break\n"
            "                if not cycle.done:\n"
            "                    self._woken.clear()\n"
        ),
        tests=(f"{BACKLOG}::test_run_once_leaves_the_future_alone",),
    ),
    Mutant(
        id="E3.13",
        breaks="a tick does not say that more is due",
        file=TICK_PY,
        old="        more = len(verdicts) == BATCH or self._replan_after is not None\n",
        new="        more = self._replan_after is not None\n",
        tests=(f"{TICK}::test_run_once_is_one_bounded_tick_and_says_that_more_is_due",),
    ),
    Mutant(
        id="E3.13",
        breaks="the command exits 0 although nothing could be done",
        file=MAIN_PY,
        old="        sys.exit(1)\n",
        new="        sys.exit(0)\n",
        tests=(f"{PARTS}::test_a_database_that_is_away_is_one_line_and_exit_code_1",),
    ),
    Mutant(
        id="E3.13",
        breaks="the command does not say what the cycle did",
        file=PROCESS_PY,
        old='"done": sum(cycle.done for cycle in cycles),',
        new='"done": len(cycles),',
        tests=(f"{PARTS}::test_one_cycle_of_the_worker_runs_what_is_due_and_says_so",),
    ),
    Mutant(
        id="E3.14",
        breaks="only both stars make a wildcard",
        file=CRON_PY,
        old='minute.startswith("*") or hour.startswith("*")',
        new='minute.startswith("*") and hour.startswith("*")',
        tests=(f"{CRON}::test_wildcard_schedules_run_in_every_real_hour",),
    ),
    Mutant(
        id="E3.14",
        breaks="a time that does not exist is left out",
        file=CRON_PY,
        old="        return find_gap_end(naive, self._zone)\n",
        new="        return None\n",
        tests=(f"{CRON}::test_a_time_that_does_not_exist_runs_once_right_after_the_gap",),
    ),
    Mutant(
        id="E3.14",
        breaks="a time that occurs twice runs twice",
        file=CRON_PY,
        old='        both = (self.is_wildcard or self.dst_overlap == "both") and self.timezone',
        new="        both = self.timezone",
        tests=(f"{CRON}::test_a_time_that_occurs_twice_runs_once_the_first_time",),
    ),
    Mutant(
        id="E3.14",
        breaks="a time that occurs twice runs the second time",
        file=CRON_PY,
        old="((0, 1) if both else (0,))",
        new="((0, 1) if both else (1,))",
        tests=(f"{CRON}::test_a_time_that_occurs_twice_runs_once_the_first_time",),
    ),
    Mutant(
        id="E3.14",
        breaks="a wildcard loses a repeated hour",
        file=CRON_PY,
        old='        both = (self.is_wildcard or self.dst_overlap == "both") and',
        new='        both = self.dst_overlap == "both" and',
        tests=(f"{CRON}::test_wildcard_schedules_run_in_every_real_hour",),
    ),
    Mutant(
        id="E3.14",
        breaks="times inside one gap are several runs",
        file=CRON_PY,
        old="                if at > last:\n",
        new="                if at >= last:\n",
        tests=(f"{CRON}::test_several_times_inside_one_gap_are_one_run",),
    ),
    Mutant(
        id="E3.14",
        breaks="the second pass of an hour is forgotten during the first",
        file=CRON_PY,
        old="        if fold > local.fold:  #",
        new="        if fold < local.fold:  #",
        tests=(f"{CRON}::test_asking_inside_the_repeated_hour_never_goes_back",),
    ),
    Mutant(
        id="E3.15",
        breaks="an outage ends the duty",
        file=DUTY_PY,
        old=("                    self._went_down(error)\n                    await self.close()\n"),
        new=(
            "                    self._went_down(error)\n"
            "                    if is_disconnect(error):\n"
            "                        raise\n"
            "                    await self.close()\n"
        ),
        tests=(f"{OUTAGE}::test_a_worker_that_starts_before_its_database_waits_for_it",),
    ),
    Mutant(
        id="E3.15",
        breaks="a duty says that it is up during an outage",
        file=DUTY_PY,
        old='        self.health.set(False, f"',
        new='        self.health.set(True, f"',
        tests=(f"{OUTAGE}::test_a_worker_that_starts_before_its_database_waits_for_it",),
    ),
    Mutant(
        id="E3.15",
        breaks="a duty that is back says that it is down",
        file=DUTY_PY,
        old='        self.health.set(True, "working")\n',
        new='        self.health.set(self.health.up, "working")\n',
        tests=(f"{OUTAGE}::test_a_worker_that_starts_before_its_database_waits_for_it",),
    ),
    Mutant(
        id="E3.15",
        breaks="a busy worker does not notice an outage",
        file=WORKER_PY,
        old="            await self._look_alive()\n",
        new="",
        tests=(f"{OUTAGE}::test_a_worker_whose_slots_are_all_busy_notices_an_outage_too",),
    ),
    Mutant(
        id="E3.15",
        breaks="an outage costs an attempt",
        file=RUN_PY,
        old="        is_outage = handler.is_in_tx and is_database_gone(error)\n",
        new="        is_outage = handler.is_in_tx and is_conflict(error)\n",
        tests=(f"{COMMIT}::test_a_backend_that_is_terminated_before_commit_costs_no_attempt",),
    ),
    Mutant(
        id="E3.15",
        breaks="jobs of a claim without an answer wait for their lease",
        file=WORKER_PY,
        old=(
            "        if self._claim_unanswered:\n"
            "            await self._claims.give_back_unknown(connection, self._leases.ids())\n"
        ),
        new="",
        tests=(f"{OUTAGE}::test_jobs_of_a_claim_without_an_answer_do_not_wait_for_their_lease",),
    ),
    Mutant(
        id="E3.15",
        breaks="what was done during an outage is forgotten",
        file=WORKER_PY,
        old=("                    delay = min(delay * 2, OUTAGE_BACKOFF_SECONDS[1])\n                    continue\n"),
        new=(
            "                    delay = min(delay * 2, OUTAGE_BACKOFF_SECONDS[1])\n"
            "                    del self._results[: len(batch)]\n"
            "                    continue\n"
        ),
        tests=(f"{OUTAGE}::test_what_was_done_while_the_database_was_away_is_settled_afterwards",),
    ),
    Mutant(
        id="E3.15",
        breaks="a process is ready though a duty is down",
        file=HEALTH_PY,
        old='Check(duty.health.up and detail != "starting", detail)',
        new='Check(detail != "starting", detail)',
        tests=(f"{HEALTH}::test_a_duty_that_is_down_is_named_in_a_problem",),
    ),
    Mutant(
        id="E3.16",
        breaks="old dead letters have no schedule",
        file=ENGINE_SQL,
        old="    ('duly.forget-dead-letters', '37 3 * * *', 'run_once'),\n",
        new="",
        tests=(f"{MAINTENANCE}::test_each_clean_up_is_a_schedule_that_every_application_runs",),
    ),
    Mutant(
        id="E3.16",
        breaks="old executions have no schedule",
        file=ENGINE_SQL,
        old="    ('duly.drop-history', '17 3 * * *', 'run_once'),\n",
        new="",
        tests=(f"{MAINTENANCE}::test_each_clean_up_is_a_schedule_that_every_application_runs",),
    ),
    Mutant(
        id="E3.16",
        breaks="dead letters are kept as long as the audit",
        file=APP_PY,
        old="days=settings.keep_dead_letters_days",
        new="days=settings.keep_audit_days",
        tests=(f"{MAINTENANCE}::test_each_clean_up_is_a_schedule_that_every_application_runs",),
    ),
    Mutant(
        id="E3.16",
        breaks="executions are dropped a day early",
        file=ENGINE_SQL,
        old="        CONTINUE WHEN child.day >= before;\n",
        new="        CONTINUE WHEN child.day > before;\n",
        tests=(f"{MAINTENANCE}::test_history_older_than_the_retention_is_dropped_by_partition",),
    ),
    Mutant(
        id="E3.16",
        breaks="processed events are forgotten too soon",
        file=MAINTENANCE_SQL,
        old="WHERE processed_at < duly.now() - make_interval(days =>",
        new="WHERE processed_at < duly.now() - make_interval(hours =>",
        tests=(f"{MAINTENANCE}::test_processed_events_are_forgotten_by_age",),
    ),
    Mutant(
        id="E3.16",
        breaks="dead letters are forgotten too soon",
        file=MAINTENANCE_SQL,
        old="WHERE buried_at < duly.now() - make_interval(days =>",
        new="WHERE buried_at < duly.now() - make_interval(hours =>",
        tests=(f"{MAINTENANCE}::test_dead_letters_are_forgotten_by_age_and_their_aggregate_goes_on",),
    ),
    Mutant(
        id="E3.16",
        breaks="idempotency keys are forgotten before their time",
        file=IDEMPOTENCY_SQL,
        old=("WHERE expires_at <= duly.now()\n        ORDER BY"),
        new=("WHERE created_at <= duly.now()\n        ORDER BY"),
        tests=(f"{CLEAN_UP}::test_only_keys_whose_time_is_over_are_forgotten",),
    ),
    Mutant(
        id="E3.16",
        breaks="a table that is too long for a night grows",
        file=MAINTENANCE_PY,
        old=('    if more:\n        await _go_on(tx, "duly.forget-processed-events")\n'),
        new="",
        tests=(f"{MAINTENANCE}::test_a_call_is_bounded_and_queues_the_next_one_when_more_remain",),
    ),
    Mutant(
        id="E3.16",
        breaks="a call is not bounded",
        file=MAINTENANCE_PY,
        old=("        if rows[0][0] < batch:\n            return gone, False\n    return gone, True\n"),
        new=(
            "        if rows[0][0] < batch:\n"
            "            return gone, False\n"
            "    return await _in_batches(tx, statement, days=days, batch=batch, batches=batches)\n"
        ),
        tests=(f"{MAINTENANCE}::test_a_call_is_bounded_and_queues_the_next_one_when_more_remain",),
    ),
    Mutant(
        id="E7.2",
        breaks="everything starts but the scheduler",
        file=PARTS_PY,
        old='DUTIES = ("worker", "relay", "scheduler")',
        new='DUTIES = ("worker", "relay")',
        tests=(f"{UP}::test_it_is_ready_prints_its_urls_stops_on_ctrl_c_and_keeps_its_data",),
    ),
    Mutant(
        id="E7.2",
        breaks="it prints no URLs",
        file=PROCESS_PY,
        old='at {base}/", *lines, "Ctrl-C',
        new='at {base}/", "Ctrl-C',
        tests=(f"{UP}::test_it_is_ready_prints_its_urls_stops_on_ctrl_c_and_keeps_its_data",),
    ),
    Mutant(
        id="E7.2",
        breaks="there are no samples",
        file=PARTS_PY,
        old='settings.env == "development" and settings.wants_embedded()',
        new='settings.env == "development" and not settings.wants_embedded()',
        tests=(f"{UP}::test_it_is_ready_prints_its_urls_stops_on_ctrl_c_and_keeps_its_data",),
    ),
    Mutant(
        id="E7.2",
        breaks="Ctrl-C is no clean stop",
        file=SUPERVISOR_PY,
        old="SIGNALS = (signal.SIGINT, signal.SIGTERM)",
        new="SIGNALS = (signal.SIGTERM,)",
        tests=(f"{UP}::test_it_is_ready_prints_its_urls_stops_on_ctrl_c_and_keeps_its_data",),
    ),
    Mutant(
        id="E7.2",
        breaks="the embedded server is left running",
        file=HOME_PY,
        old="        if mark.read_text() == _postmaster(postgres):",
        new="        if mark.read_text() != _postmaster(postgres):",
        tests=(f"{UP}::test_it_is_ready_prints_its_urls_stops_on_ctrl_c_and_keeps_its_data",),
    ),
    Mutant(
        id="E7.2",
        breaks="a part that leaves stops the server under the others",
        file=HOME_PY,
        old="                if _try_lock(users, fcntl.LOCK_EX):\n",
        new="                if _try_lock(users, fcntl.LOCK_SH):\n",
        tests=(f"{UP}::test_a_second_one_on_the_same_data_is_refused",),
    ),
    Mutant(
        id="E7.2",
        breaks="PORT is not honoured",
        file=SETTINGS_PY,
        old='validation_alias="PORT")',
        new='validation_alias="DULY_PORT")',
        tests=(f"{UP}::test_it_listens_on_8000_and_lives_in_the_working_directory_unless_it_is_told_otherwise",),
    ),
    Mutant(
        id="E7.2",
        breaks="the data live elsewhere",
        file=SETTINGS_PY,
        old='    data: Path = Path(".duly")\n',
        new='    data: Path = Path("data")\n',
        tests=(f"{UP}::test_it_listens_on_8000_and_lives_in_the_working_directory_unless_it_is_told_otherwise",),
    ),
    Mutant(
        id="E7.2",
        breaks="the relay has no command",
        file=PARTS_PY,
        old="for command in (up, api, worker, relay, scheduler, receive):",
        new="for command in (up, api, worker, scheduler, receive):",
        tests=(f"{PARTS}::test_one_cycle_of_the_relay_publishes",),
    ),
    Mutant(
        id="E7.2",
        breaks="a token has no roles",
        file=SANDBOX_PY,
        old="roles=role or []",
        new="roles=[]",
        tests=(f"{SANDBOX}::test_token_prints_one_that_the_issuers_key_verifies",),
    ),
    Mutant(
        id="E7.2",
        breaks="the sandbox has no issuer",
        file=PROCESS_PY,
        old="        api.include_router(create_issuer_router(issuer))\n",
        new="",
        tests=(f"{UP}::test_it_is_ready_prints_its_urls_stops_on_ctrl_c_and_keeps_its_data",),
    ),
    Mutant(
        id="E7.2",
        breaks="it is ready before its duties have begun",
        file=HEALTH_PY,
        old='Check(duty.health.up and detail != "starting", detail)',
        new="Check(duty.health.up, detail)",
        tests=(f"{HEALTH}::test_a_duty_that_is_down_is_named_in_a_problem",),
    ),
]
