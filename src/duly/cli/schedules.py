"""``duly schedules``: look at the recurring definitions and change them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Annotated, Any

import typer

from duly import operate
from duly.cli.shell import Actor, AsJson, Reason, act, do, echo_json, echo_rows, echo_table
from duly.db import Tx, load_json
from duly.errors import Invalid
from duly.schedules import edit as schedules
from duly.schedules.cron import Cron

Name = Annotated[str, typer.Argument(help="The schedule's name.")]


class DstGap(StrEnum):
    """What happens to a fixed time that the clocks skip."""

    after = "after"
    skip = "skip"


class DstOverlap(StrEnum):
    """What happens to a fixed time that comes twice."""

    first = "first"
    both = "both"


class Misfire(StrEnum):
    """What a missed occurrence means."""

    run_once = "run_once"
    run_all = "run_all"
    skip = "skip"


def register(app: typer.Typer) -> None:
    """Add these commands."""
    family = typer.Typer(help="Schedules.", no_args_is_help=True)
    commands: dict[str, Callable[..., None]] = {
        "list": list_,
        "add": add,
        "edit": edit,
        "enable": enable,
        "disable": disable,
        "trigger": trigger,
        "preview": preview,
        "remove": remove,
    }
    for name, command in commands.items():
        family.command(name)(command)
    app.add_typer(family, name="schedules")


def list_(as_json: AsJson = False) -> None:
    """List schedules by name."""
    found = act(schedules.list_schedules)
    columns = ["name", "cron", "timezone", "enabled", "next_run_at", "last_run_at", "misfire", "max_retries"]
    echo_rows(found, [*columns, "last_error"], as_json, empty="no schedules")


def add(
    name: Name,
    cron: Annotated[str, typer.Option(help="Five fields: minute, hour, day of month, month, day of week.")],
    actor: Actor,
    timezone: Annotated[str, typer.Option(help="An IANA zone.")] = "UTC",
    max_retries: Annotated[int, typer.Option(help="Retries of each run.")] = 3,
    misfire: Annotated[Misfire, typer.Option(help="What a missed run means.")] = Misfire.run_once,
    dst_gap: Annotated[
        DstGap, typer.Option(help="A time that the clocks skip runs after the gap, or not.")
    ] = DstGap.after,
    dst_overlap: Annotated[DstOverlap, typer.Option(help="A time that comes twice runs so often.")] = DstOverlap.first,
    payload: Annotated[str, typer.Option(help="A JSON object for the handler.")] = "{}",
    disabled: Annotated[bool, typer.Option("--disabled", help="Add it switched off.")] = False,
    reason: Reason = None,
) -> None:
    """Add a schedule."""
    do(
        "schedules.add", actor=actor, reason=reason, name=name, cron=cron, timezone=timezone, max_retries=max_retries,
        misfire=misfire.value, dst_gap=dst_gap.value, dst_overlap=dst_overlap.value, payload=_payload(payload),
        enabled=not disabled,
    )  # fmt: skip


def edit(
    name: Name,
    actor: Actor,
    cron: Annotated[str | None, typer.Option(help="Five fields.")] = None,
    timezone: Annotated[str | None, typer.Option(help="An IANA zone.")] = None,
    max_retries: Annotated[int | None, typer.Option(help="Retries of each run.")] = None,
    misfire: Annotated[Misfire | None, typer.Option(help="What a missed run means.")] = None,
    dst_gap: Annotated[DstGap | None, typer.Option(help="A time that the clocks skip.")] = None,
    dst_overlap: Annotated[DstOverlap | None, typer.Option(help="A time that comes twice.")] = None,
    payload: Annotated[str | None, typer.Option(help="A JSON object for the handler.")] = None,
    expected_version: Annotated[int | None, typer.Option(help="Refuse if somebody else changed it.")] = None,
    reason: Reason = None,
) -> None:
    """Change a schedule; in force from the next tick."""
    chosen = {"misfire": misfire, "dst_gap": dst_gap, "dst_overlap": dst_overlap}
    do(
        "schedules.edit", actor=actor, reason=reason, name=name, cron=cron, timezone=timezone, max_retries=max_retries,
        payload=None if payload is None else _payload(payload), expected_version=expected_version,
        **{field: value.value for field, value in chosen.items() if value is not None},
    )  # fmt: skip


def enable(name: Name, actor: Actor, reason: Reason = None) -> None:
    """Let a schedule run again, from now on."""
    do("schedules.enable", actor=actor, reason=reason, name=name)


def disable(name: Name, actor: Actor, reason: Reason = None) -> None:
    """Stop a schedule from firing."""
    do("schedules.disable", actor=actor, reason=reason, name=name)


def trigger(name: Name, actor: Actor, reason: Reason = None) -> None:
    """Queue one run now."""
    do("schedules.trigger", actor=actor, reason=reason, name=name)


def remove(name: Name, actor: Actor, reason: Reason = None) -> None:
    """Delete a schedule; the audit keeps it."""
    do("schedules.remove", actor=actor, reason=reason, name=name)


def preview(
    name: Annotated[str | None, typer.Argument(help="A schedule's name.")] = None,
    cron: Annotated[str | None, typer.Option(help="Or an expression to try out.")] = None,
    timezone: Annotated[str, typer.Option(help="Its zone.")] = "UTC",
    count: Annotated[int, typer.Option(min=1, max=1_000, help="How many runs.")] = 10,
    as_json: AsJson = False,
) -> None:
    """Show the next runs of a schedule, or of an expression."""
    if (name is None) == (cron is None):
        raise typer.BadParameter("give a schedule's name, or --cron")

    async def work(tx: Tx) -> list[dict[str, Any]]:
        asked = Cron(cron, timezone) if cron is not None else (await schedules.get_schedule(tx, name or "")).parsed()
        now = await operate.read_now(tx)
        return [
            {"at": run.at, "local": run.local.isoformat(), "note": run.note or ""} for run in asked.preview(now, count)
        ]

    runs = act(work)
    if as_json:
        echo_json(runs)
    else:
        echo_table(["at", "local", "note"], [list(run.values()) for run in runs], empty="it never runs")


def _payload(given: str) -> Mapping[str, Any]:
    try:
        parsed = load_json(given)
    except ValueError as error:
        raise Invalid(f"--payload is not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise Invalid("--payload must be a JSON object")
    return parsed
