"""Currencies: tables of exchange rates, and the schedules that fetch and forget them."""

from __future__ import annotations

from duly.migrations import run_sql

revision = "0005_currencies"
down_revision = "0004_commerce"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the schema."""
    run_sql(__file__, "up")


def downgrade() -> None:
    """Drop it."""
    run_sql(__file__, "down")
