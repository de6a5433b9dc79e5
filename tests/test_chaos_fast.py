"""The chaos runs in small: the checker on hand-written facts, one short run with faults, and three safeguards off."""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from duly.db import Statement
from tests.chaos import facts, history
from tests.chaos.__main__ import CODES
from tests.chaos.app import CRON_ALL
from tests.chaos.checker import CHECKS, QUERIES, Violation, check
from tests.chaos.clients import Mix
from tests.chaos.poison import ALL_FAULTS
from tests.chaos.run import Outcome, Plan, Run
from tests.chaos.safeguards import SAFEGUARDS, NotThere, _reword, switch_off
from tests.chaos.scenarios import SCENARIOS, Bench
from tests.forking import Forked

ORDER_KINDS = ("batched", "noted", "followed", "timer", "fired")
T0 = 1_800_000_000.0


@pytest.fixture
def good() -> Iterator[sqlite3.Connection]:
    """The facts of a small run in which nothing went wrong."""
    made = facts.create(":memory:")
    for number, op in enumerate(("order-1", "order-2"), 1):
        facts.add_history(made, lines(op, "order", body=f'{{"nonce": {number}}}'))
        facts.add(made, "orders", [(number, op, "a1", number, "chaos.limited", 0)])
        facts.add(made, "events", [(f"e{number}", number, "order.placed", "a1", op, number, "published")])
        for kind in ORDER_KINDS:
            effect(made, kind, op, due_at=T0, business_at=T0 + 1, job_id=10 * number if kind == "timer" else None)
        effect(made, "ordered", op, aggregate="a1", seq=number, saw=number - 1)
        effect(made, "limited", op, job_id=10 * number + 1, began_at=T0 + number, at=T0 + number + 0.5)
        facts.add(made, "witness", [("outside", op, f"e{number}", 1, 1)])
        facts.add(made, "processed", [(consumer, f"e{number}") for consumer in ("batched", "noted", "outside")])
        facts.add(made, "keys", [(op, 201)])
        ran(made, 10 * number, "chaos.timer", op)
        ran(made, 10 * number + 1, "chaos.limited", op)
        ran(made, 10 * number + 2, "consumer:outside", "a1", event_id=f"e{number}")
    for minute in range(3):
        effect(made, CRON_ALL, str(minute), due_at=T0 + 60 * minute, business_at=T0 + 60 * minute + 1)
    facts.add(made, "schedules", [(CRON_ALL, "run_all", T0 + 180, T0 + 120, None)])
    yield made
    made.close()


def lines(op: str, kind: str, **ok: Any) -> list[dict[str, Any]]:
    """An operation that was answered."""
    return [{"type": "invoke", "op": op, "kind": kind}, {"type": "ok", "op": op, "kind": kind, **ok}]


def effect(made: sqlite3.Connection, kind: str, key: str, **more: Any) -> None:
    """One effect."""
    values = {"kind": kind, "key": key, "business_at": T0 + 1, "at": T0 + 1} | more
    facts.add(made, "effects", [list(values.values())], columns=" ".join(values))


def ran(made: sqlite3.Connection, job_id: int, name: str, entity: str, **more: Any) -> None:
    """A job that was claimed once and done."""
    values = {"job_id": job_id, "name": name, "entity_id": entity, "outcome": "done", "token": job_id} | more
    facts.add(made, "executions", [list(values.values())], columns=" ".join(values))
    claimed(made, job_id, job_id)
    accepted(made, job_id, job_id)


def claimed(made: sqlite3.Connection, job_id: int, token: int, *, was_live: int = 0, is_early: int = 0) -> None:
    """A claim, after everything before."""
    seq = made.execute("SELECT coalesce(max(seq), 0) + 1 FROM trace").fetchone()[0]
    facts.add(made, "trace", [(seq, "claim", job_id, "chaos.timer", token, None, was_live, is_early, "w", None)])


def accepted(made: sqlite3.Connection, job_id: int, token: int, outcome: str = "done") -> None:
    """A settlement that the database took."""
    seq = made.execute("SELECT coalesce(max(seq), 0) + 1 FROM trace").fetchone()[0]
    facts.add(made, "trace", [(seq, "accept", job_id, "chaos.timer", token, None, None, None, "w", outcome)])


def test_a_good_history_has_no_violation(good: sqlite3.Connection) -> None:
    assert check(good) == []


BAD: dict[str, str] = {
    "acknowledged_lost": "INSERT INTO history (type, op, kind) VALUES ('invoke', 'o', 'note'), ('ok', 'o', 'note')",
    "refused_but_kept": "UPDATE history SET type = 'fail' WHERE op = 'order-1' AND type = 'ok'",
    "never_asked": "INSERT INTO notes VALUES (1, 'note-from-nowhere')",
    "duplicate_business": "INSERT INTO orders VALUES (3, 'order-1', 'a1', 1, '', 0)",
    "unanswered": "INSERT INTO history (type, op, kind) VALUES ('invoke', 'o', 'order'), ('info', 'o', 'order')",
    "replay_differs": "INSERT INTO history (type, op, kind, body) VALUES ('ok', 'order-1', 'order', '{}')",
    "answered_500": "INSERT INTO history (type, op, kind, status) VALUES ('info', 'order-1', 'order', 500)",
    "key_reuse_accepted": "INSERT INTO history (type, op, kind) VALUES ('invoke', 'r', 'reuse'), ('ok', 'r', 'reuse')",
    "key_without_answer": "UPDATE keys SET status = NULL WHERE key = 'order-2'",
    "row_without_event": "DELETE FROM events WHERE id = 'e2'",
    "event_without_row": "INSERT INTO events VALUES ('e9', 9, 'note.taken', 'n', 'n', NULL, 'published')",
    "timer_without_row": "INSERT INTO executions (job_id, name, entity_id) VALUES (99, 'chaos.timer', 'nobody')",
    "event_in_two_places": "INSERT INTO events VALUES ('e2', 3, 'order.noted', 'x', 'order-2', NULL, 'pending')",
    "lost_effect": "DELETE FROM effects WHERE kind = 'batched' AND key = 'order-1'",
    "duplicate_effect": "INSERT INTO effects (kind, key) VALUES ('noted', 'order-1')",
    "effect_of_the_impossible": "INSERT INTO effects (kind, key) VALUES ('raise', 'order-1')",
    "effect_without_row": "INSERT INTO effects (kind, key) VALUES ('noted', 'nobody')",
    "snoozes": "INSERT INTO effects (kind, key) VALUES ('snoozed', 'order-1')",
    "order_broken": "UPDATE effects SET saw = 0 WHERE kind = 'ordered' AND seq = 2",
    "published_out_of_order": "UPDATE events SET seq = 3 - seq",
    "outside_lost": "DELETE FROM witness WHERE key = 'order-2'",
    "outside_too_often": "INSERT INTO witness VALUES ('outside', 'order-1', 'e1', 2, 2)",
    "never_sent": "INSERT INTO run VALUES ('broker', 'true')",
    "sent_out_of_order": """
        INSERT INTO witness VALUES ('sent', 'order-1', 'e1', '9', 1), ('sent', 'order-2', 'e2', '8', 1)""",
    "timer_fate": "INSERT INTO cancels VALUES (1, 'c', 'order-1', 1)",
    "too_early": "UPDATE effects SET due_at = business_at + 0.001 WHERE kind = 'timer' AND key = 'order-1'",
    "unique_twice": "INSERT INTO nudges VALUES (1, 'n', 'u1', 5, 0, 2)",
    "nudge_lost": "INSERT INTO nudges VALUES (1, 'n', 'u1', 5, 0, 1)",
    "lease_taken_from_the_living": "UPDATE trace SET was_live = 1 WHERE what = 'claim' AND job_id = 10",
    "tokens_not_increasing": "INSERT INTO trace (seq, what, job_id, token) VALUES (99, 'claim', 10, 9)",
    "accepted_twice": "INSERT INTO executions (job_id, name, outcome) VALUES (10, 'chaos.timer', 'done')",
    "effect_without_end": "UPDATE executions SET outcome = 'retried' WHERE job_id = 10",
    "stuck": "INSERT INTO jobs (id, name, waits, leased) VALUES (50, 'chaos.timer', 'due', 0)",
    "dead_letter_of_the_good": "INSERT INTO dead_letters (id, name, reason) VALUES (50, 'chaos.timer', 'worker_died')",
    "poison_not_dead": "UPDATE orders SET extra = 'chaos.raise' WHERE op = 'order-1'",
    "poison_tried_too_often": """
        INSERT INTO executions (job_id, name, outcome)
        SELECT 60, 'chaos.raise', 'retried' FROM (VALUES (1), (2), (3), (4), (5))""",
    "inbox_incomplete": "DELETE FROM processed WHERE consumer = 'noted' AND event_id = 'e1'",
    "limit_exceeded": f"""
        INSERT INTO effects (kind, key, began_at, at)
        SELECT 'limited', 'x' || column1, {T0 + 1.1}, {T0 + 1.4} FROM (VALUES (1), (2))""",
    "cron_not_once": f"DELETE FROM effects WHERE kind = '{CRON_ALL}' AND key = '1'",
    "unexpected_end": "INSERT INTO run VALUES ('unexpected', '[\"worker1 ended by itself\"]')",
}


@pytest.mark.parametrize("name", BAD)
def test_each_check_finds_what_it_is_there_for(good: sqlite3.Connection, name: str) -> None:
    good.execute(BAD[name])
    assert name in {violation.check for violation in check(good)}


def test_a_zombie_that_was_accepted_is_found(good: sqlite3.Connection) -> None:
    claimed(good, 70, 70)
    claimed(good, 70, 71)
    accepted(good, 70, 70)
    assert [violation.check for violation in check(good)] == ["zombie_accepted"]


def test_a_take_over_of_a_slow_job_is_found_in_a_calm_run_only(good: sqlite3.Connection) -> None:
    good.execute("INSERT INTO executions (job_id, name, outcome) VALUES (80, 'chaos.block', 'lost')")
    assert check(good) == []
    good.execute("INSERT INTO run VALUES ('calm', 'true')")
    assert [violation.check for violation in check(good)] == ["taken_over_needlessly"]


def test_an_event_sent_twice_is_found_in_a_calm_run_only(good: sqlite3.Connection) -> None:
    good.execute("INSERT INTO witness VALUES ('sent', 'order-1', 'e1', '1', 1), ('sent', 'order-1', 'e1', '2', 2)")
    assert check(good) == []
    good.execute("INSERT INTO run VALUES ('calm', 'true')")
    assert [violation.check for violation in check(good)] == ["sent_twice_needlessly"]


def test_every_check_has_a_history_that_it_refuses() -> None:
    alone = {"zombie_accepted", "taken_over_needlessly", "sent_twice_needlessly"}
    assert BAD.keys() | alone == QUERIES.keys() | CHECKS.keys()


def test_what_is_unknown_may_have_happened_or_not(good: sqlite3.Connection) -> None:
    """An ``info`` never becomes a ``fail``: a note without an answer may be there, or not."""
    for op in ("note-1", "note-2"):
        facts.add_history(good, [{"type": "invoke", "op": op, "kind": "note"}, {"type": "info", "op": op}])
    facts.add(good, "notes", [(1, "note-1")])
    facts.add(good, "events", [("n1", 9, "note.taken", "note-1", "note-1", None, "published")])
    effect(good, "noted", "note-1")
    assert check(good) == []


def test_a_torn_last_line_of_a_history_is_left_out(tmp_path: Path) -> None:
    written = history.History(tmp_path / "h")
    written.write("invoke", "o", "note")
    written.close()
    with (tmp_path / "h").open("a") as file:
        file.write('{"type": "ok", "op"')
    assert [line["type"] for line in history.read(tmp_path / "h")] == ["invoke"]


@pytest.mark.parametrize(
    ("reached", "violations", "verdict"), [(1, 0, "passed"), (0, 0, "unknown"), (1, 1, "failed"), (0, 1, "failed")]
)
def test_a_fault_that_was_never_reached_makes_a_run_unknown(reached: int, violations: int, verdict: str) -> None:
    found = [Violation("stuck", 1, ())] * violations
    outcome = Outcome(found, {"kill_worker": reached}, {"kill_worker": 1}, {}, 1.0, 1.0, Path())
    assert outcome.verdict == verdict
    assert CODES[outcome.verdict] == {"passed": 0, "failed": 1, "unknown": 3}[verdict]


def test_there_are_twenty_safeguards_each_with_a_scenario() -> None:
    assert len(SAFEGUARDS) >= 20
    assert {safeguard.scenario for safeguard in SAFEGUARDS.values()} == SCENARIOS.keys()


@pytest.mark.parametrize("name", [one.name for one in SAFEGUARDS.values() if one.in_process is not None])
def test_each_safeguard_is_where_its_switch_looks_for_it(name: str) -> None:
    """In a process of its own: what is switched off there stays off."""
    process = Forked(switch_off, name, env=os.environ)
    assert process.communicate(30) == ("", "")
    assert process.wait() == 0


def test_a_safeguard_that_is_not_there_any_more_refuses() -> None:
    _reword("moved", "", "", Statement("SELECT 1"), "FOR UPDATE")
    try:
        with pytest.raises(NotThere):
            switch_off("moved")
    finally:
        del SAFEGUARDS["moved"]


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    """A PostgreSQL that may crash: never the one that other tests share."""
    made = Bench(Path(tempfile.mkdtemp(prefix="duly-chaos-")))
    made.server.start()
    yield made
    made.server.stop(remove=False)
    shutil.rmtree(made.home, ignore_errors=True)


def test_a_short_run_with_faults_passes(bench: Bench) -> None:
    faults = ("kill_worker", "crash_postgres", "lost_commit_reply", "lost_commit", "terminate_backends")
    assert set(faults) <= ALL_FAULTS.keys()
    plan = Plan(
        seed=7, seconds=5, pause=0.2, faults=faults, processes={"worker": 2, "relay": 1, "scheduler": 1, "api": 1},
        mix=Mix(pause_seconds=0.2), clients=3, drain_seconds=30.0,
    )  # fmt: skip
    outcome = asyncio.run(Run(bench.server, plan, bench.home / "short", database="short").execute())
    assert outcome.violations == []
    assert outcome.never_reached == []


@pytest.mark.parametrize(
    ("name", "caught_by"),
    [
        ("emit_same_commit", "event_without_row"),
        ("key_reserve", "duplicate_business"),
        ("limit_count", "limit_exceeded"),
    ],
)
def test_a_safeguard_that_is_off_is_noticed(bench: Bench, name: str, caught_by: str) -> None:
    outcome = bench.run(SAFEGUARDS[name].scenario, off=name)
    assert caught_by in {violation.check for violation in outcome.violations}
