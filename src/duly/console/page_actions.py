"""The forms: every action of the registry can be asked about (GET) and done (POST)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from fastapi import Request
from fastapi.responses import RedirectResponse, Response

from duly.console.routes import MOUNT, BadQuery, Pages, Query, read, show, signed_in
from duly.console.sign_in import local_path
from duly.errors import Forbidden
from duly.idempotency.guard import Answer, Keyed, check_key, fingerprint, reserve, store
from duly.operate.actions import Action, Arguments, Result, find_action, read_arguments
from duly.operate.arguments import BULK_LIMIT
from duly.operate.counts import Count

if TYPE_CHECKING:
    from duly.console.app import Console
    from duly.db import Tx

SECRET = "secret"  # noqa: S105 - the field of it; it is never in an address, nor repeated on a page
OURS = frozenset({"reason", "return_to", "confirmed", "once"})  # fields of the form that are not the action's
LONGEST_WORD = 100


def register(pages: Pages) -> None:
    """Add these routes."""
    pages.get("/actions/{name}")(ask)
    pages.post("/actions/{name}")(act)


async def ask(request: Request, name: str) -> Response:
    """What would be done, to how many, and why: the page before something that cannot be undone."""
    if not signed_in(request).may_act:
        raise Forbidden("you may look, but not change anything: this needs the role ADMINISTRATOR")
    action = find_action(name)
    query = Query(request)
    if query.text(SECRET, longest=20_000) is not None:
        raise BadQuery("a secret is never part of an address: this one is known now, use another")
    given = {field: value for field in action.arguments.model_fields if (value := query.text(field, longest=20_000))}
    return await _confirm(request, action, given, query.text("return_to", longest=1_000) or "")


async def act(request: Request, name: str) -> Response:
    """Do it and audit it in one commit, as the person who is signed in."""
    console: Console = request.app.state.console
    action, form = find_action(name), request.state.form
    empty = action.arguments.may_be_empty
    given = {field: value for field, value in form.items() if field not in OURS and (value.strip() or field in empty)}
    arguments = read_arguments(action, given)
    if action.is_destructive and form.get("confirmed") != "yes":
        return await _confirm(request, action, given, form.get("return_to", ""))
    actor, reason = signed_in(request).actor, form.get("reason", "").strip() or None
    asked = _asked(actor, name, form)

    async def work(tx: Tx) -> Result:
        if asked is not None and (before := await reserve(tx, asked)) is not None:
            return _again(before)
        result = await action.run(tx, arguments, actor, reason)
        if asked is not None:
            await store(tx, asked, _kept(result))
        return result

    result = await console.db.run(work)
    return_to = local_path(form.get("return_to", ""))
    if result.secret is not None:
        return show(request, "secret.html", result=result, return_to=return_to)
    if result.rest is not None:
        return_to = f"{MOUNT}/actions/{name}?{urlencode({**result.rest, 'return_to': return_to})}"
    response = RedirectResponse(return_to, status_code=303)
    response.headers["Cache-Control"] = "no-store"
    console.note(request, response, result.message[:1].upper() + result.message[1:] + ".")
    return response


def _asked(actor: str, name: str, form: Mapping[str, str]) -> Keyed | None:
    """A form as its page made it, sent twice by two clicks, is one request; filled in anew, it is another."""
    word = form.get("once", "")
    if not word:
        return None
    sent = urlencode(sorted((field, value) for field, value in form.items() if field != SECRET))
    digest = fingerprint("POST", f"{MOUNT}/actions/{name}", sent.encode(), is_json=False)
    return Keyed(f"console:{actor}", check_key(f"{word[:LONGEST_WORD]}.{digest.hex()}"), digest)


def _kept(result: Result) -> Answer:
    kept = {"message": result.message, "rest": dict(result.rest) if result.rest else None}
    return Answer(303, (), json.dumps(kept).encode())


def _again(before: Answer) -> Result:
    """What the first click did, without its secret: that was shown once."""
    kept = json.loads(before.body)
    return Result(f"{kept['message']}; it was done by your first click, and not again", rest=kept["rest"])


async def _confirm(request: Request, action: Action, given: Mapping[str, Any], return_to: str) -> Response:
    arguments = read_arguments(action, given)
    count = await _count(request, action, arguments)
    shown = {name: value for name, value in given.items() if name not in ("limit", SECRET)}
    hidden = dict(given)
    if count is not None:
        hidden["limit"] = str(max(1, min(count.number, BULK_LIMIT)))  # no more than were counted
    return show(
        request, "confirm.html", action=action, given=shown, hidden=hidden, count=count, limit=BULK_LIMIT,
        return_to=local_path(return_to),
    )  # fmt: skip


async def _count(request: Request, action: Action, arguments: Arguments) -> Count | None:
    if action.count is None:
        return None
    async with read(request) as look:
        return await action.count(look.tx, arguments)
