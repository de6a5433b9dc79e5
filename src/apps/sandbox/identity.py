"""A provider of identity checks that speaks the protocol of docs/howto/kyc.md, with a page for people, and calls back.

``PUT /sandbox/kyc/mode`` says how it behaves. It sees what a person types into its page, as a real one would, and
forgets it at once: the caller learns an opaque reference. With ``leaks`` it tells everything, as a bad one would.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from dataclasses import dataclass, field
from enum import StrEnum
from html import escape
from typing import Annotated, Any
from urllib.parse import parse_qs, urlsplit
from uuid import uuid4

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from pydantic import BaseModel, ConfigDict, Field

from apps.sandbox.bank import LOCAL, call, read_time

PATH = "/sandbox/kyc"
SECRET = "sandbox-kyc-secret-that-everybody-knows"  # noqa: S105 - of development, where everybody may know it
MOST_SESSIONS = 10_000
MOST_FORM_BYTES = 65_536
PAGE_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>
<main><h1>{title}</h1>{body}</main></html>
"""
FORM = """<p>This provider is part of the sandbox: it believes everything, and keeps nothing.</p>
<form method="post">
<p><label>Full name <input name="fullName" autocomplete="off" maxlength="200"></label></p>
<p><label>Date of birth <input name="birthDate" autocomplete="off" maxlength="20"></label></p>
<p><label>Number of the document <input name="documentNumber" autocomplete="off" maxlength="40"></label></p>
<p><button name="outcome" value="APPROVED">This is me</button>
<button name="outcome" value="REJECTED">This is somebody else</button></p>
</form>"""


class Behaviour(StrEnum):
    """How it answers, and what it calls to say."""

    NORMAL = "normal"
    LOSE = "lose"  # makes the page, and its answer is lost
    BUSY = "busy"  # 503, no page
    GARBLE = "garble"  # makes the page, and an answer that nobody can read
    SILENT = "silent"  # never calls
    TWICE = "twice"  # the same call twice
    DISORDER = "disorder"  # says how it ended, and then that it is in progress
    WAVER = "waver"  # says one thing, and then the opposite


class Asked(BaseModel):
    """What is asked for."""

    model_config = ConfigDict(extra="forbid")

    client_ref: Annotated[str, Field(alias="clientRef", min_length=1, max_length=200)]
    callback_url: Annotated[str, Field(alias="callbackUrl", max_length=2_000)]
    expires_in_seconds: Annotated[int, Field(alias="expiresInSeconds", ge=1)]


class Orders(BaseModel):
    """How to behave from now on."""

    model_config = ConfigDict(extra="forbid")

    behaviour: Behaviour = Behaviour.NORMAL
    leaks: bool = False
    forgets_keys: bool = False  # a bad provider: the same key makes a second session


@dataclass
class Check:
    """What it has of one key."""

    reference: str
    asked: Asked
    outcome: str | None = None
    evidence: str | None = None
    calls: list[str] = field(default_factory=list)


class Provider:
    """What it was told, and the checks it has; all in memory."""

    def __init__(self) -> None:
        self.orders = Orders()
        self.checks: OrderedDict[str, Check] = OrderedDict()
        self.log: list[str] = []

    def take(self, asked: Asked, key: str, base: str) -> Response:
        """A request for a page."""
        self.log.append(key)
        del self.log[:-MOST_SESSIONS]
        if self.orders.behaviour is Behaviour.BUSY:
            return JSONResponse({"code": "busy"}, 503)
        known = None if self.orders.forgets_keys else self._find_key(key)
        check = known or self._make(asked)
        if self.orders.behaviour is Behaviour.LOSE:
            return PlainTextResponse("", 500)
        if self.orders.behaviour is Behaviour.GARBLE:
            return PlainTextResponse("<html>everything is fine</html>")
        page = f"{base}{PATH}/hosted/{check.reference}"
        return JSONResponse({"sessionRef": check.reference, "hostedUrl": page, "status": "PENDING"}, 201)

    def _find_key(self, key: str) -> Check | None:
        return next((one for one in self.checks.values() if one.asked.client_ref == key), None)

    def _make(self, asked: Asked) -> Check:
        check = Check(f"ses_{uuid4().hex}", asked)
        self.checks[check.reference] = check
        while len(self.checks) > MOST_SESSIONS:
            self.checks.popitem(last=False)
        return check

    async def decide(self, check: Check, outcome: str, typed: dict[str, str], db: Any) -> None:
        """The person has answered: tell whoever asked."""
        if check.outcome is None:
            check.outcome, check.evidence = outcome, f"ev_{uuid4().hex}"
        behaviour = self.orders.behaviour
        if behaviour is Behaviour.SILENT or urlsplit(check.asked.callback_url).hostname not in LOCAL:
            return
        opposite = "REJECTED" if check.outcome == "APPROVED" else "APPROVED"
        then = {
            Behaviour.TWICE: [check.outcome], Behaviour.DISORDER: ["IN_PROGRESS"], Behaviour.WAVER: [opposite],
        }  # fmt: skip
        event_id = str(uuid4())
        for status in [check.outcome, *then.get(behaviour, [])]:
            body = describe_call(check, status, event_id=event_id, told=typed if self.orders.leaks else {})
            event_id = event_id if behaviour is Behaviour.TWICE else str(uuid4())
            if await call(check.asked.callback_url, body, timestamp=await read_time(db), secret=SECRET):
                check.calls.append(status)


def create_router(provider: Provider | None = None) -> APIRouter:
    """The routes of a provider of its own."""
    provider = provider or Provider()
    router = APIRouter(prefix=PATH, include_in_schema=False)

    @router.post("/sessions")
    async def take(asked: Asked, request: Request) -> Response:
        key = request.headers.get("idempotency-key", asked.client_ref)
        return provider.take(asked, key, str(request.base_url).rstrip("/"))

    @router.get("/hosted/{reference}")
    async def show(reference: str) -> Response:
        check = provider.checks.get(reference)
        if check is None:
            return _page(404, "There is no such check", "")
        if check.outcome is not None:
            return _page(200, "Thank you", f"<p>This check is {escape(check.outcome)}.</p>")
        return _page(200, "Show who you are", FORM)

    @router.post("/hosted/{reference}")
    async def answer(reference: str, request: Request) -> Response:
        check = provider.checks.get(reference)
        body = await request.body()
        if check is None or len(body) > MOST_FORM_BYTES:
            return _page(404, "There is no such check", "")
        form = parse_qs(body.decode("utf-8", "replace"), max_num_fields=50)
        typed = {name: given[-1] for name, given in form.items()}
        outcome = "REJECTED" if typed.pop("outcome", "") == "REJECTED" else "APPROVED"
        async with asyncio.timeout(60):
            await provider.decide(check, outcome, typed, getattr(request.app.state, "db", None))
        return _page(200, "Thank you", f"<p>This check is {escape(check.outcome or outcome)}.</p>")

    @router.put("/mode")
    async def order(orders: Orders) -> dict[str, Any]:
        provider.orders = orders
        return orders.model_dump()

    return router


def describe_call(check: Check, status: str, *, event_id: str, told: dict[str, str]) -> bytes:
    """The body of a callback; ``told`` is what a provider should keep to itself."""
    said: dict[str, Any] = {
        "providerEventId": event_id, "clientRef": check.asked.client_ref, "sessionRef": check.reference,
        "status": status,
    }  # fmt: skip
    if status in ("APPROVED", "REJECTED"):
        said["evidenceRef"] = check.evidence
    return json.dumps(said | ({"person": told} if told else {})).encode()


def _page(status: int, title: str, body: str) -> Response:
    return HTMLResponse(PAGE.format(title=escape(title), body=body), status, headers=PAGE_HEADERS)
