"""What an operator can ask and do; every action is audited in the transaction that does it."""

from __future__ import annotations

from duly.operate.actions import ACTIONS, Action, Arguments, Result, perform, register
from duly.operate.alerts import Alert, list_alerts, resolve_alert
from duly.operate.audit import AuditEntry, list_audit, write_audit
from duly.operate.consumers import ConsumerRow, Move, list_consumers, move_consumer
from duly.operate.counts import Count
from duly.operate.dead_letters import (
    DeadLetter,
    DeadLetterGroup,
    count_dead_letters,
    discard_dead_letter,
    discard_dead_letters,
    find_dead_letter,
    group_dead_letters,
    list_dead_letters,
    retry_dead_letter,
    retry_dead_letters,
)
from duly.operate.events import EventEntry, discard_event, discard_events, list_events, requeue_event, requeue_events
from duly.operate.jobs import (
    Execution,
    QueuedJob,
    cancel_job,
    find_job,
    list_executions,
    list_jobs,
    run_job_now,
)
from duly.operate.status import Status, list_processes, read_now, status
from duly.operate.why import why

__all__ = [
    "ACTIONS",
    "Action",
    "Alert",
    "Arguments",
    "AuditEntry",
    "ConsumerRow",
    "Count",
    "DeadLetter",
    "DeadLetterGroup",
    "EventEntry",
    "Execution",
    "Move",
    "QueuedJob",
    "Result",
    "Status",
    "cancel_job",
    "count_dead_letters",
    "discard_dead_letter",
    "discard_dead_letters",
    "discard_event",
    "discard_events",
    "find_dead_letter",
    "find_job",
    "group_dead_letters",
    "list_alerts",
    "list_audit",
    "list_consumers",
    "list_dead_letters",
    "list_events",
    "list_executions",
    "list_jobs",
    "list_processes",
    "move_consumer",
    "perform",
    "read_now",
    "register",
    "requeue_event",
    "requeue_events",
    "resolve_alert",
    "retry_dead_letter",
    "retry_dead_letters",
    "run_job_now",
    "status",
    "why",
    "write_audit",
]
