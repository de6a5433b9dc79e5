"""Every error as a problem of RFC 9457: what is wrong, where, and never a value that was sent."""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Any

import asyncpg
import psycopg
import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi.routing import iter_route_contexts
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from starlette.exceptions import HTTPException
from starlette.routing import compile_path

from duly.db import is_disconnect, sqlstate
from duly.errors import Busy, Conflict, DulyError, Fault, Invalid, Malformed, Unavailable
from duly.http.bodies import Unreadable

log = structlog.get_logger("duly.http")
MEDIA_TYPE = "application/problem+json"
INVALID_STATUS = "x-invalid-status"  # in the document, of a route that answers bad values with another status than 422
MOST_FAULTS = 20
MOST_VALUES = 1_000
_WORD = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,60}")
_MESSAGE_LIMIT = 300
_SHORTEST_SECRET = 3
DRIVER_ERRORS = (DBAPIError, asyncpg.PostgresError, asyncpg.InterfaceError, psycopg.Error)

PROBLEM_SCHEMA: dict[str, Any] = {
    "title": "Problem",
    "description": "An error in the form of RFC 9457.",
    "type": "object",
    "required": ["type", "title", "status"],
    "properties": {
        "type": {"type": "string", "description": "What kind of problem, as a URI to compare with."},
        "title": {"type": "string"},
        "status": {"type": "integer", "minimum": 400, "maximum": 599},
        "detail": {"type": "string"},
        "instance": {"type": "string", "description": "This occurrence: the correlation id as a URN."},
        "errors": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["in", "path", "detail"],
                "properties": {
                    "in": {"type": "string", "enum": ["body", "query", "path", "header", "cookie"]},
                    "path": {"type": "string", "description": "JSON path of what is wrong, such as $.items[0].sku."},
                    "detail": {"type": "string"},
                },
            },
        },
    },
}


def describe(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """How these answers look in the OpenAPI document."""
    content = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}
    return {status: {"description": HTTPStatus(status).phrase, "content": content} for status in statuses}


def problem(
    status: int,
    *,
    title: str = "",
    detail: str = "",
    kind: str = "about:blank",
    faults: Sequence[Fault] = (),
    headers: Mapping[str, str] | None = None,
    instance: str = "",
) -> JSONResponse:
    """A response of this form."""
    body: dict[str, Any] = {"type": kind, "title": title or _phrase(status), "status": status}
    if detail:
        body["detail"] = _writable(detail)
    if instance:
        body["instance"] = instance
    if faults:
        body["errors"] = [{"in": fault.where, "path": fault.path, "detail": fault.detail} for fault in faults]
    return JSONResponse(body, status_code=status, headers=dict(headers or {}), media_type=MEDIA_TYPE)


def install_problems(api: FastAPI) -> None:
    """Answer every error that a route may raise with a problem."""
    api.add_exception_handler(DulyError, _on_duly_error)
    api.add_exception_handler(RequestValidationError, _on_invalid_request)
    api.add_exception_handler(HTTPException, _on_http_exception)
    api.add_exception_handler(DBAPIError, _on_database_error)
    api.add_exception_handler(PoolTimeout, _on_pool_timeout)


def from_error(error: DulyError, *, instance: str = "") -> JSONResponse:
    """The problem that one of our errors is."""
    kind = type(error)
    title = (kind.__doc__ or kind.__name__).strip().partition("\n")[0].rstrip(".")
    name = _WORD.sub("-", kind.__name__).lower()
    is_ours = error.status >= 500 and not isinstance(error, Unavailable)
    return problem(
        error.status,
        title=title,
        detail="" if is_ours and error.status == 500 else str(error),
        kind=f"urn:duly:problem:{name}",
        faults=error.faults,
        headers=error.headers,
        instance=instance,
    )


async def _on_duly_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, DulyError)
    if error.status == 500:
        raise error  # a mistake of ours: the boundary logs where it was made
    if error.status > 500:
        log.warning("request_refused", error=type(error).__name__, status=error.status)
    return from_error(error, instance=_instance(request))


async def _on_invalid_request(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    return from_error(read_refusal(error), instance=_instance(request))


def read_refusal(error: RequestValidationError) -> DulyError:
    """FastAPI's refusal of a request as an error of ours."""
    if isinstance(error.__cause__, json.JSONDecodeError):
        return Malformed("the body is not JSON")
    invalid = Invalid("the request is not as the documentation says: see errors")
    invalid.faults = tuple(_fault(item, error.body) for item in error.errors()[:MOST_FAULTS])
    return invalid


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if isinstance(error, Unreadable):
        return from_error(error.error, instance=_instance(request))
    if error.status_code < 400:  # not modified, or elsewhere: no error, and perhaps no body
        return Response(status_code=error.status_code, headers=error.headers)
    headers = dict(error.headers or {})
    if error.status_code == 405:
        headers["Allow"] = ", ".join(_methods(request))
    detail = error.detail if isinstance(error.detail, str) and error.detail != _phrase(error.status_code) else ""
    return problem(error.status_code, detail=detail, headers=headers, instance=_instance(request))


async def _on_pool_timeout(request: Request, error: Exception) -> JSONResponse:
    log.warning("pool_exhausted")
    known = translate(error)
    assert known is not None
    return from_error(known, instance=_instance(request))


async def _on_database_error(request: Request, error: Exception) -> JSONResponse:
    """What the services did not foresee: still an answer that says whose fault it is."""
    known = translate(error)
    if known is None:
        raise error
    log.warning("database_said_no", error=type(error).__name__, answered=known.status, **database_facts(error))
    return from_error(known, instance=_instance(request))


def translate(error: Exception) -> DulyError | None:
    """A database's error in our words; None when it is a mistake of ours."""
    if isinstance(error, PoolTimeout):
        return Busy("every connection to the database is in use: try again")
    if not isinstance(error, DRIVER_ERRORS):  # nor what merely was raised while one of those was being handled
        return Unavailable("the database did not answer in time") if _is_command_timeout(error) else None
    state = sqlstate(error) or ""
    if state in {"55P03", "57014", "40001", "40P01"}:
        return Busy("others work on the same rows: try again")
    if is_disconnect(error):
        return Unavailable("the database cannot be reached")
    if state in {"23505", "23P01"}:
        return Conflict("this exists already")
    if state[:2] in {"22", "54"} or state in {"23514", "23502", "23503"}:
        return Invalid("a value cannot be stored as it was given")
    return None


def database_facts(error: BaseException) -> dict[str, str]:
    """What may be logged of a database's error: its code and names of ours; its message quotes values."""
    if not isinstance(error, DRIVER_ERRORS):
        return {}
    driver = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
    said = driver.__cause__ if isinstance(driver.__cause__, asyncpg.PostgresError) else driver
    named = {name: getattr(said, f"{name}_name", None) for name in ("constraint", "table", "column")}
    return {name: str(fact) for name, fact in {"state": sqlstate(error), **named}.items() if fact}


def _is_command_timeout(error: Exception) -> bool:
    """The driver gives up on a silent server with a plain TimeoutError; one of the application's own is not meant."""
    if not isinstance(error, TimeoutError):
        return False
    *_, (last, _) = traceback.walk_tb(error.__traceback__)
    return str(last.f_globals.get("__name__", "")).startswith(("asyncpg.", "sqlalchemy."))


def _methods(request: Request) -> list[str]:
    """What this path understands, over all routes: FastAPI names those of the first alone."""
    found: set[str] = set()
    for context in iter_route_contexts(request.app.routes):
        path, methods = getattr(context, "path", None), getattr(context, "methods", None)
        if path and methods and compile_path(path)[0].match(request.scope["path"]):
            found |= set(methods) | ({"HEAD"} if "GET" in methods else set())
    return sorted(found)


def _instance(request: Request) -> str:
    correlation_id = request.scope.get("state", {}).get("correlation_id")
    return f"urn:uuid:{correlation_id}" if correlation_id else ""


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Error"


def _fault(item: Mapping[str, Any], body: Any) -> Fault:
    """Where it is and what is wrong; the value itself is not repeated."""
    where, *steps = item.get("loc", ("body",))
    if where not in {"body", "query", "path", "header", "cookie"}:
        where, steps = "body", [where, *steps]
    if where == "body":
        steps = list(_real_steps(steps, body))
    path = "$" + "".join(_step(step) for step in steps)
    message = str(item.get("msg", "is wrong")).removeprefix("Value error, ")
    for secret in _values([item.get("input"), item.get("ctx", {}).get("tag")]):
        message = message.replace(secret, "...").replace(repr(secret)[1:-1], "...")
    return Fault(where, path, _writable(message[:_MESSAGE_LIMIT]))


def _values(given: Any) -> list[str]:
    """The texts and numbers in what was given, as a message might quote them; the first of them, if there are many."""
    found: list[str] = []
    left = [given]
    while left and len(found) < MOST_VALUES:
        one = left.pop()
        if isinstance(one, dict | list):
            left.extend(one.values() if isinstance(one, dict) else one)
        elif isinstance(one, str | int | float) and len(str(one)) >= _SHORTEST_SECRET:
            found.append(str(one))
    return sorted(found, key=len, reverse=True)


def _real_steps(steps: Sequence[object], body: Any) -> Iterator[object]:
    """Pydantic names the members of a union among the steps; those are no part of what was sent."""
    here = body
    for index, step in enumerate(steps):
        if isinstance(here, dict) and (step in here or index == len(steps) - 1):
            here = here.get(step)
        elif isinstance(here, list) and isinstance(step, int) and step < len(here):
            here = here[step]
        elif isinstance(body, dict | list):
            continue
        yield step


def _step(step: object) -> str:
    """One step of a JSON path. A member's name comes from the request: it is quoted, cut and cleaned."""
    if isinstance(step, int):
        return f"[{step}]"
    name = str(step)
    if _PLAIN.fullmatch(name):
        return f".{name}"
    cleaned = re.sub(r"[^\x20-\x7e]", "?", name)[:60].replace("\\", "\\\\").replace("'", "\\'")
    return f"['{cleaned}']"


def _writable(words: str) -> str:
    return words.encode("utf-8", "replace").decode()
