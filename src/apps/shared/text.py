"""Text from outside: bounded, trimmed, and such that PostgreSQL can store it."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints

# Something visible, and no control characters: NUL cannot be stored, and the others forge lines wherever it is printed.
# Joiners and marks of direction belong into names, but are none alone.
_IN_LINE = r"[^\x00-\x1f\x7f-\x9f\u2028\u2029]*"
_UNSEEN = (
    r"\u00ad\u034f\u061c\u115f\u1160\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u2800\u3164\ufe00-\ufe0f\ufeff"
    r"\uffa0"
)
_SEEN = r"[^\s\x00-\x1f\x7f-\x9f\u2028\u2029" + _UNSEEN + "]"
ONE_LINE = "^" + _IN_LINE + _SEEN + _IN_LINE + "$"
EXACT = r"^[^\s\x00-\x1f\x7f-\x9f\u2028\u2029]([^\x00-\x1f\x7f-\x9f\u2028\u2029]*[^\s\x00-\x1f\x7f-\x9f\u2028\u2029])?$"
"""One line without spaces around it: what must be the same as somebody else's, letter by letter."""
_LINES = r"[^\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]*"
SEVERAL_LINES = "^" + _LINES + _SEEN + _LINES + "$"

Name = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=200, pattern=ONE_LINE)]
"""A name, or an identifier that somebody else chose: one line."""

Prose = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=4_000, pattern=SEVERAL_LINES)]
"""A description: several lines."""

PageSize = Annotated[int, Field(ge=1, le=200)]
