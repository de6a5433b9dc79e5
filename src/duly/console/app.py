"""Puts the console on an api: its pages, its API, its sign-in and its live numbers."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from secrets import token_urlsafe
from typing import Any
from urllib.parse import quote, urlencode

import structlog
from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, Response
from jinja2 import ChoiceLoader, Environment, FileSystemLoader, StrictUndefined
from sqlalchemy.exc import TimeoutError as PoolTimeout

from duly.app import Duly, Section
from duly.auth.strict_json import parse_object
from duly.auth.tokens import Verifier
from duly.console import sql
from duly.console.live import Live
from duly.console.rights import Entry, Rights
from duly.console.rollup import Rollup
from duly.console.routes import MOUNT, address_of, is_by_itself
from duly.console.sessions import Session, find_session
from duly.console.sign_in import SignIn
from duly.console.words import FILTERS
from duly.db import Database, Statement, Tx, fetch, is_disconnect, sqlstate
from duly.operate.status import ALIVE_SECONDS
from duly.settings import Settings
from duly.webhooks.look import host_of, say_failure

log = structlog.get_logger("duly.console")
QUERY_CANCELED = "57014"
READ_SECONDS = 10.0
NOTICE_SECONDS = 30
NOTICE_LIMIT = 2_000
ZONES_LIMIT = 1_000
NAMES_LIMIT = 200
HERE = Path(__file__).parent
THEMES = ("auto", "light", "dark")
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "font-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
# One statement: what follows cannot write, nor take longer than three seconds each.
BEGIN_READING = Statement("""
SELECT set_config('transaction_read_only', 'on', true), set_config('statement_timeout', '3s', true),
       duly.now() AS now, abs(extract(epoch FROM duly.now() - statement_timestamp())) > 1 AS moved
""")


@dataclass(frozen=True)
class Look:
    """A read-only transaction, and what time it is for the engine."""

    tx: Tx
    now: datetime
    clock_moved: bool

    async def rows(self, statement: Statement, **values: Any) -> list[Any]:
        """Rows of one statement."""
        return list(await fetch(self.tx, statement, **values))

    async def names(self) -> list[str]:
        """The job names that live workers know: what a filter suggests."""
        return [row[0] for row in await self.rows(sql.LIST_KNOWN_NAMES, alive_seconds=ALIVE_SECONDS, limit=NAMES_LIMIT)]

    async def zones(self) -> dict[str, str]:
        """In which zone the times of a job name are shown, if not in UTC."""
        return {row.name: row.timezone for row in await self.rows(sql.LIST_ZONES, limit=ZONES_LIMIT)}


ENTRIES = (
    Entry("Overview", "", "o"),
    Entry("Jobs", "/jobs", "j"),
    Entry("Schedules", "/schedules", "s"),
    Entry("History", "/history", "h"),
    Entry("Dead letters", "/dead-letters", "d"),
    Entry("Outbox", "/outbox", "e"),
    Entry("Webhooks", "/webhooks", "w"),
    Entry("Alerts", "/alerts", "l"),
    Entry("Audit", "/audit", "a"),
    Entry("Processes", "/processes", "p"),
)


class Console:
    """What the pages share: the database, the templates, who is signed in, and what is live."""

    def __init__(
        self,
        db: Database,
        settings: Settings,
        sign_in: SignIn,
        sections: Sequence[Section] = (),
        stop: asyncio.Event | None = None,
    ) -> None:
        self.db, self.settings, self.sign_in, self.sections = db, settings, sign_in, list(sections)
        self.rights = Rights(self.sections)
        self.rollup = Rollup(self.reading)
        self.live = Live(self, stop or asyncio.Event())
        self.assets = _fingerprints()
        self.templates = self._environment()

    @contextlib.asynccontextmanager
    async def reading(self) -> AsyncIterator[Look]:
        """A read-only transaction: three seconds a statement, ten in all."""
        async with asyncio.timeout(READ_SECONDS), self.db.transaction() as tx:
            _, _, now, moved = (await fetch(tx, BEGIN_READING))[0]
            yield Look(tx, now, moved)

    async def find_session(self, request: Request) -> Session | None:
        """Who this browser is signed in as."""
        id = request.cookies.get(self.cookie_name(request), "")
        return await find_session(self.db, id, is_seen=not is_by_itself(request))

    def is_secure(self, request: Request) -> bool:
        """Whether cookies are for TLS only: always in production."""
        url = self.settings.console_url
        return self.settings.env == "production" or url.startswith("https:") or request.url.scheme == "https"

    def cookie_name(self, request: Request, kind: str = "") -> str:
        """``__Host-`` makes browsers refuse a cookie that another host or a plain connection has set."""
        return ("__Host-duly" if self.is_secure(request) else "duly") + kind

    def set_cookie(self, request: Request, response: Response, value: str, *, kind: str = "", seconds: int) -> None:
        """A cookie that no script reads and no other site's form brings along."""
        response.set_cookie(
            self.cookie_name(request, kind), value, max_age=seconds, path="/", httponly=True, samesite="lax",
            secure=self.is_secure(request),
        )  # fmt: skip

    def redirect_uri(self, request: Request) -> str:
        """Where the provider sends people back to."""
        base = self.settings.console_url.rstrip("/") or str(request.base_url).rstrip("/")
        return f"{base}{MOUNT}/sign-in/callback"

    def note(self, request: Request, response: Response, sentence: str, *, tone: str = "good") -> None:
        """Say something on the next page."""
        said = json.dumps({"sentence": sentence[:NOTICE_LIMIT], "tone": tone}).encode()
        value = base64.urlsafe_b64encode(said).decode()
        self.set_cookie(request, response, value, kind="-notice", seconds=NOTICE_SECONDS)

    def render(self, request: Request, template: str, *, status: int = 200, **values: Any) -> Response:
        """A page in the layout, with everything that every page has."""
        session: Session | None = getattr(request.state, "session", None)
        theme = request.cookies.get("duly-theme", "auto")
        notice = _read_notice(request.cookies.get(self.cookie_name(request, "-notice"), ""))
        values.setdefault("now", None)
        body = self.templates.get_template(template).render(
            session=session, theme=theme if theme in THEMES else "auto", notice=notice, path=request.scope["path"],
            address=address_of(request), **values,
        )  # fmt: skip
        response = HTMLResponse(body, status_code=status, headers=HEADERS)
        if notice:
            response.delete_cookie(self.cookie_name(request, "-notice"), path="/", secure=self.is_secure(request))
        return response

    def fragment(self, template: str, **values: Any) -> str:
        """A part of a page, for a live one."""
        return self.templates.get_template(template).render(**values)

    @staticmethod
    def is_unavailable(error: BaseException) -> bool:
        """Whether the database is away, its pool used up, or an answer took too long."""
        return is_disconnect(error) or isinstance(error, PoolTimeout) or sqlstate(error) == QUERY_CANCELED

    async def close(self) -> None:
        """End what runs in the background."""
        await self.live.close()
        await self.rollup.close()
        await self.sign_in.close()

    def _environment(self) -> Environment:
        folders = [HERE / "templates", *_folders(self.sections)]
        made = Environment(
            loader=ChoiceLoader([FileSystemLoader(folder) for folder in folders]),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        made.filters.update(FILTERS)
        made.filters.update(quoted=lambda text: quote(str(text), safe=""), host=host_of, failure=say_failure)
        made.globals.update(
            mount=MOUNT, entries=ENTRIES, groups=self.rights.groups, find_action=self.rights.find_action,
            may_do=self.rights.may_do, asks_first=self.rights.asks_first, sees=self.rights.sees, home=self.rights.home,
            asset=self._asset, link=link, once=lambda: token_urlsafe(16),
        )  # fmt: skip
        return made

    def _asset(self, name: str) -> str:
        return f"{MOUNT}/static/{name}?v={self.assets[name]}"


def mount_console(
    api: FastAPI,
    db: Database,
    settings: Settings,
    app: Duly,
    verifier: Verifier,
    *,
    stop: asyncio.Event | None = None,
) -> Console:
    """Add the console and its API to an api; people sign in with the provider whose tokens the verifier accepts.

    Live pages end when ``stop`` is set: they would keep a process from ending for as long as its grace is.
    """
    from duly.console.api import create_api_router
    from duly.console.pages import create_pages

    console = Console(db, settings, SignIn(settings, verifier), app.sections, stop)
    api.state.console = console
    api.state.links["console"] = MOUNT
    api.state.closing.append(console.close)
    api.include_router(create_api_router())
    api.include_router(create_pages(console))
    return console


def link(path: str, **filters: Any) -> str:
    """An address of the console with these filters; those that are empty are left out."""
    given = {name: value for name, value in filters.items() if value not in (None, "")}
    return f"{MOUNT}{path}?{urlencode(given)}" if given else f"{MOUNT}{path}"


def _folders(sections: Sequence[Section]) -> list[Path]:
    return [section.templates for section in sections if section.templates is not None]


def _fingerprints() -> dict[str, str]:
    """What each asset holds, in its address: browsers may keep it for a year."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()[:12]
        for path in sorted((HERE / "static").iterdir())
        if path.suffix in (".css", ".js", ".svg")
    }


def _read_notice(cookie: str) -> dict[str, str] | None:
    try:
        if not 0 < len(cookie) <= 2 * NOTICE_LIMIT:
            return None
        found = parse_object(base64.urlsafe_b64decode(cookie))
        said = {"sentence": str(found["sentence"]), "tone": str(found["tone"])}
        "".join(said.values()).encode()  # half of a surrogate pair can be written in JSON, and not in a page
        return said
    except (ValueError, KeyError):
        return None
