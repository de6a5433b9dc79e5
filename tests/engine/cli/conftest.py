"""A data directory and its environment for the commands under test."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from duly.runtime.embedded import EmbeddedPostgres
from tests.engine.cli.commands import environment, free_port


@pytest.fixture
def home() -> Iterator[Path]:
    """A fresh data directory; a server that a killed command left behind is stopped."""
    directory = Path(tempfile.mkdtemp(prefix="duly-cli-"))
    yield directory
    EmbeddedPostgres.at(directory).stop(mode="immediate")
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def env(home: Path) -> dict[str, str]:
    """Commands on the embedded server of that directory."""
    return environment(DULY_DATA=str(home), PORT=str(free_port()))


@pytest.fixture
def server_env(dsn: str, home: Path) -> dict[str, str]:
    """Commands on a database of the test server, which runs without fsync."""
    return environment(DATABASE_URL=dsn, DULY_DATA=str(home), PORT=str(free_port()), DULY_ALLOW_UNSAFE_DATABASE="1")
