"""Compiled rule sets of this process, by snapshot: a snapshot never changes, so what is here is never stale."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from uuid import UUID

from apps.finance.decisions import store
from apps.finance.decisions.compiled import CompiledSet
from apps.finance.decisions.language import parse
from apps.finance.decisions.model import (
    DecisionNotFound,
    Rule,
    RuleVersion,
    Settings,
    Snapshot,
    read_action,
    read_settings,
)
from duly import Tx

MOST_SETS = 64


@dataclass(frozen=True)
class Loaded:
    """A snapshot that can be asked."""

    id: UUID
    rule_set_id: str
    version: int
    settings: Settings
    rules: tuple[Rule, ...]
    lists: Mapping[str, frozenset[str]]
    compiled: CompiledSet


class Cache:
    """The snapshots that were used last, and for each rule set the one that was in force then."""

    def __init__(self, most: int = MOST_SETS) -> None:
        self._most = most
        self._loaded: OrderedDict[UUID, Loaded] = OrderedDict()
        self._latest: dict[str, UUID] = {}

    def latest(self, rule_set_id: str) -> Loaded | None:
        """What was in force when this process looked last; whoever uses it asks whether it still is."""
        snapshot_id = self._latest.get(rule_set_id)
        return self._loaded.get(snapshot_id) if snapshot_id else None

    async def load(self, tx: Tx, snapshot_id: UUID, *, is_current: bool = False) -> Loaded:
        """A snapshot, compiled when it is used for the first time."""
        found = self._loaded.get(snapshot_id)
        if found is None:
            snapshot = await store.find_snapshot(tx, snapshot_id)
            if snapshot is None:
                raise DecisionNotFound("the rules of this decision are older than what is kept")
            found = self._loaded[snapshot_id] = load_snapshot(snapshot)
        self._loaded.move_to_end(snapshot_id)
        if is_current:
            self._latest[found.rule_set_id] = snapshot_id
        while len(self._loaded) > self._most:
            gone, loaded = self._loaded.popitem(last=False)
            if self._latest.get(loaded.rule_set_id) == gone:
                del self._latest[loaded.rule_set_id]
        return found


def load_snapshot(snapshot: Snapshot) -> Loaded:
    """Read and compile a snapshot."""
    settings = read_settings(snapshot.settings)
    rules = tuple(read_rule(written, settings) for written in snapshot.rules)
    return Loaded(
        snapshot.id, snapshot.rule_set_id, snapshot.version, settings, rules, snapshot.lists,
        CompiledSet(settings, rules, snapshot.lists),
    )  # fmt: skip


def read_rule(written: RuleVersion, settings: Settings, *, lists: Iterable[str] | None = None) -> Rule:
    """A rule as it is evaluated; BadRule when these settings do not allow it."""
    known = None if lists is None else frozenset(lists)
    conditions = parse(written.conditions, kinds=settings.kinds, lists=known)
    decision, score = read_action(written.action, settings)
    return Rule(
        written.rule_id, written.version, written.name, written.priority, written.terminate, conditions, decision,
        score, written.action.get("reason") or "",
    )  # fmt: skip
