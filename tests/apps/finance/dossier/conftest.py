"""Two customers, a bank, and subscribers, as for notices."""

from __future__ import annotations

from tests.apps.finance.notices.conftest import payers

__all__ = ["payers"]
