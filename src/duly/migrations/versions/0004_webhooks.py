"""Webhooks: who wants which events, what was sent and how it went, and what others sent us."""

from __future__ import annotations

from duly.migrations import run_sql

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the tables, two kinds of alert, and the schedules of the clean-up."""
    run_sql(__file__, "up")


def downgrade() -> None:
    """Drop them."""
    run_sql(__file__, "down")
