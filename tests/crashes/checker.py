"""One checker for every cell of the crash matrix: what was promised against what was found, without any I/O.

``Promise`` is what the clients were told and what the workload asked for; ``Facts`` is what the database, the broker
and the clients have seen when all is over. Each check yields sentences; no sentence means that the promise was kept.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

ENDED = frozenset({"done", "duplicate", "cancelled"})
WORKED = ENDED | {"buried"}


@dataclass(frozen=True)
class Run:
    """One row of the execution log."""

    job_id: int
    outcome: str
    lease_token: int
    retry_count: int = 0
    name: str = "work"
    entity_id: str = ""
    event_id: str | None = None


@dataclass(frozen=True)
class Effect:
    """What a handler wrote, in the order of writing."""

    kind: str
    key: str
    n: int = 0


@dataclass(frozen=True)
class Sent:
    """An event that was committed to the outbox."""

    id: str
    aggregate: str
    n: int


@dataclass(frozen=True)
class Answer:
    """What a client was told: the request's number, the status (None: nothing), and the body."""

    request: str
    status: int | None
    body: str = ""


@dataclass
class Promise:
    """What must hold in the end."""

    jobs: dict[int, str] = field(default_factory=dict)  # acknowledged, by id: their entity
    events: list[Sent] = field(default_factory=list)  # acknowledged, in order for each aggregate
    consumers: dict[str, bool] = field(default_factory=dict)  # by name: whether it keeps the order
    to_broker: bool = False
    most_repeated: int | None = None  # how many events the broker may see again
    hopeless: set[str] = field(default_factory=set)  # entities or aggregates that must end as dead letters
    at_least_once: bool = False  # the handler has no transaction of ours
    without_effects: bool = False  # the engine's own jobs
    occurrences: list[tuple[str, str]] = field(default_factory=list)  # (schedule, due at)
    keyed: set[str] = field(default_factory=set)  # requests that came with a key, and were repeated until answered
    unkeyed: set[str] = field(default_factory=set)  # requests that were sent once
    schema: list[Any] = field(default_factory=list)
    fails_first: bool = False  # the handlers fail at first, as planned
    is_clean: bool = False  # nobody may have lost a lease, nothing may count as an attempt
    bound_seconds: float = 15.0


@dataclass
class Facts:
    """What was found."""

    reached: bool = True
    seconds: float = 0.0  # from the fault until nothing was left to do
    endings: dict[str, tuple[int | None, int]] = field(default_factory=dict)  # by process: exit code, the expected one
    jobs: list[tuple[int, str, bool]] = field(default_factory=list)  # still queued: id, name, whether it is leased
    runs: list[Run] = field(default_factory=list)  # in the order in which they were written
    dead: list[tuple[int, str]] = field(default_factory=list)  # id and entity of the dead letters
    effects: list[Effect] = field(default_factory=list)
    outbox: list[str] = field(default_factory=list)
    history: list[str] = field(default_factory=list)
    inbox: list[tuple[str, str]] = field(default_factory=list)  # consumer and event
    received: list[tuple[str, int]] = field(default_factory=list)  # the broker's journal: aggregate and number
    occurrences: list[tuple[str, str]] = field(default_factory=list)
    orders: list[tuple[str, int]] = field(default_factory=list)  # request and its row's number
    answers: list[Answer] = field(default_factory=list)
    schema: list[Any] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)  # what a workload's own question found wrong


def check(promise: Promise, facts: Facts) -> list[str]:
    """Everything that is wrong in the end, each with the name of its check."""
    return [f"{rule.__name__}: {sentence}" for rule in CHECKS for sentence in rule(promise, facts)]


def check_halfway(promise: Promise, facts: Facts) -> list[str]:
    """What must hold at any moment, also right after a process has died."""
    return [f"halfway, {rule.__name__}: {sentence}" for rule in ALWAYS for sentence in rule(promise, facts)]


def reached(_promise: Promise, facts: Facts) -> Iterator[str]:
    """A fault that never happened proves nothing."""
    if not facts.reached:
        yield "the failpoint was never reached"


def nothing_stuck(promise: Promise, facts: Facts) -> Iterator[str]:
    """All work is over within the bound, and nobody holds a lease."""
    if facts.seconds > promise.bound_seconds:
        yield f"not over within {promise.bound_seconds:g} s"
    for id, name, leased in facts.jobs:
        if id in promise.jobs or name.startswith("consumer:"):
            yield f"job {id} ({name}) is still queued{', and leased' if leased else ''}"
    yield from (f"event {id} is still in the outbox" for id in facts.outbox if promise.events)
    yield from facts.leftovers


def processes_end_well(_promise: Promise, facts: Facts) -> Iterator[str]:
    """Whoever is asked to end ends by itself, with the right code."""
    for process, (code, expected) in facts.endings.items():
        if code != expected:
            yield f"{process} ended with {code}, not with {expected}"


def no_job_lost(promise: Promise, facts: Facts) -> Iterator[str]:
    """Acknowledged work is somewhere: done, dead or waiting."""
    found = {run.job_id for run in facts.runs if run.outcome in WORKED}
    found |= {id for id, _, _ in facts.jobs} | {id for id, _ in facts.dead}
    yield from (f"job {id} ({entity}) is nowhere" for id, entity in promise.jobs.items() if id not in found)


def each_job_ends_once(promise: Promise, facts: Facts) -> Iterator[str]:
    """One final run for each job, and it is the right one."""
    runs = _runs_by_task(facts)
    for task, subject in _tasks(promise):
        ends = [run.outcome for run in runs[task] if run.outcome in WORKED]
        allowed = ["buried"] if subject in promise.hopeless else ["done"]
        if ends != allowed:
            yield f"{task} ({subject}) ended as {ends}, not as {allowed}"


def no_job_made_twice(promise: Promise, facts: Facts) -> Iterator[str]:
    """One event is one job of a consumer."""
    for task, runs in _runs_by_task(facts).items():
        if isinstance(task, tuple) and len({run.job_id for run in runs}) > 1:
            yield f"{task} became the jobs {sorted({run.job_id for run in runs})}"


def accepted_tokens_increase(_promise: Promise, facts: Facts) -> Iterator[str]:
    """What a holder of an older lease writes is refused."""
    tokens: dict[int, list[int]] = defaultdict(list)
    for run in facts.runs:
        tokens[run.job_id].append(run.lease_token)
    for id, seen in tokens.items():
        if any(later <= earlier for earlier, later in pairwise(seen)):
            yield f"job {id} was written with the lease tokens {seen}"


def clean_stops_cost_nothing(promise: Promise, facts: Facts) -> Iterator[str]:
    """Nobody waits for a lease, and nothing counts as an attempt, when a process was asked to end."""
    if promise.is_clean:
        for run in facts.runs:
            planned = promise.fails_first or run.entity_id in promise.hopeless
            if run.outcome == "lost" or (run.outcome == "retried" and not planned):
                yield f"job {run.job_id} was {run.outcome} although a process was only asked to end"


def dead_letters_as_expected(promise: Promise, facts: Facts) -> Iterator[str]:
    """Only what cannot work is buried, and all of it."""
    found = Counter(entity for _, entity in facts.dead)
    expected = Counter({subject: 1 for _, subject in _tasks(promise) if subject in promise.hopeless})
    if found != expected:
        yield f"dead letters: {dict(found)}, not {dict(expected)}"


def effects_exactly_once(promise: Promise, facts: Facts) -> Iterator[str]:
    """One effect for what is done, none for what is buried; without our transaction, at most one for each run."""
    if promise.without_effects:
        return
    found = Counter(facts.effects)
    runs = Counter({task: len(some) for task, some in _runs_by_task(facts).items()})
    wanted = _effects(promise)
    for effect, task in wanted.items():
        least = 0 if effect.key in promise.hopeless else 1
        most = max(1, runs[task]) if promise.at_least_once else least
        if not least <= found[effect] <= most:
            yield f"{effect} happened {found[effect]} times, not {least}{f' to {most}' if most != least else ''}"
    yield from (f"{effect} was never asked for" for effect in found if effect not in wanted)


def effect_and_end_are_one(promise: Promise, facts: Facts) -> Iterator[str]:
    """Everything of a run or nothing: its effect, its inbox row and its end came with one commit."""
    if promise.without_effects:
        return
    found, inbox = Counter(facts.effects), Counter(facts.inbox)
    done = Counter({task: [one.outcome for one in runs].count("done") for task, runs in _runs_by_task(facts).items()})
    for effect, task in _effects(promise).items():
        if not promise.at_least_once and found[effect] != done[task]:
            yield f"{effect} is there {found[effect]} times, its end {done[task]} times"
        if isinstance(task, tuple) and inbox[effect.kind, task[1]] != done[task]:
            yield f"{task} is in the inbox {inbox[effect.kind, task[1]]} times, its end {done[task]} times"


def events_published_once(promise: Promise, facts: Facts) -> Iterator[str]:
    """Each acknowledged event is in the history once, and each consumer has it in its inbox once."""
    history, inbox = Counter(facts.history), Counter(facts.inbox)
    for one in promise.events:
        if history[one.id] != 1:
            yield f"event {one.id} is {history[one.id]} times in the history"
        for consumer in promise.consumers:
            expected = 0 if one.aggregate in promise.hopeless else 1
            if inbox[consumer, one.id] != expected:
                yield f"event {one.id} is {inbox[consumer, one.id]} times in the inbox of {consumer}, not {expected}"


def order_kept(promise: Promise, facts: Facts) -> Iterator[str]:
    """For each aggregate: an ordered consumer, and the broker, see each number first in the order of writing."""
    for consumer, ordered in promise.consumers.items():
        if ordered:
            seen = [(one.key, one.n) for one in facts.effects if one.kind == consumer]
            yield from _out_of_order(promise, seen, consumer)
    if promise.to_broker:
        yield from _out_of_order(promise, facts.received, "the broker")


def not_sent_again(promise: Promise, facts: Facts) -> Iterator[str]:
    """The broker sees again only what was sent and not yet noted."""
    repeated = sum(times - 1 for times in Counter(facts.received).values())
    if promise.most_repeated is not None and repeated > promise.most_repeated:
        yield f"the broker saw {repeated} events again, at most {promise.most_repeated} are explained"


def occurrences_once(promise: Promise, facts: Facts) -> Iterator[str]:
    """Each occurrence is one job."""
    found = Counter(facts.occurrences)
    for one in promise.occurrences:
        if found[one] != 1:
            yield f"{one} became {found[one]} jobs"
    if promise.occurrences:
        yield from (f"{one} was not due" for one in set(found) - set(promise.occurrences))


def answers_true(promise: Promise, facts: Facts) -> Iterator[str]:
    """201 means one row, and the same answer each time; with a key, every request comes to that."""
    rows: dict[str, list[int]] = defaultdict(list)
    for request, number in facts.orders:
        rows[request].append(number)
    told: dict[str, set[str]] = defaultdict(set)
    for answer in facts.answers:
        if answer.status is not None and answer.status < 500:
            told[answer.request].add(f"{answer.status} {answer.body}")
    for request in sorted(promise.keyed | promise.unkeyed):
        if len(told[request]) > 1:
            yield f"request {request} was answered in {len(told[request])} ways: {sorted(told[request])}"
        if request in promise.keyed and not told[request]:
            yield f"request {request} was never answered"
        if len(rows[request]) > 1 or (told[request] and not rows[request]):
            yield f"request {request} has {len(rows[request])} rows, and was told {sorted(told[request])}"
        for number in rows[request]:
            if told[request] and all(f'"number":{number},' not in text for text in told[request]):
                yield f"request {request} has the row {number}, and was told {sorted(told[request])}"


def schema_complete(promise: Promise, facts: Facts) -> Iterator[str]:
    """A migration that was broken off and done again makes what an undisturbed one makes."""
    if facts.schema != promise.schema:
        yield f"the schema differs: {[one for one in promise.schema if one not in facts.schema][:5]} are missing, " \
              f"{[one for one in facts.schema if one not in promise.schema][:5]} are too many"  # fmt: skip


CHECKS: list[Callable[[Promise, Facts], Iterator[str]]] = [
    reached, nothing_stuck, processes_end_well, no_job_lost, each_job_ends_once, no_job_made_twice,
    accepted_tokens_increase, clean_stops_cost_nothing, dead_letters_as_expected, effects_exactly_once,
    effect_and_end_are_one, events_published_once, order_kept, not_sent_again, occurrences_once, answers_true,
    schema_complete,
]  # fmt: skip
ALWAYS: list[Callable[[Promise, Facts], Iterator[str]]] = [
    no_job_lost, no_job_made_twice, accepted_tokens_increase, effect_and_end_are_one, not_sent_again,
]  # fmt: skip


def _tasks(promise: Promise) -> Iterator[tuple[Any, str]]:
    """What must end: each job by its id, each event for each consumer; and what it is about."""
    yield from promise.jobs.items()
    for one in promise.events:
        for consumer in promise.consumers:
            yield (f"consumer:{consumer}", one.id), one.aggregate


def _effects(promise: Promise) -> dict[Effect, Any]:
    """The effect of each task."""
    wanted: dict[Effect, Any] = {Effect("work", entity): id for id, entity in promise.jobs.items()}
    for one in promise.events:
        for consumer in promise.consumers:
            wanted[Effect(consumer, one.aggregate, one.n)] = (f"consumer:{consumer}", one.id)
    return wanted


def _runs_by_task(facts: Facts) -> dict[Any, list[Run]]:
    found: dict[Any, list[Run]] = defaultdict(list)
    for run in facts.runs:
        found[run.job_id if run.event_id is None else (run.name, run.event_id)].append(run)
    return found


def _out_of_order(promise: Promise, seen: list[tuple[str, int]], where: str) -> Iterator[str]:
    first: dict[str, list[int]] = defaultdict(list)
    for aggregate, n in seen:
        if n not in first[aggregate]:
            first[aggregate].append(n)
    expected: dict[str, list[int]] = defaultdict(list)
    for one in promise.events:
        if one.aggregate not in promise.hopeless:
            expected[one.aggregate].append(one.n)
    for aggregate, numbers in expected.items():
        if first[aggregate] != numbers:
            yield f"{where} has {first[aggregate]} of {aggregate}, not {numbers}"
