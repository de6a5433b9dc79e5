"""The same calls for synchronous code: a SQLAlchemy ``Session`` or ``Connection``, or a psycopg connection."""

from duly.jobs.schedule import cancel_sync as cancel
from duly.jobs.schedule import schedule_sync as schedule
from duly.outbox.emit import emit_sync as emit

__all__ = ["cancel", "emit", "schedule"]
