"""Recurring work: definitions in the database, cron in their own time zone, one job for each occurrence."""

from duly.schedules.cron import Cron, Occurrence
from duly.schedules.edit import (
    ScheduleRow,
    add_schedule,
    disable_schedule,
    edit_schedule,
    enable_schedule,
    get_schedule,
    list_schedules,
    remove_schedule,
    seed_schedule,
    trigger_schedule,
)
from duly.schedules.tick import Scheduler

__all__ = [
    "Cron",
    "Occurrence",
    "ScheduleRow",
    "Scheduler",
    "add_schedule",
    "disable_schedule",
    "edit_schedule",
    "enable_schedule",
    "get_schedule",
    "list_schedules",
    "remove_schedule",
    "seed_schedule",
    "trigger_schedule",
]
