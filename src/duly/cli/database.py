"""``duly migrate`` and ``duly doctor``: the state of the database."""

from __future__ import annotations

from typing import Annotated

import typer

from duly.app import Duly, Migrations
from duly.cli.home import database_address
from duly.cli.process import begin, open_database, run_async
from duly.db import safe_dsn
from duly.errors import Refused
from duly.runtime import preflight
from duly.runtime.discover import find_app
from duly.runtime.migrate import ENGINE_MIGRATIONS, downgrade
from duly.runtime.migrate import migrate as upgrade
from duly.runtime.preflight import Findings
from duly.settings import Settings


def register(app: typer.Typer) -> None:
    """Add these commands."""
    app.command()(migrate)
    app.command()(doctor)


def migrate(
    to: Annotated[str, typer.Option(help="The revision to go to; the newest, or with --down one back.")] = "",
    down: Annotated[bool, typer.Option("--down", help="Go back. What newer revisions added is dropped.")] = False,
    app: Annotated[str | None, typer.Option(help="The application (DULY_APP).")] = None,
    own: Annotated[bool, typer.Option("--own", help="With --to or --down: the application's schema.")] = False,
) -> None:
    """Bring the database to what this code was written for: the engine's schema, then the application's."""
    settings = begin(app=app)
    with database_address(settings) as dsn:
        for target in _targets(find_app(settings.app), everything=not (to or down), own=own):
            (downgrade if down else upgrade)(
                dsn, to or ("-1" if down else "head"), directory=target.directory, table=target.table
            )
    typer.echo(
        f"migrated {'down' if down else 'up'} to {to or ('one revision back' if down else 'the newest revision')}"
    )


def _targets(app: Duly, *, everything: bool, own: bool) -> list[Migrations]:
    if own and not app.migrations:
        raise Refused("this application has no schema of its own: leave --own out")
    engine = [Migrations(ENGINE_MIGRATIONS, "schema_version")]
    return engine + app.migrations if everything else (app.migrations if own else engine)


def doctor(app: Annotated[str | None, typer.Option(help="The application (DULY_APP).")] = None) -> None:
    """Look at the database and the application, and say what is wrong."""
    settings = begin(app=app)
    with database_address(settings) as dsn:
        found = run_async(_examine(dsn, settings))
        typer.echo(f"database: {safe_dsn(dsn) or 'from the PG* variables'}")
    if found.server is not None:
        typer.echo(f"server: PostgreSQL {found.server.version}")
    known = find_app(settings.app)
    typer.echo(f"application: {len(known.handlers)} handlers, {len(known.routers)} routers")
    for warning in found.warnings:
        typer.echo(f"warning: {warning}")
    for refusal in found.refusals:
        typer.echo(f"refused: {refusal}", err=True)
    if found.refusals:
        raise typer.Exit(1)
    typer.echo("all is well" if not found.warnings else "it will run")


async def _examine(dsn: str, settings: Settings) -> Findings:
    async with open_database(dsn, settings) as db:
        return await preflight.examine(db, find_app(settings.app))
