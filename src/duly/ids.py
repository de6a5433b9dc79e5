"""Time-ordered identifiers (UUID version 7)."""

from __future__ import annotations

import os
from uuid import UUID

from asyncpg.pgproto.pgproto import UUID as _FastUUID

from duly.clock import unix_milliseconds

_VERSION_AND_VARIANT = (0x7 << 76) | (0b10 << 62)
_RANDOM_MASK = ~((0xF << 76) | (0b11 << 62)) & ((1 << 80) - 1)


def uuid7() -> UUID:
    """A new UUIDv7: 48 bits of milliseconds, then random."""
    random = int.from_bytes(os.urandom(10), "big") & _RANDOM_MASK
    return UUID(int=(unix_milliseconds() << 80) | _VERSION_AND_VARIANT | random)


def uuid7s(count: int) -> list[UUID]:
    """Many at once, for one millisecond: a tenth of the cost of each by itself."""
    stamp = (unix_milliseconds() << 80) | _VERSION_AND_VARIANT
    noise = os.urandom(10 * count)
    return [
        _FastUUID((stamp | (int.from_bytes(noise[at : at + 10], "big") & _RANDOM_MASK)).to_bytes(16, "big"))
        for at in range(0, 10 * count, 10)
    ]


def parse_uuid(text: str) -> UUID | None:
    """The UUID that ``text`` spells, or None."""
    try:
        return UUID(text)
    except ValueError:
        return None
