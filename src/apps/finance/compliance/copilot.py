"""Who explains a case to an officer: somebody plugged in, within a time budget, or what is built in.

A copilot gets names of rules, ids, amounts, counts and times, and no text that people wrote about people. Whatever it
does, the page is there: it runs in a thread of its own, few at a time, and is left behind when its time is over.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import structlog

from apps.finance.compliance.model import Alert, Case
from apps.shared.money import show
from duly.clock import monotonic

log = structlog.get_logger("apps.compliance")
BUDGET_SECONDS = 2.0
MOST_AT_ONCE = 4
MOST_CHARACTERS = 4_000
MOST_CONDITIONS = 20
BUILT_IN = "built-in"
_LATE = object()
# Facts that are numbers, ids or times; others may have been written by, or about, a person.
TELLABLE = frozenset(
    {
        "paymentId", "transactionId", "amount", "currency", "from", "to", "fromType", "toType", "fromAccount",
        "toAccount", "entryCount", "postedAt", "country", "now",
    }
)  # fmt: skip
_MEASURED = re.compile(r"[a-z]{1,20}[0-9]{1,3}[hd]")  # payments1h, moved24h
_WORDS = {
    "gt": "is above", "gte": "is at least", "lt": "is below", "lte": "is at most", "eq": "is", "ne": "is not",
    "in": "is one of", "between": "is between", "exists": "is there", "contains": "contains",
    "startsWith": "begins with", "endsWith": "ends with", "matches": "looks like",
}  # fmt: skip


@dataclass(frozen=True)
class Brief:
    """What a copilot gets to know of a case."""

    case_id: str
    kind: str
    severity: str
    amount: str
    currency: str
    outcome: str
    matched: tuple[str, ...]
    conditions: tuple[str, ...]
    lacking: tuple[str, ...]


class Copilot(Protocol):
    """Somebody who can say in words why a case is there."""

    name: str

    async def explain(self, brief: Brief) -> str:
        """A few sentences. Each call has a thread and an event loop of its own, which ends with it.

        So one that blocks holds up nobody else, and nothing that belongs to a loop (an asynchronous client, a lock, a
        task) may be kept from one call to the next: open it here, or keep something that threads may share.
        """
        ...


@dataclass(frozen=True)
class Explanation:
    """What is shown, and who said it; ``problem`` is why it is not the copilot who did."""

    text: str
    source: str
    problem: str | None = None


class Explainer:
    """Asks a copilot, if there is one, and falls back on what is built in."""

    def __init__(self, copilot: Copilot | None = None, *, budget_seconds: float = BUDGET_SECONDS) -> None:
        self._copilot = copilot
        self._budget = budget_seconds
        self._running = threading.BoundedSemaphore(MOST_AT_ONCE)

    async def explain(self, case: Case, alert: Alert) -> Explanation:
        """Never later than the budget, and never an exception. No transaction is open while it waits."""
        brief = make_brief(case, alert)
        if self._copilot is None:
            return Explanation(tell(brief), BUILT_IN)
        began = monotonic()
        said = await self._ask(self._copilot, brief)
        if isinstance(said, Explanation):
            return said
        log.warning("copilot_not_heard", case_id=str(case.id), problem=said, seconds=round(monotonic() - began, 3))
        return Explanation(tell(brief), BUILT_IN, said)

    async def _ask(self, copilot: Copilot, brief: Brief) -> Explanation | str:
        """What it said; or, in a word, why nothing."""
        if not self._running.acquire(blocking=False):
            return "busy"
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()

        def settle(value: Any) -> None:
            if not answer.done():
                answer.set_result(value)

        def run() -> None:
            try:
                said: Any = asyncio.run(asyncio.wait_for(copilot.explain(brief), self._budget))
            except TimeoutError:
                said = _LATE
            except BaseException as error:  # noqa: BLE001 - a plug-in may raise whatever it likes, and the page is shown
                said = error
            finally:
                self._running.release()
            try:
                loop.call_soon_threadsafe(settle, said)
            except RuntimeError:  # the server has stopped meanwhile
                return

        threading.Thread(target=run, name="copilot", daemon=True).start()
        done, _ = await asyncio.wait({answer}, timeout=self._budget)
        if not done or (said := answer.result()) is _LATE:
            return "too slow"
        if not isinstance(said, str) or not (text := clean(said)):
            return "failed"
        return Explanation(text, clean(str(getattr(copilot, "name", "")))[:100] or "copilot")


def make_brief(case: Case, alert: Alert) -> Brief:
    """Ids, amounts, and what the rules said about them."""
    traced = [line for line in alert.trace if line.get("outcome") == "true"]
    told = [text for line in traced for text in _conditions(line.get("conditions"), 0)]
    lacking = sorted({name for one in alert.incomplete for name in one.get("lacking", {})})
    return Brief(
        str(case.id), case.kind.value, case.severity.value, show(case.amount, case.currency), case.currency,
        alert.outcome, tuple(str(one["name"]) for one in alert.matched), tuple(told[:MOST_CONDITIONS]),
        tuple(lacking[:MOST_CONDITIONS]),
    )  # fmt: skip


def tell(brief: Brief) -> str:
    """The built-in explanation: from the decision's trace alone, the same each time."""
    what = "A payment is on hold" if brief.kind == "PAYMENT_REVIEW" else "A transaction was posted"
    said = [f"{what}: {brief.amount} {brief.currency}. The rules say {brief.outcome}."]
    if brief.matched:
        named = ", ".join(f"“{name}”" for name in brief.matched[:10])
        said.append(f"{'Rule' if len(brief.matched) == 1 else 'Rules'} that matched: {named}.")
    if brief.conditions:
        said.append("Because " + "; ".join(brief.conditions) + ".")
    if brief.lacking:
        said.append("Not known when it was decided: " + ", ".join(brief.lacking) + ".")
    if not brief.matched and not brief.lacking:
        said.append("What each rule said is no longer kept.")
    return clean(" ".join(said))


def clean(text: str) -> str:
    """Bounded and printable; one look at each character of what is kept, so it takes no longer for a nasty text."""
    kept = [
        one if one.isprintable() else " " if one in "\t\r " else "\n" if one == "\n" else ""
        for one in text[:MOST_CHARACTERS]
    ]
    return "".join(kept).strip()


def _conditions(node: Any, depth: int) -> list[str]:
    """The comparisons that made a rule match, in words; of a fact that may be about a person, only that it did."""
    if not isinstance(node, Mapping) or depth > 20:
        return []
    for name in ("all", "any"):
        parts = node.get(name)
        if isinstance(parts, Sequence):
            return [text for part in parts if part.get("outcome") == "true" for text in _conditions(part, depth + 1)]
    if "field" not in node:
        return []
    return [_compare(node)]


def _compare(node: Mapping[str, Any]) -> str:
    name, op = str(node["field"]), _WORDS.get(str(node.get("op")), str(node.get("op")))
    if name not in TELLABLE and not _MEASURED.fullmatch(name):
        return f"{name} {op} what the rule says"
    value = node.get("list") or node.get("valueField") or _show(node.get("value"))
    return f"{name} {op} {value} ({_show(node.get('fact'))})".replace("  ", " ")


def _show(value: Any) -> str:
    if isinstance(value, list):
        return " and ".join(str(one)[:60] for one in value[:5])
    return "" if value is None else str(value)[:60]
