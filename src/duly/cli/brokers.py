"""Brokers and who listens: check and set up what is configured, move consumers, and the events as a document."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from duly import operate
from duly.brokers import asyncapi, connect
from duly.cli.process import begin, create_source, create_transport, receive_topics
from duly.cli.shell import Actor, AsJson, Reason, act, do_whole, echo_rows
from duly.errors import Invalid, Refused, Unavailable
from duly.messages import declared_events
from duly.runtime.discover import find_app
from duly.settings import Settings

CHECK_SECONDS = 60.0


def register(app: typer.Typer) -> None:
    """Add these commands."""
    groups: dict[str, tuple[str, dict[str, Callable[..., None]]]] = {
        "brokers": ("Brokers that are configured.", {"check": brokers_check, "setup": brokers_setup}),
        "consumers": ("Consumers of events.", {"list": consumers_list, "via": consumers_via}),
    }
    for group, (about, commands) in groups.items():
        family = typer.Typer(help=about, no_args_is_help=True)
        for name, command in commands.items():
            family.command(name)(command)
        app.add_typer(family, name=group)
    app.command("asyncapi")(describe_events)


def brokers_check() -> None:
    """Say whether the brokers can be reached, and keep what they acknowledge."""
    settings = begin()
    find_app(settings.app)  # its events say which topics there are
    found = [(create_transport(settings), settings.broker)] if settings.broker.get_secret_value() else []
    parts: list[tuple[Any, str]] = [(part, connect.shown(url.get_secret_value())) for part, url in found]
    if url := settings.receive.get_secret_value():
        parts.append((create_source(settings), connect.shown(url)))
    if not parts:
        raise Refused("neither DULY_BROKER nor DULY_RECEIVE is set: PostgreSQL is all there is, and enough")
    for part, place in parts:
        asyncio.run(_check(part, place))
        typer.echo(f"{part.name} at {place}: fine")


async def _check(part: Any, place: str) -> None:
    try:
        async with asyncio.timeout(CHECK_SECONDS):
            await part.check()
    except (OSError, TimeoutError) as error:
        raise Unavailable(f"{part.name} at {place} cannot be reached: {type(error).__name__}: {error}") from error
    finally:
        await part.close()


def brokers_setup() -> None:
    """Create the topics, queues or streams that are missing; what is there stays as it is."""
    settings = begin()
    find_app(settings.app)
    wanted = _topics_by_address(settings)
    if not wanted:
        raise Refused("neither DULY_BROKER nor DULY_RECEIVE is set: there is nothing to set up")
    for url, parts in wanted.items():
        made = [sentence for topics, group in parts for sentence in asyncio.run(_setup(url, topics, group))]
        for sentence in made or [f"{connect.broker_name(url)} at {connect.shown(url)}: nothing was missing"]:
            typer.echo(sentence)


async def _setup(url: str, topics: list[str], group: str | None) -> list[str]:
    try:
        async with asyncio.timeout(CHECK_SECONDS):
            return await connect.setup(url, topics=topics, group=group)
    except (OSError, TimeoutError) as error:
        place = connect.shown(url)
        raise Unavailable(f"{place} cannot be reached: {type(error).__name__}: {error}") from error


def _topics_by_address(settings: Settings) -> dict[str, list[tuple[list[str], str | None]]]:
    """What is published there, which no group of ours reads; and what is received, with the group that reads it."""
    wanted: dict[str, list[tuple[list[str], str | None]]] = {}
    if url := settings.broker.get_secret_value():
        wanted[url] = [(sorted({kind.event_topic for kind in declared_events().values()}), None)]
    if url := settings.receive.get_secret_value():
        wanted.setdefault(url, []).append((receive_topics(settings), settings.receive_group))
    return wanted


def consumers_list(as_json: AsJson = False) -> None:
    """List the consumers, and where their events come from."""
    columns = ["name", "patterns", "ordered", "enabled", "via", "via_since", "registered_at"]
    echo_rows(act(operate.list_consumers), columns, as_json, empty="no consumers")


def consumers_via(
    name: Annotated[str, typer.Argument(help="The consumer.")],
    via: Annotated[str, typer.Argument(help="A broker, or - for the relay.")],
    actor: Actor,
    reason: Reason = None,
    deliver: Annotated[
        bool, typer.Option("--deliver", help="Deliver here what is still on its way, however much it is.")
    ] = False,
) -> None:
    """Let a consumer's events come from a broker, or from the relay; none is missed."""
    find_app(Settings().app)  # it may have registered a broker of its own
    do_whole("consumers.via", actor=actor, reason=reason, name=name, via=via, deliver=deliver)


def describe_events(
    check: Annotated[
        Path | None, typer.Option(help="An older document: say what of it the events of today would break.")
    ] = None,
) -> None:
    """Print the events as an AsyncAPI document, or check that they still fit an older one."""
    settings = begin()
    find_app(settings.app)
    document = asyncapi.describe(declared_events())
    if check is None:
        typer.echo(asyncapi.render(document), nl=False)
        return
    breaks = asyncapi.find_breaks(_read(check), document)
    for sentence in breaks:
        typer.echo(sentence)
    if breaks:
        raise typer.Exit(1)
    typer.echo("compatible: whoever listens by that document understands the events of today")


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (ValueError, RecursionError):
        raise Invalid(f"{path} is no JSON") from None
    if not isinstance(found, dict):
        raise Invalid(f"{path} is no AsyncAPI document")
    return found
