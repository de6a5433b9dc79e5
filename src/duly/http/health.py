"""Whether this process lives, whether it can do its work, and its numbers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import asyncpg
import structlog
from alembic.script import ScriptDirectory
from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from duly.app import Migrations
from duly.auth.tokens import Verifier
from duly.clock import monotonic
from duly.db import Database
from duly.duty import Duty
from duly.operate import metrics as operate_metrics

log = structlog.get_logger("duly.health")
ANSWER_SECONDS = 2.0
GAUGES_SECONDS = 5.0
RETRY_AFTER_SECONDS = 2
MIGRATIONS = Path(__file__).parents[1] / "migrations"
READ_REVISION = "SELECT version_num FROM duly.%s"  # the table's name comes from the code


@dataclass(frozen=True)
class Check:
    """One thing that has to be right, in words without secrets: anybody may read them."""

    ok: bool
    detail: str
    is_needed: bool = True

    @property
    def is_fine(self) -> bool:
        """Whether the process can do its work as far as this goes."""
        return self.ok or not self.is_needed


class Readiness:
    """Asks the database on a connection of its own, so that a busy pool does not look like an outage."""

    def __init__(
        self,
        db: Database,
        duties: Sequence[Duty],
        own: Sequence[Migrations] = (),
        *,
        verifier: Verifier | None = None,
    ) -> None:
        self._db = db
        self._duties = duties
        self._verifier = verifier
        self._schemas = {"schema": Migrations(MIGRATIONS, "schema_version")}
        self._schemas |= {migrations.table.replace("_version", ""): migrations for migrations in own}
        self._connection: Any = None
        self._asking: asyncio.Task[dict[str, Check]] | None = None
        self._gauges_at = float("-inf")

    async def check(self) -> dict[str, Check]:
        """Every check by name. Probes that arrive together share one look."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._look())
        return await asyncio.shield(self._asking)

    async def refresh_gauges(self) -> None:
        """Read the queue's numbers; while the database is away the last ones stay, and duly_duty_up says why."""
        if monotonic() - self._gauges_at < GAUGES_SECONDS:
            return
        self._gauges_at = monotonic()
        try:
            async with asyncio.timeout(ANSWER_SECONDS), self._db.transaction() as tx:
                await operate_metrics.refresh(tx)
        except Exception as error:  # noqa: BLE001 - a scrape is answered whatever happens
            log.warning("gauges_not_refreshed", error=type(error).__name__)

    async def close(self) -> None:
        """End the connection politely."""
        if self._connection is not None:
            with contextlib.suppress(Exception):
                await self._connection.close(timeout=1)
        self._hang_up()

    def _hang_up(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.terminate()

    async def _look(self) -> dict[str, Check]:
        found = await self._look_at_database()
        for duty in self._duties:
            detail = duty.health.detail.partition(":")[0]  # the rest may quote the server: it is in the log
            found[duty.name] = Check(duty.health.up and detail != "starting", detail)
        if self._verifier is not None:
            found["identity"] = Check(*self._verifier.look(), is_needed=False)
        return found

    async def _look_at_database(self) -> dict[str, Check]:
        found = {"database": Check(True, "answers")}
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                for name, migrations in self._schemas.items():
                    revision = await self._read_revision(migrations.table)
                    found[name] = judge_revision(revision, migrations.directory)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer
            self._hang_up()
            late = isinstance(error, TimeoutError)
            reason = f"no answer within {ANSWER_SECONDS:g} s" if late else f"away ({type(error).__name__})"
            return {"database": Check(False, reason)}
        return found

    async def _read_revision(self, table: str) -> str | None:
        if self._connection is None or self._connection.is_closed():
            self._connection = await self._db.connect(
                application="duly-health", statement_timeout_seconds=ANSWER_SECONDS
            )
        try:
            revision: str | None = await self._connection.fetchval(READ_REVISION % table)
        except (asyncpg.UndefinedTableError, asyncpg.InvalidSchemaNameError):
            return None
        return revision


def judge_revision(revision: str | None, directory: Path = MIGRATIONS) -> Check:
    """Whether this code works on that schema; a newer one only expands, so the last release runs on it."""
    head, known = _revisions(directory)
    if revision == head:
        return Check(True, "current")
    if revision is None:
        return Check(False, "missing: run `duly migrate`")
    if revision in known:
        return Check(False, f"{revision} is older than this code ({head}): run `duly migrate`")
    return Check(True, f"{revision} is newer than this code ({head})")


@cache
def _revisions(directory: Path) -> tuple[str | None, frozenset[str]]:
    scripts = ScriptDirectory(str(directory))
    return scripts.get_current_head(), frozenset(script.revision for script in scripts.walk_revisions())


def create_health_router(readiness: Readiness) -> APIRouter:
    """The three endpoints that no one signs in for."""
    router = APIRouter(tags=["health"])

    @router.get("/healthz")
    async def healthz() -> dict[str, str]:
        """Alive: answers without asking anybody."""
        return {"status": "alive"}

    @router.get("/readyz", responses={503: {"description": "Something this process needs is missing"}})
    async def readyz() -> JSONResponse:
        """Ready: the database answers, the schema fits, and every duty does its work.

        The identity provider is said, and is no reason to be unready: every process has the same one, known keys go
        on working, and so do webhooks and those who are signed in.
        """
        return _readiness_response(await readiness.check())

    @router.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Numbers in the text format of Prometheus; those of the queue are a few seconds old at most."""
        await readiness.refresh_gauges()
        return Response(generate_latest(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    return router


def _readiness_response(checks: dict[str, Check]) -> JSONResponse:
    body = {"checks": {name: {"ok": check.ok, "detail": check.detail} for name, check in checks.items()}}
    wrong = [f"{name}: {check.detail}" for name, check in checks.items() if not check.is_fine]
    headers = {"Cache-Control": "no-store"}
    if not wrong:
        return JSONResponse({"status": "ready", **body}, headers=headers)
    problem = {"type": "about:blank", "title": "Not ready", "status": 503, "detail": "; ".join(wrong), **body}
    headers["Retry-After"] = str(RETRY_AFTER_SECONDS)
    return JSONResponse(problem, status_code=503, headers=headers, media_type="application/problem+json")
