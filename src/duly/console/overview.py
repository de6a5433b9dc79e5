"""What an operator sees first: what needs attention and why, and how much waits, runs and failed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

from duly.console import words
from duly.db import Statement
from duly.operate import sql
from duly.operate.alerts import Alert, list_alerts
from duly.operate.counts import CAP, NAMES_LIMIT, Count
from duly.operate.status import LATE_SECONDS, Process, list_processes
from duly.operate.words import span
from duly.webhooks.look import COUNT_CAP, InTrouble, read_trouble

if TYPE_CHECKING:
    from duly.console.app import Look

ROWS_BUDGET = 20_000  # how many rows of the queue are counted for one look, over all names
FRONT = 200
SHOWN = 5
ALERTS_SHOWN = 50
LAG_SECONDS = 60.0
QUEUE_LAG_SECONDS = 300.0
SAID_ELSEWHERE = ("dead_letter", "event_failed", "schedule_broken", "webhook_failed", "webhook_disabled")
READ_SCHEDULE_TROUBLE = Statement("""
SELECT name, last_error IS NOT NULL AS is_broken,
       extract(epoch FROM duly.now() - next_run_at)::float8 AS late_seconds
FROM duly.schedules
WHERE enabled AND (last_error IS NOT NULL
                   OR next_run_at < duly.now() - make_interval(secs => CAST(:grace_seconds AS float8)))
ORDER BY next_run_at, name LIMIT CAST(:limit AS int)
""")


@dataclass(frozen=True)
class Trouble:
    """Something to look at: what it is, why it matters, and where to go."""

    tone: str
    sentence: str
    cause: str
    href: str
    label: str


@dataclass(frozen=True)
class Queue:
    """The queue of one name."""

    name: str
    due: Count
    running: Count
    expired: Count
    future: Count
    behind: Count
    oldest_seconds: float | None


@dataclass(frozen=True)
class Pulse:
    """Everything that is live, at one moment."""

    now: datetime
    clock_moved: bool
    queues: list[Queue]
    dead_letters: dict[str, Count]
    pending: Count
    held: Count
    failed: Count
    lag_seconds: float | None
    alerts: list[Alert]
    processes: list[Process]
    late: list[str]
    broken: list[str]
    webhooks: list[InTrouble]
    troubles: list[Trouble] = field(default_factory=list)

    def total(self, what: str) -> Count:
        """How many jobs of all names are in a state."""
        counts = [getattr(queue, what) for queue in self.queues]
        return Count(sum(count.number for count in counts), any(count.more for count in counts))

    @property
    def dead(self) -> Count:
        """All dead letters."""
        return Count(
            sum(count.number for count in self.dead_letters.values()),
            any(count.more for count in self.dead_letters.values()),
        )

    @property
    def open_alerts(self) -> Count:
        """How many alerts are open."""
        return Count.of(len(self.alerts), cap=ALERTS_SHOWN)

    @property
    def oldest_seconds(self) -> float | None:
        """How long the longest-waiting job has been due."""
        return max((queue.oldest_seconds for queue in self.queues if queue.oldest_seconds is not None), default=None)

    def alive(self, kind: str) -> int:
        """How many processes of a kind were seen lately."""
        return sum(process.kind == kind for process in self.processes)


async def read_pulse(look: Look) -> Pulse:
    """Read it; the cost is bounded whatever the size of the queue."""
    late = await look.rows(READ_SCHEDULE_TROUBLE, grace_seconds=LATE_SECONDS, limit=NAMES_LIMIT)
    ready, held, failed, lag = (await look.rows(sql.COUNT_OUTBOX, cap=CAP + 1))[0]
    pulse = Pulse(
        now=look.now,
        clock_moved=look.clock_moved,
        queues=await _queues(look),
        dead_letters=await _dead_letters(look),
        pending=Count.of(ready + held, more=ready > CAP or held > CAP),
        held=Count.of(held),
        failed=Count.of(failed),
        lag_seconds=lag,
        alerts=await list_alerts(look.tx, limit=ALERTS_SHOWN + 1),
        processes=await list_processes(look.tx),
        late=[row.name for row in late if not row.is_broken],
        broken=[row.name for row in late if row.is_broken],
        webhooks=await read_trouble(look.tx),
    )
    pulse.troubles.extend(find_troubles(pulse))
    return pulse


async def _queues(look: Look) -> list[Queue]:
    names = [row[0] for row in await look.rows(sql.FIND_JOB_NAMES, names_limit=NAMES_LIMIT)]
    cap = max(10, min(CAP, ROWS_BUDGET // max(1, len(names))))
    rows = await look.rows(sql.COUNT_JOBS, names=names, cap=cap + 1, front=min(FRONT, cap))
    found = [
        Queue(
            name,
            Count.of(due, cap=cap, more=due_more),
            Count.of(running, cap=cap, more=running_more),
            Count.of(expired, cap=cap, more=running_more),
            Count.of(future, cap=cap),
            Count.of(behind, cap=cap),
            oldest,
        )
        for name, due, running, expired, future, behind, oldest, due_more, running_more in rows
    ]
    return sorted(found, key=lambda queue: (-(queue.oldest_seconds or 0), queue.name))


async def _dead_letters(look: Look) -> dict[str, Count]:
    names = [row[0] for row in await look.rows(sql.FIND_DEAD_LETTER_NAMES, names_limit=NAMES_LIMIT)]
    cap = max(10, min(CAP, ROWS_BUDGET // max(1, len(names))))
    rows = await look.rows(sql.COUNT_DEAD_LETTERS_BY_NAME, names=names, cap=cap + 1)
    return {name: Count.of(counted, cap=cap) for name, counted in rows}


_MISSING = (
    ("worker", "No worker is alive.", "Jobs wait until one starts: `duly worker`."),
    ("relay", "No relay is alive.", "Events wait, and consumers hear nothing: `duly relay`."),
    ("scheduler", "No scheduler is alive.", "Schedules do not fire: `duly scheduler`."),
)


def find_troubles(pulse: Pulse) -> list[Trouble]:
    """What an operator should look at first, worst first."""
    found = [
        Trouble("bad", sentence, cause, "/processes", "Processes")
        for kind, sentence, cause in _MISSING
        if not pulse.alive(kind)
    ]
    found += _job_troubles(pulse) + _event_troubles(pulse) + _schedule_troubles(pulse) + _webhook_troubles(pulse)
    found += _alert_troubles(pulse)
    return sorted(found, key=lambda trouble: trouble.tone != "bad")


def _job_troubles(pulse: Pulse) -> list[Trouble]:
    found = []
    known = {name for process in pulse.processes for name in process.names}
    unknown = [queue.name for queue in pulse.queues if queue.due.number and queue.name not in known]
    if pulse.alive("worker") and unknown:
        cause = f"Due, but no worker alive has a handler for {_some(unknown)}: is a deployment missing?"
        found.append(
            Trouble("bad", _count(len(unknown), "job name is", "job names are") + " unknown.", cause, "/jobs", "Jobs")
        )
    if pulse.dead.number:
        worst = max(pulse.dead_letters, key=lambda name: pulse.dead_letters[name].number)
        cause = f"They failed for good; most are of {worst}. Retry them once the cause is gone, or discard them."
        said = f"{pulse.dead} dead letters wait for a decision."
        if str(pulse.dead) == "1":
            cause = f"A job of {worst} failed for good. Retry it once the cause is gone, or discard it."
            said = "1 dead letter waits for a decision."
        found.append(Trouble("bad", said, cause, "/dead-letters", "Decide"))
    if pulse.total("expired").number:
        number = pulse.total("expired")
        said = f"{number} {'job' if str(number) == '1' else 'jobs'} lost the worker."
        found.append(
            Trouble("warn", said, "The lease ran out; another worker takes over.", "/jobs?status=Failed", "Look")
        )
    oldest = pulse.oldest_seconds
    if oldest is not None and oldest > QUEUE_LAG_SECONDS and pulse.alive("worker"):
        name = pulse.queues[0].name
        cause = f"The oldest due job of {name} waits longer than five minutes: too few slots, or a slow handler."
        found.append(Trouble("warn", f"Jobs are late by {span(oldest)}.", cause, f"/jobs?name={name}", "Look"))
    return found


def _event_troubles(pulse: Pulse) -> list[Trouble]:
    found = []
    if pulse.failed.number:
        one = str(pulse.failed) == "1"
        said = f"{pulse.failed} {'event was' if one else 'events were'} not published."
        cause = "What follows of the same aggregate waits behind. Requeue it when the broker is well, or give it up."
        found.append(Trouble("bad", said, cause, "/outbox?status=FAILED", "Decide"))
    if pulse.lag_seconds is not None and pulse.lag_seconds > LAG_SECONDS and pulse.alive("relay"):
        said = f"The oldest event waits since {span(pulse.lag_seconds)}."
        found.append(
            Trouble("warn", said, "The relay does not keep up, or cannot publish.", "/outbox?status=PENDING", "Look")
        )
    return found


def _schedule_troubles(pulse: Pulse) -> list[Trouble]:
    found = []
    if pulse.broken:
        said = _count(len(pulse.broken), "schedule is", "schedules are") + " broken."
        found.append(
            Trouble("bad", said, f"{_some(pulse.broken)} cannot be read, and does not run.", "/schedules", "Repair")
        )
    if pulse.late:
        said = _count(len(pulse.late), "schedule is", "schedules are") + " late."
        cause = f"{_some(pulse.late)}: the time has passed and nothing was queued."
        found.append(Trouble("warn", said, cause, "/schedules", "Look"))
    return found


def _webhook_troubles(pulse: Pulse) -> list[Trouble]:
    found = []
    disabled = [one for one in pulse.webhooks if one.status == "DISABLED"]
    if disabled:
        first = disabled[0]
        said = _count(len(disabled), "webhook subscriber is", "webhook subscribers are") + " disabled."
        cause = f"{_hosts(disabled)}: {words_of(first.disabled_reason or '')}. What comes is kept, and nothing is sent."
        found.append(Trouble("bad", said, cause, _place(disabled), "Resume"))
    if failed := [one for one in pulse.webhooks if one.alert is not None]:
        number = Count(sum(min(one.failed, COUNT_CAP) for one in failed), any(o.failed > COUNT_CAP for o in failed))
        said = f"{number} webhook {'delivery has' if str(number) == '1' else 'deliveries have'} failed for good."
        cause = f"{_hosts(failed)}: {words_of(failed[0].alert or '')}. Send them again once the receiver is repaired."
        href = f"{_place(failed)}?status=PERMANENTLY_FAILED" if len(failed) == 1 else _place(failed)
        found.append(Trouble("bad", said, cause, href, "Decide"))
    if left := [one for one in pulse.webhooks if one.open_until is not None]:
        first = left[0]
        said = _count(len(left), "webhook subscriber does", "webhook subscribers do") + " not answer."
        since = f" since {span((pulse.now - first.failing_since).total_seconds())}" if first.failing_since else ""
        cause = f"{_hosts(left)}: {first.failures} failures in a row{since}. The circuit is open, and tries by itself."
        found.append(Trouble("warn", said, cause, _place(left), "Look"))
    return found


def _hosts(found: Sequence[InTrouble]) -> str:
    return _some(list(dict.fromkeys(one.host for one in found)))


def _place(found: Sequence[InTrouble]) -> str:
    return f"/webhooks/{found[0].id}" if len(found) == 1 else "/webhooks"


def _alert_troubles(pulse: Pulse) -> list[Trouble]:
    others = [alert for alert in pulse.alerts if alert.kind not in SAID_ELSEWHERE]
    if not others:
        return []
    number = Count(min(len(others), ALERTS_SHOWN), pulse.open_alerts.more)
    said = f"{number} {'alert is' if str(number) == '1' else 'alerts are'} open."
    return [Trouble("warn", said, words_of(others[0].message), "/alerts", "Alerts")]


def words_of(message: str) -> str:
    """A message as one line."""
    line = " ".join(message.split())
    return line if len(line) <= 200 else line[:197] + "..."


def _count(count: int, one: str, many: str) -> str:
    return f"{words.capped(count)} {one if count == 1 else many}"


def _some(names: Sequence[Any]) -> str:
    return ", ".join(map(str, names[:SHOWN])) + (" and more" if len(names) > SHOWN else "")
