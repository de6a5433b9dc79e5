"""duly, the raw limit and the peers, round by round in turn, on one server: rates, ratios, and the latency."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg

from benchmarks.application import EFFECTS_TABLE
from benchmarks.link import Child, Failed
from benchmarks.queue import drain, fill, fill_outbox, rate_of
from benchmarks.results import Figures, percentile, short
from benchmarks.server import Databases, settle_down
from duly.clock import monotonic

SHARED_FIGURES = ("noop", "enqueue_one", "enqueue_bulk", "latency")
OWN_FIGURES = ("transactional", "writing", "processes", "relay", "consumers")
PREPARE_SECONDS = 900.0
STRAGGLER_SECONDS = 15.0
KILL_AFTER_SECONDS = 30.0  # beyond the time a peer was given to end by itself
PEER_FIRST_SIZE = 500
PEER_TARGET_SECONDS = 4.0

Contestant = Callable[[], Any]


@dataclass(frozen=True)
class Sizes:
    """How much of each."""

    rounds: int = 3
    jobs: int = 150_000
    each: int = 3_000
    events: int = 10_000
    latency: int = 500
    timeout_seconds: float = 120.0

    @classmethod
    def tiny(cls, jobs: int = 200) -> Sizes:
        """To see that it works."""
        return cls(rounds=1, jobs=jobs, each=min(jobs, 200), events=min(jobs, 1_000), latency=min(jobs, 50))


@dataclass
class Bench:
    """One run: everybody's figures in turn, kept at once; whoever fails is left out with the reason."""

    server: Databases
    figures: Figures
    sizes: Sizes
    peers: Sequence[str] = ()
    cache: Path = Path(".venv/peers")
    _peer_sizes: dict[tuple[str, str], int] = field(default_factory=dict)
    _gone: set[tuple[str, str]] = field(default_factory=set)

    def run(self, wanted: Sequence[str]) -> None:
        """These figures, one after the other."""
        programme = self.programme()
        for figure in wanted:
            self._measure(figure, programme[figure])

    def programme(self) -> dict[str, dict[str, Contestant]]:
        """Who is measured at what."""
        own: dict[str, dict[str, Contestant]] = {
            "noop": self._noop(),
            "enqueue_one": self._enqueue("enqueue_each", "raw_insert_each", self.sizes.each),
            "enqueue_bulk": self._enqueue("enqueue_bulk", "raw_copy_bulk", self.sizes.jobs),
            "latency": {
                "duly": lambda: self._latency("answer", "ask"),
                "raw": lambda: self._latency("raw_answer", "raw_ask"),
            },
        }
        for figure, contestants in own.items():
            for peer in self.peers:
                contestants[peer] = functools.partial(self._peer, peer, figure)
        return own | self._engine_only()

    def _measure(self, figure: str, contestants: dict[str, Contestant]) -> None:
        for number in range(self.sizes.rounds):
            for name, contest in contestants.items():
                if (figure, name) in self._gone:
                    continue
                began = monotonic()
                try:
                    value = contest()
                except (Failed, psycopg.Error, OSError) as error:
                    self._left_out(figure, name, str(error))
                    continue
                if value is None:
                    self._left_out(figure, name, "not offered")
                    continue
                self.figures.add(figure, number, name, value)
                took = monotonic() - began
                print(f"{figure:14} round {number + 1}  {name:24} {_shown(value):>24}  ({took:.1f} s)", flush=True)

    def _left_out(self, figure: str, name: str, reason: str) -> None:
        """A peer that failed once is not tried at this figure again; ours may have had bad luck."""
        if name in self.peers:
            self._gone.add((figure, name))
        self.figures.note("missing", f"{figure}, {name}", short(reason))
        print(f"{figure:14} {name}: left out: {reason}", flush=True)

    # -- duly and raw -------------------------------------------------------------------------------------------

    def _noop(self) -> dict[str, Contestant]:
        return {
            "duly": lambda: self._drain("noop", self.sizes.jobs),
            "raw": lambda: self._raw("raw_drain_in_turn", self.sizes.jobs),
            "raw-overlapped": lambda: self._raw("raw_drain_overlapped", self.sizes.jobs),
        }

    def _enqueue(self, ours: str, raw: str, count: int) -> dict[str, Contestant]:
        return {
            "duly": lambda: self._alone(ours, count),
            "duly-asyncpg": lambda: self._alone(ours, count, bare=True),
            "raw": lambda: self._alone(raw, count),
        }

    def _engine_only(self) -> dict[str, dict[str, Contestant]]:
        jobs, each, events = self.sizes.jobs, self.sizes.each, self.sizes.events
        return {
            "transactional": {
                "each": lambda: self._drain("each", each),
                "each-asyncpg": lambda: self._drain("each-asyncpg", each),
                "group-100": lambda: self._drain("group-100", jobs),
                "group-500": lambda: self._drain("group-500", jobs),
                "raw-each": lambda: self._raw("raw_commit_each", each),
            },
            "writing": {
                "write-each": lambda: self._drain("write-each", each),
                "write-each-asyncpg": lambda: self._drain("write-each-asyncpg", each),
                "write-group-100": lambda: self._drain("write-group-100", jobs),
                "write-group-100-asyncpg": lambda: self._drain("write-group-100-asyncpg", jobs),
                "raw-write-each": lambda: self._raw("raw_commit_each", each, writes=True),
            },
            "processes": {
                "1": lambda: self._drain("noop", jobs, processes=1),
                "2": lambda: self._drain("noop", jobs, processes=2),
                "4": lambda: self._drain("noop", jobs, processes=4),
            },
            "relay": {
                "batch-100": lambda: self._relay(batch=100),
                "batch-500": lambda: self._relay(batch=500),
            },
            "consumers": {
                "single": lambda: self._consume("single", events),
                "many-200": lambda: self._consume("many", events),
                "ordered": lambda: self._consume("ordered", events),
            },
        }

    def _drain(self, name: str, count: int, *, processes: int = 1) -> float:
        with self.server.database() as dsn:
            _make_effects(dsn)
            fill(dsn, name, count)
            settle_down(dsn)
            return drain(dsn, [name], count, seconds=self.sizes.timeout_seconds, processes=processes)

    def _raw(self, role: str, count: int, **more: Any) -> float:
        with self.server.database() as dsn:
            _make_effects(dsn)
            fill(dsn, "noop", count)
            settle_down(dsn)
            return rate_of(role, seconds=self.sizes.timeout_seconds, dsn=dsn, count=count, **more)

    def _alone(self, role: str, count: int, **more: Any) -> float:
        with self.server.database() as dsn:
            settle_down(dsn)
            return rate_of(role, seconds=self.sizes.timeout_seconds, dsn=dsn, count=count, **more)

    def _relay(self, *, batch: int, topic: str = "bench.single") -> float:
        with self.server.database() as dsn:
            fill_outbox(dsn, topic, self.sizes.events)
            settle_down(dsn)
            seconds = self.sizes.timeout_seconds
            return rate_of("relay", seconds=seconds, dsn=dsn, count=self.sizes.events, batch=batch)

    def _consume(self, consumer: str, count: int) -> float:
        with self.server.database() as dsn:
            with Child("relay", dsn=dsn, count=count, batch=500) as relay:  # it registers the consumers first
                fill_outbox(dsn, f"bench.{consumer}", count)
                relay.tell(go=True)
                relay.hear("rate", seconds=self.sizes.timeout_seconds)
            settle_down(dsn)
            return drain(dsn, [f"consumer:{consumer}"], count, seconds=self.sizes.timeout_seconds)

    def _latency(self, answering: str, asking: str) -> list[float]:
        count = self.sizes.latency
        with self.server.database() as dsn:
            settle_down(dsn)
            with Child(answering, dsn=dsn) as worker, Child(asking, dsn=dsn, count=count) as client:
                worker.tell(go=True)
                client.tell(go=True)
                commits = client.hear("commits", seconds=self.sizes.timeout_seconds)["commits"]
                starts: dict[str, float] = {}
                while len(starts) < count:
                    said = worker.hear("starts", seconds=STRAGGLER_SECONDS)["starts"]
                    starts.update((key, at) for key, at in said.items() if key in commits)
        return [round((starts[key] - commits[key]) * 1000, 3) for key in commits]

    # -- peers --------------------------------------------------------------------------------------------------

    def prepare_peers(self, names: Sequence[str]) -> None:
        """Install what is needed; whoever cannot be had is left out with its reason."""
        ready = []
        for name in names:
            try:
                with Child("peer", name=name, cache=str(self.cache.resolve())) as child:
                    said = child.hear(seconds=PREPARE_SECONDS)
            except Failed as error:
                said = {"unavailable": str(error)}
            if "peer" in said:
                ready.append(name)
                self.figures.note("peers", name, said["peer"])
                print(f"{name} {said['peer'].get('version')}: ready", flush=True)
            else:
                self.figures.note("missing", name, short(str(said["unavailable"])))
                print(f"{name}: left out: {said['unavailable']}", flush=True)
        self.peers = ready

    def _peer(self, name: str, figure: str) -> Any:
        """A database of its own; the first time few jobs, to learn how many fill some seconds."""
        if figure == "latency":
            return self._ask_peer(name, figure, self.sizes.latency)
        most = self.sizes.jobs
        if (name, figure) not in self._peer_sizes:
            size = min(PEER_FIRST_SIZE, most)
            found = self._ask_peer(name, figure, size)
            if found is None:
                return None
            self._peer_sizes[name, figure] = max(size, min(most, int(found * PEER_TARGET_SECONDS)))
        return self._ask_peer(name, figure, self._peer_sizes[name, figure])

    def _ask_peer(self, name: str, figure: str, size: int) -> Any:
        seconds = self.sizes.timeout_seconds
        with self.server.empty_database() as dsn:
            settle_down(dsn)
            with Child(
                "peer", name=name, cache=str(self.cache.resolve()), figure=figure, dsn=dsn, size=size,
                timeout_seconds=seconds,
            ) as child:  # fmt: skip
                said = child.hear(seconds=seconds + KILL_AFTER_SECONDS)
        if "unavailable" in said:
            raise Failed(str(said["unavailable"]))
        values = [float(value) for value in said["values"]]
        if not values:
            return None
        return values if figure == "latency" else values[0]


def _make_effects(dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(EFFECTS_TABLE)


def _shown(value: Any) -> str:
    if isinstance(value, list):
        cuts = " / ".join(f"{percentile(value, share):.2f}" for share in (0.5, 0.95, 0.99))
        return f"{cuts} ms"
    return f"{value:,.0f}/s"
