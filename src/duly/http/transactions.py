"""One request, one commit: the route owns the transaction, and the answer leaves after COMMIT.

A ``Router`` does this for each of its routes, and honours ``Idempotency-Key`` on those that change something::

    router = Router(prefix="/v1/orders")

    @router.post("", status_code=201)
    async def place_order(order: NewOrder, tx: RequestTx, caller: Customer) -> Order:
        return await service.place_order(tx, order, customer=caller.subject)

What the route returns is committed with everything it wrote; what it raises rolls all of it back, the key included.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import random
import re
from collections.abc import AsyncIterator, Callable, Coroutine
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar
from urllib.parse import quote

import structlog
from fastapi import APIRouter, Depends, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from fastapi.routing import APIRoute
from starlette.concurrency import run_in_threadpool
from starlette.routing import BaseRoute, Match
from starlette.types import Scope

from duly.auth.http import Require
from duly.db import CONFLICT_RETRIES, Database, Tx, is_conflict, is_database_gone
from duly.errors import Busy, Invalid, Malformed, OutcomeUnknown, StillRunning, Unavailable
from duly.failpoints import failpoint
from duly.http.bodies import KeptRequest
from duly.http.middleware import route_path
from duly.http.problems import INVALID_STATUS, describe, read_refusal
from duly.idempotency.guard import DEFAULT_TTL_HOURS, Answer, Keyed, check_key, fingerprint, reserve, store
from duly.telemetry import HTTP_REPLAYS, HTTP_RETRIES

log = structlog.get_logger("duly.http")
UNSAFE = frozenset({"POST", "PUT", "PATCH", "DELETE"})
HEADER = "Idempotency-Key"
REPLAYED = "Idempotent-Replayed"
WAIT_SECONDS = 30.0
MOST_WAITING = 1_000
NOT_STORED = frozenset({"content-length", "x-correlation-id", "date", "set-cookie"})
KEY_PARAMETER = {
    "name": HEADER,
    "in": "header",
    "required": False,
    "description": "The same key with the same request gets the same answer, and nothing runs twice.",
    "schema": {"type": "string", "minLength": 1, "maxLength": 255, "pattern": "^[!-~]+$"},
}
STACKS = ("fastapi_inner_astack", "fastapi_function_astack")  # where FastAPI keeps what dependencies do after yield
Handle = Callable[[Request], Coroutine[Any, Any, Response]]
Turn = tuple[str, str]
_ANYTHING = re.compile("")


@dataclass
class Exchange:
    """One try of one request: its transaction, its turn, and the key that is reserved in it."""

    request: Request
    key: str | None
    tx: Tx
    held: contextlib.AsyncExitStack
    turn: Turn | None = None
    keyed: Keyed | None = None

    async def enter(self) -> None:
        """Right before the endpoint: the caller is known and the request is valid. Raises Replay when it ran before."""
        if self.key is None:
            return
        self.keyed = await _identify(self.request, self.key)
        turn = (self.keyed.caller, self.keyed.key)
        if turn != self.turn:
            if self.tx.in_transaction() and _turns.is_taken(turn):
                raise _OutOfTurn(turn)  # a dependency holds a connection, and perhaps locks: nobody waits with those
            await self.held.enter_async_context(_turns.take(turn))
        answer = await reserve(self.tx, self.keyed, ttl_hours=_ttl_hours(self.request))
        if answer is not None:
            raise Replay(answer)

    async def leave(self, response: Response) -> None:
        """After the endpoint, before COMMIT."""
        if response.status_code >= 500 or (self.keyed is None and not self.tx.in_transaction()):
            raise _Undone(response)  # nothing is to be kept, or there is nothing: no COMMIT, and perhaps no connection
        if self.keyed is not None:
            await store(self.tx, self.keyed, _answer(response))


class Replay(Exception):
    """The request was answered before."""

    def __init__(self, answer: Answer) -> None:
        super().__init__("answered before")
        self.answer = answer


class _Undone(Exception):
    def __init__(self, response: Response) -> None:
        super().__init__("the answer stands, the transaction does not")
        self.response = response


class _OutOfTurn(Exception):
    def __init__(self, turn: Turn) -> None:
        super().__init__("wait without a connection, then start again")
        self.turn = turn


class Turns:
    """Requests of one key in this process go one after the other, and wait without holding a connection."""

    def __init__(self) -> None:
        self._locks: dict[Turn, tuple[asyncio.Lock, int]] = {}
        self._waiting = 0

    def is_taken(self, turn: Turn) -> bool:
        """Whether whoever takes it now would have to wait."""
        return turn in self._locks

    @contextlib.asynccontextmanager
    async def take(self, turn: Turn) -> AsyncIterator[None]:
        """Wait for the others, within bounds."""
        lock, users = self._locks.get(turn, (asyncio.Lock(), 0))
        if users and self._waiting >= MOST_WAITING:
            raise StillRunning("too many requests wait for others with their Idempotency-Key: try again later")
        self._locks[turn] = (lock, users + 1)
        self._waiting += 1
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                await lock.acquire()
        except TimeoutError:
            self._forget(turn)
            raise StillRunning("a request with the same Idempotency-Key still runs: try again later") from None
        except BaseException:
            self._forget(turn)
            raise
        finally:
            self._waiting -= 1
        try:
            yield
        finally:
            lock.release()
            self._forget(turn)

    def _forget(self, turn: Turn) -> None:
        lock, users = self._locks.pop(turn)
        if users > 1:
            self._locks[turn] = (lock, users - 1)


_exchange: ContextVar[Exchange] = ContextVar("duly_exchange")
_turns = Turns()


async def current_tx() -> Tx:
    """The request's transaction."""
    try:
        return _exchange.get().tx
    except LookupError:
        raise TypeError("RequestTx works in the routes of a duly.http.Router only") from None


RequestTx = Annotated[Tx, Depends(current_tx)]


class Route(APIRoute):
    """A route in one transaction. ``openapi_extra={"x-idempotent": False}`` on it leaves the key out."""

    invalid_status: ClassVar[int] = Invalid.status

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        methods = {method.upper() for method in options.get("methods") or ["GET"]}
        extra = dict(options.get("openapi_extra") or {})
        self.takes_key = bool(methods & UNSAFE) and extra.get("x-idempotent", True)
        documented = describe(400, 401, 403, 404, self.invalid_status, 503)
        if self.invalid_status != Invalid.status:
            extra[INVALID_STATUS] = self.invalid_status  # the document must not promise FastAPI's 422 then
        if methods & UNSAFE:
            documented |= describe(408, 409, 413)
        if self.takes_key and KEY_PARAMETER not in extra.get("parameters", []):
            extra["parameters"] = [*extra.get("parameters", []), KEY_PARAMETER]
        options["responses"] = documented | (options.get("responses") or {})
        options["openapi_extra"] = extra or None
        super().__init__(path, _entered(endpoint), **options)

    def get_route_handler(self) -> Handle:
        """The transaction goes around the dependencies, the endpoint and the writing of the answer."""
        handle = super().get_route_handler()

        rights = _rights(self.dependant)

        async def handle_in_one_commit(request: Request) -> Response:
            for right in rights:
                await right(request)  # FastAPI would read and parse the body of a stranger first
            try:
                return await _in_one_commit(request, handle, takes_key=self.takes_key)
            except (RequestValidationError, Invalid) as error:
                if self.invalid_status == Invalid.status:
                    raise
                refusal = error if isinstance(error, Invalid) else read_refusal(error)
                refusal.status = self.invalid_status
                raise refusal from None

        return handle_in_one_commit


class Router(APIRouter):
    """An APIRouter whose routes each run in one transaction.

    ``invalid_status=400`` is for an API that promises 400 for whatever is wrong with a request's values.
    """

    def __init__(self, *, invalid_status: int = Invalid.status, **options: Any) -> None:
        options.setdefault("route_class", type("Route", (Route,), {"invalid_status": invalid_status}))
        super().__init__(**options)
        self._beginnings = (0, _ANYTHING)

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """None of its routes, at once, where no beginning of theirs is in the path: FastAPI tries them one by one."""
        count, beginnings = self._beginnings
        if count != len(self.routes):
            beginnings = re.compile("|".join(sorted({_beginning(route) for route in self.routes})))
            self._beginnings = (len(self.routes), beginnings)
        return super().matches(scope) if beginnings.search(scope["path"]) else (Match.NONE, {})


def _beginning(route: BaseRoute) -> str:
    """A pattern for what every path of the route contains; of what is no simple route, nothing is known."""
    return re.escape(route.path.partition("{")[0]) if isinstance(route, APIRoute) else ""


def _rights(dependant: Any) -> list[Require]:
    """What the route's dependencies demand of a token."""
    found = [dependant.call] if isinstance(dependant.call, Require) else []
    return found + [right for inner in dependant.dependencies for right in _rights(inner)]


def _entered(endpoint: Callable[..., Any]) -> Callable[..., Any]:
    """The endpoint, after the key: FastAPI calls it when rights and values are checked, and not before."""
    endpoint = getattr(endpoint, "__entered__", endpoint)  # some FastAPIs make an included route anew from its parts
    if inspect.isgeneratorfunction(endpoint) or inspect.isasyncgenfunction(endpoint):
        raise TypeError("an endpoint that yields runs after COMMIT: return a StreamingResponse, or use an APIRouter")
    is_async = inspect.iscoroutinefunction(endpoint)

    @functools.wraps(endpoint)
    async def enter_and_run(*args: Any, **values: Any) -> Any:
        await _exchange.get().enter()
        if is_async:
            return await endpoint(*args, **values)
        returned = await run_in_threadpool(endpoint, *args, **values)
        return await returned if inspect.isawaitable(returned) else returned  # an object whose __call__ is async

    enter_and_run.__dict__["__entered__"] = endpoint
    with contextlib.suppress(NameError):  # some FastAPIs look for the names of annotations in our module, not in theirs
        enter_and_run.__dict__["__signature__"] = inspect.signature(endpoint, eval_str=True)
    return enter_and_run


async def _in_one_commit(request: Request, handle: Handle, *, takes_key: bool) -> Response:
    """Run the request in one transaction, again when it lost a race, and resolve a COMMIT without an answer."""
    request = KeptRequest(request.scope, request.receive)
    await request.body()
    is_unsafe = request.method in UNSAFE
    key = _read_key(request) if takes_key and is_unsafe else None
    for attempt in range(CONFLICT_RETRIES + 1):
        try:
            return await _try(request, handle, key, confirm=is_unsafe and key is None)  # a key's row tells by itself
        except Exception as error:
            reason = _may_repeat(error, is_safe=key is not None or not is_unsafe, attempt=attempt)
            if reason is None or attempt == CONFLICT_RETRIES:
                if is_conflict(error):
                    raise Busy("lost the race for the same rows time and again: try later") from error
                raise
            HTTP_RETRIES.labels(reason).inc()
            log.info("request_repeated", reason=reason, attempt=attempt + 1)
            await asyncio.sleep(random.uniform(0.005, 0.02) * 2**attempt)  # noqa: S311 - jitter, not a secret
    raise AssertionError("unreachable: the last attempt returns or raises")


async def _try(request: Request, handle: Handle, key: str | None, *, confirm: bool) -> Response:
    async with contextlib.AsyncExitStack() as held:  # the turn ends after the transaction
        try:
            return await _run(request, handle, key, held, confirm=confirm)
        except _OutOfTurn as waiting:
            turn = waiting.turn
        await held.enter_async_context(_turns.take(turn))
        return await _run(request, handle, key, held, confirm=confirm, turn=turn)


async def _run(
    request: Request,
    handle: Handle,
    key: str | None,
    held: contextlib.AsyncExitStack,
    *,
    confirm: bool,
    turn: Turn | None = None,
) -> Response:
    db: Database = request.app.state.db
    async with _own_dependencies(request):
        try:
            async with db.transaction(confirm=confirm) as tx:
                token = _exchange.set(exchange := Exchange(request, key, tx, held, turn))
                try:
                    response = await handle(request)
                finally:
                    _exchange.reset(token)
                await exchange.leave(response)
                failpoint("http.before_commit")
            failpoint("http.before_response")
            return response
        except Replay as replay:
            HTTP_REPLAYS.labels(route_path(request.scope)).inc()
            return _replayed(replay.answer)
        except _Undone as undone:
            return undone.response
    raise RuntimeError("a dependency with yield swallowed an exception: it must raise it again")


@contextlib.asynccontextmanager
async def _own_dependencies(request: Request) -> AsyncIterator[None]:
    """Dependencies with ``yield`` end with their try; only those of the try that is answered live on as usual."""
    outer = {name: request.scope[name] for name in STACKS if name in request.scope}
    try:
        async with contextlib.AsyncExitStack() as ours:
            for name in outer:
                request.scope[name] = await ours.enter_async_context(contextlib.AsyncExitStack())
            yield
            for name, stack in outer.items():
                stack.push_async_exit(request.scope[name].pop_all())
    finally:
        request.scope.update(outer)


def _may_repeat(error: Exception, *, is_safe: bool, attempt: int) -> str | None:
    """Why the same request may run again: nothing of it was kept, or its key tells."""
    if isinstance(error, OutcomeUnknown):
        return "commit_unknown" if is_safe else None
    if is_conflict(error):
        return "conflict"
    if attempt == 0 and is_database_gone(error) and not (isinstance(error, Unavailable) and error.__cause__ is None):
        return "connection_lost"  # a pooled connection that died while it was idle; its transaction went with it
    return None


def _read_key(request: Request) -> str | None:
    given = request.headers.getlist(HEADER)
    if len(given) > 1:
        raise Malformed(f"{HEADER} is given more than once")
    return check_key(given[0]) if given else None


async def _identify(request: Request, key: str) -> Keyed:
    """Whose key it is, and what it asks for. Without identity, all callers share one space."""
    principal = getattr(request.state, "principal", None)
    caller: str = principal.caller if principal is not None else getattr(request.state, "caller", "")
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    is_json = kind == "application/json" or kind.endswith("+json")
    path = (
        quote(request.scope["path"]) + "?" + request.scope["query_string"].decode("latin-1")
    )  # url.path ends at a %23
    return Keyed(caller, key, fingerprint(request.method, path, await request.body(), is_json=is_json))


def _ttl_hours(request: Request) -> int:
    settings = getattr(request.app.state, "settings", None)
    return getattr(settings, "idempotency_ttl_hours", DEFAULT_TTL_HOURS)


def _answer(response: Response) -> Answer:
    body = getattr(response, "body", None)
    if not isinstance(body, bytes | memoryview):
        raise TypeError("a streamed answer cannot be stored with an Idempotency-Key: return a plain Response")
    headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in response.raw_headers]
    return Answer(response.status_code, [pair for pair in headers if pair[0].lower() not in NOT_STORED], bytes(body))


def _replayed(answer: Answer) -> Response:
    response = Response(answer.body, answer.status)
    for name, value in answer.headers:
        response.headers.append(name, value)
    response.headers[REPLAYED] = "true"
    return response
