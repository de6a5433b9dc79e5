"""One effect for one key: reserve the key, do the work, store the answer; the caller's transaction holds all three.

It knows no web framework. ``duly.http`` puts it around routes; around anything else it is used like this::

    async with db.transaction() as tx:
        answer = await reserve(tx, request)      # waits while another transaction holds the key
        if answer is None:
            answer = await work(tx)
            await store(tx, request, answer)
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from duly.db import fetch
from duly.errors import Busy, DulyError, KeyReused, Malformed
from duly.failpoints import failpoint
from duly.idempotency import sql

DEFAULT_TTL_HOURS = 24
LONGEST_KEY = 255
LARGEST_ANSWER_BYTES = 1_048_576
TRIES = 3
_KEY = re.compile(r"[\x21-\x7e]{1,255}")


@dataclass(frozen=True)
class Keyed:
    """A request that carries a key: whose it is, and what it asks for."""

    caller: str
    key: str
    fingerprint: bytes

    @property
    def kept_key(self) -> str:
        """What is kept of the key: a client may write anything into one, and a digest says nothing of a person."""
        parts = (self.caller.encode(), self.key.encode())
        return hashlib.sha256(b"".join(len(part).to_bytes(8, "big") + part for part in parts)).hexdigest()


@dataclass(frozen=True)
class Answer:
    """What was answered, byte for byte."""

    status: int
    headers: Sequence[tuple[str, str]]
    body: bytes


def check_key(key: str) -> str:
    """Refuse a key that no row could hold."""
    if not _KEY.fullmatch(key):
        raise Malformed(f"Idempotency-Key must be 1 to {LONGEST_KEY} visible ASCII characters, such as a UUID")
    return key


def fingerprint(method: str, path: str, body: bytes, *, is_json: bool) -> bytes:
    """SHA-256 over method, path and body; a JSON body counts by its content, not by its spaces or order of members."""
    normal = _normal(body) if is_json else None
    kind, content = (b"bytes", body) if normal is None else (b"json", normal)
    parts = (method.upper().encode(), path.encode("utf-8", "surrogateescape"), kind, content)
    return hashlib.sha256(b"".join(len(part).to_bytes(8, "big") + part for part in parts)).digest()


def _normal(body: bytes) -> bytes | None:
    """One spelling for one content; None for what is no JSON: that counts by its bytes."""
    try:
        content = json.loads(body, object_pairs_hook=_members, parse_float=_number, parse_constant=_number)
        return json.dumps(content, separators=(",", ":")).encode()
    except (ValueError, RecursionError):
        return None


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Members in one order; an object is wrapped, so that none can pass for a number."""
    return {"object": sorted(pairs, key=lambda pair: pair[0])}


def _number(digits: str) -> dict[str, str]:
    """A fraction keeps its digits: 1.0 and 1.00 are two requests."""
    return {"number": digits}


async def reserve(tx: Any, request: Keyed, *, ttl_hours: int = DEFAULT_TTL_HOURS) -> Answer | None:
    """None: the key is ours, do the work. An answer: it was done before. Waits while another one is at it."""
    for _ in range(TRIES):
        reserved = await fetch(
            tx, sql.RESERVE_KEY,
            caller=request.caller, key=request.kept_key, verbatim=request.key, fingerprint=request.fingerprint,
            ttl_hours=ttl_hours,
        )  # fmt: skip
        if reserved:
            failpoint("idempotency.reserved")
            return None
        found = await fetch(tx, sql.FIND_ANSWER, caller=request.caller, key=request.kept_key, verbatim=request.key)
        if found:
            return _read(request, found[0])
    raise Busy("the idempotency key comes and goes: try again")  # the clean-up deleted it between two statements


def _read(request: Keyed, row: Sequence[Any]) -> Answer:
    if bytes(row[0]) != request.fingerprint:
        raise KeyReused("this Idempotency-Key came with another request before: use a new key for a new request")
    if row[1] is None:
        raise DulyError("this Idempotency-Key was committed without an answer: whoever reserves must store")
    headers = [(name, value) for name, value in json.loads(row[2])]
    return Answer(row[1], headers, bytes(row[3]))


async def store(tx: Any, request: Keyed, answer: Answer) -> None:
    """Write the answer beside the effect."""
    if len(answer.body) > LARGEST_ANSWER_BYTES:
        raise DulyError(f"an answer that is stored with a key may have {LARGEST_ANSWER_BYTES} bytes, not more")
    written = await fetch(
        tx, sql.STORE_ANSWER,
        caller=request.caller, key=request.kept_key, status=answer.status,
        headers=json.dumps([list(pair) for pair in answer.headers]), body=answer.body,
    )  # fmt: skip
    failpoint("idempotency.stored")
    if not written:
        raise Busy("the idempotency key was lost before its answer could be stored")
