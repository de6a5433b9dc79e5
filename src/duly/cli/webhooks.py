"""``duly webhooks``: subscriptions, their deliveries, and the secrets of providers."""

from __future__ import annotations

import sys
from dataclasses import asdict
from datetime import datetime
from typing import Annotated, Any
from uuid import UUID

import typer

from duly.cli.shell import Actor, AsJson, Limit, Reason, Yes, act, echo_json, echo_rows, on_database
from duly.db import Database, Tx
from duly.errors import Invalid
from duly.operate.actions import Result, perform
from duly.settings import Settings
from duly.webhooks import deliveries as log
from duly.webhooks import subscriptions
from duly.webhooks.sealing import Keyring

webhooks = typer.Typer(help="Webhook subscriptions, deliveries, and secrets of providers.", no_args_is_help=True)
Id = Annotated[UUID, typer.Argument(help="The subscription's id.")]
SecretFromInput = Annotated[
    bool, typer.Option("--secret-stdin", help="Read the secret from standard input; else one is made, and shown once.")
]
OverlapHours = Annotated[float, typer.Option(help="How long the old secret stays valid.")]
COLUMNS = ("id", "status", "url", "patterns", "failures", "owner")
DELIVERY_COLUMNS = ("number", "id", "event_type", "status", "attempts", "last_http_status", "last_error", "created_at")
RESEAL_ROUNDS = 10_000
REDELIVER_ROUNDS = 1_000


def register(app: typer.Typer) -> None:
    """Add these commands."""
    app.add_typer(webhooks, name="webhooks")


@webhooks.command("list")
def list_(limit: Limit = 100, as_json: AsJson = False) -> None:
    """Who wants which events, and how that goes."""
    found = act(lambda tx: subscriptions.list_subscriptions(tx, limit=limit))
    echo_rows(found, COLUMNS, as_json, empty="there are no subscriptions")


@webhooks.command()
def show(id: Id) -> None:
    """One subscription, and how many deliveries it has of each status."""

    async def work(tx: Tx) -> dict[str, Any]:
        found = await subscriptions.find_subscription(tx, id)
        counts = await log.count_deliveries(tx, id)
        return asdict(found) | {"deliveries": {status: str(count) for status, count in counts.items()}}

    echo_json(act(work))


@webhooks.command()
def add(
    url: Annotated[str, typer.Argument(help="Where to send events.")],
    event: Annotated[list[str], typer.Option(help="A type or topic, with * as wildcard; repeat it for more.")],
    actor: Actor,
    owner: Annotated[str, typer.Option(help="Whose it is: a caller as the API knows it.")] = "operator",
    description: Annotated[str, typer.Option(help="What it is for.")] = "",
    max_in_flight: Annotated[int, typer.Option(help="How many at once.")] = 5,
    timeout: Annotated[int, typer.Option(help="Seconds for an answer.")] = 15,
    secret_stdin: SecretFromInput = False,
    reason: Reason = None,
) -> None:
    """Subscribe a URL to events."""
    _do(
        "webhooks.add", actor=actor, reason=reason, url=url, events=event, owner=owner, description=description,
        max_in_flight=max_in_flight, timeout_seconds=timeout, secret=_read_secret(secret_stdin),
    )  # fmt: skip


@webhooks.command()
def edit(
    id: Id,
    actor: Actor,
    url: Annotated[str | None, typer.Option(help="Where to send events.")] = None,
    event: Annotated[list[str] | None, typer.Option(help="Which events; all of them anew.")] = None,
    description: Annotated[str | None, typer.Option(help="What it is for.")] = None,
    max_in_flight: Annotated[int | None, typer.Option(help="How many at once.")] = None,
    timeout: Annotated[int | None, typer.Option(help="Seconds for an answer.")] = None,
    reason: Reason = None,
) -> None:
    """Change what is given."""
    _do(
        "webhooks.edit", actor=actor, reason=reason, id=id, url=url, events=event or None, description=description,
        max_in_flight=max_in_flight, timeout_seconds=timeout,
    )  # fmt: skip


@webhooks.command()
def rotate(
    id: Id, actor: Actor, overlap_hours: OverlapHours = 24, secret_stdin: SecretFromInput = False, reason: Reason = None
) -> None:
    """Sign with a new secret, and for a while with the old one, too."""
    secret = _read_secret(secret_stdin)
    _do("webhooks.rotate", actor=actor, reason=reason, id=id, secret=secret, overlap_hours=overlap_hours)


@webhooks.command()
def pause(id: Id, actor: Actor, reason: Reason = None) -> None:
    """Keep what comes, and send it later."""
    _do("webhooks.pause", actor=actor, reason=reason, id=id)


@webhooks.command()
def resume(id: Id, actor: Actor, reason: Reason = None) -> None:
    """Send again, what was kept first."""
    _do("webhooks.resume", actor=actor, reason=reason, id=id)


@webhooks.command()
def disable(id: Id, actor: Actor, reason: Reason = None) -> None:
    """Send nothing, because something is wrong; what comes is kept."""
    _do("webhooks.disable", actor=actor, reason=reason, id=id)


@webhooks.command()
def delete(id: Id, actor: Actor, reason: Reason = None, yes: Yes = False) -> None:
    """Send nothing any more, and forget its secrets."""
    if not yes and not typer.confirm(f"delete subscription {id}?"):
        raise typer.Abort
    _do("webhooks.delete", actor=actor, reason=reason, id=id)


@webhooks.command()
def deliveries(
    subscription: Annotated[UUID | None, typer.Option(help="Of this subscription only.")] = None,
    status: Annotated[str | None, typer.Option(help="WAITING, QUEUED, RETRYING, DELIVERED, ...")] = None,
    limit: Limit = 50,
    as_json: AsJson = False,
) -> None:
    """What was sent, or waits to be; the newest first."""
    wanted = status.upper() if status else None
    found = act(lambda tx: log.list_deliveries(tx, subscription_id=subscription, status=wanted, limit=limit))
    echo_rows(found, DELIVERY_COLUMNS, as_json, empty="there are no deliveries")


@webhooks.command()
def delivery(id: Annotated[UUID, typer.Argument(help="The delivery's id.")]) -> None:
    """One delivery, with every attempt."""
    found = act(lambda tx: log.find_delivery(tx, id))
    body = found.body.decode() if found.body is not None else None
    echo_json(asdict(found.delivery) | {"log": found.attempts, "body": body})


@webhooks.command()
def redeliver(
    actor: Actor,
    delivery: Annotated[UUID | None, typer.Argument(help="A delivery's id.")] = None,
    subscription: Annotated[UUID | None, typer.Option(help="All of this subscription, in a time.")] = None,
    since: Annotated[str, typer.Option(help="From this instant on, as 2026-03-01T09:00:00Z.")] = "",
    until: Annotated[str, typer.Option(help="To this instant; now if left out.")] = "",
    everything: Annotated[bool, typer.Option("--all", help="Also what was delivered.")] = False,
    reason: Reason = None,
) -> None:
    """Send one again, or what failed in a time."""
    if (delivery is None) == (subscription is None):
        raise Invalid("give the id of a delivery, or --subscription with --since")
    if delivery is not None:
        _do("webhooks.redeliver", actor=actor, reason=reason, id=delivery)
        return
    given = {"id": subscription, "since": _instant(since), "until": _instant(until or "9999-01-01T00:00:00Z")}

    async def work(db: Database) -> int:
        done, after = 0, 0
        for _ in range(REDELIVER_ROUNDS):

            async def batch(tx: Tx, after: int = after) -> Result:
                arguments = {**given, "everything": everything, "after": after}
                return await perform(tx, "webhooks.redeliver-range", arguments, actor=actor, reason=reason)

            result = await db.run(batch)
            done += result.number
            if result.rest is None:
                break
            after = int(result.rest["after"])
        return done

    typer.echo(f"sent again: {on_database(work)}")


@webhooks.command("test")
def send_test(id: Id, actor: Actor, reason: Reason = None) -> None:
    """Deliver an event of the type webhook.test."""
    _do("webhooks.test", actor=actor, reason=reason, id=id)


@webhooks.command()
def reseal() -> None:
    """Encrypt every secret with the newest key of DULY_ENCRYPTION_KEYS; then the older ones can go."""
    keyring = Keyring.open(Settings())

    async def work(db: Database) -> int:
        done = 0
        for _ in range(RESEAL_ROUNDS):
            count = await db.run(lambda tx: subscriptions.reseal_secrets(tx, keyring))
            done += count
            if not count:
                break
        return done

    typer.echo(f"encrypted anew with {keyring.newest}: {on_database(work)}")


@webhooks.command("provider-secret")
def provider_secret(
    provider: Annotated[str, typer.Argument(help="The provider, as its receiver names it.")],
    actor: Actor,
    overlap_hours: OverlapHours = 24,
    secret_stdin: SecretFromInput = False,
    reason: Reason = None,
) -> None:
    """The secret that a provider signs with, from now on; the last one stays valid for the overlap."""
    _do(
        "webhooks.provider-secret", actor=actor, reason=reason, provider=provider, secret=_read_secret(secret_stdin),
        overlap_hours=overlap_hours,
    )  # fmt: skip


def _do(action: str, *, actor: str, reason: str | None, **arguments: Any) -> None:
    """Do an action, say what was done, and show this once what it made."""
    given = {name: value for name, value in arguments.items() if value is not None}
    result = act(lambda tx: perform(tx, action, given, actor=actor, reason=reason))
    typer.echo(result.message)
    if result.secret:
        typer.echo(f"secret, shown once: {result.secret}")


def _read_secret(wanted: bool) -> str | None:
    """From standard input: what is on a command line is in everybody's list of processes."""
    return sys.stdin.readline().strip() if wanted else None


def _instant(text: str) -> datetime:
    try:
        instant = datetime.fromisoformat(text)
    except ValueError:
        raise Invalid(f"{text!r} is not an instant: write it as 2026-03-01T09:00:00+01:00") from None
    if instant.tzinfo is None:
        raise Invalid(f"{text!r} does not say its offset from UTC: write it as {text}Z")
    return instant
