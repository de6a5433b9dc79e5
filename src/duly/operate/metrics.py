"""Gauges of the queue, fed from the database; at most 200 names have a label of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prometheus_client import Gauge

from duly.db import Tx
from duly.operate.status import NameStatus, Status, status

LABELS_LIMIT = 200
OTHER = "other"

QUEUE_DEPTH = Gauge("duly_queue_depth", "Jobs by name and state, counted up to 10,000", ["name", "state"])
QUEUE_OLDEST_SECONDS = Gauge("duly_queue_oldest_seconds", "Age of the oldest job that is due and not taken", ["name"])
OUTBOX_PENDING = Gauge("duly_outbox_pending", "Events still to be published, counted up to 10,000")
OUTBOX_FAILED = Gauge("duly_outbox_failed", "Events that an operator has to requeue or discard")
OUTBOX_LAG_SECONDS = Gauge("duly_outbox_lag_seconds", "Age of the oldest event that the relay should have published")
DEAD_LETTERS = Gauge("duly_dead_letters", "Dead letters by job name, counted up to 10,000", ["name"])
ALERTS_OPEN = Gauge("duly_alerts_open", "Alerts that nobody has resolved")
SCHEDULES_LATE = Gauge("duly_schedules_late", "Enabled schedules whose time passed without a tick")

Labels = tuple[str, ...]
_shown: dict[Gauge, set[Labels]] = {}


async def refresh(tx: Tx) -> None:
    """Set every gauge to what the database says now; a name that is gone loses its labels."""
    show(await status(tx))


def show(found: Status) -> None:
    """Set every gauge from a status."""
    _fill(QUEUE_DEPTH, _depths(found.jobs))
    _fill(QUEUE_OLDEST_SECONDS, _oldest(found.jobs))
    _fill(DEAD_LETTERS, _dead_letters(found))
    OUTBOX_PENDING.set(found.outbox.pending.number)
    OUTBOX_FAILED.set(found.outbox.failed.number)
    OUTBOX_LAG_SECONDS.set(found.outbox.oldest_seconds or 0.0)
    ALERTS_OPEN.set(found.alerts_open.number)
    SCHEDULES_LATE.set(len(found.schedules_late))


def _fill(gauge: Gauge, values: Mapping[Labels, float]) -> None:
    for labels, value in values.items():
        gauge.labels(*labels).set(value)
    for labels in _shown.get(gauge, set()) - values.keys():
        gauge.remove(*labels)
    _shown[gauge] = set(values)


def _states(job: NameStatus) -> dict[str, int]:
    return {
        "due": job.due.number,
        "future": job.future.number,
        "behind": job.behind.number,
        "running": job.running.number,
        "expired": job.expired.number,
    }


def _depths(jobs: Sequence[NameStatus]) -> dict[Labels, float]:
    label = _labels({job.name: sum(_states(job).values()) for job in jobs})
    depths: dict[Labels, float] = {}
    for job in jobs:
        for state, number in _states(job).items():
            key = (label[job.name], state)
            depths[key] = depths.get(key, 0) + number
    return depths


def _oldest(jobs: Sequence[NameStatus]) -> dict[Labels, float]:
    label = _labels({job.name: sum(_states(job).values()) for job in jobs})
    oldest: dict[Labels, float] = {}
    for job in jobs:
        key = (label[job.name],)
        oldest[key] = max(oldest.get(key, 0.0), job.oldest_due_seconds or 0.0)
    return oldest


def _dead_letters(found: Status) -> dict[Labels, float]:
    label = _labels({name: count.number for name, count in found.dead_letters.items()})
    dead: dict[Labels, float] = {}
    for name, count in found.dead_letters.items():
        key = (label[name],)
        dead[key] = dead.get(key, 0) + count.number
    return dead


def _labels(sizes: Mapping[str, int]) -> dict[str, str]:
    """The largest names keep their own label, the rest share one."""
    largest = set(sorted(sizes, key=lambda name: (-sizes[name], name))[:LABELS_LIMIT])
    return {name: name if name in largest else OTHER for name in sizes}
