"""``duly token`` and ``duly clock``: tools of a sandbox, refused outside development."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Annotated, Any, LiteralString

import psycopg
import typer

from duly.auth.issuer import TTL_SECONDS, Issuer
from duly.cli.home import database_address
from duly.cli.process import begin
from duly.db import normal_dsn
from duly.errors import Invalid, Refused
from duly.runtime.migrate import check_schema
from duly.testing import BusinessClock, install_business_clock

clock = typer.Typer(help="Move the database's clock, in a sandbox.", no_args_is_help=True)
UNITS = {"w": "weeks", "d": "days", "h": "hours", "m": "minutes", "s": "seconds"}
WAKE_EVERYBODY = "SELECT pg_notify('duly', channel) FROM unnest(ARRAY['jobs', 'outbox', 'schedules']) AS channel"
FIND_CLOCK = "SELECT to_regclass('duly.business_clock') IS NOT NULL"
READ_TIME = "SELECT duly.now(), duly.now() - statement_timestamp()"
READ_FROZEN = "SELECT frozen_at IS NOT NULL FROM duly.business_clock"


def register(app: typer.Typer) -> None:
    """Add these commands."""
    app.command()(token)
    app.add_typer(clock, name="clock")


def token(
    sub: Annotated[str, typer.Option(help="Who the token is for.")],
    scope: Annotated[list[str] | None, typer.Option(help="Scopes, separated by spaces or repeated.")] = None,
    role: Annotated[list[str] | None, typer.Option(help="A role; repeat it for more.")] = None,
    ttl: Annotated[int, typer.Option(help="Seconds until it expires.")] = TTL_SECONDS,
    aud: Annotated[str | None, typer.Option(help="The audience; DULY_OIDC_AUDIENCE if left out.")] = None,
) -> None:
    """Print a token of the development issuer."""
    issuer = Issuer.open(begin())
    scopes = " ".join(scope or []).split()
    typer.echo(issuer.sign(sub, scopes=scopes, roles=role or [], audience=aud, ttl_seconds=ttl))


@clock.command()
def show() -> None:
    """What time the database thinks it is."""
    with _sandbox(install=False):
        pass


@clock.command()
def freeze(at: Annotated[str, typer.Argument(help="An instant with its offset; now if left out.")] = "") -> None:
    """Stop the clock."""
    instant = _instant(at) if at else None
    with _sandbox() as moved:
        moved.freeze(instant or moved.now())


@clock.command()
def advance(by: Annotated[str, typer.Argument(help="How far, as in 15m, 72h, 1d12h.")]) -> None:
    """Move the clock forward; whatever becomes due runs."""
    delta = _length(by)
    with _sandbox() as moved:
        moved.advance(seconds=delta.total_seconds())


@clock.command()
def resume() -> None:
    """Back to the real time."""
    with _sandbox() as moved:
        moved.resume()


@contextmanager
def _sandbox(*, install: bool = True) -> Iterator[BusinessClock]:
    """The clock of a development database; afterwards every duty is woken, and the time is printed."""
    settings = begin()
    if settings.env != "development":
        raise Refused("a database's clock is moved in development only: unset DULY_ENV if this is a sandbox")
    with database_address(settings) as dsn:
        check_schema(dsn)
        with psycopg.connect(normal_dsn(dsn), autocommit=True) as connection:
            if install and not _one(connection, FIND_CLOCK)[0]:
                install_business_clock(connection)
            yield BusinessClock(normal_dsn(dsn))
            if install:
                connection.execute(WAKE_EVERYBODY)
            typer.echo(_describe(connection))


def _describe(connection: psycopg.Connection[Any]) -> str:
    now, shift = _one(connection, READ_TIME)
    frozen = _one(connection, FIND_CLOCK)[0] and _one(connection, READ_FROZEN)[0]
    state = "frozen" if frozen else f"shifted by {shift}" if shift else "the real time"
    return f"{now.isoformat()} ({state})"


def _one(connection: psycopg.Connection[Any], statement: LiteralString) -> Any:
    return connection.execute(statement).fetchone()


def _instant(text: str) -> datetime:
    try:
        instant = datetime.fromisoformat(text)
    except ValueError:
        raise Invalid(f"{text!r} is not an instant: write it as 2026-03-01T09:00:00+01:00") from None
    if instant.tzinfo is None:
        raise Invalid(f"{text!r} does not say its offset from UTC: write it as {text}Z or {text}+01:00")
    return instant


def _length(text: str) -> timedelta:
    if not re.fullmatch(r"(\d{1,6}[wdhms])+", text):
        raise Invalid(f"{text!r} is not a length of time: write it as 15m, 72h or 1d12h")
    parts = re.findall(r"(\d+)([wdhms])", text)
    return sum((timedelta(**{UNITS[unit]: int(count)}) for count, unit in parts), timedelta())
