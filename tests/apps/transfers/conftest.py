"""Users of the API."""

from __future__ import annotations

import pytest

from tests.apps.conftest import Api
from tests.apps.transfers.acting import Users


@pytest.fixture
def users(api: Api) -> Users:
    """Anybody, by name."""
    return Users(api)
