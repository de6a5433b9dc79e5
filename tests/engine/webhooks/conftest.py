"""Webhooks on the test's database."""

from __future__ import annotations

import pytest

from duly.db import Database
from tests.engine.webhooks.hooks import Hooks


@pytest.fixture
def hooks(db: Database, dsn: str) -> Hooks:
    """With the usual settings."""
    return Hooks(db, dsn)
