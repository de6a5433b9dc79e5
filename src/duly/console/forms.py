"""A form that was refused: what it said and what is wrong with it, so that its page can be shown again."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from duly.errors import DulyError

_MEMBER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
MARKED = "Nothing was changed: see what is marked below."


@dataclass(frozen=True)
class Wrong:
    """What a form said, and why it was refused: sentences by field, and one for all of it.

    A page with several forms shows it in the one of ``action``.
    """

    given: Mapping[str, str]
    status: int
    sentence: str
    at: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    action: str = ""

    def of(self, action: str) -> Wrong | None:
        """It, if it is about the form of this action."""
        return self if self.action == action else None


def read_wrong(error: DulyError, given: Mapping[str, str], fields: Collection[str], *, action: str = "") -> Wrong:
    """What is wrong, at the fields where it is.

    A fault names a place in JSON; the first member on the way there that is a field of the form is where it is shown,
    with the place itself if that is deeper.
    """
    at: dict[str, list[str]] = {}
    is_elsewhere = not error.faults
    for fault in error.faults:
        names = [_HUMP.sub("_", name).lower() for name in _MEMBER.findall(fault.path)]
        found = next((name for name in names if name in fields), None)
        if found is None:
            is_elsewhere = True
            continue
        is_deeper = names[-1] != found or fault.path.endswith("]")
        at.setdefault(found, []).append(f"{fault.path}: {fault.detail}" if is_deeper else fault.detail)
    sentence = str(error)[:1].upper() + str(error)[1:] if is_elsewhere else MARKED
    return Wrong(given, error.status, sentence, {name: tuple(said) for name, said in at.items()}, action)
