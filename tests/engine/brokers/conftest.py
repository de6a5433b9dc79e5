"""A broker for the tests of this directory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.outbox.broker import Broker, running_broker


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    """One that is running."""
    with running_broker(tmp_path) as made:
        yield made
