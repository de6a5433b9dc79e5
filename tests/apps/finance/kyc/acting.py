"""An agent, people who are to be checked, a provider on a real socket, and what must be true whatever they did."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import httpx2
from fastapi import FastAPI

from apps.sandbox import bank, identity
from apps.sandbox.identity import Behaviour, Orders, Provider
from apps.wiring import app
from duly.db import Database
from duly.runtime.supervisor import create_server
from duly.settings import Settings
from duly.testing import BusinessClock, drain
from tests.apps.conftest import Api
from tests.engine.http.serving import listen
from tests.support import rows, value

# Each lists what is wrong; all are empty in a database that nobody can complain about.
INVARIANTS = {
    "an open session has no timer": """
        SELECT s.id FROM kyc.sessions s WHERE s.status IN ('PENDING', 'IN_PROGRESS') AND NOT EXISTS (
            SELECT 1 FROM duly.jobs j WHERE j.name = 'kyc.expire' AND j.entity_id = s.id::text)""",
    "the history is not that of the session": """
        SELECT s.id, s.status, h.to_status FROM kyc.sessions s
        LEFT JOIN kyc.history h ON h.session_id = s.id AND h.number = s.version
        WHERE h.to_status IS DISTINCT FROM s.status""",
    "a history has a gap": """
        SELECT h.session_id FROM kyc.history h GROUP BY 1 HAVING max(h.number) <> count(*)""",
    "the facts are not those of the session": """
        SELECT s.id, s.status, e.types FROM kyc.sessions s
        LEFT JOIN LATERAL (SELECT array_agg(l.type ORDER BY l.seq) AS types FROM duly.event_log l
                           WHERE l.topic = 'kyc.events' AND l.aggregate_id = s.id::text) AS e ON true
        WHERE e.types IS DISTINCT FROM CASE WHEN s.status IN ('PENDING', 'IN_PROGRESS')
            THEN ARRAY['kyc.session.created']
            ELSE ARRAY['kyc.session.created', 'kyc.session.' || lower(s.status)] END""",
}


def check_consistent(dsn: str) -> None:
    """F8: session, history, fact and timer are one commit, and a session ends once."""
    wrong = {rule: found for rule, query in INVARIANTS.items() if (found := rows(dsn, query))}
    assert not wrong, wrong


@contextlib.asynccontextmanager
async def serving_provider(provider: Provider, db: Database | None = None) -> AsyncIterator[str]:
    """The provider on a socket; its address."""
    served = FastAPI()
    served.state.db = db
    served.include_router(identity.create_router(provider))
    listener = listen()
    server = create_server(served, Settings(shutdown_grace_seconds=1))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}{identity.PATH}"
    finally:
        server.should_exit = True
        await task


@dataclass
class Desk:
    """Where people are checked."""

    api: Api
    db: Database
    dsn: str
    clock: BusinessClock
    provider: Provider

    @property
    def headers(self) -> dict[str, str]:
        return self.api.headers("agent", "compliance:kyc", "KYC_AGENT")

    async def try_create(self, body: Any, **headers: str) -> httpx2.Response:
        return await self.api.client.post("/v1/kyc/sessions", json=body, headers=self.headers | headers)

    async def create(self, user_id: str | None = None) -> dict[str, Any]:
        answer = await self.try_create({"userId": user_id or str(uuid4())})
        assert answer.status_code == 201, answer.text
        made: dict[str, Any] = answer.json()
        return made

    async def read(self, session: str) -> dict[str, Any]:
        answer = await self.api.client.get(f"/v1/kyc/sessions/{session}", headers=self.headers)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    async def visit(self, hosted_url: str) -> httpx2.Response:
        """A person opens the address that the agent gave; redirects are not followed."""
        return await self.api.client.get(hosted_url)

    async def start(self, made: dict[str, Any]) -> str:
        """The provider's page, as the person's browser finds it."""
        answer = await self.visit(made["hostedUrl"])
        assert answer.status_code == 303, answer.text
        return answer.headers["location"]

    async def submit(self, page: str, outcome: str = "APPROVED", **typed: str) -> httpx2.Response:
        """The person answers on the provider's page; the provider has called back when this returns."""
        return await self.api.client.post(page, data={"outcome": outcome, **typed})

    async def call(self, session: str, status: str, *, event_id: str | None = None, **more: Any) -> httpx2.Response:
        """The provider calls, properly signed."""
        said: dict[str, Any] = {"providerEventId": event_id or str(uuid4()), "clientRef": session, "status": status}
        if status in ("APPROVED", "REJECTED"):
            said["evidenceRef"] = f"ev_{uuid4().hex}"
        said = {name: given for name, given in (said | more).items() if given is not None}
        return await self.call_raw(json.dumps(said).encode())

    async def call_raw(self, body: bytes, *, provider: str = "sandbox", **headers: str) -> httpx2.Response:
        timestamp = int(self.clock.now().timestamp())
        signed = bank.sign(body, timestamp=timestamp, secret=identity.SECRET)
        return await self.api.client.post(f"/v1/webhooks/kyc/{provider}", content=body, headers=signed | headers)

    async def run(self, *, hours: float = 0) -> None:
        """Let time pass, and do what is due."""
        self.clock.advance(hours=hours)
        await drain(self.db, app.handlers)

    def order(self, behaviour: Behaviour, **more: Any) -> None:
        self.provider.orders = Orders(behaviour=behaviour, **more)

    def status(self, session: str) -> str:
        return str(value(self.dsn, "SELECT status FROM kyc.sessions WHERE id = %(id)s", {"id": session}))

    def check(self) -> None:
        check_consistent(self.dsn)


def facts_of(dsn: str, session: str) -> list[str]:
    """The types of its events, in order."""
    query = "SELECT type FROM duly.event_log WHERE aggregate_id = %(id)s AND topic = 'kyc.events' ORDER BY seq"
    return [kind for (kind,) in rows(dsn, query, {"id": session})]


def kept_of(dsn: str) -> list[tuple[Any, ...]]:
    """What is kept for a person: why, and of which session."""
    return rows(dsn, "SELECT problem, session_id::text FROM kyc.unmatched_callbacks ORDER BY id")


def subjects_of(dsn: str) -> list[str]:
    query = "SELECT subject FROM duly.alerts WHERE kind = 'application' AND resolved_at IS NULL ORDER BY subject"
    return [subject for (subject,) in rows(dsn, query)]
