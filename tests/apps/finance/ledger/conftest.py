"""A bookkeeper of the API."""

from __future__ import annotations

import pytest

from tests.apps.conftest import Api
from tests.apps.finance.ledger.acting import Books


@pytest.fixture
def books(api: Api) -> Books:
    """Somebody with every right in the ledger."""
    return Books(api)
