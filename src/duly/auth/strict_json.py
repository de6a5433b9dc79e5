"""JSON without the parts that mean different things to different readers."""

from __future__ import annotations

import json
from typing import Any


def parse_object(content: bytes) -> dict[str, Any]:
    """An object in UTF-8: each name once, and no NaN or Infinity; ValueError otherwise."""
    try:
        parsed = json.loads(content.decode(), object_pairs_hook=_unique, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(parsed, dict):
        raise ValueError("not an object")
    return parsed


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a name occurs twice")
    return made


def _refuse(_constant: str) -> None:
    raise ValueError("not a number of JSON")
