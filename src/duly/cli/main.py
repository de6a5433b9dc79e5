"""The entry point: every command, and errors as one sentence."""

from __future__ import annotations

import asyncio
import signal
import sys
from importlib.metadata import version
from typing import Annotated

import asyncpg
import psycopg
import typer
from alembic.util import CommandError
from pydantic import ValidationError
from sqlalchemy.exc import DBAPIError

from duly.cli import brokers, catch, database, operate, parts, sandbox, webhooks
from duly.db import is_disconnect
from duly.errors import DulyError

app = typer.Typer(
    name="duly",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for family in (parts, database, operate, brokers, webhooks, sandbox, catch):
    family.register(app)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"duly {version('duly')}")
        raise typer.Exit


@app.callback()
def duly(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Work that is due, duly done: outbox, inbox, jobs and schedules on PostgreSQL."""


def run() -> None:
    """Run the command line; what is expected to go wrong is a sentence, never a traceback."""
    try:
        app(prog_name="duly")
    except asyncio.CancelledError:  # a single cycle that was told to stop; what it held is given back
        sys.exit(128 + signal.SIGTERM)
    except Exception as error:
        sentence = explain(error)
        if sentence is None:
            raise
        typer.echo(f"duly: {sentence}", err=True)
        sys.exit(1)


def explain(error: BaseException) -> str | None:
    """The sentence for an error that an operator can do something about; None for a mistake of ours."""
    if isinstance(error, DulyError):
        return str(error)
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        name = str(first["loc"][0]) if first["loc"] else ""
        name = name if name.isupper() else f"DULY_{name.upper()}"
        return f"the setting {name} cannot be used: {first['msg']}"
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.strerror}: {error.filename}"
    if isinstance(error, CommandError):
        return f"the migration cannot be done: {_first_line(error)}"
    if is_disconnect(error):
        return f"the database cannot be reached: {_first_line(error)}"
    if isinstance(error, asyncpg.PostgresError | psycopg.Error | DBAPIError):
        return f"PostgreSQL refused: {_first_line(error)}"
    return None


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].strip() if lines else type(error).__name__


if __name__ == "__main__":
    run()
