"""An office that decides."""

from __future__ import annotations

import pytest

from tests.apps.conftest import Api
from tests.apps.finance.decisions.acting import Office


@pytest.fixture
def office(api: Api) -> Office:
    """An administrator and a caller."""
    return Office(api)
