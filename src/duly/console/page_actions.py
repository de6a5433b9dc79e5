"""The forms: every action of the registry can be asked about (GET) and done (POST)."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from fastapi import Request
from fastapi.responses import RedirectResponse, Response

from duly.console.forms import Wrong, read_wrong
from duly.console.routes import MOUNT, BadQuery, Pages, Query, for_anyone, read, show, signed_in
from duly.console.sign_in import local_path
from duly.errors import Conflict, Fault, Forbidden, Invalid
from duly.idempotency.guard import Answer, Keyed, check_key, fingerprint, reserve, store
from duly.operate.actions import Action, Arguments, Result, read_arguments
from duly.operate.arguments import BULK_LIMIT
from duly.operate.counts import Count

if TYPE_CHECKING:
    from duly.console.app import Console
    from duly.db import Tx

SECRET = "secret"  # noqa: S105 - the field of it; it is never in an address, nor repeated on a page
OURS = frozenset({"reason", "return_to", "confirmed", "asked", "once"})  # fields of the form that are not the action's
LONGEST_WORD = 100


def register(pages: Pages) -> None:
    """Add these routes."""
    pages.get("/actions/{name}")(ask)
    pages.post("/actions/{name}")(act)


@for_anyone
async def ask(request: Request, name: str) -> Response:
    """What would be done, to how many, and why: the page before something that cannot be undone."""
    action = _allowed(request, name)
    query = Query(request)
    if query.text(SECRET, longest=20_000) is not None:
        raise BadQuery("a secret is never part of an address: this one is known now, use another")
    given = {field: value for field in action.arguments.model_fields if (value := query.text(field, longest=20_000))}
    return await _confirm(request, action, given, query.text("return_to", longest=1_000) or "")


@for_anyone
async def act(request: Request, name: str) -> Response:
    """Do it and audit it in one commit, as the person who is signed in.

    What is refused is said on the page that has the form, if a section names one: at the field, with what was typed.
    """
    console: Console = request.app.state.console
    action, form = _allowed(request, name), request.state.form
    try:
        return await _act(request, action, form)
    except (Invalid, Conflict, Forbidden) as error:
        page = console.rights.find_form(name)
        if page is None:
            raise
        wrong = read_wrong(error, form, {*action.arguments.model_fields, "reason"}, action=name)
        return await page(request, wrong)


def _allowed(request: Request, name: str) -> Action:
    """The action, for whoever may do it; what is not there is not there for administrators only."""
    rights, session = request.app.state.console.rights, signed_in(request)
    rights.check_do(session, name)
    action: Action = rights.find_action(name)
    return action


async def _act(request: Request, action: Action, form: Mapping[str, str]) -> Response:
    console: Console = request.app.state.console
    empty = action.arguments.may_be_empty
    given = {field: value for field, value in form.items() if field not in OURS and (value.strip() or field in empty)}
    arguments = read_arguments(action, given)
    if action.is_destructive and form.get("confirmed") != "yes":
        return await _confirm(request, action, given, form.get("return_to", ""), reason=form.get("reason", ""))
    reason = form.get("reason", "").strip() or None
    if action.needs_reason and reason is None:
        if form.get("asked") == "yes" or console.rights.find_form(action.name) is None:
            return await _confirm(request, action, given, form.get("return_to", ""), wrong=_missing_reason(form))
        raise _reason_needed()
    result = await console.db.run(_work(request, action, arguments, form, reason))
    return_to = f"{MOUNT}{result.page}" if result.page is not None else local_path(form.get("return_to", ""))
    if result.secret is not None:
        return show(request, "secret.html", result=result, return_to=return_to)
    if result.rest is not None:
        return_to = f"{MOUNT}/actions/{action.name}?{urlencode({**result.rest, 'return_to': return_to})}"
    response = RedirectResponse(return_to, status_code=303)
    response.headers["Cache-Control"] = "no-store"
    tone = "bad" if result.is_refused else "good"
    console.note(request, response, result.message[:1].upper() + result.message[1:] + ".", tone=tone)
    return response


def _work(
    request: Request, action: Action, arguments: Arguments, form: Mapping[str, str], reason: str | None
) -> Callable[[Tx], Awaitable[Result]]:
    """What runs in the transaction, once for all clicks on one form.

    A section's services know people as its API does, by their subject: one person has one name for them.
    """
    session = signed_in(request)
    is_of_section = request.app.state.console.rights.is_of_section(action.name)
    actor = session.subject if is_of_section else session.actor
    asked = _asked(session.actor, action.name, form)

    async def work(tx: Tx) -> Result:
        if asked is not None and (before := await reserve(tx, asked)) is not None:
            return _again(before)
        result = await action.run(tx, arguments, actor, reason)
        if asked is not None:
            await store(tx, asked, _kept(result))
        return result

    return work


def _reason_needed() -> Invalid:
    refusal = Invalid("say why")
    refusal.faults = (Fault("body", "$.reason", "say why"),)
    return refusal


def _missing_reason(form: Mapping[str, str]) -> Wrong:
    return read_wrong(_reason_needed(), form, {"reason"})


def _asked(actor: str, name: str, form: Mapping[str, str]) -> Keyed | None:
    """A form as its page made it, sent twice by two clicks, is one request; filled in anew, it is another."""
    word = form.get("once", "")
    if not word:
        return None
    sent = urlencode(sorted((field, value) for field, value in form.items() if field != SECRET))
    digest = fingerprint("POST", f"{MOUNT}/actions/{name}", sent.encode(), is_json=False)
    return Keyed(f"console:{actor}", check_key(f"{word[:LONGEST_WORD]}.{digest.hex()}"), digest)


def _kept(result: Result) -> Answer:
    rest = dict(result.rest) if result.rest else None
    kept = {"message": result.message, "rest": rest, "page": result.page, "is_refused": result.is_refused}
    return Answer(303, (), json.dumps(kept).encode())


def _again(before: Answer) -> Result:
    """What the first click did, without its secret: that was shown once."""
    kept = json.loads(before.body)
    said = f"{kept['message']}; it was done by your first click, and not again"
    return Result(said, rest=kept["rest"], page=kept.get("page"), is_refused=kept.get("is_refused", False))


async def _confirm(
    request: Request,
    action: Action,
    given: Mapping[str, Any],
    return_to: str,
    *,
    reason: str = "",
    wrong: Wrong | None = None,
) -> Response:
    arguments = read_arguments(action, given)
    count = await _count(request, action, arguments)
    shown = {name: value for name, value in given.items() if name not in ("limit", SECRET)}
    hidden = dict(given)
    if count is not None:
        hidden["limit"] = str(max(1, min(count.number, BULK_LIMIT)))  # no more than were counted
    return show(
        request, "confirm.html", action=action, given=shown, hidden=hidden, count=count, limit=BULK_LIMIT,
        return_to=local_path(return_to), reason=reason, wrong=wrong, status=wrong.status if wrong else 200,
    )  # fmt: skip


async def _count(request: Request, action: Action, arguments: Arguments) -> Count | None:
    if action.count is None:
        return None
    async with read(request) as look:
        return await action.count(look.tx, arguments)
