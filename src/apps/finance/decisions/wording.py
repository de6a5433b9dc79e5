"""Rules in words: conditions and traces as lines that a person reads, and what differs between two versions."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from apps.finance.decisions.model import RuleVersion

MOST_SHOWN = 10
GROUPS: Mapping[str, str] = {"all": "all of these", "any": "any of these", "not": "not this"}
OPERATORS: Mapping[str, str] = {
    "eq": "is", "ne": "is not", "lt": "is less than", "lte": "is at most", "gt": "is more than", "gte": "is at least",
    "between": "is between", "in": "is one of", "startsWith": "starts with", "endsWith": "ends with",
    "contains": "contains", "matches": "matches the pattern", "exists": "is given",
}  # fmt: skip
ANSWERS: Mapping[str, str] = {
    "true": "yes", "false": "no", "unknown": "cannot be said", "missing": "it is missing", "null": "it is null",
    "wrong_type": "it is of the wrong type",
}  # fmt: skip
OUTCOMES: Mapping[str, str] = {
    "true": "matched", "false": "did not match", "unknown": "could not be answered", "not_asked": "was not asked",
}  # fmt: skip
INDENT = "    "


@dataclass(frozen=True)
class Line:
    """One condition in words; where it was asked, what it said and about which fact."""

    depth: int
    text: str
    outcome: str = ""
    fact: str | None = None

    @property
    def answer(self) -> str:
        """The outcome as a person says it."""
        return ANSWERS.get(self.outcome, self.outcome)


def say(conditions: Any) -> list[Line]:
    """Conditions as they are written, or as a trace tells them, a line each."""
    return list(_say(conditions, 0))


def _say(node: Any, depth: int) -> Iterator[Line]:
    if not isinstance(node, Mapping):
        return
    outcome = str(node.get("outcome", ""))
    group = next((name for name in GROUPS if name in node), None)
    if group is None:
        fact = _show(node["fact"]) if "fact" in node else None
        yield Line(depth, _sentence(node), outcome, fact)
        return
    inner = node[group]
    yield Line(depth, GROUPS[group], outcome)
    for part in inner if isinstance(inner, list) else [inner]:
        yield from _say(part, depth + 1)


def _sentence(node: Mapping[str, Any]) -> str:
    op = str(node.get("op", ""))
    words = [str(node.get("field", "")), OPERATORS.get(op, op)]
    if "list" in node:
        words[1:] = ["is in the list", str(node["list"])]
    elif "valueField" in node:
        words.append(str(node["valueField"]))
    elif "value" in node:
        between = op == "between" and isinstance(node["value"], list) and len(node["value"]) == 2
        words.append(" and ".join(map(_show, node["value"])) if between else _show(node["value"]))
    said = " ".join(words)
    if isinstance(node.get("otherwise"), bool):
        said += f" ({'yes' if node['otherwise'] else 'no'} if it is not known)"
    return said


def _show(value: Any) -> str:
    if isinstance(value, list | tuple):
        shown = ", ".join(map(_show, value[:MOST_SHOWN]))
        return f"{shown} and {len(value) - MOST_SHOWN} more" if len(value) > MOST_SHOWN else shown
    if isinstance(value, bool):
        return "true" if value else "false"
    return "nothing" if value is None else str(value)


@dataclass(frozen=True)
class Difference:
    """What differs between two versions of a rule.

    ``members`` are name, before and after; ``lines`` are the conditions, each kept, gone (``-``) or new (``+``).
    """

    members: Sequence[tuple[str, str, str]]
    lines: Sequence[tuple[str, str]]

    @property
    def is_empty(self) -> bool:
        """Whether both say the same."""
        return not self.members and all(mark == "" for mark, _ in self.lines)


def compare(before: RuleVersion | None, after: RuleVersion) -> Difference:
    """What a version changes; of the first one, everything is new."""
    was, is_now = _members(before) if before is not None else {}, _members(after)
    members = [(name, was.get(name, ""), value) for name, value in is_now.items() if was.get(name, "") != value]
    old, new = _indented(before.conditions) if before is not None else [], _indented(after.conditions)
    lines: list[tuple[str, str]] = []
    for kind, first, last, start, end in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if kind == "equal":
            lines += [("", line) for line in new[start:end]]
            continue
        lines += [("-", line) for line in old[first:last]]
        lines += [("+", line) for line in new[start:end]]
    return Difference(members, lines)


def _indented(conditions: Any) -> list[str]:
    return [INDENT * line.depth + line.text for line in say(conditions)]


def _members(version: RuleVersion) -> dict[str, str]:
    action = version.action
    return {
        "name": version.name, "decision": str(action.get("decision") or ""),
        "score": str(action["score"]) if action.get("score") is not None else "",
        "says": str(action.get("reason") or ""), "priority": str(version.priority),
        "ends the evaluation": "yes" if version.terminate else "no",
    }  # fmt: skip
