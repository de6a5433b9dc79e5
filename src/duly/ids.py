"""Time-ordered identifiers (UUID version 7)."""

from __future__ import annotations

import os
from uuid import UUID

from duly.clock import unix_milliseconds

_VERSION_AND_VARIANT = (0x7 << 76) | (0b10 << 62)
_RANDOM_MASK = ~((0xF << 76) | (0b11 << 62)) & ((1 << 80) - 1)


def uuid7() -> UUID:
    """A new UUIDv7: 48 bits of milliseconds, then random."""
    random = int.from_bytes(os.urandom(10), "big") & _RANDOM_MASK
    return UUID(int=(unix_milliseconds() << 80) | _VERSION_AND_VARIANT | random)


def parse_uuid(text: str) -> UUID | None:
    """The UUID that ``text`` spells, or None."""
    try:
        return UUID(text)
    except ValueError:
        return None
