"""The routes of identity checks, where providers call, and where a person begins."""

# no "from __future__ import annotations": the routes are made in a function, and FastAPI finds names of modules only

from collections.abc import Mapping
from datetime import datetime
from html import escape
from typing import Annotated, Any
from uuid import UUID

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse
from pydantic import BaseModel, ConfigDict, SecretStr, StringConstraints, model_validator
from pydantic.alias_generators import to_camel

from apps.finance.kyc import service
from apps.finance.kyc.gateways import (
    NoProvider,
    Opening,
    Providers,
    find_callback_url,
    find_hosted_url,
)
from apps.finance.kyc.model import SAID, USER_ID, Callback, Handled, HistoryLine, Session, Status, is_opaque
from apps.finance.kyc.store import Unmatched
from apps.shared.text import PageSize
from duly.auth.http import require
from duly.auth.principals import Principal
from duly.db import Database
from duly.errors import Fault, Invalid, NotFound
from duly.failpoints import failpoint
from duly.http import Received, Receiver, RequestTx, Router
from duly.ids import parse_uuid
from duly.settings import Settings
from duly.webhooks.receive import Scheme

SCOPE, ROLE = "compliance:kyc", "KYC_AGENT"
Agent = Annotated[Principal, require(SCOPE, ROLE)]
SIGNED = Scheme.plain(signature_header="X-Provider-Signature", timestamp_header="X-Provider-Timestamp")
"""Hex of HMAC-SHA256 over ``timestamp.body``."""
BODY_BYTES = 65_536
OWNER = "kyc."
"""Before a provider's name where the engine keeps its secrets and events: a bank of the same name is somebody else."""
PAGE_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
PAGE = '<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><h1>{title}</h1><p>{text}</p></html>'
CALLBACK_BODY = {
    "required": True,
    "content": {
        "application/json": {
            "schema": {
                "type": "object",
                "required": ["providerEventId", "status"],
                "properties": {
                    "providerEventId": {"type": "string", "minLength": 1, "maxLength": 255},
                    "clientRef": {"type": "string", "description": "The session's id, which we gave it."},
                    "sessionRef": {"type": "string", "description": "The provider's own name of the session."},
                    "status": {"type": "string", "description": "IN_PROGRESS, APPROVED, REJECTED or EXPIRED."},
                    "evidenceRef": {"type": "string", "description": "Opaque; of APPROVED and REJECTED."},
                },
            }
        }
    },
}


def _keep_out_of_caches(response: Response) -> None:
    """Who is checked, and where that begins, is for whoever asked."""
    response.headers["Cache-Control"] = "no-store"


UNCACHED = [Depends(_keep_out_of_caches)]


class NoSuchProvider(NotFound):
    """No provider of this name is plugged in."""


class BadCallback(Invalid):
    """The callback does not say what happened to which session."""


class _Body(BaseModel):
    """What an agent sends. A member that nobody knows is refused without its name: that may be a person's."""

    model_config = ConfigDict(extra="forbid", alias_generator=to_camel)

    @model_validator(mode="before")
    @classmethod
    def _know_members(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.keys() - {field.alias for field in cls.model_fields.values()}:
            raise ValueError("there are members here that nobody knows: leave them out")
        return given


class _View(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True)


UserId = Annotated[str, StringConstraints(pattern=USER_ID)]
ProviderId = Annotated[str, StringConstraints(pattern="^[A-Za-z][A-Za-z0-9_.-]{0,79}$")]


class NewSession(_Body):
    """Who is to be checked: an opaque id of yours, such as a UUID or ``user-42``; never an address, a name or a number
    of a document.
    """

    user_id: UserId
    provider_id: ProviderId | None = None


class SessionView(_View):
    """A session. Nothing else is known of the person here."""

    session_id: UUID
    status: Status
    user_id: str
    provider_id: str
    evidence_ref: str | None
    version: int
    created_at: datetime
    expires_at: datetime
    updated_at: datetime


class CreatedSession(SessionView):
    """A new session; ``hostedUrl`` is where the person goes. It is the credential, and is shown this once."""

    hosted_url: str


class HistoryView(_View):
    """One thing that happened; a line that changes no status is something that was noted."""

    number: int
    at: datetime
    from_status: Status | None
    to_status: Status
    cause: str


class SessionDetail(SessionView):
    """A session, and what happened to it."""

    history: list[HistoryView]


class SessionPage(_View):
    """The newest first; ``next`` is the ``before`` of the page after this one."""

    items: list[SessionView]
    next: UUID | None


class UnmatchedView(_View):
    """A callback that fits no session, or that cannot be applied; without the provider's own words."""

    id: UUID
    provider: str
    client_ref: UUID | None
    session_ref: str | None
    status: str | None
    evidence_ref: str | None
    problem: str
    session_id: UUID | None
    received_at: datetime
    dismissed_at: datetime | None
    dismissed_by: str | None
    handled: str | None


class UnmatchedPage(_View):
    """The newest first; ``next`` is the ``before`` of the page after this one."""

    items: list[UnmatchedView]
    next: UUID | None


class Dismissal(_Body):
    """What was done about a callback."""

    handled: Handled


class CallbackView(_View):
    """What became of a callback: applied, ignored (it is old), kept (for a person), or duplicate."""

    status: str


class Receivers:
    """A receiver for each provider; in development, some have a secret that everybody knows."""

    def __init__(self, development_secrets: Mapping[str, str]) -> None:
        self._secrets = development_secrets
        self._made: dict[tuple[str, str, str], Receiver] = {}

    def find(self, provider: str, settings: Settings) -> Receiver:
        """That of a provider that is plugged in. It keeps a digest of each event's id, and not the id."""
        if provider not in self._secrets:
            raise NoSuchProvider("no such provider")
        key = (provider, settings.env, str(settings.data))  # the secrets in the database are sealed by a key in there
        if key not in self._made:
            known = settings.env == "development" and self._secrets[provider]
            secrets = [SecretStr(self._secrets[provider])] if known else []
            self._made[key] = Receiver(
                OWNER + provider, scheme=SIGNED, event_id="providerEventId", secrets=secrets, body_bytes=BODY_BYTES,
                keeps_ids=False,
            )  # fmt: skip
        return self._made[key]


def create_router(development_secrets: Mapping[str, str], *, provider: str) -> Router:
    """The routes; ``development_secrets`` names the providers that call, ``provider`` is who checks by default."""
    router = Router(prefix="/v1", tags=["kyc"])
    receivers = Receivers(development_secrets)

    async def receive(provider_id: str, request: Request, tx: RequestTx) -> Received:
        return await receivers.find(provider_id, _settings(request))(request, tx)

    @router.post("/kyc/sessions", status_code=201, dependencies=UNCACHED)
    async def create_session(
        new: NewSession, caller: Agent, tx: RequestTx, request: Request, response: Response
    ) -> CreatedSession:
        """Have somebody checked."""
        session, token = await service.create_session(
            tx, user_id=new.user_id, provider=new.provider_id or provider, by=caller.subject[:255],
            known=development_secrets,
        )  # fmt: skip
        response.headers["Location"] = f"/v1/kyc/sessions/{session.id}"
        hosted_url = f"{find_hosted_url(_settings(request))}/{session.id}/{token}"
        return CreatedSession.model_validate(_values(session) | {"hosted_url": hosted_url})

    @router.get("/kyc/sessions", dependencies=UNCACHED)
    async def list_sessions(
        _caller: Agent,
        tx: RequestTx,
        user_id: Annotated[UserId | None, Query(alias="userId")] = None,
        status: Status | None = None,
        before: UUID | None = None,
        limit: PageSize = 50,
    ) -> SessionPage:
        """A page of them; of one person, or in one status."""
        if user_id is not None and status is not None:
            refused = Invalid("ask for the sessions of a person, or for those in a status")
            refused.faults = (Fault("query", "$.status", "leave it out, or leave userId out"),)
            raise refused
        items, following = await service.list_sessions(tx, user_id=user_id, status=status, before=before, limit=limit)
        views = [SessionView.model_validate(_values(one)) for one in items]
        return SessionPage(items=views, next=following)

    @router.get("/kyc/sessions/{session_id}", dependencies=UNCACHED)
    async def read_session(session_id: UUID, _caller: Agent, tx: RequestTx) -> SessionDetail:
        """One of them, with its history."""
        session, history = await service.read_session(tx, session_id)
        lines = [_show_line(line) for line in history]
        return SessionDetail.model_validate(_values(session) | {"history": lines})

    @router.post("/webhooks/kyc/{provider_id}", openapi_extra={"x-idempotent": False, "requestBody": CALLBACK_BODY})
    async def receive_callback(
        provider_id: str, received: Annotated[Received, Depends(receive)], tx: RequestTx
    ) -> CallbackView:
        """A provider says how a check went; its signature is the credential."""
        return CallbackView(status=await service.receive(tx, _read_callback(provider_id, received)))

    _add_unmatched(router)
    return router


def _add_unmatched(router: Router) -> None:
    """What a person looks at."""

    @router.get("/kyc/callbacks/unmatched")
    async def list_unmatched(
        _caller: Agent,
        tx: RequestTx,
        all_: Annotated[bool, Query(alias="all")] = False,
        before: UUID | None = None,
        limit: PageSize = 50,
    ) -> UnmatchedPage:
        """A page of callbacks that somebody should look at; with ``all=true``, also those that were dealt with."""
        items, following = await service.list_unmatched(tx, is_open=not all_, before=before, limit=limit)
        return UnmatchedPage(items=[_show_unmatched(one) for one in items], next=following)

    @router.post("/kyc/callbacks/{callback_id}/dismiss")
    async def dismiss_callback(callback_id: UUID, done: Dismissal, caller: Agent, tx: RequestTx) -> UnmatchedView:
        """Somebody has dealt with it."""
        dismissed = await service.dismiss_callback(
            tx, callback_id, actor=caller.subject[:255], handled=done.handled
        )  # fmt: skip
        return _show_unmatched(dismissed)


def create_hosted_router(providers: Providers) -> APIRouter:
    """Where a person begins: our own address, which is there at once, and leads to the provider's page.

    The token in it is the credential. The provider is called between two transactions, and its page is never kept.
    """
    router = APIRouter(include_in_schema=False)

    @router.get("/v1/kyc/start/{session_id}/{token}")
    async def start(session_id: UUID, token: str, request: Request) -> Response:
        db: Database = request.app.state.db
        settings = _settings(request)
        async with db.transaction() as tx:
            session, rest = await service.begin_opening(tx, session_id, token=token)
        if not session.is_open:
            return _page(410, "This check is over", "Nothing more is needed here. You can close this page.")
        failpoint("handler.mid")
        try:
            seconds = max(1, int(rest.total_seconds()))
            opening = Opening(session.id, seconds, find_callback_url(session.provider, settings))
            opened = await providers[session.provider].open(opening, settings)
        except (NoProvider, KeyError):
            return _page(503, "Please try again in a minute", "The check cannot begin at the moment.")
        failpoint("handler.mid")
        async with db.transaction() as tx:
            await service.note_opened(tx, session_id, reference=opened.reference)
        return RedirectResponse(opened.url, 303, headers=PAGE_HEADERS)

    return router


def _page(status: int, title: str, text: str) -> Response:
    headers = PAGE_HEADERS | ({"Retry-After": "60"} if status == 503 else {})
    return HTMLResponse(PAGE.format(title=escape(title), text=escape(text)), status, headers=headers)


def _settings(request: Request) -> Settings:
    return getattr(request.app.state, "settings", None) or Settings()


def _read_callback(provider: str, received: Received) -> Callback:
    """What may be known of it. Whatever else it says, in whatever member, is left where it is."""
    body: Any = received.json()
    if not isinstance(body, dict) or not isinstance(body.get("status"), str):
        refused = BadCallback("the callback does not say what happened to which session: see errors")
        refused.faults = (Fault("body", "$.status", "this is missing, or not as it must be"),)
        raise refused
    client_ref, session_ref, evidence_ref = (body.get(name) for name in ("clientRef", "sessionRef", "evidenceRef"))
    return Callback(
        provider,
        received.event_id,
        parse_uuid(client_ref) if isinstance(client_ref, str) else None,
        session_ref if is_opaque(session_ref) else None,
        SAID.get(body["status"].upper()),
        evidence_ref if is_opaque(evidence_ref) else None,
    )


def _values(session: Session) -> dict[str, Any]:
    values = {name: getattr(session, name) for name in SHOWN}
    return values | {"session_id": session.id, "provider_id": session.provider}


SHOWN = ("status", "user_id", "evidence_ref", "version", "created_at", "expires_at", "updated_at")


def _show_line(line: HistoryLine) -> HistoryView:
    return HistoryView(
        number=line.number, at=line.at, from_status=line.from_status, to_status=line.to_status, cause=line.cause
    )


def _show_unmatched(one: Unmatched) -> UnmatchedView:
    return UnmatchedView(**{name: value for name, value in vars(one).items() if name != "event_id"})
