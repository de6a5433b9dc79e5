"""Customers of the API."""

from __future__ import annotations

import pytest

from tests.apps.commerce.acting import Customers
from tests.apps.conftest import Api


@pytest.fixture
def shop(api: Api) -> Customers:
    """Anybody, by name."""
    return Customers(api)
