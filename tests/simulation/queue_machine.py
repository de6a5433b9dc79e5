"""The queue: claims, leases, endings, timers and limits, by several workers of which some are zombies."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any, ClassVar

from duly.db import fetch
from duly.errors import AlreadyScheduled
from duly.jobs import claim, settle, sql, turns
from duly.jobs.claim import Claims
from duly.jobs.handlers import Handler, Job, ReportedFailure
from duly.jobs.outcomes import Cancel, Done, Fail, Outcome, Snooze
from duly.jobs.schedule import NewJob, OnConflict, cancel, schedule, schedule_many
from duly.jobs.settle import Settlement
from duly.operate.dead_letters import discard_dead_letter, retry_dead_letter
from tests.simulation.line import START, Line, drive
from tests.simulation.machine import Disagreement, Machine, Pick
from tests.simulation.queue_model import Ending, ModelDead, ModelJob, ModelRun, QueueModel

LEASE_SECONDS = 10_000.0  # leases end when the machine says so
KNOWN_RUNS = 8
CONFLICTS: tuple[OnConflict, ...] = ("replace", "keep", "reject", "allow")
MANY_CONFLICTS: tuple[OnConflict, ...] = ("allow", "replace", "keep")
WAITS_SECONDS = (0, 1, 5, 60, 3600)

# One statement for all: a job, a dead letter or a run in the history of the last step, in the same columns.
READ_ALL = """
WITH ran AS (DELETE FROM duly.executions_default RETURNING *)
SELECT 'job', id, name, entity_id, priority, CASE WHEN isfinite(run_at) THEN run_at END, due_at, created_at,
       original_delay, retry_count, max_retries, backoff_seconds, source, waits, last_error, snoozes, order_key,
       is_unique, unique_key, slot, lease_token, lease_expires_at < clock_timestamp(), leased_by, claimed_at, progress,
       lost_by, lost_token, lost_claimed_at
FROM duly.jobs
UNION ALL
SELECT 'dead', id, name, entity_id, priority, NULL, due_at, created_at, original_delay, retry_count, max_retries,
       backoff_seconds, source, reason, error, 0, order_key, NULL, error_kind, NULL, NULL, NULL, NULL, buried_at, NULL,
       NULL, NULL, NULL
FROM duly.dead_letters
UNION ALL
SELECT 'run', job_id, name, entity_id, 0, next_run_at, started_at, completed_at, NULL, retry_count, NULL, NULL, source,
       outcome, message, 0, NULL, succeeded, NULL, NULL, lease_token, NULL, worker, NULL, NULL, NULL, NULL, NULL
FROM ran
"""
READ_ALERTS = "SELECT kind, subject, count FROM duly.alerts WHERE resolved_at IS NULL"
EXPIRE = """
UPDATE duly.jobs SET lease_expires_at = clock_timestamp() - interval '1 second'
WHERE lease_token IS NOT NULL AND ($1::bigint IS NULL OR id = $1)
"""


def read_queue(line: Line) -> tuple[dict[int, ModelJob], dict[int, ModelDead], list[ModelRun]]:
    """What waits or runs, what is dead, and what ended since the last look."""
    jobs: dict[int, ModelJob] = {}
    dead: dict[int, ModelDead] = {}
    history: list[ModelRun] = []
    for kind, *row in line.ask(READ_ALL):
        if kind == "job":
            jobs[row[0]] = ModelJob(*row)
        elif kind == "dead":
            facts = [*row[:4], *row[5:14], row[15], row[17], row[22]]
            dead[row[0]] = ModelDead(*facts)
        else:
            facts = [*row[:3], row[11], row[5], row[6], row[16], *row[12:14], row[8], row[4], row[21], row[19]]
            history.append(ModelRun(*facts))
    return jobs, dead, history


class VirtualWorker:
    """A worker that claims with duly's own code and ends runs as the machine says; it never forgets a token."""

    def __init__(self, handlers: dict[str, Handler], name: str) -> None:
        self.name = name
        self.handlers = handlers
        self.begin()

    def begin(self) -> None:
        """Start anew."""
        self.claims = Claims(self.handlers, worker=self.name, lease_seconds=LEASE_SECONDS)
        self.free = turns.begin((name for name, one in self.handlers.items() if one.limit is None), self.name)
        limited = turns.begin((name for name, one in self.handlers.items() if one.limit is not None), self.name)
        self.kinds: list[str | None] = [*limited, None] if self.free else [*limited]
        self.runs: list[Job] = []

    def expect_claim(self, model: QueueModel, room: int) -> list[ModelJob]:
        """What the model says this claim takes: who got nothing comes first the next time, who got most comes last."""
        claimed: list[ModelJob] = []
        got: dict[str | None, int] = {}
        for kind in self.kinds:
            left = room - len(claimed)
            if left <= 0:
                break
            if kind is None:
                taken = model.claim(self.free, left, self.name)
                self.free.sort(key=[job.name for job in taken].count)
            else:
                limit = self.handlers[kind].limit or 0
                taken = model.claim_limited(kind, limit, left, self.name)
            got[kind] = len(taken)
            claimed += taken
        self.kinds.sort(key=lambda kind: got.get(kind, 0))
        return claimed


class QueueWorld(Machine):
    """What the machines with workers share."""

    def __init__(self, dsn: str) -> None:
        super().__init__()
        self.line = Line(dsn)
        self.workers = self.make_workers()
        self.limits = {
            one.name: one.limit for w in self.workers for one in w.handlers.values() if one.limit is not None
        }
        self.begin_model()

    def make_workers(self) -> list[VirtualWorker]:
        """Who claims."""
        raise NotImplementedError

    def begin_model(self) -> None:
        """An empty model."""
        self.model = QueueModel(START)

    def begin(self) -> None:
        """An empty queue, and workers to whom every claim is quick: what a slow one changes is another test's."""
        self.line.begin()
        self._clock = vars(claim)["monotonic"]
        vars(claim)["monotonic"] = lambda: 0.0
        self.begin_model()
        for worker in self.workers:
            worker.begin()

    def end(self) -> None:
        """Undo it."""
        vars(claim)["monotonic"] = self._clock
        self.line.end()

    def close(self) -> None:
        """Hang up."""
        self.line.close()

    def check(self) -> None:
        """The queue, the dead letters and what the step wrote into the history are as the model says."""
        jobs, dead, history = read_queue(self.line)
        if jobs != self.model.jobs:
            self._differ("a job", jobs, self.model.jobs)
        if dead != self.model.dead:
            self._differ("a dead letter", dead, self.model.dead)
        if (history or self.model.history) and sorted(history, key=repr) != sorted(self.model.history, key=repr):
            self.agree("the history of this step", history, self.model.history)
        self.model.history.clear()
        if wrong := self.model.broken_promises(self.limits):
            raise Disagreement("; ".join(wrong))

    def _differ(self, what: str, found: dict[int, Any], expected: dict[int, Any]) -> None:
        for id in sorted(found.keys() | expected.keys()):
            if found.get(id) != expected.get(id):
                self.agree(what, found.get(id), expected.get(id))

    # -- rules --------------------------------------------------------------------------------------------------

    def claim(self, pick: Pick) -> None:
        """A worker takes what it has room for."""
        worker, room = pick.of(self.workers), pick.of((1, 2, 3, 5, 10))
        self.tell("claim", worker.name, room)
        expected = worker.expect_claim(self.model, room)
        jobs = drive(worker.claims.take(self.line, room))
        self.agree("who was claimed", sorted(job.id for job in jobs), sorted(job.id for job in expected))
        places = [(job.priority, self.model.jobs[job.id].run_at, job.id) for job in jobs]
        self.agree("the order of what was claimed", places, sorted(places))
        newest = self.model.newest_token
        self._learn_fenced()
        for job in jobs:
            if job.lease_token <= newest:
                raise Disagreement(f"the token of job {job.id} is not newer than {newest}")
            self.model.newest_token = max(self.model.newest_token, job.lease_token)
            mine = self.model.jobs[job.id]
            mine.token = job.lease_token
            self.agree("what the worker was told", (job.retry_count, job.lost_by), (mine.retry_count, mine.lost_by))
        worker.runs = (worker.runs + jobs)[-KNOWN_RUNS:]

    def _learn_fenced(self) -> None:
        """Who gave up a slot got a token that nobody has: newer than any before."""
        if self.model.fenced:
            query = "SELECT id, lease_token, lost_token FROM duly.jobs WHERE id = ANY($1::bigint[])"
            self.model.learn_fenced({id: tokens for id, *tokens in self.line.ask(query, [self.model.fenced])})

    def settle(self, pick: Pick) -> None:
        """A worker ends some of the runs it remembers, whether they are still its own or not."""
        worker = pick.of(self.workers)
        runs = {job.lease: job for job in pick.some(worker.runs, 3)}
        self._settle(worker, [self._ending(pick, worker, job) for job in runs.values()])

    def _settle(self, worker: VirtualWorker, settlements: list[Settlement]) -> None:
        endings = [
            Ending(s.job.id, s.job.lease_token, s.outcome, s.message, s.wait, s.reason, s.error_kind)
            for s in settlements
        ]
        self.tell("settle", worker.name, *((one.id, one.token, one.outcome) for one in endings))
        expected = self.model.settle(endings, worker.name)
        settled = drive(settle.write(self.line, settlements, worker=worker.name))
        self.agree("what could be settled", settled, expected)

    def _ending(self, pick: Pick, worker: VirtualWorker, job: Job) -> Settlement:
        handler = worker.handlers[job.name]
        if taken_over := settle.decide_takeover(job, handler):
            return taken_over
        kind = pick.below(8)
        if kind >= 5:
            return settle.decide_failure(job, handler, ReportedFailure(f"no {kind}"), 0.0)
        if kind == 4:
            return Settlement(job, "released", 0.0, "the worker stopped")
        wait = timedelta(seconds=pick.of(WAITS_SECONDS))
        outcomes: tuple[Outcome, ...] = (Done("fine"), Snooze(wait, "later"), Cancel("no need"), Fail("never"))
        return settle.decide(job, outcomes[kind], 0.0)

    def end_all(self, pick: Pick) -> None:
        """A worker is done with everything it remembers."""
        worker = pick.of(self.workers)
        self._settle(worker, [settle.decide(job, Done(None), 0.0) for job in worker.runs])
        worker.runs = []

    def release(self, pick: Pick) -> None:
        """A worker gives back what it did not start."""
        worker = pick.of(self.workers)
        pairs = [(job.id, job.lease_token) for job in pick.some(worker.runs, 3)]
        self.tell("release", worker.name, *pairs)
        expected = self.model.release(pairs)
        ids, tokens = [id for id, _ in pairs], [token for _, token in pairs]
        rows = drive(fetch(self.line, sql.RELEASE_JOBS, ids=ids, tokens=tokens))
        self.agree("what could be released", {row[0] for row in rows}, expected)

    def release_unknown(self, pick: Pick) -> None:
        """A claim got no answer: the worker gives back whatever it holds and does not know."""
        worker = pick.of(self.workers)
        known = sorted({job.id for job in pick.some(worker.runs, 3)})
        self.tell("release_unknown", worker.name, known)
        for job in self.model.jobs.values():
            if job.leased_by == worker.name and job.id not in known:
                job.let_go("released")
        drive(worker.claims.give_back_unknown(self.line, known))

    def renew(self, pick: Pick) -> None:
        """The heartbeat: what is still held lives on, with news; the rest is found to be lost."""
        worker = pick.of(self.workers)
        runs = {job.id: job for job in pick.some(worker.runs, 4)}
        news = pick.of((None, "half", "almost"))
        self.tell("renew", worker.name, *((job.id, job.lease_token) for job in runs.values()))
        for run in runs.values():
            if held := self.model.held(run.id, run.lease_token):
                held.expired, held.progress = False, news or held.progress
        ids, tokens = list(runs), [run.lease_token for run in runs.values()]
        drive(
            fetch(
                self.line, sql.RENEW_LEASES, ids=ids, tokens=tokens, progress=[news] * len(ids),
                lease_seconds=LEASE_SECONDS,
            )
        )  # fmt: skip
        rows = drive(fetch(self.line, sql.READ_HOLDERS, ids=ids))
        found = {id for id, token in rows if runs[id].lease_token == token}
        self.agree("what is still held", found, {id for id in ids if self.model.held(id, runs[id].lease_token)})

    def expire(self, pick: Pick) -> None:
        """Time passes for a lease, or for all of them."""
        leased = [job for job in self.model.jobs.values() if job.token is not None]
        one = pick.of([*(job.id for job in leased), None])
        self.tell("expire", one)
        for job in leased:
            if one is None or job.id == one:
                job.expired = True
        self.line.ask(EXPIRE, [one])

    def advance(self, pick: Pick) -> None:
        """Time passes for the business."""
        self.model.now += timedelta(seconds=pick.of((1, 4, 30, 100, 3600)))
        self.tell("advance", (self.model.now - START).total_seconds())
        self.line.set_clock(self.model.now)

    def retry_dead(self, pick: Pick) -> None:
        """An operator puts a dead letter back."""
        if self.model.dead:
            id = pick.of(sorted(self.model.dead))
            self.tell("retry_dead", id)
            self.model.retry_dead(id)
            drive(retry_dead_letter(self.line, id, actor="machine"))  # type: ignore[arg-type] # a line serves as one

    def discard_dead(self, pick: Pick) -> None:
        """An operator throws a dead letter away."""
        if self.model.dead:
            id = pick.of(sorted(self.model.dead))
            self.tell("discard_dead", id)
            self.model.discard_dead(id)
            drive(discard_dead_letter(self.line, id, actor="machine"))  # type: ignore[arg-type] # a line serves as one

    def look(self, _pick: Pick) -> None:
        """How long until something is due, what waits too long, which names nobody knows, which alerts are open."""
        self.tell("look")
        now, jobs = self.model.now, list(self.model.jobs.values())
        worker = self.workers[-1]
        names = list(worker.handlers)
        later = [job.run_at for job in jobs if job.name in names and job.run_at is not None and job.run_at > now]
        found = drive(worker.claims.seconds_to_next(self.line))
        self.agree("the seconds to the next job", found, (min(later) - now).total_seconds() if later else None)
        late = _late(jobs, names, now - timedelta(minutes=1))
        rows = drive(fetch(self.line, sql.COUNT_BACKLOG, names=names))
        self.agree("the backlog", tuple(rows[0]), (len(late), min(late, default=None), max(late, default=None)))
        unknown = sorted({job.name for job in jobs} - set(names))
        counts = [(name, sum(job.name == name for job in jobs)) for name in unknown]
        self.agree("names", drive(fetch(self.line, sql.FIND_UNKNOWN_NAMES, names=names)), counts)
        alerts = {(kind, subject): count for kind, subject, count in self.line.ask(READ_ALERTS)}
        self.agree("the open alerts", alerts, self.model.alerts)


def _late(jobs: list[ModelJob], names: list[str], before: datetime) -> list[datetime]:
    return [
        j.run_at for j in jobs if j.name in names and j.token is None and j.run_at is not None and j.run_at < before
    ]


class QueueMachine(QueueWorld):
    """Timers with all their rules, three workers, a name with a limit and one that nobody knows."""

    name = "queue"

    def make_workers(self) -> list[VirtualWorker]:
        """Two that know all, one that knows a part."""
        mail = Handler("mail", print, max_retries=2)
        bill = Handler("bill", print, max_retries=1, backoff_seconds=[5, 60])
        scan = Handler("scan", print, max_retries=1, limit=2)
        everything = {one.name: one for one in (mail, scan, bill)}
        part = {one.name: one for one in (bill, scan)}
        return [VirtualWorker(*given) for given in ((everything, "w1"), (everything, "w2"), (part, "w3"))]

    def _wanted(self, pick: Pick) -> tuple[NewJob, ModelJob]:
        name, entity = pick.of(("mail", "mail", "scan", "scan", "bill", "odd")), pick.of(("x", "y", None))
        delay = pick.of((None, 0, -100, -1, 3, 900, 360_000))
        now = self.model.now
        run_at = None if delay is None else now + timedelta(seconds=delay)
        due = run_at or now
        model = ModelJob(0, name, entity, 3, due, due, now, max(due - now, timedelta(0)))
        return NewJob(name, entity, run_at), model

    def schedule(self, pick: Pick) -> None:
        """A caller wants a job, once or however often."""
        wanted, model = self._wanted(pick)
        on_conflict = pick.of(CONFLICTS)
        priority, most, backoff = pick.of((3, 1, 4)), pick.of((None, 0, 1)), pick.of((None, None, [7, 70]))
        self.tell("schedule", wanted.name, wanted.entity_id, wanted.run_at, on_conflict, priority, most, backoff)
        model.priority, model.max_retries, model.backoff_seconds = priority, most, backoff
        expected = self.model.schedule(model, on_conflict)
        try:
            id: int | None = drive(
                schedule(
                    self.line, wanted.name, wanted.entity_id, wanted.run_at, on_conflict=on_conflict,
                    priority=priority, max_retries=most, backoff=backoff,
                )
            )  # fmt: skip
        except AlreadyScheduled:
            id = None
        self._scheduled(id, expected, on_conflict)

    def _scheduled(self, id: int | None, expected: ModelJob | None, on_conflict: str) -> None:
        if id is None or expected is None:
            self.agree("whether it was refused", id is None, expected is None)
        elif expected.id == 0:
            if id <= self.model.newest_id:
                raise Disagreement(f"no new job was made: {id} is an old one")
            expected.id = id
            self.model.add(expected)
        elif on_conflict == "keep":
            pending = [job.id for job in self.model.pending_timers(expected.name, expected.entity_id)]
            self.agree("the job that is pending is the answer", id in pending, True)
        else:
            self.agree("the id of the job", id, expected.id)

    def schedule_many(self, pick: Pick) -> None:
        """A caller wants several at once; it is as if they were given one by one."""
        on_conflict = pick.of(MANY_CONFLICTS)
        wanted, models = zip(*(self._wanted(pick) for _ in range(1 + pick.below(3))), strict=True)
        self.tell("schedule_many", on_conflict, *((one.name, one.entity_id, one.run_at) for one in wanted))
        before = set(self.model.jobs)
        drive(schedule_many(self.line, wanted, on_conflict=on_conflict))
        made = sorted(row[0] for row in self.line.ask("SELECT id FROM duly.jobs") if row[0] not in before)
        if on_conflict == "replace":
            models = _last_of_each(models)
        for model in models:
            expected = self.model.schedule(model, on_conflict)
            if expected is not None and expected.id == 0:
                if not made:
                    raise Disagreement(f"{model.name} for {model.entity_id} was not made")
                expected.id = made.pop(0)
                self.model.add(expected)
        self.agree("jobs that nobody asked for", made, [])

    def cancel(self, pick: Pick) -> None:
        """A caller no longer wants it."""
        name, entity = pick.of(("mail", "scan", "bill", "odd")), pick.of(("x", "y"))
        self.tell("cancel", name, entity)
        self.agree("how many", drive(cancel(self.line, name, entity)), self.model.cancel(name, entity))

    rules: ClassVar[Any] = (
        schedule, schedule, schedule, schedule_many, cancel, QueueWorld.claim, QueueWorld.claim, QueueWorld.claim,
        QueueWorld.settle, QueueWorld.settle, QueueWorld.settle, QueueWorld.end_all, QueueWorld.release,
        QueueWorld.release_unknown, QueueWorld.renew, QueueWorld.expire, QueueWorld.expire, QueueWorld.advance,
        QueueWorld.advance, QueueWorld.retry_dead, QueueWorld.discard_dead, QueueWorld.look,
    )  # fmt: skip


def _last_of_each(models: tuple[ModelJob, ...]) -> tuple[ModelJob, ...]:
    """Each timer as it was given last, at the place where it was given first."""
    kept: dict[Any, ModelJob] = {}
    for place, model in enumerate(models):
        kept[place if model.entity_id is None else (model.name, model.entity_id)] = model
    return tuple(kept.values())
