"""HTTP clients: they order, cancel, nudge and note, retry with the same key, send duplicates, and write the history."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2

from tests.chaos.app import EXTRAS
from tests.chaos.history import History
from tests.chaos.world import World

TIMEOUT_SECONDS = 4.0
TRIES = 3
FAILS = frozenset({400, 404, 409, 413, 422})  # certain: nothing was kept
REMEMBERED = 200


@dataclass(frozen=True)
class Mix:
    """What clients do, and how often: weights."""

    order: int = 10
    cancel: int = 2
    nudge: int = 2
    note: int = 2
    reuse: int = 1
    explode: int = 1
    extras: Sequence[str] = tuple(f"chaos.{name}" for name in EXTRAS)
    accounts: int = 12
    entities: int = 6
    timer_ms: tuple[int, int] = (200, 2500)
    duplicates: float = 0.15
    pause_seconds: float = 0.35

    def kinds(self) -> dict[str, int]:
        """The weights by kind."""
        return {name: getattr(self, name) for name in ("order", "cancel", "nudge", "note", "reuse", "explode")}


@dataclass(frozen=True)
class Call:
    """One logical operation, however often it is sent."""

    op: str
    kind: str
    path: str
    body: dict[str, Any]
    key: str | None
    facts: dict[str, Any] = field(default_factory=dict)


class Clients:
    """All clients of a run; what they do comes from the seed, when they do it does not."""

    def __init__(self, world: World, history: History, *, seed: int, mix: Mix) -> None:
        self.world, self.history, self.mix = world, history, mix
        self.open: dict[str, Call] = {}  # not settled yet
        self._seed = seed
        self._placed: list[Call] = []
        self._number = 0
        self._stop = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, count: int) -> None:
        """So many clients at once."""
        self._tasks = [asyncio.create_task(self._client(number)) for number in range(count)]

    async def stop(self) -> None:
        """No new operations; what is under way ends or times out."""
        self._stop.set()
        await asyncio.gather(*self._tasks)

    async def resolve(self, *, seconds: float) -> int:
        """After the heal: send what is unsettled again until it is settled; how many never were."""
        deadline = time.monotonic() + seconds
        async with self._session() as session:
            while self.open and time.monotonic() < deadline:
                for call in list(self.open.values()):
                    await self._attempt(session, call)
                await asyncio.sleep(0.2)
        return len(self.open)

    async def order(self, op: str, **body: Any) -> None:
        """One order of a fault's or scenario's own, with the usual retries."""
        call = Call(op, "order", "/orders", {"op": op, "account": "a1", **body}, op, _facts(body))
        async with self._session() as session:
            await self._perform(session, call)

    def _session(self) -> httpx2.AsyncClient:
        limits = httpx2.Limits(max_connections=8, max_keepalive_connections=2, keepalive_expiry=1.0)
        return httpx2.AsyncClient(
            base_url=self.world.url, timeout=TIMEOUT_SECONDS, limits=limits, trust_env=False, verify=False
        )

    async def _client(self, number: int) -> None:
        rng = random.Random(f"{self._seed} client {number}")
        kinds = self.mix.kinds()
        async with self._session() as session:
            while not self._stop.is_set():
                kind = rng.choices(list(kinds), weights=list(kinds.values()))[0]
                call = self._make(rng, kind)
                if call is not None:
                    copies = rng.randint(2, 4) if call.key and rng.random() < self.mix.duplicates else 1
                    await self._perform(session, call, copies=copies)
                await asyncio.sleep(rng.uniform(0.2, 1.8) * self.mix.pause_seconds)

    def _make(self, rng: random.Random, kind: str) -> Call | None:
        self._number += 1
        op = f"{kind}-{self._number}"
        if kind in ("order", "explode"):
            extra = rng.choice(self.mix.extras) if self.mix.extras else ""
            body = {
                "op": op, "account": f"a{rng.randint(1, self.mix.accounts)}", "extra": extra,
                "timer_ms": rng.randint(*self.mix.timer_ms), "explode": kind == "explode",
            }  # fmt: skip
            return Call(op, kind, "/orders", body, op, _facts(body))
        if kind == "nudge":
            body = {"op": op, "entity": f"u{rng.randint(1, self.mix.entities)}"}
            return Call(op, kind, "/nudges", body, op, {"entity": body["entity"]})
        if kind == "note":
            return Call(op, kind, "/notes", {"op": op}, None)
        if not self._placed:
            return None
        placed = rng.choice(self._placed)
        if kind == "cancel":
            return Call(op, kind, f"/orders/{placed.op}/cancel", {"op": op}, op, {"target": placed.op})
        return Call(op, kind, placed.path, {**placed.body, "timer_ms": 1 + placed.body.get("timer_ms", 500)}, placed.op)

    async def _perform(self, session: httpx2.AsyncClient, call: Call, *, copies: int = 1) -> None:
        self.history.write("invoke", call.op, call.kind, key=call.key, **call.facts)
        if call.kind == "reuse":
            await self._attempt(session, call)
            return
        self.open[call.op] = call
        for attempt in range(TRIES if call.key else 1):
            await asyncio.gather(*(self._attempt(session, call) for _ in range(copies)))
            if call.op not in self.open:
                return
            await asyncio.sleep(0.1 * 2**attempt)
        if call.key is None:
            del self.open[call.op]  # without a key nobody may send it again: it stays unknown

    async def _attempt(self, session: httpx2.AsyncClient, call: Call) -> None:
        headers = {"Idempotency-Key": call.key} if call.key else {}
        try:
            answer = await session.post(call.path, json=call.body, headers=headers)
        except httpx2.TransportError as error:
            self.history.write("info", call.op, call.kind, error=type(error).__name__)
            return
        if answer.status_code < 300:
            replayed = answer.headers.get("idempotent-replayed") == "true"
            self.history.write("ok", call.op, call.kind, body=answer.text, replayed=replayed)
            if call.kind == "order" and call.op in self.open:
                self._placed.append(call)
                del self._placed[:-REMEMBERED]
            self.open.pop(call.op, None)
        elif answer.status_code in FAILS:
            self.history.write("fail", call.op, call.kind, status=answer.status_code)
            self.open.pop(call.op, None)
        else:
            self.world.replies_503 += answer.status_code == 503 and "retry-after" in answer.headers
            self.history.write("info", call.op, call.kind, status=answer.status_code)


def _facts(body: dict[str, Any]) -> dict[str, Any]:
    return {"extra": body.get("extra", ""), "account": body.get("account", "a1"), "poison": body.get("poison", False)}
