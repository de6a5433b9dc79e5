"""The gate in front of every page: who is signed in, what they may do, and errors as pages."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import parse_qs, quote, urlsplit
from uuid import UUID

import structlog
from fastapi import APIRouter, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import RedirectResponse, Response
from fastapi.routing import APIRoute

from duly.console.forms import Wrong
from duly.console.sessions import Session
from duly.console.sign_in import local_path
from duly.errors import DulyError, Forbidden, Invalid, Malformed, NotFound, TooLarge, Unauthenticated
from duly.http.problems import database_facts, translate
from duly.ids import parse_uuid
from duly.operate.arguments import LARGEST_ID, TEXT_LIMIT

if TYPE_CHECKING:
    from duly.console.app import Console, Look

log = structlog.get_logger("duly.console")
MOUNT = "/console"
FORM_LIMIT_BYTES = 131_072
FIELDS_LIMIT = 50
LONGEST_NUMBER = len(str(LARGEST_ID))
UNSAFE = frozenset({"POST", "PUT", "PATCH", "DELETE"})
SITES = frozenset({"same-origin", "none"})  # what Sec-Fetch-Site may say; "none" is a person's own doing
TITLES = {
    400: "That cannot be read", 401: "Sign in again", 403: "Not for you", 404: "Not here", 409: "Not possible now",
    413: "Too large", 422: "That cannot be done", 503: "Not available",
}  # fmt: skip
F = TypeVar("F", bound=Callable[..., Any])
Handle = Callable[[Request], Coroutine[Any, Any, Response]]
FormPage = Callable[[Request, Wrong], Awaitable[Response]]
P = TypeVar("P", bound=FormPage)
Id = TypeVar("Id", UUID, int)


class SignInNeeded(Exception):
    """Nobody is signed in."""


class BadQuery(Invalid):
    """A filter in the address cannot be used."""

    status = 400


def public(endpoint: F) -> F:
    """Leave a route open to strangers: signing in, and what the page looks like."""
    endpoint.__dict__["is_public"] = True
    return endpoint


def for_anyone(endpoint: F) -> F:
    """Let whoever is signed in come here: signing out changes nothing of the engine, and an action asks by itself."""
    endpoint.__dict__["is_for_anyone"] = True
    return endpoint


class PageRoute(APIRoute):
    """A page. Closed unless its function is ``public``; what it POSTs needs the right to act and a CSRF token."""

    def get_route_handler(self) -> Handle:
        """The gate goes around everything."""
        handle = super().get_route_handler()
        is_public = getattr(self.endpoint, "is_public", False)
        is_for_anyone = getattr(self.endpoint, "is_for_anyone", False)

        async def answer(request: Request) -> Response:
            console: Console = request.app.state.console
            try:
                if not is_public:
                    await admit(console, request, is_for_anyone=is_for_anyone)
                return await handle(request)
            except SignInNeeded:
                return _ask_to_sign_in(request)
            except RequestValidationError:
                return show_error(request, NotFound("there is no page at this address"))
            except DulyError as error:
                return show_error(request, error)
            except Exception as error:
                if console.is_unavailable(error):
                    log.warning("console_database_away", error=type(error).__name__)
                    return show(request, "away.html", status=503)
                refusal = translate(error)
                if refusal is None:
                    raise
                log.warning("console_database_said_no", error=type(error).__name__, **database_facts(error))
                return show_error(request, refusal)

        return answer


class Pages(APIRouter):
    """Pages of the console; none of them is in the OpenAPI document."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("route_class", PageRoute)
        options.setdefault("include_in_schema", False)
        super().__init__(**options)
        self.forms: dict[str, FormPage] = {}

    def form(self, *names: str) -> Callable[[P], P]:
        """Name the page on which these actions have their form: it is shown again with what is wrong."""

        def keep(page: P) -> P:
            self.forms |= dict.fromkeys(names, page)
            return page

        return keep


async def admit(console: Console, request: Request, *, is_for_anyone: bool) -> None:
    """Let in whoever is signed in; what changes something also needs the right, and proof that our page sent it."""
    session = await console.find_session(request)
    if session is None:
        raise SignInNeeded
    request.state.session = session
    section = console.rights.section_at(request.scope["path"])
    if request.method not in UNSAFE:
        if not is_for_anyone:
            console.rights.check_see(session, section)
        return
    check_origin(console, request)
    form = await read_form(request)
    given = form.pop("csrf", "") or request.headers.get("x-csrf-token", "")
    if not hmac.compare_digest(given.encode(), session.csrf.encode()):
        log.warning("console_csrf_refused", path=request.scope["path"])
        raise Forbidden("this form is not from a page of yours, or from before you signed in: load the page again")
    if not is_for_anyone:
        console.rights.check_act(session, section)
    request.state.form = form


def check_origin(console: Console, request: Request) -> None:
    """Refuse what another site made the browser send.

    Our pages send no referrer, so the origin of their forms is ``null``: then only ``Sec-Fetch-Site`` can tell.
    """
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
    hosts = {request.headers.get("host", ""), urlsplit(console.settings.console_url).netloc} - {""}
    is_ours = origin is None or (origin == "null" and site in SITES) or _host(origin) in hosts
    if not is_ours or (site is not None and site not in SITES):
        log.warning("console_origin_refused", path=request.scope["path"])
        raise Forbidden("this request comes from another site")


def _host(origin: str) -> str | None:
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None


async def read_form(request: Request) -> dict[str, str]:
    """The fields of a form, each given once; the last of a doubled one would hide the first, so it is refused."""
    kind = request.headers.get("content-type", "application/x-www-form-urlencoded").partition(";")[0].strip().lower()
    if kind != "application/x-www-form-urlencoded":
        raise Malformed("send a form")
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > FORM_LIMIT_BYTES:
            raise TooLarge("the form is too large")
    try:
        fields = parse_qs(body.decode(), keep_blank_values=True, max_num_fields=FIELDS_LIMIT)
    except ValueError:
        raise Malformed("the form cannot be read") from None
    if any(len(values) > 1 for values in fields.values()):
        raise Malformed("a field of the form is given more than once")
    return {name: values[0] for name, values in fields.items()}


def show(request: Request, template: str, *, status: int = 200, **values: Any) -> Response:
    """A page in the console's layout."""
    console: Console = request.app.state.console
    return console.render(request, template, status=status, **values)


def read(request: Request) -> AbstractAsyncContextManager[Look]:
    """A read-only transaction of bounded length, for what a page shows."""
    console: Console = request.app.state.console
    return console.reading()


def signed_in(request: Request) -> Session:
    """Who asked for this page."""
    session: Session = request.state.session
    return session


def may_act(request: Request) -> bool:
    """Whether who asked for this page may change what it shows."""
    console: Console = request.app.state.console
    return console.rights.may_act(signed_in(request), console.rights.section_at(request.scope["path"]))


def check_may_act(request: Request) -> None:
    """Forbidden, unless who asked for this page may change what it shows: a page for an editor."""
    console: Console = request.app.state.console
    console.rights.check_act(signed_in(request), console.rights.section_at(request.scope["path"]))


def show_error(request: Request, error: DulyError) -> Response:
    """What went wrong, in the layout; a mistake in a filter is the address's fault."""
    status = 400 if type(error) is Invalid and request.method == "GET" else error.status
    if status == 500:
        raise error
    response = show(
        request, "message.html", status=status, title=TITLES.get(status, "Refused"), sentence=str(error),
        back=_came_from(request),
    )  # fmt: skip
    for name, value in error.headers.items():
        if name == "Retry-After":
            response.headers[name] = value
    return response


def _came_from(request: Request) -> str | None:
    """The page whose form was refused, if it says so."""
    given = getattr(request.state, "form", {}).get("return_to", "")
    return local_path(given) if given else None


def _ask_to_sign_in(request: Request) -> Response:
    """A page is asked for again after signing in; what a form said is lost, and that is said."""
    if request.method in UNSAFE or is_by_itself(request):
        response = show_error(request, Unauthenticated("your session has ended: sign in, and do it again"))
        if request.method not in UNSAFE:
            response.headers["HX-Refresh"] = "true"  # the page is loaded anew, and leads to signing in
        return response
    wanted = quote(address_of(request), safe="")
    return RedirectResponse(
        f"{MOUNT}/sign-in?return_to={wanted}", status_code=302, headers={"Cache-Control": "no-store"}
    )


def is_by_itself(request: Request) -> bool:
    """Whether a page asked for a part of itself: nobody has to sit before it for that."""
    return "hx-request" in request.headers


def address_of(request: Request) -> str:
    """The page that was asked for, with its filters."""
    return str(request.scope["path"]) + _query(request)


def _query(request: Request) -> str:
    query = request.scope["query_string"].decode("latin-1")
    return f"?{query}" if query else ""


def read_number(given: str) -> int | None:
    """A whole number that an id can be; None for anything else."""
    if not (given.isascii() and given.isdigit()) or len(given) > LONGEST_NUMBER:
        return None
    return int(given) if int(given) <= LARGEST_ID else None


def read_moment(given: str, *, naive: bool = True) -> datetime | None:
    """An instant, in UTC if it names no zone (or None, if it must); None for what is none, in any zone."""
    try:
        moment = datetime.fromisoformat(given)
        if moment.tzinfo is None and not naive:
            return None
        return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    except (ValueError, OverflowError):
        return None


class Query:
    """The filters in an address; whatever is wrong with them is a sentence, and never an error of ours."""

    def __init__(self, request: Request) -> None:
        try:
            given = parse_qs(_query(request)[1:], keep_blank_values=False, max_num_fields=FIELDS_LIMIT, errors="strict")
        except ValueError:
            raise BadQuery("the address has more filters than are understood") from None
        self._given: Mapping[str, list[str]] = given

    def text(self, name: str, *, longest: int = TEXT_LIMIT) -> str | None:
        """A text, if one is given."""
        value = self._given.get(name, [""])[-1].strip()
        if len(value) > longest or "\x00" in value:
            raise BadQuery(f"{name} is text of at most {longest} characters")
        return value or None

    def choice(self, name: str, allowed: tuple[str, ...]) -> str | None:
        """One of some words, if one is given."""
        value = self.text(name)
        if value is not None and value not in allowed:
            raise BadQuery(f"{name} is one of {', '.join(allowed)}")
        return value

    def number(self, name: str) -> int | None:
        """A whole number, if one is given."""
        value = self.text(name)
        if value is None:
            return None
        found = read_number(value)
        if found is None:
            raise BadQuery(f"{name} is a whole number")
        return found

    def moment(self, name: str) -> datetime | None:
        """An instant, if one is given; without a zone it is UTC."""
        value = self.text(name)
        if value is None:
            return None
        found = read_moment(value)
        if found is None:
            raise BadQuery(f"{name} is a time such as 2026-03-01T09:00")
        return found

    def id(self, name: str) -> UUID | None:
        """A UUID, if one is given."""
        value = self.text(name)
        found = parse_uuid(value) if value is not None else None
        if value is not None and found is None:
            raise BadQuery(f"{name} is an id such as 0190f3c1-5a7e-7c3b-9d2f-1a2b3c4d5e6f")
        return found

    def place(self, name: str = "after") -> tuple[datetime, UUID] | None:
        """Where the page before ended, in a list by time and UUID."""
        return self._place(name, parse_uuid)

    def row_place(self, name: str = "after") -> tuple[datetime, int] | None:
        """The same in a list by time and number."""
        return self._place(name, read_number)

    def _place(self, name: str, read_id: Callable[[str], Id | None]) -> tuple[datetime, Id] | None:
        given = self.after(name)
        if given is None:
            return None
        at, id = read_moment(given[0], naive=False), read_id(given[1])
        if at is None or id is None:
            raise BadQuery(f"{name} is what the link to the next page says")
        return at, id

    def after(self, name: str = "after") -> tuple[str, str] | None:
        """Where the page before ended: a time and an id, as the link said it."""
        value = self.text(name)
        if value is None:
            return None
        first, _, second = value.rpartition("_")
        if not first or not second:
            raise BadQuery(f"{name} is what the link to the next page says")
        return first, second
