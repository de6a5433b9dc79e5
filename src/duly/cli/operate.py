"""An operator's commands: questions are functions of ``duly.operate``, and what changes something is an action."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated
from uuid import UUID

import typer

from duly import operate
from duly.cli import schedules
from duly.cli.shell import (
    Actor,
    AsJson,
    Everything,
    Limit,
    Reason,
    Yes,
    act,
    do,
    do_all,
    do_each,
    echo_json,
    echo_rows,
    echo_table,
    printable,
    seconds,
)
from duly.operate.words import plural, span

Name = Annotated[str | None, typer.Option(help="Only this job name.")]
Entity = Annotated[str | None, typer.Option(help="Only this entity.")]
Topic = Annotated[str | None, typer.Option(help="Only this topic.")]
ErrorKind = Annotated[str | None, typer.Option(help="Only this kind of error.")]
JobId = Annotated[int, typer.Argument(help="The job's id.")]
JobIds = Annotated[list[int] | None, typer.Argument(help="Ids of dead letters.")]
EventId = Annotated[UUID | None, typer.Argument(help="The event's id.")]


def register(app: typer.Typer) -> None:
    """Add these commands."""
    app.command()(why)
    app.command()(status)
    app.command()(history)
    groups: dict[str, tuple[str, dict[str, Callable[..., None]]]] = {
        "jobs": ("Jobs that wait or run.", {"list": jobs_list, "cancel": jobs_cancel, "run-now": jobs_run_now}),
        "dead": ("Dead letters.", {"list": dead_list, "retry": dead_retry, "discard": dead_discard}),
        "events": ("Events.", {"list": events_list, "requeue": events_requeue, "discard": events_discard}),
        "alerts": ("Alerts.", {"list": alerts_list, "resolve": alerts_resolve}),
    }
    for group, (about, commands) in groups.items():
        family = typer.Typer(help=about, no_args_is_help=True)
        for name, command in commands.items():
            family.command(name)(command)
        app.add_typer(family, name=group)
    schedules.register(app)


# ------------------------------------------------------------------------------------------------- questions at large


def why(id: Annotated[str, typer.Argument(help="A job, event, run, webhook, schedule, job name or entity.")],
        as_json: AsJson = False) -> None:  # fmt: skip
    """Say why something did or did not run."""
    said = act(lambda tx: operate.why(tx, id))
    if as_json:
        echo_json(said)
    else:
        for sentence in said:
            typer.echo(printable(sentence))


def status(as_json: AsJson = False) -> None:
    """Say what waits, runs, failed and is late, and who is alive."""
    found = act(operate.status)
    if as_json:
        echo_json(found)
        return
    echo_table(
        ["job", "due", "oldest", "future", "behind", "running", "expired"],
        [
            [one.name, one.due, seconds(one.oldest_due_seconds), one.future, one.behind, one.running, one.expired]
            for one in found.jobs
        ],
        empty="no jobs wait or run",
    )
    dead = ", ".join(f"{name} {count}" for name, count in found.dead_letters.items())
    late = ", ".join(f"{one.name} by {span(one.late_seconds)}" for one in found.schedules_late)
    alive = ", ".join(f"{one.kind} {one.id}" for one in found.processes)
    outbox = found.outbox
    for line in (
        f"dead letters: {dead or 'none'}",
        f"outbox: {outbox.pending} pending ({outbox.held} held), {outbox.failed} failed, "
        f"oldest {seconds(outbox.oldest_seconds)}",
        f"late schedules: {late or 'none'}",
        f"open alerts: {found.alerts_open}",
        f"alive: {alive or 'nobody'}",
    ):
        typer.echo(printable(line))


def history(
    name: Name = None,
    job: Annotated[int | None, typer.Option(help="Only this job.")] = None,
    entity: Entity = None,
    limit: Limit = 50,
    as_json: AsJson = False,
) -> None:
    """Show the log of runs, newest first."""
    found = act(lambda tx: operate.list_executions(tx, name=name, job_id=job, entity_id=entity, limit=limit))
    columns = ["completed_at", "job_id", "name", "entity_id", "outcome", "retry_count", "message", "execution_id"]
    echo_rows(found, columns, as_json, empty="no runs")


# -------------------------------------------------------------------------------------------------------------- jobs


def jobs_list(
    name: Name = None,
    entity: Entity = None,
    status: Annotated[str | None, typer.Option(help="Pending, Running or Failed.")] = None,
    after: Annotated[int | None, typer.Option(help="Begin after this id.")] = None,
    limit: Limit = 50,
    as_json: AsJson = False,
) -> None:
    """List jobs that wait or run."""
    found = act(lambda tx: operate.list_jobs(tx, name=name, entity_id=entity, status=status, limit=limit, after=after))
    columns = ["id", "name", "entity_id", "status", "waits", "run_at", "retry_count", "leased_by", "last_error"]
    echo_rows(found, columns, as_json, empty="no jobs")


def jobs_cancel(id: JobId, actor: Actor, reason: Reason = None) -> None:
    """Delete a job, whether it waits or runs."""
    do("jobs.cancel", actor=actor, reason=reason, id=id)


def jobs_run_now(id: JobId, actor: Actor, reason: Reason = None) -> None:
    """Make a waiting job due now."""
    do("jobs.run-now", actor=actor, reason=reason, id=id)


# ------------------------------------------------------------------------------------------------------ dead letters


def dead_list(
    name: Name = None,
    entity: Entity = None,
    groups: Annotated[bool, typer.Option("--groups", help="By name and kind of error.")] = False,
    limit: Limit = 50,
    as_json: AsJson = False,
) -> None:
    """List dead letters, newest first."""
    if groups:
        grouped = act(operate.group_dead_letters)
        columns = ["name", "error_kind", "count", "newest_at", "newest_error"]
        echo_rows(grouped, columns, as_json, empty="no dead letters")
        return
    found = act(lambda tx: operate.list_dead_letters(tx, name=name, entity_id=entity, limit=limit))
    columns = ["id", "name", "entity_id", "buried_at", "reason", "error_kind", "error"]
    echo_rows(found, columns, as_json, empty="no dead letters")


def dead_retry(
    actor: Actor,
    ids: JobIds = None,
    everything: Everything = False,
    name: Name = None,
    error_kind: ErrorKind = None,
    yes: Yes = False,
    reason: Reason = None,
) -> None:
    """Put dead letters back into the queue, due now."""
    _check_choice(bool(ids), everything, "ids")
    if ids:
        number = do_each("dead.retry", ids, actor=actor, reason=reason)
    else:
        filters = {"name": name, "error_kind": error_kind}
        number = do_all("dead.retry-all", filters, "Retry {count} dead letters?", yes=yes, actor=actor, reason=reason)
    typer.echo(f"retried {plural(number, 'dead letter')}")


def dead_discard(
    actor: Actor,
    ids: JobIds = None,
    everything: Everything = False,
    name: Name = None,
    error_kind: ErrorKind = None,
    yes: Yes = False,
    reason: Reason = None,
) -> None:
    """Throw dead letters away; the audit keeps them."""
    _check_choice(bool(ids), everything, "ids")
    if ids:
        number = do_each("dead.discard", ids, actor=actor, reason=reason)
    else:
        filters, asked = {"name": name, "error_kind": error_kind}, "Discard {count} dead letters?"
        number = do_all("dead.discard-all", filters, asked, yes=yes, actor=actor, reason=reason)
    typer.echo(f"discarded {plural(number, 'dead letter')}")


def _check_choice(some: bool, everything: bool, what: str) -> None:
    if some == everything:
        raise typer.BadParameter(f"give the {what}, or --all with what to look for")


# ------------------------------------------------------------------------------------------------------------ events


def events_list(
    status: Annotated[str | None, typer.Option(help="PENDING, PUBLISHED or FAILED.")] = None,
    topic: Topic = None,
    aggregate: Annotated[str | None, typer.Option(help="Only this aggregate.")] = None,
    limit: Limit = 50,
    as_json: AsJson = False,
) -> None:
    """List events, newest first."""
    found = act(lambda tx: operate.list_events(tx, status=status, topic=topic, aggregate_id=aggregate, limit=limit))
    columns = ["id", "type", "topic", "aggregate_id", "status", "attempts", "parked", "created_at", "last_error"]
    echo_rows(found, columns, as_json, empty="no events")


def events_requeue(
    actor: Actor,
    id: EventId = None,
    everything: Everything = False,
    topic: Topic = None,
    yes: Yes = False,
    reason: Reason = None,
) -> None:
    """Give FAILED events all their attempts again."""
    _check_choice(id is not None, everything, "id")
    if id is not None:
        do("events.requeue", actor=actor, reason=reason, id=id)
        return
    asked = "Requeue {count} FAILED events?"
    number = do_all("events.requeue-all", {"topic": topic}, asked, yes=yes, actor=actor, reason=reason)
    typer.echo(f"requeued {plural(number, 'event')}")


def events_discard(
    actor: Actor,
    id: EventId = None,
    everything: Everything = False,
    topic: Topic = None,
    yes: Yes = False,
    reason: Reason = None,
) -> None:
    """Give up FAILED events; their aggregates go on, and the audit keeps them."""
    _check_choice(id is not None, everything, "id")
    if id is not None:
        do("events.discard", actor=actor, reason=reason, id=id)
        return
    asked = "Discard {count} FAILED events?"
    number = do_all("events.discard-all", {"topic": topic}, asked, yes=yes, actor=actor, reason=reason)
    typer.echo(f"discarded {plural(number, 'event')}")


# ------------------------------------------------------------------------------------------------------------ alerts


def alerts_list(
    everything: Annotated[bool, typer.Option("--all", help="Resolved ones too.")] = False,
    limit: Limit = 100,
    as_json: AsJson = False,
) -> None:
    """List alerts, newest first."""
    found = act(lambda tx: operate.list_alerts(tx, open_only=not everything, limit=limit))
    columns = ["id", "kind", "subject", "count", "raised_at", "last_at", "resolved_at", "message"]
    echo_rows(found, columns, as_json, empty="no alerts")


def alerts_resolve(
    id: Annotated[int, typer.Argument(help="The alert's id.")], actor: Actor, reason: Reason = None
) -> None:
    """Close an alert."""
    do("alerts.resolve", actor=actor, reason=reason, id=id)
