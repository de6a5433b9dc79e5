"""The operator's commands: E7.1 (the same actions on the command line, confirmed when they are many)."""

from __future__ import annotations

import getpass
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import structlog
from typer.testing import CliRunner, Result

from duly.cli.main import app
from tests.engine.operate.conftest import NOON, Make

Run = Callable[..., Result]


@pytest.fixture
def run(dsn: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Runs a command in this process on the test's database; what it does to logs and signals is undone."""
    monkeypatch.setenv("DATABASE_URL", dsn)
    root, handlers, level = logging.getLogger(), logging.getLogger().handlers[:], logging.getLogger().level
    ending, logs = signal.getsignal(signal.SIGTERM), structlog.get_config()

    def command(*arguments: object, answer: str | None = None) -> Result:
        return CliRunner().invoke(app, [str(argument) for argument in arguments], input=answer)

    yield command
    root.handlers[:], root.level = handlers, level
    signal.signal(signal.SIGTERM, ending)
    structlog.configure(**logs)


def output(result: Result) -> str:
    """What a command wrote; it must have gone well."""
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


def read(result: Result) -> Any:
    """The JSON that a command wrote."""
    return json.loads(output(result))


def test_why_prints_one_sentence_a_line_or_json(run: Run, make: Make) -> None:
    id = make.job(entity_id="order-1", run_at=NOON + timedelta(minutes=4))
    said = output(run("why", id)).splitlines()
    assert said[0] == f"Job {id} is charge for order-1."
    assert "It is not due until 2026-03-02 12:04:00 UTC (in 4 min)." in said
    assert read(run("why", id, "--json")) == said


def test_status_is_a_table_for_people_and_json_for_machines(run: Run, make: Make) -> None:
    make.job(run_at=NOON - timedelta(minutes=5))
    make.dead(900, "refund")
    make.failed_event()
    make.process("w1", names=("charge",))
    said = output(run("status"))
    assert "charge" in said
    assert "5 min" in said
    assert "dead letters: refund 1" in said
    assert "outbox: 0 pending (0 held), 1 failed" in said
    assert "alive: worker w1" in said
    found = read(run("status", "--json"))
    assert found["jobs"][0]["due"] == {"number": 1, "more": False}
    assert found["dead_letters"] == {"refund": {"number": 1, "more": False}}


def test_an_idle_engine_says_so(run: Run, make: Make) -> None:
    make.run("UPDATE duly.schedules SET next_run_at = NULL")
    said = output(run("status"))
    assert "no jobs wait or run" in said
    assert "late schedules: none" in said
    assert "alive: nobody" in said
    assert output(run("alerts", "list")) == "no alerts\n"


def test_jobs_are_listed_cancelled_and_run_now(run: Run, make: Make) -> None:
    first, second = make.job(entity_id="order-1"), make.job("refund", run_at=NOON + timedelta(hours=1))
    assert [job["id"] for job in read(run("jobs", "list", "--json"))] == [first, second]
    assert [job["id"] for job in read(run("jobs", "list", "--name", "refund", "--json"))] == [second]
    assert [job["id"] for job in read(run("jobs", "list", "--entity", "order-1", "--json"))] == [first]
    assert read(run("jobs", "list", "--status", "Running", "--json")) == []
    assert "order-1" in output(run("jobs", "list"))
    assert output(run("jobs", "run-now", second, "--actor", "alice")) == f"job {second} is due now\n"
    assert output(run("jobs", "cancel", first, "--reason", "wrong order")) == f"cancelled job {first}\n"
    assert make.run("SELECT id, run_at FROM duly.jobs") == [(second, NOON)]
    now, cancelled = make.audit()
    assert (now["actor"], now["reason"]) == ("alice", None)
    assert (cancelled["actor"], cancelled["reason"]) == (getpass.getuser(), "wrong order")


def test_dead_letters_are_retried_and_discarded_by_id_without_a_question(run: Run, make: Make) -> None:
    for id in (1, 2, 3):
        make.dead(id)
    assert output(run("dead", "retry", 1, 2)) == "retried 2 dead letters\n"
    assert output(run("dead", "discard", 3)) == "discarded 1 dead letter\n"
    assert make.run("SELECT id FROM duly.jobs ORDER BY id") == [(1,), (2,)]


def test_one_absent_id_leaves_the_others_untouched(run: Run, make: Make) -> None:
    """One command is one transaction."""
    make.dead(1)
    assert run("dead", "retry", 1, 99).exit_code == 1
    assert make.run("SELECT id FROM duly.dead_letters") == [(1,)]


def test_a_bulk_action_says_how_many_and_does_nothing_when_refused(run: Run, make: Make) -> None:
    """Destructive bulk actions are confirmed."""
    for id in (1, 2, 3):
        make.dead(id)
    make.dead(4, "refund")
    refused = run("dead", "discard", "--all", "--name", "charge", answer="n\n")
    assert "Discard 3 dead letters? [y/N]" in refused.output
    assert refused.exit_code == 1
    assert make.value("SELECT count(*) FROM duly.dead_letters") == 4
    said = output(run("dead", "discard", "--all", "--name", "charge", answer="y\n"))
    assert said.endswith("discarded 3 dead letters\n")
    assert output(run("dead", "retry", "--all", "--yes")) == "retried 1 dead letter\n"
    assert output(run("dead", "retry", "--all")) == "retried 0 dead letters\n"


def test_a_bulk_action_goes_on_in_batches_until_all_are_done(run: Run, make: Make) -> None:
    make.run(
        "INSERT INTO duly.dead_letters (id, name, payload, priority, due_at, created_at, original_delay, retry_count,"
        " source, reason, error, error_kind, buried_at) SELECT n, 'charge', '{}', 3, now(), now(), '0', 3, 'Deferred',"
        " 'retries_used_up', 'x', 'X', now() FROM generate_series(1, 2500) n"
    )
    assert output(run("dead", "retry", "--all", "--yes")) == "retried 2500 dead letters\n"
    assert make.value("SELECT count(*) FROM duly.jobs") == 2500


def test_ids_and_all_exclude_each_other_and_one_is_needed(run: Run, make: Make) -> None:
    make.dead(1)
    for arguments in (["dead", "retry"], ["dead", "discard", "1", "--all"], ["events", "requeue"]):
        assert run(*arguments, "--yes").exit_code == 2
    assert make.value("SELECT count(*) FROM duly.dead_letters") == 1


def test_dead_letters_are_listed_and_grouped(run: Run, make: Make) -> None:
    make.dead(1, entity_id="order-1", error="[red]boom\x1b[2J")
    said = output(run("dead", "list"))
    assert "[red]boom?[2J" in said, "neither markup nor a terminal's escape codes"
    assert [dead["id"] for dead in read(run("dead", "list", "--name", "charge", "--json"))] == [1]
    [group] = read(run("dead", "list", "--groups", "--json"))
    assert (group["name"], group["error_kind"], group["count"]["number"]) == ("charge", "ValueError", 1)


def test_events_are_listed_requeued_and_discarded(run: Run, make: Make) -> None:
    """E1.4."""
    first, second, third = (make.failed_event(f"order-{number}") for number in range(3))
    assert len(read(run("events", "list", "--status", "FAILED", "--json"))) == 3
    assert [event["id"] for event in read(run("events", "list", "--aggregate", "order-1", "--json"))] == [str(second)]
    assert output(run("events", "requeue", first)) == f"requeued event {first}\n"
    assert output(run("events", "discard", second)) == f"discarded event {second}\n"
    asked = run("events", "requeue", "--all", "--topic", "shop", answer="y\n")
    assert "Requeue 1 FAILED events? [y/N]" in asked.output
    assert output(asked).endswith("requeued 1 event\n")
    assert make.run("SELECT id, failed_at FROM duly.outbox ORDER BY seq") == [(first, None), (third, None)]
    assert "order.placed" in output(run("events", "list"))


def test_alerts_are_listed_and_resolved(run: Run, make: Make) -> None:
    make.run("SELECT duly.alert('dead_letter', 'charge', 'boom')")
    [alert] = read(run("alerts", "list", "--json"))
    assert output(run("alerts", "resolve", alert["id"])) == f"resolved alert {alert['id']}\n"
    assert read(run("alerts", "list", "--json")) == []
    assert len(read(run("alerts", "list", "--all", "--json"))) == 1


def test_history_shows_runs_by_name_job_and_entity(run: Run, make: Make) -> None:
    """E3.8."""
    make.execution(1, message="charged", entity_id="order-1")
    make.execution(2, "refund")
    assert [one["job_id"] for one in read(run("history", "--name", "refund", "--json"))] == [2]
    assert [one["job_id"] for one in read(run("history", "--job", 1, "--json"))] == [1]
    assert [one["job_id"] for one in read(run("history", "--entity", "order-1", "--json"))] == [1]
    assert "charged" in output(run("history"))


def test_schedules_are_added_edited_triggered_switched_and_removed(run: Run, make: Make) -> None:
    """E3.1, E7.1."""
    who = ("--actor", "alice", "--reason", "asked for")
    said = output(run("schedules", "add", "sweep", "--cron", "0 9 * * *", "--payload", '{"deep": true}', *who))
    assert said == "added sweep: 0 9 * * * in UTC, next run 2026-03-03T09:00:00+00:00, version 1\n"
    changed = ("--cron", "30 9 * * *", "--timezone", "Europe/Warsaw", "--misfire", "skip", "--dst-gap", "skip")
    said = output(run("schedules", "edit", "sweep", *changed, *who))
    assert said == "changed sweep: 30 9 * * * in Europe/Warsaw, next run 2026-03-03T08:30:00+00:00, version 2\n"
    assert run("schedules", "edit", "sweep", "--cron", "0 8 * * *", "--expected-version", 1).exit_code == 1
    assert "no next run" in output(run("schedules", "disable", "sweep", *who))
    assert "It is disabled by alice since 2026-03-02 12:00:00 UTC" in output(run("why", "sweep"))
    assert "next run" in output(run("schedules", "enable", "sweep", *who))
    assert output(run("schedules", "trigger", "sweep", *who)).startswith("queued sweep as job ")
    assert make.run("SELECT name, source, payload FROM duly.jobs") == [("sweep", "Manual", {"deep": True})]
    [listed] = [row for row in read(run("schedules", "list", "--json")) if row["name"] == "sweep"]
    assert (listed["misfire"], listed["dst_gap"], listed["dst_overlap"]) == ("skip", "skip", "first")
    assert output(run("schedules", "remove", "sweep", *who)) == "removed sweep\n"
    assert {entry["actor"] for entry in make.audit()} == {"alice"}
    assert [entry["action"] for entry in make.audit()] == [
        "schedule.added",
        "schedule.edited",
        "schedule.disabled",
        "schedule.enabled",
        "schedule.triggered",
        "schedule.removed",
    ]


def test_the_next_runs_of_a_schedule_or_an_expression_can_be_seen_first(run: Run, make: Make) -> None:
    """E7.1: edit with a preview; E3.14: with a note where the clocks change."""
    make.run("INSERT INTO duly.schedules (name, cron) VALUES ('sweep', '0 9 * * *')")
    runs = read(run("schedules", "preview", "sweep", "--count", 2, "--json"))
    assert [one["at"] for one in runs] == ["2026-03-03T09:00:00+00:00", "2026-03-04T09:00:00+00:00"]
    zone = ("--timezone", "Europe/Warsaw")
    said = output(run("schedules", "preview", "--cron", "30 2 * * *", *zone, "--count", 28))
    assert "moved: the clocks skip from 02:00 to 03:00" in said
    assert run("schedules", "preview").exit_code == 2
    assert run("schedules", "preview", "sweep", "--cron", "0 9 * * *").exit_code == 2


def test_a_bad_payload_is_refused(run: Run, make: Make) -> None:
    for payload in ("nonsense", "[1]"):
        assert run("schedules", "add", "sweep", "--cron", "0 9 * * *", "--payload", payload).exit_code == 1
    assert make.audit() == []


def test_what_goes_wrong_is_one_sentence_and_a_code(dsn: str, make: Make) -> None:
    """In a process of its own, as a person runs it."""
    make.dead(7)
    done = subprocess.run(
        [sys.executable, "-m", "duly.cli.main", "jobs", "cancel", "7"],
        env={**os.environ, "DATABASE_URL": dsn},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "duly: job 7 is a dead letter: retry or discard it instead\n"
