"""duly: work that is due, duly done. Outbox, inbox, jobs and schedules on PostgreSQL."""

from duly.app import Duly
from duly.db import Database, Tx
from duly.errors import DulyError
from duly.jobs.handlers import JobContext
from duly.jobs.outcomes import Cancel, Done, Fail, Outcome, Snooze, Then, ThenTogether
from duly.jobs.schedule import NewJob, cancel, find_queued, schedule, schedule_many
from duly.jobs.worker import Worker
from duly.messages import Event, EventBody, NewEvent
from duly.outbox.emit import emit
from duly.outbox.relay import Relay
from duly.schedules.tick import Scheduler

__version__ = "0.1.0"

__all__ = [
    "Cancel",
    "Database",
    "Done",
    "Duly",
    "DulyError",
    "Event",
    "EventBody",
    "Fail",
    "JobContext",
    "NewEvent",
    "NewJob",
    "Outcome",
    "Relay",
    "Scheduler",
    "Snooze",
    "Then",
    "ThenTogether",
    "Tx",
    "Worker",
    "cancel",
    "emit",
    "find_queued",
    "schedule",
    "schedule_many",
]
