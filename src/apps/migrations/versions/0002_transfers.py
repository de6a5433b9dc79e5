"""Transfers: products, offers of them, service requests, notices, and the hourly schedule."""

from __future__ import annotations

from duly.migrations import run_sql

revision = "0002_transfers"
down_revision = "0001_quality"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the schema."""
    run_sql(__file__, "up")


def downgrade() -> None:
    """Drop it."""
    run_sql(__file__, "down")
