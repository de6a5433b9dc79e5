"""Time-ordered identifiers (UUID version 7)."""

from __future__ import annotations

import os
from uuid import UUID

from asyncpg.pgproto.pgproto import UUID as _FastUUID

from duly.clock import unix_milliseconds

_VERSION_AND_VARIANT = (0x7 << 76) | (0b10 << 62)
_RANDOM_MASK = ~((0xF << 76) | (0b11 << 62)) & ((1 << 80) - 1)
_AS_VERSION = bytes(0x70 | byte & 0x0F for byte in range(256))
_AS_VARIANT = bytes(0x80 | byte & 0x3F for byte in range(256))


def uuid7() -> UUID:
    """A new UUIDv7: 48 bits of milliseconds, then random."""
    random = int.from_bytes(os.urandom(10), "big") & _RANDOM_MASK
    return UUID(int=(unix_milliseconds() << 80) | _VERSION_AND_VARIANT | random)


def uuid7s(count: int) -> list[UUID]:
    """Many at once, of one millisecond: a tenth of the cost of each by itself."""
    stamp = unix_milliseconds().to_bytes(6, "big")
    noise = bytearray(os.urandom(10 * count))
    noise[0::10] = noise[0::10].translate(_AS_VERSION)
    noise[2::10] = noise[2::10].translate(_AS_VARIANT)
    return [_FastUUID(stamp + noise[at : at + 10]) for at in range(0, 10 * count, 10)]


def parse_uuid(text: str) -> UUID | None:
    """The UUID that ``text`` spells, or None."""
    try:
        return UUID(text)
    except ValueError:
        return None
