"""What tests share: plain SQL on a fresh connection, handlers from functions, and real processes to kill."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

import psycopg

from duly.jobs.handlers import Handler, JobContext, read_signature
from tests.forking import Forked, execute


def rows(dsn: str, query: str, values: Mapping[str, Any] | None = None) -> list[tuple[Any, ...]]:
    """Run one query on a connection of its own."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        cursor = connection.execute(query.encode(), values)
        return cursor.fetchall() if cursor.description else []


def value(dsn: str, query: str, values: Mapping[str, Any] | None = None) -> Any:
    """The first column of the first row."""
    return rows(dsn, query, values)[0][0]


def handlers(*functions: Callable[..., Any], **options: Any) -> dict[str, Handler]:
    """Handlers named after their functions."""
    made = {}
    for function in functions:
        asked = read_signature(function, argument_types=[JobContext], what=function.__name__)
        made[function.__name__] = Handler(
            function.__name__,
            function,
            asked.tx_kind,
            asked.is_async,
            asked.takes_argument,
            tx_position=asked.tx_position,
            **options,
        )
    return made


def python(dsn: str, code: str, *, failpoints: str = "", env: Mapping[str, str] | None = None) -> Forked:
    """A real Python process on the database, with failpoints armed; the caller waits for it or kills it."""
    given = {**os.environ, "DATABASE_URL": dsn, "DULY_FAILPOINTS": failpoints, **(env or {})}
    return Forked(execute, textwrap.dedent(code), env=given)


def finish(process: Forked, timeout_seconds: float = 30) -> tuple[int, str]:
    """Wait for a process; its exit code (negative: the signal) and what it wrote."""
    out, err = process.communicate(timeout=timeout_seconds)
    return process.wait(), out + err
