"""The checker can fail: for each of its checks, facts that break the promise in just that way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.crashes.checker import CHECKS, Answer, Effect, Facts, Promise, Run, Sent, check

JOBS = Promise(jobs={1: "a", 2: "b", 3: "hopeless"}, hopeless={"hopeless"})
JOBS_KEPT = Facts(
    runs=[Run(1, "lost", 4), Run(1, "done", 7), Run(2, "done", 5), Run(3, "buried", 6)],
    dead=[(3, "hopeless")],
    effects=[Effect("work", "a"), Effect("work", "b")],
    endings={"victim": (-9, -9), "heir": (0, 0)},
)
SENT = [Sent("e0", "x", 0), Sent("e1", "x", 1)]
EVENTS = Promise(events=SENT, consumers={"ledger": True}, to_broker=True)
EVENTS_KEPT = Facts(
    runs=[
        Run(1, "done", 1, name="consumer:ledger", event_id="e0"),
        Run(2, "done", 2, name="consumer:ledger", event_id="e1"),
    ],
    effects=[Effect("ledger", "x", 0), Effect("ledger", "x", 1)],
    history=["e0", "e1"],
    inbox=[("ledger", "e0"), ("ledger", "e1")],
    received=[("x", 0), ("x", 0), ("x", 1), ("x", 0)],
)
REQUESTS = Promise(keyed={"k"}, unkeyed={"u", "v"})
BODY = '{"number":5,"sku":"a"}'
REQUESTS_KEPT = Facts(
    orders=[("k", 5), ("v", 6)],
    answers=[Answer("k", None), Answer("k", 201, BODY), Answer("k", 201, BODY), Answer("u", 503), Answer("v", None)],
)
TICKS = Promise(occurrences=[("report", "noon"), ("mail", "noon")])
TICKS_KEPT = Facts(occurrences=[("mail", "noon"), ("report", "noon")])
KEPT = [(JOBS, JOBS_KEPT), (EVENTS, EVENTS_KEPT), (REQUESTS, REQUESTS_KEPT), (TICKS, TICKS_KEPT)]


@pytest.mark.parametrize(("promise", "facts"), KEPT)
def test_a_promise_that_was_kept_is_not_complained_about(promise: Promise, facts: Facts) -> None:
    assert check(promise, facts) == []


def broken(promise: Promise, facts: Facts, **changes: object) -> tuple[Promise, Facts]:
    return promise, replace(facts, **changes)  # type: ignore[arg-type]  # fields by name


jobs, events, requests = JOBS_KEPT, EVENTS_KEPT, REQUESTS_KEPT
BROKEN: list[tuple[str, str, tuple[Promise, Facts]]] = [
    ("reached", "never", broken(JOBS, jobs, reached=False)),
    ("nothing_stuck", "not over", broken(JOBS, jobs, seconds=16.0)),
    ("nothing_stuck", "leased", broken(JOBS, jobs, jobs=[(1, "work", True)])),
    ("nothing_stuck", "consumer", broken(EVENTS, events, jobs=[(9, "consumer:ledger", False)])),
    ("nothing_stuck", "outbox", broken(EVENTS, events, outbox=["e1"])),
    ("nothing_stuck", "as told", broken(JOBS, jobs, leftovers=["as told"])),
    ("processes_end_well", "heir", broken(JOBS, jobs, endings={"heir": (None, 0)})),
    ("no_job_lost", "nowhere", broken(JOBS, jobs, runs=jobs.runs[:2] + jobs.runs[3:])),
    ("each_job_ends_once", "done", broken(JOBS, jobs, runs=[*jobs.runs, Run(1, "done", 8)])),
    ("each_job_ends_once", "buried", broken(JOBS, jobs, runs=[*jobs.runs[:2], Run(2, "buried", 5), jobs.runs[3]])),
    ("each_job_ends_once", "cancelled", broken(JOBS, jobs, runs=[*jobs.runs, Run(2, "cancelled", 9)])),
    ("each_job_ends_once", "e1", broken(EVENTS, events, runs=events.runs[:1])),
    (
        "no_job_made_twice", "[2, 3]",
        broken(EVENTS, events, runs=[*events.runs, Run(3, "duplicate", 3, name="consumer:ledger", event_id="e1")]),
    ),
    ("accepted_tokens_increase", "[7, 4]", broken(JOBS, jobs, runs=[Run(1, "retried", 7), Run(1, "done", 4)])),
    ("accepted_tokens_increase", "[4, 4]", broken(JOBS, jobs, runs=[Run(1, "lost", 4), Run(1, "done", 4)])),
    ("clean_stops_cost_nothing", "lost", broken(replace(JOBS, is_clean=True), jobs)),
    (
        "clean_stops_cost_nothing", "retried",
        broken(replace(JOBS, is_clean=True), jobs, runs=[Run(1, "retried", 4), *jobs.runs[1:]]),
    ),
    ("dead_letters_as_expected", "{}", broken(JOBS, jobs, dead=[])),
    ("dead_letters_as_expected", "'a'", broken(JOBS, jobs, dead=[*jobs.dead, (1, "a")])),
    ("effects_exactly_once", "2 times", broken(JOBS, jobs, effects=[*jobs.effects, Effect("work", "a")])),
    ("effects_exactly_once", "0 times", broken(JOBS, jobs, effects=jobs.effects[:1])),
    ("effects_exactly_once", "1 times", broken(JOBS, jobs, effects=[*jobs.effects, Effect("work", "hopeless")])),
    ("effects_exactly_once", "never asked", broken(JOBS, jobs, effects=[*jobs.effects, Effect("work", "z")])),
    (
        "effects_exactly_once", "3 times, not 1 to 2",
        broken(replace(JOBS, at_least_once=True), jobs, effects=[*jobs.effects, *[Effect("work", "a")] * 2]),
    ),
    ("effect_and_end_are_one", "there 1 times, its end 0", broken(JOBS, jobs, runs=jobs.runs[:1] + jobs.runs[2:])),
    ("effect_and_end_are_one", "there 0 times, its end 1", broken(JOBS, jobs, effects=jobs.effects[:1])),
    ("effect_and_end_are_one", "inbox 2 times", broken(EVENTS, events, inbox=[*events.inbox, ("ledger", "e1")])),
    ("events_published_once", "2 times in the history", broken(EVENTS, events, history=["e0", "e1", "e1"])),
    ("events_published_once", "0 times in the history", broken(EVENTS, events, history=["e0"])),
    ("events_published_once", "inbox", broken(EVENTS, events, inbox=[("ledger", "e0")])),
    ("order_kept", "[1, 0]", broken(EVENTS, events, effects=events.effects[::-1])),
    ("order_kept", "the broker has [1, 0]", broken(EVENTS, events, received=[("x", 1), ("x", 0)])),
    ("order_kept", "the broker has [0]", broken(EVENTS, events, received=[("x", 0)])),
    ("not_sent_again", "2 events again", broken(replace(EVENTS, most_repeated=1), events)),
    ("occurrences_once", "2 jobs", broken(TICKS, TICKS_KEPT, occurrences=[*TICKS_KEPT.occurrences, ("mail", "noon")])),
    ("occurrences_once", "0 jobs", broken(TICKS, TICKS_KEPT, occurrences=TICKS_KEPT.occurrences[:1])),
    ("occurrences_once", "not due", broken(TICKS, TICKS_KEPT, occurrences=[*TICKS_KEPT.occurrences, ("mail", "one")])),
    ("answers_true", "2 rows", broken(REQUESTS, requests, orders=[*requests.orders, ("k", 7)])),
    ("answers_true", "0 rows", broken(REQUESTS, requests, orders=requests.orders[1:])),
    ("answers_true", "row 8", broken(REQUESTS, requests, orders=[("k", 8)])),
    ("answers_true", "never answered", broken(REQUESTS, requests, answers=[Answer("k", None)])),
    ("answers_true", "2 ways", broken(REQUESTS, requests, answers=[*requests.answers, Answer("k", 201, "{}")])),
    ("answers_true", "u has 0 rows", broken(REQUESTS, requests, answers=[*requests.answers, Answer("u", 201, "{}")])),
    ("schema_complete", "missing", broken(Promise(schema=[("table", "jobs")]), Facts())),
    ("schema_complete", "too many", broken(Promise(), Facts(schema=[("table", "half")]))),
]  # fmt: skip


@pytest.mark.parametrize(("name", "words", "case"), BROKEN)
def test_a_promise_that_was_broken_is_named(name: str, words: str, case: tuple[Promise, Facts]) -> None:
    complaints = [one for one in check(*case) if one.startswith(f"{name}: ")]
    assert any(words in one for one in complaints), check(*case)


def test_every_check_has_facts_that_break_it() -> None:
    names: list[Callable[..., object]] = list(CHECKS)
    assert {one.__name__ for one in names} == {name for name, _, _ in BROKEN}
