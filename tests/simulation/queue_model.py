"""The queue as a person would explain it: dictionaries, loops and no database."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

NOTHING = timedelta(0)
UNKNOWN = -1


@dataclass
class ModelJob:
    """One row of the queue; the fields stand in the order in which the machine reads them."""

    id: int
    name: str
    entity_id: str | None
    priority: int
    run_at: datetime | None  # None: not before somebody lets it
    due_at: datetime
    created_at: datetime
    original_delay: timedelta = NOTHING
    retry_count: int = 0
    max_retries: int | None = None
    backoff_seconds: list[int] | None = None
    source: str = "Deferred"
    waits: str = "due"
    last_error: str | None = None
    snoozes: int = 0
    order_key: str | None = None
    is_unique: bool = False
    unique_key: str | None = None
    slot: int | None = None
    token: int | None = None
    expired: bool | None = None
    leased_by: str | None = None
    claimed_at: datetime | None = None
    progress: str | None = None
    lost_by: str | None = None
    lost_token: int | None = None
    lost_claimed_at: datetime | None = None

    def let_go(self, waits: str) -> None:
        """It belongs to nobody."""
        self.token = self.expired = self.leased_by = self.slot = None
        self.waits = waits


@dataclass
class ModelDead:
    """One dead letter."""

    id: int
    name: str
    entity_id: str | None
    priority: int
    due_at: datetime
    created_at: datetime
    original_delay: timedelta
    retry_count: int
    max_retries: int | None
    backoff_seconds: list[int] | None
    source: str
    reason: str
    error: str
    order_key: str | None
    error_kind: str
    buried_at: datetime


@dataclass
class ModelRun:
    """One run that ended, as the history tells it."""

    job_id: int
    name: str
    entity_id: str | None
    source: str
    started_at: datetime | None
    completed_at: datetime
    succeeded: bool
    outcome: str
    message: str | None
    retry_count: int
    next_run_at: datetime | None
    worker: str | None
    token: int


@dataclass(frozen=True)
class Ending:
    """How a worker says that a run ended."""

    id: int
    token: int
    outcome: str
    message: str | None = None
    wait: timedelta = NOTHING
    reason: str | None = None
    error_kind: str | None = None


@dataclass
class QueueModel:
    """Everything that waits, runs or is dead, and the history of the last step."""

    now: datetime
    jobs: dict[int, ModelJob] = field(default_factory=dict)
    dead: dict[int, ModelDead] = field(default_factory=dict)
    history: list[ModelRun] = field(default_factory=list)
    alerts: dict[tuple[str, str], int] = field(default_factory=dict)
    newest_token: int = 0
    newest_id: int = 0
    fenced: list[int] = field(default_factory=list)  # gave up their slot to this claim; the world knows their tokens

    # -- pending work -------------------------------------------------------------------------------------------

    def pending_timers(self, name: str, entity_id: str | None) -> list[ModelJob]:
        """Those that count as *the* timer of a name and entity: what runs does not."""
        return [
            job
            for job in self.jobs.values()
            if entity_id is not None
            and (job.name, job.entity_id) == (name, entity_id)
            and job.is_unique
            and job.token is None
        ]

    def schedule(self, given: ModelJob, on_conflict: str) -> ModelJob | None:
        """The job that is pending now because of the call: a new one (its id is yet unknown: 0), or the one before."""
        others = self.pending_timers(given.name, given.entity_id) if on_conflict != "allow" else []
        if others and on_conflict == "reject":
            return None
        if others and on_conflict == "keep":
            return others[0]
        keyed = [job for job in others if job.unique_key is not None]
        for job in others:
            if job.unique_key is None:
                self.remove(job.id)
        if on_conflict != "allow" and given.entity_id is not None:
            given.is_unique, given.unique_key = True, f"{given.name} {given.entity_id}"
        if keyed:  # the timer moves: the row is the same, and all that was asked for is new
            given.id, given.source = keyed[0].id, keyed[0].source
            given.lost_by, given.lost_token = keyed[0].lost_by, keyed[0].lost_token
            self.jobs[given.id] = given
        return given

    def add(self, job: ModelJob) -> None:
        """A job that the world has given an id."""
        self.newest_id = max(self.newest_id, job.id)
        self.jobs[job.id] = job

    def cancel(self, name: str, entity_id: str) -> int:
        """Delete what is pending, never what runs."""
        gone = [j.id for j in self.jobs.values() if (j.name, j.entity_id) == (name, entity_id) and j.token is None]
        for id in gone:
            self.jobs.pop(id)
        if gone:
            self.release_next(name, entity_id)
        return len(gone)

    # -- claims -------------------------------------------------------------------------------------------------

    def claim(self, names: Sequence[str], limit: int, worker: str) -> list[ModelJob]:
        """Urgent ones first, then the names in turn, of each the oldest; expired leases are anybody's."""
        ready = [
            job
            for priority in (1, 2, 3, 4)
            for name in names
            for job in sorted(self._due(name, priority), key=lambda job: (job.run_at, job.id))
        ][:limit]
        for job in ready:
            job.lost_by, job.lost_token = job.leased_by, job.token
            job.lost_claimed_at = job.claimed_at if job.token is not None else None
            if job.token is not None:
                job.retry_count += 1
                self._write_history(
                    job, "lost", "the lease expired: the worker died or stalled", job.retry_count - 1, None,
                    worker=job.lost_by, token=job.token, started_at=job.claimed_at,
                )  # fmt: skip
            job.token, job.expired, job.leased_by = 0, False, worker  # the world says which token
            job.claimed_at, job.unique_key, job.progress = self.now, None, None
        return ready

    def _due(self, name: str, priority: int) -> list[ModelJob]:
        return [
            job
            for job in self.jobs.values()
            if job.name == name
            and job.priority == priority
            and job.run_at is not None
            and job.run_at <= self.now
            and (job.token is None or job.expired)
        ]

    def claim_limited(self, name: str, slots: int, room: int, worker: str) -> list[ModelJob]:
        """No more than there are slots free; what was lost gives its slot back first."""
        mine = [job for job in self.jobs.values() if job.name == name]
        for job in mine:
            if job.expired and job.slot is not None:
                job.slot, job.token = None, UNKNOWN  # its holder may only have stalled: it must not come back
                self.fenced.append(job.id)
        taken = {job.slot for job in mine if job.slot is not None}
        free = [slot for slot in range(1, slots + 1) if slot not in taken]
        claimed = self.claim([name], min(room, len(free)), worker)
        for job, slot in zip(sorted(claimed, key=lambda job: job.id), free, strict=False):
            job.slot = slot
        return claimed

    def learn_fenced(self, tokens: dict[int, list[int]]) -> None:
        """Which token each of them got, and which was lost again at once if the same claim took it over."""
        newest = self.newest_token
        for id in self.fenced:
            job, (token, lost_token) = self.jobs[id], tokens[id]
            if job.lost_token == UNKNOWN:
                job.lost_token = token = lost_token
            else:
                job.token = token
            for run in self.history:
                if run.job_id == id and run.token == UNKNOWN:
                    run.token = token
            assert token > newest, "a token is newer than any before"
            self.newest_token = max(self.newest_token, token)
        self.fenced.clear()

    # -- endings ------------------------------------------------------------------------------------------------

    def held(self, id: int, token: int) -> ModelJob | None:
        """The job, if this is still its token."""
        job = self.jobs.get(id)
        return job if job is not None and job.token == token else None

    def settle(self, endings: Sequence[Ending], worker: str) -> set[tuple[int, int]]:
        """Write what is still ours to write; which leases were."""
        kinds: dict[str, list[Ending]] = {}
        for ending in endings:
            kind = {"retried": "later", "snoozed": "later", "released": "later", "buried": "dead"}.get(
                ending.outcome, ""
            )
            kinds.setdefault(kind, []).append(ending)
        settled: set[tuple[int, int]] = set()
        for kind, some in kinds.items():
            ours = [(job, ending) for ending in some if (job := self.held(ending.id, ending.token))]
            for job, ending in ours:
                settled.add((ending.id, ending.token))
                if kind == "later":
                    self._postpone(job, ending, worker)
                else:
                    self._finish(job, ending, worker)
            for job, _ in ours:
                if kind != "later" and job.order_key is not None:
                    self.release_next(job.name, job.order_key)
            for name in {job.name for job, _ in ours if kind == "dead"}:
                self.alerts["dead_letter", name] = self.alerts.get(("dead_letter", name), 0) + 1
        return settled

    def _postpone(self, job: ModelJob, ending: Ending, worker: str) -> None:
        ran_as = job.retry_count
        job.run_at = self.now + ending.wait
        if ending.outcome == "retried":
            job.retry_count += 1
            job.last_error = ending.message
        if ending.outcome == "snoozed":
            job.snoozes += 1
        self._write_history(
            job, ending.outcome, ending.message, ran_as, job.run_at, worker=worker, token=ending.token,
            started_at=self.now,
        )  # fmt: skip
        job.let_go("retry" if ending.outcome == "retried" else ending.outcome)
        job.progress = None

    def _finish(self, job: ModelJob, ending: Ending, worker: str) -> None:
        del self.jobs[job.id]
        self._write_history(
            job, ending.outcome, ending.message, job.retry_count, None, worker=worker, token=ending.token,
            started_at=self.now,
        )  # fmt: skip
        if ending.outcome == "buried":
            assert ending.reason
            assert ending.error_kind
            self.dead[job.id] = ModelDead(
                job.id, job.name, job.entity_id, job.priority, job.due_at, job.created_at, job.original_delay,
                job.retry_count, job.max_retries, job.backoff_seconds, job.source, ending.reason,
                ending.message or "", job.order_key, ending.error_kind, self.now,
            )  # fmt: skip

    def _write_history(
        self, job: ModelJob, outcome: str, message: str | None, retry_count: int, next_run_at: datetime | None, *,
        worker: str | None, token: int, started_at: datetime | None,
    ) -> None:  # fmt: skip
        succeeded = outcome in ("done", "duplicate", "cancelled", "snoozed")
        self.history.append(
            ModelRun(
                job.id, job.name, job.entity_id, job.source, started_at, self.now, succeeded, outcome, message,
                retry_count, next_run_at, worker, token,
            )
        )  # fmt: skip

    def release(self, pairs: Sequence[tuple[int, int]]) -> set[int]:
        """Jobs that never started go back to where they were."""
        ours = {job.id: job for id, token in pairs if (job := self.held(id, token))}
        for job in ours.values():
            job.let_go("released")
        return set(ours)

    # -- order --------------------------------------------------------------------------------------------------

    def order_of(self, name: str, key: str) -> list[ModelJob]:
        """All that is in the queue of one order, the oldest first."""
        return sorted((j for j in self.jobs.values() if j.name == name and j.order_key == key), key=lambda j: j.id)

    def is_held_by_dead(self, name: str, key: str) -> bool:
        """Whether a dead letter keeps its place in this order."""
        return any(dead.name == name and dead.order_key == key for dead in self.dead.values())

    def remove(self, id: int) -> None:
        """A job leaves in whatever way."""
        job = self.jobs.pop(id)
        if job.order_key is not None:
            self.release_next(job.name, job.order_key)

    def release_next(self, name: str, key: str) -> None:
        """The first of an order may run, unless a dead letter is before it."""
        waiting = self.order_of(name, key)
        if waiting and waiting[0].waits == "behind" and not self.is_held_by_dead(name, key):
            waiting[0].waits, waiting[0].run_at = "due", self.now

    def retry_dead(self, id: int) -> None:
        """An operator puts a dead letter back: same id, due now, with all its retries."""
        dead = self.dead[id]
        orders = [(job.id, job.name, job.order_key) for job in self.jobs.values()]
        orders += [(other.id, other.name, other.order_key) for other in self.dead.values()]
        ahead = dead.order_key is not None and any(
            other < id and (name, key) == (dead.name, dead.order_key) for other, name, key in orders
        )
        self.jobs[id] = ModelJob(
            id, dead.name, dead.entity_id, dead.priority, None if ahead else self.now, dead.due_at, dead.created_at,
            dead.original_delay, 0, dead.max_retries, dead.backoff_seconds, dead.source,
            "behind" if ahead else "requeued", dead.error, order_key=dead.order_key,
        )  # fmt: skip
        self.discard_dead(id)

    def discard_dead(self, id: int) -> None:
        """A dead letter is gone, and no longer in anybody's way."""
        dead = self.dead.pop(id)
        if dead.order_key is not None:
            self.release_next(dead.name, dead.order_key)
        if not any(other.name == dead.name for other in self.dead.values()):
            self.alerts.pop(("dead_letter", dead.name), None)

    # -- what must always be true -------------------------------------------------------------------------------

    def broken_promises(self, limits: dict[str, int]) -> list[str]:
        """Sentences about what the architecture forbids; the comparison alone would let both be wrong alike."""
        wrong = []
        for name, limit in limits.items():
            if sum(job.name == name and job.expired is False for job in self.jobs.values()) > limit:
                wrong.append(f"more than {limit} of {name} run")
        keys = [job.unique_key for job in self.jobs.values() if job.unique_key is not None]
        if len(keys) != len(set(keys)):
            wrong.append("two pending timers of one name and entity")
        for name, key in {(j.name, j.order_key) for j in self.jobs.values() if j.order_key is not None}:
            first, *rest = self.order_of(name, key)
            if any(job.waits != "behind" for job in rest):
                wrong.append(f"more than the first of {name} {key} may run")
            if (first.waits == "behind") != self.is_held_by_dead(name, key):
                wrong.append(f"the first of {name} {key} waits for nothing, or runs past a dead letter")
        return wrong
