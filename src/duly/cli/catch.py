"""``duly catch``: a receiver for development that shows what arrives, and fails, stalls or refuses when told to."""

from __future__ import annotations

import asyncio
import json
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any

import typer

from duly.cli.process import begin, bind, run_async
from duly.cli.shell import printable
from duly.runtime.supervisor import create_server, stop_on_signals
from duly.settings import Settings
from duly.webhooks.signing import is_plain, is_standard

MOST_BYTES = 1_048_576
MOST_KEPT = 1_000
MOST_STALL_SECONDS = 3_600.0
SHOWN_CHARACTERS = 2_000
Send = Callable[[dict[str, Any]], Awaitable[None]]


@dataclass(frozen=True)
class Manner:
    """How everything is answered."""

    status: int = 200
    stall_seconds: float = 0.0
    refuse: bool = False

    @property
    def answer(self) -> int:
        """410 tells a sender to stop; duly disables the subscription."""
        return 410 if self.refuse else self.status


@dataclass(frozen=True)
class Caught:
    """One request that arrived."""

    headers: dict[str, str]
    body: bytes = field(repr=False)
    verified: bool | None  # None: there was no secret to verify with

    @property
    def words(self) -> str:
        """One line for a person, and the body under it."""
        verdict = {None: "unchecked", True: "verified", False: "UNVERIFIED"}[self.verified]
        kind = self.headers.get("x-event-type", "?")
        event = self.headers.get("x-event-id", self.headers.get("webhook-id", "?"))
        return printable(f"{verdict:<10} {kind}  event {event}  {len(self.body)} bytes")


class Catcher:
    """An ASGI application that keeps the last thousand requests."""

    def __init__(
        self,
        *,
        secrets: Sequence[str] = (),
        manner: Manner | None = None,
        show: Callable[[Caught], None] = lambda _caught: None,
    ) -> None:
        self.caught: deque[Caught] = deque(maxlen=MOST_KEPT)
        self.manner = manner or Manner()
        self._secrets = list(secrets)
        self._show = show

    async def __call__(
        self, scope: dict[str, Any], receive: Callable[[], Awaitable[dict[str, Any]]], send: Send
    ) -> None:
        """ASGI."""
        if scope["type"] == "lifespan":
            for kind in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{kind}.complete"})
            return
        body = bytearray()
        more = True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > MOST_BYTES:
                await _answer(send, 413)
                return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        caught = Caught(headers, bytes(body), self._verify(headers, bytes(body)))
        self.caught.append(caught)
        self._show(caught)
        await asyncio.sleep(self.manner.stall_seconds)
        await _answer(send, self.manner.answer)

    def _verify(self, headers: dict[str, str], body: bytes) -> bool | None:
        """By the Standard Webhooks headers where there are some, else by X-Signature."""
        if not self._secrets:
            return None
        if "webhook-signature" in headers:
            return is_standard(
                self._secrets, headers["webhook-signature"], id=headers.get("webhook-id", ""),
                timestamp=headers.get("webhook-timestamp", ""), body=body,
            )  # fmt: skip
        return is_plain(self._secrets, headers.get("x-signature", ""), body)


async def _answer(send: Send, status: int) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


def register(app: typer.Typer) -> None:
    """Add this command."""
    app.command()(catch)


def catch(
    port: Annotated[int, typer.Option(min=0, max=65535, help="Where to listen; 0 takes a free one.")] = 9000,
    secret: Annotated[
        list[str] | None, typer.Option(help="Verify signatures; repeat it.", envvar="DULY_CATCH_SECRET")
    ] = None,
    status: Annotated[int, typer.Option(min=200, max=599, help="Answer with this status.")] = 200,
    stall: Annotated[float, typer.Option(min=0, max=MOST_STALL_SECONDS, help="Seconds before an answer.")] = 0.0,
    refuse: Annotated[bool, typer.Option("--refuse", help="Answer 410 Gone.")] = False,
    headers: Annotated[bool, typer.Option("--headers", help="Show the headers, too.")] = False,
) -> None:
    """Show every webhook that arrives, and whether its signature is right."""
    settings = begin(port=port, log_level="warning")
    show = partial(_print, with_headers=headers)
    catcher = Catcher(secrets=secret or [], manner=Manner(status, stall, refuse), show=show)
    with bind(settings) as listener:
        host, taken = listener.getsockname()[:2]
        typer.echo(f"listening on http://{host}:{taken}/, answering {catcher.manner.answer}; Ctrl-C stops it")
        run_async(_serve(catcher, settings, listener))


def _print(caught: Caught, *, with_headers: bool) -> None:
    typer.echo(caught.words)
    for name, value in caught.headers.items() if with_headers else ():
        typer.echo(f"    {printable(f'{name}: {value}')}")
    try:
        shown = json.dumps(json.loads(caught.body), indent=2, ensure_ascii=False)
    except (ValueError, RecursionError):
        shown = caught.body.decode("utf-8", "replace")
    typer.echo("\n".join(f"    {printable(line)}" for line in shown[:SHOWN_CHARACTERS].splitlines()))
    if len(shown) > SHOWN_CHARACTERS:
        typer.echo(f"    ... and {len(shown) - SHOWN_CHARACTERS} characters more")


async def _serve(catcher: Catcher, settings: Settings, listener: socket.socket) -> None:
    server = create_server(catcher, settings)
    stop = asyncio.Event()
    with stop_on_signals(stop):
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        await stop.wait()
        server.should_exit = True
        server.force_exit = True  # whoever is being stalled is let go
        await serving
