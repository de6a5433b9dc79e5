"""A small application for real processes to run."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

from fastapi import APIRouter

from duly.app import Duly
from duly.db import Tx
from duly.jobs.handlers import JobContext
from duly.jobs.schedule import schedule

app = Duly()
router = APIRouter()


@app.job("sample.note")
async def note(_context: JobContext) -> None:
    """Do nothing, quickly."""


@app.job("sample.linger")
async def linger(_context: JobContext) -> None:
    """Outlast any patience."""
    await asyncio.sleep(600)


@router.get("/sample")
async def sample() -> dict[str, str]:
    """A route of the application's own."""
    return {"hello": "world"}


async def load_samples(tx: Tx) -> None:
    """What there is to look at: a timer far away."""
    await schedule(tx, "sample.linger", "sample", datetime(2100, 1, 1, tzinfo=UTC), on_conflict="keep")


app.include_router(router)
app.samples = load_samples
