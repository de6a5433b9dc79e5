"""Signing in and out, colours, assets, and the stream of live numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog
from fastapi import Request
from fastapi.responses import RedirectResponse, Response, StreamingResponse

from duly.console.routes import MOUNT, Pages, for_anyone, public, show, show_error, signed_in
from duly.console.sessions import LONGEST_HOURS, create_session, note_refusal, revoke_session
from duly.console.sign_in import COOKIE_SECONDS, SCOPE, Attempt, local_path
from duly.errors import Forbidden, NotFound

if TYPE_CHECKING:
    from duly.console.app import Console

log = structlog.get_logger("duly.console")
TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
NO_STORE = {"Cache-Control": "no-store"}
YEAR_SECONDS = 31_536_000


def register(pages: Pages) -> None:
    """Add these routes."""
    pages.get("/sign-in")(sign_in)
    pages.get("/sign-in/callback")(come_back)
    pages.post("/sign-out")(sign_out)
    pages.get("/signed-out")(signed_out)
    pages.post("/theme")(choose_theme)
    pages.get("/static/{name}")(static)
    pages.get("/live")(live)


@public
async def sign_in(request: Request) -> Response:
    """Send the browser to the provider."""
    console: Console = request.app.state.console
    target, attempt = await console.sign_in.begin(
        redirect_uri=console.redirect_uri(request),
        return_to=request.query_params.get("return_to", MOUNT),
        again="again" in request.query_params,
    )
    response = RedirectResponse(target, status_code=302, headers=NO_STORE)
    console.set_cookie(request, response, attempt.dump(), kind="-sign-in", seconds=COOKIE_SECONDS)
    return response


@public
async def come_back(request: Request) -> Response:
    """The provider sent the browser back: a session, if everything fits and the person has a role here."""
    console: Console = request.app.state.console
    attempt = Attempt.load(request.cookies.get(console.cookie_name(request, "-sign-in"), ""))
    principal, name = await console.sign_in.finish(
        attempt, dict(request.query_params), redirect_uri=console.redirect_uri(request)
    )
    roles = console.rights.roles & principal.roles
    if SCOPE not in principal.scopes or not roles:
        log.warning("console_sign_in_without_role")
        await note_refusal(console.db, principal.subject)
        response = show_error(request, Forbidden("you are signed in, but have no role that the console asks for"))
    else:
        old = await console.find_session(request)
        id = await create_session(
            console.db, subject=principal.subject, name=name, roles=roles, replaces=old.id_hash if old else None
        )
        response = RedirectResponse(local_path(attempt.return_to), status_code=303, headers=NO_STORE)
        console.set_cookie(request, response, id, seconds=LONGEST_HOURS * 3_600)
        log.info("console_signed_in", roles=sorted(roles))
    response.delete_cookie(
        console.cookie_name(request, "-sign-in"), path="/", secure=console.is_secure(request), httponly=True
    )
    return response


@for_anyone
async def sign_out(request: Request) -> Response:
    """End the session, here and in the database."""
    console: Console = request.app.state.console
    await revoke_session(console.db, signed_in(request).id_hash)
    response = RedirectResponse(f"{MOUNT}/signed-out", status_code=303, headers=NO_STORE)
    response.delete_cookie(console.cookie_name(request), path="/", secure=console.is_secure(request), httponly=True)
    return response


@public
async def signed_out(request: Request) -> Response:
    """Say so; a page that redirected to the provider would sign the same person in again."""
    return show(request, "message.html", title="You are signed out", sentence="Close this page, or sign in again.")


@for_anyone
async def choose_theme(request: Request) -> Response:
    """Remember light, dark, or what the machine prefers."""
    form = request.state.form
    theme = form.get("theme", "auto")
    response = RedirectResponse(local_path(form.get("return_to", MOUNT)), status_code=303, headers=NO_STORE)
    chosen = theme if theme in ("light", "dark") else "auto"
    response.set_cookie("duly-theme", chosen, max_age=YEAR_SECONDS, path="/", samesite="lax", httponly=True)
    return response


@public
async def static(request: Request, name: str) -> Response:
    """A stylesheet or script; its address changes with its content."""
    from duly.console.app import HEADERS, HERE

    console: Console = request.app.state.console
    if name not in console.assets:
        raise NotFound("there is no such file")
    path = HERE / "static" / name
    headers = {**HEADERS, "Cache-Control": f"public, max-age={YEAR_SECONDS}, immutable"}
    return Response(path.read_bytes(), media_type=TYPES[path.suffix], headers=headers)


async def live(request: Request) -> Response:
    """Server-sent events: a tick every two seconds, for ten minutes."""
    from duly.console.app import HEADERS

    console: Console = request.app.state.console
    id_hash = signed_in(request).id_hash
    console.live.check_room(id_hash)
    stream = console.live.stream(id_hash)
    return StreamingResponse(stream, media_type="text/event-stream", headers={**HEADERS, "X-Accel-Buffering": "no"})
