"""The decisions that need no database: retries, leases that a process believes to hold, cron, misfires, routes."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from fnmatch import fnmatchcase
from typing import Any, ClassVar

from duly.jobs import heartbeat, settle
from duly.jobs.handlers import Handler, Job, ReportedFailure
from duly.jobs.heartbeat import Leases
from duly.jobs.outcomes import Cancel, Done, Fail, Outcome, Snooze
from duly.outbox.relay import Pending, _routes
from duly.schedules.cron import Cron
from duly.schedules.misfire import plan_due
from tests.simulation.cron_model import Occurrences, Stretch, plan, utc
from tests.simulation.machine import Disagreement, Machine, Pick

HOUR_SECONDS = 3600.0


def make_job(
    id: int, token: int, *, delay_seconds: float = 0.0, retry_count: int = 0, max_retries: int | None = None,
    backoff_seconds: list[int] | None = None, lost_by: str | None = None, now: float = 0.0,
) -> Job:  # fmt: skip
    """A job as a claim returns it."""
    row = (
        id, "mail", None, "{}", 3, 0.0, 0.0, delay_seconds, retry_count, max_retries, backoff_seconds, "Deferred", None,
        None, None, None, None, token, 0.0, lost_by,
    )  # fmt: skip
    return Job(row, now)


class RetryMachine(Machine):
    """The life of one job through failures, snoozes and dead workers."""

    name = "retry"
    steps_in_example = 500

    def begin(self) -> None:
        """A new job."""
        self.retries = 0

    def failure(self, pick: Pick) -> None:
        """A run fails: again later, or buried."""
        handler = Handler("mail", print, max_retries=pick.below(4), backoff_seconds=pick.of((None, [3], [9, 0, 4])))
        own, fixed = pick.of((None, 0, 2, 5)), pick.of((None, None, [5, 60]))
        delay = pick.of((0, 0, 1, 900, 7_200, 172_800, 3_456_789)) * (1 + pick.below(9)) / 4
        self.tell("failure", self.retries, delay, own, fixed, handler.max_retries, handler.backoff_seconds)
        job = make_job(1, 1, delay_seconds=delay, retry_count=self.retries, max_retries=own, backoff_seconds=fixed)
        found = settle.decide_failure(job, handler, ReportedFailure("no"), 0.5)
        allowed = handler.max_retries if own is None else own
        if self.retries >= allowed:
            self.agree(
                "it is buried", (found.outcome, found.reason, found.message), ("buried", "retries_used_up", "no")
            )
            self.retries = 0
            return
        self.agree("it is retried", (found.outcome, found.message), ("retried", "no"))
        self.retries += 1
        wanted = self._wait_seconds(self.retries, delay, fixed or handler.backoff_seconds)
        if abs(found.wait.total_seconds() - wanted) > 2e-6:
            raise Disagreement(f"retry {self.retries} waits {found.wait}, the model says {wanted} s")

    def _wait_seconds(self, retry: int, delay: float, fixed: list[int] | None) -> float:
        if fixed:
            return float(([*fixed, *([fixed[-1]] * retry)])[retry - 1])
        if delay > 0:
            return min(delay / 10 * retry, HOUR_SECONDS)
        seconds = 1.0
        for _ in range(retry - 1):
            seconds = min(seconds * 2, HOUR_SECONDS)
        return seconds

    def takeover(self, pick: Pick) -> None:
        """Its worker dies; somebody else claims it."""
        own, handlers_own = pick.of((None, 0, 1, 3)), pick.below(4)
        lost_by = pick.of((None, "w1"))
        self.retries += lost_by is not None
        self.tell("takeover", self.retries, lost_by, own, handlers_own)
        job = make_job(1, 1, retry_count=self.retries, max_retries=own, lost_by=lost_by)
        found = settle.decide_takeover(job, Handler("mail", print, max_retries=handlers_own))
        dies = lost_by is not None and self.retries > (handlers_own if own is None else own)
        self.agree("whether it is buried", found is not None, dies)
        if found is not None:
            self.agree("why", (found.outcome, found.reason), ("buried", "worker_died"))
            self.retries = 0

    def ending(self, pick: Pick) -> None:
        """A run returns something."""
        wait = timedelta(seconds=pick.below(10_000))
        endings: tuple[tuple[Outcome, str, str | None], ...] = (
            (Done("m"), "done", None),
            (Snooze(wait, "m"), "snoozed", None),
            (Cancel("m"), "cancelled", None),
            (Fail("m"), "buried", "failed_for_good"),
        )
        returned, outcome, reason = pick.of(endings)
        self.tell("ending", returned)
        found = settle.decide(make_job(1, 1, retry_count=self.retries), returned, 0.5)
        waited = wait if outcome == "snoozed" else timedelta(0)
        said = (found.outcome, found.reason, found.wait, found.message)
        self.agree("how it ended", said, (outcome, reason, waited, "m"))

    rules: ClassVar[Any] = (failure, failure, failure, takeover, ending)


@dataclass
class ModelLease:
    """What a process believes of one job."""

    token: int
    renewed_at: float
    give_up_at: float = float("inf")
    news: str | None = None


class LeasesMachine(Machine):
    """What a process believes to hold, and what its heartbeat renews."""

    name = "leases"
    steps_in_example = 500

    def begin(self) -> None:
        """Nothing is held, and the process's clock is ours."""
        self.now = 0.0
        self._clock = vars(heartbeat)["monotonic"]
        vars(heartbeat)["monotonic"] = lambda: self.now
        self.leases = Leases()
        self.held: dict[int, ModelLease] = {}
        self.jobs: list[Job] = []
        self.token = 0

    def end(self) -> None:
        """Give the clock back."""
        vars(heartbeat)["monotonic"] = self._clock

    def check(self) -> None:
        """Who is held."""
        if sorted(self.leases.ids()) != sorted(self.held):
            self.agree("what is held", sorted(self.leases.ids()), sorted(self.held))

    def add(self, pick: Pick) -> None:
        """A claim."""
        self.token += 1
        id = pick.below(6)
        self.tell("add", id, self.token)
        job = make_job(id, self.token, now=self.now)
        self.jobs = [*self.jobs[-11:], job]
        self.leases.add(job)
        self.held[id] = ModelLease(self.token, self.now)

    def _mine(self, job: Job) -> ModelLease | None:
        """The lease of this claim; a later claim of the same job is another one."""
        lease = self.held.get(job.id)
        return lease if lease is not None and lease.token == job.lease_token else None

    def drop(self, pick: Pick) -> None:
        """A run was settled, perhaps by somebody who lost it."""
        if self.jobs:
            job = pick.of(self.jobs)
            self.tell("drop", *job.lease)
            self.leases.drop(job)
            if self._mine(job):
                del self.held[job.id]

    def start(self, pick: Pick) -> None:
        """A handler may start if its lease can still be ours; its time counts from now."""
        if self.jobs:
            job, limit = pick.of(self.jobs), pick.of((5.0, 50.0))
            self.tell("start", *job.lease, limit)
            mine = self._mine(job)
            wanted = mine is not None and self.now - mine.renewed_at < 30.0
            self.agree("whether it may start", self.leases.is_fresh(job, 30.0, self.now), wanted)
            job.give_up_at = self.now + limit
            if mine:
                mine.give_up_at = job.give_up_at

    def report(self, pick: Pick) -> None:
        """A handler has news."""
        id = pick.below(6)
        self.tell("report", id)
        self.leases.progress(id, "half")
        if id in self.held:
            self.held[id].news = "half"

    def forget_news(self, _pick: Pick) -> None:
        """The heartbeat failed."""
        self.tell("forget_news")
        self.leases.drop_news()
        for lease in self.held.values():
            lease.news = None

    def beat(self, pick: Pick) -> None:
        """The heartbeat renews what has aged or has news, and leaves what runs too long to others."""
        self.tell("beat")
        due = self.leases.to_renew(older_than_seconds=10.0)
        wanted = {
            (id, lease.token)
            for id, lease in self.held.items()
            if lease.give_up_at > self.now and (lease.news or self.now - lease.renewed_at >= 10.0)
        }
        self.agree("what is renewed", {job.lease for job in due}, wanted)
        if pick.below(2):
            for job in due:
                job.renewed_at, job.news = self.now, None
                self.held[job.id].renewed_at, self.held[job.id].news = self.now, None

    def wait(self, pick: Pick) -> None:
        """Time passes."""
        self.now += pick.of((1.0, 4.0, 10.0, 31.0))
        self.tell("wait", self.now)

    rules: ClassVar[Any] = (add, add, drop, start, report, forget_news, beat, beat, wait, wait)


class CronMachine(Machine):
    """Expressions around the nights when clocks change, and what a tick does about what it finds due."""

    name = "cron"
    steps_in_example = 300
    stretches: ClassVar[Any] = tuple(
        Stretch(zone, start, 9)
        for zone, *starts in (
            ("Europe/Warsaw", utc(2026, 3, 25), utc(2026, 10, 20)),
            ("America/New_York", utc(2026, 3, 4), utc(2026, 10, 28)),
            ("Australia/Lord_Howe", utc(2026, 3, 31), utc(2026, 9, 30)),
            ("America/Santiago", utc(2026, 9, 2), utc(2026, 4, 1)),
            ("UTC", utc(2028, 2, 26)),
        )
        for start in starts
    )

    def begin(self) -> None:
        """Something to ask about."""
        self._choose("*/20 * * * *", self.stretches[-1], "after", "first")

    def _choose(self, expression: str, stretch: Stretch, dst_gap: str, dst_overlap: str) -> None:
        self.stretch = stretch
        self.cron = Cron(expression, stretch.zone, dst_gap, dst_overlap)
        self.known = Occurrences(expression, stretch, dst_gap=dst_gap, dst_overlap=dst_overlap)

    def choose(self, pick: Pick) -> None:
        """Another expression, zone and rule; seldom, since the model walks through every minute."""
        if pick.below(30):
            return self.ask(pick)
        minute = pick.of(("0", "30", "*/15", "*", "5,40", "10-50/20", "59", "1"))
        hour = pick.of(("2", "*", "0", "1-3", "*/6", "3", "23", "0,2"))
        day, month = pick.of(("*", "*", "*", "28", "L", "1-7")), pick.of(("*", "*", "3", "4,10"))
        weekday = pick.of(("*", "*", "SUN", "1-5", "7", "*/2"))
        stretch, gap, overlap = pick.of(self.stretches), pick.of(("after", "skip")), pick.of(("first", "both"))
        expression = f"{minute} {hour} {day} {month} {weekday}"
        self.tell("choose", expression, stretch.zone, stretch.start, gap, overlap)
        self._choose(expression, stretch, gap, overlap)
        return None

    def _moment(self, pick: Pick) -> datetime:
        """Some instant, half of the time one at which it runs or nearly so."""
        if self.known.all and pick.below(2):
            return pick.of(self.known.all) + timedelta(microseconds=pick.of((0, -1, 1, 60_000_000, -60_000_000)))
        return self.stretch.start + timedelta(seconds=pick.below(self.stretch.days * 86_400))

    def ask(self, pick: Pick) -> None:
        """The next run, those between, the newest."""
        after, until = sorted((self._moment(pick), self._moment(pick)))
        self.tell("ask", after, until)
        wanted, found = self.known.next_after(after), self.cron.next_after(after)
        if wanted is None:
            self.agree("the next one is outside", found >= self.stretch.end, True)
            return
        self.agree("the next run", found, wanted)
        if until < self.stretch.end:
            expected = self.known.between(after, until)
            limit = 1 + pick.below(50)
            self.agree("the runs between", self.cron.between(after, until, limit), expected[:limit])
            self.agree("the newest run", self.cron.latest(after, until), expected[-1] if expected else None)

    def misfire(self, pick: Pick) -> None:
        """A tick finds the schedule due, on time or late."""
        if not self.known.all:
            return
        due_at = pick.of(self.known.all)
        now = due_at + pick.of((timedelta(0), timedelta(seconds=60), timedelta(seconds=61), timedelta(minutes=1))) + (
            timedelta(microseconds=pick.below(3)) + timedelta(seconds=pick.of((0, 0, 45, 7_000, 400_000)))
        )  # fmt: skip
        rule, limit = pick.of(("run_once", "run_all", "skip")), pick.of((1000, 1, 3, 50))
        reported = pick.of((None, None, due_at - timedelta(hours=5), due_at, due_at + timedelta(minutes=90)))
        if now >= self.stretch.end or (reported is not None and reported > now):
            return
        self.tell("misfire", due_at, now, rule, limit, reported)
        wanted = plan(self.known, due_at=due_at, now=now, misfire=rule, limit=limit, reported_until=reported)
        found = plan_due(self.cron, due_at=due_at, now=now, misfire=rule, limit=limit, reported_until=reported)
        if wanted is None:
            return
        missed = (found.missed.count, found.missed.oldest, found.missed.newest) if found.missed else None
        self.agree("what runs", [(run.at, run.interval) for run in found.runs], wanted.runs)
        self.agree("the next one", found.next_run_at, wanted.next_run_at)
        self.agree("what was missed", missed, wanted.missed)

    rules: ClassVar[Any] = (choose, ask, misfire, misfire)


class RoutesMachine(Machine):
    """Which consumers an event goes to."""

    name = "routes"
    steps_in_example = 500

    def route(self, pick: Pick) -> None:
        """A batch of events and some consumers."""
        kinds = [pick.of((("a.made", "a"), ("a.gone", "a"), ("b.made", "b"))) for _ in range(1 + pick.below(4))]
        events = [Pending(seq, (), *kind, pick.of(("1", "2")), 0, False) for seq, kind in enumerate(kinds)]
        patterns = ("a.*", "*", "b", "a.made", "*.gone", "c")
        consumers = [
            (f"c{place}", [pick.of(patterns) for _ in range(1 + pick.below(2))], bool(pick.below(2)))
            for place in range(pick.below(4))
        ]
        self.tell("route", kinds, consumers)
        wanted = [
            (one.seq, name, ordered, one.aggregate_id)
            for one in events
            for name, mine, ordered in consumers
            if any(fnmatchcase(word, pattern) for word in (one.type, one.topic) for pattern in mine)
        ]
        self.agree("the routes", _routes(events, consumers), wanted)

    rules: ClassVar[Any] = (route,)
