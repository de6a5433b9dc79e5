"""What an operator may give, checked before any SQL sees it."""

from __future__ import annotations

from duly.errors import Invalid, NotFound

PAGE_LIMIT = 1_000
BULK_LIMIT = 1_000  # each may take a lock of its order, and the server has room for some thousand locks
TEXT_LIMIT = 200
REASON_LIMIT = 2_000
LARGEST_ID = 2**63 - 1


def signed(*, actor: str, reason: str | None) -> dict[str, str | None]:
    """Who acts and why, for the audit row; an action without an actor is refused."""
    return {"actor": _filled("the actor", actor, TEXT_LIMIT), "reason": _optional("the reason", reason, REASON_LIMIT)}


def filter_text(what: str, value: str | None) -> str | None:
    """A filter that PostgreSQL can compare with, or None."""
    return _optional(what, value, TEXT_LIMIT)


def page_size(limit: int) -> int:
    """How many rows one page may have."""
    return _between("limit", limit, PAGE_LIMIT)


def bulk_size(limit: int) -> int:
    """How many rows one bulk action may change."""
    return _between("limit", limit, BULK_LIMIT)


def row_id(what: str, id: int) -> int:
    """An id that a bigint column can hold; any other one belongs to nothing."""
    if not 0 < id <= LARGEST_ID:
        raise NotFound(f"no {what} has the id {id}")
    return id


def _between(what: str, value: int, largest: int) -> int:
    if not 1 <= value <= largest:
        raise Invalid(f"{what}={value}: give 1 to {largest}")
    return value


def _filled(what: str, value: str, longest: int) -> str:
    given = value.strip()
    if not 1 <= len(given) <= longest or "\x00" in given:
        raise Invalid(f"{what} must be text of 1 to {longest} characters")
    return given


def _optional(what: str, value: str | None, longest: int) -> str | None:
    return _filled(what, value, longest) if value is not None and value.strip() else None
