"""What the operator's commands share: options, one transaction on the right database, and two ways to print."""

from __future__ import annotations

import dataclasses
import functools
import getpass
import json
import os
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from duly.cli.home import database_address
from duly.cli.process import begin, open_database, run_async
from duly.db import Database, Tx
from duly.operate import Count
from duly.operate.actions import find_action, perform, read_arguments
from duly.operate.arguments import row_id
from duly.operate.words import span
from duly.runtime.migrate import check_schema

T = TypeVar("T")
BULK_BATCH = 1_000
BULK_ROUNDS = 100
WIDTH_OF_A_PIPE = 200


def os_user() -> str:
    """Who runs this command, as the operating system knows them."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid {os.getuid()}"


Actor = Annotated[str, typer.Option(help="Who does this.", default_factory=os_user, show_default="the OS user")]
Reason = Annotated[str | None, typer.Option(help="Why; it is kept in the audit.")]
AsJson = Annotated[bool, typer.Option("--json", help="For machines.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]
Everything = Annotated[bool, typer.Option("--all", help="All that the filters find.")]
Limit = Annotated[int, typer.Option(min=1, max=1_000, help="How many to show.")]


def act(work: Callable[[Tx], Awaitable[T]]) -> T:
    """Do one thing in one transaction."""
    return on_database(lambda db: db.run(work))


def on_database(work: Callable[[Database], Awaitable[T]]) -> T:
    """Open the database that the settings name, for one command."""
    settings = begin()
    with database_address(settings) as dsn:
        check_schema(dsn)

        async def main() -> T:
            async with open_database(dsn, settings) as db:
                return await work(db)

        return run_async(main())


def act_in_bulk(
    count: Callable[[Tx], Awaitable[Count]],
    batch: Callable[[int], Callable[[Tx], Awaitable[int]]],
    *,
    question: str,
    yes: bool,
) -> int:
    """Say how many, ask, and act in batches; no more than were counted, so that what fails again is not done twice."""

    async def work(db: Database) -> int:
        found = await db.run(count)
        if not found.number:
            return 0
        if not yes and not typer.confirm(question.format(count=found)):
            raise typer.Abort
        done = 0
        for _ in range(BULK_ROUNDS):
            left = BULK_BATCH if found.more else min(BULK_BATCH, found.number - done)
            moved = await db.run(batch(left)) if left else 0
            done += moved
            if moved < BULK_BATCH:
                break
        return done

    return on_database(work)


def do(action: str, *, actor: str, reason: str | None, **arguments: Any) -> None:
    """Do one action and say what was done."""
    given = {name: value for name, value in arguments.items() if value is not None}
    typer.echo(act(lambda tx: perform(tx, action, given, actor=actor, reason=reason)).message)


def do_whole(action: str, *, actor: str, reason: str | None, **arguments: Any) -> None:
    """Do an action that may end with a part of its work, until it has done all; each part is a commit of its own."""

    async def work(db: Database) -> None:
        given: Mapping[str, Any] | None = arguments
        while given is not None:
            part = functools.partial(perform, name=action, given=given, actor=actor, reason=reason)
            result = await db.run(part)
            typer.echo(result.message)
            given = result.rest

    on_database(work)


def do_each(action: str, ids: Sequence[int], *, actor: str, reason: str | None) -> int:
    """Do an action to each of some, in one transaction: all of them, or none."""

    async def work(tx: Tx) -> int:
        for id in ids:
            await perform(tx, action, {"id": row_id("dead letter", id)}, actor=actor, reason=reason)
        return len(ids)

    return act(work)


def do_all(action: str, filters: Mapping[str, Any], question: str, *, yes: bool, actor: str, reason: str | None) -> int:
    """Do a bulk action in batches, after the question; how many it touched."""
    bulk = find_action(action)
    arguments = read_arguments(bulk, {name: value for name, value in filters.items() if value is not None})
    assert bulk.count is not None
    count = bulk.count

    def batch(limit: int) -> Callable[[Tx], Awaitable[int]]:
        async def work(tx: Tx) -> int:
            return (await bulk.run(tx, arguments.model_copy(update={"limit": limit}), actor, reason)).number

        return work

    return act_in_bulk(lambda tx: count(tx, arguments), batch, question=question, yes=yes)


def echo_rows(rows: Sequence[Any], columns: Sequence[str], as_json: bool, *, empty: str) -> None:
    """Rows as a table of some columns, or as JSON with all of them."""
    if as_json:
        echo_json(rows)
    else:
        echo_table(columns, [[getattr(row, column) for column in columns] for row in rows], empty=empty)


def echo_table(columns: Sequence[str], rows: Sequence[Sequence[Any]], *, empty: str) -> None:
    """A table for people; what is in a cell is never taken for markup."""
    if not rows:
        typer.echo(empty)
        return
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(_cell(value)) for value in row))
    Console(width=None if sys.stdout.isatty() else WIDTH_OF_A_PIPE).print(table)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, datetime):
        return value.isoformat(sep=" ", timespec="seconds")
    return printable(str(value))


def printable(text: str) -> str:
    """Errors come from anywhere: what could move a terminal's cursor is shown as a question mark."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def seconds(value: float | None) -> str:
    """A length of time in words, or a dash."""
    return "-" if value is None else span(value)


def echo_json(value: Any) -> None:
    """JSON for machines; ids and times are text."""
    typer.echo(json.dumps(value, default=_plain, indent=2))


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return value.isoformat() if isinstance(value, datetime) else str(value)
