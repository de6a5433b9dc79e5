"""The HTTP server of a process: the application's routes, health, metrics, OpenAPI and a front page."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from duly.app import Duly
from duly.auth.tokens import Verifier
from duly.db import Database
from duly.duty import Duty
from duly.http import webhooks
from duly.http.health import Readiness, create_health_router
from duly.http.install import install
from duly.settings import Settings

HERE = Path(__file__).parent
PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
FIRST_LINKS = {
    "docs": "/docs",
    "openapi": "/openapi.json",
    "readiness": "/readyz",
    "health": "/healthz",
    "metrics": "/metrics",
}
_templates = Environment(loader=FileSystemLoader(HERE / "templates"), autoescape=True, undefined=StrictUndefined)


def create_api(
    db: Database, duties: Sequence[Duty], settings: Settings, app: Duly, *, verifier: Verifier | None = None
) -> FastAPI:
    """A FastAPI that serves the application; routes find ``db`` and ``settings`` in ``request.app.state``.

    Whoever mounts more adds to ``state.links``, and the front page shows it; what must be closed, to ``state.closing``.
    """
    readiness = Readiness(db, duties, app.migrations, verifier=verifier)

    @contextlib.asynccontextmanager
    async def lifespan(served: FastAPI) -> AsyncIterator[None]:
        yield
        for close in served.state.closing:
            await close()
        await readiness.close()
        if verifier is not None:
            await verifier.close()

    api = _bare_api(lifespan)
    install(api, db, body_bytes=settings.body_bytes)
    api.state.settings = settings
    api.state.verifier = verifier
    api.state.readiness = readiness
    api.state.links = dict(FIRST_LINKS)
    api.state.closing = []
    api.include_router(create_health_router(readiness))
    api.include_router(_create_front_router())
    for router in [*app.routers, *(app.development_routers if settings.env == "development" else [])]:
        api.include_router(router)
    if verifier is not None:
        api.include_router(webhooks.router)
    return api


def create_health_api(db: Database, duties: Sequence[Duty], settings: Settings, app: Duly) -> FastAPI:
    """What a process without routes serves: its health and its numbers."""
    readiness = Readiness(db, duties, app.migrations)

    @contextlib.asynccontextmanager
    async def lifespan(_api: FastAPI) -> AsyncIterator[None]:
        yield
        await readiness.close()

    api = _bare_api(lifespan, openapi_url=None)
    install(api, db, body_bytes=settings.body_bytes)
    api.include_router(create_health_router(readiness))
    return api


def _bare_api(lifespan: Any, **options: Any) -> FastAPI:
    """No redirects: they repeat whatever Host says. No telemetry of FastAPI's own: it exports paths and messages."""
    return FastAPI(
        title="duly", version=version("duly"), lifespan=lifespan, redirect_slashes=False,
        telemetry={"tracing": False, "logs": False}, **options,
    )  # fmt: skip


def _create_front_router() -> APIRouter:
    router = APIRouter(include_in_schema=False)

    @router.get("/")
    async def front(request: Request) -> Response:
        links: dict[str, str] = request.app.state.links
        if not prefers_html(request.headers.get("accept", "")):
            body = {"name": "duly", "version": request.app.version, "links": links}
            return JSONResponse(body, headers={"Vary": "Accept"})
        page = _templates.get_template("front.html").render(links=links, version=request.app.version)
        return HTMLResponse(page, headers={**PAGE_HEADERS, "Vary": "Accept"})

    @router.get("/front.css")
    async def stylesheet() -> Response:
        return Response((HERE / "static" / "front.css").read_bytes(), media_type="text/css", headers=PAGE_HEADERS)

    return router


def prefers_html(accept: str) -> bool:
    """Whether a client names HTML, and wants it at least as much as JSON."""
    weights = {"text/html": 0.0, "application/json": 0.0}
    for part in accept.lower().split(","):
        kind, *parameters = (piece.strip() for piece in part.split(";"))
        if kind in weights:
            weights[kind] = max(weights[kind], _quality(parameters))
    return weights["text/html"] > 0 and weights["text/html"] >= weights["application/json"]


def _quality(parameters: Sequence[str]) -> float:
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip() == "q":
            try:
                return float(value)
            except ValueError:
                return 0.0
    return 1.0
