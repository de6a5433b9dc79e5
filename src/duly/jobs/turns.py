"""Whose turn it is (pure): those who share a worker get alike of it, however many others have nothing to do."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from typing import TypeVar

Who = TypeVar("Who")


def begin(names: Iterable[str], worker: str) -> list[str]:
    """An order of this worker's own: workers that begin together, or die soon, do not all favour the same name."""
    return sorted(names, key=lambda name: zlib.crc32(f"{worker} {name}".encode()))


def give_way(order: list[Who], got: Mapping[Who, int]) -> None:
    """Who got nothing is first the next time and who got most is last; equals stay in the order they had."""
    order.sort(key=lambda who: got.get(who, 0))
