"""A small application for real processes to run."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter

from duly.app import Duly
from duly.jobs.handlers import JobContext

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


app.include_router(router)
