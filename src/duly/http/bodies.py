"""The body of a request: read once and kept, and JSON without the parts that readers understand differently."""

from __future__ import annotations

import json
import re
from typing import Any

from fastapi import HTTPException, Request
from starlette.requests import ClientDisconnect

from duly.errors import DulyError, Malformed

MOST_LEVELS = 64
MOST_PARTS = 20_000  # a megabyte of brackets keeps the event loop busy for a second
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class Unreadable(HTTPException):
    """An error of ours in FastAPI's clothes: it turns whatever else is raised while it reads a body into a 400."""

    def __init__(self, error: DulyError) -> None:
        super().__init__(error.status, str(error))
        self.error = error


class KeptRequest(Request):
    """A request whose body can be read again: by a second try, by a form, by the fingerprint."""

    async def body(self) -> bytes:
        """All of it; the boundary limits its size and its time."""
        try:
            return await super().body()
        except ClientDisconnect:
            raise Unreadable(Malformed("the client left before its body was complete")) from None

    async def json(self) -> Any:
        """The body as JSON, or 400."""
        if not hasattr(self, "_json"):
            try:
                self._json = read_json(await self.body())
            except ValueError as error:
                if isinstance(error, json.JSONDecodeError | UnicodeDecodeError):
                    raise Unreadable(Malformed("the body is not JSON")) from None
                raise Unreadable(Malformed(f"the body is not JSON that can be read: {error}")) from None
        return self._json


def read_json(body: bytes) -> Any:
    """What RFC 8259 calls interoperable; ValueError, in words without values, for the rest."""
    text = body.decode("utf-8-sig")  # left to itself, json.loads reads other encodings too, and halves of surrogates
    if text.count("[") + text.count("{") + text.count(",") > MOST_PARTS:
        raise ValueError(f"it has more than {MOST_PARTS} parts")
    try:
        content = json.loads(
            text, object_pairs_hook=_unique, parse_constant=_refuse, parse_float=_finite, parse_int=_whole
        )
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if text.count("[") + text.count("{") > MOST_LEVELS:
        _check_levels(content)
    if _SURROGATE.search(text):
        _check_text(content)
    return content


def _check_levels(content: Any) -> None:
    level = [content]
    for _ in range(MOST_LEVELS + 1):
        level = [outer for outer in level if isinstance(outer, dict | list)]
        if not level:
            return
        level = [inner for outer in level for inner in (outer.values() if isinstance(outer, dict) else outer)]
    raise ValueError(f"it is nested deeper than {MOST_LEVELS} levels")


def _check_text(content: Any) -> None:
    try:
        json.dumps(content, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("half of a surrogate pair is no text") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a member occurs twice")
    return made


def _refuse(_constant: str) -> None:
    raise ValueError("NaN and Infinity are no numbers of JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    if number in (float("inf"), float("-inf")):
        raise ValueError("a number is too large")
    return number


def _whole(digits: str) -> int:
    try:
        return int(digits)
    except ValueError:
        raise ValueError("a number is too long") from None
