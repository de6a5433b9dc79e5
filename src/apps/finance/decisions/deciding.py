"""A verdict on its way into the log: what one evaluation writes there, and many at once."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from apps.finance.decisions.compiled import ENGINE
from apps.finance.decisions.loading import Loaded
from apps.finance.decisions.model import Decision, Verdict
from duly.clock import monotonic


@dataclass(frozen=True, slots=True)
class Decided:
    """A verdict that is not logged yet."""

    loaded: Loaded
    recorded: dict[str, Any]
    subject: str | None
    verdict: Verdict
    latency_us: int

    def as_row(self) -> dict[str, Any]:
        """For the log; the id and the moment are not in it."""
        loaded, verdict = self.loaded, self.verdict
        return {
            "rule_set_id": loaded.rule_set_id, "rule_set_version": loaded.version, "snapshot_id": loaded.id,
            "engine": ENGINE, "subject": self.subject, "decision": verdict.decision.value, "score": verdict.score,
            "facts": json.dumps(self.recorded), "evaluated": verdict.evaluated, "latency_us": self.latency_us,
            "matched": json.dumps([[str(one.rule_id), one.version] for one in verdict.matched]),
            "incomplete": json.dumps([[str(one.rule_id), one.version] for one in verdict.incomplete]),
        }  # fmt: skip

    def as_logged(self, decision_id: UUID, at: datetime, *, ignored: Iterable[str] = ()) -> Decision:
        """As it is in the log by now."""
        loaded = self.loaded
        return Decision(
            decision_id, loaded.rule_set_id, loaded.version, loaded.id, ENGINE, self.subject, at, self.recorded,
            self.verdict, self.latency_us, tuple(ignored),
        )  # fmt: skip


def decide(loaded: Loaded, recorded: dict[str, Any], subject: str | None) -> Decided:
    """Ask the rules, and note how long that took."""
    began = monotonic()
    verdict = loaded.compiled.decide(recorded)
    return Decided(loaded, recorded, subject, verdict, round((monotonic() - began) * 1_000_000))
